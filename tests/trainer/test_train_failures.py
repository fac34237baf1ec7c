"""Tests of ranks that fail or never start: every rank ends soon, with the reason."""

from __future__ import annotations

import os
import signal
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import trainer.train.job
from ports import free_port
from train_kit import Ended, finish, finish_all, job, run_forked, start_rank, write_parts
from trainer.cli import main
from trainer.core.errors import PartitionError, PeerError, SettingsError, TrainerError, TrainingError
from trainer.core.ranks import RankGroup, Ranks, join_ranks, pick_device
from trainer.train.job import memory_errors
from trainer.train.settings import TrainJob, TrainSettings
from waiting import stretched


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_parts(tmp_path_factory.mktemp("data") / "parts", 2)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_the_others_soon_with_one_line(victim: int, parts: Path, tmp_path: Path) -> None:
    endless = job(parts, tmp_path, epochs=100_000, eval_every=0, checkpoint_every=0)
    port = free_port()
    processes = [start_rank([endless], rank, 2, port) for rank in range(2)]
    deadline = time.monotonic() + 60
    while not _trained_a_while(tmp_path):
        assert time.monotonic() < deadline, "the run did not start"
        time.sleep(0.1)
    os.kill(processes[victim].pid, signal.SIGKILL)
    killed = time.monotonic()
    ended = finish(processes[1 - victim], timeout=90)
    assert time.monotonic() - killed < stretched(60)
    finish(processes[victim])
    assert ended.returncode == 1
    assert f"error: rank {1 - victim} (node0" in ended.output and "lost another rank" in ended.output
    assert "Traceback" not in ended.output


def _trained_a_while(run_dir: Path) -> bool:
    files = [run_dir / f"metrics-rank{rank}.jsonl" for rank in range(2)]
    return all(file.exists() and '"kind": "epoch"' in file.read_text() for file in files)


def run_unlike(*jobs: TrainJob) -> list[Ended]:
    port = free_port()
    processes = [start_rank([item], rank, len(jobs), port) for rank, item in enumerate(jobs)]
    return finish_all(processes)


def test_ranks_with_different_partitions_refuse_and_name_the_host(parts: Path, tmp_path: Path) -> None:
    other = write_parts(tmp_path / "other", 2, seed=5, num_nodes=601)
    for ended in run_unlike(job(parts, tmp_path / "run"), job(other, tmp_path / "run")):
        assert ended.returncode == 1
        assert "differs between ranks; rank 0 (node0, " in ended.output and ", rank 1 (node0, " in ended.output


def test_a_rank_that_cannot_open_its_part_ends_all_ranks_with_its_reason(parts: Path, tmp_path: Path) -> None:
    missing = tmp_path / "no-parts"
    first, second = run_unlike(job(parts, tmp_path), job(missing, tmp_path))
    assert first.returncode == second.returncode == 1
    assert f"error: {missing}/manifest.json is missing" in second.output
    assert "error: rank 1 (node0" in first.output and f"): {missing}/manifest.json" in first.output


class Slow(RankGroup):
    """A ``RankGroup`` whose rank 1 reads values 1.5 s late or, if ``dies``, ends before it reads them."""

    dies = False

    def gather(self, value: Any) -> list[Any]:
        values = super().gather(value)
        if self.rank == 1:
            time.sleep(1.5)
            if self.dies:
                os._exit(9)
        print("read", self.rank, time.time(), flush=True)
        return values


def rank_that_settles(dies: bool) -> None:
    ranks = Ranks.from_env(os.environ)

    def work() -> None:
        if ranks.rank == 0:
            raise PartitionError("no such part")

    with join_ranks(ranks, torch.device("cpu"), "gloo", 10.0) as joined:
        group = Slow(ranks, joined.device, joined.timeout)
        object.__setattr__(group, "dies", dies)
        try:
            group.agree(work)
        except TrainerError as error:
            print("raised", ranks.rank, time.time(), error, flush=True)
            os._exit(1)


def settle(dies: bool) -> list[list[str]]:
    """Run two ranks. Rank 0 fails and sends its error to rank 1. Return the words of each output line.

    dies: whether rank 1 exits before it reads the error.
    """
    ranks = run_forked(rank_that_settles, (dies,), 2)
    return [line.split(maxsplit=3) for ended in ranks for line in ended.output.splitlines()]


def test_no_rank_ends_before_the_others_have_read_its_reason() -> None:
    said = settle(dies=False)
    times = {(word, rank): float(at) for word, rank, at, *_ in said if word in ("read", "raised")}
    assert times["raised", "0"] >= times["read", "1"]
    reasons = {rank: rest[0] for word, rank, _, *rest in said if word == "raised"}
    assert reasons["0"] == "no such part" and reasons["1"].endswith("): no such part")


def test_a_failing_rank_does_not_wait_forever_for_a_dead_one() -> None:
    said = settle(dies=True)
    assert [(rank, rest[0]) for word, rank, _, *rest in said if word == "raised"] == [("0", "no such part")]


def rank_without_memory(kind: type[Exception], waits: float) -> None:
    """Run one of two ranks. Rank 0 raises ``kind`` in a collective step. Each rank prints the error that it gets.

    waits: timeout of collective calls in seconds.
    """
    ranks = Ranks.from_env(os.environ)

    def work() -> None:
        if ranks.rank == 0:
            raise kind("no room for 3 GB")

    with join_ranks(ranks, torch.device("cpu"), "gloo", waits) as group:
        began = time.monotonic()
        try:
            group.agree(work)
        except Exception as error:
            print("raised", ranks.rank, type(error).__name__, error, flush=True)
            assert time.monotonic() - began < waits / 2
            os._exit(1)


@pytest.mark.parametrize("kind", [MemoryError, torch.cuda.OutOfMemoryError])
def test_any_error_on_one_rank_ends_all_ranks_with_its_cause(kind: type[Exception]) -> None:
    first, second = (ended.output for ended in run_forked(rank_without_memory, (kind, 100.0), 2))
    assert f"raised 0 {kind.__name__} no room for 3 GB" in first
    assert "raised 1 PeerError rank 0 (node0, " in second and f"{kind.__name__}: no room for 3 GB" in second


def rank_that_fails_alone(folder: Path) -> None:
    """Run one of two ranks. Rank 0 runs out of memory; rank 1 waits in a collective operation."""

    def train(job: TrainJob) -> None:
        ranks = Ranks.from_env(os.environ)
        with join_ranks(ranks, torch.device("cpu"), "gloo", 100.0) as group:
            if ranks.rank == 0:
                ThreadPoolExecutor(1).submit(time.sleep, 600)
                raise MemoryError("no room for 3 GB")
            group.sum(torch.zeros(1))

    trainer.train.job.train = train
    main(["train", "--parts", str(folder), "--run-dir", str(folder)])


def test_a_rank_that_fails_alone_ends_at_once_despite_waiting_threads(tmp_path: Path) -> None:
    began = time.monotonic()
    first, second = run_forked(rank_that_fails_alone, (tmp_path,), 2)
    assert time.monotonic() - began < stretched(60)
    assert first.returncode == 1 and "MemoryError: no room for 3 GB" in first.output
    assert second.returncode == 1 and "error: rank 1 (node0, " in second.output and "Traceback" not in second.output


def test_a_rank_that_never_starts_is_an_error_within_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    ranks = Ranks.from_env(environ)
    began = time.monotonic()
    with pytest.raises(PeerError, match="could not connect to the other 1 ranks at 127.0.0.1:"):
        with join_ranks(ranks, torch.device("cpu"), "gloo", 2.0):
            pass
    assert time.monotonic() - began < stretched(60)


def test_nccl_without_a_device_is_refused() -> None:
    with pytest.raises(SettingsError, match="backend nccl needs a CUDA device"):
        with join_ranks(Ranks(), torch.device("cpu"), "nccl", 2.0):
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


@pytest.mark.parametrize("local_rank", [0, 1])
def test_fewer_devices_than_processes_are_said_once_per_node(local_rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    ranks = Ranks(local_rank=local_rank, local_world_size=2, node_rank=3, host="h")
    expected = pytest.warns(UserWarning, match=r"node3 \(h\) has 1 CUDA device for 2 processes, so they run on the CPU")
    with warnings.catch_warnings() if local_rank else expected:
        warnings.simplefilter("error" if local_rank else "always")
        assert pick_device(ranks, {}) == torch.device("cpu")


def test_too_few_given_devices_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SettingsError, match="2 processes share 1 CUDA devices"):
        pick_device(Ranks(local_world_size=2), {"CUDA_VISIBLE_DEVICES": "0"})


def test_a_process_with_a_mig_instance_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    ranks = Ranks(local_rank=1, local_world_size=2)
    assert str(pick_device(ranks, {"CUDA_VISIBLE_DEVICES": "MIG-5f1a"})) == "cuda:0"
    with pytest.raises(SettingsError, match="2 processes share 1 CUDA devices"):
        pick_device(ranks, {"CUDA_VISIBLE_DEVICES": "GPU-5f1a"})


def test_given_devices_that_torch_does_not_find_are_an_error_in_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for cuda, why in ((None, "is built without CUDA"), ("13.0", "finds no such device")):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        with pytest.raises(SettingsError, match=f"CUDA_VISIBLE_DEVICES is 0, but torch .*{why}"):
            pick_device(Ranks(), {"CUDA_VISIBLE_DEVICES": "0", "GNNFLEET_RUN_ID": "r"})
    for given in ({}, {"GNNFLEET_RUN_ID": "r"}, {"GNNFLEET_RUN_ID": "r", "CUDA_VISIBLE_DEVICES": ""}):
        assert pick_device(Ranks(), given).type == "cpu"
    assert pick_device(Ranks(), {"CUDA_VISIBLE_DEVICES": "0"}).type == "cpu", "set for another program"


@pytest.mark.parametrize(
    "error",
    [
        torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore text"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("[2] Call to cuMemAlloc results in CUDA_ERROR_OUT_OF_MEMORY"),
    ],
)
def test_exhausted_device_memory_names_what_to_lower(error: Exception) -> None:
    settings = TrainSettings(device_cache="10%", batch_size=77)
    with pytest.raises(
        TrainingError, match=r"CUDA out of memory on rank 0 .*lower one of device_cache \(10%\), batch_size"
    ):
        with memory_errors(RankGroup(Ranks()), settings):
            raise error
    with pytest.raises(RuntimeError, match="^shapes$"), memory_errors(RankGroup(Ranks()), settings):
        raise RuntimeError("shapes")
