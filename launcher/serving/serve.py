"""``gnnfleet serve``: starts or changes a serving cluster to match its config; running servers keep running."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from launcher.config.resolve import resolve_serving
from launcher.config.schema import ClusterConfig
from launcher.errors import FleetError, Interrupted, UsageError
from launcher.plan.build import offline_plan
from launcher.plan.model import LaunchPlan, NodeFacts
from launcher.run.interrupts import Interrupts
from launcher.run.launch import require_preflight, send_files
from launcher.run.options import LaunchOptions, check_run_id
from launcher.serving.cluster_state import (
    ClusterDescription,
    ServeContext,
    newest_description,
    parts_words,
    read_description,
    server_rows,
)
from launcher.serving.membership import ServingState, assign_parts, cluster_plan, only_holders, too_few_copies
from launcher.serving.reconcile import check_compatible, serving_state
from launcher.serving.start_stop import clear_node, start_lock, start_servers, stop_removed, update_running
from launcher.text import count
from launcher.transport.base import Transport


@dataclass(frozen=True)
class Served:
    """Result of ``serve``: the cluster, the nodes that were started, and notes on what could not be done."""

    cluster: ClusterDescription
    started: tuple[int, ...]  #: node_ranks started by this call
    left: tuple[str, ...]  #: what could not be done
    folder: Path

    @property
    def exit_status(self) -> int:
        return 1 if self.left else 0

    def to_json(self) -> dict[str, Any]:
        values = {"started": list(self.started), "left": list(self.left), "folder": str(self.folder)}
        return {"kind": "serving", **self.cluster.to_json(), **values, "exit_status": self.exit_status}


def serve(config: ClusterConfig, options: LaunchOptions, name: str, console: Console) -> Served:
    """Start or change serving cluster ``name`` to match ``config``, and leave it running.

    Raises FleetError on failure; servers started by this call are then stopped, others keep running.
    """
    wanted = resolve_serving(config)
    check_run_id(name, "--name")
    with Interrupts(), serving_state(wanted, name, console) as found:
        if found.running:
            check_compatible(found, wanted, name)
        context = ServeContext(found.roster.config, options, name, console, running=found.running)
        with closing(context.events):
            try:
                return reconcile(context, found)
            except KeyboardInterrupt:
                why = "interrupted; the servers started by this command were stopped"
                context.give_up("stopped", why, Interrupted.exit_status)
                raise Interrupted(why) from None
            except FleetError as error:
                context.give_up("failed", str(error), error.exit_status)
                raise


def reconcile(context: ServeContext, found: ServingState) -> Served:
    """Start missing servers, send the new plan to running servers, and stop those that the config no longer lists."""
    held = _held(found)
    _check_removed(found, held, context.run_id)
    to_start = found.to_start
    if found.plan is not None and not to_start and not found.roster.removed and not _versions_differ(found):
        context.say("nothing to do: every reachable server is running")
        return Served(
            newest_description(found.seen, context.run_id),
            (),
            (*_left(found), *_few_copies(found, held)),
            context.folder,
        )
    facts = _facts(context, found, to_start) if to_start else {}
    plan = cluster_plan(context, found, held, facts)
    cluster = read_description(plan.nodes[0].file("cluster.json").content, context.run_id)
    _print_servers(context, cluster, to_start)
    if to_start:
        start(context, found, plan, to_start)
    else:
        context.keep_plan(plan)
    updated = update_running(plan, found.connections, [*to_start, *found.unreachable])
    left = [*_left(found), *updated, *_stop_removed(context, found)]
    left += _few_copies(found, held)
    context.done()
    return Served(cluster, to_start, tuple(left), context.folder)


def _stop_removed(context: ServeContext, found: ServingState) -> list[str]:
    nodes = {k: one.view.node for k, one in found.seen.items()}
    return stop_removed(nodes, found.connections, found.seen, found.roster.removed, context.config.run.grace)


def _held(found: ServingState) -> dict[int, tuple[int, ...]]:
    # The plan of a new cluster assigns the parts.
    if found.plan is None:
        return {}
    held = {node.node_rank: node.parts for node in found.plan.nodes}
    return assign_parts(held, found.roster.joined, found.plan.num_parts)


def _few_copies(found: ServingState, held: Mapping[int, tuple[int, ...]]) -> tuple[str, ...]:
    # Running servers keep their parts, so copies may be missing.
    few, wanted = too_few_copies(held, found.roster.removed, found.roster.config), found.roster.config.data.replicas
    if not few:
        return ()
    return (
        f"data.replicas: each part should be on {wanted} nodes, but fewer hold {parts_words(few)}. Running servers "
        "keep their parts: add nodes, which get the parts with the fewest copies, or stop the cluster and serve "
        "again",
    )


def _check_removed(found: ServingState, held: Mapping[int, tuple[int, ...]], name: str) -> None:
    # A node that the config no longer lists may hold the last copy of a part.
    lost = only_holders(held, found.roster.removed)
    if lost:
        holders = "; ".join(f"{_label(found, k)} alone holds {parts_words(parts)}" for k, parts in lost.items())
        raise UsageError(
            f"the config no longer lists some nodes of serving cluster {name}, but {holders}. Keep them, or stop the "
            f"cluster (gnnfleet serve stop {name}) and serve again"
        )


def _label(found: ServingState, k: int) -> str:
    return found.seen[k].view.node.label


def _versions_differ(found: ServingState) -> bool:
    texts = {one.files.get("cluster.json", "") for k, one in found.seen.items() if k in found.alive}
    return len(texts) > 1


def _left(found: ServingState) -> tuple[str, ...]:
    return tuple(
        f"{_label(found, k)} cannot be reached ({found.seen[k].view.unreachable}); it was not changed"
        for k in found.unreachable
        if k not in found.roster.removed
    )


def _facts(context: ServeContext, found: ServingState, to_start: tuple[int, ...]) -> Mapping[int, NodeFacts]:
    # Ports that the plan gives to other servers are not free.
    draft = offline_plan(found.roster.config, context.run_id)
    attempts = {k: found.connections[k] for k in to_start}
    facts, _ = require_preflight(context, attempts, draft, new_run=found.plan is None)
    used = {node.service_port for node in found.plan.nodes} if found.plan else set()
    return {
        k: replace(fact, free_ports=tuple(port for port in fact.free_ports if port not in used))
        for k, fact in facts.items()
    }


def _print_servers(context: ServeContext, cluster: ClusterDescription, to_start: tuple[int, ...]) -> None:
    context.say(f"serving cluster {cluster.name}: {cluster.words}")
    for server, row in zip(cluster.servers, server_rows(cluster), strict=True):
        context.say(row + ("" if server.node_rank in to_start else "  (running)"))


def start(context: ServeContext, found: ServingState, plan: LaunchPlan, to_start: tuple[int, ...]) -> None:
    """Start the nodes ``to_start`` with their files, and wait until they serve; on any error, stop them."""
    new = replace(plan, nodes=tuple(node for node in plan.nodes if node.node_rank in to_start))
    transports = {k: each for k, each in found.connections.items() if isinstance(each, Transport) and k in to_start}
    with start_lock(new, transports):
        _send_files(context, found, new, transports)
        context.keep_plan(plan)  # after sending: the plan names the programs that other commands run on the nodes
        context.enter_stage("start")
        context.say(f"starting {count(len(to_start), 'graph server')}")
        start_servers(new, transports, context.config.run)


def _send_files(
    context: ServeContext, found: ServingState, new: LaunchPlan, transports: Mapping[int, Transport]
) -> None:
    # First removes what earlier servers left. The files include the public keys of clients.
    for k in transports:
        if k in found.seen and found.plan is not None:
            clear_node(found.plan.nodes[k], transports[k], keeps_key=new.encrypted)
    context.enter_stage("sync")
    send_files(context, new, transports)
    client_keys = {path: text for one in found.seen.values() for path, text in one.files.items() if "/" in path}
    for k, node in ((node.node_rank, node) for node in new.nodes):
        for path, text in client_keys.items():
            transports[k].write(text.encode(), f"{node.run_dir}/{path}", mode=0o600)
