"""``gnnfleet profile``: time per phase of a step, from metrics files collected here or read from the nodes."""

from __future__ import annotations

import tempfile
from pathlib import Path

from launcher.errors import FleetError
from launcher.manage.node_views import OpenRun
from launcher.manage.show_logs import collected_logs
from launcher.report.profile import Profile, analyse

_LAST = 2000  # metrics lines read per rank of a running node; a rank writes at most one per second

_FILES = "metrics-rank*.jsonl"


def run_profile(run: OpenRun) -> tuple[Profile, dict[int, str]]:
    """Return the profile of a run and, by node_rank, the errors of unreachable nodes.

    Raises FleetError if no rank has timings.
    """
    plan = run.found.needed_plan
    missing: dict[int, str] = {}
    files: list[Path] = []
    not_collected = []
    for node in plan.nodes:
        logs = collected_logs(run.found, node.node_rank)
        if logs is None:
            not_collected.append(node.node_rank)
        else:
            files += sorted(logs.glob(_FILES))
    with tempfile.TemporaryDirectory(prefix="gnnfleet-profile-") as folder:
        # Of files that are not here, the last lines.
        views = run.views(not_collected, lambda k: ("--only", _FILES, "--tail", str(_LAST))) if not_collected else {}
        for k, view in views.items():
            if view.unreachable:
                missing[k] = view.unreachable
            for name, lines in view.lines.items():
                file = Path(folder) / f"node{k}" / Path(name).name
                file.parent.mkdir(exist_ok=True)
                file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
                files.append(file)
        profile = analyse(files).profile
    if profile is None:
        why = "; ".join(f"{plan.nodes[k].label}: {words}" for k, words in sorted(missing.items()))
        raise FleetError(
            f"run {run.found.run_id}: no rank has reported timings"
            + (f" ({why})" if why else ": too few steps are done, or the run's own script trains without StepLog")
        )
    return profile, missing
