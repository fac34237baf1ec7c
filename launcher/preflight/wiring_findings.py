"""What the test of the wire comes to, in words: ways that are closed, folded over nodes and ports."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from launcher.preflight.connectivity import CONTROL, FREE, MASTER, SERVICE, Blocked, Wired
from launcher.preflight.finding import Finding, Survey
from launcher.words import spans

_SETTINGS = {MASTER: "run.master_port", CONTROL: "run.control_port", SERVICE: "run.service_port"}

_WORDS = {
    "refused": "refused",
    "no answer": "no answer",
    "no route": "no route",
    "reset": "reset",
    "stranger": "something else answers there",
    "name": "the name cannot be resolved",
}

_ALL = ""  # of the uses: the node on all its ports


class Group(NamedTuple):
    """Sources that cannot reach targets, all for the same reason and on the same use."""

    sources: frozenset[int]
    targets: tuple[int, ...]
    use: str  #: ``_ALL`` when every use is closed
    why: str


def wiring_findings(survey: Survey, wired: Wired) -> Iterator[Finding]:
    """One finding for each node that is fine, one for each group of closed ways."""
    for k, heard in wired.listening.items():
        for use, why in heard.refused.items():
            remedy = f"end what uses it, or set `{_SETTINGS[use]}` to another"
            yield survey.finding(k, "block", use, f"cannot listen on its {use}: {why}", remedy)
    groups = folded(wired.blocked, wired.listening, wired.reach)
    touched = {k for group in groups for k in (*group.sources, *group.targets)}
    for k in wired.listening:
        if k not in touched:
            yield survey.finding(k, "ok", "wire", _fine(wired, bool(groups)))
    yield from _interfaces(survey, wired)
    for group in groups:
        yield _finding(survey, wired, group)


def _fine(wired: Wired, trouble: bool) -> str:
    if trouble:
        return "reached by all others, and reaches them"
    return f"all {wired.pairs:,} pairs reach each other"


def _interfaces(survey: Survey, wired: Wired) -> Iterator[Finding]:
    """Which network interface each node takes, and where that is another than it seemed at first."""
    for k, heard in wired.listening.items():
        address = wired.address[k]
        name = interface_of(survey.probes[k], address)
        asked = survey.config.nodes[k].interface
        if asked and name != asked:
            message = f"it has no address on interface {asked}; its addresses: {_listed(survey.probes[k])}"
            yield survey.finding(k, "block", "interface", message, "correct `interface` of this node")
        elif address == heard.own[0]:
            yield survey.finding(k, "ok", "interface", f"traffic goes over {name or 'an unnamed interface'}")
        else:
            message = f"traffic goes over {name} ({address}), as not all nodes reach {heard.own[0]}"
            yield survey.finding(k, "ok", "interface", message)


def interface_of(probe: Mapping[str, object], address: str) -> str:
    """Name of the interface that has ``address``; '' when none has."""
    there = probe["addresses"]
    assert isinstance(there, (list, tuple))
    return next((name for name, own in there if own == address), "")


def _listed(probe: Mapping[str, object]) -> str:
    there = probe["addresses"]
    assert isinstance(there, (list, tuple))
    return ", ".join(f"{address} ({name})" for name, address in there)


# -- folding -------------------------------------------------------------


def folded(
    blocked: Collection[Blocked], nodes: Collection[int], reach: Mapping[int, frozenset[int]] | None = None
) -> list[Group]:
    """The same in as few groups as possible: a node that reaches nobody is one, whatever stands at the other ends.
    ``reach``: the others that each node must reach; all, where that is not told."""
    everyone = frozenset(nodes)
    wanted = reach or {k: everyone - {k} for k in everyone}
    lost: dict[int, set[int]] = defaultdict(set)
    for one in blocked:
        lost[one.source].add(one.door.node_rank)
    deaf = {k for k, others in lost.items() if len(wanted[k]) > 1 and others >= wanted[k]}
    deaf = deaf if len(deaf) < len(everyone) else set()
    groups = [Group(frozenset([k]), tuple(sorted(wanted[k])), _ALL, _commonest(blocked, k)) for k in sorted(deaf)]
    sources: dict[tuple[int, str, str], set[int]] = defaultdict(set)
    for one in blocked:
        if one.source not in deaf:
            sources[one.door.node_rank, one.door.use, one.why].add(one.source)
    return groups + _by_sources(sources)


def _commonest(blocked: Collection[Blocked], source: int) -> str:
    words = [one.why for one in blocked if one.source == source]
    return max(sorted(set(words)), key=words.count)


def _by_sources(sources: Mapping[tuple[int, str, str], set[int]]) -> list[Group]:
    """Targets with the same sources, use and reason are told together."""
    closed: dict[tuple[int, frozenset[int], str], set[str]] = defaultdict(set)
    for (target, use, why), who in sources.items():
        others = frozenset(who - {target}) or frozenset([target])  # node 0 knocks at its own doors, too
        closed[target, others, why].add(use)
    targets: dict[tuple[frozenset[int], str, str], list[int]] = defaultdict(list)
    for (target, others, why), which in closed.items():
        for use in [_ALL] if which >= {SERVICE, FREE} else sorted(which):
            targets[others, use, why].append(target)
    found = [Group(who, tuple(sorted(ks)), use, why) for (who, use, why), ks in targets.items()]
    return sorted(found, key=lambda group: (group.targets, group.use))


# -- words ---------------------------------------------------------------


def _finding(survey: Survey, wired: Wired, group: Group) -> Finding:
    everyone = len(wired.listening)
    sources = _who(group.sources, everyone - len(group.targets) if len(group.targets) == 1 else everyone)
    targets = _who(group.targets, everyone - 1 if len(group.sources) == 1 else everyone)
    at = _at(wired, group)
    free = " on free ports" if group.use == FREE else ""
    message = f"{sources} → {targets}{at} blocked{free}: {_WORDS.get(group.why, group.why)}"
    place = min(group.sources) if len(group.sources) == 1 else group.targets[0]
    return survey.finding(place, "block", "wire", message, _remedy(survey, wired, group))


def _who(ranks: Collection[int], all_of: int) -> str:
    return "all" if len(ranks) == all_of and len(ranks) > 1 else spans(sorted(ranks), "node")


def _at(wired: Wired, group: Group) -> str:
    """``:29500`` where one port is meant."""
    if group.use in (_ALL, FREE):
        return ""
    ports = {wired.listening[k].ports[group.use] for k in group.targets}
    return f":{ports.pop()}" if len(ports) == 1 else f" ({group.use}s)"


def _remedy(survey: Survey, wired: Wired, group: Group) -> str:
    addresses = ", ".join(sorted({_door_address(survey, wired, k, group.use) for k in group.targets})[:3])
    hosts = spans(sorted(group.targets), "node")
    own = f"`address` or `interface` of {hosts}"
    ports = {
        _ALL: "all TCP between the nodes",
        FREE: "all TCP between the nodes (gloo and NCCL take free ports)",
    }.get(group.use, f"TCP port{_at(wired, group).replace(':', ' ')}")
    wanted = len(wired.reach[min(group.sources)])
    if group.use == _ALL and len(group.sources) == 1 and len(group.targets) == wanted > 1:
        return f"look at the firewall and the routes of {spans(group.sources, 'node')} (`ip route`, `ip addr`)"
    if group.why == "no answer":
        return f"a firewall drops it, or {addresses} is the wrong network: let {ports} through to {hosts}, or set {own}"
    if group.why == "no route":
        return f"{addresses} cannot be reached from there (`ip route`): set {own} to a network that all nodes share"
    if group.why == "name":
        return f"{addresses} is not known there: add it to /etc/hosts, or give `address` of {hosts} as a number"
    if group.why in ("stranger", "reset"):
        return f"another machine or a proxy stands at {addresses} (NAT?): set {own} to what leads to {hosts} itself"
    return f"a firewall rejects it, or {addresses} is another machine: let {ports} through to {hosts}, or set {own}"


def _door_address(survey: Survey, wired: Wired, k: int, use: str) -> str:
    if use == MASTER and survey.config.run.master_addr != "auto":
        return survey.config.run.master_addr
    return wired.address[k] if use == FREE else wired.listening[k].public or wired.address[k]
