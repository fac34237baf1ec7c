"""Interpreters of a host's own: another path, another layout, and a clock that can be set."""

from __future__ import annotations

import sysconfig
import venv

from netns import Host

#: A module for a host's own Python: time.time() with an offset that is read anew ten times a second.
CLOCK = """
import os, time
_real, _ticks, _file = time.time, time.monotonic, {file!r}
_read, _offset = 0.0, 0.0

def _time():
    global _read, _offset
    if _ticks() - _read > 0.1:
        _read = _ticks()
        try:
            with open(_file) as file:
                _offset = float(file.read() or 0)
        except (OSError, ValueError):
            pass  # being written
    return _real() + _offset

time.time = _time
"""


def own_python(host: Host, folder: str = "venv", *, conda: bool = False) -> str:
    """Path on the host of an interpreter in its home folder, with all that ours has and a clock of its own;
    a virtual environment, or laid out like a conda prefix."""
    top = host.folder / "home" / folder
    venv.create(top, symlinks=True)
    (site,) = top.glob("lib/python*/site-packages")
    (site / "ours.pth").write_text(f"{sysconfig.get_path('purelib')}\nimport gnnfleet_clock\n")
    (site / "gnnfleet_clock.py").write_text(CLOCK.format(file=f"{host.home}/.clock"))
    if conda:
        (top / "conda-meta").mkdir(exist_ok=True)
        (top / "conda-meta/history").touch()
    return f"{host.home}/{folder}/bin/python"


def set_clock(host: Host, seconds: float) -> None:
    """Put the clock of the host's own interpreters forward (or back) by that much, at any time."""
    (host.folder / "home/.clock").write_text(f"{seconds:+g}")
