"""Runs launch.py in its own pseudo-terminal: waits for output and types keys."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping
from pathlib import Path

from launching import REPOSITORY
from waiting import DEADLINE

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")


class Terminal:
    """A process of ``launch.py words…`` in a terminal of ``columns`` x ``lines``.

    As a context manager, it kills the process at the end.
    """

    def __init__(self, *words: str, cwd: Path, env: Mapping[str, str], columns: int = 160, lines: int = 40):
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        environment = {**env, "TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": str(lines)}
        self.process = subprocess.Popen(
            [sys.executable, str(REPOSITORY / "launch.py"), *words],
            cwd=cwd, env=environment, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(theirs)
        self._raw = b""

    @property
    def shown(self) -> str:
        """Return all output so far, without escape sequences."""
        return _ESCAPES.sub("", self._raw.decode("utf-8", "replace"))

    def read(self, seconds: float) -> bool:
        """Wait at most ``seconds`` for output and read it. Returns False once the program has closed the terminal."""
        if not select.select([self._ours], [], [], seconds)[0]:
            return True
        try:
            data = os.read(self._ours, 65536)
        except OSError:  # EIO: no process has the terminal open
            return False
        self._raw += data
        return bool(data)

    def await_text(self, text: str, timeout: float = DEADLINE) -> Terminal:
        deadline = time.monotonic() + timeout
        while text not in self.shown:
            if not self.read(0.2) or time.monotonic() > deadline:
                raise AssertionError(f"the terminal has not shown {text!r}:\n{self.shown}")
        return self

    def type(self, keys: str) -> Terminal:
        os.write(self._ours, keys.encode())
        return self

    def end(self, timeout: float = DEADLINE) -> int:
        deadline = time.monotonic() + timeout
        while self.read(0.2):
            if time.monotonic() > deadline:
                raise AssertionError(f"launch.py has not ended within {timeout:g} s:\n{self.shown}")
        return self.process.wait(10)

    def hang_up(self) -> None:
        os.close(self._ours)
        self._ours = -1

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        if self._ours >= 0:
            os.close(self._ours)
