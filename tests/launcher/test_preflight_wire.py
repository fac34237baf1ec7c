"""Tests of the network test of preflight: its node program on this machine, the chosen addresses, and closed ports."""

from __future__ import annotations

import socket
from dataclasses import replace
from typing import Any

import pytest

from fake_transport import FakeTransport, wire
from launcher.config.schema import ClusterConfig, RunConfig
from launcher.errors import ConnectionLost
from launcher.node.programs import network as program
from launcher.preflight.preflight import run_preflight, without_busy_ports
from launcher.preflight.preflight_report import PreflightReport
from wire_kit import Closed, cluster, machine

CHECKS = ("network", "interface", "connect", "master port", "control port", "service port")


def report_of(count: int, closed: Closed, config: ClusterConfig | None = None, **facts: Any) -> PreflightReport:
    machines = {k: machine(k, closed, **facts) for k in range(count)}
    return run_preflight(config or cluster(count), machines)


def blocked(report: PreflightReport) -> list[tuple[int, str]]:
    return [(f.node_rank, f.message) for f in report.findings if f.severity == "block" and f.check in CHECKS]


def remedy(report: PreflightReport) -> str:
    (finding,) = (f for f in report.findings if f.severity == "block" and f.check in CHECKS)
    return finding.remedy


def closed_for(why: str, sources: set[int], targets: set[int], *ports: int) -> Closed:
    """Return a value for argument ``closed`` of ``wire``: nodes ``sources`` cannot connect to nodes ``targets``.

    ports: the closed ports; all if none is given. why: the reported reason.
    """
    return lambda i, j, address, port: why if i in sources and j in targets and (not ports or port in ports) else ""


# -- findings -------------------------------------------------------------


def test_open_routes_give_no_problem() -> None:
    report = report_of(4, lambda *way: "")
    assert blocked(report) == []
    fine = [(f.node_rank, f.message) for f in report.findings if f.check in ("network", "interface")]
    for k in range(4):
        assert (k, "all 12 pairs reach each other") in fine and (k, "traffic goes over eth0") in fine


def test_a_blocked_pair_is_reported() -> None:
    report = report_of(4, closed_for("no answer", {2}, {0}, 29500))
    assert blocked(report) == [(2, "node2 → node0:29500 blocked: no answer")]
    assert "allow TCP port 29500 of node0 in the firewall" in remedy(report)
    assert "10.0.0.0 is in the wrong network" in remedy(report)


@pytest.mark.parametrize(
    ("closed", "place", "says"),
    [
        (closed_for("refused", {0, 1, 2, 3}, {0}, 29500), 0, "all → node0:29500 blocked: refused"),
        (closed_for("no answer", {2}, {0, 1, 2, 3}), 2, "node2 → all blocked: no answer"),
        (closed_for("no answer", {0, 1, 3}, {2}), 2, "all → node2 blocked: no answer"),
        (closed_for("no answer", {0, 1, 3}, {2}, 29602), 2, "all → node2:29602 blocked: no answer"),
        (closed_for("no route", {0, 1}, {2, 3}), 2, "node0–node1 → node2–node3 blocked: no route"),
        (closed_for("refused", {1}, {2}, 40002), 1, "node1 → node2 blocked on free ports: refused"),
        (closed_for("stranger", {1}, {3}, 29603), 1, "node1 → node3:29603 blocked: another program answers there"),
        (closed_for("no answer", {0, 1, 2}, {1, 2, 3}, 29601, 29602, 29603), 0, "blocked: no answer"),
    ],
)
def test_many_blocked_pairs_are_folded(closed: Closed, place: int, says: str) -> None:
    told = blocked(report_of(4, closed))
    assert says in told[0][1]
    if says != "blocked: no answer":
        assert told == [(place, says)]


@pytest.mark.parametrize(
    ("why", "says"),
    [
        ("refused", "in the firewall, or, if 10.0.0.2 is another machine, set"),
        ("no answer", "in the firewall, or, if 10.0.0.2 is in the wrong network, set"),
        ("no route", "to 10.0.0.2 (`ip route`): set"),
        ("stranger", "another machine or a proxy answers at 10.0.0.2 (NAT?)"),
        ("name", "add 10.0.0.2 to /etc/hosts of"),
    ],
)
def test_the_remedy_depends_on_the_cause(why: str, says: str) -> None:
    assert says in remedy(report_of(3, closed_for(why, {1}, {2}, 29602)))


def test_a_cut_between_racks_of_sixty_four_nodes_is_one_line() -> None:
    left, right = set(range(32)), set(range(32, 64))
    report = report_of(64, lambda i, j, *way: "no answer" if (i in left) != (j in left) else "")
    told = [message for _, message in blocked(report)]
    assert sorted(told) == [
        "node0–node31 → node32–node63 blocked: no answer",
        "node32–node63 → node0–node31 blocked: no answer",
    ]
    assert right


def pairs_tested(count: int) -> tuple[set[tuple[int, int]], PreflightReport]:
    """Run preflight of ``count`` nodes with open routes; return the pairs of nodes that connected, and the report."""
    pairs: set[tuple[int, int]] = set()

    def seen(i: int, j: int, *way: object) -> str:
        pairs.add((i, j))
        return ""

    report = report_of(count, seen)
    return {(i, j) for i, j in pairs if i != j}, report


@pytest.mark.slow
def test_pairs_of_many_nodes_are_tested_in_part_while_all_routes_are_open() -> None:
    assert len(pairs_tested(64)[0]) == 64 * 63
    pairs, report = pairs_tested(150)
    assert blocked(report) == []
    for k in range(150):
        assert {(k, 0), (k, (k + 1) % 150), (k, (k + 64) % 150)} <= pairs | {(0, 0)}
        assert 3 <= sum(i == k for i, _ in pairs) <= 17 and sum(j == k for _, j in pairs) >= 14
    (words,) = {f.message for f in report.findings if f.check == "network"}
    assert words == f"{len(pairs):,} of 22,350 pairs tested, all reach each other"


@pytest.mark.parametrize(("sources", "targets"), [({7}, set(range(90)) - {7}), (set(range(90)) - {80}, {80})])
def test_a_blocked_node_among_many_is_reported_with_all_its_routes(sources: set[int], targets: set[int]) -> None:
    ((_, message),) = blocked(report_of(90, closed_for("no answer", sources, targets)))
    assert message in ("node7 → all blocked: no answer", "all → node80 blocked: no answer")


def test_a_cut_between_racks_of_many_nodes_is_one_line() -> None:
    left = set(range(50))
    report = report_of(100, lambda i, j, *way: "no answer" if i in left and j not in left else "")
    assert [message for _, message in blocked(report)] == ["node0–node49 → node50–node99 blocked: no answer"]


def test_a_node_that_cannot_listen_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def reply(request: dict[str, Any]) -> dict[str, Any]:
        answer = wire()(request)
        return {**answer, "refused": {"29500": "Address already in use"}} if request["op"] == "open" else answer

    first = machine(0).on_program("network", reply)
    report = run_preflight(cluster(2), {0: first, 1: machine(1)})
    assert blocked(report) == [(0, "cannot listen on its master port: Address already in use")]
    assert "run.master_port" in remedy(report)


def test_ports_that_another_launch_takes_meanwhile_are_not_chosen() -> None:
    # The probe found them free; the network test of another launch listens on them when this one wants to.
    tried: list[int] = []

    def reply(request: dict[str, Any]) -> dict[str, Any]:
        answer = wire()(request)
        if request["op"] == "open":
            tried.extend(request["ports"])
            answer["refused"] = {str(port): "Address already in use" for port in request["ports"] if port in tried[:5]}
        return answer

    report = run_preflight(cluster(2, run=RunConfig()), {0: machine(0).on_program("network", reply), 1: machine(1)})
    assert blocked(report) == []
    assert len(tried) == len(set(tried)) == 8  # master, control and service port, and five further attempts
    free = report.facts[0].free_ports
    assert free and not {*tried[:5]} & {*free} and {*tried[5:]} <= {*free}


def test_ports_taken_after_preflight_are_not_chosen() -> None:
    config, machines = cluster(2, run=RunConfig()), {k: machine(k) for k in range(2)}
    facts = run_preflight(config, machines).facts
    taken, lost = facts[0].free_ports[:3], machine(1).on_program("probe", ConnectionLost("gone", node_rank=1))
    busy = machine(0, busy_ports={str(port): "run x" for port in taken})
    now = without_busy_ports(config, facts, {0: busy, 1: lost})
    assert now[0].free_ports == facts[0].free_ports[3:] and now[1] == facts[1]


def test_a_connection_lost_during_the_test_is_a_finding() -> None:
    broken = machine(1).on_program("network", ConnectionLost("connection lost", node_rank=1))
    report = run_preflight(cluster(2), {0: machine(0), 1: broken})
    assert [(f.node_rank, f.check) for f in report.findings if f.severity == "block"] == [(1, "connect")]


# -- the choice of addresses ---------------------------------------------

TWO_NETWORKS = {"addresses": [["lo", "127.0.0.1"], ["docker0", "172.17.0.1"]]}


def two_networks(k: int, closed: Closed, **facts: Any) -> FakeTransport:
    addresses = [["lo", "127.0.0.1"], ["docker0", "172.17.0.1"], ["eth0", f"10.0.0.{k}"], ["ib0", f"10.9.0.{k}"]]
    return machine(k, closed, **{"addresses": addresses, **facts})


def test_an_address_that_all_nodes_reach_is_preferred() -> None:
    def closed(i: int, j: int, address: str, port: int) -> str:
        return "no answer" if address == "10.0.0.2" and i == 0 else "refused" if address == "172.17.0.1" else ""

    report = run_preflight(cluster(3), {k: two_networks(k, closed) for k in range(3)})
    assert blocked(report) == []
    assert [(fact.address, fact.interface) for fact in report.facts.values()] == [
        ("10.0.0.0", "eth0"), ("10.0.0.1", "eth0"), ("10.9.0.2", "ib0"),
    ]  # fmt: skip
    assert "traffic goes over ib0 (10.9.0.2), as not all nodes reach 10.0.0.2" in [f.message for f in report.findings]


def test_the_configured_interface_decides() -> None:
    config = cluster(3)
    nodes = (replace(config.nodes[0], interface="ib0"), *config.nodes[1:])
    report = run_preflight(replace(config, nodes=nodes), {k: two_networks(k, lambda *way: "") for k in range(3)})
    assert (report.facts[0].address, report.facts[0].interface) == ("10.9.0.0", "ib0")
    nodes = (replace(config.nodes[0], interface="ib7"), *config.nodes[1:])
    report = run_preflight(replace(config, nodes=nodes), {k: two_networks(k, lambda *way: "") for k in range(3)})
    assert blocked(report)[0][1].startswith("no address on interface ib7; addresses of the host: 127.0.0.1 (lo), 172.")


def test_a_node_reached_over_loopback_gets_an_outward_address() -> None:
    here = two_networks(0, lambda *way: "", address="127.0.0.1")
    report = run_preflight(cluster(2), {0: here, 1: machine(1)})
    assert (report.facts[0].address, report.facts[0].interface) == ("10.0.0.0", "eth0")


def test_nodes_that_are_all_reached_over_loopback_use_it() -> None:
    machines = {k: two_networks(k, lambda *way: "", address="127.0.0.1") for k in range(2)}
    report = run_preflight(cluster(2), machines)
    assert [fact.address for fact in report.facts.values()] == ["127.0.0.1", "127.0.0.1"]


def test_an_address_behind_nat_is_used_if_all_nodes_reach_it() -> None:
    asked: list[tuple[int, str]] = []

    def closed(i: int, j: int, address: str, port: int) -> str:
        asked.append((port, address))
        return ""

    config = cluster(3)
    nodes = (replace(config.nodes[0], address="203.0.113.7"), *config.nodes[1:])
    report = run_preflight(replace(config, nodes=nodes), {k: machine(k, closed) for k in range(3)})
    assert blocked(report) == []
    assert {(port, address) for port, address in asked if port in (29500, 29400, 29600)} == {
        (port, "203.0.113.7") for port in (29500, 29400, 29600)
    }
    assert (40000, "10.0.0.0") in asked  # gloo announces the interface's own address to the others
    assert (report.facts[0].address, report.facts[0].interface) == ("10.0.0.0", "eth0")


# -- the node program -----------------------------------------------------


@pytest.fixture
def listening() -> Any:
    reply = program.main({"op": "open", "token": "t", "rank": 7, "ports": [0]})
    return reply["free"]


def connect(*targets: tuple[int, str, list[int]], token: str = "t", rank: int = 0) -> list[list[Any]]:
    request = {"op": "connect", "token": token, "rank": rank, "targets": targets, "seconds": 0.5}
    found: list[list[Any]] = program.main(request)["blocked"]
    return found


def test_the_listener_of_this_run_answers(listening: int) -> None:
    assert connect((7, "127.0.0.1", [listening]), (7, "localhost", [listening])) == []
    assert connect(*[(7, "127.0.0.1", [listening] * 10) for _ in range(60)]) == []


def test_listeners_of_other_runs_and_nodes_are_rejected(listening: int) -> None:
    assert connect((7, "127.0.0.1", [listening]), token="other") == [[7, "127.0.0.1", listening, "stranger"]]
    assert connect((6, "127.0.0.1", [listening])) == [[6, "127.0.0.1", listening, "stranger"]]


def test_causes_of_a_failed_connection_are_distinguished(listening: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.create_server(("127.0.0.1", 0)) as gone:
        quiet, free = silent.getsockname()[1], gone.getsockname()[1]
        gone.close()
        ways = [(1, "127.0.0.1", [quiet, free]), (2, "no.such.host.invalid", [80]), (7, "127.0.0.1", [listening])]
        found = connect(*ways)
    assert sorted(found) == [[1, "127.0.0.1", *one] for one in sorted([(quiet, "no answer"), (free, "refused")])] + [
        [2, "no.such.host.invalid", 80, "name"]
    ]


def test_a_port_in_use_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        reply = program.main({"op": "open", "token": "t", "rank": 0, "ports": [port]})
    assert reply["refused"] == {str(port): "Address already in use"}
