"""Tests of the settings for restarts, and of their effect on a plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.config.loader import load_config
from launcher.config.schema import ClusterConfig, DataConfig, NodeConfig, RunConfig
from launcher.errors import ConfigError
from launcher.plan.ports import candidate_ports, lead_candidates
from launcher.preflight.connectivity import CONTROL, MASTER, RequiredRoutes, ports_of
from plan_kit import cluster, facts_of, plan_of

LOCAL = [NodeConfig("localhost", workdir=f"/w{k}") for k in range(3)]
HOSTS = [NodeConfig("s", role="server"), NodeConfig("a"), NodeConfig("b")]


def config(*nodes: NodeConfig, transport: str = "ssh", mode: str = "sync", **run: Any) -> ClusterConfig:
    data = DataConfig(dataset="synthetic", mode=mode, folder="/parts")  # type: ignore[arg-type]
    return cluster(*nodes, transport=transport, data=data, run=RunConfig(**{"restarts": 3, **run}))


def specs(config: ClusterConfig) -> list[dict[str, Any]]:
    """Return the content of each node's node.json in a plan."""
    found = []
    for node in plan_of(config, facts=facts_of(len(config.nodes))).nodes:
        found += [json.loads(file.content.reveal()) for file in node.files if file.dest.endswith("/node.json")]  # type: ignore[attr-defined]
    return found


def test_nodes_on_one_host_have_different_ports() -> None:
    plan = config(*LOCAL, transport="local", master_port=15000, control_port=15001)
    ports = [port for k in range(3) for port in (*candidate_ports(plan, k),)]
    assert len(ports) == len(set(ports)) and {15000, 15001} <= set(ports)
    chosen = [lease for spec in specs(plan) for lease in spec["leases"] if lease.startswith("port:")]
    assert len(chosen) == len(set(chosen)) == 9, "a master, control and service port of each node"


def test_hosts_use_the_ports_of_the_config() -> None:
    plan = config(*HOSTS, master_port=15000, control_port=15001)
    assert lead_candidates(plan, 0) == ((15001,), ()), "a server never has rank 0"
    assert lead_candidates(plan, 1) == lead_candidates(plan, 2) == ((15001,), (15000,))


def test_every_node_knows_the_others() -> None:
    first, second, third = specs(config(*HOSTS))
    nodes = first["nodes"]
    assert nodes == second["nodes"] == third["nodes"] and first["hub"] == 1
    assert [node.get("ranks") for node in nodes] == [None, [0], [1]]
    assert [node["address"] for node in nodes] == ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
    assert all(node["control_port"] for node in nodes) and "master_port" not in nodes[0]
    assert (first["restarts"], first["min_nodes"], first["lost_after"], first["data_dir"]) == (3, 1, 60.0, "")
    assert specs(config(*HOSTS, mode="verify"))[2]["data_dir"] == "/parts"
    assert third["trainer"]["env"]["GNNFLEET_RESTARTS"] == "3" and "GNNFLEET_RESTART" not in third["trainer"]["env"]


def test_without_restarts_nothing_is_added() -> None:
    plan = config(*HOSTS, restarts=0, min_nodes=9)
    for spec in specs(plan):
        assert spec["restarts"] == 0 and spec["data_dir"] == ""
        assert ["control_port" in node for node in spec["nodes"]] == [False, True, False]
    assert lead_candidates(plan, 2) == ((), ()) and len(candidate_ports(plan, 2)) == 64


def test_preflight_tests_the_ports_of_every_node() -> None:
    plan = config(*HOSTS)
    control, master = lead_candidates(plan, 2)
    fact = facts_of(3, free_ports=(control[0], master[0]))[2]
    assert ports_of(plan, 2, fact) == {CONTROL: control[0], MASTER: master[0]}
    routes = RequiredRoutes(plan)
    assert routes.reach(0, range(3)) == {1, 2} and routes.must_reach(0, 2, CONTROL)
    assert not routes.must_reach(0, 2, MASTER), "a server does not train"


MISTAKES = {
    "nodes: [a, b]\ndata: {dataset: synthetic}\nrun:\n  restarts: 1\n  min_nodes: 3\n": [
        "5: run.min_nodes is 3, but only 2 nodes train; lower it"
    ],
    "nodes: [a]\ndata: {dataset: synthetic}\nrun: {restarts: -1, min_nodes: 0}\n": [
        "3: run.restarts: must be at least 0; found -1",
        "3: run.min_nodes: must be at least 1; found 0",
    ],
}


@pytest.mark.parametrize("text", MISTAKES, ids=lambda text: repr(text)[-40:])
def test_contradicting_settings(tmp_path: Path, text: str) -> None:
    (tmp_path / "c.yml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "c.yml", ())
    assert [f"{one.line}: {one.message}" for one in caught.value.problems] == MISTAKES[text]
