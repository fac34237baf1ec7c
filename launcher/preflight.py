"""Look at every node before anything is sent: facts for the plan, findings for the user.

One Python on each node (``NodeAgent``) answers all questions, in rounds over all nodes at once: what it is and has
(``node/probe.py``), whether folders are shared (``launcher.sharing``), the wire between them (``launcher.wiring``).
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from launcher import preflight_cache
from launcher.config import ClusterConfig
from launcher.errors import FleetError, PreflightRefused, TransportError
from launcher.fanout import Answers, on_nodes
from launcher.findings import Finding, Survey, all_findings, connect_finding
from launcher.placement import candidate_ports, interpreter
from launcher.plan import NodeFacts
from launcher.preflight_table import finding_lines
from launcher.probing import Inquiry
from launcher.sharing import Sharing
from launcher.transport.base import Transport
from launcher.transport.rpc import NodeAgent
from launcher.wiring import Wired, Wiring
from launcher.wiring_findings import interface_of, wiring_findings

_PROBE_TIMEOUT = 90.0  # versions on a slow shared disk, nvidia-smi without persistence mode
_CALL_MARGIN = 30.0  # for starting python there
_CLOSE_TIMEOUT = 6.0  # a node that hangs keeps nobody from leaving


@dataclass(frozen=True)
class PreflightReport:
    """All that was learned; ``facts`` holds the nodes that answered."""

    facts: dict[int, NodeFacts] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()

    @property
    def blocked(self) -> bool:
        return any(finding.severity == "block" for finding in self.findings)

    def refuse_if_blocked(self) -> None:
        """Raises ``PreflightRefused`` that names each node with something in the way."""
        if self.blocked:
            lines = finding_lines([finding for finding in self.findings if finding.severity == "block"])
            raise PreflightRefused("preflight refused the run:\n  " + "\n  ".join(lines))


def run_preflight(
    config: ClusterConfig,
    transports: Mapping[int, Transport | TransportError],
    *,
    own_command: bool = False,
    bytes_needed: Mapping[int, int] | None = None,
    run_id: str = "",
    fresh: bool = False,
) -> PreflightReport:
    """Check all nodes at once. ``transports`` are ``connect_all``'s results by node_rank;
    ``bytes_needed`` is what the plan will store on each node; ``run_id`` must be new there;
    ``fresh``: what earlier checks have shown does not count.
    Raises nothing for a node that fails: that is a finding."""
    lines = {k: line for k, line in transports.items() if isinstance(line, Transport)}
    errors: dict[int, Exception] = {k: line for k, line in transports.items() if isinstance(line, TransportError)}
    with _agents() as agents:
        inquiry = Inquiry.about(config, run_id)
        answers = _probe_all(inquiry, lines, agents)
        errors |= answers.errors
        _raise_unexpected(errors)
        probes = {k: answers.values[k][0] for k in sorted(answers.values)}
        offsets = {k: answers.values[k][1] for k in probes}
        survey = inquiry.survey(probes, offsets, own_command, bytes_needed)
        facts = {k: _facts(config, k, probe, offsets[k]) for k, probe in probes.items()}
        findings = [connect_finding(config, k, errors[k]) for k in sorted(errors)]
        findings += all_findings(survey)
        working = {k: agents[k] for k in facts}
        if config.data.mode == "verify":
            findings += Sharing(survey, working).findings()
        if config.transport != "local" and len(facts) > 1:
            wired = _wired(Wiring(config, probes, facts, working), fresh)
            findings += _of_the_wire(survey, wired)
            facts = {k: _located(facts[k], probes[k], wired) for k in facts}
    return PreflightReport(facts, tuple(sorted(findings, key=lambda finding: finding.node_rank)))


def _raise_unexpected(errors: Mapping[int, Exception]) -> None:
    """An error that is not a user's is a mistake of ours, and must not pass for a finding."""
    for error in errors.values():
        if not isinstance(error, FleetError | TimeoutError):
            raise error


@contextmanager
def _agents() -> Iterator[dict[int, NodeAgent]]:
    """A place for the nodes' agents; those in it are ended with the block."""
    agents: dict[int, NodeAgent] = {}
    try:
        yield agents
    finally:
        on_nodes(list(agents), lambda k: agents[k].close(), timeout=_CLOSE_TIMEOUT)


def _probe_all(
    inquiry: Inquiry, lines: Mapping[int, Transport], agents: dict[int, NodeAgent]
) -> Answers[tuple[dict[str, Any], float]]:
    """(reply of node/probe.py, clock offset in seconds) per node; each one's agent is put into ``agents``."""

    def probe(k: int) -> tuple[dict[str, Any], float]:
        agents[k] = NodeAgent(lines[k], interpreter(inquiry.config, k))
        reply = agents[k].call("probe", inquiry.request(k), _PROBE_TIMEOUT)
        return reply, agents[k].clock_offset(_CALL_MARGIN)

    return on_nodes(lines, probe, timeout=_PROBE_TIMEOUT + _CALL_MARGIN)


def _facts(config: ClusterConfig, k: int, probe: Mapping[str, Any], offset: float) -> NodeFacts:
    return NodeFacts(
        node_rank=k,
        hostname=probe["hostname"],
        home=probe["home"],
        address=probe["address"],
        interface=probe["interface"],
        python=probe["python"],
        versions=probe["versions"],
        tmux=probe["tmux"],
        devices=tuple(probe["devices"]),
        disk_free=probe["disk_free"],
        memory=probe["memory"],
        cpus=probe["cpus"],
        clock_offset=offset,
        free_ports=_in_any_order(port for port in candidate_ports(config, k) if str(port) not in probe["busy_ports"]),
        addresses=tuple(address for _, address in probe["addresses"]),
        topology_bytes=probe["graph"].get("topology_bytes", 0),
    )


def _in_any_order(ports: Iterable[int]) -> tuple[int, ...]:
    """So that two launches in the same moment hardly ever take the same port."""
    free = list(ports)
    return tuple(random.sample(free, len(free)))


# -- the wire ------------------------------------------------------------


def _wired(wiring: Wiring, fresh: bool) -> Wired:
    """The test, less what the cache knows of nodes that are as they were."""
    wiring.open()
    names = preflight_cache.identities(wiring.config, wiring)
    known = preflight_cache.Known() if fresh else preflight_cache.known(names)
    wired = wiring.connect(known.pairs, known.addresses)
    since = known.since if wired.known else time.time()
    preflight_cache.remember(names, wired, since)
    return replace(wired, age=time.time() - since)


def _of_the_wire(survey: Survey, wired: Wired) -> list[Finding]:
    _raise_unexpected(wired.errors)
    failed = [connect_finding(survey.config, k, wired.errors[k]) for k in sorted(wired.errors)]
    return failed + list(wiring_findings(survey, wired))


def _located(fact: NodeFacts, probe: Mapping[str, Any], wired: Wired) -> NodeFacts:
    """``fact`` with the address that all others reach, and its interface."""
    address = wired.address.get(fact.node_rank, fact.address)
    return replace(fact, address=address, interface=interface_of(probe, address))
