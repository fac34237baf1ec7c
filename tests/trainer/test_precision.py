"""Tests of training in bfloat16: equal to float32 except for rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from nn_kit import Config, homogeneous, typed_batch, typed_edges
from test_nn import random_block
from test_nn_hetero import FACTS
from test_nn_sage import batch_of
from train_kit import curve, job, write_parts
from trainer.core.batch import Batch, HeteroBatch
from trainer.core.errors import CheckpointError
from trainer.core.ranks import Ranks
from trainer.nn import layers
from trainer.nn.kernels import dropout, spmm
from trainer.nn.kernels.precision import why_slow
from trainer.nn.models import build_model
from trainer.train.checkpoint import load_checkpoint
from trainer.train.job import train

HOMO, HETERO = ("sage", "gcn", "gat"), ("rgcn", "rsage", "hgt")
BF16 = torch.bfloat16


def model_and_batch(name: str, precision: str) -> tuple[nn.Module, Batch | HeteroBatch]:
    config = Config(name, precision=precision, hidden=32, fanouts=(3, 2) if name in HETERO else (6, 6, 6))
    if name in HOMO:
        return build_model(config, homogeneous()), batch_of(torch.float32)
    return build_model(config, FACTS), typed_batch(typed_edges(), list(range(12)), (3, 2))


def loss_and_gradients(name: str, precision: str) -> tuple[Tensor, dict[str, Tensor]]:
    model, batch = model_and_batch(name, precision)
    logits = model(batch)
    assert logits.dtype == torch.float32
    loss = functional.cross_entropy(logits, torch.arange(len(logits)) % 4)
    loss.backward()
    return loss.detach(), {of: p.grad for of, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("transform_first", [False, True])
@pytest.mark.parametrize("name", [*HOMO, *HETERO])
def test_loss_and_gradients_are_near_those_of_float32(
    name: str, transform_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (layers, __import__("trainer.nn.hetero_layers", fromlist=["layers"])):
        monkeypatch.setattr(module, "linear_first", lambda *_: transform_first)
    (exact, wanted), (loss, found) = loss_and_gradients(name, "float32"), loss_and_gradients(name, "bfloat16")
    torch.testing.assert_close(loss, exact, atol=0.02, rtol=0)
    assert not torch.equal(loss, exact)  # proves that bfloat16 was used
    assert found.keys() == wanted.keys()
    for of, grad in found.items():
        assert grad.dtype == torch.float32 and grad.isfinite().all(), of
    ours, theirs = (torch.cat([grads[of].flatten() for of in wanted]) for grads in (found, wanted))
    assert functional.cosine_similarity(ours, theirs, 0) > 0.99


@pytest.mark.parametrize("name", HETERO)
def test_a_batch_without_seeds_gives_zero_gradients(name: str) -> None:
    model = build_model(Config(name, precision="bfloat16", fanouts=(3, 2)), FACTS)
    logits = model(typed_batch(typed_edges(), [], (3, 2)))
    functional.cross_entropy(logits, torch.empty(0, dtype=torch.int64), reduction="sum").backward()
    assert all(not p.grad.any() for p in model.parameters())


def test_sums_of_bfloat16_rows_are_those_of_the_same_rows_in_float32() -> None:
    block = random_block(40, 60, 300)  # so many edges that bfloat16 sums would be far off
    x, weight, dst = torch.randn(60, 2, 6).to(BF16), torch.rand(len(block.indices), 2), torch.randn(40, 2, 6).to(BF16)
    scale = torch.rand(60)
    for sums in (spmm.sum_rows_cpu, spmm.sum_rows_torch):
        args = block.indptr, block.indices
        ours, exact = (sums(*args, rows[:, 0], None, scale) for rows in (x, x.float()))
        torch.testing.assert_close(ours, exact, atol=1e-5, rtol=1e-5)
    for ours, exact in (
        (spmm.attend(block, x, weight), spmm.attend(block, x.float(), weight)),
        (spmm.edge_dots(block, dst, x), spmm.edge_dots(block, dst.float(), x.float())),
    ):
        torch.testing.assert_close(ours, exact, atol=1e-5, rtol=1e-5)


def test_dropout_masks_equal_those_of_float32() -> None:
    h, n_id = torch.randn(300, 37), torch.randint(0, 2**40, (300,))
    ours, theirs = (mask(h.to(BF16), n_id, 0.3, 7) for mask in (dropout.mask_rows, dropout.mask_rows_torch))
    exact = dropout.mask_rows(h, n_id, 0.3, 7)
    assert ours.dtype == theirs.dtype == BF16 and torch.equal(ours, theirs) and torch.equal(ours == 0, exact == 0)
    torch.testing.assert_close(ours.float(), exact, rtol=0.02, atol=0)


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_parts(tmp_path_factory.mktemp("data") / "parts")


def test_a_run_trains_evaluates_and_resumes_in_bfloat16(parts: Path, tmp_path: Path) -> None:
    runs = {name: job(parts, tmp_path / name, epochs=3, precision=name) for name in ("float32", "bfloat16")}
    results = {name: train(run, Ranks()) for name, run in runs.items()}
    np.testing.assert_allclose(curve(tmp_path / "bfloat16"), curve(tmp_path / "float32"), atol=0.05)
    assert curve(tmp_path / "bfloat16") != curve(tmp_path / "float32")
    saved = load_checkpoint(results["bfloat16"].checkpoint)
    assert {weight.dtype for weight in saved.model.values()} == {torch.float32}
    again: dict[str, Any] = {"resume": str(results["bfloat16"].checkpoint), "epochs": 4}
    with pytest.raises(CheckpointError, match="precision is float32, in the checkpoint bfloat16"):
        train(job(parts, tmp_path / "other", **again), Ranks())
    assert train(job(parts, tmp_path / "more", precision="bfloat16", **again), Ranks()).epochs == 4


@pytest.mark.parametrize(
    "precision,device,flags,slow",
    [
        ("float32", "cpu", "avx512f", False),
        ("bfloat16", "cpu", "avx512f avx512_bf16x", True),
        ("bfloat16", "cpu", "avx512f amx_bf16", False),
        ("bfloat16", "cpu", None, False),
        ("bfloat16", "cuda", "avx512f", False),
        ("bfloat16", "cuda:1", "amx_bf16", True),
    ],
)
def test_a_processor_without_bfloat16_is_reported(
    precision: str, device: str, flags: str | None, slow: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda of: (7, 5) if of.index else (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    if flags is not None:
        (tmp_path / "cpuinfo").write_text(f"flags\t\t: fpu {flags}\n")
    said = why_slow(precision, torch.device(device), tmp_path / "cpuinfo")
    assert ("slower than float32" in (said or "")) == slow
