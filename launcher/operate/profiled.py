"""``gnnfleet profile``: where a run's time goes, by its ranks' metrics lines; collected ones, or asked of the nodes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console

from launcher.advice import advice
from launcher.errors import FleetError
from launcher.operate.showlogs import collected_logs
from launcher.operate.views import OpenRun
from launcher.plan import LaunchPlan
from launcher.profile import Profile, print_profile, read_profile
from launcher.report import metrics_lines

_LAST = 2000  # lines of each rank of a running node; at most one a second is written
_FILES = "metrics-rank*.jsonl"


def run_profile(run: OpenRun) -> tuple[Profile, dict[int, str]]:
    """The profile, and why which nodes are missing in it; raises FleetError where no rank tells."""
    plan = run.found.needed_plan
    missing: dict[int, str] = {}
    profile = read_profile(_lines(run, plan, missing))
    if profile is None:
        why = "; ".join(f"{plan.nodes[k].label}: {words}" for k, words in sorted(missing.items()))
        raise FleetError(
            f"run {run.found.run_id}: no rank has told where its time goes"
            + (f" ({why})" if why else ": none has done enough steps, or a script of one's own trains without StepLog")
        )
    return profile, missing


def show_profile(run: OpenRun, profile: Profile, console: Console) -> None:
    """Table and advice."""
    plan = run.found.needed_plan
    print_profile(profile, console, nodes_of(plan))
    for line in advice(profile, nodes_of(plan), plan.topology.choice, own=run.found.own):
        console.print(f"- {line}", soft_wrap=True, markup=False)


def to_json(run: OpenRun, profile: Profile) -> dict[str, Any]:
    """For ``--json``."""
    plan = run.found.needed_plan
    told = advice(profile, nodes_of(plan), plan.topology.choice, own=run.found.own)
    return {"run_id": run.found.run_id, **profile.to_json(), "advice": told}


def nodes_of(plan: LaunchPlan) -> dict[int, int]:
    """node_rank by rank."""
    return {rank: node.node_rank for node in plan.nodes for rank in node.ranks}


def _lines(run: OpenRun, plan: LaunchPlan, missing: dict[int, str]) -> Iterator[Mapping[str, Any]]:
    """Metrics lines of all ranks; nodes whose files are not all here are asked for their last ones."""
    away = []
    for node in plan.nodes:
        folder = collected_logs(run.found, node.node_rank)
        if folder is None:
            away.append(node.node_rank)
        else:
            yield from metrics_lines(sorted(folder.glob(_FILES)))
    views = run.look(away, lambda k: ("--only", _FILES, "--tail", str(_LAST))) if away else {}
    for k, view in views.items():
        if view.unreachable:
            missing[k] = view.unreachable
        for lines in view.lines.values():
            yield from filter(None, map(_parsed, lines))


def _parsed(text: str) -> Mapping[str, Any] | None:
    try:
        line = json.loads(text)
    except ValueError:  # an own script's
        return None
    return line if isinstance(line, dict) else None
