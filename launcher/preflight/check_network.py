"""Findings of the network test: ports and interfaces, and blocked routes, combined into few groups."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from launcher.preflight.connectivity import CONTROL, FREE, MASTER, SERVICE, BlockedRoute, Connectivity, interface_of
from launcher.preflight.finding import Finding
from launcher.preflight.survey import Survey
from launcher.text import spans

_SETTINGS = {MASTER: "run.master_port", CONTROL: "run.control_port", SERVICE: "run.service_port"}

_REASONS = {
    "refused": "refused",
    "no answer": "no answer",
    "no route": "no route",
    "reset": "reset",
    "stranger": "another program answers there",
    "name": "the name cannot be resolved",
}

_ALL = ""  # a use: all ports of the node


class _Group(NamedTuple):
    """Blocked routes from some nodes to others, on ports of the same use and for the same reason."""

    sources: frozenset[int]  #: node_ranks
    targets: tuple[int, ...]  #: node_ranks
    use: str  #: ``_ALL`` if every use is blocked
    why: str  #: a key of ``_REASONS``


def network_findings(survey: Survey, result: Connectivity) -> Iterator[Finding]:
    """Yield findings on ports, interfaces and blocked routes, and an ``ok`` finding for each node without problems."""
    for k, listeners in result.listening.items():
        for use, why in listeners.refused.items():
            remedy = f"end the process that uses it, or set `{_SETTINGS[use]}` to another port"
            yield survey.finding(k, "block", use, f"cannot listen on its {use}: {why}", remedy)
    groups = _grouped(result.blocked, result.listening, result.reach)
    affected = {k for group in groups for k in (*group.sources, *group.targets)}
    success = f"all {result.pairs:,} pairs reach each other"
    if result.untested:
        success = f"{result.pairs:,} of {result.pairs + result.untested:,} pairs tested, all reach each other"
    if groups:
        success = "all routes from and to this node are open"
    for k in result.listening:
        if k not in affected:
            yield survey.finding(k, "ok", "network", success)
    for k, listeners in result.listening.items():
        address = result.address[k]
        name = interface_of(survey.probes[k], address)
        asked = survey.config.nodes[k].interface
        if asked and name != asked:
            known = ", ".join(f"{address} ({name})" for name, address in survey.probes[k]["addresses"])
            message = f"no address on interface {asked}; addresses of the host: {known}"
            yield survey.finding(k, "block", "interface", message, "correct `interface` of this node")
        elif address == listeners.own[0]:
            yield survey.finding(k, "ok", "interface", f"traffic goes over {name or 'an unnamed interface'}")
        else:
            message = f"traffic goes over {name} ({address}), as not all nodes reach {listeners.own[0]}"
            yield survey.finding(k, "ok", "interface", message)
    for group in groups:
        everyone = len(result.listening)
        sources = _node_names(group.sources, everyone - len(group.targets) if len(group.targets) == 1 else everyone)
        targets = _node_names(group.targets, everyone - 1 if len(group.sources) == 1 else everyone)
        port = _port_text(result, group)
        free = " on free ports" if group.use == FREE else ""
        message = f"{sources} → {targets}{port} blocked{free}: {_REASONS.get(group.why, group.why)}"
        node_rank = min(group.sources) if len(group.sources) == 1 else group.targets[0]
        yield survey.finding(node_rank, "block", "network", message, _remedy(survey, result, group))


# -- grouping ------------------------------------------------------------


def _grouped(
    blocked: Collection[BlockedRoute], nodes: Collection[int], wanted: Mapping[int, frozenset[int]]
) -> list[_Group]:
    """Combine blocked routes into few groups. All routes of a node that reaches no other node form one group.

    ``wanted``: the nodes that each node must reach.
    """
    lost: dict[int, set[int]] = defaultdict(set)
    for one in blocked:
        lost[one.source].add(one.endpoint.node_rank)
    isolated = {k for k, others in lost.items() if len(wanted[k]) > 1 and others >= wanted[k]}
    isolated = isolated if len(isolated) < len(nodes) else set()
    groups = []
    for k in sorted(isolated):
        reasons = [one.why for one in blocked if one.source == k]
        commonest = max(sorted(set(reasons)), key=reasons.count)
        groups.append(_Group(frozenset([k]), tuple(sorted(wanted[k])), _ALL, commonest))
    sources: dict[tuple[int, str, str], set[int]] = defaultdict(set)
    for one in blocked:
        if one.source not in isolated:
            sources[one.endpoint.node_rank, one.endpoint.use, one.why].add(one.source)

    # Targets with the same sources are one group, and so are the uses of a target that is closed altogether.
    closed: dict[tuple[int, frozenset[int], str], set[str]] = defaultdict(set)
    for (target, use, why), who in sources.items():
        others = frozenset(who - {target}) or frozenset([target])  # the lead node also connects to itself
        closed[target, others, why].add(use)
    targets: dict[tuple[frozenset[int], str, str], list[int]] = defaultdict(list)
    for (target, others, why), which in closed.items():
        for use in [_ALL] if which >= {SERVICE, FREE} else sorted(which):
            targets[others, use, why].append(target)
    found = [_Group(who, tuple(sorted(ks)), use, why) for (who, use, why), ks in targets.items()]
    return groups + sorted(found, key=lambda group: (group.targets, group.use))


# -- messages ------------------------------------------------------------


def _node_names(ranks: Collection[int], all_of: int) -> str:
    return "all" if len(ranks) == all_of and len(ranks) > 1 else spans(sorted(ranks), "node")


def _port_text(result: Connectivity, group: _Group) -> str:
    """Return the port of the group's targets: ``:29500``, or ``(service ports)`` if the targets have different ports.

    '' if the blocked routes of the group concern all ports, or the free ports that gloo and NCCL choose.
    """
    if group.use in (_ALL, FREE):
        return ""
    ports = {result.listening[k].ports[group.use] for k in group.targets}
    return f":{ports.pop()}" if len(ports) == 1 else f" ({group.use}s)"


def _remedy(survey: Survey, result: Connectivity, group: _Group) -> str:
    found = set()
    for k in group.targets:
        if group.use == MASTER and survey.config.run.master_addr != "auto":
            found.add(survey.config.run.master_addr)
        else:
            found.add(result.address[k] if group.use == FREE else result.listening[k].public or result.address[k])
    addresses = ", ".join(sorted(found)[:3])
    hosts = spans(sorted(group.targets), "node")
    sources = spans(sorted(group.sources), "node")
    own = f"`address` or `interface` of {hosts}"
    ports = {
        _ALL: "all TCP ports",
        FREE: "all TCP ports (gloo and NCCL use free ones)",
    }.get(group.use, f"TCP port{_port_text(result, group).replace(':', ' ')}")
    wanted = len(result.reach[min(group.sources)])
    if group.use == _ALL and len(group.sources) == 1 and len(group.targets) == wanted > 1:
        return f"check the firewall and the routes of {sources} (`ip route`, `ip addr`)"
    if group.why == "no answer":
        return f"allow {ports} of {hosts} in the firewall, or, if {addresses} is in the wrong network, set {own}"
    if group.why == "no route":
        return f"no route from {sources} to {addresses} (`ip route`): set {own} to a network that all nodes share"
    if group.why == "name":
        return f"add {addresses} to /etc/hosts of {sources}, or set `address` of {hosts} to an IP address"
    if group.why in ("stranger", "reset"):
        return f"another machine or a proxy answers at {addresses} (NAT?): set {own} so that it leads to {hosts}"
    return f"allow {ports} of {hosts} in the firewall, or, if {addresses} is another machine, set {own}"
