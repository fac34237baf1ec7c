"""Tests of preflight's network checks on real hosts: closed ports, and addresses that all other nodes can reach."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from launcher.config.schema import ClusterConfig, DataConfig, NodeConfig, RunConfig
from launcher.plan.model import NodeFacts
from launcher.plan.placement import node_interface, place_nodes
from launcher.preflight import connectivity
from launcher.preflight.preflight import run_preflight
from launcher.preflight.preflight_report import PreflightReport
from launcher.transport import close_all, connect_all
from netns import Host, Machine, NetCluster, ip
from waiting import stretched

PORTS = RunConfig(master_port=29500, control_port=29400, service_port=29600)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Host]]:
    shared = tmp_path_factory.mktemp("shared")
    with NetCluster(4, shared_folder=shared, machines={3: Machine(interface="ens7")}) as cluster:
        with mock.patch.dict(os.environ, cluster.environment(), clear=True):
            yield cluster.hosts


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connectivity, "_SECONDS", 1.0)


def config_of(hosts: list[Host], **of_data: str) -> ClusterConfig:
    nodes = tuple(NodeConfig(host=host.address, user="root", python=sys.executable) for host in hosts)
    return ClusterConfig(nodes=nodes, data=DataConfig("synthetic", **of_data), run=PORTS)


def with_node(config: ClusterConfig, k: int, **changed: str) -> ClusterConfig:
    nodes = list(config.nodes)
    nodes[k] = replace(nodes[k], **changed)
    return replace(config, nodes=tuple(nodes))


def check(config: ClusterConfig) -> PreflightReport:
    lines = connect_all(config)
    try:
        return run_preflight(config, lines)
    finally:
        close_all(lines)


def blocked(report: PreflightReport) -> list[str]:
    return [finding.message for finding in report.findings if finding.severity == "block"]


def interfaces(report: PreflightReport) -> list[str]:
    return [fact.interface for fact in report.facts.values()]


@contextmanager
def rules(host: Host, *words: str) -> Iterator[None]:
    """Add routes, rules or addresses with ``ip`` on one host, and delete them at the end of the context."""
    with ExitStack() as stack:
        for text in words:
            what, _, rest = text.partition(" ")
            ip(f"-n {host.name} {what} add {rest}")
            stack.callback(ip, f"-n {host.name} {what} del {rest}")
        yield


def test_open_network_and_each_node_with_its_own_interface(hosts: list[Host]) -> None:
    begun = time.monotonic()
    report = check(config_of(hosts))
    assert time.monotonic() - begun < stretched(10)
    assert blocked(report) == []
    assert interfaces(report) == ["eth0", "eth0", "eth0", "ens7"]
    assert "all 12 pairs reach each other" in {finding.message for finding in report.findings}
    nodes = place_nodes(config_of(hosts), "r", report.facts, "d" * 16)
    assert [node.bind for node in nodes] == [host.address for host in hosts]


def test_no_port_is_left_listening(hosts: list[Host]) -> None:
    check(config_of(hosts))
    for host in hosts:
        listening = host.run(["bash", "-c", "cat /proc/net/tcp /proc/net/tcp6"]).stdout
        assert not [
            port for port in (29400, 29500, *range(29600, 29604)) if f":{port:04X} 0" in listening.split(" 0A ")
        ]
        assert host.processes() == []


@pytest.mark.parametrize(
    ("where", "rule", "says"),
    [
        (0, "sport 29500 to {2} blackhole", "node2 → node0:29500 blocked: no answer"),
        pytest.param(
            2, "dport 29500 to {0} unreachable", "node2 → node0:29500 blocked: no route", marks=pytest.mark.slow
        ),
        pytest.param(0, "sport 29400 blackhole", "all → node0:29400 blocked: no answer", marks=pytest.mark.slow),
    ],
)
def test_one_port_closed(hosts: list[Host], where: int, rule: str, says: str) -> None:
    rule = rule.format(*(host.address for host in hosts))
    with rules(hosts[where], f"rule {rule.rsplit(' ', 1)[1]} ipproto tcp {rule.rsplit(' ', 1)[0]}"):
        assert blocked(check(config_of(hosts))) == [says]
    assert blocked(check(config_of(hosts))) == []


def test_a_node_that_others_cannot_reach(hosts: list[Host]) -> None:
    others = [host.address for k, host in enumerate(hosts) if k != 1]
    with rules(hosts[1], *(f"route blackhole {address}" for address in others)):
        findings = blocked(check(config_of(hosts)))
    assert findings == ["node1 → all blocked: no route", "all → node1 blocked: no answer"]


def test_the_network_that_all_nodes_share_is_chosen(hosts: list[Host]) -> None:
    # Node1 and node2 cannot reach each other on the first of two networks, but on the second one.
    second = [f"172.31.99.{10 + k}" for k in range(4)]
    with ExitStack() as stack:
        for host, address in zip(hosts, second, strict=True):
            stack.enter_context(rules(host, f"addr {address}/24 dev {host.machine.interface}"))
        stack.enter_context(rules(hosts[1], f"route blackhole {hosts[2].address}"))
        report = check(config_of(hosts))
    assert blocked(report) == []
    addresses = [fact.address for fact in report.facts.values()]
    assert addresses == [hosts[0].address, second[1], second[2], hosts[3].address]


def test_a_name_that_is_loopback_on_its_own_host(hosts: list[Host]) -> None:
    # On the host itself, its name resolves to 127.0.1.1, as on a fresh Debian; other hosts resolve it to its address.
    report = check(with_node(config_of(hosts), 0, address=hosts[0].name))
    assert blocked(report) == []
    assert (report.facts[0].address, report.facts[0].interface) == (hosts[0].address, "eth0")


def test_an_address_behind_nat(hosts: list[Host]) -> None:
    # The configured address of node1 leads to node1, but belongs to none of its network interfaces.
    outside = "198.51.100.7"
    with ExitStack() as stack:
        stack.enter_context(rules(hosts[1], f"route local {outside} dev lo"))
        for k in (0, 2, 3):
            dev = hosts[k].machine.interface
            stack.enter_context(rules(hosts[k], f"route {outside} via {hosts[1].address} dev {dev}"))
        config = with_node(config_of(hosts), 1, address=outside)
        report = check(config)
        assert blocked(report) == []
        node = place_nodes(config, "r", report.facts, "d" * 16)[1]
        assert (node.address, node.bind) == (outside, "0.0.0.0")
        assert node_interface(config, config.nodes[1], report.facts[1]) == "eth0"
    findings = blocked(check(config))
    assert findings == ["all → node1:29601 blocked: no route"]


def test_another_machine_at_the_configured_address(hosts: list[Host]) -> None:
    findings = blocked(check(with_node(config_of(hosts), 1, address=hosts[3].address)))
    assert findings == ["all → node1:29601 blocked: refused"]


def test_shared_folder_and_copies(hosts: list[Host], tmp_path: Path) -> None:
    shared = hosts[0].cluster.shared_folder
    assert shared is not None
    parts = shared / "parts"
    parts.mkdir()
    (parts / "manifest.json").write_text("{}")
    config = config_of(hosts, folder=str(parts), mode="verify")
    assert says(config, "shared folder") == {"the same folder on node0–node3"}
    hosts[3].write("/tmp/copy/manifest.json", "{}")
    apart = with_node(config, 3, data_folder="/tmp/copy")
    assert says(apart, "shared folder") == {
        "the same folder on node0–node2",
        "another folder than on node0; parts are compared by digest",
    }
    assert [path.name for path in parts.iterdir()] == ["manifest.json"]


def says(config: ClusterConfig, name: str) -> set[str]:
    return {finding.message for finding in check(config).findings if finding.check == name}


def test_clock_offsets_are_measured_to_milliseconds(hosts: list[Host]) -> None:
    facts: dict[int, NodeFacts] = check(config_of(hosts)).facts
    assert all(abs(fact.clock_offset) < 0.05 for fact in facts.values())
