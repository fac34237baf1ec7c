"""Reports the error that ends a rank to its supervisor, before the rank ends.

``procs/error-rank<r>.json`` has its message, and whether it follows from the end of another process. After a timeout
(of a collective call, a request or the sampler threads), ``procs/wait-rank<r>.json`` describes the wait; the supervisor
then collects the stacks of all ranks.
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
from pathlib import Path
from types import TracebackType

from trainer.core.errors import TrainerError, Wait

REPORTED_FOR = 8.0  #: seconds that a process stays alive after its report; the supervisor normally ends it earlier

_MOST_FRAMES = 200

_MOST_LETTERS = 500  # of a message

#: Error texts of torch.distributed for a wait that has passed its deadline; a lost connection has other ones.
_TIMED_OUT = re.compile(r"timed out|timeout|monitoredBarrier", re.I)

_MILLISECONDS = re.compile(r"(\d+) ?(?:ms|milliseconds)\b")

_SECONDS = re.compile(r"(\d+(?:\.\d+)?) ?(?:s|seconds)\b")


def expired_wait(error: BaseException) -> Wait | None:
    """Return the timeout that led to ``error``; None if ``error`` has another cause."""
    for one in _chain(error):
        if isinstance(one, TrainerError) and one.wait:
            return one.wait
        if isinstance(one, RuntimeError) and _TIMED_OUT.search(str(one)):  # of torch, whose timeouts have no type
            if found := _MILLISECONDS.search(str(one)):
                return Wait("ranks", int(found[1]) / 1000)
            found = _SECONDS.search(str(one))
            return Wait("ranks", float(found[1]) if found else 0.0)
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def report_error(error: BaseException, environ: Mapping[str, str] = os.environ) -> None:
    """Report ``error`` to the supervisor, if the trainer has raised it: the first line of its message, and whether it
    follows from the end of another process.

    If a timeout led to ``error``, report this, too, and wait at most ``REPORTED_FOR`` seconds, so that the supervisor
    can end this process. Does nothing outside a run.
    """
    run_dir, rank = environ.get("GNNFLEET_RUN_DIR"), environ.get("RANK", "")
    if not run_dir or not rank.isdigit() or not environ.get("GNNFLEET_SUPERVISOR"):
        return
    if isinstance(error, TrainerError):  # of others, the supervisor knows only the output
        message = str(error).partition("\n")[0][:_MOST_LETTERS]
        record = {"type": type(error).__name__, "follow_up": error.follow_up, "message": message}
        _write(run_dir, f"error-rank{rank}", record)
    wait = expired_wait(error)
    if wait is None:
        return
    # The stack of the root cause, innermost frame first, in the format of faulthandler.
    first = [one for one in _chain(error) if one.__traceback__ is not None][-1:]
    frames = traceback.extract_tb(first[0].__traceback__)[-_MOST_FRAMES:] if first else []
    lines = [f'  File "{frame.filename}", line {frame.lineno} in {frame.name}' for frame in reversed(frames)]
    record = {
        "t": round(time.time(), 3),
        "rank": int(rank) if wait.rank is None else wait.rank,
        "of": wait.of,
        "seconds": wait.seconds,
        "request": wait.request,
        "node_rank": wait.node_rank,
        "server": wait.server,
        "stack": ["Current thread 0x0 (most recent call first):", *lines],
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
