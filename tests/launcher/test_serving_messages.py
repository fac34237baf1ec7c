"""Golden tests of messages about serving clusters: refused commands, and the output of ``gnnfleet serve status``."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from golden_kit import check_messages
from launcher.cli.main import run
from launcher.config.resolve import ResolvedConfig, resolve_serving
from launcher.config.schema import ClusterConfig, DataConfig, NodeConfig, RunConfig
from launcher.errors import FleetError, UsageError
from launcher.plan.build import make_plan
from launcher.plan.model import LaunchPlan
from launcher.report.verdict import NodeView
from launcher.serving.cluster_state import ServerState, newest_description, read_description, read_files
from launcher.serving.serve import differences
from launcher.serving.serve_status import ServeStatus
from launcher.transport import open_transport
from operate_kit import LocalRun

NOW = 1_795_000_000.0
STATS = {
    "time": NOW - 1, "endpoint": "tcp://g1:29600", "node_rank": 0, "parts": [0], "uptime_s": 600.0, "busy": 0.42,
    "requests": 9, "errors": 0, "malformed": 3, "refused": 4, "bytes_in": 9, "bytes_out": 9, "bytes_in_s": 1e3,
    "bytes_out_s": 2.5e7, "batches": 1234, "batches_s": 56.78, "queue": 7, "buffer_bytes": 10_000_000,
    "buffer_limit": 512_000_000, "memory": 1_500_000_000, "peers": [],
    "clients": [{
        "name": "train-1 rank0", "queue": 3, "buffer_bytes": 5_000_000, "batches": 600, "bytes": 700_000_000,
        "seconds_since": 0.4,
    }],
}  # fmt: skip


def config(*hosts: str, **data: Any) -> ResolvedConfig:
    nodes = tuple(NodeConfig(host, role="server") for host in hosts)
    return resolve_serving(ClusterConfig(nodes, DataConfig("synthetic", **data)))


def planned(wanted: ResolvedConfig) -> LaunchPlan:
    return make_plan(wanted, run_id="products", code_digest="abc")


def server_state(plan: LaunchPlan, k: int, stats: dict[str, Any] | None = None, **view: Any) -> ServerState:
    """Return the state of graph server k, a healthy one by default. ``view``: fields of ``NodeView`` to replace."""
    state = {"state": "serving", "time": NOW, "pid": 1}
    files = {"cluster.json": plan.nodes[0].file("cluster.json").content, "server_stats.json": json.dumps(stats or {})}
    return ServerState(NodeView(plan.nodes[k], **{"state": state, "now": NOW, **view}), files)


def status(*hosts: str, nodes: dict[int, dict[str, Any]], **data: Any) -> ServeStatus:
    plan = planned(config(*hosts, **data))
    answers = tuple(server_state(plan, k, **nodes.get(k, {"stats": STATS})) for k in range(len(hosts)))
    return ServeStatus(read_description(plan.nodes[0].file("cluster.json").content, "here"), answers)


def shown(shown_status: ServeStatus) -> str:
    console = Console(file=io.StringIO(), width=150, highlight=False)
    console.print(shown_status.rendered(), soft_wrap=True)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())  # type: ignore[attr-defined]


def statuses() -> dict[str, ServeStatus]:
    asked = {"state": "done", "reason": "stop requested by ann@laptop (gnnfleet stop)", "outcomes": []}
    died = {"state": "failed", "reason": "server ended while it was needed; it got SIGKILL", "outcomes": []}
    unreachable_node = {"unreachable": "no route to host", "state": None}
    starting = {"state": "starting", "time": NOW}
    old = {**STATS, "time": NOW - 60}
    return {
        "all is well": status("g1", "g2", nodes={1: {"stats": {**STATS, "clients": []}}}),
        "one has died": status("g1", "g2", nodes={1: {"result": died}}),
        "one has died, another has its parts": status("g1", "g2", nodes={1: {"result": died}}, replicas=2),
        "one is out of reach, one starts": status("g1", "g2", nodes={0: unreachable_node, 1: {"state": starting}}),
        "stopped": status("g1", "g2", nodes={0: {"result": asked}, 1: {"result": asked}}),
        "what a server says of itself is old": status("g1", nodes={0: {"stats": old}}),
    }


def test_messages_of_serve_status() -> None:
    check_messages("serve_status", [(how, shown(shown_status)) for how, shown_status in statuses().items()])


def test_exit_statuses_and_json_of_status() -> None:
    made = statuses()
    assert [shown_status.exit_status for shown_status in made.values()] == [0, 1, 1, 1, 1, 0]
    gone = status("g1", nodes={0: {"unreachable": "no route to host", "state": None}})
    assert gone.exit_status == 3
    shown_status = made["all is well"].to_json()
    assert shown_status["nodes"][0]["stats"] == STATS
    assert (shown_status["name"], shown_status["num_parts"], shown_status["version"]) == ("products", 2, 1)


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_cli(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    exit_status = run(list(words))
    return exit_status, capsys.readouterr().err


def test_messages_of_the_command_line(empty_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "transport: local\nnodes: [{host: localhost, role: %s}]\ndata: {%s}\n"
    for name, role, data in (
        ("servers", "server", "dataset: synthetic"),
        ("clients", "client", "serving: products"),
        ("worker", "worker", "serving: products"),
    ):
        (empty_folder / f"{name}.yml").write_text(text % (role, data))
    LocalRun(empty_folder, "trained").launched("end")
    commands = [
        "serve",
        "serve --config clients.yml",
        "serve --config servers.yml --name no/name",
        "serve --config servers.yml --name trained",
        "serve status products",
        "serve status trained",
        "serve stop trained",
        "serve key trained -o k.key",
        "--config worker.yml --run-id r2",
        "--config worker.yml --serving trained --run-id r3",
        "--config servers.yml",
    ]
    blocks = []
    for command in commands:
        exit_status, said = run_cli(capsys, *command.split())
        blocks.append((f"gnnfleet {command}", f"exit status {exit_status}\n{said}".replace(str(empty_folder), "TMP")))
    check_messages("serve", blocks)


def test_servers_serve_or_workers_if_there_are_none() -> None:
    mixed = ClusterConfig(
        (*config("g1", "g2").nodes, NodeConfig("w1", devices=(0,)), NodeConfig("c1", role="client")),
        DataConfig("synthetic"),
    )
    assert [node.host for node in resolve_serving(mixed).nodes] == ["g1", "g2"]
    (only,) = resolve_serving(replace(mixed, nodes=mixed.nodes[2:])).nodes
    assert (only.host, only.role, only.devices) == ("w1", "server", ())


def test_nodes_that_cannot_serve_are_refused_with_the_reason() -> None:
    with pytest.raises(
        UsageError, match="all are clients, so no node can serve; give the hosts of the graph `role: server`"
    ):
        resolve_serving(ClusterConfig((NodeConfig("c1", role="client"),), DataConfig("synthetic")))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (config("g1", "g2", "g3"), "nodes: g3 added"),
        (config("g1"), "nodes: g2 removed"),
        (config("g1", "g4"), "nodes: g4 added, g2 removed"),
        (config("g2", "g1"), "nodes: other order"),
        (config("g1", "g1"), "nodes: g1 added, g2 removed"),
        (config("g1", "g2", num_parts=4), "data.num_parts: 4 instead of 2"),
        (config("g1", "g2", replicas=2), "data.replicas: 2 instead of 1"),
        (config("g1", "g2", options={"num_nodes": 5}), "data: another dataset, or other options or partitioning"),
        (replace(config("g1", "g2"), run=RunConfig(encrypt="off")), "run.encrypt: off, and it is encrypted"),
    ],
)
def test_what_differs_between_a_cluster_and_a_config(asked: ResolvedConfig, said: str) -> None:
    plan = planned(config("g1", "g2"))
    assert differences(plan, config("g1", "g2")) == []
    assert differences(plan, asked) == [said]


def test_the_newest_description_of_the_cluster_is_used() -> None:
    plan = planned(config("g1", "g2"))
    nodes = {k: server_state(plan, k) for k in range(2)}
    newer = json.loads(plan.nodes[0].file("cluster.json").content) | {"version": 7}
    nodes[1] = replace(nodes[1], files={"cluster.json": json.dumps(newer)})
    assert newest_description(nodes, "products").version == 7
    nodes[1] = replace(nodes[1], files={"cluster.json": "{"})
    with pytest.raises(FleetError, match=r"node1 \(g2\): cluster.json is damaged"):
        newest_description(nodes, "products")
    unreachable_node = {0: ServerState(NodeView(plan.nodes[0], unreachable="no route to host"), {})}
    with pytest.raises(FleetError, match="none of its nodes can be reached:\n  node0 .g1.: no route to host"):
        newest_description(unreachable_node, "products")


def test_contents_of_files_are_read_unchanged(tmp_path: Path) -> None:
    (tmp_path / "a dir").mkdir()
    (tmp_path / "a dir" / "x.key").write_text("line 1\nline 2")
    (tmp_path / "a dir" / "empty.key").write_text("")
    line = open_transport(replace(config("localhost"), transport="local"), 0)
    try:
        found = read_files(line, [f"{tmp_path}/a dir/*.key", f"{tmp_path}/missing"])
    finally:
        line.close()
    assert found == {f"{tmp_path}/a dir/x.key": "line 1\nline 2", f"{tmp_path}/a dir/empty.key": ""}
