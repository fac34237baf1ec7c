"""Tests of plans with servers and clients: parts, addresses and files of each node, and the printed plan."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from golden_kit import GOLDEN, check_text
from launcher.cli import main
from launcher.command import Secret
from launcher.config.resolve import resolve_run, resolve_serving
from launcher.config.roles import holdings
from launcher.config.schema import ClusterConfig, DataConfig, NodeConfig, RunConfig
from launcher.errors import UsageError
from launcher.plan.model import LaunchPlan, NodePlan
from launcher.plan.render import _node_rows, fold_nodes, own_values, print_plan
from launcher.plan.serialize import read_run, run_json, to_json
from launcher.preflight.check_storage import base_memory, batch_memory
from launcher.preflight.survey import GraphSize
from launcher.run.live_table import Board
from plan_kit import PRODUCTS, TOKEN, cluster, facts_of, parts_folder, plan_of

ROLES = st.lists(st.sampled_from(["worker", "server", "client"]), min_size=1, max_size=7)


def nodes_of(*roles: str, **more: Any) -> ClusterConfig:
    """Return a config of the hosts h0, h1, … with these roles."""
    nodes = (NodeConfig(f"h{k}", role=role) for k, role in enumerate(roles))  # type: ignore[arg-type]
    return cluster(*nodes, **more)


def with_data(config: ClusterConfig, **data: Any) -> ClusterConfig:
    return dataclasses.replace(config, data=dataclasses.replace(config.data, **data))


def file_of(node: NodePlan, name: str) -> Any:
    content = next(file.content for file in node.files if file.dest.endswith(f"/{name}"))
    return json.loads(content.reveal() if isinstance(content, Secret) else content)


# Holders of parts


@settings(max_examples=60, deadline=None)
@given(roles=ROLES, more_parts=st.integers(0, 6), replicas=st.integers(1, 7))
def test_every_part_has_the_wanted_number_of_holders_and_one_first_holder(
    roles: list[str], more_parts: int, replicas: int
) -> None:
    config = nodes_of(*roles)
    holders = len(config.holders)
    if holders:
        config = with_data(config, num_parts=holders + more_parts, replicas=min(replicas, holders))
    held = holdings(config)
    for part in range(config.num_parts):
        assert sum(part in node.parts for node in held) == config.data.replicas
        assert sum(part in node.parts and part not in node.copies for node in held) == 1
    assert all(bool(node.parts) == (roles[k] != "client") for k, node in enumerate(held))


def test_replicas_are_on_the_next_holders() -> None:
    # With R replicas, a part of the i-th node that holds parts is also on the next R - 1 such nodes.
    held = holdings(with_data(nodes_of("server", "client", "server", "worker"), num_parts=6, replicas=2))
    assert [node.parts for node in held] == [(0, 1, 4, 5), (), (0, 1, 2, 3), (2, 3, 4, 5)]
    assert [node.copies for node in held] == [(4, 5), (), (0, 1), (2, 3)]


def test_clients_get_no_parts_and_servers_no_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("1")
    config = with_data(nodes_of("server", "client", "client"), num_parts=2)
    manifest = parts_folder(tmp_path / "parts", 2)
    plan = plan_of(config, manifest=manifest, own_command=("python", "train.py"), cwd=tmp_path)
    names = [{file.dest.rpartition("/")[2] for file in node.files} for node in plan.nodes]
    assert "x.npy" in names[0] and "manifest.json" in names[0] and "train.py" not in names[0]
    assert all("x.npy" not in one and "manifest.json" not in one and "train.py" in one for one in names[1:])


# Processes of each role


def commands(plan: LaunchPlan) -> list[tuple[bool, bool]]:
    return [(node.server is not None, node.trainer is not None) for node in plan.nodes]


def test_processes_of_each_role() -> None:
    plan = plan_of(nodes_of("server", "client", "worker"), facts=facts_of(3))
    assert commands(plan) == [(True, False), (False, True), (True, True)]
    assert plan.lead == 1 and plan.master_addr == "10.0.0.2" and plan.world_size == 2
    assert [node.home for node in plan.nodes] == ["", "node0 (h0)", ""]
    for node in plan.nodes[1:]:
        assert node.trainer is not None
        argv, env = node.trainer.argv, node.trainer.env
        assert (env["GROUP_WORLD_SIZE"], env["MASTER_ADDR"]) == ("2", "10.0.0.2")
        assert env["GROUP_RANK"] == str(node.node_rank - 1) and env["NODE_RANK"] == str(node.node_rank)
        assert ("--parts" in argv) == (node.role == "worker") == ("GNNFLEET_PARTS" in node.trainer.env)


def test_leases_and_hub_of_each_role() -> None:
    plan = plan_of(nodes_of("server", "client", "client"), facts=facts_of(3, free_ports=(29402, 29501, 29600)))
    specs = [file_of(node, "node.json") for node in plan.nodes]
    assert [spec["leases"] for spec in specs] == [
        ["port:29600", f"cpu:{plan.run_id}-node0"],
        ["port:29501", "port:29402", f"cpu:{plan.run_id}-node1"],
        [f"cpu:{plan.run_id}-node2"],
    ]
    for spec in specs:
        assert [node["role"] for node in spec["nodes"]] == ["server", "client", "client"]
        assert [node.get("parts") for node in spec["nodes"]] == [[0], None, None]
        assert [node.get("control_port") for node in spec["nodes"]] == [None, 29402, None]
        assert spec["hub"] == 1 and spec["server_restarts"] == 3


@pytest.mark.parametrize(
    ("roles", "batches"),
    [
        (("worker", "worker"), [False, False]),
        (("worker", "client"), [True, False]),
        (("server", "worker", "client"), [True, False, False]),
        (("server", "worker"), [True, False]),
    ],
    ids=["workers", "a client of a worker", "a client of a server", "no client"],
)
def test_only_servers_that_clients_use_make_batches(roles: tuple[str, ...], batches: list[bool]) -> None:
    plan = plan_of(nodes_of(*roles, run=RunConfig(server_threads=3)))
    asked = [node.server is not None and "--buffer-mb" in node.server.argv for node in plan.nodes]
    assert asked == batches
    assert asked == [node.server is not None and "--batch-threads" in node.server.argv for node in plan.nodes]


def test_a_worker_serves_clients_while_it_trains() -> None:
    plan = plan_of(nodes_of("worker", "client"))
    assert commands(plan) == [(True, True), (False, True)] and plan.lead == 0
    assert plan.nodes[1].home == "node0 (h0)" and file_of(plan.nodes[0], "cluster.json")["nodes"][1]["endpoint"] is None


# Serving clusters, and runs attached to one


def test_a_serving_cluster_has_servers_only_and_no_hub() -> None:
    config = with_data(nodes_of("client", "server", "worker", "server"), num_parts=6)
    plan = plan_of(config, serve_only=True, facts=facts_of(2))
    assert [node.target for node in plan.nodes] == ["h1", "h3"] and [node.node_rank for node in plan.nodes] == [0, 1]
    assert plan.serve_only and (plan.world_size, plan.control_port, plan.master_addr) == (0, None, "")
    specs = [file_of(node, "node.json") for node in plan.nodes]
    assert [spec["trainer"] for spec in specs] == [None, None]
    assert not any({"control_port", "master_port", "ranks"} & node.keys() for node in specs[0]["nodes"])
    assert [spec["leases"] for spec in specs] == [["port:29600"], ["port:29601"]]


def test_workers_serve_if_the_file_has_no_servers() -> None:
    config = cluster(NodeConfig("a", devices=(0, 1)), NodeConfig("b", procs=2))
    plan = plan_of(config, serve_only=True)
    assert [(node.role, node.devices, node.ranks) for node in plan.nodes] == [("server", (), ())] * 2
    assert resolve_serving(resolve_serving(config)) == resolve_serving(config)


def test_one_server_is_a_serving_cluster() -> None:
    (node,) = plan_of(nodes_of("server"), serve_only=True, facts=facts_of(1)).nodes
    assert node.server is not None and any(file.dest.endswith("service.key") for file in node.files)
    assert file_of(node, "cluster.json")["nodes"][0]["endpoint"] == "tcp://10.0.0.1:29600"


def test_servers_that_run_keep_their_plan_when_another_is_started_again() -> None:
    config = with_data(nodes_of("server", "server", "server"), num_parts=3)
    before = plan_of(config, serve_only=True, facts=facts_of(3))
    facts = {1: dataclasses.replace(facts_of(3)[1], address="10.0.0.9", free_ports=(29607,))}
    plan = plan_of(config, serve_only=True, before=before, facts=facts)
    described = file_of(plan.nodes[1], "cluster.json")
    assert described["version"] == plan.version == 2
    endpoints = [node["endpoint"] for node in described["nodes"]]
    assert endpoints == ["tcp://10.0.0.1:29600", "tcp://10.0.0.9:29607", "tcp://10.0.0.3:29602"]
    assert [plan.nodes[k] is before.nodes[k] for k in range(3)] == [True, False, True]


def test_a_run_of_servers_only_is_refused() -> None:
    with pytest.raises(UsageError, match="all are servers, so nothing would train. Use `gnnfleet serve --config FILE`"):
        plan_of(nodes_of("server", "server"))


def test_an_attached_run_partitions_nothing_and_sends_no_parts() -> None:
    config = nodes_of("server", "worker", "client", data=DataConfig(serving="products"))
    plan = plan_of(config, serving=PRODUCTS, facts=facts_of(2))
    assert plan.partition is None and plan.final and plan.num_parts == 4 and plan.serving == "products"
    assert [(node.role, node.target, node.home) for node in plan.nodes] == [
        ("client", "h1", "node0 (g1) of products"),
        ("client", "h2", "node1 (g2) of products"),
    ]
    described = file_of(plan.nodes[0], "cluster.json")["serving"]
    assert described["name"] == "products" and described["servers"][1]["endpoint"] == "tcp://10.1.0.2:29601"
    resolved = resolve_run(config)
    assert resolved.left_out == plan.notes[0] == "h0 left out: the graph is served by `products`"
    assert resolve_run(resolved) == dataclasses.replace(resolved, left_out="")


def test_one_client_alone_can_attach(tmp_path: Path) -> None:
    config = nodes_of("worker", data=DataConfig(serving="products"))
    plan = plan_of(config, serving=dataclasses.replace(PRODUCTS, encrypted=False), facts=facts_of(1))
    (node,) = plan.nodes
    assert plan.control_port is None and not any(file.dest.endswith("service.key") for file in node.files)
    offline = plan_of(config)
    assert not offline.final and offline.num_parts == 0
    assert "the servers of `products`, and their keys, are looked up at launch" in offline.notes


# Records of a plan


@pytest.mark.parametrize("serve_only", [False, True])
def test_records_of_a_plan_with_roles(serve_only: bool) -> None:
    plan = plan_of(nodes_of("server", "client"), facts=facts_of(2), serve_only=serve_only)
    kept = read_run(run_json(plan))
    assert [(node.role, node.trainer is None, node.ranks) for node in kept.nodes] == [
        (node.role, node.trainer is None, node.ranks) for node in plan.nodes
    ]
    assert kept.serve_only == serve_only and TOKEN.reveal() not in run_json(plan) + to_json(plan)
    board = Board.of(kept)
    assert len(board.ranks) == plan.world_size and board.fraction() is None


def test_a_run_json_without_roles_is_read() -> None:
    values = json.loads(run_json(plan_of(cluster())))
    for name in ("lead", "serving", "version"):
        del values["plan"][name]
    for node in values["plan"]["nodes"]:
        for name in ("role", "copies", "home"):
            del node[name]
    assert [node.role for node in read_run(json.dumps(values)).nodes] == ["worker", "worker"]


# The printed plan


def shown(plan: LaunchPlan) -> str:
    console = Console(file=io.StringIO(), width=80)
    print_plan(plan, console)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


CASES: Mapping[str, Mapping[str, Any]] = {
    "server_client": {"facts": facts_of(5), "parts": 6},
    "serving": {"facts": facts_of(2), "parts": 4, "serve_only": True},
    "attached": {"facts": facts_of(2), "serving": PRODUCTS},
}


def test_dry_run_shows_the_parts_of_each_server(tmp_path: Path) -> None:
    # The printed plan equals the golden file, except for the sizes of files, which change with the code of gnnfleet.
    from launcher.config.loader import load_config

    blocks = []
    for name, case in CASES.items():
        more = dict(case)
        parts = more.pop("parts", 0)
        manifest = parts_folder(tmp_path / name, parts) if parts else None
        text = shown(plan_of(load_config(GOLDEN / f"{name}.yml"), manifest=manifest, **more))
        head, *lines = text.split("\n\n")[0].splitlines()
        table = [line.rpartition("  ")[0].rstrip() for line in lines if re.match(r"  node\d*  ", line)]
        notes = [line for line in lines if line.startswith("  note")]
        blocks.append("\n".join([head, *notes, *table]))
    check_text(GOLDEN / "who_serves_what.txt", "\n\n".join(blocks) + "\n")


@settings(max_examples=30, deadline=None)
@given(roles=ROLES, replicas=st.integers(1, 3))
@pytest.mark.slow
def test_a_folded_plan_equals_the_unfolded_one_for_all_roles(roles: list[str], replicas: int) -> None:
    config = with_data(nodes_of(*chain(roles, ["worker", "client"], roles, roles)), replicas=replicas)
    config = with_data(config, replicas=min(replicas, len(config.holders)))
    plan = plan_of(config, facts=facts_of(len(config.nodes)))
    rows = {node.node_rank: list(_node_rows(plan, node, sizes=False)) for node in plan.nodes}
    for nodes, same in fold_nodes([(node, rows[node.node_rank]) for node in plan.nodes]):
        for node in nodes:
            values = own_values(node).items()
            assert [(name, _filled(text, values)) for name, text in same] == rows[node.node_rank]


def _filled(text: str, values: Any) -> str:
    for name, value in values:
        text = text.replace(name, value)
    return text


def test_dry_run_of_servers_only_describes_the_serving_cluster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "c.yml"
    config.write_text("nodes: [{host: a, role: server}]\ndata: {dataset: synthetic}\n")
    assert main.run(["--dry-run", "-c", str(config)]) == 2
    assert "all are servers" in capsys.readouterr().err


# Memory


def test_memory_estimate_depends_on_the_role() -> None:
    config = nodes_of("server", "client", "worker")
    server, client, worker = (base_memory(config, k, own_command=False) for k in range(3))
    assert worker - client == base_memory(config, 2, own_command=True) - base_memory(config, 1, own_command=True) > 0
    assert server < client < worker
    few = dataclasses.replace(config, run=RunConfig(server_buffer=100, server_threads=2))
    assert batch_memory(config, 0, None, 8) == 512 * 10**6 and batch_memory(few, 0, None, 8) == 100 * 10**6
    assert batch_memory(config, 1, None, 8) == 0 == batch_memory(config, 2, None, 8)
    graph = GraphSize(nodes=1000, row_bytes=100)  # fewer nodes than a batch would sample
    assert batch_memory(few, 0, graph, 8) == 100 * 10**6 + 2 * 100_000
    assert batch_memory(few, 1, graph, 8) == 3 * 100_000
