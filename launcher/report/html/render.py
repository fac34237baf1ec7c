"""Renders a report page as one self-contained HTML file that loads nothing.

Texts of logs, hosts and configs are escaped, by the template or, where plotly draws them, here; and the page's own
policy (Content-Security-Policy) forbids every request, so that a text that slipped through can fetch and send nothing.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from launcher.errors import FleetError
from launcher.files import write_whole
from launcher.report.html.page import Chart, ReportPage
from launcher.report.html.record import read_record
from launcher.report.html.sections import report_page
from launcher.report.report import RunReport, _analysed


def written(report: RunReport) -> RunReport:
    """Analyse the metrics, write the report's files; returns it with notes on what failed, as its words still count."""
    report = _analysed(report)
    try:
        report.write()
    except OSError as error:
        note = f"the report could not be written: {error.filename or report.folder}: {error.strerror}"
        return replace(report, notes=(*report.notes, note))
    return _with_html(report)


def _with_html(report: RunReport) -> RunReport:
    """With report.html in its folder. A picture must not cost a run its words, so whatever fails here is a note."""
    pass

    try:
        write_html(report.folder)
    except Exception as error:  # noqa: BLE001
        why = error if isinstance(error, FleetError) else f"{type(error).__name__}: {error}"
        return replace(report, notes=(*report.notes, f"report.html was not made: {why}"))
    return report


_HERE = Path(__file__).parent

_TEXTS = frozenset({"name", "x", "y", "text", "customdata", "categoryarray"})  # what may come from a run

_LONGEST = 160  # characters of a text in a chart


def render(page: ReportPage, *, live: str = "") -> str:
    """The file; ``live``: where its newest content is asked for again and again, '' in a file that is kept."""
    return str(
        _template("report.html.j2").render(
            page=page,
            live=live,
            style=_own("report.css"),
            program=_own("report.js"),
            library=_library(),
            figures=figures_json(page),
        )
    )


def render_main(page: ReportPage) -> str:
    """What stands between header and footer, for a page that is open."""
    return str(_template("main.html.j2").render(page=page))


def figures_json(page: ReportPage) -> str:
    """All charts, safe within a script element."""
    text = json.dumps([figure(chart) for chart in page.charts], separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def figure(chart: Chart) -> dict[str, Any]:
    """As the page's program takes it; numbers that JSON does not know are gaps."""
    data = [_cleaned(trace) for trace in chart.data]
    return {"key": chart.key, "height": chart.height, "data": data, "layout": _cleaned(chart.layout)}


def _cleaned(value: Any, key: str = "") -> Any:
    if isinstance(value, Mapping):
        return {name: _cleaned(each, name) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_cleaned(each, key) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return _escaped(value) if isinstance(value, str) and key in _TEXTS else value


def _escaped(text: str) -> str:
    """Plotly reads a few tags in texts."""
    short = text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
    return short.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


@cache
def _template(name: str) -> Any:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader(_HERE)
    made = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return made.get_template(name)


@cache
def _own(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


@cache
def _library() -> str:
    """plotly.js, compressed: 2 MB instead of 5. The package is not imported, which would take a second."""
    spec = find_spec("plotly")
    places = (
        [Path(place) / "package_data" / "plotly.min.js" for place in (spec.submodule_search_locations or ()) if spec]
        if spec
        else []
    )
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        raise FleetError("reports need the package plotly, which draws their charts: pip install plotly")
    return base64.b64encode(gzip.compress(file.read_bytes(), 6, mtime=0)).decode()


NAME = "report.html"


def write_html(folder: Path, dest: Path | None = None, *, runs_dirs: Sequence[Path] = ()) -> Path:
    """Write the report of ``folder``, by default into it; where it is now. It may hold log lines of the user's, so
    only he may read it. Raises FleetError when it cannot be made, OSError when it cannot be written."""
    place = dest or folder / NAME
    write_whole(place, render(report_page(read_record(folder, runs_dirs=runs_dirs))), private=True)
    return place
