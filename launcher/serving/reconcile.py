"""What there is of a serving cluster before anything is changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from launcher.config.resolve import ResolvedConfig
from launcher.errors import UsageError
from launcher.manage.node_views import OpenRun
from launcher.plan.build import offline_plan
from launcher.plan.model import LaunchPlan
from launcher.plan.serialize import read_run
from launcher.report.run_folder import FoundRun, known_here, read_folder
from launcher.serving.cluster_state import FILES, SECRETS, NodeThere, look, move_folder, read_described, read_files
from launcher.serving.membership import Lines, Roster, Standings, first_roster, roster_of, too_few
from launcher.serving.start_stop import clear_node
from launcher.text import count
from launcher.transport import close_all, connect_all
from launcher.transport.base import Transport
from launcher.transport.fanout import on_nodes


@contextmanager
def standing(wanted: ResolvedConfig, name: str, console: Console) -> Iterator[Standings]:
    """Whatever there is of that name, known here or on the hosts of ``wanted``; lines are closed in the end."""
    folder = known_here(name, [Path(wanted.run.runs_dir).expanduser()])
    found = read_folder(folder) if folder is not None else None
    _check_kind(found, name)
    plan = found.plan if found else None
    roster = roster_of(plan, found.config if found else None, wanted) if plan else first_roster(wanted)
    console.print(f"serving cluster {name}: connecting to {count(len(roster.config.nodes), 'node')}", highlight=False)
    lines = connect_all(roster.config)
    try:
        if plan is None and (plan := _on_hosts(lines, wanted, name)) is not None:
            roster = roster_of(plan, None, wanted)
            if roster.config.nodes != wanted.nodes:
                close_all(lines)
                lines = connect_all(roster.config)
        seen = _look(plan, roster, lines, name) if plan is not None else {}
        before = Standings(roster, lines, plan, seen)
        if before.stands or plan is None or same_graph(before, wanted) and not _few_copies(plan, wanted):
            yield before
            return
        _put_away(before)
        told = f"serving cluster {name} does not run, and holds other parts or fewer copies than are wanted: it is"
        console.print(f"{told} made anew; keys of notebooks, too", soft_wrap=True, markup=False, highlight=False)
    finally:
        close_all(lines)
    lines = connect_all(wanted)
    try:
        yield Standings(first_roster(wanted), lines)
    finally:
        close_all(lines)


def _few_copies(plan: LaunchPlan, wanted: ResolvedConfig) -> bool:
    return bool(too_few({node.node_rank: node.parts for node in plan.nodes}, (), wanted))


def _put_away(before: Standings) -> None:
    """Nothing of the cluster runs, and another graph is wanted: what it left on its nodes makes room for that."""

    def away(k: int) -> None:
        node, line = before.seen[k].view.node, before.lines[k]
        assert isinstance(line, Transport)
        clear_node(node, line, keeps_key=False)
        move_folder(line, node.run_dir, f"{node.run_dir}-before")

    on_nodes([k for k, one in before.seen.items() if one.view.reached and not one.view.absent], away).or_raise()


def _check_kind(found: FoundRun | None, name: str) -> None:
    if found is not None and found.plan is not None and not found.plan.serve_only:
        raise UsageError(f"--name {name}: {found.folder} is the folder of a training run; choose another --name")


def _look(plan: LaunchPlan, roster: Roster, lines: Lines, name: str) -> dict[int, NodeThere]:
    found = FoundRun(name, None, None, plan, roster.config, None)
    run = OpenRun(found, {node.node_rank: lines[node.node_rank] for node in plan.nodes})
    return look(run, (*FILES, *SECRETS))


def _on_hosts(lines: Lines, config: ResolvedConfig, name: str) -> LaunchPlan | None:
    """The plan of a serving cluster that was made from another machine, as the nodes keep it."""
    found: dict[int, LaunchPlan] = {}
    for k, line in lines.items():
        if isinstance(line, Transport):
            folder = config.nodes[k].workdir.replace("{node_rank}", "*").rstrip("/")
            texts = read_files(line, [f"{folder}/runs/{name}/node*/{file}" for file in ("run.json", "cluster.json")])
            for path, text in texts.items():
                if path.endswith("run.json") and (plan := read_run(text)).serve_only:
                    cluster = texts.get(path.replace("run.json", "cluster.json"))
                    found[read_described(cluster, path).version if cluster else 0] = plan
    return found[max(found)] if found else None


def same_graph(found: Standings, wanted: ResolvedConfig) -> bool:
    """Whether ``wanted`` asks for the parts that the cluster has, as far as the plans tell."""
    if found.plan is None:
        return False
    if wanted.data.num_parts not in (None, found.plan.num_parts):
        return False
    draft = offline_plan(found.roster.config, found.plan.run_id)
    made, asked = (plan.partition.graph if plan.partition else None for plan in (found.plan, draft))
    return made == asked


def check_goes_on(found: Standings, wanted: ResolvedConfig, name: str) -> None:
    """Raises UsageError when the cluster that runs serves another graph or cut of it, or is encrypted otherwise."""
    instead = f"`gnnfleet serve stop {name}` first, or choose another --name"
    if not same_graph(found, wanted):
        raise UsageError(
            f"serving cluster {name} runs and serves other parts than this config asks for (dataset, options, number "
            f"of parts or how they are cut differ); {instead}"
        )
    now = {"service.key" in found.seen[k].files for k in found.alive}
    if now and offline_plan(found.roster.config, name).encrypted not in now:
        is_on = "encrypted" if True in now else "not encrypted"
        raise UsageError(
            f"run.encrypt: serving cluster {name} runs and is {is_on}, this config wants it otherwise; {instead}"
        )
