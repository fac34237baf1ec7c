"""``report.html`` of a run folder, made and written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from launcher.files import write_whole
from launcher.report.html.record import read_record
from launcher.report.html.render import render
from launcher.report.html.sections import report_page

NAME = "report.html"


def write_html(folder: Path, dest: Path | None = None, *, runs_dirs: Sequence[Path] = ()) -> Path:
    """Write the report of ``folder``, by default into it; where it is now. It may hold log lines of the user's, so
    only he may read it. Raises FleetError when it cannot be made, OSError when it cannot be written."""
    place = dest or folder / NAME
    write_whole(place, render(report_page(read_record(folder, runs_dirs=runs_dirs))), private=True)
    return place
