"""How processes end: in words, for messages, and which of several failures came first."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

CRASHES = {
    "SIGSEGV": "segmentation fault",
    "SIGBUS": "bus error; often caused by a full /dev/shm, or by a memory-mapped file that was truncated",
    "SIGILL": "illegal instruction; often a build for another processor",
    "SIGFPE": "arithmetic fault",
}


_LONGEST = 1000  # characters of an exception in a message; its traceback has all

#: Exceptions of torch in a process that another one has left.
_PEER_IS_GONE = ("DistBackendError", "DistNetworkError", "DistStoreError")

#: What torch, gloo, NCCL and others print then, if they raise no such exception. Only for output that is not ours.
_PEER_WORDS = re.compile(
    r"connection closed by peer|connection reset by peer|broken pipe|socket closed|recvfrom failed|"
    r"(read|write) error .*peer|NCCL error|Timed out waiting|wait timeout|gloo/transport/|not all ranks|store->get",
    re.IGNORECASE,
)


def describe(record: Mapping[str, Any]) -> str:
    """Return how a process ended, from its outcome record: ``was killed by signal 9 (SIGKILL)``."""
    signaled, note = record["signal"], record["note"]
    if record["oom"]:
        return f"ran out of memory (killed by the kernel{f'; {note}' if note else ''})"
    if exception := exception_of(record):
        return f"raised {line_of_message(exception)}"
    if signaled in CRASHES:
        return f"crashed: {CRASHES[signaled]} ({signaled}){f', {note}' if note else ''}"
    if signaled:
        number = f"{record['returncode'] - 128} " if record["returncode"] else ""
        return f"was killed by signal {number}({signaled}){f': {note}' if note else ''}"
    if record["returncode"] is None:
        return "was still running"
    return f"ended with exit status {record['returncode']}{f': {note}' if note else ''}"


def line_of_message(line: str) -> str:
    """Return a line of an exception for messages, where those that print whole arrays would hide all others."""
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}…"


def exception_of(record: Mapping[str, Any]) -> str:
    """Return the exception that ended a process, e.g. ``ValueError: no such column``; '' if there is none.

    ``record``: outcome of the process. An exception ends a process with exit status 1 or by SIGABRT; after any other
    end, the result is ''.
    """
    exception = last_exception_line(record["traceback"])
    if record["signal"] == "SIGABRT":
        return exception if exception and any(line.endswith(exception) for line in record["tail"]) else ""
    return exception if record["returncode"] == 1 else ""


def last_exception_line(traceback: Iterable[str]) -> str:
    """Return the last exception line of a traceback, e.g. ``ValueError: no such column``; '' if there is none."""
    found, in_frames = "", False
    for line in traceback:
        if line.lstrip(" |+").startswith(("Traceback (most recent", "Exception Group Traceback")):
            in_frames = True
        elif in_frames and line and line[0] not in " |+":
            found, in_frames = line.strip(), False
    return found


def looks_like_follow_up(record: Mapping[str, Any]) -> bool:
    """Whether a process seems to have failed because another one had ended, judged by its last lines of output.

    ``record``: its outcome. Of errors of the trainer, the rank itself says so (``procs/error-rank<r>.json``).
    """
    if record["oom"] or record["signal"] not in (None, "SIGABRT"):
        return False
    last = last_exception_line(record["traceback"])
    if last.partition(":")[0].rpartition(".")[2] in _PEER_IS_GONE:
        return True
    return bool(_PEER_WORDS.search(last or "\n".join(record["tail"][0 if record["signal"] else -3 :])))


def size(count: float) -> str:
    """Return a number of bytes as text, e.g. ``1.5 GB`` (powers of 1000)."""
    unit = "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if count < 1000:
            break
        count, unit = count / 1000, larger
    return f"{count:.1f} {unit}" if count < 10 and unit != "B" else f"{count:.0f} {unit}"


T = TypeVar("T")

# Seconds that supervisors need to notice a node that was killed. Ranks of other nodes notice it, and fail, before.
_NOTICED = 3.0


class Failure(NamedTuple):
    """What decides which of several failures came first."""

    t: float  #: seconds since the epoch, all by one clock
    node_rank: int
    rank: int | None
    kind: str = "failure"  #: as in a cause: failure, lost, stop, nan, stall
    follow_up: bool = False  #: it looks like a consequence of the end of another process
    stopped: bool = False  #: the process was stopped before it failed
    done_without: bool = False  #: the run continued without the process


def first_failure(failures: Iterable[T], about: Callable[[T], Failure]) -> T | None:
    """Return the failure that came first; None if there is none, or if the run continued without all.

    It is the earliest, but the loss of a node comes before the failure of a rank up to ``_NOTICED`` seconds earlier.
    Failures that the run continued without come after all others but consequences; stopped processes come last.
    """
    found = sorted(((about(one), one) for one in failures), key=lambda pair: _order(pair[0]))
    if all(one.done_without for one, _ in found):
        return None
    first = found[0][0]
    losses = (one for other, one in found if other.kind == "lost" and other.t < first.t + _NOTICED)
    rank_failed = first.kind == "failure" and first.rank is not None
    return next(losses, found[0][1]) if rank_failed else found[0][1]


def _order(one: Failure) -> tuple[bool, bool, bool, float, int, int]:
    spared = one.done_without and not one.follow_up
    return one.stopped, one.follow_up, spared, one.t, one.node_rank, -1 if one.rank is None else one.rank
