"""The wire between all nodes: every ordered pair on the ports that training will use, and the address of each node
that all others reach.

All nodes listen, then all connect at once (``node/wire.py``). The lead node's control port is asked for by every node,
its master port by every node that trains; a free port of each node that trains, as gloo and NCCL take them, by the
others that do; a graph service port by all who have questions for it (``Ways``). Where an address is not reached by
all, the node's other addresses are tried, too.
"""

from __future__ import annotations

import ipaddress
import re
import secrets
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from launcher.config import ClusterConfig
from launcher.fanout import on_nodes
from launcher.placement import choose, control_candidates, master_candidates, service_candidates
from launcher.plan import NodeFacts
from launcher.roles import gateways, lead, trainers
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
    """A way that is not open; ``why`` is a word of ``node/wire.py``."""

    source: int
    door: Door
    why: str


Pair = tuple[int, int]  #: (source, target) as node_ranks


@dataclass(frozen=True)
class Listening:
    """What one node listens on while the wire is tested."""

    own: tuple[str, ...]  #: own addresses for gloo and NCCL, the best first
    public: str  #: configured address that is none of its own (a name, or NAT); '' where there is none
    ports: Mapping[str, int]  #: use -> port
    refused: Mapping[str, str]  #: use -> why it could not listen
    routes: tuple[str, ...]  #: where the node sends packets

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
    pairs: int  #: ordered pairs that were tested or known
    known: int = 0  #: of these, by the cache alone
    age: float = 0.0  #: seconds since the oldest of them was tested
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

    def open(self) -> None:
        """All nodes listen. Nodes that fail at it are in ``errors`` and take no part any more."""
        answers = on_nodes(self.facts, self._open, timeout=_OPEN_TIMEOUT)
        self.listening = {k: answers.values[k] for k in sorted(answers.values)}
        self.errors |= answers.errors

    def _open(self, k: int) -> Listening:
        ports = ports_of(self.config, k, self.facts[k])
        request = {"op": "open", "token": self.token, "rank": k, "ports": list(ports.values())}
        reply = self.agents[k].call("wire", request, _OPEN_TIMEOUT)
        refused = {use: reply["refused"][str(port)] for use, port in ports.items() if str(port) in reply["refused"]}
        own = own_addresses(self.config, k, self.probes[k], all_on_one_machine(self.probes))
        kept = {use: port for use, port in ports.items() if use not in refused} | {FREE: reply["free"]}
        return Listening(own, public_address(self.config, k, own), kept, refused, tuple(reply["routes"]))

    def connect(self, known: Collection[Pair], first: Mapping[int, str]) -> Wired:
        """Every pair is tried but those ``known``; of these only a ring, and what the lead node must be reached at.
        When one of these fails after all, all are tried. ``first``: the address to begin with, by node_rank."""
        chosen = {k: first.get(k, heard.own[0]) for k, heard in self.listening.items()}
        reach = {k: self.ways.reach(k, self.listening) for k in self.listening}
        left_out = {(source, target) for source, target in known if target in reach[source]} - self._always(reach)
        blocked = self._knock(self._doors(chosen), left_out)
        if left_out and any((one.source, one.door.node_rank) in known for one in blocked):
            left_out = set()
            blocked = self._knock(self._doors(chosen), left_out)
        if blocked:
            chosen, blocked = self._other_ways(chosen, blocked)
        pairs = sum(map(len, reach.values()))
        return Wired(self.listening, chosen, tuple(blocked), pairs, len(left_out), errors=self.errors, reach=reach)

    def _always(self, reach: Mapping[int, frozenset[int]]) -> set[Pair]:
        """A ring, so that each node is seen from outside and sees out, and the lead node from everywhere. Where a node
        has nothing to do with the next one: the next it has."""
        ranks = list(self.listening)
        found = {(k, self.ways.lead) for k in ranks}
        for i, k in enumerate(ranks):
            after, before = [*ranks[i + 1 :], *ranks[:i]], [*reversed(ranks[:i]), *reversed(ranks[i + 1 :])]
            found |= {(k, target) for target in [j for j in after if j in reach[k]][:1]}
            found |= {(source, k) for source in [j for j in before if k in reach[j]][:1]}
        return found

    def _doors(self, chosen: Mapping[int, str]) -> list[Door]:
        master = "" if self.config.run.master_addr == "auto" else self.config.run.master_addr
        return [door for k, own in chosen.items() for door in self.listening[k].doors(k, own, master)]

    def _knock(self, doors: Collection[Door], left_out: Collection[Pair]) -> list[Blocked]:
        """Which of the doors are closed to whom."""
        by_place = {(door.node_rank, door.address, door.port): door for door in doors}

        def knock(k: int) -> list[Blocked]:
            targets = _targets(
                door
                for door in doors
                if self.ways.must_reach(k, door.node_rank, door.use) and (k, door.node_rank) not in left_out
            )
            request = {"op": "connect", "token": self.token, "rank": k, "targets": targets, "seconds": _SECONDS}
            windows = 1 + sum(len(ports) for _, _, ports in targets) // 256
            reply = self.agents[k].call("wire", request, _OPEN_TIMEOUT + windows * _SECONDS)
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
            more = self._knock(list(dict.fromkeys(door for way in others for door in ways[way])), ())
            closed |= {way: [one for one in more if one.door in ways[way]] for way in others}
        for k in trouble:
            owns = (chosen[k], *(own for rank, own in others if rank == k))
            chosen[k] = min(owns, key={own: len(closed[k, own]) for own in owns}.__getitem__)
        return chosen, [one for k in trouble for one in closed[k, chosen[k]]]


def _targets(doors: Iterable[Door]) -> list[tuple[int, str, list[int]]]:
    """(node_rank, address, ports) as ``node/wire.py`` takes them."""
    found: dict[tuple[int, str], list[int]] = defaultdict(list)
    for door in doors:
        found[door.node_rank, door.address].append(door.port)
    return [(rank, address, ports) for (rank, address), ports in found.items()]
