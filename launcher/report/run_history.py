"""Lists the runs known on this machine with their states and results, and finds a run by a part of its id."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.text import Text

from launcher.errors import FleetError, UsageError
from launcher.report.events import nan_finding
from launcher.report.launch_file import BEFORE_NODES, LaunchFile
from launcher.report.metrics import metric_of
from launcher.report.run_folder import (
    FoundRun,
    Tracked,
    began,
    given_folder,
    known_runs,
    never_ran,
    read_folder,
    read_plan,
    read_result,
    registry_folder,
    tracked_runs,
)
from launcher.report.verdict import known_without_nodes, result_words
from launcher.text import Column, FittedTable, count, seconds_words

_LISTED = 6


def find_run(run: str | None, runs_dirs: Sequence[Path]) -> FoundRun:
    """Find a run by its id, a part of its id, or its folder; None: the first of ``default_runs``.

    ``runs_dirs``: folders whose subfolders are run folders; registered runs are searched, too. Raises UsageError if no
    run matches, or several do.
    """
    if run is None:
        return default_runs(runs_dirs)[0]
    if "/" in run.rstrip("/"):
        return read_folder(given_folder(Path(os.path.expanduser(run))))
    known = known_runs(runs_dirs)
    is_folder = os.path.isfile(os.path.join(run, "launch.json"))
    if not known and not is_folder:
        raise UsageError(_none_known(run, runs_dirs))
    wanted = run.rstrip("/")
    how, names = ("", []) if wanted in (".", "..") else matching([folder.name for folder in known], wanted)
    close = [folder for folder in known if folder.name in names]
    if len(close) == 1:
        return read_folder(close[0])
    if not close and is_folder:  # such as ``.``
        return read_folder(Path(os.path.abspath(run)))
    if not close:
        names = [folder.name for folder in known[:_LISTED]] + (["…"] if len(known) > _LISTED else [])
        raise UsageError(f"no run `{run}` is known here; the newest are {', '.join(names)} (`gnnfleet runs` lists all)")
    if not how:
        paths = ", ".join(map(str, close[:_LISTED]))
        raise UsageError(f"`{run}` is the name of several run folders; give one by its path: {paths}")
    newest = close[:_LISTED]
    width = max(len(folder.name) for folder in newest)
    lines = [f"  {folder.name:{width}}  {entry_of(folder).state}" for folder in newest]
    lines += ["  …"] if len(close) > _LISTED else []
    raise UsageError("\n".join([f"`{run}` {how} the ids of {len(close)} runs; give more of the id. Newest:", *lines]))


def default_runs(runs_dirs: Sequence[Path]) -> list[FoundRun]:
    """Return the runs that a command without a name may mean, the best first; at least one.

    These are the runs that may be alive, newest first, and then the newest of all. A launch that was refused before it
    started anything counts only if there is no other. Raises UsageError if no run is known.
    """
    known = known_runs(runs_dirs)
    if not known:
        raise UsageError(_none_known(None, runs_dirs))
    started = [folder for folder in known if not never_ran(folder)] or known
    found = []
    for folder in started:
        with suppress(FleetError):  # a damaged run folder
            found.append(read_folder(folder))
    alive = [run for run in found if not known_without_nodes(run)]
    try:
        newest = read_folder(started[0])
    except FleetError:
        if alive:
            return alive
        raise
    return alive if alive == [newest] else [*alive, newest]


def resumable_run(runs_dirs: Sequence[Path], *, changed: bool) -> FoundRun:
    """Return the newest run that can be resumed, the newest of all if none can. Raises UsageError if no run is known.

    ``changed``: the resumed run will have other settings, as more epochs, so that one that is done will do.
    """
    known = known_runs(runs_dirs)
    if not known:
        raise UsageError(_none_known(None, runs_dirs))
    started = [folder for folder in known if not never_ran(folder)]
    for folder in started:
        with suppress(FleetError):
            found = read_folder(folder)
            runs = found.result is None and found.launch is not None and found.launch.alive()
            done = found.result is not None and found.result["state"] == "done"
            if not runs and (changed or not done):
                return found
    return read_folder((started or known)[0])


def matching(ids: Sequence[str], wanted: str) -> tuple[str, list[str]]:
    """Return (how, matching ids). Tries four rules, and applies the first that any id satisfies.

    The rules: the id equals ``wanted``, begins with it, ends with it, or contains it. ``how`` names the rule: '' for an
    equal id, else ``is the start of``, ``is the end of`` or ``is in``. Returns ('', []) if no id satisfies a rule.
    """
    rules: tuple[tuple[str, Callable[[str], bool]], ...] = (
        ("", lambda one: one == wanted),
        ("is the start of", lambda one: one.startswith(wanted)),
        ("is the end of", lambda one: one.endswith(wanted)),
        ("is in", lambda one: wanted in one),
    )
    found = ((how, [one for one in ids if fits(one)]) for how, fits in rules)
    return next(((how, names) for how, names in found if names), ("", []))


def _none_known(run: str | None, runs_dirs: Sequence[Path]) -> str:
    places = ", ".join(map(str, [*runs_dirs, registry_folder()]))
    wanted = f"run `{run}` is not" if run else "no run is"
    return (
        f"{wanted} known on this machine (looked in {places}); "
        "for a run launched elsewhere give its cluster file: --config cluster.yml"
    )


_STYLES = {"done": "green", "failed": "red", "never started": "red", "stopped": "yellow"}

_COLUMNS = (
    Column("when", 6),
    Column("run", 9),
    Column("config", 2, cut_to=12),
    Column("size", 3),
    Column("state", 8),
    Column("took", 5, right=True),
    Column("result", 7, cut_to=20),
)

_TRACKERS = Column("trackers", 1, cut_to=15)


@dataclass(frozen=True)
class Entry:
    """One line of ``gnnfleet runs``: a run with its state and result."""

    run_id: str
    folder: str
    when: float  #: time of the launch, seconds since the epoch
    config: str  #: path of the cluster file as given to the launch; '' if launched elsewhere
    size: str  #: ``3 nodes × 6 ranks``
    state: str
    seconds: float | None  #: duration
    metric: str  #: name of the task's metric, such as ``accuracy``
    test: float | None  #: the metric on the test split
    why: str  #: result, or why the run ended, in one line
    resumed_from: str | None  #: id of the run that was resumed
    nan: bool = False  #: a loss was NaN or infinite
    trackers: tuple[Tracked, ...] = ()  #: where trackers show it


def history(runs_dirs: Sequence[Path], limit: int | None = None) -> list[Entry]:
    """Return an entry for each run known on this machine, newest first; at most ``limit``."""
    return [entry_of(folder) for folder in known_runs(runs_dirs)[:limit]]


def entry_of(folder: Path) -> Entry:
    """Read the entry of a run from its folder; the state of a damaged folder is ``damaged``."""
    try:
        launch, result, plan = LaunchFile.read(folder), read_result(folder), read_plan(folder)
    except (FleetError, OSError) as error:
        return Entry(folder.name, str(folder), began(folder), "", "", "damaged", None, "", None, str(error), None)
    size = count(len(plan.nodes), "node") if plan else ""
    if plan:
        size += " serving" if plan.serve_only else f" × {count(plan.world_size, 'rank')}"
    state, why = _state(launch, result, has_plan=plan is not None)
    metrics = (result or {}).get("metrics", {})
    metric = metric_of([metrics])
    return Entry(
        run_id=launch.run_id if launch else folder.name,
        folder=str(folder),
        when=began(folder),
        config=launch.config if launch else "",
        size=size,
        state=state,
        seconds=result.get("seconds") if result else None,
        metric=metric.name,
        test=metric.of(metrics, "test"),
        why=why,
        resumed_from=launch.resumed_from if launch else None,
        trackers=tuple(tracked_runs(folder)),
        nan=nan_finding((result or {}).get("findings") or ()) is not None,
    )


def to_json(entries: Sequence[Entry]) -> str:
    """Return what ``gnnfleet runs --json`` prints: a list of runs, newest first."""
    return json.dumps([asdict(entry) for entry in entries], indent=1)


def rendered(entries: Sequence[Entry]) -> FittedTable:
    tracked = any(entry.trackers for entry in entries)
    rows: list[tuple[Text | str, ...]] = []
    for entry in entries:
        took = seconds_words(entry.seconds) if entry.seconds is not None else "–"
        state = Text(entry.state, "yellow" if entry.nan and entry.state == "done" else _STYLES.get(entry.state, "bold"))
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.when))
        config = f"from {entry.resumed_from}" if entry.resumed_from else Path(entry.config).name or "–"
        why = Text(" ".join(entry.why.split()))
        trackers = (", ".join(f"{run['tracker']} {run['id']}" for run in entry.trackers),) if tracked else ()
        rows.append((when, entry.run_id, config, entry.size or "–", state, took, why, *trackers))
    return FittedTable((*_COLUMNS, _TRACKERS) if tracked else _COLUMNS, rows)


def _state(launch: LaunchFile | None, result: dict[str, Any] | None, *, has_plan: bool) -> tuple[str, str]:
    if result is not None and result["state"] != "detached":
        by = f"stopped by {result['stopped_by']}" if result.get("stopped_by") else ""
        return result["state"], by or result_words(result) or next(iter(result.get("notes") or ()), "")
    if launch is None:
        return "open", "collected while it ran; see gnnfleet status"
    if launch.alive():
        return ("running" if launch.stage in ("train", "collect", "end") else "preparing"), ""
    if launch.alive() is False and (launch.stage in BEFORE_NODES or (launch.stage == "end" and not has_plan)):
        ended = "job ended in the queue" if launch.stage == "queue" else f"launcher ended during {launch.stage}"
        return "never started", f"its {ended}"
    why = "detached" if launch.detached else "its launcher has ended"
    return "open", f"{why}; see gnnfleet status {launch.run_id}"
