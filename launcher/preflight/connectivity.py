"""Tests the network between all nodes on the ports that training will use, and chooses the address of each node.

All nodes listen, then all connect in parallel (``node/programs/network.py``). If some nodes cannot reach the first
address of a node, its other addresses are tested too.

With more than ``_ALL_PAIRS`` nodes, each node first connects to some of the others only; if a route is blocked, all
routes are tested.
"""

from __future__ import annotations

import ipaddress
import re
import secrets
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from launcher.config.roles import gateways, lead, trainers
from launcher.config.schema import ClusterConfig
from launcher.plan.model import NodeFacts
from launcher.plan.ports import choose, control_candidates, lead_candidates, service_candidates
from launcher.transport.fanout import on_nodes
from launcher.transport.rpc import NodeAgent

_OPEN_TIMEOUT = 20.0  # seconds

_SECONDS = 4.0  # for one connection; enough for three SYN packets

_VIRTUAL = re.compile(r"(docker|br-|virbr|veth|cni|flannel|cali|lxc|lxd|podman|kube|weave|vmnet|vboxnet|tap)")

_ALL_PAIRS = 64  # up to this number of nodes, all routes are tested at once

MASTER, CONTROL, SERVICE, FREE = "master port", "control port", "service port", "free port"

_Agents = Mapping[int, NodeAgent]


class _Endpoint(NamedTuple):
    """An address and port at which one node listens."""

    node_rank: int
    address: str
    port: int
    use: str  #: ``MASTER``, ``CONTROL``, ``SERVICE`` or ``FREE``


class BlockedRoute(NamedTuple):
    """A node and an endpoint to which this node cannot connect."""

    source: int  #: node_rank
    endpoint: _Endpoint
    why: str  #: a word such as ``refused``, as returned by ``node/programs/network.py``


@dataclass(frozen=True)
class _Listeners:
    """The addresses and ports at which one node listens during the network test."""

    own: tuple[str, ...]  #: the node's own addresses for gloo and NCCL, the best first
    public: str  #: configured address that is not one of ``own`` (a name, or outside a NAT); '' if there is none
    ports: Mapping[str, int]  #: use -> port
    refused: Mapping[str, str]  #: use -> error, for ports on which the node could not listen

    def endpoints(self, node_rank: int, own: str, master_addr: str) -> list[_Endpoint]:
        """Return the endpoints at which other nodes connect to this node if its address is ``own``."""
        found = []
        for use, port in self.ports.items():
            address = own if use == FREE else self.public or own
            address = master_addr if use == MASTER and master_addr else address
            found.append(_Endpoint(node_rank, address, port, use))
        return found


@dataclass(frozen=True)
class Connectivity:
    """The result of the network test. Keys of the mappings are node_ranks."""

    listening: Mapping[int, _Listeners]
    address: Mapping[int, str]  #: the address that was chosen among the node's own
    blocked: tuple[BlockedRoute, ...]
    pairs: int  #: number of ordered pairs of nodes that were tested
    errors: Mapping[int, Exception]  #: of nodes whose test program failed
    reach: Mapping[int, frozenset[int]]  #: the other nodes that each node must reach
    untested: int = 0  #: number of other pairs that must reach each other: not tested, as no route was blocked


class RequiredRoutes:
    """The routes that a run needs: which node connects to which other node, on which ports."""

    def __init__(self, config: ClusterConfig):
        self.lead, self.trainers = lead(config), frozenset(trainers(config))
        self.holders, self.gateways = frozenset(config.holders), frozenset(gateways(config))
        self.meet = bool(control_candidates(config))
        self.any_leads = self.meet and config.run.restarts > 0  # after a restart, each node may be the lead node

    def must_reach(self, source: int, target: int, use: str) -> bool:
        """Return whether node ``source`` must connect to the port of node ``target`` for ``use``, such as ``MASTER``.

        ``source`` may equal ``target``: for the uses ``MASTER`` and ``CONTROL``, a node must also reach its own port.

        For these two uses, call this only with a ``target`` that is the lead node or, with ``run.restarts``, may become
        the lead node.
        """
        if use in (MASTER, CONTROL):
            return use == CONTROL or source in self.trainers
        if source == target:
            return False
        if use == SERVICE:
            return target in self.gateways or source in self.holders
        return source in self.trainers and target in self.trainers

    def sample(self, source: int, nodes: Sequence[int]) -> set[int]:
        """Return some of the nodes that ``source`` must reach: the lead node, and those 1, 2, 4, 8 … places away.

        ``nodes``: ascending. Places are counted in both directions, among the holders and among the nodes that train.
        Every node is in the samples of about 2 log2(n) others, and routes between any two halves of the nodes are among
        the samples.
        """
        found = {self.lead}
        for wanted in ([k for k in nodes if k in self.holders], [k for k in nodes if k in self.trainers]):
            at, steps = bisect_left(wanted, source), [0, *(1 << i for i in range(len(wanted).bit_length() - 1))]
            found |= {wanted[(at + sign * step) % len(wanted)] for step in steps for sign in (1, -1) if wanted}
        return found & self.reach(source, found & {*nodes})

    def reach(self, source: int, nodes: Collection[int]) -> frozenset[int]:
        """Return the nodes among ``nodes`` to which node ``source`` must connect, on any port."""
        # By sets, as ``must_reach`` for each pair of 1,000 nodes takes seconds.
        wanted = self.holders if source in self.holders else self.holders & self.gateways
        wanted |= self.trainers if source in self.trainers else frozenset()
        wanted |= frozenset({self.lead} if self.meet else ())
        return frozenset(nodes if self.any_leads else wanted.intersection(nodes)) - {source}


def _own_addresses(config: ClusterConfig, k: int, probe: Mapping[str, Any], loopback: bool) -> tuple[str, ...]:
    """Return the IP addresses of node ``k`` for gloo and NCCL, in order of preference.

    If the node has the configured ``address``, only that address is returned. Else, if the configured ``interface`` has
    addresses, only these are returned.

    The order is: the address at which SSH arrived; then real interfaces before virtual ones, IPv4 before IPv6, private
    before public addresses.

    ``probe``: the facts of the node. ``loopback``: include loopback addresses.
    """
    node = config.nodes[k]
    usable = [(name, address) for name, address in probe["addresses"] if loopback or not _is_loopback(address)]
    usable = [pair for pair in usable if pair[0] == node.interface] or usable
    if node.address and probe["address"] in (address for _, address in usable):
        return (probe["address"],)  # configured by the user

    def rank(pair: tuple[str, str]) -> tuple[bool, bool, bool, bool, bool]:
        name, address = pair
        ip = ipaddress.ip_address(address)
        return (address != probe["address"], bool(_VIRTUAL.match(name)), ip.is_loopback, ip.version > 4, ip.is_global)

    return tuple(address for _, address in sorted(usable, key=rank)) or (probe["address"],)


def interface_of(probe: Mapping[str, object], address: str) -> str:
    """Return the network interface that has ``address``; '' if none has it."""
    addresses = probe["addresses"]
    assert isinstance(addresses, (list, tuple))
    return next((name for name, own in addresses if own == address), "")


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address in ("::1", "localhost")


def ports_of(config: ClusterConfig, k: int, fact: NodeFacts) -> dict[str, int]:
    """Return the ports of node ``k``, by use: ``MASTER``, ``CONTROL`` and ``SERVICE``.

    A use is left out if the node needs no port for it, or if all candidate ports are busy.
    """
    control, master = lead_candidates(config, k)
    candidates = {SERVICE: service_candidates(config, k), MASTER: master, CONTROL: control}
    wanted = {use: choose(ports, fact) for use, ports in candidates.items()}
    return {use: port for use, port in wanted.items() if port in fact.free_ports}


class ConnectivityTest:
    """Tests the network between all nodes that answered the requests of preflight."""

    def __init__(
        self,
        config: ClusterConfig,
        probes: Mapping[int, Mapping[str, Any]],
        facts: dict[int, NodeFacts],
        agents: _Agents,
    ):
        """``facts``: by node_rank; ports on which a node cannot listen are removed from its ``free_ports``."""
        self.config, self.probes, self.facts, self.agents = config, probes, facts, agents
        self.token = secrets.token_hex(8)
        self.routes = RequiredRoutes(config)
        self.listening: dict[int, _Listeners] = {}
        self.errors: dict[int, Exception] = {}

    def run(self) -> Connectivity:
        """Test every pair of nodes that must connect; also other addresses of nodes that some nodes cannot reach."""
        # All nodes listen; those that fail are left out of the test.
        answers = on_nodes(self.facts, self._open, timeout=_OPEN_TIMEOUT)
        self.listening = {k: answers.values[k] for k in sorted(answers.values)}
        self.errors |= answers.errors
        chosen = {k: listeners.own[0] for k, listeners in self.listening.items()}
        reach = {k: self.routes.reach(k, self.listening) for k in self.listening}
        pairs = sum(map(len, reach.values()))
        if len(self.listening) > _ALL_PAIRS:
            nodes = sorted(self.listening)
            some = {k: self.routes.sample(k, nodes) | {k} for k in nodes}
            if not self._connect_all(self._endpoints(chosen), some) and not self.errors:
                tested = sum(len(targets) - 1 for targets in some.values())
                return Connectivity(self.listening, chosen, (), tested, self.errors, reach, pairs - tested)
        blocked = self._connect_all(self._endpoints(chosen))
        if blocked:
            # All addresses of each node that others cannot reach: the one with the fewest blocked routes is chosen.
            unreached = sorted({one.endpoint.node_rank for one in blocked})
            endpoints = {(k, own): self._endpoints({k: own}) for k in unreached for own in self.listening[k].own}
            closed = {at: [one for one in blocked if one.endpoint.node_rank == at[0]] for at in endpoints}
            others = [at for at in endpoints if at[1] != chosen[at[0]]]
            if others:
                more = self._connect_all(list(dict.fromkeys(one for at in others for one in endpoints[at])))
                closed |= {at: [one for one in more if one.endpoint in endpoints[at]] for at in others}
            for k in unreached:
                owns = (chosen[k], *(own for rank, own in others if rank == k))
                chosen[k] = min(owns, key={own: len(closed[k, own]) for own in owns}.__getitem__)
            blocked = [one for k in unreached for one in closed[k, chosen[k]]]
        return Connectivity(self.listening, chosen, tuple(blocked), pairs, self.errors, reach)

    def _open(self, k: int) -> _Listeners:
        kept: dict[str, int] = {}
        refused: dict[str, str] = {}
        # Another launch may have taken a port since it was found free, if only for its own test: the next one is tried.
        while True:
            fact = self.facts[k]
            ports = {use: port for use, port in ports_of(self.config, k, fact).items() if use not in kept}
            request = {"op": "open", "token": self.token, "rank": k, "ports": list(ports.values())}
            reply = self.agents[k].call("network", request, _OPEN_TIMEOUT)
            taken = {use: reply["refused"][str(port)] for use, port in ports.items() if str(port) in reply["refused"]}
            kept |= {use: port for use, port in ports.items() if use not in taken}
            if not taken:
                break
            refused |= taken
            gone = {ports[use] for use in taken}
            self.facts[k] = replace(fact, free_ports=tuple(port for port in fact.free_ports if port not in gone))
        on_one_machine = all(_is_loopback(probe["address"]) for probe in self.probes.values())
        own = _own_addresses(self.config, k, self.probes[k], on_one_machine)
        refused = {use: why for use, why in refused.items() if use not in kept}
        given = self.config.nodes[k].address or ""
        public = "" if given in own else given
        return _Listeners(own, public, kept | {FREE: reply["free"]}, refused)

    def _endpoints(self, chosen: Mapping[int, str]) -> list[_Endpoint]:
        master = "" if self.config.run.master_addr == "auto" else self.config.run.master_addr
        masters = {self.routes.lead: master}
        return [one for k, own in chosen.items() for one in self.listening[k].endpoints(k, own, masters.get(k, ""))]

    def _connect_all(
        self, endpoints: Collection[_Endpoint], some: Mapping[int, Collection[int]] | None = None
    ) -> list[BlockedRoute]:
        """Let every node connect to those of ``endpoints`` that it must reach; return the blocked routes.

        ``some``: the only nodes to which each node connects, by its node_rank; None: to all.
        """
        by_address = {(one.node_rank, one.address, one.port): one for one in endpoints}
        of_node: dict[int, list[_Endpoint]] = defaultdict(list)
        for one in endpoints:
            of_node[one.node_rank].append(one)

        def connect(k: int) -> list[BlockedRoute]:
            near = endpoints if some is None else [one for target in sorted(some[k]) for one in of_node[target]]
            ports: dict[tuple[int, str], list[int]] = defaultdict(list)
            for one in near:
                if self.routes.must_reach(k, one.node_rank, one.use):
                    ports[one.node_rank, one.address].append(one.port)
            targets = [(rank, address, numbers) for (rank, address), numbers in ports.items()]
            request = {"op": "connect", "token": self.token, "rank": k, "targets": targets, "seconds": _SECONDS}
            windows = 1 + sum(map(len, ports.values())) // 256
            reply = self.agents[k].call("network", request, _OPEN_TIMEOUT + windows * _SECONDS)
            return [BlockedRoute(k, by_address[rank, addr, port], why) for rank, addr, port, why in reply["blocked"]]

        sources = [k for k in self.listening if k not in self.errors]
        answers = on_nodes(sources, connect, timeout=_OPEN_TIMEOUT + (1 + len(endpoints) // 256) * _SECONDS)
        self.errors |= answers.errors
        return [one for k in sorted(answers.values) for one in answers.values[k]]
