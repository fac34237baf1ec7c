"""``gnnfleet collect``: copies a run's files to this machine and writes its report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.config.loader import to_yaml
from launcher.errors import Interrupted
from launcher.files import write_whole
from launcher.manage.node_views import OpenRun
from launcher.plan.serialize import run_json
from launcher.report.ending import conclude
from launcher.report.html.render import write_report
from launcher.report.last_attempt import LastAttempt, checkpoint_node
from launcher.report.launch_file import NAME, LaunchFile
from launcher.report.report import RunReport
from launcher.report.run_folder import register
from launcher.report.verdict import NodeView, fill_from, idle_of, progress_words
from launcher.sync.collect import collect


@dataclass(frozen=True)
class CollectResult:
    folder: Path
    report: RunReport | None  #: None unless the run is known to have ended
    message: str  #: for the user: why ``report`` is None; otherwise ''
    notes: tuple[str, ...]  #: nodes whose files are missing, and why
    exit_status: int
    idle: float = 0.0  #: seconds for which no rank of a run that continues has made progress

    def to_json(self) -> dict[str, Any]:
        values = {
            "folder": str(self.folder),
            "told": self.message,
            "notes": list(self.notes),
            "exit_status": self.exit_status,
        }
        return values | {"report": self.report.to_json() if self.report else None}


def collect_run(run: OpenRun, folder: Path, views: Mapping[int, NodeView] | None = None) -> CollectResult:
    """Fetch the run's files into ``folder``; if the run has ended, also write its report."""
    views = run.views() if views is None else views
    prepare_folder(run, folder)
    report = RunReport(run.found.run_id, folder)
    reports, lead = {k: view.report for k, view in views.items()}, run.found.needed_plan.lead
    try:
        collect(report, run.found.needed_plan, run.connections, checkpoint_node(reports, lead))
    except KeyboardInterrupt:
        raise Interrupted(
            "interrupted; the files fetched so far are complete, and "
            f"`gnnfleet collect {run.found.words}` fetches the rest"
        ) from None
    alive = [view for view in views.values() if view.alive]
    unreachable = [view for view in views.values() if not view.reached]
    run_id = run.found.run_id
    if alive:
        where = progress_words(run.found, alive)
        why = f"run {run_id} still runs{f' ({where})' if where else ''}; its files so far are in {folder}"
        return CollectResult(folder, None, why, tuple(report.notes), 0, idle_of(alive))
    # The lead node ends last, and its result also says how unreachable nodes ended.
    hub = views.get(LastAttempt.of(reports, lead).hub)
    if unreachable and (hub is None or hub.result is None):
        labels = ", ".join(view.node.label for view in unreachable)
        why = (
            f"run {run_id}: {labels} cannot be reached, so how the run ended is not known; the files of "
            f"the other nodes are in {folder}. Collect again later; no file is fetched twice"
        )
        if len(unreachable) == len(views):
            why = f"run {run_id}: none of its nodes can be reached, so nothing could be collected"
        return CollectResult(folder, None, why, tuple(report.notes), 1)
    notes = tuple(report.notes)
    fill_from(report, views)
    records = [(view, record) for view in views.values() for record in (view.result or {}).get("outcomes", ())]
    begins = [record["started"] - view.offset for view, record in records if record["started"]]
    ends = [record["ended"] - view.offset for view, record in records if record["ended"]]
    launch: LaunchFile | None = run.found.launch
    begin = launch.started if launch else min(begins, default=0.0)
    conclude(report, run.found.needed_plan, max(0.0, max(ends, default=begin) - begin))
    write_report(report)
    return CollectResult(folder, report, "", notes, report.exit_status)


def prepare_folder(run: OpenRun, folder: Path) -> None:
    """Write run.json and config.yml into ``folder`` if they are missing, and register the folder."""
    found = run.found
    if not (folder / NAME).exists() and not (folder / "run.json").exists():
        write_whole(folder / "run.json", run_json(found.needed_plan), private=True)
        write_whole(folder / "config.yml", to_yaml(found.needed_config), private=True)
    register(found.run_id, folder)


def folder_for(run: OpenRun, runs_dir: Path) -> Path:
    """Return the run's folder on this machine or, if there is none, the path of a new one in ``runs_dir``."""
    return run.found.folder or runs_dir / run.found.run_id
