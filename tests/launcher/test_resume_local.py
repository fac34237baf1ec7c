"""Tests of ``gnnfleet resume`` after a rank was killed within an epoch: the losses are those of an undisturbed run."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launching import REPOSITORY, Launched, Running, launch, local_config
from tracked_runs import tensorboard_curves
from waiting import DEADLINE

TRAIN = {"epochs": 30, "batch_size": 60, "checkpoint_seconds": 0.05, "eval_every": 10, "hidden": 16}
TRACK = {"track": {"tensorboard": {}}}

#: As docs/own_model.md: a loop that restores, and writes the loss of every step over all ranks.
SCRIPT = """
import os, time, torch, torch.distributed as dist, gnnfleet as gf
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
graph = gf.open()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(graph.num_features, graph.num_classes))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
loader = gf.DistNeighborLoader(graph, [4], "train", batch_size=60 // world, shuffle=True)
log = gf.StepLog(model, optimizer, loader, checkpoint_seconds=0.05)
start = log.restore()
for epoch in range(start.epoch, 16):
    first = start.first_step(epoch)
    loader.set_epoch(epoch - 1, first)
    for step, batch in enumerate(loader, first):
        time.sleep(0.01)
        sums = torch.zeros(batch.num_nodes, batch.x.shape[1])
        sums.index_add_(0, batch.edge_index[1], batch.x[batch.edge_index[0]])
        loss = torch.nn.functional.cross_entropy(model(sums[: batch.batch_size]), batch.y[: batch.batch_size])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        whole = loss.detach() / world
        dist.all_reduce(whole)
        print("loss", epoch, step, whole.item(), flush=True)
        log.step(epoch, step, len(loader), loss, batch.batch_size)
    log.epoch(epoch, 0.0)
dist.barrier()
graph.close()
dist.destroy_process_group()
"""


def kill_rank(workdir: Path, run_id: str, rank: int) -> None:
    (started,) = workdir.glob(f"runs/{run_id}/node*/procs/rank{rank}.json")
    os.kill(json.loads(started.read_text())["pid"], signal.SIGKILL)


def resume(folder: Path, *words: str) -> Launched:
    # the new run is the second one in the folder ``runs``
    command = [sys.executable, str(REPOSITORY / "launch.py"), "resume", *words]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=DEADLINE, env={**os.environ, "COLUMNS": "200"}
    )
    return Launched(done.returncode, done.stdout + done.stderr, folder)


def epochs(run_dir: Path) -> dict[int, list[float]]:
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return {line["epoch"]: line["step_loss"] for line in lines if line["kind"] == "epoch" and "step_loss" in line}


@pytest.mark.slow
@pytest.mark.parametrize("change", [(), ("--set", "nodes.*.procs=2")])
def test_the_bundled_trainer_continues_at_the_step(
    change: tuple[str, ...], tmp_path: Path, local_workdirs: Path
) -> None:
    config = local_config(tmp_path, [1, 1], local_workdirs, train=TRAIN | TRACK)
    running = Running(config, "--run-id", f"killed{len(change)}")
    running.await_epoch(13)
    kill_rank(local_workdirs / "node1", f"killed{len(change)}", 1)
    assert running.end().status == 137
    again = resume(tmp_path, f"killed{len(change)}", "--run-id", f"again{len(change)}", *change)
    assert again.status == 0, again.output
    assert "resuming from" in again.output
    (tmp_path / "alone").mkdir()
    alone = launch(local_config(tmp_path / "alone", [1], local_workdirs, train=TRAIN))
    assert alone.status == 0, alone.output
    ours, theirs = epochs(tmp_path / "runs" / f"again{len(change)}"), epochs(alone.run_dir)
    assert min(ours) >= 12 and max(ours) == 30
    for epoch, losses in ours.items():
        assert losses == pytest.approx(theirs[epoch], rel=1e-4), epoch

    # A tracker shows one run, with each epoch once.
    again_dir = tmp_path / "runs" / f"again{len(change)}"
    (tracked,) = json.loads((again_dir / "result.json").read_text())["trackers"]
    assert tracked["id"] == f"killed{len(change)}" and tracked["path"] == str(again_dir / "track/tensorboard")
    assert f"tensorboard: run killed{len(change)}, " in again.output
    curves = tensorboard_curves(again_dir / "track/tensorboard")
    assert [epoch for epoch, _ in curves["epoch/loss"]] == [*range(1, 31)]
    assert len(curves["step/loss_of_all_ranks"]) == sum(map(len, theirs.values()))
    assert {f"system/{name}" for name in ("node1/memory_bytes", "rank1/seeds_per_s")} <= curves.keys()


def losses(run_dir: Path) -> dict[tuple[int, int], float]:
    text = (run_dir / "logs/node0/rank0.log").read_text()
    rows = re.findall(r" loss (\d+) (\d+) (\S+)$", text, re.MULTILINE)
    return {(int(epoch), int(step)): float(loss) for epoch, step, loss in rows}


@pytest.mark.slow
def test_an_own_script_continues_at_the_step(tmp_path: Path, local_workdirs: Path) -> None:
    (tmp_path / "own.py").write_text(SCRIPT)
    config = local_config(tmp_path, [1, 1], local_workdirs, train=TRACK)
    running = Running(config, "--run-id", "own", "--", "python", "own.py")
    running.await_line("loss 5 ")
    kill_rank(local_workdirs / "node1", "own", 1)
    assert running.end().status == 137
    again = resume(tmp_path, "own", "--run-id", "own-again")
    assert again.status == 0, again.output
    whole = launch(config, "--run-id", "own-whole", "--", "python", "own.py")
    assert whole.status == 0, whole.output
    ours, theirs = losses(tmp_path / "runs/own-again"), losses(tmp_path / "runs/own-whole")
    assert min(ours) > (2, 0) and max(ours) == max(theirs)
    assert ours == pytest.approx({place: theirs[place] for place in ours}, rel=1e-4)
