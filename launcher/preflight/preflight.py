"""Checks every node before anything is sent: returns facts for the plan and findings for the user."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from launcher.config.resolve import ResolvedConfig
from launcher.errors import FleetError, TransportError
from launcher.plan.model import LaunchPlan, NodeFacts
from launcher.plan.placement import outer_python
from launcher.plan.ports import candidate_ports
from launcher.preflight.check_devices import device_findings
from launcher.preflight.check_health import speed_findings
from launcher.preflight.check_machine import machine_findings, same_machine
from launcher.preflight.check_network import network_findings
from launcher.preflight.check_packages import package_findings
from launcher.preflight.check_storage import storage_findings
from launcher.preflight.connectivity import ConnectivityTest, interface_of
from launcher.preflight.finding import Finding, connect_finding
from launcher.preflight.preflight_report import PreflightReport
from launcher.preflight.survey import Inquiry, Survey
from launcher.transport.base import Transport
from launcher.transport.fanout import Answers, on_nodes
from launcher.transport.rpc import NodeAgent


def all_findings(survey: Survey) -> list[Finding]:
    found: list[Finding] = []
    for node_rank in sorted(survey.probes):
        found.append(survey.finding(node_rank, "ok", "connect", "connected"))
        for check in (machine_findings, storage_findings, device_findings):
            found += check(survey, node_rank)
        if survey.config.nodes[node_rank].wrap:
            from launcher.preflight.check_container import container_findings

            found += container_findings(survey, node_rank)
    found += package_findings(survey)
    found += same_machine(survey)
    return found


_PROBE_TIMEOUT = 90.0  # seconds; a Python on a shared disk, and nvidia-smi without persistence mode, are slow

_CALL_MARGIN = 30.0  # seconds for starting Python on the node

_CLOSE_TIMEOUT = 6.0  # seconds; a node that hangs must not block the end of preflight


def run_preflight(
    config: ResolvedConfig,
    transports: Mapping[int, Transport | TransportError],
    draft: LaunchPlan | None = None,
    *,
    run_id: str = "",
    notify: bool = False,
    speed: bool = False,
) -> PreflightReport:
    """Check all nodes in parallel.

    Args:
        transports: connection or error of each node by node_rank (the result of ``connect_all``).
        draft: the plan before preflight, for whose files, without parts that do not exist yet, the disks must have
            room; None: not checked, and the bundled trainer runs.
        run_id: id of the run; a node that already has a run of this id gets a blocking finding.
        notify: also send a message to each target of ``run.notify``.
        speed: also measure how fast the hosts are, which takes two seconds of all their processors.

    A node that cannot be reached, or whose checks fail, is reported as a finding; no exception is raised.
    """
    opened = {k: one for k, one in transports.items() if isinstance(one, Transport)}
    errors: dict[int, Exception] = {k: one for k, one in transports.items() if isinstance(one, TransportError)}
    with open_agents() as agents, open_agents() as inside:
        inquiry = Inquiry.about(config, run_id)
        answers = probe_all(inquiry, opened, agents, inside)
        errors |= answers.errors
        _raise_unexpected(errors)
        probes = {k: answers.values[k][0] for k in sorted(answers.values)}
        offsets = {k: answers.values[k][1] for k in probes}
        bytes_needed = {node.node_rank: draft.sent_bytes(node) for node in draft.nodes} if draft else {}
        survey = inquiry.survey(probes, offsets, draft is not None and bool(draft.own_command), bytes_needed)
        facts = {k: _facts(config, k, probe, offsets[k]) for k, probe in probes.items()}
        findings = [connect_finding(config, k, errors[k]) for k in sorted(errors)]
        findings += all_findings(survey)
        working = {k: agents[k] for k in facts}
        trainers = working | {k: inside[k] for k in inside if k in facts}  # agents with the trainer's packages
        if config.data.store is not None:
            from launcher.preflight.store_access import store_findings

            findings += store_findings(survey, trainers)
        if speed:
            findings += speed_findings(survey, trainers)
        if notify:
            from launcher.preflight.notices import notice_findings

            findings += notice_findings(survey, working)
        if config.data.mode == "verify":
            from launcher.preflight.shared_folder import shared_folder_findings

            findings += shared_folder_findings(survey, working)
        if not config.local and len(facts) > 1:
            connectivity = ConnectivityTest(config, probes, facts, working).run()
            _raise_unexpected(connectivity.errors)
            findings += [connect_finding(config, k, error) for k, error in sorted(connectivity.errors.items())]
            findings += network_findings(survey, connectivity)
            for k, fact in facts.items():
                address = connectivity.address.get(k, fact.address)
                facts[k] = replace(fact, address=address, interface=interface_of(probes[k], address))
    return PreflightReport(facts, tuple(sorted(findings, key=lambda finding: finding.node_rank)))


def without_busy_ports(
    config: ResolvedConfig, facts: Mapping[int, NodeFacts], transports: Mapping[int, Transport]
) -> dict[int, NodeFacts]:
    """Ask the nodes again which ports are busy, and return ``facts`` without these; for use long after preflight.

    A node that does not answer keeps its facts.
    """
    with open_agents() as agents, open_agents() as inside:
        answers = probe_all(Inquiry.about(config), transports, agents, inside).values
    busy = {k: probe["busy_ports"] for k, (probe, _) in answers.items()}
    return {
        k: replace(fact, free_ports=tuple(port for port in fact.free_ports if str(port) not in busy.get(k, ())))
        for k, fact in facts.items()
    }


def _raise_unexpected(errors: Mapping[int, Exception]) -> None:
    # Other errors are bugs of gnnfleet, not findings.
    for error in errors.values():
        if not isinstance(error, FleetError | TimeoutError):
            raise error


@contextmanager
def open_agents() -> Iterator[dict[int, NodeAgent]]:
    """Yield an empty dict, to which the caller adds agents by node_rank; close these agents at the end of the block."""
    agents: dict[int, NodeAgent] = {}
    try:
        yield agents
    finally:
        on_nodes(list(agents), lambda k: agents[k].close(), timeout=_CLOSE_TIMEOUT)


def probe_all(
    inquiry: Inquiry,
    transports: Mapping[int, Transport],
    agents: dict[int, NodeAgent],
    inside: dict[int, NodeAgent],
) -> Answers[tuple[dict[str, Any], float]]:
    """Start an agent on each node, add it to ``agents``, and run ``node/programs/probe.py``.

    ``inside`` gets a second agent of each node with ``wrap``, which runs in its container.

    Returns (reply of the program, clock offset in seconds) by node_rank.
    """

    def probe(k: int) -> tuple[dict[str, Any], float]:
        agents[k] = NodeAgent(transports[k], outer_python(inquiry.config, k))
        reply = agents[k].call("probe", inquiry.request(k), _PROBE_TIMEOUT)
        transports[k].check_sessions()
        offset = agents[k].clock_offset(_CALL_MARGIN)
        if inquiry.config.nodes[k].wrap:
            from launcher.preflight.check_container import agent_in_container, ask_container

            fact = _facts(inquiry.config, k, reply, offset)
            inside[k] = agent_in_container(inquiry, k, fact, transports[k])
            reply |= ask_container(inquiry, k, fact, agents[k], inside[k])
        return reply, offset

    return on_nodes(transports, probe, timeout=_PROBE_TIMEOUT + _CALL_MARGIN)


def _facts(config: ResolvedConfig, k: int, probe: Mapping[str, Any], offset: float) -> NodeFacts:
    free = [port for port in candidate_ports(config, k) if str(port) not in probe["busy_ports"]]
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
        free_ports=tuple(random.sample(free, len(free))),  # two launches at once then rarely choose the same port
        addresses=tuple(address for _, address in probe["addresses"]),
        topology_bytes=probe["graph"].get("topology_bytes", 0),
        device_memory=tuple((gpu["uuid"], gpu["memory"] << 20) for gpu in probe["gpus"]),
        bfloat16=probe.get("bfloat16"),
        ids=probe.get("ids", ""),
        leases=tuple(probe["leases"]),
    )
