"""Tests, on a fake GPU, of field ``device`` of metrics lines: memory, utilisation and device time of a step."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import trainer
from fake_nvml import FakeNvml, use_nvml
from test_spent import Batches, one_epoch
from train_kit import metrics
from trainer.train.device_monitor import DeviceMonitor, utilization_reader
from trainer.train.step_timing import StepTimes

GPU = torch.device("cuda", 0)
TIMES = StepTimes(steps=4, device_steps=3, device_s=0.3)


class Gpu:
    """Values that the fake GPU reports."""

    free, total = 60, 80
    utilization: int | None = 50


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 10)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 15)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (gpu.free, gpu.total))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1"))
    use_nvml(monkeypatch, FakeNvml(lambda: gpu.utilization))
    return gpu


@pytest.mark.usefixtures("gpu")
def test_a_step_line_has_memory_device_time_and_utilisation() -> None:
    fields = DeviceMonitor(GPU).step_fields(TIMES)
    memory = {"allocated_bytes": 10, "peak_bytes": 15, "used_bytes": 20, "total_bytes": 80}
    assert fields == {"device": {**memory, "step_s": 0.1, "utilization": 0.5}}


def test_an_epoch_line_has_the_mean_utilisation_and_the_most_used_memory(gpu: Gpu) -> None:
    monitor = DeviceMonitor(GPU)
    for gpu.free, gpu.utilization in ((50, 60), (10, 100), (70, 20)):
        monitor.step_fields(StepTimes())
    device = monitor.epoch_fields(StepTimes())["device"]
    assert (device["utilization"], device["used_bytes"]) == (0.6, 70)
    assert "step_s" not in device, "no step has ended on the device"


@pytest.mark.usefixtures("gpu")
def test_lines_of_an_epoch_and_of_a_script_have_the_field(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.train.metrics.STEP_INTERVAL", 0.0)
    for module in ("epoch", "steplog"):
        monkeypatch.setattr(f"trainer.train.{module}.DeviceMonitor", lambda device: DeviceMonitor(GPU))
    report = one_epoch(tmp_path / "bundled", Batches())
    assert report.line["device"]["total_bytes"] == 80
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with trainer.StepLog(model, optimizer, environ={"GNNFLEET_RUN_DIR": str(tmp_path / "script")}) as log:
        for step in range(2):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            log.step(1, step, 2, 0.5, 1)
        log.epoch(1, 0.5)
    lines = [*metrics(tmp_path / "bundled", "step"), *metrics(tmp_path / "script", "step")]
    assert len(lines) == 5 + 2 and len(metrics(tmp_path / "script", "epoch")) == 1
    for line in (*lines, *metrics(tmp_path / "script", "epoch")):
        assert line["device"]["used_bytes"] == 20 and line["device"]["utilization"] == 0.5


@pytest.mark.parametrize("loads", [True, False])
def test_without_nvml_there_is_no_utilisation(loads: bool, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu.utilization = None
    use_nvml(monkeypatch, FakeNvml(lambda: gpu.utilization) if loads else None)
    assert utilization_reader(GPU) is None
    monitor = DeviceMonitor(GPU)
    assert all(
        "utilization" not in each["device"] for each in (monitor.step_fields(TIMES), monitor.epoch_fields(TIMES))
    )


def test_an_error_of_nvml_ends_the_readings_and_not_the_run(gpu: Gpu) -> None:
    monitor = DeviceMonitor(GPU)
    assert monitor.step_fields(TIMES)["device"]["utilization"] == 0.5
    gpu.utilization = None
    assert "utilization" not in monitor.step_fields(TIMES)["device"]
    assert monitor.epoch_fields(TIMES)["device"]["utilization"] == 0.5


def test_on_a_cpu_there_is_no_such_field() -> None:
    monitor = DeviceMonitor(torch.device("cpu"))
    assert monitor.step_fields(TIMES) == monitor.epoch_fields(TIMES) == {}
