"""Examines every node before anything is sent: facts for the plan, findings for the user.

One Python on each node (``NodeAgent``) answers all questions, in rounds over all nodes at once: what it is and has
(``node/programs/probe.py``), whether folders are shared (``launcher.preflight.shared_folder``), and the network
between them (``launcher.preflight.connectivity``).
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from launcher.config.resolve import ResolvedConfig
from launcher.errors import FleetError, TransportError
from launcher.plan.model import NodeFacts
from launcher.plan.placement import interpreter
from launcher.plan.ports import candidate_ports
from launcher.preflight.check_devices import device_findings
from launcher.preflight.check_machine import machine_findings, same_machine
from launcher.preflight.check_packages import package_findings
from launcher.preflight.check_storage import storage_findings
from launcher.preflight.connectivity import Wired, Wiring, interface_of, wiring_findings
from launcher.preflight.finding import Finding, Survey, connect_finding
from launcher.preflight.preflight_report import PreflightReport
from launcher.preflight.shared_folder import Sharing
from launcher.preflight.survey import Inquiry
from launcher.transport.base import Transport
from launcher.transport.fanout import Answers, on_nodes
from launcher.transport.rpc import NodeAgent


def all_findings(survey: Survey) -> list[Finding]:
    """Every check of every node that answered."""
    found: list[Finding] = []
    for node_rank in sorted(survey.probes):
        found.append(survey.finding(node_rank, "ok", "connect", "connected"))
        for check in (machine_findings, storage_findings, device_findings):
            found += check(survey, node_rank)
    found += package_findings(survey)
    found += same_machine(survey)
    return found


_PROBE_TIMEOUT = 90.0  # versions on a slow shared disk, nvidia-smi without persistence mode

_CALL_MARGIN = 30.0  # for starting python there

_CLOSE_TIMEOUT = 6.0  # a node that hangs keeps nobody from leaving


def run_preflight(
    config: ResolvedConfig,
    transports: Mapping[int, Transport | TransportError],
    *,
    own_command: bool = False,
    bytes_needed: Mapping[int, int] | None = None,
    run_id: str = "",
) -> PreflightReport:
    """Check all nodes at once. ``transports`` are ``connect_all``'s results by node_rank;
    ``bytes_needed`` is what the plan will store on each node; ``run_id`` must be new there.
    Raises nothing for a node that fails: that is a finding."""
    lines = {k: line for k, line in transports.items() if isinstance(line, Transport)}
    errors: dict[int, Exception] = {k: line for k, line in transports.items() if isinstance(line, TransportError)}
    with open_agents() as agents:
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
            wired = Wiring(config, probes, facts, working).test()
            findings += _of_the_wire(survey, wired)
            facts = {k: _located(facts[k], probes[k], wired) for k in facts}
    return PreflightReport(facts, tuple(sorted(findings, key=lambda finding: finding.node_rank)))


def _raise_unexpected(errors: Mapping[int, Exception]) -> None:
    """An error that is not a user's is a mistake of ours, and must not pass for a finding."""
    for error in errors.values():
        if not isinstance(error, FleetError | TimeoutError):
            raise error


@contextmanager
def open_agents() -> Iterator[dict[int, NodeAgent]]:
    """An empty mapping for the nodes' agents, by node_rank; those put into it are closed with the block."""
    agents: dict[int, NodeAgent] = {}
    try:
        yield agents
    finally:
        on_nodes(list(agents), lambda k: agents[k].close(), timeout=_CLOSE_TIMEOUT)


def _probe_all(
    inquiry: Inquiry, lines: Mapping[int, Transport], agents: dict[int, NodeAgent]
) -> Answers[tuple[dict[str, Any], float]]:
    """(reply of node/programs/probe.py, clock offset in seconds) per node; each one's agent is put into ``agents``."""

    def probe(k: int) -> tuple[dict[str, Any], float]:
        agents[k] = NodeAgent(lines[k], interpreter(inquiry.config, k))
        reply = agents[k].call("probe", inquiry.request(k), _PROBE_TIMEOUT)
        return reply, agents[k].clock_offset(_CALL_MARGIN)

    return on_nodes(lines, probe, timeout=_PROBE_TIMEOUT + _CALL_MARGIN)


def _facts(config: ResolvedConfig, k: int, probe: Mapping[str, Any], offset: float) -> NodeFacts:
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


def _of_the_wire(survey: Survey, wired: Wired) -> list[Finding]:
    _raise_unexpected(wired.errors)
    failed = [connect_finding(survey.config, k, wired.errors[k]) for k in sorted(wired.errors)]
    return failed + list(wiring_findings(survey, wired))


def _located(fact: NodeFacts, probe: Mapping[str, Any], wired: Wired) -> NodeFacts:
    """``fact`` with the address that all others reach, and its interface."""
    address = wired.address.get(fact.node_rank, fact.address)
    return replace(fact, address=address, interface=interface_of(probe, address))
