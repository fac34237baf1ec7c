"""Finds and ends processes by /proc: by pid, ancestry, environment or process group.

A process is identified by its pid and start time, because pids are reused.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

TOKEN = "GNNFLEET_TOKEN"

_PR_SET_PDEATHSIG = 1

_PR_SET_CHILD_SUBREAPER = 36

_MAX_FILES = 65_536

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Process:
    pid: int
    ppid: int
    pgid: int
    start_ticks: int  #: clock ticks between boot and start
    zombie: bool


def boot_id() -> str:
    """Return an id of this machine's current boot; '' if the kernel has none (not Linux)."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def allow_open_files(count: int) -> None:
    """Raise the soft limit of open files of this process to its hard limit if it is below ``count``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < min(count, most):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def look(pid: int) -> Process | None:
    """Return the process with this pid; None if it does not exist, or /proc hides it (hidepid)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    state, ppid, pgid = fields[0], int(fields[1]), int(fields[2])
    return Process(pid, ppid, pgid, int(fields[19]), state in (b"Z", b"X"))


def alive(pid: int | None, start_ticks: int | None) -> bool:
    """Whether the process with this pid and start time runs; false for a zombie, and if one of them is unknown."""
    process = look(pid) if pid else None
    return process is not None and process.start_ticks == start_ticks and not process.zombie


def table() -> list[Process]:
    """Return all running processes, without zombies."""
    found = (look(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return [process for process in found if process is not None and not process.zombie]


def ancestors(pid: int) -> set[int]:
    """Return ``pid`` and the pids of all its ancestors."""
    found: set[int] = set()
    process = look(pid)
    while process is not None and process.pid not in found:
        found.add(process.pid)
        process = look(process.ppid)
    return found


def descendants(pid: int, processes: Iterable[Process] | None = None) -> list[Process]:
    """Return the descendants of ``pid``. processes: the process table; None: read it now."""
    children: dict[int, list[Process]] = {}
    for process in table() if processes is None else processes:
        children.setdefault(process.ppid, []).append(process)
    found: list[Process] = []
    todo = [pid]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += [process.pid for process in below]
    return found


def node_token(token: str, node_rank: int) -> str:
    """Return the value of GNNFLEET_TOKEN for the processes of a run on one node.

    The value differs between the nodes, because two nodes may share a host.
    """
    return f"{token}-node{node_rank}"


def with_variable(entry: str, processes: Iterable[Process] | None = None) -> list[Process]:
    """Return the running processes that were started with ``entry`` (``NAME=value``) in their environment."""
    return [process for process in (table() if processes is None else processes) if _holds(process.pid, entry)]


def _holds(pid: int, entry: str) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return entry.encode() in file.read().split(b"\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False  # the process has ended, or belongs to another user


def run_processes(entry: str, root: int | None = None) -> list[Process]:
    """Return the processes with ``entry`` in their environment, and the descendants of the pid ``root``.

    Leaves out the calling process and its ancestors.
    """
    processes = table()
    spared = ancestors(os.getpid())
    found = with_variable(entry, processes) + (descendants(root, processes) if root else [])
    return list({process.pid: process for process in found if process.pid not in spared}.values())


def command_line(pid: int) -> str:
    """Return the first 120 characters of a process's command line; '' when it has ended."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().replace(b"\0", b" ").decode("utf-8", "replace").strip()[:120]
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""


def send(pid: int, number: int) -> None:
    """Send a signal to a process, unless it has ended or belongs to another user."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return


def send_group(pgid: int, number: int) -> None:
    """Send a signal to a process group, unless it is empty or belongs to another user."""
    try:
        os.killpg(pgid, number)
    except (ProcessLookupError, PermissionError):
        return


def end(find: Callable[[], list[Process]], grace: float, wait: Callable[[], object] | None = None) -> list[Process]:
    """Send SIGTERM to the processes that ``find`` returns; after ``grace`` seconds, SIGKILL. Return those left.

    ``find`` is called repeatedly, so that processes started meanwhile are ended too. Gives up 5 s after the grace
    period. ``wait``: called between two calls of ``find``; by default it sleeps 50 ms.
    """
    pause = wait or (lambda: time.sleep(0.05))
    termed: set[int] = set()
    kill_at = time.monotonic() + grace
    give_up = kill_at + 5.0
    while True:
        left = find()
        now = time.monotonic()
        if not left or now > give_up:
            return left
        for process in left:
            if now >= kill_at:
                send(process.pid, signal.SIGKILL)
            elif process.pid not in termed:
                termed.add(process.pid)
                send(process.pid, signal.SIGTERM)
        pause()


def die_with_parent(number: int) -> None:
    """Let the kernel send the signal ``number`` to this process when the thread that started it ends (Linux)."""
    _prctl(_PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent ends (subreaper), so that ``descendants`` finds them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")
