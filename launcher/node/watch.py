"""Follows a node's run folder: ``watch.py RUN_DIR [--offsets JSON] [--once]``. Prints one JSON object per line:

- ``{"file": "logs/rank0.log", "offset": n, "lines": [...]}``: new complete lines of a log, metrics or events file.
  n is the byte offset after them; ``--offsets '{"logs/rank0.log": n}'`` continues from there.
- ``{"state": {...}}``: state.json after each change (each heartbeat).
- ``{"quiet": s}``: nothing was printed for s seconds.
- ``{"result": {...}}``: result.json, printed last; exit status 0.
- ``{"lost": {"reason", "state"}}``: the supervisor ended without a result, printed last; exit status 3.

Exit status 1 when standard output is closed. ``--once`` prints the present content, then ``{"now": t}`` (this node's
clock, seconds since the epoch), then ``result`` or ``lost`` if the run has ended. ``--only`` selects files by
patterns; ``--since`` and ``--tail`` skip old lines.
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
from launcher.node.json_reader import checked, json_object, loads, record_in
from launcher.node.json_records import METRIC, RESULT, STATE
from launcher.node.record import stamp
from launcher.node.regular_file import open_regular

_LOST = 3  # exit status when the supervisor ended without a result

_EVENTS = "events.jsonl"

_CHUNK = 1 << 18  # bytes read of one file at a time

_LONGEST = 1 << 23  # bytes of a line; a longer one is printed in pieces of this size

_FASTEST, _SLOWEST = 0.2, 1.0  # seconds between two checks of the folder

_SMALL_FILE = 1 << 14  # bytes; about the size of the files that a supervisor writes at its end

_QUIET = 3.0  # seconds without output after which ``quiet`` shows that the connection works

_START_WAIT = 60.0  # seconds a supervisor may take to appear


class Watcher:
    """Prints the new content of one run folder, one JSON message per line.

    offsets: number of bytes already printed, by file. only: patterns of the files to print. peers: node_ranks; of the
    states of other nodes in state.json only theirs are printed, as all nodes would print those of all nodes.
    """

    def __init__(
        self, run_dir: str, offsets: dict[str, int], only: Sequence[str] = ("*",), peers: Sequence[str] = ()
    ) -> None:
        self.run_dir = run_dir
        self.offsets = dict(offsets)
        self.only, self.peers = only, peers
        self._state: dict[str, Any] | None = None
        self._version: tuple[int, int] | None = None  # of the state.json that was read last
        self._printed = time.monotonic()
        self._give_up = self._printed + _START_WAIT

    def follow(self) -> int:
        """Print all changes until the run has ended on this node; return the exit status."""
        pause = _FASTEST
        while True:
            # Checked before the lines are read, so that all lines written before the end are printed before it.
            end = self.end()
            self.emit_state()
            changed = self.emit_lines()
            if end is not None and not changed:
                self.emit(end)
                return 0 if "result" in end else _LOST
            if changed:
                pause = _FASTEST
            else:
                # Wait; the end of standard input, if it is a pipe or socket, says that the caller has gone.
                if not stat.S_ISFIFO(os.fstat(0).st_mode) and not stat.S_ISSOCK(os.fstat(0).st_mode):
                    time.sleep(pause)
                elif select.select([0], [], [], pause)[0] and not os.read(0, 4096):
                    raise BrokenPipeError
                pause = min(pause * 1.3, _SLOWEST)
                self.emit_quiet()

    def emit_once(self) -> int:
        """Print the present content of the run folder; return the exit status, 0 while the run continues."""
        self.emit_state()
        end = self.end()
        for name, size in list(self.files()):
            while self.offsets.get(name, 0) < size and self.emit_new(name, self.new_lines(name)):
                pass
        self.emit({"now": time.time()})
        if end is not None:
            self.emit(end)
        return _LOST if end is not None and "lost" in end else 0

    def skip(self, since: float | None, tail: int | None) -> None:
        """Skip lines before ``since`` and all but the last ``tail`` lines, in each file; None skips nothing.

        ``since``: seconds since the epoch, by this node's clock.
        """
        for name, _ in self.files():
            path = self._path(name)
            skipped = [self.offsets.get(name, 0)]
            skipped += [_first_since(path, since)] if since is not None else []
            skipped += [last_lines(path, tail)] if tail is not None else []
            self.offsets[name] = max(skipped)

    def end(self) -> dict[str, Any] | None:
        """Return the last message to print, ``result`` or ``lost``; None while the supervisor runs."""
        reason = self.lost()
        result = record_in(RESULT, self._path("result.json"))  # read after the supervisor's liveness
        if result is not None:
            return {"result": result}
        return {"lost": {"reason": reason, "state": self._state}} if reason else None

    def lost(self) -> str:
        """Return why the supervisor will write no result: it has ended, or did not start in time; '' otherwise."""
        if self._state is None:
            waited = time.monotonic() > self._give_up
            return f"no supervisor has started within {_START_WAIT:g} s" if waited else ""
        if procs.alive(self._state["pid"], self._state["start_ticks"]):
            return ""
        age = time.time() - self._state["time"]
        gone = f"the supervisor (pid {self._state['pid']}) is gone; its last sign of life was {age:.0f} s ago"
        with suppress(FileNotFoundError):  # the run folder has been deleted
            disk = os.statvfs(self.run_dir)
            if disk.f_bavail * disk.f_frsize < _SMALL_FILE:
                gone += f"; the disk of {self.run_dir} is full"
        return gone

    def emit_state(self) -> None:
        path = self._path("state.json")
        with suppress(OSError):
            written = os.stat(path)
            version = written.st_mtime_ns, written.st_ino  # the file is replaced by each write
            if version == self._version:
                return
            self._version = version
        state = record_in(STATE, path)
        if state is not None:
            state["peers"] = {k: state["peers"][k] for k in self.peers if k in state["peers"]}
        if state is not None and state != self._state:
            self._state = state
            self.emit({"state": state})

    def emit_quiet(self) -> None:
        # Shows that the connection works although the supervisor writes nothing: its disk is full, or it stalls.
        quiet = time.monotonic() - self._printed
        if quiet > _QUIET:
            self.emit({"quiet": round(quiet, 1)})

    def emit(self, message: dict[str, Any]) -> None:
        print(json.dumps(message), flush=True)
        self._printed = time.monotonic()

    def emit_lines(self) -> bool:
        """Print new lines of all files, at most about 256 KiB per file; return whether there were any.

        Events are read first and printed last, so that a process's output is printed before the event of its end.
        """
        events = self.new_lines(_EVENTS) if self._followed(_EVENTS) else b""
        changed = False
        for name, size in self.files():
            if name != _EVENTS and size > self.offsets.get(name, 0):
                changed |= self.emit_new(name, self.new_lines(name))
        return self.emit_new(_EVENTS, events) or changed

    def new_lines(self, name: str) -> bytes:
        """Return the next complete lines of a file, at most about 256 KiB; empty if it does not exist."""
        with suppress(OSError):  # it does not exist, or is a pipe or folder
            with open_regular(self._path(name)) as file:
                file.seek(self.offsets.get(name, 0))
                data = file.read(_CHUNK)
                if b"\n" not in data:
                    data += file.readline(_LONGEST)
                    if len(data) >= _LONGEST and not data.endswith(b"\n"):
                        return data
            return data[: data.rfind(b"\n") + 1]
        return b""

    def emit_new(self, name: str, data: bytes) -> bool:
        """Print new lines of file ``name`` and advance the file's offset; return whether there were any."""
        if data:
            self.offsets[name] = self.offsets.get(name, 0) + len(data)
            whole = data[:-1] if data.endswith(b"\n") else data
            lines = whole.decode("utf-8", "replace").split("\n")
            self.emit({"file": name, "offset": self.offsets[name], "lines": lines})
        return bool(data)

    def files(self) -> Iterator[tuple[str, int]]:
        """Yield (path in the run folder, bytes) of each existing file whose lines are to be printed."""
        yield from self._scan("", ".jsonl")
        yield from self._scan("logs", ".log")

    def _scan(self, folder: str, suffix: str) -> Iterator[tuple[str, int]]:
        try:
            entries = sorted(os.scandir(self._path(folder)), key=lambda entry: entry.name)
        except OSError:  # it does not exist, or is no folder
            return
        for entry in entries:
            name = os.path.join(folder, entry.name)
            if name.endswith(suffix) and self._followed(name):
                with suppress(OSError):  # removed meanwhile, or a link to itself
                    if entry.is_file():
                        yield name, entry.stat().st_size

    def _followed(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.only)

    def _path(self, name: str) -> str:
        return os.path.join(self.run_dir, name)


def _first_since(path: str, since: float) -> int:
    """Return the byte offset of the first line of a log that is not earlier than ``since``.

    Uses binary search, as the lines are in order of time.
    """
    wanted = stamp(since)
    later: Callable[[bytes], bool] = (
        (lambda line: float((checked(METRIC, json_object(line)) or {}).get("t", 0.0)) >= since)
        if path.endswith(".jsonl")
        else (lambda line: line[: len(wanted)].decode("ascii", "replace") >= wanted)
    )
    low, high = 0, os.path.getsize(path)
    with open(path, "rb") as file:
        while low < high:  # test the first line that begins at or after the middle
            middle = (low + high) // 2
            begin, line = _line_from(file, middle)
            if not line or later(line):
                high = middle
            else:
                low = begin + len(line)
        return _line_from(file, low)[0]


def _line_from(file: BinaryIO, offset: int) -> tuple[int, bytes]:
    """Return (byte offset, text) of the first line that begins at ``offset`` or later."""
    file.seek(max(0, offset - 1))
    if offset:
        file.readline()
    begin = file.tell()
    return begin, file.readline()


def last_lines(path: str, count: int) -> int:
    """Return the byte offset at which the last ``count`` complete lines begin."""
    with open(path, "rb") as file:
        offset = file.seek(0, os.SEEK_END)
        found = -1  # the line end after the last line does not begin another
        while offset > 0:
            size = min(_CHUNK, offset)
            offset = file.seek(offset - size)
            data = file.read(size)
            ends = data.count(b"\n")
            if found + ends >= count:
                number = count - found
                index = len(data)
                for _ in range(number):
                    index = data.rindex(b"\n", 0, index)
                return offset + index + 1
            found += ends
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="watch.py", description="Follows a node's run folder as JSON lines.")
    parser.add_argument("run_dir", help="the node's run folder")
    parser.add_argument("--offsets", type=loads, default={}, help="byte offset to continue from, by file, as JSON")
    parser.add_argument("--once", action="store_true", help="print the present content and exit")
    parser.add_argument("--only", default="*", help="comma-separated patterns of files (logs/rank*.log); '': no files")
    parser.add_argument("--since", type=float, help="skip lines before this time (seconds since the epoch, this clock)")
    parser.add_argument("--tail", type=int, help="print only the last TAIL lines of each file")
    parser.add_argument("--peers", default="", help="comma-separated node_ranks of which this node's state is to tell")
    options = parser.parse_args()
    watcher = Watcher(options.run_dir, options.offsets, options.only.split(","), options.peers.split(","))
    try:
        if options.since is not None or options.tail is not None:
            watcher.skip(options.since, options.tail)
        return watcher.emit_once() if options.once else watcher.follow()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or the interpreter's last flush would print an error
        return 1


if __name__ == "__main__":
    sys.exit(main())
