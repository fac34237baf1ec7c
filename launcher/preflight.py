"""Look at every node before anything is sent: facts for the plan, findings for the user."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from launcher.config import ClusterConfig
from launcher.errors import FleetError, PreflightRefused, TransportError
from launcher.fanout import Answers, on_nodes
from launcher.findings import Finding, Survey, all_findings, connect_finding
from launcher.nodecall import NodeAgent, call, program_source
from launcher.placement import (
    candidate_ports,
    choose,
    interpreter,
    master_candidates,
)
from launcher.plan import NodeFacts
from launcher.probing import probe_request
from launcher.transport.base import Transport

_PROBE_TIMEOUT = 90.0  # versions on a slow shared disk, nvidia-smi without persistence mode
_CONNECT_SECONDS = 5.0
_LISTEN_SECONDS = 10.0
_CALL_MARGIN = 30.0  # for starting python there


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
            lines = [finding.line() for finding in self.findings if finding.severity == "block"]
            raise PreflightRefused("preflight refused the run:\n  " + "\n  ".join(lines))


def run_preflight(
    config: ClusterConfig,
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
    answers = _probe_all(config, lines, run_id)
    errors |= answers.errors
    _raise_unexpected(errors)
    probes = {k: probe for k, (probe, _) in answers.values.items()}
    offsets = {k: offset for k, (_, offset) in answers.values.items()}
    facts = {k: _facts(config, k, probes[k], offsets[k]) for k in sorted(probes)}
    survey = Survey(config, probes, offsets, own_command, bytes_needed or {})
    findings = [connect_finding(config, k, errors[k]) for k in sorted(errors)]
    findings += all_findings(survey)
    findings += _reach_master(survey, facts, {k: lines[k] for k in facts})
    return PreflightReport(facts, tuple(sorted(findings, key=lambda finding: finding.node_rank)))


def _raise_unexpected(errors: Mapping[int, Exception]) -> None:
    """An error that is not a user's is a mistake of ours, and must not pass for a finding."""
    for error in errors.values():
        if not isinstance(error, FleetError | TimeoutError):
            raise error


def _probe_all(
    config: ClusterConfig, lines: Mapping[int, Transport], run_id: str
) -> Answers[tuple[dict[str, Any], float]]:
    """(reply of node/probe.py, clock offset in seconds) per node."""

    def probe(k: int, peer: str = "") -> tuple[dict[str, Any], float]:
        before = time.time()
        with NodeAgent(lines[k], interpreter(config, k)) as agent:
            reply = agent.call("probe", probe_request(config, k, peer, run_id), _PROBE_TIMEOUT)
        began, ended = reply["times"]
        return reply, ((began - before) + (ended - time.time())) / 2

    answers = on_nodes(lines, probe, timeout=_PROBE_TIMEOUT + _CALL_MARGIN)
    _ask_loopbacks_again(answers, probe)
    return answers


def _ask_loopbacks_again(
    answers: Answers[tuple[dict[str, Any], float]], probe: Callable[[int, str], tuple[dict[str, Any], float]]
) -> None:
    """A node reached over loopback, in a cluster of other machines, has to find its outward address."""
    outward = [reply["address"] for reply, _ in answers.values.values() if not _is_loopback(reply["address"])]
    inward = [k for k, (reply, _) in answers.values.items() if _is_loopback(reply["address"])]
    if outward and inward:
        again = on_nodes(inward, lambda k: probe(k, outward[0]), timeout=_PROBE_TIMEOUT + _CALL_MARGIN)
        answers.values.update(again.values)


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address in ("::1", "localhost")


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
    )


def _in_any_order(ports: Iterable[int]) -> tuple[int, ...]:
    """So that two launches in the same moment hardly ever take the same port."""
    free = list(ports)
    return tuple(random.sample(free, len(free)))


def _reach_master(survey: Survey, facts: Mapping[int, NodeFacts], lines: Mapping[int, Transport]) -> list[Finding]:
    """Listen on the master port of node 0 and connect to it from all the others."""
    config, others = survey.config, [k for k in lines if k != 0]
    if 0 not in facts or not others:
        return []
    port = choose(master_candidates(config), facts[0])
    if port not in facts[0].free_ports:
        return []  # has its own finding
    wire = _Wire(config, lines, port, _master_address(config, facts[0]))
    answers = on_nodes([0, *others], wire.work, timeout=_LISTEN_SECONDS + 2 * _CALL_MARGIN)
    _raise_unexpected(answers.errors)
    return [finding for k in lines for finding in _wire_findings(survey, k, answers, wire)]


def _master_address(config: ClusterConfig, fact: NodeFacts) -> str:
    given = config.run.master_addr
    return (config.nodes[0].address or fact.address) if given == "auto" else given


@dataclass(frozen=True)
class _Wire:
    """The two ends of the test: node 0 listens, every other node connects."""

    config: ClusterConfig
    lines: Mapping[int, Transport]
    port: int
    address: str
    token: str = field(default_factory=lambda: secrets.token_hex(8))

    def work(self, k: int) -> dict[str, Any]:
        request: dict[str, Any] = {"port": self.port, "token": self.token}
        if k == 0:
            request |= {"role": "listen", "clients": len(self.lines) - 1, "seconds": _LISTEN_SECONDS}
        else:
            request |= {"role": "connect", "address": self.address, "name": f"node{k}", "seconds": _CONNECT_SECONDS}
        limit = _LISTEN_SECONDS + _CALL_MARGIN
        reply: dict[str, Any] = call(self.lines[k], interpreter(self.config, k), program_source("wire"), request, limit)
        return reply


def _wire_findings(survey: Survey, k: int, answers: Answers[dict[str, Any]], wire: _Wire) -> list[Finding]:
    if k in answers.errors:
        return [connect_finding(survey.config, k, answers.errors[k])]
    reply = answers.values[k]
    if k == 0:
        message = f"cannot listen on port {wire.port}: {reply['error']}"
        remedy = "end what uses it, or set `run.master_port` to another"
        return [] if reply["bound"] else [survey.finding(0, "block", "master port", message, remedy)]
    if 0 not in answers.values or not answers.values[0]["bound"]:
        return []  # nothing to reach; node 0 has its own finding
    where = f"{wire.address}:{wire.port}"
    if reply["ok"]:
        return [survey.finding(k, "ok", "reach master", f"reaches {where} of node0")]
    message = f"cannot reach {where} of node0 ({survey.host(0)}): {reply['error']}"
    remedy = (
        f"open TCP port {wire.port} of {survey.host(0)} for this node, "
        "or set `run.master_port` or the `address` of node0 to what this node can reach"
    )
    return [survey.finding(k, "block", "reach master", message, remedy)]
