"""Tests the network between all nodes on the ports that training will use, and chooses the address of each node.

All nodes listen, then all connect at once (``node/programs/network.py``). Every node connects to the lead node's
control port, and every node that trains to the master port; nodes that train also connect to a free port of each
other, as gloo and NCCL take them; clients of a graph server connect to its service port. Where an address is not
reached by all, the node's other addresses are tried, too.
"""

from __future__ import annotations

import ipaddress
import re
import secrets
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from launcher.config.roles import gateways, lead, trainers
from launcher.config.schema import ClusterConfig
from launcher.plan.model import NodeFacts
from launcher.plan.ports import choose, control_candidates, master_candidates, service_candidates
from launcher.preflight.finding import Finding, Survey
from launcher.text import spans
from launcher.transport.fanout import on_nodes
from launcher.transport.rpc import NodeAgent

_OPEN_TIMEOUT = 20.0

_SECONDS = 4.0  # for one connection: three SYNs

_VIRTUAL = re.compile(r"(docker|br-|virbr|veth|cni|flannel|cali|lxc|lxd|podman|kube|weave|vmnet|vboxnet|tap)")

MASTER, CONTROL, SERVICE, FREE = "master port", "control port", "service port", "free port"

Agents = Mapping[int, NodeAgent]


class Door(NamedTuple):
    """Where one node is to be reached."""

    node_rank: int
    address: str
    port: int
    use: str


class Blocked(NamedTuple):
    """A way that is not open; ``why`` is a word of ``node/programs/network.py``."""

    source: int
    door: Door
    why: str


@dataclass(frozen=True)
class Listening:
    """What one node listens on while the wire is tested."""

    own: tuple[str, ...]  #: own addresses for gloo and NCCL, the best first
    public: str  #: configured address that is none of its own (a name, or NAT); '' where there is none
    ports: Mapping[str, int]  #: use -> port
    refused: Mapping[str, str]  #: use -> why it could not listen

    def doors(self, node_rank: int, own: str, master_addr: str) -> list[Door]:
        """All that others must reach when the node is known by its address ``own``."""
        found = []
        for use, port in self.ports.items():
            address = own if use == FREE else self.public or own
            address = master_addr if use == MASTER and master_addr else address
            found.append(Door(node_rank, address, port, use))
        return found


@dataclass(frozen=True)
class Wired:
    """What the test has shown."""

    listening: Mapping[int, Listening]
    address: Mapping[int, str]  #: own address that was chosen, by node_rank
    blocked: tuple[Blocked, ...]
    pairs: int  #: ordered pairs that were tested
    errors: Mapping[int, Exception] = field(default_factory=dict)
    reach: Mapping[int, frozenset[int]] = field(default_factory=dict)  #: by node_rank, the others it must reach


class Ways:
    """Which node has to reach which other one, and for what."""

    def __init__(self, config: ClusterConfig):
        self.lead, self.trainers = lead(config), frozenset(trainers(config))
        self.holders, self.gateways = frozenset(config.holders), frozenset(gateways(config))
        self.meet = bool(control_candidates(config))

    def must_reach(self, source: int, target: int, use: str) -> bool:
        """Whether ``source`` connects to that port of ``target``; the lead node knocks at its own doors for all."""
        if use in (MASTER, CONTROL):
            return use == CONTROL or source in self.trainers
        if source == target:
            return False
        if use == SERVICE:
            return target in self.gateways or source in self.holders
        return source in self.trainers and target in self.trainers

    def reach(self, source: int, nodes: Collection[int]) -> frozenset[int]:
        """Those of ``nodes`` that it has to reach on any port."""
        found = {target for target in nodes if target in self.holders and self.must_reach(source, target, SERVICE)}
        found |= {target for target in nodes if self.must_reach(source, target, FREE)}
        found |= {self.lead} & {*nodes} if self.meet else set()
        return frozenset(found - {source})


def own_addresses(config: ClusterConfig, k: int, probe: Mapping[str, Any], loopback: bool) -> tuple[str, ...]:
    """Addresses of node ``k`` itself, the best first: as configured, where SSH arrived, real interfaces before
    virtual ones, IPv4 before IPv6, private before public. Loopback only where all nodes are one machine."""
    node = config.nodes[k]
    there = [(name, address) for name, address in probe["addresses"] if loopback or not _is_loopback(address)]
    there = [pair for pair in there if pair[0] == node.interface] or there
    if node.address and probe["address"] in (address for _, address in there):
        return (probe["address"],)  # the user's word

    def rank(pair: tuple[str, str]) -> tuple[bool, bool, bool, bool, bool]:
        name, address = pair
        ip = ipaddress.ip_address(address)
        return (address != probe["address"], bool(_VIRTUAL.match(name)), ip.is_loopback, ip.version > 4, ip.is_global)

    return tuple(address for _, address in sorted(there, key=rank)) or (probe["address"],)


def public_address(config: ClusterConfig, k: int, own: Collection[str]) -> str:
    """The configured address where it is none of the node's own: a name, or the outside of a NAT."""
    given = config.nodes[k].address or ""
    return "" if given in own else given


def all_on_one_machine(probes: Mapping[int, Mapping[str, Any]]) -> bool:
    """Whether every node was reached over loopback, so that this is how they reach each other."""
    return all(_is_loopback(probe["address"]) for probe in probes.values())


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address in ("::1", "localhost")


def ports_of(config: ClusterConfig, k: int, fact: NodeFacts) -> dict[str, int]:
    """The ports of node ``k`` that training will use, as far as they are free; others have findings of their own."""
    candidates = {SERVICE: service_candidates(config, k)}
    if k == lead(config):
        candidates |= {MASTER: master_candidates(config), CONTROL: control_candidates(config)}
    wanted = {use: choose(ports, fact) for use, ports in candidates.items() if ports}
    return {use: port for use, port in wanted.items() if port in fact.free_ports}


class Wiring:
    """One test of the wire between all nodes that answered."""

    def __init__(
        self,
        config: ClusterConfig,
        probes: Mapping[int, Mapping[str, Any]],
        facts: Mapping[int, NodeFacts],
        agents: Agents,
    ):
        self.config, self.probes, self.facts, self.agents = config, probes, facts, agents
        self.token = secrets.token_hex(8)
        self.ways = Ways(config)
        self.listening: dict[int, Listening] = {}
        self.errors: dict[int, Exception] = {}

    def test(self) -> Wired:
        """Test every pair; where a node's first address is not reached by all, its other addresses as well."""
        self._open_all()
        chosen = {k: heard.own[0] for k, heard in self.listening.items()}
        reach = {k: self.ways.reach(k, self.listening) for k in self.listening}
        blocked = self._knock(self._doors(chosen))
        if blocked:
            chosen, blocked = self._other_ways(chosen, blocked)
        pairs = sum(map(len, reach.values()))
        return Wired(self.listening, chosen, tuple(blocked), pairs, self.errors, reach)

    def _open_all(self) -> None:
        """All nodes listen. Nodes that fail at it are in ``errors`` and take no part any more."""
        answers = on_nodes(self.facts, self._open, timeout=_OPEN_TIMEOUT)
        self.listening = {k: answers.values[k] for k in sorted(answers.values)}
        self.errors |= answers.errors

    def _open(self, k: int) -> Listening:
        ports = ports_of(self.config, k, self.facts[k])
        request = {"op": "open", "token": self.token, "rank": k, "ports": list(ports.values())}
        reply = self.agents[k].call("network", request, _OPEN_TIMEOUT)
        refused = {use: reply["refused"][str(port)] for use, port in ports.items() if str(port) in reply["refused"]}
        own = own_addresses(self.config, k, self.probes[k], all_on_one_machine(self.probes))
        kept = {use: port for use, port in ports.items() if use not in refused} | {FREE: reply["free"]}
        return Listening(own, public_address(self.config, k, own), kept, refused)

    def _doors(self, chosen: Mapping[int, str]) -> list[Door]:
        master = "" if self.config.run.master_addr == "auto" else self.config.run.master_addr
        return [door for k, own in chosen.items() for door in self.listening[k].doors(k, own, master)]

    def _knock(self, doors: Collection[Door]) -> list[Blocked]:
        """Which of the doors are closed to whom."""
        by_place = {(door.node_rank, door.address, door.port): door for door in doors}

        def knock(k: int) -> list[Blocked]:
            targets = _targets(door for door in doors if self.ways.must_reach(k, door.node_rank, door.use))
            request = {"op": "connect", "token": self.token, "rank": k, "targets": targets, "seconds": _SECONDS}
            windows = 1 + sum(len(ports) for _, _, ports in targets) // 256
            reply = self.agents[k].call("network", request, _OPEN_TIMEOUT + windows * _SECONDS)
            return [Blocked(k, by_place[rank, address, port], why) for rank, address, port, why in reply["blocked"]]

        sources = [k for k in self.listening if k not in self.errors]
        answers = on_nodes(sources, knock, timeout=_OPEN_TIMEOUT + (1 + len(doors) // 256) * _SECONDS)
        self.errors |= answers.errors
        return [one for k in sorted(answers.values) for one in answers.values[k]]

    def _other_ways(self, chosen: dict[int, str], blocked: list[Blocked]) -> tuple[dict[int, str], list[Blocked]]:
        """For nodes that some could not reach: their other addresses, from all; the one that most reach is taken."""
        trouble = sorted({one.door.node_rank for one in blocked})
        ways = {(k, own): self._doors({k: own}) for k in trouble for own in self.listening[k].own}
        closed = {way: [one for one in blocked if one.door.node_rank == way[0]] for way in ways}
        others = [way for way in ways if way[1] != chosen[way[0]]]
        if others:
            more = self._knock(list(dict.fromkeys(door for way in others for door in ways[way])))
            closed |= {way: [one for one in more if one.door in ways[way]] for way in others}
        for k in trouble:
            owns = (chosen[k], *(own for rank, own in others if rank == k))
            chosen[k] = min(owns, key={own: len(closed[k, own]) for own in owns}.__getitem__)
        return chosen, [one for k in trouble for one in closed[k, chosen[k]]]


def _targets(doors: Iterable[Door]) -> list[tuple[int, str, list[int]]]:
    """(node_rank, address, ports) as ``node/programs/network.py`` takes them."""
    found: dict[tuple[int, str], list[int]] = defaultdict(list)
    for door in doors:
        found[door.node_rank, door.address].append(door.port)
    return [(rank, address, ports) for (rank, address), ports in found.items()]


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
