"""The nodes of a serving cluster, from its config file and from what it is already: pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from launcher.config.roles import serving_config
from launcher.config.schema import ClusterConfig, NodeConfig
from launcher.errors import UsageError
from launcher.plan.build import LaunchPlan, NodePlan
from launcher.plan.placement import node_login, target_text


@dataclass(frozen=True)
class Roster:
    """All nodes of a serving cluster in node_rank order: those it has keep their numbers, new ones come behind."""

    config: ClusterConfig
    joined: tuple[int, ...] = ()  #: have no parts yet
    gone: tuple[int, ...] = ()  #: hold parts, but the config file lists them no more
    absent: tuple[int, ...] = ()  #: were taken out before


def wanted_cluster(config: ClusterConfig) -> ClusterConfig:
    """What ``gnnfleet serve`` makes of a config file; raises UsageError where nothing in it can serve."""
    if config.data.serving is not None:
        raise UsageError(
            f"data.serving: this config attaches to serving cluster {config.data.serving}, and one that serves holds "
            "the graph itself; leave that key out and name a data.dataset"
        )
    if not any(node.holds for node in config.nodes):
        raise UsageError("nothing to serve from: every node is a client; give the hosts of the graph `role: server`")
    return serving_config(replace(config, run=replace(config.run, on_client_loss="stop")))


def first_roster(wanted: ClusterConfig) -> Roster:
    """Of a cluster that begins."""
    return Roster(wanted, tuple(range(len(wanted.nodes))))


def roster_of(plan: LaunchPlan, known: ClusterConfig | None, wanted: ClusterConfig) -> Roster:
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


def _config_of(node: NodePlan, known: ClusterConfig | None) -> NodeConfig:
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


def too_few(held: Mapping[int, tuple[int, ...]], gone: Sequence[int], config: ClusterConfig) -> tuple[int, ...]:
    """Parts that fewer nodes hold, those in ``gone`` not counted, than ``config`` wants."""
    copies = Counter(part for node_rank, parts in held.items() if node_rank not in gone for part in parts)
    return tuple(part for part in sorted(copies) if copies[part] < config.data.replicas)


def only_holders(held: Mapping[int, tuple[int, ...]], gone: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Of each node in ``gone``: the parts that no node beside those in ``gone`` holds; none for most."""
    rest = {part for node_rank, parts in held.items() if node_rank not in gone for part in parts}
    last = {node_rank: tuple(part for part in held[node_rank] if part not in rest) for node_rank in gone}
    return {node_rank: parts for node_rank, parts in last.items() if parts}
