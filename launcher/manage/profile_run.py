"""``gnnfleet profile``: where a run's time goes, from collected metrics lines or those on the nodes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from launcher.errors import FleetError
from launcher.manage.node_views import OpenRun
from launcher.manage.show_logs import collected_logs
from launcher.report.profile import Profile, analyse, print_profile

_LAST = 2000  # lines of each rank of a running node; at most one a second is written

_FILES = "metrics-rank*.jsonl"


def run_profile(run: OpenRun) -> tuple[Profile, dict[int, str]]:
    """The profile, and why which nodes are missing in it; raises FleetError where no rank tells."""
    plan = run.found.needed_plan
    missing: dict[int, str] = {}
    with tempfile.TemporaryDirectory(prefix="gnnfleet-profile-") as folder:
        files = list(_metrics_files(run, Path(folder), missing))
        profile = analyse(files, plan.topology.choice, own=run.found.own).profile
    if profile is None:
        why = "; ".join(f"{plan.nodes[k].label}: {words}" for k, words in sorted(missing.items()))
        raise FleetError(
            f"run {run.found.run_id}: no rank has told where its time goes"
            + (f" ({why})" if why else ": none has done enough steps, or a script of one's own trains without StepLog")
        )
    return profile, missing


def show_profile(profile: Profile, console: Console) -> None:
    """Print table and advice."""
    print_profile(profile, console)
    for line in profile.advice:
        console.print(f"- {line}", soft_wrap=True, markup=False)


def to_json(run: OpenRun, profile: Profile) -> dict[str, Any]:
    """For ``--json``."""
    return {"run_id": run.found.run_id, **profile.summary, "advice": list(profile.advice)}


def _metrics_files(run: OpenRun, folder: Path, missing: dict[int, str]) -> Iterator[Path]:
    """Metrics files of all ranks; of nodes whose files are not all here the last lines, written below ``folder``."""
    away = []
    for node in run.found.needed_plan.nodes:
        logs = collected_logs(run.found, node.node_rank)
        if logs is None:
            away.append(node.node_rank)
        else:
            yield from sorted(logs.glob(_FILES))
    views = run.views(away, lambda k: ("--only", _FILES, "--tail", str(_LAST))) if away else {}
    for k, view in views.items():
        if view.unreachable:
            missing[k] = view.unreachable
        for name, lines in view.lines.items():
            file = folder / f"node{k}" / Path(name).name
            file.parent.mkdir(exist_ok=True)
            file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
            yield file
