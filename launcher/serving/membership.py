"""The nodes that a serving cluster should have, from its config and its present nodes. Pure functions."""

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
from launcher.plan.partition import ensure_parts
from launcher.plan.placement import node_login
from launcher.report.run_folder import user_at_host
from launcher.serving.cluster_state import ServeContext, ServerState, read_description
from launcher.transport.base import Transport

Lines = Mapping[int, Transport | TransportError]


@dataclass(frozen=True)
class ServingState:
    """A serving cluster before anything is changed: its nodes as wanted, lines to them, and how they are."""

    roster: Roster
    lines: Lines
    plan: LaunchPlan | None = None  #: None: there is none of that name
    seen: Mapping[int, ServerState] = field(default_factory=dict)

    @property
    def alive(self) -> tuple[int, ...]:
        """Nodes whose supervisor works."""
        return tuple(k for k, one in self.seen.items() if one.view.alive)

    @property
    def away(self) -> tuple[int, ...]:
        """Nodes of the cluster that cannot be asked."""
        return tuple(k for k, one in self.seen.items() if one.view.unreachable and one.view.node.parts)

    @property
    def stands(self) -> bool:
        """Whether something of it runs, or may run where nobody can look."""
        return bool(self.alive or self.away)

    @property
    def to_start(self) -> tuple[int, ...]:
        """Nodes that are new, or in reach and dead."""
        roster = self.roster
        skip = {*self.alive, *self.away, *roster.gone, *roster.absent}
        return tuple(k for k in range(len(roster.config.nodes)) if k not in skip)


@dataclass(frozen=True)
class Roster:
    """All nodes of a serving cluster in node_rank order: those it has keep their numbers, new ones come behind."""

    config: ResolvedConfig
    joined: tuple[int, ...] = ()  #: have no parts yet
    gone: tuple[int, ...] = ()  #: hold parts, but the config file lists them no more
    absent: tuple[int, ...] = ()  #: were taken out before


def first_roster(wanted: ResolvedConfig) -> Roster:
    """Of a cluster that begins."""
    return Roster(wanted, tuple(range(len(wanted.nodes))))


def roster_of(plan: LaunchPlan, known: ResolvedConfig | None, wanted: ResolvedConfig) -> Roster:
    """Of the cluster that ``plan`` has made, now that ``wanted`` is asked for; ``known``: by which it was made.

    A node is known by its login, several on one machine by their order.
    """
    names = _numbered([target_text(node_login(wanted, node)) for node in wanted.nodes])
    left = dict(zip(names, wanted.nodes, strict=True))
    nodes: list[NodeConfig] = []
    joined: list[int] = []
    gone: list[int] = []
    absent: list[int] = []
    for node, name in zip(plan.nodes, _numbered([node.target for node in plan.nodes]), strict=True):
        listed = left.pop(name, None)
        nodes.append(listed or _config_of(node, known))
        if not node.parts:
            (joined if listed else absent).append(node.node_rank)
        elif listed is None:
            gone.append(node.node_rank)
    joined += range(len(nodes), len(nodes) + len(left))
    config = replace(wanted, nodes=(*nodes, *left.values()), data=replace(wanted.data, num_parts=plan.num_parts))
    return Roster(config, tuple(joined), tuple(gone), tuple(absent))


def _numbered(names: Sequence[str]) -> list[tuple[str, int]]:
    """Equal names told apart by their order."""
    seen: Counter[str] = Counter()
    numbered = []
    for name in names:
        numbered.append((name, seen[name]))
        seen[name] += 1
    return numbered


def _config_of(node: NodePlan, known: ResolvedConfig | None) -> NodeConfig:
    """How a node that the file lists no more was reached."""
    if known is not None and node.node_rank < len(known.nodes):
        return known.nodes[node.node_rank]
    if node.login is None:
        return NodeConfig("localhost", role="server")
    return NodeConfig(node.login.host, node.login.port, node.login.user, role="server")


def shares(held: Mapping[int, tuple[int, ...]], joined: Sequence[int], num_parts: int) -> dict[int, tuple[int, ...]]:
    """Parts of each node: ``held`` stay; who joined gets copies, as many as the average holder, those with the fewest
    holders first."""
    holders = [parts for parts in held.values() if parts]
    many = max(1, round(sum(map(len, holders)) / max(1, len(holders))))
    copies = Counter(part for parts in holders for part in parts)
    given: dict[int, tuple[int, ...]] = dict(held)
    for node_rank in joined:
        rarest = sorted(range(num_parts), key=lambda part: (copies[part], part))[:many]
        copies.update(rarest)
        given[node_rank] = tuple(sorted(rarest))
    return given


def too_few(held: Mapping[int, tuple[int, ...]], gone: Sequence[int], config: ResolvedConfig) -> tuple[int, ...]:
    """Parts that fewer nodes hold, those in ``gone`` not counted, than ``config`` wants."""
    copies = Counter(part for node_rank, parts in held.items() if node_rank not in gone for part in parts)
    return tuple(part for part in sorted(copies) if copies[part] < config.data.replicas)


def only_holders(held: Mapping[int, tuple[int, ...]], gone: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Of each node in ``gone``: the parts that no node beside those in ``gone`` holds; none for most."""
    rest = {part for node_rank, parts in held.items() if node_rank not in gone for part in parts}
    last = {node_rank: tuple(part for part in held[node_rank] if part not in rest) for node_rank in gone}
    return {node_rank: parts for node_rank, parts in last.items() if parts}


def cluster_plan(
    context: ServeContext, found: ServingState, held: Mapping[int, tuple[int, ...]], facts: Mapping[int, NodeFacts]
) -> LaunchPlan:
    """The whole cluster: nodes that run as they were planned, those to start made anew."""
    context.enter_stage("partition")
    config = found.roster.config
    return final_plan(
        _addressed(found, facts),
        run_id=context.run_id,
        facts=facts,
        manifest=ensure_parts(config, context.console) if config.makes_parts else None,
        operator=user_at_host(),
        kept=_kept_servers(found, held, facts),
        service_key=service_key(found),
    )


def _kept_servers(
    found: ServingState, held: Mapping[int, tuple[int, ...]], facts: Mapping[int, NodeFacts]
) -> KeptServers | None:
    """What stays as it is."""
    if found.plan is None:
        return None
    versions = [found.plan.version]
    for one in found.seen.values():
        if "cluster.json" in one.files:
            versions.append(read_description(one.files["cluster.json"], one.view.node.label).version)
    ports = {node.node_rank: node.service_port for node in found.plan.nodes if node.parts and node.service_port}
    parts = {k: () if k in found.roster.gone else parts for k, parts in held.items()}
    running = {node.node_rank: node for node in found.plan.nodes if node.node_rank not in facts}
    return KeptServers(max(versions) + 1, parts, ports, running)


def _addressed(found: ServingState, facts: Mapping[int, NodeFacts]) -> ResolvedConfig:
    """The config with the addresses that preflight once found for nodes that are not looked at now."""
    if found.plan is None:
        return found.roster.config
    known = {node.node_rank: node.address for node in found.plan.nodes if node.node_rank not in facts}
    nodes = [replace(node, address=known.get(k, node.address)) for k, node in enumerate(found.roster.config.nodes)]
    return replace(found.roster.config, nodes=tuple(nodes))


def service_key(found: ServingState) -> Secret:
    """The cluster's key pair, which all its servers share; '' when there is none yet."""
    return Secret(next((one.files["service.key"] for one in found.seen.values() if "service.key" in one.files), ""))


def text_of(plan: LaunchPlan, name: str) -> str:
    """A file that is the same on all nodes, as the plan has it."""
    return next(file.content for file in plan.nodes[0].files if file.dest.endswith(f"/{name}"))
