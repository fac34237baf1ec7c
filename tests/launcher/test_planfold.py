"""Tests of the printed plan: nodes with equal values share an entry."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import pytest
from rich.console import Console

from launcher.cli import main
from launcher.command import render
from launcher.config.schema import ClusterConfig, NodeConfig
from launcher.hostlist import expand
from launcher.plan.model import LaunchPlan, NodePlan
from launcher.plan.render import _node_rows, fold_nodes, own_values, print_plan
from plan_kit import cluster, facts_of, plan_of

GPUS = tuple(NodeConfig(f"gpu{k:02}.lab", user="alice", devices=(0, 1, 2)) for k in range(1, 13))
CPUS = tuple(NodeConfig(host) for host in expand("cpu[1-5]"))


def shown(plan: LaunchPlan, *, every: bool = False) -> str:
    console = Console(file=io.StringIO(), width=80)
    print_plan(plan, console, every=every)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def filled_in(node: NodePlan, text: str) -> str:
    for name, value in own_values(node).items():
        text = text.replace(name, value)
    return text


@pytest.mark.parametrize(
    "config",
    [
        cluster(*GPUS, *CPUS),
        cluster(*CPUS[:3], *GPUS, *CPUS[3:]),
        cluster(*GPUS[:4], dataclasses.replace(GPUS[4], env={"A": "1"}), *GPUS[5:]),
        cluster(*(NodeConfig("one", devices=(k,)) for k in range(8))),
        cluster(*(NodeConfig(f"10.0.0.{k}", procs=1 + k % 2, env={"SEED": str(k * k)}) for k in range(9))),
    ],
    ids=["two kinds", "between", "one odd", "one host", "env of each"],
)
@pytest.mark.parametrize("known", [False, True], ids=["offline", "after preflight"])
def test_a_folded_block_is_exact_for_each_of_its_nodes(config: ClusterConfig, known: bool) -> None:
    plan = plan_of(config, facts=facts_of(len(config.nodes)) if known else None)
    rows = {node.node_rank: list(_node_rows(plan, node, sizes=False)) for node in plan.nodes}
    folds = fold_nodes([(node, rows[node.node_rank]) for node in plan.nodes])
    assert sorted(node.node_rank for nodes, _ in folds for node in nodes) == list(rows)
    for nodes, same in folds:
        for node in nodes:
            assert [(name, filled_in(node, text)) for name, text in same] == rows[node.node_rank]


def test_two_kinds_of_nodes_are_two_blocks_and_a_table() -> None:
    text = shown(plan_of(cluster(*GPUS, *CPUS)))
    assert "node[0-11]  alice@gpu[01-12].lab  tmux session gnnfleet-r1-node{node_rank}\n" in text
    assert "node[12-16]  cpu[1-5]  tmux session gnnfleet-r1-node{node_rank}\n" in text
    assert "batches of 1024 seeds over 41 processes" in text and "--node-rank" not in text
    assert "rank{first_rank}.log rank{first_rank+1}.log rank{last_rank}.log" in text
    table = [line.split() for line in text.splitlines() if line.startswith("  node1")]
    assert ["node11", "alice@gpu12.lab", "33-35", "0,1,2", "11", "gpu12.lab:29611"] in [words[:6] for words in table]
    assert len(text.splitlines()) < 60 < len(shown(plan_of(cluster(*GPUS, *CPUS)), every=True).splitlines())


def test_a_node_that_differs_is_a_block_of_its_own() -> None:
    odd = dataclasses.replace(GPUS[4], env={"A": "1"})
    text = shown(plan_of(cluster(*GPUS[:4], odd, *GPUS[5:], *CPUS[:3])))
    assert "node[0-3], node[5-11]  alice@gpu[01-04].lab, alice@gpu[06-12].lab  tmux" in text
    assert "node4  alice@gpu05.lab  tmux session gnnfleet-r1-node4\n" in text
    assert "A=1" in text and "node[12-14]  cpu[1-3]  tmux session" in text


def test_the_short_plan_has_the_main_values() -> None:
    text = shown(plan_of(cluster(*CPUS[:3])))
    assert "synthetic is partitioned into 3 parts (auto) in " in text and "partition make" not in text
    assert max(map(len, text.splitlines())) < 300 and len(text.splitlines()) < 25
    own = shown(plan_of(cluster(*CPUS[:3]), own_command=("echo", "a b")))
    assert "  training    echo 'a b'\n" in own


def test_verbose_lists_every_command_of_every_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_of(cluster(*GPUS))
    text = shown(plan, every=True)
    for node in plan.nodes:
        assert node.server is not None
        for command in (node.start, node.server, node.trainer):
            assert render(dataclasses.replace(command, env={}, setup=(), cwd="")).rpartition("exec ")[2] in text
    config = tmp_path / "c.yml"
    config.write_text("nodes: 'n[1-9]'\ndata: {dataset: synthetic}\n")
    for words in (["plan"], ["launch", "--dry-run"], ["--dry-run"]):
        assert main.run([*words, "-c", str(config)]) == 0
        assert "--node-rank 7" not in capsys.readouterr().out
        assert main.run([*words, "-c", str(config), "-v"]) == 0
        assert "--node-rank 7" in capsys.readouterr().out


def test_hosts_with_several_nodes_are_noted() -> None:
    nodes = (*CPUS, NodeConfig("cpu2"), NodeConfig("cpu5", port=2222), NodeConfig("cpu2"))
    assert "host cpu2 runs 3 nodes: node1, node5, node7" in plan_of(cluster(*nodes)).notes
    assert not any("carries" in note for note in plan_of(cluster(*nodes[:5], nodes[6])).notes)
