"""Computes the nodes and parts that a serving cluster should have, from its config and its current nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from launcher.command import Secret
from launcher.config.resolve import ResolvedConfig
from launcher.config.schema import NodeConfig
from launcher.errors import TransportError
from launcher.plan.build import final_plan
from launcher.plan.model import KeptServers, LaunchPlan, NodeFacts, NodePlan, target_text
from launcher.plan.placement import node_login
from launcher.report.launch_file import user_at_host
from launcher.serving.cluster_state import ServeContext, ServerState, read_description
from launcher.transport.base import Transport

Connections = Mapping[int, Transport | TransportError]


@dataclass(frozen=True)
class ServingState:
    """State of a serving cluster before ``serve`` changes it: wanted nodes, connections, and current nodes."""

    roster: Roster
    connections: Connections
    plan: LaunchPlan | None = None  #: current plan; None: no cluster of that name exists
    seen: Mapping[int, ServerState] = field(default_factory=dict)  #: current nodes by node_rank

    @property
    def alive(self) -> tuple[int, ...]:
        return tuple(k for k, one in self.seen.items() if one.view.alive)

    @property
    def unreachable(self) -> tuple[int, ...]:
        """The node_ranks of nodes that hold parts but cannot be reached."""
        return tuple(k for k, one in self.seen.items() if one.view.unreachable and one.view.node.parts)

    @property
    def running(self) -> bool:
        """Whether any node is running, or cannot be reached and so may be running."""
        return bool(self.alive or self.unreachable)

    @property
    def to_start(self) -> tuple[int, ...]:
        """The node_ranks of nodes to start: new ones, and reachable ones that do not run."""
        roster = self.roster
        skip = {*self.alive, *self.unreachable, *roster.removed, *roster.removed_before}
        return tuple(k for k in range(len(roster.config.nodes)) if k not in skip)


@dataclass(frozen=True)
class Roster:
    """All nodes of a serving cluster. Current nodes keep their node_rank; new nodes get the next numbers."""

    config: ResolvedConfig
    joined: tuple[int, ...] = ()  #: new nodes, which have no parts yet
    removed: tuple[int, ...] = ()  #: nodes that hold parts, but are no longer in the config
    removed_before: tuple[int, ...] = ()  #: nodes that an earlier ``serve`` has removed


def first_roster(wanted: ResolvedConfig) -> Roster:
    return Roster(wanted, tuple(range(len(wanted.nodes))))


def roster_of(plan: LaunchPlan, known: ResolvedConfig | None, wanted: ResolvedConfig) -> Roster:
    """Match the nodes of the cluster's ``plan`` with those of the config ``wanted``, by user, host and port.

    Several nodes with the same user, host and port are matched in order. ``known``: the config from which ``plan`` was
    made; None if unknown.
    """
    names = _numbered([target_text(node_login(wanted, node)) for node in wanted.nodes])
    unmatched = dict(zip(names, wanted.nodes, strict=True))
    nodes: list[NodeConfig] = []
    joined: list[int] = []
    removed: list[int] = []
    removed_before: list[int] = []
    for node, name in zip(plan.nodes, _numbered([node.target for node in plan.nodes]), strict=True):
        listed = unmatched.pop(name, None)
        nodes.append(listed or _config_of(node, known))
        if not node.parts:
            (joined if listed else removed_before).append(node.node_rank)
        elif listed is None:
            removed.append(node.node_rank)
    joined += range(len(nodes), len(nodes) + len(unmatched))
    config = replace(wanted, nodes=(*nodes, *unmatched.values()), data=replace(wanted.data, num_parts=plan.num_parts))
    return Roster(config, tuple(joined), tuple(removed), tuple(removed_before))


def _numbered(names: Sequence[str]) -> list[tuple[str, int]]:
    """Pair each name with how often it has occurred before in ``names``."""
    seen: Counter[str] = Counter()
    numbered = []
    for name in names:
        numbered.append((name, seen[name]))
        seen[name] += 1
    return numbered


def _config_of(node: NodePlan, known: ResolvedConfig | None) -> NodeConfig:
    if known is not None and node.node_rank < len(known.nodes):
        return known.nodes[node.node_rank]
    if node.login is None:
        return NodeConfig("localhost", role="server")
    return NodeConfig(node.login.host, node.login.port, node.login.user, role="server")


def assign_parts(
    held: Mapping[int, tuple[int, ...]], joined: Sequence[int], num_parts: int
) -> dict[int, tuple[int, ...]]:
    """Return the parts of each node, by node_rank. Nodes in ``held`` keep their parts.

    Each node in ``joined`` gets as many parts as an average holder has: the parts with the fewest copies.
    """
    holders = [parts for parts in held.values() if parts]
    number = max(1, round(sum(map(len, holders)) / max(1, len(holders))))
    copies = Counter(part for parts in holders for part in parts)
    assigned: dict[int, tuple[int, ...]] = dict(held)
    for node_rank in joined:
        rarest = sorted(range(num_parts), key=lambda part: (copies[part], part))[:number]
        copies.update(rarest)
        assigned[node_rank] = tuple(sorted(rarest))
    return assigned


def too_few_copies(
    held: Mapping[int, tuple[int, ...]], removed: Sequence[int], config: ResolvedConfig
) -> tuple[int, ...]:
    """Return the parts that fewer than ``data.replicas`` nodes hold, not counting nodes in ``removed``."""
    copies = Counter(part for node_rank, parts in held.items() if node_rank not in removed for part in parts)
    return tuple(part for part in sorted(copies) if copies[part] < config.data.replicas)


def only_holders(held: Mapping[int, tuple[int, ...]], removed: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Return the parts that only nodes in ``removed`` hold, by node_rank. A node without such a part is left out."""
    rest = {part for node_rank, parts in held.items() if node_rank not in removed for part in parts}
    last = {node_rank: tuple(part for part in held[node_rank] if part not in rest) for node_rank in removed}
    return {node_rank: parts for node_rank, parts in last.items() if parts}


def cluster_plan(
    context: ServeContext, found: ServingState, held: Mapping[int, tuple[int, ...]], facts: Mapping[int, NodeFacts]
) -> LaunchPlan:
    """Return the plan of the whole cluster. Nodes in ``facts`` are planned anew; others keep their plan."""
    context.enter_stage("partition")
    config = found.roster.config
    return final_plan(
        _addressed(found, facts),
        run_id=context.run_id,
        facts=facts,
        manifest=context.parts(config),
        operator=user_at_host(),
        kept=_kept_servers(found, held, facts),
        service_key=service_key(found),
    )


def _kept_servers(
    found: ServingState, held: Mapping[int, tuple[int, ...]], facts: Mapping[int, NodeFacts]
) -> KeptServers | None:
    """Return what a new plan keeps of the cluster: parts, ports and running nodes. None for a new cluster.

    Also returns the version of the new plan: the highest version of the cluster's plans, plus one.
    ``facts``: the nodes that do not run yet, by node_rank.
    """
    if found.plan is None:
        return None
    versions = [found.plan.version]
    for one in found.seen.values():
        if "cluster.json" in one.files:
            versions.append(read_description(one.files["cluster.json"], one.view.node.label).version)
    ports = {node.node_rank: node.service_port for node in found.plan.nodes if node.parts and node.service_port}
    parts = {k: () if k in found.roster.removed else parts for k, parts in held.items()}
    running = {node.node_rank: node for node in found.plan.nodes if node.node_rank not in facts}
    return KeptServers(max(versions) + 1, parts, ports, running)


def _addressed(found: ServingState, facts: Mapping[int, NodeFacts]) -> ResolvedConfig:
    # A node that is not in ``facts`` keeps the address in the present plan.
    if found.plan is None:
        return found.roster.config
    known = {node.node_rank: node.address for node in found.plan.nodes if node.node_rank not in facts}
    nodes = [replace(node, address=known.get(k, node.address)) for k, node in enumerate(found.roster.config.nodes)]
    return replace(found.roster.config, nodes=tuple(nodes))


def service_key(found: ServingState) -> Secret:
    """Return the content of ``service.key``, the key pair that all servers share; '' if no server has it."""
    return Secret(next((one.files["service.key"] for one in found.seen.values() if "service.key" in one.files), ""))
