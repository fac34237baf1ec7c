"""Writes the output of a process as time-stamped log lines; remembers the last lines and the first traceback."""

from __future__ import annotations

import os
import re
import time
from collections import deque

from launcher.node.record import stamp
from launcher.node.regular_file import open_at_once

MAX_LINE = 64 * 1024  #: bytes; a longer line is split

SNAPSHOT_EVERY = 10.0  #: seconds between two logged states of a progress bar

_TAIL = 40  # last lines kept in memory

_MAX_TAIL = 2000  # characters kept of a line of the tail, which is part of each outcome

_HEADER = re.compile(r"^[ |+]*(Exception Group )?Traceback \(most recent call last\):")

_CHAIN = re.compile(r"^[ |+]*(During handling of the above exception|The above exception was the direct cause)")

_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?")  # added to each line by torch.distributed's excepthook

_FATAL = re.compile(r"^Fatal Python error: ")

_CRASHED_THREAD = re.compile(r"^Current thread .*\(most recent call first\):")

_CRASH_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')

_MAX_TRACEBACK = 400  # lines

_MAX_MESSAGE = 10  # lines of an exception's message after the first, indented ones not counted


class TracebackFinder:
    """Keeps the first Python traceback in lines of output, with all its chained exceptions."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._state = "before"  # states: before, frames, message, gap (the blank line after a message), chained, after
        self._message_lines = 0

    def feed(self, line: str) -> None:
        if self._state == "after":
            return
        line = _RANK_PREFIX.sub("", line)
        self._state = getattr(self, f"_{self._state}")(line)
        if len(self.lines) >= _MAX_TRACEBACK:
            self._state = "after"

    def _before(self, line: str) -> str:
        if not _HEADER.match(line):
            return "before"
        self.lines.append(line)
        return "frames"

    def _frames(self, line: str) -> str:
        self.lines.append(line)
        if not line or line[0] in " |+":
            return "frames"
        self._message_lines = 0
        return "message"

    def _message(self, line: str) -> str:
        if not line.strip():
            return "gap"
        self._message_lines += not line.startswith(" ")
        if _HEADER.match(line) or self._message_lines > _MAX_MESSAGE:
            return "after"
        self.lines.append(line)
        return "message"

    def _gap(self, line: str) -> str:
        if not _CHAIN.match(line):
            return "after"
        self.lines += ["", line]
        return "chained"

    def _chained(self, line: str) -> str:
        self.lines.append(line)
        return "frames" if _HEADER.match(line) else "chained"


class _CrashFinder:
    """Keeps the stack that faulthandler prints when a process crashes (PYTHONFAULTHANDLER)."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._inside = False

    def feed(self, line: str) -> None:
        if _FATAL.match(line):
            self.lines, self._inside = [line], False
        elif self.lines and _CRASHED_THREAD.match(line):
            self.lines.append(line)
            self._inside = True
        elif self._inside:
            self._inside = line.startswith("  ") and len(self.lines) < _MAX_TRACEBACK
            self.lines += [line] if self._inside else []

    @property
    def innermost(self) -> str:
        """The innermost frame of the stack, as ``in load() at data.py:17``; '' if no frame was printed."""
        frame = next(filter(None, map(_CRASH_FRAME.match, self.lines)), None)
        return f"in {frame[3]}() at {frame[1]}:{frame[2]}" if frame else ""


class LineLog:
    """A log file for the output of a process, given as raw bytes; each line is written at once, with a time stamp.

    Of a line redrawn with carriage returns, only the last state is written. Invalid UTF-8 is replaced by U+FFFD. Lines
    that cannot be written (full disk) are dropped; the log later says how many.
    """

    def __init__(self, path: str) -> None:
        self.tail: deque[str] = deque(maxlen=_TAIL)
        self.traceback = TracebackFinder()
        self.crash = _CrashFinder()
        self._file = open_at_once(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._partial = b""
        self._redrawn = False
        self._last_snapshot = time.monotonic()
        self._unwritten = 0

    def feed(self, data: bytes) -> None:
        *whole, rest = (self._partial + data).split(b"\n")
        self._redrawn = b"\r" in rest or (self._redrawn and not whole)
        *over, self._partial = _pieces(_last_state(rest))
        self._emit([piece for line in whole for piece in _pieces(_last_state(line).rstrip(b"\r"))] + over)
        now = time.monotonic()
        if self._redrawn and now - self._last_snapshot >= SNAPSHOT_EVERY:
            self._last_snapshot = now
            self._emit([self._partial.rstrip(b"\r")])

    def close(self) -> None:
        if self._partial:
            self._emit([self._partial.rstrip(b"\r")])
            self._partial = b""
        os.close(self._file)

    def _emit(self, lines: list[bytes]) -> None:
        if not lines:
            return
        prefix = stamp(time.time())
        texts = [line.decode("utf-8", "replace") for line in lines]
        for text in texts:
            self.tail.append(text if len(text) <= _MAX_TAIL else f"{text[:_MAX_TAIL]}…")
            self.traceback.feed(text)
            self.crash.feed(text)
        data = "".join(f"{prefix} {text}\n" for text in texts).encode("utf-8")
        if self._unwritten:
            data = f"{stamp(time.time())} [{self._unwritten} lines could not be written here]\n".encode() + data
        try:
            while data:
                data = data[os.write(self._file, data) :]
            self._unwritten = 0
        except OSError:  # a full disk must not block the process that writes the output
            self._unwritten += len(texts)


def _last_state(line: bytes) -> bytes:
    """Return the last state of a line redrawn with carriage returns. Carriage returns at its end are kept."""
    return line[line.rstrip(b"\r").rfind(b"\r") + 1 :]


def _pieces(line: bytes) -> list[bytes]:
    """Split ``line`` into pieces of at most MAX_LINE bytes, without splitting a UTF-8 character."""
    pieces = []
    while len(line) > MAX_LINE:
        cut = MAX_LINE
        while cut > MAX_LINE - 4 and line[cut] & 0xC0 == 0x80:
            cut -= 1
        pieces.append(line[:cut])
        line = line[cut:]
    return [*pieces, line]
