"""Tests of --include and --exclude: the hosts and devices that remain, and the errors for names that match nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.cli import main
from launcher.command import Command
from launcher.config.host_filter import filtered
from launcher.config.schema import ClusterConfig, DataConfig, NodeConfig, RunConfig
from launcher.errors import UsageError
from plan_kit import cluster, plan_of

LAB = cluster(
    NodeConfig("node01.lab", user="alice", port=2222),
    NodeConfig("node02.lab"),
    NodeConfig("node03.lab", procs=2),
    NodeConfig("node04.lab", devices=(3, 0, 2)),
    NodeConfig("gpu1", devices=(0, 1), procs=2),
    NodeConfig("gpu1", devices=(2, 3)),
    NodeConfig("10.0.0.7"),
    NodeConfig("10.0.0.70", devices=(0,)),
    NodeConfig("fe80::1"),
)
NAMES = cluster(NodeConfig("a.lab", user="alice@corp"), NodeConfig("b.lab", user=r"CORP\bob", devices=(0, 1)))
NAMELESS = cluster(NodeConfig("gnn1.x"), NodeConfig("gnn2.x"), NodeConfig("gnn3.x"), NodeConfig("gnn3.x"))


def remaining(config: ClusterConfig, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> str:
    """Return ``host:devices/procs`` of each remaining node, joined by blanks."""
    words = []
    for node in filtered(config, include, exclude).nodes:
        devices = ",".join(map(str, node.devices))
        words.append(node.host + (f":{devices}" if devices else "") + (f"/{node.procs}" if node.procs else ""))
    return " ".join(words)


@pytest.mark.parametrize(
    ("include", "hosts"),
    [
        (["node03.lab"], "node03.lab/2"),
        (["node03"], "node03.lab/2"),
        (["NODE03"], "node03.lab/2"),
        (["node[02-03]"], "node02.lab node03.lab/2"),
        (["node03", "node02"], "node02.lab node03.lab/2"),
        (["node03,node02"], "node02.lab node03.lab/2"),
        (["alice@node01.lab:2222"], "node01.lab"),
        (["alice@node01"], "node01.lab"),
        (["node01:2222"], "node01.lab"),
        (["n*"], "node01.lab node02.lab node03.lab/2 node04.lab:3,0,2"),
        (["*.lab"], "node01.lab node02.lab node03.lab/2 node04.lab:3,0,2"),
        (["gpu?"], "gpu1:0,1/2 gpu1:2,3"),
        (["10.0.0.7"], "10.0.0.7"),
        (["10.0.0.[7,70]"], "10.0.0.7 10.0.0.70:0"),
        (["fe80::1"], "fe80::1"),
        (["[fe80::1]"], "fe80::1"),
        (["[fe80::1]:22", "fe80::1"], "ERROR"),
        (["node04:0,2"], "node04.lab:0,2"),
        (["node04:2-3"], "node04.lab:3,2"),
        (["node04:0", "node04:3"], "node04.lab:3,0"),
        (["node04:0", "node04"], "node04.lab:3,0,2"),
        (["node04:0,2,node02"], "node02.lab node04.lab:0,2"),
        (["node04:0,2@node02@gpu1:1"], "node02.lab node04.lab:0,2 gpu1:1/1"),
        (["gpu1:1,2"], "gpu1:1/1 gpu1:2"),
        (["gpu1:3"], "gpu1:3"),
        (["alice@node01@node02"], "ERROR"),
    ],
)
def test_included(include: list[str], hosts: str) -> None:
    if hosts == "ERROR":
        with pytest.raises(UsageError):
            remaining(LAB, include)
    else:
        assert remaining(LAB, include) == hosts


def test_hosts_are_named_by_user_names_of_directories() -> None:
    assert remaining(NAMES, ["alice@corp@a.lab"]) == "a.lab"
    assert remaining(NAMES, ["alice@corp@a", r"CORP\bob@b:1"]) == "a.lab b.lab:1"


@pytest.mark.parametrize(
    ("exclude", "hosts"),
    [
        (["node*", "10.*"], "gpu1:0,1/2 gpu1:2,3 fe80::1"),
        (["node[01-03]", "gpu1", "10.0.0.[7,70]", "fe80::1"], "node04.lab:3,0,2"),
        (["node[01-03]", "gpu1:0,2", "10.0.0.[7,70]", "fe80::1", "node04:3"], "node04.lab:0,2 gpu1:1/1 gpu1:3"),
        (["node*", "gpu1:0-3", "10.0.0.70:0"], "10.0.0.7 fe80::1"),
    ],
)
def test_excluded(exclude: list[str], hosts: str) -> None:
    assert remaining(LAB, exclude=exclude) == hosts


def test_exclude_applies_after_include() -> None:
    assert remaining(LAB, ["node0*", "gpu1:0"], ["node[02-03]", "node04:0"]) == "node01.lab node04.lab:3,2 gpu1:0/1"


def test_node_labels_are_accepted_unless_hosts_have_similar_names() -> None:
    assert remaining(NAMELESS, ["node[0-1]"]) == "gnn1.x gnn2.x"
    assert remaining(NAMELESS, exclude=["node3"]) == "gnn1.x gnn2.x gnn3.x"
    with pytest.raises(UsageError, match="no host is called `node0`"):  # nor is node01.lab chosen, whose label is node0
        remaining(LAB, ["node0"])


def test_no_filter_changes_nothing() -> None:
    assert filtered(LAB, (), ()) is LAB


def test_parts_master_and_ranks_follow_the_remaining_nodes() -> None:
    config = filtered(LAB, ["node0[2-4]"], ["node04:0"])
    assert (config.num_parts, config.world_size) == (3, 1 + 2 + 2)
    plan = plan_of(config)
    assert plan.master_addr == "node02.lab"
    assert [(node.node_rank, node.target, node.ranks, node.devices) for node in plan.nodes] == [
        (0, "node02.lab", (0,), ()),
        (1, "node03.lab", (1, 2), ()),
        (2, "node04.lab", (3, 4), (3, 2)),
    ]
    assert plan.nodes[2].trainer.env["CUDA_VISIBLE_DEVICES"] == "3,2"
    fixed = cluster(*LAB.nodes, data=DataConfig("synthetic", num_parts=12))
    assert filtered(fixed, ["gpu1"], ()).num_parts == 12
    # The parts of all nodes are not replaced.
    assert (config.data.folder, filtered(fixed, ["gpu1"], ()).data.folder) == (f"{LAB.data.folder}-3", "parts")


MISTAKES = {
    # include, exclude -> message
    (("node05",), ()): "--include node05: no host is called `node05`; the hosts are node[01-04].lab, gpu1, 10.0.0.7, "
    "10.0.0.70, fe80::1 (node0 to node8)",
    ((), ("node[03-06]",)): "--exclude node[03-06]: no host is called `node05`; the hosts are node[01-04].lab, gpu1, "
    "10.0.0.7, 10.0.0.70, fe80::1 (node0 to node8)",
    (
        ("node04:0,1,7",),
        (),
    ): "--include node04:0,1,7: node04.lab has no device 1, 7 in the config; its devices are 0, 2, 3",
    ((), ("node02:0",)): "--exclude node02:0: node02.lab has no `devices` in the config; it trains on its CPU",
    (("gpu1",), ("gpu1:0-3",)): "--include gpu1 --exclude gpu1:0-3: no host is left of node[01-04].lab, gpu1, "
    "10.0.0.7, 10.0.0.70, fe80::1 (node0 to node8)",
    (("node[3-1]",), ()): "--include node[3-1]: `node[3-1]`: 3-1 runs backwards; write 1-3",
    (
        ("",),
        (),
    ): "--include : no host is called ``; the hosts are node[01-04].lab, gpu1, 10.0.0.7, 10.0.0.70, fe80::1 "
    "(node0 to node8)",
}


@pytest.mark.parametrize("asked", MISTAKES, ids=str)
def test_names_that_match_nothing_are_errors(asked: tuple[tuple[str, ...], tuple[str, ...]]) -> None:
    with pytest.raises(UsageError) as caught:
        filtered(LAB, *asked)
    assert str(caught.value) == MISTAKES[asked]


def test_a_long_list_of_hosts_is_cut() -> None:
    many = cluster(*(NodeConfig(f"host{3 * k}.example.org") for k in range(300)))
    with pytest.raises(UsageError) as caught:
        filtered(many, ["x"], ())
    assert len(str(caught.value)) < 300 and str(caught.value).endswith(" …")


def test_an_excluded_master_is_an_error() -> None:
    config = cluster(NodeConfig("a", address="10.0.0.1"), NodeConfig("b"), run=RunConfig(master_addr="10.0.0.1"))
    assert filtered(config, ["a"], ()).run.master_addr == "10.0.0.1"
    with pytest.raises(UsageError) as caught:
        filtered(config, ["b"], ())
    assert (
        str(caught.value)
        == "run.master_addr is 10.0.0.1, but a is excluded; give --master-addr auto, as the lead node is now b (node0)"
    )


@given(st.text(alphabet="node01gpu*?[]-,:@. ", max_size=16))
def test_any_text_chooses_nodes_or_is_refused(spec: str) -> None:
    try:
        kept = filtered(LAB, [spec], ()).nodes
    except UsageError as error:
        assert str(error).startswith(f"--include {spec}: ")
        return
    hosts = [node.host for node in LAB.nodes]
    assert kept and all(set(node.devices) <= set(LAB.nodes[hosts.index(node.host)].devices) | {2, 3} for node in kept)


# On the command line


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "cluster.yml"
    path.write_text(
        "nodes:\n  - n[1-4].lab\n  - {host: 'g[1-4].lab', devices: [0, 1]}\n"
        "data: {dataset: synthetic, num_parts: 5}\ntrain: {batch_size: 6}\n"
    )
    return path


def targets(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert main.run([*words, "--json"]) == 0
    return [node["login"]["host"] for node in json.loads(capsys.readouterr().out)["nodes"]]


def test_every_command_accepts_filters(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["plan"], ["launch", "--dry-run"], ["--dry-run"]):
        asked = ["--config", str(config), "--include", "n*", "--exclude", "n2", "--exclude", "n3"]
        assert targets(capsys, *command, *asked) == ["n1.lab", "n4.lab"]
    assert targets(capsys, "-c", str(config), "--exclude", "g*", "plan", "--exclude", "n1") == [
        *("n2.lab", "n3.lab", "n4.lab")
    ]


def test_totals_over_nodes_are_checked_after_filtering(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # num_parts and batch_size in the cluster.yml are too small for all eight nodes, but not for the five nodes that
    # `--include` chooses.
    assert main.run(["plan", "-c", str(config)]) == 2
    output = capsys.readouterr().err
    assert "cluster.yml:4: fewer parts than nodes: data.num_parts is 5" in output and "global batch is 6" in output
    assert targets(capsys, "plan", "-c", str(config), "--include", "n[1-4],g1") == [
        *("n1.lab", "n2.lab", "n3.lab", "n4.lab", "g1.lab")
    ]
    assert main.run(["plan", "-c", str(config), "--include", "g*"]) == 2
    assert "global batch is 6, fewer seeds than processes (8)" in capsys.readouterr().err
    assert main.run(["plan", "-c", str(config), "--include", "x"]) == 2
    assert "error: --include x: no host is called `x`; the hosts are n[1-4].lab, g[1-4].lab" in capsys.readouterr().err


def test_mistakes_of_the_file_are_reported_before_those_of_filters(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["plan", "-c", str(config), "--include", "x", "--set", "nodes.1.procs=0"]) == 2
    output = capsys.readouterr().err
    assert "nodes.1.procs: must be at least 1" in output and "--include" not in output


def test_partition_uses_the_filtered_nodes(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def run_trainer(command: Command) -> int:
        seen.extend(command.argv)
        return 0

    monkeypatch.setattr("launcher.plan.partition.run_trainer", run_trainer)
    asked = ["--set", "data.num_parts=null", "--set", "train.batch_size=64", "--include", "n*", "--exclude", "n4"]
    assert main.run(["partition", "make", "-c", str(config), *asked]) == 0
    assert seen[seen.index("--num-parts") + 1] == "3"
