"""Ctrl-C, SIGTERM and SIGHUP: the first one winds the run down, the second leaves at once."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_ECHO = 0.5  # seconds
_SHOW_CURSOR = b"\x1b[?25h"


class Interrupts:
    """While entered, the first signal raises KeyboardInterrupt in the main thread.

    The second prints ``last_words`` and ends the program with status 130; one that comes within
    half a second is an echo of the first (a wrapper script passing it on). A signal that was
    ignored before (``nohup``) stays ignored.
    """

    def __init__(self) -> None:
        self.meaning = "interrupted; nothing had been started on the nodes"  #: of the first signal, now
        self.last_words = ""
        self._first = 0.0
        self._before: dict[int, Any] = {}
        self._terminals = [stream for stream in (0, 1, 2) if os.isatty(stream)]

    def __enter__(self) -> Interrupts:
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            _silence(self._terminals)
        now = time.monotonic()
        if not self._first:
            self._first = now
            raise KeyboardInterrupt
        if now - self._first < _ECHO:
            return
        if sys.stdout.isatty():
            os.write(sys.stdout.fileno(), _SHOW_CURSOR)  # the progress at the bottom has hidden it
        os.write(sys.stderr.fileno(), f"\n{self.last_words or 'interrupted again: leaving at once'}\n".encode())
        os._exit(130)


def _silence(streams: Sequence[int]) -> None:
    """The terminal is gone: what is still printed goes nowhere, so that printing cannot fail."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in streams:
        os.dup2(nowhere, stream)
