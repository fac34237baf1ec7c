"""Tests of preflight with servers and clients: ports that must be reachable, and requirements of each role."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from findings_kit import found, gpu, versions, with_gpus
from launcher.config.schema import ClusterConfig, DataConfig, NodeConfig, RunConfig
from launcher.preflight.connectivity import CONTROL, FREE, MASTER, SERVICE, RequiredRoutes
from launcher.preflight.preflight import run_preflight
from launcher.preflight.preflight_report import PreflightReport
from launcher.preflight.survey import Inquiry
from wire_kit import Closed, machine

RUN = RunConfig(master_port=29500, control_port=29400, service_port=29600)


def cluster_of(*roles: str, **more: Any) -> ClusterConfig:
    nodes = tuple(NodeConfig(f"host{k}", role=role) for k, role in enumerate(roles))  # type: ignore[arg-type]
    return ClusterConfig(nodes=nodes, **{"data": DataConfig("synthetic"), "run": RUN, **more})


def report_of(config: ClusterConfig, closed: Closed) -> PreflightReport:
    return run_preflight(config, {k: machine(k, closed) for k in range(len(config.nodes))})


def network_findings(report: PreflightReport, severity: str = "block") -> list[tuple[int, str]]:
    return [(f.node_rank, f.message) for f in report.findings if f.severity == severity and f.check == "network"]


MIXED = cluster_of("server", "client", "worker", "client")  # node1 leads


@pytest.mark.parametrize(
    ("use", "target", "sources"),
    [
        (SERVICE, 0, {1, 2, 3}),  # every other node connects to the server
        (SERVICE, 2, {0}),  # the server connects to the worker; clients do not
        (MASTER, 1, {1, 2, 3}),
        (CONTROL, 1, {0, 1, 2, 3}),
        (FREE, 1, {2, 3}),
        (FREE, 2, {1, 3}),
        (FREE, 0, set()),  # nothing is trained there
    ],
)
def test_sources_that_must_reach_a_target(use: str, target: int, sources: set[int]) -> None:
    routes = RequiredRoutes(MIXED)
    assert {k for k in range(4) if routes.must_reach(k, target, use)} == sources


def test_routes_that_are_not_required_may_be_closed() -> None:
    # Between the server and other nodes, only the service port of the server and the ports of hub and rendezvous are
    # open; this is enough.
    def closed(source: int, target: int, address: str, port: int) -> str:
        needed = target == 0 and port == 29600 or port in (29400, 29500) or 0 not in (source, target)
        return "" if needed else "no answer"

    config = cluster_of("server", "client", "client")
    report = report_of(config, closed)
    assert network_findings(report) == []
    assert {text for _, text in network_findings(report, "ok")} == {"all 5 pairs reach each other"}


@pytest.mark.parametrize(
    ("closed", "says"),
    [
        (lambda i, j, a, port: "refused" if port == 29600 else "", "all → node0:29600 blocked: refused"),
        (
            lambda i, j, a, port: "no answer" if (i, port) == (0, 29400) else "",
            "node0 → node1:29400 blocked: no answer",
        ),
        (lambda i, j, a, port: "no answer" if i == 3 else "", "node3 → all blocked: no answer"),
        (lambda i, j, a, port: "no answer" if i == 0 else "", "node0 → node1–node2 blocked: no answer"),
    ],
    ids=["the server", "the meeting", "a deaf client", "a deaf server"],
)
def test_a_closed_required_route_is_reported(closed: Closed, says: str) -> None:
    report = report_of(MIXED, closed)
    assert [text for _, text in network_findings(report)] == [says]
    deaf = [f.remedy for f in report.findings if f.severity == "block" and "29" not in f.message]
    assert all("check the firewall and the routes of node" in remedy for remedy in deaf)


def test_serving_clusters_need_no_hub() -> None:
    routes = RequiredRoutes(cluster_of("server", "server"))
    assert routes.reach(0, (0, 1)) == {1} and routes.reach(1, (0, 1)) == {0}
    assert network_findings(report_of(cluster_of("server", "server"), lambda *way: "")) == []


# Requirements of each role


def test_a_server_needs_no_cuda_if_only_clients_have_devices() -> None:
    config = cluster_of("server", "client")
    config = replace(config, nodes=(config.nodes[0], replace(config.nodes[1], devices=(0,))))
    assert found(2, {1: with_gpus(gpu())}, config=config) == []


def test_a_server_needs_our_packages_even_with_an_own_command() -> None:
    config = cluster_of("server", "client")
    odd = {k: versions(numba="") for k in range(2)}
    kinds = [(one.node_rank, one.severity, one.check) for one in found(2, odd, config=config, own_command=True)]
    assert kinds == [(0, "block", "packages"), (1, "warn", "packages")]


def test_parts_and_service_port_are_not_checked_on_a_client() -> None:
    verify = cluster_of("server", "client", data=DataConfig("synthetic", folder="/parts", mode="verify"))
    inquiry = Inquiry(verify)
    assert [inquiry.request(k)["manifest"] for k in range(2)] == ["/parts/manifest.json", ""]
    assert [inquiry.request(k)["ports"] for k in range(2)] == [[29600], [29500, 29400]]
    odd: dict[int, dict[str, Any]] = {0: {"manifest": False}, 1: {"busy_ports": {"29601": "in use (nginx)"}}}
    assert [(one.node_rank, one.check) for one in found(2, odd, config=verify)] == [(0, "data")]


def test_memory_of_a_server_includes_its_buffer() -> None:
    config = cluster_of("server", "client", run=replace(RUN, server_buffer=20_000))
    (finding,) = found(2, config=config)
    assert (finding.node_rank, finding.severity, finding.check) == (0, "warn", "memory")
    assert "a smaller run.server_buffer" in finding.remedy
