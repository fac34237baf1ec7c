"""Tests of training and inference on client nodes: results equal those of workers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import trainer
from gateway_kit import HALVES, cluster_file, serving_parts
from ports import free_port
from train_kit import command_line, curve, finish_all, job, metrics, start_words, write_parts
from trainer.core.errors import SettingsError
from trainer.graph.environment import open_any
from trainer.graph.seed_order import RankLayout
from trainer.infer.infer import infer
from trainer.train.job import train
from trainer.train.settings import InferJob, TrainJob, TrainSettings


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    return write_parts(tmp_path_factory.mktemp("graph") / "parts", 4)


@pytest.fixture(scope="module")
def servers(parts):
    with serving_parts(parts) as servers:
        yield servers


def client_env(cluster: Path, node_rank: int) -> dict[str, str]:
    return {"GNNFLEET_CLUSTER": str(cluster), "NODE_RANK": str(node_rank), "GNNFLEET_PART_IDS": ""}


def test_one_client_trains_and_infers_as_one_process_with_all_parts(parts, servers, tmp_path, monkeypatch):
    cluster = cluster_file(tmp_path / "cluster.json", servers, {2: [0]})
    on_client = TrainJob(job(parts, tmp_path, epochs=2).settings, None, tmp_path / "client", (), cluster)
    on_one_process = job(parts, tmp_path / "local", epochs=2)
    expected = train(on_one_process)
    monkeypatch.setenv("NODE_RANK", "2")
    found = train(on_client)
    assert found.test == expected.test
    assert curve(on_client.run_dir) == curve(on_one_process.run_dir)
    assert [line["remote_share"] for line in metrics(on_client.run_dir, "epoch")] == [1.0, 1.0]
    checkpoint = on_one_process.run_dir / "checkpoints" / "last.pt"
    scores = infer(InferJob(checkpoint, None, tmp_path / "out-client", (), cluster))
    assert scores.metrics == infer(InferJob(checkpoint, parts, tmp_path / "out-local")).metrics
    for part in range(4):
        for name in ("logits.npy", "orig_id.npy"):
            ours, theirs = (np.load(tmp_path / f"out-{of}" / f"part{part}" / name) for of in ("client", "local"))
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_script_on_a_client_node_opens_its_graph_without_arguments(parts, servers, tmp_path):
    cluster = cluster_file(tmp_path / "cluster.json", servers, {2: [0, 1], 3: [2]})
    ranks = {"RANK": "2", "WORLD_SIZE": "3", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    with open_any(environ={**client_env(cluster, 3), **ranks}) as graph:
        assert (graph.ranks.rank, graph.ranks.node_rank) == (2, 3)
        assert graph.gateway is not None and graph.gateway.home.name == "node1 (s1)"
        assert graph.layout == RankLayout(3, ((0, 1), (0, 1), (2,), (2,)))
        loader = trainer.DistNeighborLoader(graph, [3, 2], "train", batch_size=30)
        assert loader.rank == 2 and all(batch.batch_size > 0 for batch in loader)


def test_a_node_that_is_no_client_needs_parts(servers, tmp_path):
    cluster = cluster_file(tmp_path / "cluster.json", servers, {2: [0]})
    for place in (None, cluster):
        with pytest.raises(SettingsError, match=r"no partition folder: give --parts .* node 0 is not a client"):
            train(TrainJob(TrainSettings(), None, tmp_path, (), place))


def in_ranks(lines: list[list[list[str]]], environments: list[dict[str, str]]) -> None:
    port, size = free_port(len(lines[0])), len(environments)
    processes = [start_words(lines[rank], rank, size, port, **environments[rank]) for rank in range(size)]
    for ended in finish_all(processes):
        assert ended.returncode == 0, ended.output


def accuracies(line: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in line.items() if "accuracy" in name}


@pytest.mark.slow
def test_two_workers_and_two_clients_with_two_processes_have_the_same_loss_curve(parts, servers, tmp_path):
    # Clients read everything from the launcher's variables; for inference each host writes into its own folder.
    cluster = cluster_file(tmp_path / "cluster.json", servers, {2: [0, 1], 3: [2, 3]})
    runs, environments, lines = {}, [], []
    settings = job(parts, tmp_path, epochs=2).settings
    workers = tmp_path / "workers.json"
    workers.write_text(json.dumps({"run_id": "r", "num_parts": 4, "nodes": [
        {"node_rank": node, "host": place.host, "endpoint": place.endpoint, "parts": list(place.parts),
         "ranks": [2 * node, 2 * node + 1]} for node, place in servers.places.items()
    ]}))  # fmt: skip
    for mode in ("workers", "clients"):
        environments, lines = [], []
        runs[mode] = tmp_path / mode
        for rank in range(4):
            node = rank // 2
            if mode == "workers":
                item = TrainJob(settings, parts, runs[mode], HALVES[node], workers)
                environments.append({"NODE_RANK": str(node)})
                lines.append([command_line(item)])
                continue
            words = command_line(TrainJob(settings, Path("x"), runs[mode]))
            del words[1:3]
            asked = ["infer", "--checkpoint", str(runs[mode] / "checkpoints" / "last.pt")]
            asked += ["--out", str(tmp_path / f"out{node}")]
            environments.append(client_env(cluster, 2 + node))
            lines.append([words, asked])
        in_ranks(lines, environments)
    assert curve(runs["clients"]) == curve(runs["workers"])
    for kind in ("eval", "result"):
        ours, theirs = (accuracies(metrics(runs[mode], kind)[-1]) for mode in ("clients", "workers"))
        assert ours == theirs
    for node, parts_there in enumerate(HALVES):
        written = sorted(path.name for path in (tmp_path / f"out{node}").glob("part*"))
        # A part is written by the ranks of one host; rank 0, on the first host, gets those of all others.
        expected = parts_there if node else sorted(part for parts in HALVES for part in parts)
        assert written == [f"part{part}" for part in expected]
