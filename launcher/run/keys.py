"""Single keys of the terminal, without Enter, while a question is open."""

from __future__ import annotations

import os
import select
import sys
import termios
import tty
from types import TracebackType
from typing import Any


class Keys:
    """While entered, keys are read as they are pressed and not echoed; Ctrl-C stays a signal."""

    def __init__(self, stream: int | None = None):
        self.stream = sys.stdin.fileno() if stream is None else stream
        self._before: list[Any] | None = None

    def __enter__(self) -> Keys:
        self._before = termios.tcgetattr(self.stream)
        tty.setcbreak(self.stream, termios.TCSADRAIN)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        if self._before is not None:
            termios.tcsetattr(self.stream, termios.TCSADRAIN, self._before)
            self._before = None

    def pressed(self) -> str:
        """What has been typed by now; '' for nothing. End of file counts as Enter."""
        if not select.select([self.stream], [], [], 0.0)[0]:
            return ""
        return os.read(self.stream, 64).decode(errors="replace") or "\n"
