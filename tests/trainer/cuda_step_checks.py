"""Compares the CUDA kernels of layers with those of the CPU, on a GPU or in numba's simulator.

The simulator needs NUMBA_ENABLE_CUDASIM=1 before numba is imported, so ``test_cuda_step`` runs this in a new process.

On a GPU, ``a * b + c`` may be rounded once, so sums of products are compared with a tolerance there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

import trainer.nn.kernels.rows
from train_kit import job, write_parts
from trainer.core.batch import Block
from trainer.core.ranks import RankGroup, Ranks
from trainer.cuda.availability import simulator_wanted
from trainer.graph.device import feed
from trainer.nn.kernels import activation, dropout, sage, spmm
from trainer.nn.kernels.activation import Activation
from trainer.train.job import _prepare, open_job_graph
from trainer.train.metrics import MetricsLog

SIMULATED = simulator_wanted()
CPU = torch.device("cpu")
DEVICE = CPU if SIMULATED else torch.device("cuda", 0)

FLOATS = [torch.float32, torch.bfloat16]


def block_of(seed: int, num_dst: int = 7, num_src: int = 11, most: int = 9) -> Block:
    """Return a random block; some targets have no edges, and sources repeat."""
    random = np.random.default_rng(seed)
    counts = random.integers(0, most + 1, num_dst) * (random.random(num_dst) < 0.8)
    indptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    indices = random.integers(0, num_src, indptr[-1]).astype(np.int32)
    return Block(torch.from_numpy(indptr), torch.from_numpy(indices), num_src)


BLOCKS = [block_of(0), block_of(2, 4, 6, 0), block_of(3, 0, 2)]

CASES = [*((block, torch.float32) for block in BLOCKS), (block_of(1, 4, 5), torch.bfloat16)]


def rows(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def there(value: Any) -> Any:
    """Return a tensor or block on the device; other values unchanged."""
    return value.to(DEVICE) if isinstance(value, (Tensor, Block)) else value


def same(own: Tensor, cpu: Tensor, exact: bool = True) -> None:
    """Assert that a result of the device equals that of the CPU, bit for bit or within a tolerance.

    The tolerance is used only on a GPU, and only if ``exact`` is false, for results that contain sums of products.
    """
    assert own.device.type == DEVICE.type and own.dtype == cpu.dtype and own.shape == cpu.shape
    if exact or SIMULATED:
        assert torch.equal(own.cpu(), cpu)
        return
    near = 0.02 if cpu.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(own.cpu(), cpu, rtol=near, atol=near)


def on_cpu(function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function`` so that it uses the CPU's kernels, and return its result."""
    with mock.patch.object(trainer.nn.kernels.rows, "_SIMULATED", False):
        return function(*args)


def compare(function: Callable[..., Tensor], *args: Any, exact: bool = False) -> Tensor:
    """Assert that ``function`` has the same result on the device and on the CPU. Returns the CPU's result."""
    cpu: Tensor = on_cpu(function, *args)
    same(function(*map(there, args)), cpu, exact)
    return cpu


@pytest.mark.parametrize("block", BLOCKS)
def test_transposes_are_equal(block: Block) -> None:
    for own, cpu in zip(spmm.transpose(there(block)), spmm.transpose_cpu(block), strict=True):
        same(own, cpu)
        assert own.dtype == torch.int32


@pytest.mark.parametrize(("block", "dtype"), CASES)
def test_sums_over_edges_are_equal(block: Block, dtype: torch.dtype) -> None:
    x, arrays = rows(dtype, block.num_src, 3), (block.indptr, block.indices)
    compare(spmm.sum_rows, *arrays, x, None, None, exact=True)
    compare(spmm.sum_rows, *arrays, x, rows(torch.float32, block.num_dst), rows(torch.float32, block.num_src))
    compare(spmm.sum_rows, *arrays, rows(dtype, 3, block.num_src).t(), None, None, exact=True)


@pytest.mark.parametrize(("block", "dtype"), CASES)
def test_attention_is_equal(block: Block, dtype: torch.dtype) -> None:
    x, weight = rows(dtype, block.num_src, 2, 3), rows(spmm.sum_dtype(dtype), len(block.indices), 2)
    order = torch.randperm(len(block.indices), generator=torch.Generator().manual_seed(1)).int()
    for edges in (None, order):
        compare(spmm.weighted_rows, block.indptr, block.indices, edges, weight, x)
    dst = rows(dtype, block.num_dst, 2, 3, seed=2)
    own = spmm.edge_dot_products(there(block), there(dst), there(x))
    torch.testing.assert_close(own.cpu(), spmm.edge_dots_cpu(block, dst, x))  # the CPU's order of additions varies


@pytest.mark.parametrize("block", BLOCKS)
def test_a_softmax_over_edges_and_its_gradient(block: Block) -> None:
    own, other = (rows(torch.float64, len(block.indices), 2) for _ in range(2))
    own, factor = there(own).requires_grad_(), rows(torch.float64, len(block.indices), 2, seed=3)
    weight, expected = spmm.edge_softmax(there(block), own), on_cpu(spmm.edge_softmax, block, other.requires_grad_())
    torch.testing.assert_close(weight.cpu(), expected, rtol=1e-12, atol=1e-14)
    (weight * there(factor)).sum().backward()
    (expected * factor).sum().backward()
    torch.testing.assert_close(own.grad.cpu(), other.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("p", [0.0, 0.4])
def test_masks_and_activations_are_equal(p: float, dtype: torch.dtype) -> None:
    h, n_id, bias = rows(dtype, 5, 4), torch.tensor([3, 1 << 40, 0, -1, 77]), rows(torch.float32, 4)
    if p:
        compare(dropout.mask_rows, h, n_id, p, 1 << 63 | 5, exact=True)

    def activated(h: Tensor, bias: Tensor, n_id: Tensor) -> Tensor:
        return activation.activate_(h.clone(), Activation(bias, n_id, p, (1 << 64) - 3, 2))

    out = compare(activated, h, bias, n_id, exact=True)
    assert (out > 0).any() and (out == 0).any()
    compare(activation.pass_where_positive, rows(dtype, 5, 4, seed=1), out, 1.25, exact=True)


@pytest.mark.parametrize(("block", "dtype"), CASES)
def test_graphsage_is_equal(block: Block, dtype: torch.dtype) -> None:
    compare(sage.mean_and_self, block, rows(dtype, block.num_src, 3), dtype, exact=True)
    grad, activated = rows(dtype, block.num_dst, 6), rows(dtype, block.num_src, 3, seed=4)
    for before in (None, activated):
        own = sage.sources_of(there(block), there(grad), before if before is None else there(before.clone()), 1.25)
        cpu = on_cpu(sage.sources_of, there(block).to(CPU), grad, before if before is None else before.clone(), 1.25)
        near = 0.02 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(own.cpu(), cpu, rtol=near, atol=near)


class Quiet(MetricsLog):
    def step_due(self) -> bool:
        return False


STEPS: list[tuple[str, dict[str, Any]]] = [
    ("sage", {"dropout": 0.5}),
    ("sage", {"precision": "bfloat16"}),
    ("gcn", {}),
    ("gat", {"hidden": 4, "heads": 2, "attention_dropout": 0.5, "input_dropout": 0.3, "activation": "elu"}),
    ("hgt", {"hidden": 4, "heads": 2}),
]


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_parts(tmp_path_factory.mktemp("graph") / "parts", num_nodes=40, num_features=4, avg_degree=5)


@pytest.mark.parametrize(("model", "more"), STEPS)
def test_a_training_step_has_the_loss_and_gradients_of_the_cpu(
    model: str, more: dict[str, Any], parts: Path, tmp_path: Path
) -> None:
    settings = {"batch_size": 4, "fanouts": (2, 2), "hidden": 4, "model": model, "sampling": "cpu", **more}
    made, group = job(parts, tmp_path, **settings), RankGroup(Ranks())
    fit = _prepare(made, open_job_graph(made, Ranks()), group, Quiet(tmp_path, 0))
    batch = next(iter(fit.loaders["train"].epoch(1)))

    def step(device: torch.device) -> list[Tensor]:
        blocks = tuple(block.to(device) for block in batch.blocks)  # without transposes from an earlier step
        moved = replace(batch.to(device), blocks=blocks)
        model = fit.model.to(device)
        model.zero_grad()
        loss = fit.task.loss_sum(model(moved), moved)
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = [weight.grad.cpu().clone() for weight in model.parameters() if weight.grad is not None]
        return [loss.detach().cpu(), *gradients]

    fit.model.train()
    near = 0.05 if settings.get("precision") == "bfloat16" else 1e-4
    own = step(DEVICE)
    for found, cpu in zip(own, on_cpu(step, CPU), strict=True):
        torch.testing.assert_close(found, cpu, rtol=near, atol=near)


@pytest.mark.skipif(SIMULATED, reason="no GPU")
def test_a_step_on_the_gpu_does_not_synchronise(parts: Path, tmp_path: Path) -> None:
    made = job(parts, tmp_path, batch_size=4, fanouts=(2, 2), hidden=4, sampling="cpu")
    group = RankGroup(Ranks(), DEVICE)
    fit = _prepare(made, open_job_graph(made, Ranks()), group, Quiet(tmp_path, 0))
    batches = [feed(DEVICE)(batch) for batch in fit.loaders["train"].epoch(1)]
    fit.model.train()
    for number, batch in enumerate(batches):
        torch.cuda.set_sync_debug_mode("error" if number else "default")  # the first step compiles kernels
        try:
            fit.optimizers.step(fit.task.loss_sum(fit.model(batch), batch))
        finally:
            torch.cuda.set_sync_debug_mode("default")
