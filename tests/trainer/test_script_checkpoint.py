"""Tests of ``StepLog.restore``: a user script that was killed continues with the same losses."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from ports import free_port
from train_kit import finish_all, run_script, start_script, write_parts
from trainer.core.errors import CheckpointError, SettingsError
from trainer.nn.sharded_embedding import ShardedEmbedding
from trainer.train.checkpoint import files_of, load_content
from trainer.train.steplog import StepLog

SCRIPT = """
import json, os, signal, sys, time, torch, torch.distributed as dist, gnnfleet as gf
from torch.nn.parallel import DistributedDataParallel
parts, out, die = sys.argv[1], sys.argv[2], int(sys.argv[3])
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
graph = gf.open(parts)
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(graph.num_features, graph.num_classes))
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
loader = gf.DistNeighborLoader(graph, [3], "train", batch_size=24 // world, shuffle=True)
log = gf.StepLog(model, optimizer, loader, checkpoint_seconds=1e-9)
start = log.restore(scheduler=scheduler)
done = 0
for epoch in range(start.epoch, 3):
    first = start.first_step(epoch)
    loader.set_epoch(epoch - 1, first)
    total = 0.0
    for step, batch in enumerate(loader, first):
        seeds = torch.tensor([float(batch.batch_size)])
        dist.all_reduce(seeds)
        sums = torch.zeros(batch.num_nodes, batch.x.shape[1])
        sums.index_add_(0, batch.edge_index[1], batch.x[batch.edge_index[0]])
        logits = model(sums[: batch.batch_size])
        loss = torch.nn.functional.cross_entropy(logits, batch.y[: batch.batch_size], reduction="sum")
        optimizer.zero_grad()
        (loss * world / seeds).sum().backward()
        optimizer.step()
        whole = loss.detach() / seeds
        dist.all_reduce(whole)
        if rank == 0:
            with open(out, "a") as file:
                print(json.dumps([epoch, step, whole.item()]), file=file)
        log.step(epoch, step, len(loader), loss / batch.batch_size, batch.batch_size)
        done += 1
        if done == die:
            newest = os.path.join(os.environ["GNNFLEET_RUN_DIR"], "checkpoints", "last.pt")
            while not os.path.exists(newest):  # rank 0 writes it meanwhile
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
    scheduler.step()
    log.epoch(epoch, total)
log.close()
dist.barrier()
graph.close()
dist.destroy_process_group()
"""

ROWS = """embedding = gf.nn.ShardedEmbedding({"node": graph.manifest.nodes["node"].num_nodes}, model.module.in_features)
sparse = torch.optim.SparseAdam([embedding.weight], lr=0.03)
slower = torch.optim.lr_scheduler.ExponentialLR(sparse, 0.5)
loader ="""


def with_rows(script: str) -> str:
    changes = {
        "loader =": ROWS,
        "(scheduler=scheduler)": "(scheduler=scheduler, slower=slower, embedding=embedding, sparse=sparse)",
        "sums = ": 'rows = embedding.lookup({"node": batch.n_id})["node"]; sums = ',
        "batch.x[batch.edge_index[0]]": "(batch.x + rows)[batch.edge_index[0]]",
        "zero_grad()": "zero_grad(); sparse.zero_grad()",
        "optimizer.step()": "embedding.sync_gradients(); optimizer.step(); sparse.step()",
        "scheduler.step()": "scheduler.step(); slower.step()",
    }
    for old, new in changes.items():
        assert old in script, old
        script = script.replace(old, new)
    return script


STEPS = 8  # 180 train seeds in global batches of 24; the rest of an epoch is a step of its own


@pytest.fixture(scope="module")
def script(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("script") / "own.py"
    path.write_text(with_rows(SCRIPT) if kind == "model and rows" else SCRIPT)
    return path


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_parts(tmp_path_factory.mktemp("data") / "parts", 2)


def losses(path: Path) -> dict[tuple[int, int], float]:
    """Return the losses by (epoch, step). If a step was trained twice, return its last loss."""
    return {(epoch, step): loss for epoch, step, loss in map(json.loads, path.read_text().splitlines())}


@pytest.fixture(scope="module")
def undisturbed(script: Path, parts: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], float]:
    folder = tmp_path_factory.mktemp("undisturbed")
    for ended in run_script([str(script), str(parts), str(folder / "losses"), "0"], 1, folder):
        assert ended.returncode == 0, ended.output
    found = losses(folder / "losses")
    assert len(found) == 2 * STEPS
    return found


@pytest.mark.parametrize(
    "kind,before,after,die",
    [
        ("model", 2, 1, 3),
        pytest.param("model", 1, 2, STEPS + 5, marks=pytest.mark.slow),
        pytest.param("model and rows", 2, 2, 3, marks=pytest.mark.slow),
        pytest.param("model and rows", 2, 1, STEPS, marks=pytest.mark.slow),
        pytest.param("model and rows", 1, 2, STEPS + 5, marks=pytest.mark.slow),
        ("model and rows", 2, 3, 2 * STEPS - 1),
    ],
    scope="module",
)
def test_a_killed_script_continues_at_the_step_with_the_same_losses(
    kind: str, before: int, after: int, die: int, script: Path, parts: Path,
    undisturbed: dict[tuple[int, int], float], tmp_path: Path,
) -> None:  # fmt: skip
    run_dir = {"GNNFLEET_RUN_DIR": str(tmp_path)}
    port, words = free_port(), [str(script), str(parts), str(tmp_path / "killed"), str(die)]
    for ended in finish_all([start_script(words, rank, before, port, **run_dir) for rank in range(before)]):
        assert ended.returncode == -signal.SIGKILL
    newest = load_content(tmp_path / "checkpoints" / "last.pt")["position"]
    assert newest > [0, 0]
    words[2:] = [str(tmp_path / "resumed"), "0"]
    resume = run_dir | {"GNNFLEET_RESUME": str(tmp_path / "checkpoints" / "last.pt")}
    for ended in run_script(words, after, tmp_path, **resume):
        assert ended.returncode == 0, ended.output
    left = {place: loss for place, loss in undisturbed.items() if place >= (newest[0] + 1, newest[1])}
    assert losses(tmp_path / "resumed") == pytest.approx(left, rel=1e-4)
    assert sorted(position for position, _ in files_of(tmp_path / "checkpoints"))[-1] == (2, 0)


def log_of(folder: Path, model: torch.nn.Module, **environ: str) -> StepLog:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return StepLog(model, optimizer, environ={"GNNFLEET_RUN_DIR": str(folder), **environ}, checkpoint_seconds=1e-9)


def test_without_restore_nothing_is_saved(tmp_path: Path) -> None:
    with log_of(tmp_path, torch.nn.Linear(2, 1)) as log:
        log.step(1, 0, 5, 1.0, 4)
        log.epoch(1, 1.0)
    assert not (tmp_path / "checkpoints").exists()


def test_a_step_line_has_the_position_of_the_newest_checkpoint(tmp_path: Path) -> None:
    with log_of(tmp_path, torch.nn.Linear(2, 1)) as log:
        log.restore()
        log.step(1, 0, 1, 1.0, 4)
        log.epoch(1, 1.0)
        log.step(2, 1, 2, 1.0, 4)
    lines = [json.loads(text) for text in (tmp_path / "metrics-rank0.jsonl").read_text().splitlines()]
    saved = [line["saved"] for line in lines if line["kind"] == "step"]
    assert saved[0] == [0, 1] and saved[1] in ([1, 0], [1, 2])  # no second one while the first is being written


def test_without_a_launcher_restore_returns_the_beginning() -> None:
    model = torch.nn.Linear(2, 1)
    start = StepLog(model, torch.optim.SGD(model.parameters(), lr=0.1), environ={}).restore()
    assert (start.epoch, start.step, start.first_step(1), start.first_step(2)) == (1, 0, 0, 0)


def test_the_end_of_an_epoch_that_was_not_reported_is_repeated(tmp_path: Path) -> None:
    with log_of(tmp_path, torch.nn.Linear(2, 1)) as log:
        log.restore()
        log.step(2, 4, 5, 1.0, 4)
    file = str(tmp_path / "checkpoints" / "last.pt")
    start = log_of(tmp_path, torch.nn.Linear(2, 1), GNNFLEET_RESUME=file).restore()
    assert (start.epoch, start.step) == (2, 5)


def test_only_the_first_rank_of_a_run_saves_and_of_each_node_if_the_run_restarts(tmp_path: Path) -> None:
    second_node = {"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    for restarts, saves in (("", False), ("0", False), ("3", True)):
        folder = tmp_path / f"restarts{restarts}"
        with log_of(folder, torch.nn.Linear(2, 1), GNNFLEET_RESTARTS=restarts, **second_node) as log:
            log.restore()
            log.epoch(1, 1.0)
        assert (folder / "checkpoints" / "epoch-0001.pt").exists() is saves


@pytest.mark.parametrize(
    "other,more,message",
    [
        (torch.nn.Linear(3, 1), {}, "does not fit this script's model"),
        (torch.nn.Linear(2, 1), {"scheduler": torch.nn.Linear(1, 1)}, "has the state of model, optimizer; this script"),
    ],
)
def test_a_checkpoint_of_another_script_is_refused(
    other: torch.nn.Module, more: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with log_of(tmp_path, torch.nn.Linear(2, 1)) as log:
        log.restore()
        log.epoch(1, 1.0)
    file = str(tmp_path / "checkpoints" / "last.pt")
    with pytest.raises(CheckpointError, match=message):
        log_of(tmp_path, other, GNNFLEET_RESUME=file).restore(**more)


def test_a_file_that_is_no_checkpoint_of_a_script_is_refused(tmp_path: Path) -> None:
    torch.save({"format": "gnnfleet-checkpoint"}, tmp_path / "other.pt")
    with pytest.raises(CheckpointError, match="is not a gnnfleet-script-checkpoint of version 1"):
        log_of(tmp_path, torch.nn.Linear(2, 1), GNNFLEET_RESUME=str(tmp_path / "other.pt")).restore()


def rows_of(sizes: dict[str, int], dim: int = 4) -> tuple[ShardedEmbedding, torch.optim.Optimizer]:
    embedding = ShardedEmbedding(sizes, dim)
    return embedding, torch.optim.SparseAdam([embedding.weight], lr=0.1)


def test_rows_of_another_size_are_refused(tmp_path: Path) -> None:
    embedding, sparse = rows_of({"node": 5})
    with log_of(tmp_path, torch.nn.Linear(2, 1)) as log:
        log.restore(embedding=embedding, sparse=sparse)
        log.epoch(1, 1.0)
    file = str(tmp_path / "checkpoints" / "last.pt")
    for sizes, dim, message in (({"node": 6}, 4, "its rows are {'node': "), ({"node": 5}, 3, "those of the script")):
        other, optimizer = rows_of(sizes, dim)
        with pytest.raises(CheckpointError, match=message):
            log_of(tmp_path, torch.nn.Linear(2, 1), GNNFLEET_RESUME=file).restore(embedding=other, sparse=optimizer)
    with pytest.raises(CheckpointError, match="has the state of embedding, model, optimizer; this script"):
        log_of(tmp_path, torch.nn.Linear(2, 1), GNNFLEET_RESUME=file).restore()


def test_rows_need_an_optimizer_of_their_own(tmp_path: Path) -> None:
    embedding, model = ShardedEmbedding({"node": 5}, 4), torch.nn.Linear(2, 1)
    mixed = torch.optim.SGD([embedding.weight, *model.parameters()], lr=0.1)
    log = StepLog(model, mixed, environ={"GNNFLEET_RUN_DIR": str(tmp_path)})
    with pytest.raises(SettingsError, match="'optimizer' updates the rows of 'embedding' and other parameters"):
        log.restore(embedding=embedding)
