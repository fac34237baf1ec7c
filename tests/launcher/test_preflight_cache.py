"""What preflight remembers, and everything that makes it forget."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fake_transport import wire
from launcher import preflight_cache
from launcher.config import ClusterConfig, RunConfig
from launcher.preflight import PreflightReport, run_preflight
from wire_kit import Closed, cluster, machine

COUNT = 6
ALL = COUNT * (COUNT - 1)
FEW = 10  #: a ring of 6, and node 0 by the 4 others that are not beside it


class Fleet:
    """Nodes whose tested pairs are counted."""

    def __init__(self) -> None:
        self.config = cluster(COUNT)
        self.facts: dict[int, dict[str, Any]] = {}
        self.routes = dict.fromkeys(range(COUNT), ["r"])
        self.closed: Closed = lambda *way: ""
        self.asked: set[tuple[int, int]] = set()

    def check(self, **options: Any) -> PreflightReport:
        self.asked.clear()
        machines = {}
        for k in range(len(self.config.nodes)):
            machines[k] = machine(k, **self.facts.get(k, {})).on_program("can reach a port", self._wire(k))
        return run_preflight(self.config, machines, **options)

    def _wire(self, k: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
        def reply(request: dict[str, Any]) -> dict[str, Any]:
            if request["op"] == "open":
                return {**wire()(request), "routes": self.routes[k]}
            self.asked |= {(k, rank) for rank, _, _ in request["targets"] if rank != k}
            return wire(self.closed)(request)

        return reply


@pytest.fixture
def fleet() -> Fleet:
    """Six nodes, checked once."""
    fleet = Fleet()
    fleet.check()
    assert len(fleet.asked) == ALL
    return fleet


def says(report: PreflightReport) -> str:
    return next(finding.message for finding in report.findings if finding.check == "wire")


def test_the_unchanged_is_not_tested_again_but_for_a_ring_and_node0(fleet: Fleet) -> None:
    report = fleet.check()
    assert len(fleet.asked) == FEW
    assert {(k, (k + 1) % COUNT) for k in range(COUNT)} | {(k, 0) for k in range(1, COUNT)} == fleet.asked
    assert says(report) == "all 30 pairs reach each other, 20 of them checked less than a minute ago"


def test_fresh_tests_everything(fleet: Fleet) -> None:
    assert says(fleet.check(fresh=True)) == "all 30 pairs reach each other"
    assert len(fleet.asked) == ALL


def test_the_age_is_told_and_an_hour_is_too_old(fleet: Fleet, own_cache: Path) -> None:
    age(own_cache, 14 * 60)
    assert says(fleet.check()).endswith("20 of them checked 14 min ago")
    assert says(fleet.check()).endswith("20 of them checked 14 min ago"), "what is known is no newer for being used"
    age(own_cache, 50 * 60)
    assert says(fleet.check()) == "all 30 pairs reach each other"
    assert says(fleet.check()).endswith("less than a minute ago")


def age(folder: Path, seconds: float) -> None:
    file = folder / "gnnfleet/preflight.json"
    kept = json.loads(file.read_text())
    for entry in kept["entries"]:
        entry["time"] -= seconds
    file.write_text(json.dumps(kept))


def _facts(**changed: Any) -> Callable[[Fleet], None]:
    return lambda fleet: fleet.facts.update({2: changed})


def _node(**changed: Any) -> Callable[[Fleet], None]:
    def change(fleet: Fleet) -> None:
        nodes = list(fleet.config.nodes)
        nodes[2] = replace(nodes[2], **changed)
        fleet.config = replace(fleet.config, nodes=tuple(nodes))

    return change


MORE = [["lo", "127.0.0.1"], ["eth0", "10.0.0.2"], ["wg0", "10.8.0.2"]]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(_facts(boot_id="another"), id="rebooted"),
        pytest.param(_facts(hostname="another"), id="another machine at this address"),
        pytest.param(_facts(addresses=MORE), id="another network joined"),
        pytest.param(_facts(addresses=[["eth0", "10.0.0.99"]], address="10.0.0.99"), id="renumbered"),
        pytest.param(lambda fleet: fleet.routes.update({2: ["other"]}), id="routes changed"),
        pytest.param(_node(host="other"), id="another host in the config"),
        pytest.param(_node(user="eve"), id="another user"),
        pytest.param(_node(port=2222), id="another SSH port"),
        pytest.param(_node(address="203.0.113.1"), id="another address in the config"),
        pytest.param(_node(interface="eth0"), id="another interface in the config"),
    ],
)
def test_a_changed_node_is_tested_with_all_others(fleet: Fleet, change: Callable[[Fleet], None]) -> None:
    change(fleet)
    fleet.check()
    with_it = {(2, k) for k in range(COUNT) if k != 2} | {(k, 2) for k in range(COUNT) if k != 2}
    assert with_it <= fleet.asked
    assert len(fleet.asked) < ALL, "the others are as they were"
    fleet.check()
    assert len(fleet.asked) == FEW


def _run(**changed: Any) -> Callable[[ClusterConfig], ClusterConfig]:
    return lambda config: replace(config, run=replace(config.run, **changed))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(_run(service_port=30000), id="service port"),
        pytest.param(lambda config: replace(config, run=RunConfig()), id="all ports"),
    ],
)
def test_other_ports_are_tested(fleet: Fleet, change: Callable[[ClusterConfig], ClusterConfig]) -> None:
    fleet.config = change(fleet.config)
    fleet.check()
    assert len(fleet.asked) == ALL


@pytest.mark.parametrize("changed", [{"master_port": 30001}, {"control_port": 30001}, {"master_addr": "10.0.0.0"}])
def test_node0_is_always_tested_on_its_own_ports(fleet: Fleet, changed: dict[str, Any]) -> None:
    fleet.config = _run(**changed)(fleet.config)
    fleet.check()
    assert {(k, 0) for k in range(1, COUNT)} | {(0, k) for k in range(1, COUNT)} <= fleet.asked


@pytest.mark.parametrize(
    "closed",
    [
        pytest.param(lambda i, j, *way: "no answer" if j == 4 else "", id="lets nothing in"),
        pytest.param(lambda i, j, *way: "no answer" if i == 4 else "", id="lets nothing out"),
        pytest.param(lambda i, j, address, port: "refused" if j == 4 and port == 29604 else "", id="one port"),
    ],
)
def test_a_firewall_switched_on_meanwhile_is_found(fleet: Fleet, closed: Closed) -> None:
    fleet.closed = closed
    report = fleet.check()
    assert report.blocked and "blocked" in next(f.message for f in report.findings if f.severity == "block")
    assert len(fleet.asked) == ALL, "one failure, and nothing known is believed"


def test_what_was_blocked_is_tested_again(fleet: Fleet) -> None:
    fleet.closed = lambda i, j, *way: "no answer" if (i, j) == (2, 4) else ""
    fleet.check(fresh=True)
    fleet.closed = lambda *way: ""
    fleet.check()
    assert (2, 4) in fleet.asked and not fleet.check().blocked


def test_an_entry_from_the_future_is_not_believed(fleet: Fleet, own_cache: Path) -> None:
    age(own_cache, -600)
    fleet.check()
    assert len(fleet.asked) == ALL


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"version": 2, "entries": []}', '{"version": 1, "entries": [{"time": "x", "nodes": 3}]}'],
)
def test_a_damaged_cache_is_as_none(fleet: Fleet, own_cache: Path, text: str) -> None:
    (own_cache / "gnnfleet/preflight.json").write_text(text)
    fleet.check()
    assert len(fleet.asked) == ALL
    fleet.check()
    assert len(fleet.asked) == FEW


def test_a_cache_that_cannot_be_written_does_no_harm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert not Fleet().check().blocked


def test_two_clusters_are_both_remembered(fleet: Fleet) -> None:
    other = Fleet()
    other.facts = {k: {"hostname": f"other{k}"} for k in range(COUNT)}
    other.check()
    fleet.check()
    other.check()
    assert len(fleet.asked) == len(other.asked) == FEW


def test_a_chosen_address_is_begun_with(own_cache: Path) -> None:
    fleet = Fleet()
    there = [["eth0", "10.0.0.2"], ["ib0", "10.9.0.2"]]
    fleet.facts = {2: {"addresses": there}}
    fleet.closed = lambda i, j, address, port: "no answer" if address == "10.0.0.2" else ""
    assert fleet.check().facts[2].address == "10.9.0.2"
    assert fleet.check().facts[2].address == "10.9.0.2"
    assert len(fleet.asked) == FEW


def test_the_file_is_where_caches_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert preflight_cache.cache_file() == Path(os.path.expanduser("~/.cache/gnnfleet/preflight.json"))
    assert preflight_cache.known({0: "x"}, now=time.time() + 1e6) == preflight_cache.Known()
