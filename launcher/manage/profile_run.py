"""``gnnfleet profile``: time per phase of a step, from metrics files collected here or read from the nodes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
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
    with tempfile.TemporaryDirectory(prefix="gnnfleet-profile-") as folder:
        files = list(_metrics_files(run, Path(folder), missing))
        profile = analyse(files).profile
    if profile is None:
        why = "; ".join(f"{plan.nodes[k].label}: {words}" for k, words in sorted(missing.items()))
        raise FleetError(
            f"run {run.found.run_id}: no rank has reported timings"
            + (f" ({why})" if why else ": too few steps are done, or the run's own script trains without StepLog")
        )
    return profile, missing


def _metrics_files(run: OpenRun, folder: Path, missing: dict[int, str]) -> Iterator[Path]:
    """Yield a metrics file for each rank: the collected file or, if there is none, the last lines of the node's file.

    The last lines are written to files in ``folder``. For an unreachable node, the reason is added to ``missing``.
    """
    not_collected = []
    for node in run.found.needed_plan.nodes:
        logs = collected_logs(run.found, node.node_rank)
        if logs is None:
            not_collected.append(node.node_rank)
        else:
            yield from sorted(logs.glob(_FILES))
    views = run.views(not_collected, lambda k: ("--only", _FILES, "--tail", str(_LAST))) if not_collected else {}
    for k, view in views.items():
        if view.unreachable:
            missing[k] = view.unreachable
        for name, lines in view.lines.items():
            file = folder / f"node{k}" / Path(name).name
            file.parent.mkdir(exist_ok=True)
            file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
            yield file
