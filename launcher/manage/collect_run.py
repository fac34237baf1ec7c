"""``gnnfleet collect``: copies a run's files to this machine and writes its report."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.config.loader import to_yaml
from launcher.errors import Interrupted
from launcher.files import write_whole
from launcher.manage.node_views import OpenRun
from launcher.plan.serialize import run_json
from launcher.report.ending import Collected, Ending, Followed, Lost
from launcher.report.html.render import written
from launcher.report.report import RunReport
from launcher.report.run_folder import NAME, LaunchFile, register
from launcher.report.verdict import NodeView, progress_words
from launcher.sync.collect import collect


@dataclass(frozen=True)
class CollectResult:
    """What collecting came to."""

    folder: Path
    report: RunReport | None  #: None while the run goes on, or when it cannot be known whether it does
    told: str  #: why there is no report; '' when there is one
    notes: tuple[str, ...]
    exit_status: int

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
        told = {
            "folder": str(self.folder),
            "told": self.told,
            "notes": list(self.notes),
            "exit_status": self.exit_status,
        }
        return told | {"report": self.report.to_json() if self.report else None}


def collect_run(run: OpenRun, folder: Path, views: Mapping[int, NodeView] | None = None) -> CollectResult:
    """Fetch what there is into ``folder``; if the run has ended, write and return its report as well."""
    views = run.views() if views is None else views
    settle(run, folder)
    try:
        collected = collect(run.found.needed_plan, run.attempts, folder)
    except KeyboardInterrupt:
        raise Interrupted(
            f"interrupted; what has come is whole, and `gnnfleet collect {run.found.words}` brings the rest"
        ) from None
    alive = [view for view in views.values() if view.alive]
    away = [view for view in views.values() if not view.reached]
    run_id = run.found.run_id
    if alive:
        where = progress_words(run.found, alive)
        told = f"run {run_id} still runs{f' ({where})' if where else ''}; what there is by now is in {folder}"
        return CollectResult(folder, None, told, collected.notes, 0)
    if away and not _known_by_others(views, run.found.needed_plan.lead):
        told = _unknown_end(run_id, views, folder)
        return CollectResult(folder, None, told, collected.notes, 1)
    report = written(report_of(run, views, collected, folder))
    return CollectResult(folder, report, "", collected.notes, report.exit_status)


def _unknown_end(run_id: str, views: Mapping[int, NodeView], folder: Path) -> str:
    away = [view.node.label for view in views.values() if not view.reached]
    if len(away) == len(views):
        return f"run {run_id}: none of its nodes can be reached, so nothing could be collected"
    return (
        f"run {run_id}: {', '.join(away)} cannot be reached, so how the run ended is not known; what the others have "
        f"is in {folder}. Collect again later: what is here is not fetched twice"
    )


def report_of(run: OpenRun, views: Mapping[int, NodeView], collected: Collected, folder: Path) -> RunReport:
    """The report on a run that has ended, by what its nodes left."""
    followed = Followed(clocks={k: view.offset for k, view in views.items() if view.now})
    for k, view in views.items():
        if view.result is not None:
            followed.results[k] = view.result
        elif view.reached:
            last = view.state["time"] - view.offset if view.state else time.time()
            followed.lost[k] = Lost(view.lost or "nothing of the run has started there", last)
        else:
            followed.lost[k] = Lost(view.unreachable, time.time(), out_of_reach=True)
    return Ending(run.found.needed_plan, followed, collected, {}).report(folder, _seconds(run, views))


def settle(run: OpenRun, folder: Path) -> None:
    """Make the folder one by which later commands find the run and its hosts."""
    found = run.found
    if not (folder / NAME).exists() and not (folder / "run.json").exists():
        write_whole(folder / "run.json", run_json(found.needed_plan), private=True)
        write_whole(folder / "config.yml", to_yaml(found.needed_config), private=True)
    register(found.run_id, folder)


def folder_for(run: OpenRun, runs_dir: Path) -> Path:
    """Where the run's files belong on this machine."""
    return run.found.folder or runs_dir / run.found.run_id


def _known_by_others(views: Mapping[int, NodeView], lead: int) -> bool:
    """Whether the nodes in reach know how those out of reach ended: the hub ends last, and says who was lost."""
    hub = views.get(lead)
    return hub is not None and hub.result is not None


def _seconds(run: OpenRun, views: Mapping[int, NodeView]) -> float:
    """From the launch, or the first start of a process, to the last end of one."""
    records = [(view, record) for view in views.values() for record in (view.result or {}).get("outcomes", ())]
    begins = [record["started"] - view.offset for view, record in records if record["started"]]
    ends = [record["ended"] - view.offset for view, record in records if record["ended"]]
    launch: LaunchFile | None = run.found.launch
    begin = launch.started if launch else min(begins, default=0.0)
    return max(0.0, max(ends, default=begin) - begin)
