"""``gnnfleet status``: the state of a run in one sentence, and a row for each node and rank."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from launcher.manage.node_views import OpenRun, opened
from launcher.preflight.check_health import gpu_faults, logged_faults
from launcher.report.events import lasting_findings
from launcher.report.last_attempt import LastAttempt
from launcher.report.run_folder import FoundRun, read_folder
from launcher.report.verdict import (
    NodeView,
    Verdict,
    from_here,
    judge,
    known_without_nodes,
    place_of,
)
from launcher.run.live_table import STEP_COLUMNS, RankRow, step_cells
from launcher.text import Cell, Column, FittedTable
from launcher.transport.fanout import on_nodes
from launcher.transport.rpc import call

_FAULTS_TIMEOUT = 20.0  # seconds

_EVERY = 2.0  # seconds between updates with --watch

_STYLES = {
    "running": "bold green",
    "waiting": "bold yellow",
    "done": "bold green",
    "failed": "bold red",
    "never started": "bold red",
    "unknown": "bold yellow",
    "stopped": "bold yellow",
}

_COLUMNS = (
    Column("node", 9, cut_to=24),
    Column("rank", 9),
    Column("state", 9),
    *STEP_COLUMNS,
    Column("heartbeat", 4, right=True),
)

_NODE_STYLES = {"failed": "red", "lost": "red", "unreachable": "yellow", "done": "green", "stopped": "yellow"}


@dataclass(frozen=True)
class Status:
    found: FoundRun
    verdict: Verdict
    views: Mapping[int, NodeView]  #: empty if the run folder on this machine suffices
    faults: Sequence[str] = ()  #: of GPUs on hosts of a run that has not ended

    @property
    def ranks(self) -> dict[int, tuple[int, ...]]:
        """The ranks of each node in ``views``, by node_rank; after a restart, the new ranks."""
        if not self.views:
            return {}
        attempt = LastAttempt.of({k: view.report for k, view in self.views.items()}, self.found.needed_plan.lead)
        return attempt.ranks(view.node for view in self.views.values())

    def to_json(self) -> dict[str, Any]:
        launch, ranks = self.found.launch, self.ranks
        return {
            "run_id": self.found.run_id,
            "state": self.verdict.state,
            "sentence": self.verdict.sentence,
            "exit_status": self.verdict.exit_status,
            "folder": str(self.found.folder) if self.found.folder else None,
            "launcher": {"by": launch.who, "pid": launch.pid, "stage": launch.stage, "alive": launch.alive()}
            if launch
            else None,
            "nodes": [
                {
                    "node_rank": k,
                    "target": view.node.target,
                    "state": view.word,
                    "why": view.unreachable or view.lost or (view.result or {}).get("reason", ""),
                    "heartbeat_age": view.heartbeat_age,
                    "ranks": {str(rank): dict(view.ranks.get(str(rank), {})) for rank in ranks[k]},
                    "findings": list(view.report.get("findings") or []),
                }
                for k, view in self.views.items()
            ],
            "notes": list(self.verdict.notes),
            "findings": _findings(self),
            "gpu_faults": list(self.faults),
            "next": list(self.verdict.next),
        }


def status_now(run: OpenRun, faults: Sequence[str] | None = None) -> Status:
    """Return the state of the run; queries the nodes only if the run folder on this machine does not suffice.

    ``faults``: those of GPUs, if the hosts have been asked for them.
    """
    if known_without_nodes(run.found):
        return Status(run.found, from_here(run.found), {})
    views = run.views()
    verdict = judge(run.found, views)
    if faults is None:
        faults = _gpu_faults(run) if verdict.state in ("running", "waiting") else ()
    return Status(run.found, verdict, views, faults)


def _gpu_faults(run: OpenRun) -> list[str]:
    """Ask the hosts of nodes with devices what is wrong with their GPUs; hosts that do not answer say nothing."""
    nodes = {k: node for k, node in run.nodes.items() if node.devices and k in run.transports}
    answers = on_nodes(nodes, lambda k: call(run.transports[k], nodes[k].python, "gpu_health", {}, _FAULTS_TIMEOUT))
    found = []
    for k, answer in sorted(answers.values.items()):
        faults = [fault for gpu in answer["gpus"] for fault in gpu_faults(f"CUDA device {gpu['index']}", gpu)]
        found += [f"{nodes[k].label}: {message}; {remedy}" for message, remedy in (*faults, *logged_faults(answer))]
    return found


def watch_status(run: OpenRun, console: Console) -> Status:
    """Show the status every two seconds until the run has ended; Ctrl-C ends only this command."""
    faults: Sequence[str] | None = None
    with ExitStack() as connections, Live(console=console, auto_refresh=False) as live:
        while True:
            if run.found.folder is not None:
                now = read_folder(run.found.folder)
                found = replace(run.found, launch=now.launch, result=now.result, plan=now.plan or run.found.plan)
                run = replace(run, found=found)
            if not run.connections and not known_without_nodes(run.found):  # the launch has reached its nodes
                run = connections.enter_context(opened(run.found))
            status = status_now(run, faults)
            faults = status.faults if status.views else None  # asked once
            live.update(rendered(status), refresh=True)
            if status.verdict.state not in ("waiting", "running", "stopping", "preparing", "unknown"):
                return status
            try:
                time.sleep(_EVERY)
            except KeyboardInterrupt:
                return status


def rendered(status: Status) -> Group:
    verdict = status.verdict
    parts: list[Text | FittedTable] = [
        Text(verdict.sentence, "bold yellow" if verdict.alarm else _STYLES.get(verdict.state, "bold"))
    ]
    if status.views:
        rows: list[tuple[Cell, ...]] = []
        ranks = status.ranks
        for k, view in status.views.items():
            state = Text(view.word, _NODE_STYLES.get(view.word, ""))
            age = view.heartbeat_age
            beat = f"{age:.1f} s ago" if age is not None else "–"
            for i, rank in enumerate(ranks[k] or [None]):
                last = view.ranks.get(str(rank), {})
                row = RankRow(rank or 0, k, ended="done" if last.get("ended") else "")
                if place := place_of(last):
                    row.update(last)
                    # evaluation counts on beyond ``steps``
                    row.epoch, row.step = place[0], min(place[1], last["steps"] - 1)
                cells = (cell or "–" for cell in step_cells([row]))
                name = "–" if rank is None else str(rank)
                rows.append(("" if i else view.node.label, name, state, *cells, "" if i else beat))
        parts.append(FittedTable(_COLUMNS, rows))
    parts += [Text(f"note: {note}", "yellow") for note in verdict.notes]
    parts += [Text(f"finding: {text}", "yellow") for text in (*_findings(status), *status.faults)]
    parts += [Text(f"next: {command}", "dim") for command in verdict.next]
    if status.found.folder:
        parts.append(Text(f"run folder: {status.found.folder}", "dim"))
    return Group(*parts)


def _findings(status: Status) -> list[str]:
    """Return the texts of the findings of all nodes, in order of time and without duplicates.

    If ``status.views`` is empty, findings that stopped the run and stragglers that later kept up again are left out.
    """
    reports = [view.report for view in status.views.values()] or [status.found.result or {}]
    found = [finding for report in reports for finding in report.get("findings") or ()]
    if status.views:
        shown = sorted(found, key=lambda finding: float(finding["t"]))
    else:
        shown = [finding for finding in lasting_findings(found) if not finding.get("stop")]
    return list(dict.fromkeys(str(finding["text"]) for finding in shown))
