"""Follows a node's run folder: ``watch.py RUN_DIR [--offsets JSON]``, one JSON line per new thing.

``{"file": "logs/rank0.log", "offset": n, "lines": [...]}`` new complete lines of a log, metrics or events
file; n is the byte offset after them, so ``--offsets '{"logs/rank0.log": n}'`` goes on from there.
``{"state": {...}}`` state.json as it changes (each heartbeat). ``{"quiet": s}`` nothing new for s seconds.
``{"result": {...}}`` last, after all lines; exit 0.
``{"lost": {"reason", "state"}}`` last: the supervisor is gone without a result; exit 3. Exit 1 when nobody reads.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import stat
import sys
import time
from collections.abc import Iterator
from typing import Any

if not __package__:  # run as a file: make the package above importable
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from launcher.node import procs
from launcher.node.record import read_json

LOST = 3  #: exit status when the supervisor is gone without a result
_CHUNK = 1 << 18  # bytes of one file at once
_FASTEST, _SLOWEST = 0.2, 1.0  # seconds between two looks
_SMALL_FILE = 1 << 14  # bytes; what a supervisor leaves at its end takes about that
_QUIET = 3.0  # seconds without news after which the line is shown to stand
_START_WAIT = 60.0  # seconds a supervisor may take to appear


class Watcher:
    """What has been told of one run folder."""

    def __init__(self, run_dir: str, offsets: dict[str, int]) -> None:
        self.run_dir = run_dir
        self.offsets = dict(offsets)
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

    def end(self) -> dict[str, Any] | None:
        """The last thing to tell, once there is nothing more to come."""
        reason = self.lost()
        result = read_json(self._path("result.json"))  # after looking whether the supervisor is gone
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
        state = read_json(self._path("state.json"))
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
        """Tell new lines of all files, at most a chunk of each; whether there were any."""
        news = False
        for name, size in self.files():
            offset = self.offsets.get(name, 0)
            if size <= offset:
                continue
            data = complete_lines(self._path(name), offset)
            if data:
                self.offsets[name] = offset + len(data)
                lines = data[:-1].decode("utf-8", "replace").split("\n")
                self.tell({"file": name, "offset": self.offsets[name], "lines": lines})
                news = True
        return news

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
            if entry.name.endswith(suffix):
                yield os.path.join(folder, entry.name), entry.stat().st_size

    def _path(self, name: str) -> str:
        return os.path.join(self.run_dir, name)


def disk_full(path: str) -> bool:
    """Whether there is no room for even a small file."""
    disk = os.statvfs(path)
    return disk.f_bavail * disk.f_frsize < _SMALL_FILE


def complete_lines(path: str, offset: int) -> bytes:
    """What stands in ``path`` from ``offset`` to the last line end in reach; whole lines, however long."""
    with open(path, "rb") as file:
        file.seek(offset)
        data = file.read(_CHUNK)
        if b"\n" not in data:
            data += file.readline()
    return data[: data.rfind(b"\n") + 1]


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
    options = parser.parse_args()
    try:
        return Watcher(options.run_dir, options.offsets).follow()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # keeps the interpreter's own last flush quiet
        return 1


if __name__ == "__main__":
    sys.exit(main())
