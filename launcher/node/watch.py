"""Follows a node's run folder: ``watch.py RUN_DIR [--offsets JSON] [--once]``, one JSON line per new thing.

``{"file": "logs/rank0.log", "offset": n, "lines": [...]}`` new complete lines of a log, metrics or events
file; n is the byte offset after them, so ``--offsets '{"logs/rank0.log": n}'`` goes on from there.
``{"state": {...}}`` state.json as it changes (each heartbeat). ``{"quiet": s}`` nothing new for s seconds.
``{"result": {...}}`` last, after all lines; exit 0.
``{"lost": {"reason", "state"}}`` last: the supervisor is gone without a result; exit 3. Exit 1 when nobody reads.
With ``--once`` it tells what there is, then ``{"now": t}`` (this node's clock), then result or lost if there is one.
``--only`` takes patterns of files to tell, ``--since`` and ``--tail`` leave out old lines.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import select
import stat
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, BinaryIO

if not __package__:  # run as a file: make the package above importable
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from launcher.node import procs
from launcher.node.json_reader import METRIC, RESULT, STATE, checked, json_object, record_in
from launcher.node.record import stamp

LOST = 3  #: exit status when the supervisor is gone without a result

_EVENTS = "events.jsonl"

_CHUNK = 1 << 18  # bytes of one file at once

_LONGEST = 1 << 23  # bytes of a line; of a longer one each piece of that size is told as a line

_FASTEST, _SLOWEST = 0.2, 1.0  # seconds between two looks

_SMALL_FILE = 1 << 14  # bytes; what a supervisor leaves at its end takes about that

_QUIET = 3.0  # seconds without news after which the line is shown to stand

_START_WAIT = 60.0  # seconds a supervisor may take to appear


class Watcher:
    """What has been told of one run folder."""

    def __init__(self, run_dir: str, offsets: dict[str, int], only: Sequence[str] = ("*",)) -> None:
        self.run_dir = run_dir
        self.offsets = dict(offsets)
        self.only = only
        self._state: dict[str, Any] | None = None
        self._told = time.monotonic()
        self._give_up = self._told + _START_WAIT

    def follow(self) -> int:
        """Tell everything until the run has ended on this node; returns the exit status."""
        pause = _FASTEST
        while True:
            # Asked before the lines are read, so that all written before the end has been told by then.
            end = self.end()
            self.tell_state()
            news = self.tell_lines()
            if end is not None and not news:
                self.tell(end)
                return 0 if "result" in end else LOST
            if news:
                pause = _FASTEST
            else:
                doze(pause)
                pause = min(pause * 1.3, _SLOWEST)
                self.tell_quiet()

    def look(self) -> int:
        """Tell what there is now; returns the exit status, 0 while the run goes on."""
        self.tell_state()
        end = self.end()
        for name, size in list(self.files()):
            while self.offsets.get(name, 0) < size and self.tell_new(name, self.new_lines(name)):
                pass
        self.tell({"now": time.time()})
        if end is not None:
            self.tell(end)
        return LOST if end is not None and "lost" in end else 0

    def leave_out(self, since: float | None, tail: int | None) -> None:
        """Begin no earlier than at the first line of ``since`` (by this clock) and at the last ``tail`` lines."""
        for name, _ in self.files():
            path = self._path(name)
            skipped = [self.offsets.get(name, 0)]
            skipped += [first_since(path, since)] if since is not None else []
            skipped += [last_lines(path, tail)] if tail is not None else []
            self.offsets[name] = max(skipped)

    def end(self) -> dict[str, Any] | None:
        """The last thing to tell, once there is nothing more to come."""
        reason = self.lost()
        result = record_in(RESULT, self._path("result.json"))  # after looking whether the supervisor is gone
        if result is not None:
            return {"result": result}
        return {"lost": {"reason": reason, "state": self._state}} if reason else None

    def lost(self) -> str:
        """Why no result can be expected any more; '' while it can."""
        if self._state is None:
            waited = time.monotonic() > self._give_up
            return f"no supervisor has started within {_START_WAIT:g} s" if waited else ""
        if procs.alive(self._state["pid"], self._state["start_ticks"]):
            return ""
        age = time.time() - self._state["time"]
        gone = f"the supervisor (pid {self._state['pid']}) is gone; its last sign of life was {age:.0f} s ago"
        return gone + (f"; the disk of {self.run_dir} is full" if disk_full(self.run_dir) else "")

    def tell_state(self) -> None:
        """Tell ``state.json`` when it has changed."""
        state = record_in(STATE, self._path("state.json"))
        if state is not None and state != self._state:
            self._state = state
            self.tell({"state": state})

    def tell_quiet(self) -> None:
        """Show that the line stands although the supervisor writes nothing (its disk may be full, or stall)."""
        quiet = time.monotonic() - self._told
        if quiet > _QUIET:
            self.tell({"quiet": round(quiet, 1)})

    def tell(self, message: dict[str, Any]) -> None:
        """Print one JSON line."""
        print(json.dumps(message), flush=True)
        self._told = time.monotonic()

    def tell_lines(self) -> bool:
        """Tell new lines of all files, at most a chunk of each; whether there were any.

        Events are read first and told last: what a process said before its end is told before that end.
        """
        events = self.new_lines(_EVENTS) if self._followed(_EVENTS) else b""
        news = False
        for name, size in self.files():
            if name != _EVENTS and size > self.offsets.get(name, 0):
                news |= self.tell_new(name, self.new_lines(name))
        return self.tell_new(_EVENTS, events) or news

    def new_lines(self, name: str) -> bytes:
        """The next complete lines of a file, about 256 KiB at most; empty where it does not exist."""
        with suppress(FileNotFoundError, IsADirectoryError):
            return complete_lines(self._path(name), self.offsets.get(name, 0))
        return b""

    def tell_new(self, name: str, data: bytes) -> bool:
        """Tell ``new_lines`` of a file, and go on behind them; whether there are any."""
        if data:
            self.offsets[name] = self.offsets.get(name, 0) + len(data)
            whole = data[:-1] if data.endswith(b"\n") else data
            lines = whole.decode("utf-8", "replace").split("\n")
            self.tell({"file": name, "offset": self.offsets[name], "lines": lines})
        return bool(data)

    def files(self) -> Iterator[tuple[str, int]]:
        """Followed files that exist, as (path in the run folder, bytes)."""
        yield from self._scan("", ".jsonl")
        yield from self._scan("logs", ".log")

    def _scan(self, folder: str, suffix: str) -> Iterator[tuple[str, int]]:
        try:
            entries = sorted(os.scandir(self._path(folder)), key=lambda entry: entry.name)
        except FileNotFoundError:
            return
        for entry in entries:
            name = os.path.join(folder, entry.name)
            if name.endswith(suffix) and self._followed(name):
                with suppress(FileNotFoundError):  # taken away meanwhile
                    if entry.is_file():
                        yield name, entry.stat().st_size

    def _followed(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.only)

    def _path(self, name: str) -> str:
        return os.path.join(self.run_dir, name)


def disk_full(path: str) -> bool:
    """Whether there is no room for even a small file."""
    try:
        disk = os.statvfs(path)
    except FileNotFoundError:  # the whole run folder is gone
        return False
    return disk.f_bavail * disk.f_frsize < _SMALL_FILE


def complete_lines(path: str, offset: int) -> bytes:
    """What stands in ``path`` from ``offset`` to the last line end in reach; a piece of a line that is too long."""
    with open(path, "rb") as file:
        file.seek(offset)
        data = file.read(_CHUNK)
        if b"\n" not in data:
            data += file.readline(_LONGEST)
            if len(data) >= _LONGEST and not data.endswith(b"\n"):
                return data
    return data[: data.rfind(b"\n") + 1]


def first_since(path: str, since: float) -> int:
    """Offset of the first line as late as ``since``; the lines of one file are in order of time."""
    wanted = stamp(since)
    later: Callable[[bytes], bool] = (
        (lambda line: _time_of(line) >= since)
        if path.endswith(".jsonl")
        else (lambda line: line[: len(wanted)].decode("ascii", "replace") >= wanted)
    )
    low, high = 0, os.path.getsize(path)
    with open(path, "rb") as file:
        while low < high:  # the line that begins at or after the middle: is it late enough?
            middle = (low + high) // 2
            begin, line = _line_from(file, middle)
            if not line or later(line):
                high = middle
            else:
                low = begin + len(line)
        return _line_from(file, low)[0]


def _line_from(file: BinaryIO, offset: int) -> tuple[int, bytes]:
    """The first line that begins at ``offset`` or later, and where it does."""
    file.seek(max(0, offset - 1))
    if offset:
        file.readline()
    begin = file.tell()
    return begin, file.readline()


def _time_of(line: bytes) -> float:
    event = checked(METRIC, json_object(line)) or {}
    return float(event.get("t", 0.0))


def last_lines(path: str, count: int) -> int:
    """Offset at which the last ``count`` complete lines begin."""
    with open(path, "rb") as file:
        place = file.seek(0, os.SEEK_END)
        found = -1  # the line end after the last line does not begin another
        while place > 0:
            size = min(_CHUNK, place)
            place = file.seek(place - size)
            data = file.read(size)
            ends = data.count(b"\n")
            if found + ends >= count:
                return place + _nth_end_from_behind(data, count - found) + 1
            found += ends
    return 0


def _nth_end_from_behind(data: bytes, number: int) -> int:
    place = len(data)
    for _ in range(number):
        place = data.rindex(b"\n", 0, place)
    return place


def doze(seconds: float) -> None:
    """Sleep; ends the program when whoever reads has closed our standard input."""
    if not stat.S_ISFIFO(os.fstat(0).st_mode) and not stat.S_ISSOCK(os.fstat(0).st_mode):
        time.sleep(seconds)
    elif select.select([0], [], [], seconds)[0] and not os.read(0, 4096):
        raise BrokenPipeError


def main() -> int:
    parser = argparse.ArgumentParser(prog="watch.py", description="Follows a node's run folder as JSON lines.")
    parser.add_argument("run_dir")
    parser.add_argument("--offsets", type=json.loads, default={}, help="where to go on: JSON of file to byte offset")
    parser.add_argument("--once", action="store_true", help="tell what there is, and end")
    parser.add_argument("--only", default="*", help="files to tell, as logs/rank*.log; several with commas; '': none")
    parser.add_argument("--since", type=float, help="only lines since then, in seconds since the epoch by this clock")
    parser.add_argument("--tail", type=int, help="only so many last lines of each file")
    options = parser.parse_args()
    watcher = Watcher(options.run_dir, options.offsets, options.only.split(","))
    try:
        if options.since is not None or options.tail is not None:
            watcher.leave_out(options.since, options.tail)
        return watcher.look() if options.once else watcher.follow()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # keeps the interpreter's own last flush quiet
        return 1


if __name__ == "__main__":
    sys.exit(main())
