"""Reports the error that ends a rank to its supervisor, before the rank ends.

``procs/error-rank<r>.json`` says whether the error follows from the end of another process. After a timeout (of a
collective call, a request or the sampler threads), ``procs/wait-rank<r>.json`` describes the wait; the supervisor then
collects the stacks of all ranks.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

from trainer.core.errors import PeerError, ServiceError, TrainerError

REPORTED_FOR = 8.0  #: seconds that a process stays alive after its report; the supervisor normally ends it earlier

_MOST_FRAMES = 200

#: Error texts of torch.distributed for a wait that has passed its deadline; a lost connection has other ones.
_TIMED_OUT = re.compile(r"timed out|timeout|monitoredBarrier", re.I)

_MILLISECONDS = re.compile(r"(\d+) ?(?:ms|milliseconds)\b")

_SECONDS = re.compile(r"(\d+(?:\.\d+)?) ?(?:s|seconds)\b")

#: The text of service.client; after the last server named in a line, as that is the one that was asked in vain.
_NO_ANSWER = re.compile(
    r"graph server of (?P<server>node(?P<node>\d+)(?: \([^()\n]*\))?(?P<cluster> of [\w.-]+)?)"
    r"(?:(?!graph server of)[^\n])*: no answer within (?P<seconds>[\d.]+) s to (?P<request>\w+)"
)

#: The text of sampler.replicas, before the texts of the servers that did not come back.
_GAVE_UP = re.compile(r"no graph server that holds (?:it|them) came back within ([\d.]+) s")

_NO_BATCH = re.compile(r"sampler threads of this process made no batch within ([\d.]+) s")  # graph.prefetch

_OTHER_RANK = re.compile(r"rank (\d+) \(node\d+, ")  # RankGroup.agree: the error of another rank


@dataclass(frozen=True)
class Wait:
    of: str  #: what was waited for: ``ranks``, ``server`` or ``threads`` (the sampler threads of this process)
    seconds: float
    request: str = ""  #: kind of the request to a graph server
    node_rank: int | None = None  #: of the graph server, if it belongs to this run
    server: str = ""  #: the graph server, if it belongs to a serving cluster: ``node0 (gpu1) of products``
    rank: int | None = None  #: rank that has waited; None: this process


def expired_wait(error: BaseException) -> Wait | None:
    """Return the timeout that led to ``error``; None if ``error`` has another cause."""
    # Timeouts of other processes and of torch have no exception type, so messages are searched.
    for one in _chain(error):
        wait = _in_text(one, str(one))
        if wait is not None:
            return wait
    return None


def _in_text(error: BaseException, text: str) -> Wait | None:
    if isinstance(error, ServiceError | PeerError):
        if found := _NO_ANSWER.search(text):
            gave_up = _GAVE_UP.search(text)
            seconds = float(gave_up[1] if gave_up else found["seconds"])
            attached = found["cluster"] is not None  # its node_rank is that of another cluster
            wait = Wait(
                "server", seconds, found["request"], None if attached else int(found["node"]),
                found["server"] if attached else "",
            )  # fmt: skip
            other = _OTHER_RANK.match(text)
            return replace(wait, rank=int(other[1])) if other and isinstance(error, PeerError) else wait
        found = _NO_BATCH.search(text)
        return Wait("threads", float(found[1])) if found else None
    if isinstance(error, RuntimeError) and _TIMED_OUT.search(text):
        return Wait("ranks", _seconds(text))
    return None


def _seconds(text: str) -> float:
    if found := _MILLISECONDS.search(text):
        return int(found[1]) / 1000
    found = _SECONDS.search(text)
    return float(found[1]) if found else 0.0


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def report_error(error: BaseException, environ: Mapping[str, str] = os.environ) -> None:
    """Report to the supervisor whether ``error`` follows from the end of another process, if the trainer has raised it.

    If a timeout led to ``error``, report this, too, and wait at most ``REPORTED_FOR`` seconds, so that the supervisor
    can end this process. Does nothing outside a run.
    """
    run_dir, rank = environ.get("GNNFLEET_RUN_DIR"), environ.get("RANK", "")
    if not run_dir or not rank.isdigit() or not environ.get("GNNFLEET_SUPERVISOR"):
        return
    if isinstance(error, TrainerError):  # of others, the supervisor knows only the output
        _write(run_dir, f"error-rank{rank}", {"type": type(error).__name__, "follow_up": error.follow_up})
    wait = expired_wait(error)
    if wait is None:
        return
    record = {
        "t": round(time.time(), 3),
        "rank": int(rank) if wait.rank is None else wait.rank,
        "of": wait.of,
        "seconds": wait.seconds,
        "request": wait.request,
        "node_rank": wait.node_rank,
        "server": wait.server,
        "stack": list(_stack(error)),
    }
    if _write(run_dir, f"wait-rank{rank}", record):
        time.sleep(REPORTED_FOR)


def _write(run_dir: str, name: str, record: Mapping[str, object]) -> bool:
    """Write a file of the folder ``procs``; return False if the disk is full. The error message is in the log."""
    path = Path(run_dir, "procs", f"{name}.json")
    try:
        path.with_suffix(".part").write_text(json.dumps(record))
        path.with_suffix(".part").replace(path)
    except OSError:
        return False
    return True


def _stack(error: BaseException) -> Iterator[str]:
    """Yield the stack of the root cause of ``error``, innermost frame first, in the format of faulthandler."""
    first = [one for one in _chain(error) if one.__traceback__ is not None][-1:]
    yield "Current thread 0x0 (most recent call first):"
    for frame in reversed(traceback.extract_tb(first[0].__traceback__)[-_MOST_FRAMES:] if first else []):
        yield f'  File "{frame.filename}", line {frame.lineno} in {frame.name}'


def report_uncaught(environ: Mapping[str, str] = os.environ) -> None:
    """Install an exception hook that reports an uncaught error to the supervisor. Does nothing outside a run."""
    before = sys.excepthook
    if getattr(before, "reports_waits", False) or not environ.get("GNNFLEET_SUPERVISOR"):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        with suppress(Exception):  # the exception that ends the process has been printed, and matters more
            report_error(error)

    hook.reports_waits = True  # type: ignore[attr-defined]
    sys.excepthook = hook
