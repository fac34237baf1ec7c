"""Finds a serving cluster by name and compares it with a config, before ``serve`` changes it."""

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
from launcher.serving.cluster_state import (
    FILES,
    SECRETS,
    ServerState,
    move_folder,
    read_description,
    read_files,
    server_states,
)
from launcher.serving.membership import Connections, Roster, ServingState, first_roster, roster_of, too_few_copies
from launcher.serving.start_stop import clear_node
from launcher.text import count
from launcher.transport import close_all, connect_all
from launcher.transport.base import Transport
from launcher.transport.fanout import on_nodes


@contextmanager
def serving_state(wanted: ResolvedConfig, name: str, console: Console) -> Iterator[ServingState]:
    """Find serving cluster ``name`` on this machine or on the hosts of ``wanted``, and connect to its nodes.

    A cluster that does not run is compared with ``wanted``. If it has other parts, or too few copies of them, its files
    are moved away, and it counts as new. Connections are closed on exit.
    """
    folder = known_here(name, [Path(wanted.run.runs_dir).expanduser()])
    found = read_folder(folder) if folder is not None else None
    _check_kind(found, name)
    plan = found.plan if found else None
    roster = roster_of(plan, found.config if found else None, wanted) if plan else first_roster(wanted)
    console.print(f"serving cluster {name}: connecting to {count(len(roster.config.nodes), 'node')}", highlight=False)
    connections = connect_all(roster.config)
    try:
        if plan is None and (plan := _plan_on_hosts(connections, wanted, name)) is not None:
            roster = roster_of(plan, None, wanted)
            if roster.config.nodes != wanted.nodes:
                close_all(connections)
                connections = connect_all(roster.config)
        seen = _server_states(plan, roster, connections, name) if plan is not None else {}
        before = ServingState(roster, connections, plan, seen)
        if before.running or plan is None or same_graph(before, wanted) and not _few_copies(plan, wanted):
            yield before
            return
        _move_away(before)
        why = f"serving cluster {name} does not run, and holds other parts or fewer copies than the config asks for"
        console.print(
            f"{why}: it is created again, and client keys must be made again",
            soft_wrap=True,
            markup=False,
            highlight=False,
        )
    finally:
        close_all(connections)
    connections = connect_all(wanted)
    try:
        yield ServingState(first_roster(wanted), connections)
    finally:
        close_all(connections)


def _few_copies(plan: LaunchPlan, wanted: ResolvedConfig) -> bool:
    return bool(too_few_copies({node.node_rank: node.parts for node in plan.nodes}, (), wanted))


def _move_away(before: ServingState) -> None:
    """End the processes of the cluster on all nodes, and rename its run folder to ``<folder>-before``."""

    def move(k: int) -> None:
        node, transport = before.seen[k].view.node, before.connections[k]
        assert isinstance(transport, Transport)
        clear_node(node, transport, keeps_key=False)
        move_folder(transport, node.run_dir, f"{node.run_dir}-before")

    on_nodes([k for k, one in before.seen.items() if one.view.reached and not one.view.absent], move).or_raise()


def _check_kind(found: FoundRun | None, name: str) -> None:
    if found is not None and found.plan is not None and not found.plan.serve_only:
        raise UsageError(f"--name {name}: {found.folder} is the folder of a training run; choose another --name")


def _server_states(plan: LaunchPlan, roster: Roster, connections: Connections, name: str) -> dict[int, ServerState]:
    found = FoundRun(name, None, None, plan, roster.config, None)
    run = OpenRun(found, {node.node_rank: connections[node.node_rank] for node in plan.nodes})
    return server_states(run, (*FILES, *SECRETS))


def _plan_on_hosts(connections: Connections, config: ResolvedConfig, name: str) -> LaunchPlan | None:
    # The cluster may have been started from another machine.
    found: dict[int, LaunchPlan] = {}
    for k, transport in connections.items():
        if isinstance(transport, Transport):
            folder = config.nodes[k].workdir.replace("{node_rank}", "*").rstrip("/")
            texts = read_files(
                transport, [f"{folder}/runs/{name}/node*/{file}" for file in ("run.json", "cluster.json")]
            )
            for path, text in texts.items():
                if path.endswith("run.json") and (plan := read_run(text)).serve_only:
                    cluster = texts.get(path.replace("run.json", "cluster.json"))
                    found[read_description(cluster, path).version if cluster else 0] = plan
    return found[max(found)] if found else None


def same_graph(found: ServingState, wanted: ResolvedConfig) -> bool:
    """Whether the cluster's plan has the graph and the number of parts that ``wanted`` asks for."""
    if found.plan is None:
        return False
    if wanted.data.num_parts not in (None, found.plan.num_parts):
        return False
    draft = offline_plan(found.roster.config, found.plan.run_id)
    made, asked = (plan.partition.graph if plan.partition else None for plan in (found.plan, draft))
    return made == asked


def check_compatible(found: ServingState, wanted: ResolvedConfig, name: str) -> None:
    """Raise UsageError if a running cluster differs from ``wanted`` in its parts or its encryption."""
    instead = f"`gnnfleet serve stop {name}` first, or choose another --name"
    if not same_graph(found, wanted):
        raise UsageError(
            f"serving cluster {name} runs and serves other parts than this config asks for (they differ in dataset, "
            f"options, number of parts or partitioning); {instead}"
        )
    now = {"service.key" in found.seen[k].files for k in found.alive}
    if now and offline_plan(found.roster.config, name).encrypted not in now:
        is_on = "encrypted" if True in now else "not encrypted"
        raise UsageError(
            f"run.encrypt: serving cluster {name} runs and is {is_on}, but this config asks for the opposite; {instead}"
        )
