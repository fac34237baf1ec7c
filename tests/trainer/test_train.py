"""Training: the same on one process and on several, resumed and not, and clear when it cannot go on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from graphs import graph
from train_kit import (
    REPOSITORY,
    Ended,
    FewBatches,
    curve,
    finish,
    free_port,
    job,
    metrics,
    run_ranks,
    start_rank,
    write_parts,
)
from trainer.config import TrainJob, TrainSettings
from trainer.errors import DataError, PeerError, SettingsError, TrainingError
from trainer.nn.layers import SAGEConv
from trainer.nn.models import BlockModel
from trainer.partition.assign import assign_parts
from trainer.partition.write import write_partition
from trainer.ranks import Ranks
from trainer.train.checkpoint import load_checkpoint
from trainer.train.epoch import train_epoch
from trainer.train.evaluate import evaluate
from trainer.train.fit import Fit
from trainer.train.job import train
from trainer.train.metrics import MetricsLog
from trainer.train.optimize import Optimizers
from trainer.train.task import NodeClassification
from trainer.train.team import Team, join_team, pick_device

ALONE = Team(Ranks(), torch.device("cpu"))
MODELS = ("sage", "gcn", "gat")


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_parts(tmp_path_factory.mktemp("data") / "parts", 2)


@pytest.fixture(scope="module")
def alone(parts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folders of one process, one per model, two epochs."""
    folder = tmp_path_factory.mktemp("alone")
    for model in MODELS:
        train(job(parts, folder / model, model=model, epochs=2), Ranks())
    return folder


@pytest.fixture(scope="module")
def together(parts: Path, alone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same on three processes; besides ``resumed``: sage's second epoch from the one process's checkpoint."""
    folder = tmp_path_factory.mktemp("together")
    first = str(alone / "sage" / "checkpoints" / "epoch-0001.pt")
    jobs = [job(parts, folder / model, model=model, epochs=2) for model in MODELS]
    for ended in run_ranks(3, *jobs, job(parts, folder / "resumed", epochs=2, resume=first)):
        assert ended.returncode == 0, ended.output
    return folder


@pytest.mark.parametrize("model", MODELS)
def test_several_processes_train_the_same_model_as_one(model: str, alone: Path, together: Path) -> None:
    np.testing.assert_allclose(curve(together / model), curve(alone / model), rtol=1e-5)
    ours, theirs = (load_checkpoint(folder / model / "checkpoints" / "last.pt") for folder in (alone, together))
    for name, value in ours.model.items():
        torch.testing.assert_close(theirs.model[name], value, atol=1e-5, rtol=1e-4, msg=name)


def test_every_seed_counts_once_on_several_processes(alone: Path, together: Path) -> None:
    epochs = [line for rank in range(3) for line in metrics(together / "sage", "epoch", rank)]
    assert sum(line["seeds"] for line in epochs) == 2 * 180
    assert all(line["seeds"] > 0 for line in epochs)
    for ours, theirs in zip(metrics(together / "sage", "eval"), metrics(alone / "sage", "eval"), strict=True):
        assert ours["accuracy"] == theirs["accuracy"]
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)


def test_a_resumed_run_continues_the_curve_exactly(parts: Path, alone: Path, tmp_path: Path) -> None:
    first = str(alone / "sage" / "checkpoints" / "epoch-0001.pt")
    train(job(parts, tmp_path, epochs=2, resume=first), Ranks())
    assert curve(tmp_path) == curve(alone / "sage")[3:]
    resumed, whole = (load_checkpoint(folder / "checkpoints" / "last.pt") for folder in (tmp_path, alone / "sage"))
    assert all(torch.equal(resumed.model[name], whole.model[name]) for name in whole.model)
    assert torch.cat(resumed.step_loss).tolist() == curve(alone / "sage")
    assert metrics(tmp_path, "result")[0]["test_accuracy"] == metrics(alone / "sage", "result")[0]["test_accuracy"]


def test_a_checkpoint_with_nothing_left_to_train_is_said_and_scored(
    parts: Path, alone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    train(job(parts, tmp_path, epochs=2, resume=str(alone / "sage" / "checkpoints" / "last.pt")), Ranks())
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "nothing to train: the checkpoint is at epoch 2 of 2; give more --epochs"
    ended, before = (metrics(folder, "result")[0] for folder in (tmp_path, alone / "sage"))
    assert ended["test_accuracy"] == before["test_accuracy"] and ended["epoch_seconds"] == []


def test_the_best_weights_load_as_the_page_says(
    parts: Path, alone: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    page = (REPOSITORY / "docs" / "ARCHITECTURE.md").read_text()
    (snippet,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "runs" / "RUN").mkdir(parents=True)
    (tmp_path / "runs" / "RUN" / "checkpoints").symlink_to(alone / "sage" / "checkpoints")
    (tmp_path / "parts").symlink_to(parts)
    monkeypatch.chdir(tmp_path)
    found: dict[str, Any] = {}
    exec(snippet, found)
    best = load_checkpoint(alone / "sage" / "checkpoints" / "last.pt").best
    assert best is not None
    assert all(torch.equal(value, best.model[name]) for name, value in found["model"].state_dict().items())


def test_the_page_lists_the_keys_of_a_checkpoint(alone: Path) -> None:
    saved = torch.load(alone / "sage" / "checkpoints" / "last.pt", weights_only=True)
    page = (REPOSITORY / "docs" / "ARCHITECTURE.md").read_text()
    table = page.split("## Checkpoints")[1].split("\n## ")[0]
    keys = {key for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for key in re.findall(r"`(\w+)`", row)}
    assert keys == set(saved)


def test_several_processes_resume_from_a_run_of_one(alone: Path, together: Path) -> None:
    np.testing.assert_allclose(curve(together / "resumed"), curve(alone / "sage")[3:], rtol=1e-5)


def test_training_learns_and_reports_the_best_epoch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_parts(tmp_path / "parts", 1, noise=1.0, homophily=0.8)
    train(job(data, tmp_path / "run", epochs=12, fanouts=(10, 5), hidden=32, lr=0.01), Ranks())
    result, evals = metrics(tmp_path / "run", "result")[0], metrics(tmp_path / "run", "eval")
    val = {line["epoch"]: line["accuracy"] for line in evals if line["split"] == "val"}
    assert result["test_accuracy"] > 0.8
    assert result["val_accuracy"] == max(val.values()) == val[result["best_epoch"]]
    assert result["epochs"] == len(result["epoch_seconds"]) == 12
    said = capsys.readouterr().out
    assert f"test accuracy {result['test_accuracy']:.4f} (weights of epoch {result['best_epoch']}" in said
    kept = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert kept == {"last.pt", "epoch-0011.pt", "epoch-0012.pt", f"epoch-{result['best_epoch']:04d}.pt"}


def test_a_loss_that_is_no_number_names_epoch_and_step(tmp_path: Path) -> None:
    model = BlockModel([SAGEConv(5, 2)], 0.0)
    optimizers = Optimizers(torch.optim.Adam(model.parameters()))
    with MetricsLog(tmp_path, 0) as log, pytest.raises(TrainingError, match="loss is nan in epoch 4 at step 2"):
        train_epoch(model, NodeClassification(2), optimizers, FewBatches(bad_step=2), 4, ALONE, log)


def test_an_output_that_is_no_number_is_no_score() -> None:
    with pytest.raises(TrainingError, match="output is NaN on seeds of an evaluation split"):
        evaluate(BlockModel([SAGEConv(5, 2)], 0.0), NodeClassification(2), FewBatches(bad_step=1), ALONE)


NODES = np.arange(12)
X, Y = np.stack([NODES, -NODES], axis=1) / 12, NODES % 3
SPLITS = {"train": NODES[:7], "val": NODES[7:9], "test": NODES[9:]}


def edge_case(folder: Path, edges: list[tuple[int, int]], attrs: dict[str, np.ndarray], splits: Any = SPLITS) -> Path:
    """A partition folder of 12 nodes in 5 parts, written by the real writer."""
    data = graph(edges, 12, attrs, splits)
    write_partition(data, assign_parts(data, 5, "random"), folder)
    return folder


CHAIN = [(v, v + 1) for v in range(11)]
TRAINABLE = {
    "half features, byte labels": (CHAIN, {"x": X.astype(np.float16), "y": Y.astype(np.uint8)}, SPLITS),
    "true and false as features": (CHAIN, {"x": X > 0.5, "y": Y.astype(np.uint64)}, SPLITS),
    "16-bit words as features": (CHAIN, {"x": NODES[:, None].astype(np.uint16), "y": Y.astype(np.int8)}, SPLITS),
    "further attributes": (CHAIN, {"x": X, "y": Y, "flag": Y > 0, "time": NODES.astype(np.uint32)}, SPLITS),
    "one class": (CHAIN, {"x": X, "y": Y * 0}, SPLITS),
    "no edges": ([], {"x": X, "y": Y}, SPLITS),
    "a hub and many nodes without in-edges": ([(v, 0) for v in range(12)], {"x": X, "y": Y}, SPLITS),
    "train split only": (CHAIN, {"x": X, "y": Y}, {"train": NODES[:1]}),
    "empty val split": (CHAIN, {"x": X, "y": Y}, {"train": NODES[:3], "val": NODES[:0], "test": NODES[5:]}),
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", TRAINABLE)
def test_odd_graphs_train(name: str, model: str, tmp_path: Path) -> None:
    parts = edge_case(tmp_path / "parts", *TRAINABLE[name])
    result = train(job(parts, tmp_path, model=model, batch_size=3, fanouts=(2, 2), hidden=8), Ranks())
    splits = TRAINABLE[name][2]
    assert len(result.step_loss[0]) == -(-len(splits["train"]) // 3) and torch.isfinite(result.step_loss[0]).all()
    assert (result.val_accuracy is not None) == (len(splits.get("val", ())) > 0)
    assert (result.test_accuracy is not None) == ("test" in splits)


@pytest.mark.parametrize(
    "attrs,splits,message",
    [
        ({"y": Y}, SPLITS, "small: nodes have no x; training needs features x and labels y"),
        ({"x": X}, SPLITS, "small: nodes have no y; training needs features x and labels y"),
        ({"x": X, "y": Y}, {"test": NODES}, "small: the train split has no seeds"),
        ({"x": X, "y": Y}, {"train": NODES[:0]}, "small: the train split has no seeds"),
    ],
)
def test_a_graph_that_cannot_be_trained_on_is_one_clear_error(
    attrs: dict[str, np.ndarray], splits: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=f"^{message}$"):
        train(job(edge_case(tmp_path / "parts", CHAIN, attrs, splits), tmp_path), Ranks())


def test_any_model_and_loader_fit(tmp_path: Path) -> None:
    """The loop asks nothing of a model but an output per batch."""
    model = BlockModel([SAGEConv(5, 2)], 0.0)
    settings = TrainSettings(epochs=30, lr=0.05, fanouts=(2,), eval_every=10, checkpoint_every=0)
    loaders = {"train": FewBatches(seeds=64), "val": FewBatches(seeds=64)}
    with MetricsLog(tmp_path, 0) as log:
        result = Fit(settings, model, NodeClassification(2), loaders, ALONE, log, tmp_path / "checkpoints", {}).run()
    assert evaluate(model, NodeClassification(2), FewBatches(seeds=64), ALONE).accuracy > 0.9
    assert [line["epoch"] for line in metrics(tmp_path, "eval")] == [10, 20, 30]
    assert result.test_accuracy is None and result.checkpoint == tmp_path / "checkpoints" / "epoch-0030.pt"
    assert {path.name for path in result.checkpoint.parent.iterdir()} == {"epoch-0030.pt", "last.pt"}


def test_step_lines_are_rationed(tmp_path: Path) -> None:
    model = BlockModel([SAGEConv(5, 2)], 0.0)
    optimizers = Optimizers(torch.optim.SGD(model.parameters()))
    with MetricsLog(tmp_path, 0) as log:
        train_epoch(model, NodeClassification(2), optimizers, FewBatches(steps=50), 1, ALONE, log)
    lines = metrics(tmp_path, "step")
    assert all(later["t"] - earlier["t"] > 0.99 for earlier, later in zip(lines, lines[1:], strict=False))
    assert lines[0].keys() == {
        "t", "kind", "rank", "epoch", "step", "steps", "loss", "seeds", "seeds_per_s", "wait_s",
    }  # fmt: skip


def test_a_run_folder_that_cannot_be_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match="metrics-rank0.jsonl cannot be written: .*; choose another --run-dir"):
        MetricsLog(tmp_path / "file", 0)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_the_others_soon_with_one_line(victim: int, parts: Path, tmp_path: Path) -> None:
    endless = job(parts, tmp_path, epochs=100_000, eval_every=0, checkpoint_every=0)
    port = free_port()
    processes = [start_rank([endless], rank, 2, port) for rank in range(2)]
    deadline = time.monotonic() + 60
    while not _trained_a_while(tmp_path):
        assert time.monotonic() < deadline, "the run did not get going"
        time.sleep(0.1)
    os.kill(processes[victim].pid, signal.SIGKILL)
    killed = time.monotonic()
    ended = finish(processes[1 - victim], timeout=30)
    assert time.monotonic() - killed < 15
    finish(processes[victim])
    assert ended.returncode == 1
    assert f"error: rank {1 - victim} (node0" in ended.output and "lost another rank" in ended.output
    assert "Traceback" not in ended.output


def _trained_a_while(run_dir: Path) -> bool:
    files = [run_dir / f"metrics-rank{rank}.jsonl" for rank in range(2)]
    return all(file.exists() and '"kind": "epoch"' in file.read_text() for file in files)


def run_unlike(*jobs: TrainJob) -> list[Ended]:
    """One run in which each rank has a job of its own."""
    port = free_port()
    processes = [start_rank([item], rank, len(jobs), port) for rank, item in enumerate(jobs)]
    return [finish(process) for process in processes]


def test_ranks_with_different_partitions_refuse_and_name_the_host(parts: Path, tmp_path: Path) -> None:
    other = write_parts(tmp_path / "other", 2, seed=5, num_nodes=601)
    for ended in run_unlike(job(parts, tmp_path / "run"), job(other, tmp_path / "run")):
        assert ended.returncode == 1
        assert "differs between ranks; rank 0 (node0, " in ended.output and ", rank 1 (node0, " in ended.output


def test_a_rank_that_cannot_open_its_part_ends_all_with_its_reason(parts: Path, tmp_path: Path) -> None:
    missing = tmp_path / "no-parts"
    first, second = run_unlike(job(parts, tmp_path), job(missing, tmp_path))
    assert first.returncode == second.returncode == 1
    assert f"error: {missing}/manifest.json is missing" in second.output
    assert "error: rank 1 (node0" in first.output and f"could not start: {missing}/manifest.json" in first.output


SETTLING = """
import os, sys, time
import torch, torch.distributed as dist
from trainer.errors import PartitionError, TrainerError
from trainer.ranks import Ranks
from trainer.train.team import Team, join_team

class Slow(Team):
    def gather(self, value):
        values = super().gather(value)
        if self.rank == 1:
            time.sleep(1.5)
            if sys.argv[1] == "dies":
                os._exit(9)
        print("read", self.rank, time.time(), flush=True)
        return values

def work():
    if team.rank == 0:
        raise PartitionError("no such part")

ranks = Ranks.from_env(os.environ)
with join_team(ranks, torch.device("cpu"), "gloo", 3.0) as joined:
    team = Slow(ranks, joined.device, joined.timeout)
    try:
        team.agree(work)
    except TrainerError as error:
        print("raised", ranks.rank, time.time(), error, flush=True)
        os._exit(1)
"""


def settle(how: str) -> list[str]:
    """What two ranks say of whom the first cannot start and the second reads its reason 1.5 s late."""
    port = str(free_port())
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    env |= {"MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, "-c", SETTLING, how]
    ranks = [
        subprocess.Popen(argv, env={**env, "RANK": rank}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank in ("0", "1")
    ]
    return [line for rank in ranks for line in finish(rank, 60).output.splitlines()]


def test_no_rank_ends_before_the_others_have_read_its_reason() -> None:
    said = [line.split(maxsplit=3) for line in settle("reads")]
    times = {(word, rank): float(at) for word, rank, at, *_ in said if word in ("read", "raised")}
    assert times["raised", "0"] >= times["read", "1"]
    reasons = {rank: rest[0] for word, rank, _, *rest in said if word == "raised"}
    assert reasons["0"] == "no such part" and reasons["1"].endswith("could not start: no such part")


def test_a_rank_with_a_reason_does_not_wait_for_ever_for_one_that_died() -> None:
    said = [line.split(maxsplit=3) for line in settle("dies")]
    assert [(rank, rest[0]) for word, rank, _, *rest in said if word == "raised"] == [("0", "no such part")]


def test_a_seed_without_label_is_an_error_before_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_parts(tmp_path / "parts", 1)
    file = data / "part0" / "nodes" / "node" / "attrs" / "y.npy"
    labels = np.load(file)
    seed = int(np.load(data / "shared" / "nodes" / "node" / "seeds" / "val.npy")[3])
    labels[seed] = -1
    np.save(file, labels)
    with pytest.raises(DataError, match=f"1 seeds of the val split have no class in 0 … 3, .* node {seed} with y = -1"):
        train(job(data, tmp_path / "run"), Ranks())
    assert "epoch" not in capsys.readouterr().out


def test_a_rank_that_never_comes_is_an_error_within_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    ranks = Ranks.from_env(environ)
    began = time.monotonic()
    with pytest.raises(PeerError, match="could not meet the other 1 ranks at 127.0.0.1:"):
        with join_team(ranks, torch.device("cpu"), "gloo", 2.0):
            pass
    assert time.monotonic() - began < 20


def test_nccl_without_a_device_is_refused() -> None:
    with pytest.raises(SettingsError, match="backend nccl needs a CUDA device"):
        with join_team(Ranks(), torch.device("cpu"), "nccl", 2.0):
            pass


@pytest.mark.parametrize(
    "count,processes,given,device", [(0, 1, "", "cpu"), (2, 2, "0,1", "cuda:1"), (1, 2, "", "cpu")]
)
def test_the_device_is_one_per_process_or_the_cpu(
    count: int, processes: int, given: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    ranks = Ranks(local_rank=processes - 1, local_world_size=processes)
    assert str(pick_device(ranks, {"CUDA_VISIBLE_DEVICES": given})) == device


def test_too_few_given_devices_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SettingsError, match="2 processes share 1 CUDA devices"):
        pick_device(Ranks(local_world_size=2), {"CUDA_VISIBLE_DEVICES": "0"})
