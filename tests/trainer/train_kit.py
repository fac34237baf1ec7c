"""Test kit: a partition folder of a small synthetic graph, and training runs as real processes."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from forked import REPOSITORY, Forked, fork
from ports import free_port
from trainer.cli import main
from trainer.core.batch import Batch, Block
from trainer.core.ranks import RankGroup
from trainer.graph.open import Graph
from trainer.loader.block_loader import BlockLoader
from trainer.partition.methods.assign import assign_parts
from trainer.partition.write import write_partition
from trainer.sources.load import load_dataset
from trainer.train.device_sampling import Sampling, SamplingPlan, choose_sampling, plan_sampling
from trainer.train.settings import InferJob, TrainJob, TrainSettings
from waiting import DEADLINE

SMALL = {"num_nodes": 600, "num_classes": 4, "num_features": 12}  #: options of the graphs of ``write_parts``


def write_parts(folder: Path, num_parts: int = 1, dataset: str = "synthetic", **options: Any) -> Path:
    data = load_dataset(dataset, options={**SMALL, **options})
    write_partition(data, assign_parts(data, num_parts, "hash"), folder)
    return folder


@dataclass(frozen=True)
class Ended:
    returncode: int
    output: str


def job(parts: Path, run_dir: Path, **settings: Any) -> TrainJob:
    """Return a job with 180 training seeds. Its steps have 89, 89 and 2 seeds.

    With three ranks, one rank therefore gets no seed in the last step.
    """
    small: dict[str, Any] = {"batch_size": 89, "fanouts": (5, 5), "hidden": 16, "timeout": 120.0, "epochs": 1}
    return TrainJob(TrainSettings(**{**small, **settings}), parts, run_dir)


def start_rank(jobs: Sequence[TrainJob], rank: int, world_size: int, port: int, **more_env: str) -> Forked:
    """Start a process that runs one rank of each training job in turn."""
    return start_words([command_line(item) for item in jobs], rank, world_size, port, **more_env)


def start_words(lines: Sequence[list[str]], rank: int, world_size: int, port: int, **more_env: str) -> Forked:
    """Start a process that runs command lines of the trainer in turn, as rank ``rank``. Line k uses ``port + k``."""
    # on one port, a fast rank could join the rendezvous that rank 0 is closing
    return Forked(_in_turn, (list(lines),), rank_environment(rank, world_size, port, **more_env))


def _in_turn(lines: list[list[str]]) -> None:
    first_port = int(os.environ["MASTER_PORT"])
    for number, words in enumerate(lines):
        os.environ["MASTER_PORT"] = str(first_port + number)
        try:
            main(words)
        except SystemExit as ending:
            if ending.code:
                raise


def start_script(
    words: Sequence[str], rank: int, world_size: int, port: int, cwd: Path = REPOSITORY, **more_env: str
) -> Forked:  # fmt: skip
    return fork(words, rank_environment(rank, world_size, port, **more_env), cwd)


def run_script(words: Sequence[str], world_size: int, cwd: Path, **more_env: str) -> list[Ended]:
    port = free_port()
    ranks = [start_script(words, rank, world_size, port, cwd, **more_env) for rank in range(world_size)]
    return finish_all(ranks)


def run_forked(work: Callable[..., None], args: Sequence[Any], world_size: int) -> list[Ended]:
    port = free_port()
    ranks = [Forked(work, args, rank_environment(rank, world_size, port)) for rank in range(world_size)]
    return finish_all(ranks)


def rank_environment(rank: int, world_size: int, port: int, **more: str) -> dict[str, str]:
    env = environment()
    env |= {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    env |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank), "NODE_RANK": "0"}
    env |= {"LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return env | {"GLOO_SOCKET_IFNAME": "lo", **more}


def environment() -> dict[str, str]:
    """Return this process's environment without the variables GNNFLEET_…, except GNNFLEET_KERNELS."""
    kept = {"GNNFLEET_KERNELS"}
    return {name: value for name, value in os.environ.items() if name in kept or not name.startswith("GNNFLEET_")}


def command_line(item: TrainJob) -> list[str]:
    words = ["train", "--parts", str(item.parts), "--run-dir", str(item.run_dir), *_places(item)]
    for name, value in asdict(item.settings).items():
        if value is not None and value is not False and value != ():
            words.append("--" + name.replace("_", "-"))
            if isinstance(value, dict):
                words.append(json.dumps(value))
            elif value is not True:
                words.append(",".join(map(str, value)) if isinstance(value, tuple) else str(value))
    return words


def infer_words(item: InferJob) -> list[str]:
    words = ["infer", "--checkpoint", str(item.checkpoint), "--parts", str(item.parts), "--out", str(item.out)]
    words += ["--nodes-at-once", str(item.nodes_at_once), "--timeout", str(item.timeout)]
    return [*words, *_places(item)]


def _places(item: TrainJob | InferJob) -> list[str]:
    words = ["--part-ids", ",".join(map(str, item.part_ids))] if item.part_ids else []
    words += (
        ["--cluster", str(item.cluster), "--server-wait", str(item.remote_access.server_wait)] if item.cluster else []
    )
    return words + (["--key-file", str(item.key_file)] if item.key_file else [])


def finish(process: Forked, timeout: float = DEADLINE) -> Ended:
    """Wait for a process. On timeout kill it and fail the test with its output and stacks."""
    return finish_all([process], timeout)[0]


def finish_all(ranks: Sequence[Forked], timeout: float = DEADLINE) -> list[Ended]:
    """Wait for all ranks of a job. On timeout kill those that still run and fail the test with the output of all."""
    deadline = time.monotonic() + timeout
    try:
        for rank in ranks:
            rank.wait(max(0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        running = [rank for rank in ranks if rank.poll() is None]
        for rank in running:
            rank.abort()
        texts = [f"process {k}, {rank.returncode}: {rank.output}" for k, rank in enumerate(ranks)]
        raise AssertionError(f"did not end within {timeout} s:\n" + "\n".join(texts)) from None
    return [Ended(rank.wait(), rank.output) for rank in ranks]


def chosen_cases(request: pytest.FixtureRequest, argument: str) -> set[str]:
    """Return the values of a parameter in those tests of the file of ``request`` that run, slow ones or the others."""
    calls = (getattr(item, "callspec", None) for item in request.session.items if item.path == request.path)
    return {call.params[argument] for call in calls if call is not None and argument in call.params}


def run_ranks(world_size: int, *jobs: TrainJob) -> list[Ended]:
    port = free_port(len(jobs))
    return finish_all([start_rank(jobs, rank, world_size, port) for rank in range(world_size)])


def sample_on(graph: Graph, loaders: Mapping[str, BlockLoader], wanted: Sampling, group: RankGroup) -> SamplingPlan:
    """Plan and choose whether the device of ``group`` makes the batches of ``loaders``. Collective."""
    plan = group.agree(lambda: plan_sampling(graph, loaders, wanted, group.device))
    return choose_sampling(graph, loaders, plan, group)


def metrics(run_dir: Path, kind: str, rank: int = 0) -> list[dict[str, Any]]:
    lines = (run_dir / f"metrics-rank{rank}.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["kind"] == kind]


def curve(run_dir: Path) -> list[float]:
    return [loss for line in metrics(run_dir, "epoch") for loss in line["step_loss"]]


class FewBatches:
    """Generated batches for one process, with one layer and two neighbours per seed."""

    def __init__(self, steps: int = 3, seeds: int = 8, width: int = 5, bad_step: int | None = None):
        self.steps, self.seeds, self.width, self.bad_step = steps, seeds, width, bad_step

    def __len__(self) -> int:
        return self.steps

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        for step in range(first_step, self.steps):
            generator = torch.Generator().manual_seed(1000 * epoch + step)
            num_nodes = 3 * self.seeds
            x = torch.randn(num_nodes, self.width, generator=generator)
            if step == self.bad_step:
                x[0] = torch.nan
            indptr = torch.arange(0, 2 * self.seeds + 1, 2).int()
            block = Block(indptr, torch.arange(self.seeds, num_nodes).int(), num_nodes)
            y = (x[: self.seeds, 0] > 0).long()
            ids = torch.arange(num_nodes)
            yield Batch(step, step, self.seeds, self.seeds, ids, x, y, ids[: self.seeds], (block,))
