"""``gnnfleet serve``: brings a serving cluster into the state its config describes; running servers are left alone."""

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
    newest,
    parts_words,
    read_description,
    server_lines,
)
from launcher.serving.membership import ServingState, cluster_plan, only_holders, shares, text_of, too_few
from launcher.serving.reconcile import check_goes_on, serving_state
from launcher.serving.start_stop import bring_up, clear_node, own_turn, stop_gone, tell_others
from launcher.text import count
from launcher.transport.base import Transport


@dataclass(frozen=True)
class Served:
    """A serving cluster that is up."""

    cluster: ClusterDescription
    started: tuple[int, ...]  #: node_ranks that this call has started
    left: tuple[str, ...]  #: what could not be done, in words
    folder: Path

    @property
    def exit_status(self) -> int:
        return 1 if self.left else 0

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
        told = {"started": list(self.started), "left": list(self.left), "folder": str(self.folder)}
        return {"kind": "serving", **self.cluster.to_json(), **told, "exit_status": self.exit_status}


def serve(config: ClusterConfig, options: LaunchOptions, name: str, console: Console) -> Served:
    """Have serving cluster ``name`` be as ``config`` says, and leave it running.

    Raises FleetError when that cannot be; what has been started by this call is stopped then, and what was
    there before goes on.
    """
    wanted = resolve_serving(config)
    check_run_id(name, "--name")
    with Interrupts(), serving_state(wanted, name, console) as found:
        if found.stands:
            check_goes_on(found, wanted, name)
        context = ServeContext(found.roster.config, options, name, console, stands=found.stands)
        with closing(context.events):
            try:
                return make_it_so(context, found)
            except KeyboardInterrupt:
                why = "interrupted; what this call has started was stopped"
                context.give_up("interrupted", why, Interrupted.exit_status)
                raise Interrupted(why) from None
            except FleetError as error:
                context.give_up("failed", str(error), error.exit_status)
                raise


def make_it_so(context: ServeContext, found: ServingState) -> Served:
    """Start what is missing, tell those that run of it, stop those that were taken out."""
    held = _held(found)
    _check_gone(found, held, context.run_id)
    to_start = found.to_start
    if found.plan is not None and not to_start and not found.roster.gone and not _behind(found):
        context.say("nothing to do: every server in reach runs")
        return Served(
            newest(found.seen, context.run_id), (), (*_left(found), *_few_copies(found, held)), context.folder
        )
    facts = _facts(context, found, to_start) if to_start else {}
    plan = cluster_plan(context, found, held, facts)
    cluster = read_description(text_of(plan, "cluster.json"), context.run_id)
    _tell(context, cluster, to_start)
    if to_start:
        start(context, found, plan, to_start)
    else:
        context.keep_plan(plan)
    left = [*_left(found), *tell_others(plan, found.lines, [*to_start, *found.away]), *_stop_gone(context, found)]
    left += _few_copies(found, held)
    context.done()
    return Served(cluster, to_start, tuple(left), context.folder)


def _stop_gone(context: ServeContext, found: ServingState) -> list[str]:
    nodes = {k: one.view.node for k, one in found.seen.items()}
    return stop_gone(nodes, found.lines, found.seen, found.roster.gone, context.config.run.grace)


def _held(found: ServingState) -> dict[int, tuple[int, ...]]:
    """Parts of each node; none yet where the placement is made anew."""
    if found.plan is None:
        return {}
    held = {node.node_rank: node.parts for node in found.plan.nodes}
    return shares(held, found.roster.joined, found.plan.num_parts)


def _few_copies(found: ServingState, held: Mapping[int, tuple[int, ...]]) -> tuple[str, ...]:
    """That some parts are held by fewer nodes than the config wants: nodes that go on keep the parts they have."""
    few, wanted = too_few(held, found.roster.gone, found.roster.config), found.roster.config.data.replicas
    if not few:
        return ()
    return (
        f"data.replicas: {wanted} nodes are to hold each part, but fewer hold {parts_words(few)}. Servers that run "
        "keep what they have: add nodes, which take the parts with the fewest holders, or stop the cluster and serve "
        "again",
    )


def _check_gone(found: ServingState, held: Mapping[int, tuple[int, ...]], name: str) -> None:
    """Raises UsageError when parts would go with the nodes that the config lists no more."""
    lost = only_holders(held, found.roster.gone)
    if lost:
        told = "; ".join(f"{_label(found, k)} alone holds {parts_words(parts)}" for k, parts in lost.items())
        raise UsageError(
            f"the config lists some nodes of serving cluster {name} no more, but {told}. Keep them, or stop the "
            f"cluster (gnnfleet serve stop {name}) and serve anew"
        )


def _label(found: ServingState, k: int) -> str:
    return found.seen[k].view.node.label


def _behind(found: ServingState) -> bool:
    """Whether a node that runs has an older cluster.json than another."""
    texts = {one.files.get("cluster.json", "") for k, one in found.seen.items() if k in found.alive}
    return len(texts) > 1


def _left(found: ServingState) -> tuple[str, ...]:
    """Nodes of the cluster that nobody could look at."""
    return tuple(
        f"{_label(found, k)} cannot be reached ({found.seen[k].view.unreachable}); it was left as it is"
        for k in found.away
        if k not in found.roster.gone
    )


def _facts(context: ServeContext, found: ServingState, to_start: tuple[int, ...]) -> Mapping[int, NodeFacts]:
    """Preflight of the nodes that are to start; the others have their ports taken, and work."""
    draft = offline_plan(found.roster.config, context.run_id)
    attempts = {k: found.lines[k] for k in to_start}
    facts, _ = require_preflight(context, attempts, draft, new_run=found.plan is None)
    taken = {node.service_port for node in found.plan.nodes} if found.plan else set()
    return {
        k: replace(fact, free_ports=tuple(port for port in fact.free_ports if port not in taken))
        for k, fact in facts.items()
    }


def _tell(context: ServeContext, cluster: ClusterDescription, to_start: tuple[int, ...]) -> None:
    """Who serves what, and which of them are started now."""
    context.say(f"serving cluster {cluster.name}: {cluster.words}")
    for server, line in zip(cluster.servers, server_lines(cluster), strict=True):
        context.say(line + ("" if server.node_rank in to_start else "  (runs)"))


def start(context: ServeContext, found: ServingState, plan: LaunchPlan, to_start: tuple[int, ...]) -> None:
    """Bring the files of the nodes to start, start them, wait until they serve; on any error stop them."""
    part = replace(plan, nodes=tuple(node for node in plan.nodes if node.node_rank in to_start))
    lines = {k: line for k, line in found.lines.items() if isinstance(line, Transport) and k in to_start}
    with own_turn(part, lines):
        _bring(context, found, part, lines)
        context.keep_plan(plan)  # not before: it says with which program the nodes are asked
        context.enter_stage("start")
        context.say(f"starting {count(len(to_start), 'graph server')}")
        bring_up(part, lines, context.config.run)


def _bring(context: ServeContext, found: ServingState, part: LaunchPlan, lines: Mapping[int, Transport]) -> None:
    """All files of the nodes to start; what their last servers have left is cleared away."""
    for k in lines:
        if k in found.seen and found.plan is not None:
            clear_node(found.plan.nodes[k], lines[k], keeps_key=part.encrypted)
    context.enter_stage("sync")
    send_files(context, part, lines)
    guests = {path: text for one in found.seen.values() for path, text in one.files.items() if "/" in path}
    for k, node in ((node.node_rank, node) for node in part.nodes):
        for path, text in guests.items():
            lines[k].write(text.encode(), f"{node.run_dir}/{path}", mode=0o600)
