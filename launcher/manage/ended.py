"""The whole of ``gnnfleet stop``: stop every node, bring what there is, write down how it ended."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from launcher.errors import FleetError, Interrupted
from launcher.manage.collect_run import Brought, bring, folder_for
from launcher.manage.node_views import OpenRun
from launcher.manage.stop import Stopped, stop_launcher, stop_run, summary
from launcher.report.found import FoundRun
from launcher.report.verdict import from_here, known_without_nodes


@dataclass(frozen=True)
class Ended:
    """What stopping came to."""

    run_id: str
    told: str
    nodes: tuple[Stopped, ...]
    clean: bool
    brought: Brought | None

    @property
    def exit_status(self) -> int:
        return 0 if self.clean else 1

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
        told = {"run_id": self.run_id, "told": self.told, "exit_status": self.exit_status}
        folder = str(self.brought.folder) if self.brought else None
        return told | {"nodes": [node.to_json() for node in self.nodes], "folder": folder}


def end_run(run: OpenRun, runs_dir: Path, console: Console, *, now: bool) -> Ended:
    """Stop the run, tell node by node what that took, and collect."""
    if known_without_nodes(run.found):
        ended = _end_here(run.found)
        console.print(Text(ended.told), soft_wrap=True)
        return ended
    views = run.look()
    try:
        stopped = stop_run(run, views, now=now)
    except KeyboardInterrupt:
        raise Interrupted(
            "interrupted; nodes that have been told go on stopping. "
            f"To see what is left: gnnfleet stop {run.found.words}"
        ) from None
    for one in stopped:
        console.print(Text(one.sentence, "" if one.clean else "bold red"), soft_wrap=True)
    told = summary(run.found, stopped)
    console.print(Text(told, "bold"), soft_wrap=True)
    clean = all(one.clean for one in stopped)
    launch = run.found.launch
    if launch is not None and launch.alive():  # two must not write one result
        console.print(Text(f"its launcher (pid {launch.pid}) collects and reports"), soft_wrap=True)
        return Ended(run.found.run_id, told, tuple(stopped), clean, None)
    brought = bring(run, folder_for(run, runs_dir))
    for line in (brought.told, *brought.notes, f"run folder: {brought.folder}"):
        if line:
            console.print(Text(line), soft_wrap=True)
    return Ended(run.found.run_id, told, tuple(stopped), clean, brought)


def _end_here(found: FoundRun) -> Ended:
    """Nothing of it runs on the nodes; a launcher of this machine that prepares it is ended."""
    if found.plan_is_missing:
        raise FleetError(found.without_plan.replace("gnnfleet status", "gnnfleet stop"))
    launch = found.launch
    if found.result is None and launch is not None and launch.alive():
        if not stop_launcher(launch):
            raise FleetError(
                f"the launcher of run {found.run_id} (pid {launch.pid}) does not end; kill -9 {launch.pid}"
            )
        told = f"run {found.run_id}: its launcher (pid {launch.pid}) was stopped; nothing had been started on the nodes"
        return Ended(found.run_id, told, (), True, None)
    return Ended(found.run_id, f"nothing to stop: {from_here(found).sentence}", (), True, None)
