"""Creates Python interpreters for single hosts, each with its own path, layout and adjustable clock."""

from __future__ import annotations

import sysconfig
import venv

from netns import Host

#: Module that interpreters of ``own_python`` import at start: it shifts time.time() by an offset that is read from a
#: file ten times a second.
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
    """Create an interpreter in the host's home folder and return its path on the host.

    The interpreter has all packages of the tests' Python and an adjustable clock.
    If ``conda`` is true, the interpreter's folder looks like a conda prefix instead of a virtual environment.
    """
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
    """Set the clock of all interpreters made by ``own_python`` to ``seconds`` ahead of the true time."""
    (host.folder / "home/.clock").write_text(f"{seconds:+g}")
