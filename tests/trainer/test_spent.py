"""Tests of how a step's time is divided by kind of work."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import trainer
from load_kit import homo_data
from test_pace import ALONE
from train_kit import FewBatches, metrics, run_forked
from trainer.core.batch import Batch
from trainer.core.batch_cost import Cost
from trainer.core.ranks import RankGroup, Ranks
from trainer.train import step_timing
from trainer.train.epoch import EpochReport, train_epoch
from trainer.train.metrics import KINDS, MetricsLog
from trainer.train.optimize import Optimizers
from trainer.train.step_timing import BatchWait, DeviceClock, Phase, StepTimes, behind, traffic
from trainer.train.tasks.classification import Classification

SLEEP = 0.02
WORK = Cost(remote_bytes=100, rows=10, remote_rows=6, cached_rows=2, sample_s=0.1, gather_s=0.1, wait_s=0.2)


class Batches(FewBatches):
    """Yields batches that take ``load`` seconds to load and ``copy`` seconds to copy. Each batch reports ``cost``."""

    def __init__(self, load: float = 0.0, copy: float = 0.0, cost: Cost = WORK):
        super().__init__(steps=5)
        self.load, self.copy, self.cost = load, copy, cost

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        for batch in super().epoch(epoch, first_step):
            time.sleep(self.load)
            slow = SlowToCopy(**{**vars(batch), "cost": self.cost})
            object.__setattr__(slow, "seconds", self.copy)
            yield slow


class SlowToCopy(Batch):
    def to(self, device: torch.device) -> Batch:
        time.sleep(self.__dict__["seconds"])
        return self


class Sleeps(nn.Module):
    def __init__(self, forward: float = 0.0, backward: float = 0.0):
        super().__init__()
        self.inner, self.seconds, self.back = nn.Linear(5, 2), forward, backward

    def forward(self, batch: Batch) -> Tensor:
        time.sleep(self.seconds)
        out: Tensor = self.inner(batch.x[: batch.num_seeds])
        out.register_hook(lambda _: time.sleep(self.back))
        return out


class SleepsOnce(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        time.sleep(SLEEP)
        return super().step(closure)


def one_epoch(
    run_dir: Path, batches: FewBatches, model: nn.Module | None = None, optimizer: Callable[..., Any] = torch.optim.SGD
) -> EpochReport:
    model = model or Sleeps()
    optimizers = Optimizers(optimizer(model.parameters(), lr=0.1))
    with MetricsLog(run_dir, 0) as log:
        return train_epoch(model, Classification(2), optimizers, batches, 1, ALONE, log)


SLOW: dict[str, Any] = {
    "sample": {"batches": Batches(load=SLEEP, cost=Cost(sample_s=1.0))},
    "remote": {"batches": Batches(load=SLEEP, cost=Cost(wait_s=1.0))},
    "gather": {"batches": Batches(load=SLEEP, cost=Cost(gather_s=1.0))},
    "copy": {"batches": Batches(copy=SLEEP)},
    "forward": {"batches": Batches(), "model": Sleeps(forward=SLEEP)},
    "backward": {"batches": Batches(), "model": Sleeps(backward=SLEEP)},
    "optimizer": {"batches": Batches(), "optimizer": SleepsOnce},
}


@pytest.fixture
def only_sleep_takes_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))


@pytest.mark.usefixtures("only_sleep_takes_time")
@pytest.mark.parametrize("kind", SLOW)
def test_a_slow_stage_is_measured_as_its_own_kind(kind: str, tmp_path: Path) -> None:
    line = one_epoch(tmp_path, **SLOW[kind]).times.means()
    assert tuple(line["spent"]) == KINDS and line["step_s"] == SLEEP
    assert line["spent"] == pytest.approx({**dict.fromkeys(KINDS, 0.0), kind: SLEEP}, abs=2e-6)


def test_the_kinds_add_up_to_the_step_and_loader_waits_are_split_by_work(tmp_path: Path) -> None:
    line = one_epoch(tmp_path, Batches(load=0.01)).line
    spent = line["spent"]
    assert sum(spent.values()) == pytest.approx(line["step_s"], abs=1e-9)
    assert spent["sample"] + spent["remote"] + spent["gather"] == pytest.approx(line["batch_s"], abs=6e-6)
    assert spent["remote"] == pytest.approx(2 * spent["sample"], abs=6e-6)
    assert line["own_s"] == pytest.approx(line["step_s"] - spent["reduce"], abs=6e-6)
    assert line["behind"] == {"sample": 0.1, "remote": 0.2, "gather": 0.1}
    sums = {"remote_bytes": 500, "rows": 50, "remote_rows": 30, "cached_rows": 10, "held_rows": 0}
    assert line["traffic"] == {"batches": 5, **sums} and line["remote_share"] == 0.6


def test_each_step_line_covers_the_time_since_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.train.metrics.STEP_INTERVAL", 0.0)
    one_epoch(tmp_path, Batches())
    lines = metrics(tmp_path, "step")
    assert [line["traffic"]["remote_bytes"] for line in lines] == [100] * 5
    assert all(sum(line["spent"].values()) == pytest.approx(line["step_s"], abs=1e-9) for line in lines)


def test_time_of_a_loader_without_costs_counts_as_sampling() -> None:
    assert StepTimes.of(1, [0.5, 0, 0, 0, 0, 0, 0], [BatchWait(0.5, Cost())]).means()["spent"]["sample"] == 0.5
    assert "spent" not in StepTimes.of(1, [0.5, 0, 0, 0, 0, 0, 0], [BatchWait(0.5, None)]).means()


def test_laps_add_up() -> None:
    lap = StepTimes.of(2, [0.4, 0, 1, 0, 0.5, 0, 0.1], [BatchWait(0.2, WORK)] * 2)
    both = lap + replace(lap, steps=6)
    assert (both.steps, both.batch_s, both.cost) == (8, pytest.approx(0.8), WORK + WORK + WORK + WORK)
    assert behind(both.cost, both.batches) == behind(WORK, 1)
    assert traffic(both.cost, 4)["remote_rows"] == 24


def rank_with_a_peer(run_dir: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(Sleeps(forward=0.1 * rank))
    group = RankGroup(Ranks(rank=rank, world_size=2, local_world_size=2, local_rank=rank), torch.device("cpu"))
    optimizers = Optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
    with MetricsLog(run_dir, rank) as log:
        report = train_epoch(model, Classification(2), optimizers, Batches(), 1, group, log)
        log.write("epoch", **report.line)
    dist.barrier()


def test_a_rank_waits_for_a_slower_one_in_reduce(tmp_path: Path) -> None:
    for ended in run_forked(rank_with_a_peer, (tmp_path,), 2):
        assert ended.returncode == 0, ended.output
    (quick,), (slow,) = (metrics(tmp_path, "epoch", rank) for rank in (0, 1))
    assert slow["spent"]["forward"] >= 0.1
    assert quick["spent"]["reduce"] > slow["spent"]["reduce"] and quick["own_s"] < slow["own_s"]


class Event:
    """Fake ``torch.cuda.Event``. An event is complete once the clock ``Event.now`` has advanced since ``record``."""

    now = 0.0

    def record(self) -> None:
        self.at = Event.now

    def query(self) -> bool:
        return self.at < Event.now

    def elapsed_time(self, later: Event) -> float:
        return (later.at - self.at) * 1000


def test_on_a_device_its_events_give_the_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    # Events that the device has not reached yet count with a later step.
    monkeypatch.setattr(step_timing, "_event", Event)
    clock = DeviceClock()

    def step(forward: float, reduce: float) -> None:
        clock.enter(Phase.FORWARD)
        Event.now += forward
        clock.enter(Phase.BACKWARD)
        clock.gradient_ready()
        clock.gradient_ready()
        Event.now += reduce
        clock.reduced()
        clock.enter(Phase.OTHER)

    def shares() -> list[float]:
        seconds = clock.pop_seconds()
        return [round(value / sum(seconds), 3) for value in seconds]

    step(3.0, 1.0)
    only_forward = [0, 0, 1, 0, 0, 0, 0]
    assert shares() == only_forward  # the event at the end of the step has not been reached
    assert clock.pop_device() == (0, 3.0)
    step(2.0, 1.0)
    assert shares() == [0, 0, 0.667, 0, 0.333, 0, 0]
    assert clock.pop_device() == (1, 3.0)  # the update of the second step's weights has not been reached
    assert clock.pop_device() == (0, 0.0)


def test_the_device_time_of_a_step_leaves_out_waits_for_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_timing, "_event", Event)
    clock, total = DeviceClock(), StepTimes()
    for _ in range(3):
        for phase in (Phase.LOAD, Phase.COPY, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.OTHER):
            clock.enter(phase)
            Event.now += 1.0
        total += StepTimes.of(1, clock.pop_seconds(), [], clock.pop_device())
    assert (total.steps, total.device_steps, total.device_s) == (3, 3, 12.0)


def test_a_step_log_records_the_costs_of_a_loader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.train.metrics.STEP_INTERVAL", 0.0)
    loader = trainer.DistNeighborLoader(homo_data(), [3, 2], batch_size=20)
    model = nn.Linear(loader.graph.manifest.nodes["node"].attrs["x"].shape[1], 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with trainer.StepLog(model, optimizer, loader, environ={"GNNFLEET_RUN_DIR": str(tmp_path)}) as log:
        for step, batch in enumerate(loader):
            loss = model(batch.x).sum()
            loss.backward()
            optimizer.step()
            log.step(1, step, len(loader), loss, 20)
    assert loader.cost.sample_s > 0 and loader.cost.gather_s > 0
    for line in metrics(tmp_path, "step")[1:]:
        assert sum(line["spent"].values()) == pytest.approx(line["step_s"], abs=1e-9)
        assert set(line["behind"]) == {"sample", "remote", "gather"} and line["traffic"]["batches"] == 1
