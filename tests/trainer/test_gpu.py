"""Tests that need a GPU: training, resuming and inference on it, and batches that are made while it is behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from oracle import assert_identical
from train_kit import job, metrics, sample_on, write_parts
from trainer.core.ranks import RankGroup, Ranks
from trainer.graph.device import feed, tensors_of, with_tensors
from trainer.graph.open import open_graph
from trainer.infer.infer import infer
from trainer.loader.block_loader import BatchLoader, LoaderSettings
from trainer.train.job import train
from trainer.train.settings import InferJob

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

GPU = torch.device("cuda", 0)


def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


def curve(parts: Path, run_dir: Path, **settings: Any) -> Tensor:
    """Train, and return the losses of all steps."""
    return torch.cat(train(job(parts, run_dir, **settings)).step_loss)


@pytest.mark.parametrize("model", ["sage", "gat", "gcn"])
@pytest.mark.parametrize("sampling", ["cpu", "cuda"])
def test_a_gpu_has_the_losses_of_a_cpu(
    model: str, sampling: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.train.metrics.STEP_INTERVAL", 0.0)
    parts = write_parts(tmp_path / "parts")
    settings: dict[str, Any] = {"model": model, "epochs": 2, "sampler_threads": 2, "prefetch": 4}
    found = curve(parts, tmp_path / "gpu", sampling=sampling, **settings)
    device = metrics(tmp_path / "gpu", "epoch")[-1]["device"]
    assert 0 < device["allocated_bytes"] <= device["peak_bytes"] <= device["used_bytes"] <= device["total_bytes"]
    assert device["step_s"] > 0 and all("device" in line for line in metrics(tmp_path / "gpu", "step"))
    on_cpu(monkeypatch)
    np.testing.assert_allclose(found, curve(parts, tmp_path / "cpu", **settings), rtol=1e-3)


def test_bfloat16_on_a_gpu_has_about_the_losses_of_float32(tmp_path: Path) -> None:
    parts = write_parts(tmp_path / "parts")
    one, other = (curve(parts, tmp_path / kind, epochs=2, precision=kind) for kind in ("float32", "bfloat16"))
    np.testing.assert_allclose(one, other, rtol=0.05)


def test_a_run_of_a_gpu_continues_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = write_parts(tmp_path / "parts")
    curve(parts, tmp_path / "gpu", epochs=1)
    on_cpu(monkeypatch)
    resumed = train(job(parts, tmp_path / "on", epochs=2, resume=str(tmp_path / "gpu/checkpoints/last.pt")))
    whole = train(job(parts, tmp_path / "cpu", epochs=2))
    np.testing.assert_allclose(resumed.step_loss[-1], whole.step_loss[-1], rtol=1e-3)


def test_a_gpu_predicts_as_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = write_parts(tmp_path / "parts")
    curve(parts, tmp_path / "run")
    checkpoint, found = tmp_path / "run/checkpoints/last.pt", []
    for where in ("gpu", "cpu"):
        infer(InferJob(checkpoint, parts, tmp_path / where), Ranks())
        found.append(np.load(tmp_path / where / "part0/logits.npy"))
        on_cpu(monkeypatch)
    np.testing.assert_allclose(*found, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dataset", ["synthetic", "synthetic-hetero"])
def test_batches_are_right_though_the_device_is_behind(dataset: str, tmp_path: Path) -> None:
    # memory that is used again before the training stream has read it would change batches
    graph = open_graph(write_parts(tmp_path / "parts", dataset=dataset))
    target = next(of for of, spec in graph.manifest.nodes.items() if "train" in spec.splits)
    settings = LoaderSettings("train", (4, 4, 4), 8, threads=3, prefetch=6, target=target)
    plain, loader = (BatchLoader(graph, settings, 0, graph.layout) for _ in range(2))
    assert sample_on(graph, {"train": loader}, "cuda", RankGroup(Ranks(), GPU)).on_device
    bring, copies = feed(GPU), []
    for batch in loader.epoch(1):
        torch.cuda._sleep(20_000_000)  # cycles: about 10 ms in which the training stream does nothing else
        moved = bring(batch)
        copies.append(with_tensors(moved, {id(tensor): tensor.clone() for tensor in tensors_of(moved)}))
        del batch, moved
    for copy, expected in zip(copies, plain.epoch(1), strict=True):
        assert_identical(copy.to(torch.device("cpu")), expected)
