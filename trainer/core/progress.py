"""Progress of long loops with the estimated remaining time, as lines of text for the caller."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

_INTERVAL = 10.0  #: seconds between two lines

_reporter: ContextVar[_Reporter | None] = ContextVar("reporter", default=None)


@dataclass
class _Reporter:
    say: Callable[[str], None]
    loop: str = ""
    begun: float = 0.0  #: when the loop began
    said: float = 0.0  #: when its last line was said


@contextmanager
def reporting(say: Callable[[str], None]) -> Iterator[None]:
    """In the ``with`` block, pass lines like ``write edges: 35%, about 40 s left`` to ``say``, at most every 10 s."""
    token = _reporter.set(_Reporter(say))
    try:
        yield
    finally:
        _reporter.reset(token)


def progress(loop: str, done: int, total: int) -> None:
    """Report that ``done`` of ``total`` iterations of a loop are done. Call it with ``done`` = 0 at the start."""
    if (at := _reporter.get()) is None:
        return
    now = time.monotonic()
    if loop != at.loop or done <= 0:
        at.loop, at.begun, at.said = loop, now, now
    if now - at.said >= _INTERVAL and 0 < done < total:
        at.said = now
        left = (now - at.begun) * (total - done) / done
        at.say(f"        {loop}: {done / total:.0%}, about {left:.0f} s left")
