"""Tests of training on two nodes, with a graph server and a rank on each."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ports import free_port
from service_kit import free_endpoint, new_keys, serve_process, wait_for, write_cluster, write_key_file
from train_kit import command_line, curve, finish_all, infer_words, job, metrics, start_words, write_parts
from trainer.core.ranks import Ranks
from trainer.core.remote_settings import RemoteAccess
from trainer.infer.infer import infer
from trainer.train.job import train
from trainer.train.settings import InferJob, TrainJob
from waiting import DEADLINE, stretched

RUNS: dict[str, dict[str, Any]] = {
    "sage": {},
    "gcn": {"model": "gcn"},
    "gat": {"model": "gat"},
    "with replacement": {"replace": True},
    "larger fanouts later": {"fanouts": (3, 6), "eval_fanouts": (-1, -1)},
}


@dataclass(frozen=True)
class Node:
    rank: int
    parts: Path
    server: subprocess.Popen[str]
    cluster: Path
    key_file: Path

    def job(self, run_dir: Path, **settings: Any) -> TrainJob:
        plain = job(self.parts, run_dir, **settings)
        return replace(plain, part_ids=(self.rank,), cluster=self.cluster, key_file=self.key_file)

    def infer_job(self, checkpoint: Path, out: Path) -> InferJob:
        # only node 0 has the checkpoint
        seen = checkpoint if self.rank == 0 else Path("/nowhere.pt")
        return InferJob(seen, self.parts, out / f"node{self.rank}", (self.rank,), self.cluster, self.key_file)


@contextmanager
def two_nodes(folder: Path, **options: Any) -> Iterator[list[Node]]:
    """Start the encrypted graph servers of two nodes.

    options: options of the dataset.
    """
    whole = write_parts(folder / "whole", 2, **options)
    endpoints = [free_endpoint(), free_endpoint()]
    cluster = write_cluster(folder / "cluster.json", (0, endpoints[0], [0]), (1, endpoints[1], [1]))
    key_file = folder / "service.key"
    write_key_file(key_file, new_keys())
    with ExitStack() as stack:
        nodes = []
        for rank in (0, 1):
            parts = folder / f"node{rank}"
            shutil.copytree(whole, parts, ignore=shutil.ignore_patterns(f"part{1 - rank}"))
            started = serve_process(folder, parts, [rank], endpoints[rank], cluster, key_file)
            nodes.append((rank, parts, *stack.enter_context(started)))
        for _, _, server, ready in nodes:
            wait_for(ready, server)
        yield [Node(rank, parts, server, cluster, key_file) for rank, parts, server, _ in nodes]


def start(nodes: list[Node], lines: Callable[[Node], list[list[str]]]) -> list[subprocess.Popen[str]]:
    """Start one process on each node, which runs the command lines ``lines(node)`` in turn."""
    port = free_port(len(lines(nodes[0])))
    where = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return [start_words(lines(node), node.rank, 2, port, NODE_RANK=str(node.rank), **where) for node in nodes]


@pytest.fixture(scope="module")
def on_two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train and infer on two nodes. Return a folder with one run folder per entry of ``RUNS``."""
    folder = tmp_path_factory.mktemp("two-nodes")

    def lines(node: Node) -> list[list[str]]:
        runs = [command_line(node.job(folder / name, **settings)) for name, settings in RUNS.items()]
        return [*runs, infer_words(node.infer_job(folder / "gat" / "checkpoints" / "last.pt", folder / "inferred"))]

    with two_nodes(folder / "nodes") as nodes:
        for ended in finish_all(start(nodes, lines)):
            assert ended.returncode == 0, ended.output
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_two_nodes_train_as_one_process_does(name: str, on_two_nodes: Path, tmp_path: Path) -> None:
    train(job(write_parts(tmp_path / "parts", 1), tmp_path / "run", **RUNS[name]), Ranks())
    assert len(curve(on_two_nodes / name)) == 3
    np.testing.assert_allclose(curve(on_two_nodes / name), curve(tmp_path / "run"), rtol=1e-4)
    ours, theirs = (metrics(folder, "result")[0] for folder in (on_two_nodes / name, tmp_path / "run"))
    assert ours["test_accuracy"] == pytest.approx(theirs["test_accuracy"], abs=1 / 120)
    for rank in (0, 1):
        epoch = metrics(on_two_nodes / name, "epoch", rank)[0]
        assert epoch["remote_bytes"] > 0 and 0 < epoch["remote_share"] < 1
        assert 0 < epoch["own_s"] <= epoch["step_s"] and 0 <= epoch["batch_s"] <= epoch["own_s"]


@pytest.mark.slow
def test_two_nodes_infer_as_one_process_does(on_two_nodes: Path, tmp_path: Path) -> None:
    parts, checkpoint = write_parts(tmp_path / "parts", 2), on_two_nodes / "gat" / "checkpoints" / "last.pt"
    alone = infer(InferJob(checkpoint, parts, tmp_path / "out"), Ranks())
    for part in (0, 1):
        ours, theirs = on_two_nodes / "inferred" / f"node{part}" / f"part{part}", tmp_path / "out" / f"part{part}"
        assert np.array_equal(np.load(ours / "orig_id.npy"), np.load(theirs / "orig_id.npy"))
        np.testing.assert_allclose(np.load(ours / "logits.npy"), np.load(theirs / "logits.npy"), atol=1e-5, rtol=1e-5)
    record = json.loads((on_two_nodes / "inferred" / "node0" / "infer.json").read_text())
    assert record["metrics"]["test"] == pytest.approx(dict(alone.metrics["test"]))


@pytest.mark.slow
def test_a_graph_server_killed_in_mid_epoch_and_not_started_again_ends_every_rank(tmp_path: Path) -> None:
    endless = {"epochs": 100_000, "eval_every": 0, "checkpoint_every": 0}
    with two_nodes(tmp_path / "nodes") as nodes:
        remote = RemoteAccess(server_wait=3.0)
        processes = start(
            nodes, lambda node: [command_line(replace(node.job(tmp_path, **endless), remote_access=remote))]
        )
        until = time.monotonic() + DEADLINE
        while not (log := tmp_path / "metrics-rank0.jsonl").exists() or '"kind": "epoch"' not in log.read_text():
            assert time.monotonic() < until, "the run did not get going"
            time.sleep(0.1)
        nodes[1].server.kill()
        killed = time.monotonic()
        asker, other = finish_all(processes, timeout=DEADLINE)
        assert time.monotonic() - killed < stretched(60), "waited for the deadline of 120 s, not for server_wait"
    assert asker.returncode == other.returncode == 1
    errors = [[line for line in ended.output.splitlines() if "error: " in line] for ended in (asker, other)]
    assert len(errors[0]) == len(errors[1]) == 1, asker.output + other.output
    assert "part 1: no graph server that holds it came back within 3 s" in errors[0][0]
    assert "\ngraph server of node1 (host1) at tcp://127.0.0.1:" in asker.output and "(connection lost)" in asker.output
    assert "rank 1 (node1" in errors[1][0] and "lost another rank" in errors[1][0]
    assert "Traceback" not in asker.output + other.output
