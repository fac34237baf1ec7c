"""Tests of the whole preflight, with fake nodes and with this machine as a node."""

from __future__ import annotations

import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fake_transport import FakeTransport, printed, wire
from findings_kit import cluster, probe_of
from launcher.config.schema import ClusterConfig, NodeConfig, RunConfig
from launcher.errors import AuthError, PreflightRefused, TransportError
from launcher.preflight.preflight import run_preflight
from launcher.preflight.preflight_report import PreflightReport
from launcher.transport import connect_all
from launcher.transport.base import Transport
from plan_kit import plan_of


def machine(k: int, **facts: Any) -> FakeTransport:
    interfaces = [["lo", "127.0.0.1"], ["eth0", f"10.0.0.{k}"]]
    fake = FakeTransport(target=f"host{k}", node_rank=k).on_program("network", wire())
    return fake.on_program("probe", lambda request: probe_of(k, addresses=interfaces, **facts))


def problems(report: PreflightReport) -> list[tuple[int, str, str]]:
    return [(f.node_rank, f.severity, f.check) for f in report.findings if f.severity != "ok"]


def check(config: ClusterConfig, *machines: Transport | TransportError, **more: Any) -> PreflightReport:
    return run_preflight(config, dict(enumerate(machines)), **more)


def test_healthy_nodes_give_facts_and_no_problems() -> None:
    report = check(cluster(3), machine(0), machine(1), machine(2))
    assert problems(report) == []
    report.refuse_if_blocked()
    facts = report.facts[1]
    assert (facts.address, facts.interface, facts.python, facts.cpus) == ("10.0.0.1", "eth0", "/usr/bin/python3", 8)
    assert abs(facts.clock_offset) < 1
    assert 29500 in report.facts[0].free_ports and 29500 not in facts.free_ports
    for name in (
        "connect",
        "tmux",
        "versions",
        "workdir",
        "disk",
        "memory",
        "code",
        "clock",
        "service port",
        "network",
    ):
        assert [f.node_rank for f in report.findings if f.check == name] == [0, 1, 2], name


def test_nodes_that_cannot_be_reached_are_all_reported() -> None:
    refused = AuthError("no key was accepted", host="ann@host0", node_rank=0, remedy="ssh-copy-id")
    lost = machine(2)
    lost.lose_connection()
    report = check(cluster(3), refused, machine(1), lost)
    assert problems(report) == [(0, "block", "connect"), (2, "block", "connect")]
    with pytest.raises(PreflightRefused, match=r"(?s)node0 \(host0\): no key was accepted – ssh-copy-id.*node2"):
        report.refuse_if_blocked()
    assert list(report.facts) == [1]


def test_a_node_without_python() -> None:
    missing = FakeTransport(node_rank=0).on("python3 -S -c", printed(returncode=127, stderr="bash: python3: not found"))
    report = check(cluster(1), missing)
    (finding,) = report.findings
    assert (finding.severity, finding.check) == ("block", "python")
    assert "cannot run python3" in finding.message and "`venv`" in finding.remedy


def test_a_plan_larger_than_the_disk_is_refused() -> None:
    plan = plan_of(cluster(2))
    small, large = (
        replace(node, files=(replace(node.files[0], bytes=size),))
        for node, size in zip(plan.nodes, (10**9, 11 * 10**9), strict=True)
    )
    report = check(cluster(2), machine(0), machine(1), draft=replace(plan, nodes=(small, large)))
    assert problems(report) == [(1, "block", "disk")]


def test_auto_skips_busy_ports() -> None:
    busy = {str(port): "" for port in range(29500, 29563)}
    report = check(cluster(2), machine(0, busy_ports=busy), machine(1))
    assert problems(report) == []
    assert [port for port in report.facts[0].free_ports if port < 29600 and port >= 29500] == [29563]


def test_two_simultaneous_launches_rarely_choose_the_same_port() -> None:
    firsts = {check(cluster(2), machine(0), machine(1)).facts[0].free_ports[0] for _ in range(12)}
    assert len(firsts) > 4


# -- real checks on this machine ------------------------------------------


def local_cluster(tmp_path: Path, count: int, **run: Any) -> ClusterConfig:
    node = NodeConfig(host="localhost", workdir=f"{tmp_path}/node{{node_rank}}")
    return cluster(count, nodes=(node,) * count, transport="local", run=RunConfig(**run))


def test_preflight_of_this_machine(tmp_path: Path) -> None:
    config = local_cluster(tmp_path, 3)
    report = run_preflight(config, connect_all(config))
    blocking = [finding for finding in report.findings if finding.severity == "block" and finding.check != "tmux"]
    assert blocking == []
    facts = report.facts[2]
    assert (facts.address, facts.interface) == ("127.0.0.1", "lo")
    assert facts.python == sys.executable
    assert facts.versions["python"].startswith(f"{sys.version_info[0]}.{sys.version_info[1]}.")
    assert facts.versions["torch"] and facts.memory > 10**8 and facts.disk_free > 0
    assert abs(facts.clock_offset) < 5


def test_a_busy_master_port_of_this_machine(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = local_cluster(tmp_path, 2, master_port=taken.getsockname()[1])
        report = run_preflight(config, connect_all(config))
    finding = next(finding for finding in report.findings if finding.check == "master port")
    assert finding.severity == "block"
    assert "python" in finding.message  # the port is held by this process
