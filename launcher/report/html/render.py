"""Renders a report page as one self-contained HTML file that makes no requests.

The template escapes texts from logs, hosts and configs; this file escapes texts that plotly draws.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from launcher.errors import FleetError
from launcher.files import atomic_file, write_whole
from launcher.report.html.page import Chart, ReportPage
from launcher.report.html.record import read_record
from launcher.report.html.sections import report_page
from launcher.report.metrics import Metrics, metrics_files, read_metrics
from launcher.report.report import RunReport


def write_report(report: RunReport) -> None:
    """Read the metrics of all ranks, and write the files of the report. Each failure becomes a note in the report."""
    files = metrics_files(report.folder)
    try:
        with atomic_file(report.folder / "metrics.jsonl") as merged:
            report.metrics = read_metrics(files, merged)
    except OSError as error:
        report.notes.append(_unwritten(report, error))
        report.metrics = read_metrics(files)
    try:
        report.metrics = report.metrics.analysed()
    except FleetError as error:
        report.notes.append(str(error))
    try:
        report.write()
    except OSError as error:
        report.notes.append(_unwritten(report, error))
        return
    try:
        write_html(report.folder, metrics=report.metrics)
    except Exception as error:  # also of a bug: the report must still be printed
        why = error if isinstance(error, FleetError) else f"{type(error).__name__}: {error}"
        report.notes.append(f"report.html could not be created: {why}")


def _unwritten(report: RunReport, error: OSError) -> str:
    return f"the report could not be written: {error.filename or report.folder}: {error.strerror}"


_HERE = Path(__file__).parent

_TEXTS = frozenset({"name", "x", "y", "text", "customdata", "categoryarray"})  # plotly keys with text from a run

_LONGEST = 160  # longest text in a chart, in characters


def render(page: ReportPage, *, live: str = "") -> str:
    """Render the whole HTML file.

    ``live``: URL path at which an open page asks for new content; '' for a file that does not change.
    """
    text = json.dumps([figure(chart) for chart in page.charts], separators=(",", ":"))
    return str(
        _template("report.html.j2").render(
            page=page,
            live=live,
            style=_own("report.css"),
            program=_own("report.js"),
            library=_library(),
            # JSON that is safe within a script element
            figures=text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"),
        )
    )


def render_main(page: ReportPage) -> str:
    """Render the content between header and footer, which ``gnnfleet report --watch`` updates in open pages."""
    return str(_template("main.html.j2").render(page=page))


def figure(chart: Chart) -> dict[str, Any]:
    """Return a chart in the form that report.js reads. NaN and infinity become null: a gap in a curve."""
    data = [_cleaned(trace) for trace in chart.data]
    return {"key": chart.key, "height": chart.height, "data": data, "layout": _cleaned(chart.layout)}


def _cleaned(value: Any, key: str = "") -> Any:
    if isinstance(value, Mapping):
        return {name: _cleaned(each, name) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_cleaned(each, key) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if not isinstance(value, str) or key not in _TEXTS:
        return value
    short = value if len(value) <= _LONGEST else f"{value[: _LONGEST - 1]}…"
    return short.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")  # plotly interprets some HTML tags


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
    """Return plotly.js (5 MB), compressed to 2 MB and encoded in base64. Does not import plotly, which is slow."""
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


def write_html(
    folder: Path, dest: Path | None = None, *, runs_dirs: Sequence[Path] = (), idle: float = 0.0,
    metrics: Metrics | None = None,
) -> Path:  # fmt: skip
    """Write the report of the run in ``folder`` to ``dest`` (default: ``folder/report.html``) and return its path.

    The file has mode 0600, as it may contain log lines. ``runs_dirs``: further folders in which to look for the run
    that this run resumed. ``idle``, ``metrics``: as of ``read_record``. Raises
    FleetError if the report cannot be built, OSError if it cannot be written.
    """
    path = dest or folder / "report.html"
    write_whole(
        path, render(report_page(read_record(folder, runs_dirs=runs_dirs, idle=idle, metrics=metrics))), private=True
    )
    return path
