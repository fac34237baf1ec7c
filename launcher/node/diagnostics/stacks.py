"""Collects the Python stacks of a node's ranks and of its graph server before a stalled run is stopped.

Python processes write their stacks on a signal (``site/sitecustomize.py``); others are described from /proc.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from launcher.node import procs
from launcher.node.diagnostics.process_state import STOPPED, ProcessWatch, first_word
from launcher.node.record import stamp

_SIGNAL = signal.SIGRTMAX - 4  # as in site/sitecustomize.py

_MOST = 16  # processes of a rank whose stacks are collected

_WATCH = 0.8  # seconds in which the states of all processes are sampled

_SAMPLE_EVERY = 0.08  # seconds between two samples

_POLL = 0.03  # seconds between two checks of the stack file

_QUIET = 3  # checks without growth after which a dump that has the signalled thread is complete

_LONG_QUIET = 12  # the same for a dump without it: on a busy host the process may pause between two threads

_LINES = 400  # lines kept of one dump

_THREAD = re.compile(r"^(Current thread|Thread) 0x")

_FRAME = re.compile(r'^  File "(.*)", line (\S+) in (.*)$')

_LIBRARY = re.compile(r"/(site|dist)-packages/|/lib(64)?/python3[^/]*/|/python3\d+\.zip/|^<")

SERVER = -1  #: stands for the graph server where processes are named by rank

NO_STACK = "no Python stack"  #: begins the description of a process that has written none

NO_FRAME = "no Python frame"  #: summary of a process that ends, or has not started Python code yet

_WRAPPERS = frozenset(["wrapper", "inner", "_fn", "__call__", "_call_impl", "_wrapped_call_impl", "decorate_context"])


@dataclass
class _Traced:
    pid: int
    state: str  #: letter and word, as ``S (sleeping)``
    answers: bool  #: the process handles the signal, and can run
    watch: ProcessWatch
    lines: list[str] = field(default_factory=list)  #: of its dump
    held_up: str = ""  #: what keeps it from running; set at the end

    @property
    def stopped(self) -> bool:
        return self.state[0] in "Tt"

    @property
    def text(self) -> list[str]:
        if self.lines or self.stopped:
            return self.lines or [STOPPED]
        words = {name: first_word(f"/proc/{self.pid}/{name}") for name in ("wchan", "syscall")}
        where = "".join(f", {name} {word}" for name, word in words.items() if word not in ("", "0", "running"))
        return [f"{NO_STACK}, state {self.state}{where}"]


class _Rank:
    """The processes of a rank or graph server.

    Forked processes write their stacks to the same file, so the signal is sent to one process after the other.
    """

    def __init__(self, run_dir: str, rank: int, pid: int, processes: Sequence[procs.Process]) -> None:
        self.rank, self.run_dir = rank, run_dir
        self.name = f"rank{rank}" if rank != SERVER else "server"
        self.dump = os.path.join(run_dir, "procs", f"stacks-{self.name}")
        family = [pid, *sorted(process.pid for process in procs.descendants(pid, processes))]
        self.left_out = max(0, len(family) - _MOST)
        self.traced = [_look_at(one, self.dump) for one in family[:_MOST]]
        self._waiting = [one for one in self.traced if one.answers]
        self._sent = False
        self._begin = self._size = self._quiet = 0

    def advance(self) -> bool:
        """Send the signal to the next process, or read its stacks once they are complete. Return whether none is left.

        Must be called repeatedly: the processes get the signal one after the other.
        """
        if not self._waiting:
            return True
        size = _size(self.dump)
        if not self._sent:
            self._begin = self._size = size
            self._quiet, self._sent = 0, True
            procs.send(self._waiting[0].pid, _SIGNAL)
            return False
        self._quiet = self._quiet + 1 if size == self._size else 0
        self._size = size
        if size == self._begin or self._quiet < _QUIET:
            return False
        with open(self.dump, "rb") as file:
            file.seek(self._begin)
            lines = file.read().decode("utf-8", "replace").splitlines()[:_LINES]
        if self._quiet >= _LONG_QUIET or _main_thread(lines):
            self._waiting.pop(0).lines = lines
            self._sent = False
        return not self._waiting

    def sample(self, now: float) -> None:
        for one in self.traced:
            one.watch.look(now)

    def result(self) -> list[str]:
        """Return the summary and the stacks, as lines; append them to ``logs/stacks-<name>.log``."""
        for one in self.traced:
            one.held_up = one.watch.held_up()
        # A shell writes no Python stack; its first descendant that wrote one counts.
        main = self.traced[0]
        main = main if main.stopped else next((one for one in self.traced if one.lines), main)
        first = summary(main.lines, roots(self.run_dir)) if main.lines else main.text[0]
        if not main.stopped:
            first = "; ".join([*filter(None, [next((one.held_up for one in self.traced if one.held_up), "")]), first])
        lines = [first]
        for one in self.traced:
            lines += [f"process {one.pid} ({procs.command_line(one.pid)}), state {one.state}:", *one.text]
        lines += [f"and {self.left_out} more processes"] if self.left_out else []
        write_log(self.run_dir, self.name, lines)
        return lines


_CODE = os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 3)) + "/"


def collect(
    run_dir: str, rank_pids: Mapping[int, int], wait: float = 2.0, pause: Callable[[float], object] = time.sleep
) -> dict[int, list[str]]:
    """Return the Python stacks of all processes of each rank, as lines by rank; the first line is the rank's summary.

    A summary begins with ``state …`` if the kernel keeps a process of the rank from running.

    rank_pids: pid of each rank; ``SERVER`` stands for the graph server. wait: limit in seconds. ``pause(seconds)``
    waits between two checks.
    """
    processes = procs.table()
    ranks = [_Rank(run_dir, rank, pid, processes) for rank, pid in sorted(rank_pids.items())]
    now = sampled = time.monotonic()
    least, deadline, left = now + _WATCH, now + wait, ranks
    for rank in ranks:
        rank.sample(now)
    while ((left := [rank for rank in left if not rank.advance()]) or (ranks and now < least)) and now < deadline:
        pause(_POLL)
        now = time.monotonic()
        if now - sampled >= _SAMPLE_EVERY:
            sampled = now
            for rank in ranks:
                rank.sample(now)
    return {rank.rank: rank.result() for rank in ranks}


def held_up(summary: str) -> str:
    """Return the part of a summary that says what keeps the process from running; '' if nothing does."""
    if summary == STOPPED:
        return summary
    return summary.partition("; ")[0] if summary.startswith("state ") else ""


def place(summary: str) -> str:
    """Return the source line in a summary, such as ``data.py:17 in load()``; '' for a stopped process."""
    return "" if summary == STOPPED else summary.partition("; ")[2] if held_up(summary) else summary


def folded(stacks: Mapping[int, Sequence[str]]) -> list[str]:
    """Return one line for each different summary, with its ranks; the largest group of ranks first."""
    places: dict[str, list[int]] = {}
    for rank in sorted(stacks):
        places.setdefault(stacks[rank][0], []).append(rank)
    groups = sorted(places.items(), key=lambda group: -len(group[1]))
    return [f"rank{'s' if len(ranks) > 1 else ''} {ranges(ranks)}: {place}" for place, ranks in groups]


def ranges(numbers: Sequence[int]) -> str:
    """Format ascending numbers as ``0-2, 4``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def roots(run_dir: str) -> tuple[str, ...]:
    """Return the prefixes that ``summary`` removes from the names of files of a run."""
    return (f"{run_dir}/files/", _CODE)


def summary(dump: Sequence[str], roots: Sequence[str] = ()) -> str:
    """Return where the main thread is, outside libraries: ``backward at train.py:12`` or ``data.py:17 in load()``.

    dump: lines written by faulthandler. roots: prefixes to remove from file names.
    """
    frames = _main_thread(dump)
    if not frames:
        return NO_FRAME
    own = next((at for at, frame in enumerate(frames) if not _LIBRARY.search(frame[0])), None)
    if own is None:
        return _at(frames[0], roots)
    file, line, _ = frames[own]
    called = [name for _, _, name in frames[:own] if name not in _WRAPPERS]
    return f"{called[-1]} at {_short(file, roots)}:{line}" if called else _at(frames[own], roots)


def _main_thread(dump: Sequence[str]) -> list[tuple[str, str, str]]:
    """Return (file, line, function) of each frame of the "Current thread" in a dump, innermost first."""
    frames: list[tuple[str, str, str]] = []
    inside = False
    for line in dump:
        if thread := _THREAD.match(line):
            inside = thread[1] == "Current thread"
        elif inside and (frame := _FRAME.match(line)):
            frames.append((frame[1], frame[2], frame[3]))
    return frames


def _at(frame: tuple[str, str, str], roots: Sequence[str]) -> str:
    file, line, name = frame
    where = f"{_short(file, roots)}:{line}"
    return where if name.startswith("<") else f"{where} in {name}()"


def _short(file: str, roots: Sequence[str]) -> str:
    return next((file[len(root) :] for root in roots if file.startswith(root)), file)


def _look_at(pid: int, dump: str) -> _Traced:
    values: dict[str, str] = {}
    with suppress(FileNotFoundError, ProcessLookupError):
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            values = {name: value.strip() for name, _, value in (line.partition(":") for line in file)}
    state = values.get("State", "gone")
    caught = int(values.get("SigCgt", "0"), 16) >> (_SIGNAL - 1) & 1
    answers = bool(caught) and state[0] not in "TtZX" and _has_open(pid, dump)
    return _Traced(pid, state, answers, ProcessWatch(pid))


def _has_open(pid: int, path: str) -> bool:
    # An open file means that the signal handler is installed.
    try:
        wanted = os.stat(path)
        found = [os.stat(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")]
    except OSError:  # ended, another user's, or a file was closed meanwhile; the signal could kill the process
        return False
    return any(os.path.samestat(wanted, one) for one in found)


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0


def write_log(run_dir: str, name: str, lines: Sequence[str]) -> None:
    """Append stacks of a process to ``logs/stacks-<name>.log``. name: ``rank3``, ``server``."""
    now = stamp(time.time())
    try:
        with open(os.path.join(run_dir, "logs", f"stacks-{name}.log"), "a", encoding="utf-8") as file:
            file.writelines(f"{now} {line}\n" for line in lines)
    except OSError:  # the disk is full; the summary is still in the report
        return
