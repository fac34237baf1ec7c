"""Progress of long loops with the estimated remaining time, as lines of text for the caller."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_INTERVAL = 10.0  #: seconds between two lines

_reporter: ContextVar[_Reporter | None] = ContextVar("reporter", default=None)


class _Reporter:
    def __init__(self, say: Callable[[str], None]) -> None:
        self.say, self.loop, self.begun, self.said = say, "", 0.0, 0.0

    def tell(self, loop: str, done: int, total: int) -> None:
        now = time.monotonic()
        if loop != self.loop or done <= 0:
            self.loop, self.begun, self.said = loop, now, now
        if now - self.said < _INTERVAL or not 0 < done < total:
            return
        self.said = now
        left = (now - self.begun) * (total - done) / done
        self.say(f"        {loop}: {done / total:.0%}, about {left:.0f} s left")


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
    if (reporter := _reporter.get()) is not None:
        reporter.tell(loop, done, total)
