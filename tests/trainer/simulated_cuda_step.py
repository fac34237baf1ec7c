"""Tests of the CUDA kernels of layers in numba's simulator; ``test_cuda_step`` runs them in a process of its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import trainer.nn.kernels.device
from train_kit import job, write_parts
from trainer.core.batch import Block
from trainer.core.ranks import RankGroup, Ranks
from trainer.nn.kernels import activation, cuda_sums, dropout, sage, spmm
from trainer.nn.kernels.activation import Activation
from trainer.train.job import _prepare, open_job_graph
from trainer.train.metrics import MetricsLog

assert os.environ.get("NUMBA_ENABLE_CUDASIM") == "1", "run by test_cuda_step"

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


@pytest.mark.parametrize("block", BLOCKS)
def test_transposes_are_equal(block: Block) -> None:
    for own, cpu in zip(cuda_sums.transpose(block), spmm.transpose_cpu(block), strict=True):
        assert own.dtype == cpu.dtype == torch.int32 and torch.equal(own, cpu)


@pytest.mark.parametrize(("block", "dtype"), CASES)
def test_sums_over_edges_are_equal(block: Block, dtype: torch.dtype) -> None:
    x, arrays = rows(dtype, block.num_src, 3), (block.indptr, block.indices)
    scales = [(None, None), (rows(torch.float32, block.num_dst), rows(torch.float32, block.num_src))]
    for scale in scales:
        own = cuda_sums.sum_rows(*arrays, x, *scale)
        assert torch.equal(own, spmm.sum_rows_cpu(*arrays, x, *scale)) and own.dtype == spmm.sum_dtype(dtype)
    strided = rows(dtype, 3, block.num_src).t()
    assert torch.equal(
        cuda_sums.sum_rows(*arrays, strided, None, None), spmm.sum_rows_cpu(*arrays, strided, None, None)
    )


@pytest.mark.parametrize(("block", "dtype"), CASES)
def test_attention_is_equal(block: Block, dtype: torch.dtype) -> None:
    x, weight = rows(dtype, block.num_src, 2, 3), rows(spmm.sum_dtype(dtype), len(block.indices), 2)
    order = torch.randperm(len(block.indices), generator=torch.Generator().manual_seed(1)).int()
    for edges in (None, order):
        arrays = (block.indptr, block.indices, edges, weight, x)
        assert torch.equal(cuda_sums.weighted_rows(*arrays), spmm.weighted_rows_cpu(*arrays))
    dst = rows(dtype, block.num_dst, 2, 3, seed=2)
    own, cpu = cuda_sums.edge_dots(block, dst, x), spmm.edge_dots_cpu(block, dst, x)
    torch.testing.assert_close(own, cpu)  # the CPU's order of additions is not fixed here


@pytest.mark.parametrize("block", BLOCKS)
def test_a_softmax_over_edges_and_its_gradient(block: Block) -> None:
    from torch_geometric.utils import softmax

    own, other = (rows(torch.float64, len(block.indices), 2).requires_grad_() for _ in range(2))
    weight, factor = cuda_sums.edge_softmax(block, own), rows(torch.float64, len(block.indices), 2, seed=3)
    expected = softmax(other, index=spmm.edge_targets(block), num_nodes=block.num_dst)
    torch.testing.assert_close(weight, expected, rtol=1e-12, atol=1e-14)
    for found in (weight, expected):
        (found * factor).sum().backward()
    torch.testing.assert_close(own.grad, other.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("p", [0.0, 0.4])
def test_masks_and_activations_are_equal(p: float, dtype: torch.dtype) -> None:
    h, n_id = rows(dtype, 5, 4), torch.tensor([3, 1 << 40, 0, -1, 77])
    if p:
        assert torch.equal(dropout.mask_rows(h, n_id, p, 1 << 63 | 5), dropout.mask_rows_cpu(h, n_id, p, 1 << 63 | 5))
    applied = Activation(rows(torch.float32, 4), n_id, p, (1 << 64) - 3, 2)
    own, cpu = h.clone(), h.clone()
    activation.activate_(own, applied)
    on_cpu(activation.activate_, cpu, applied)
    assert torch.equal(own, cpu) and (own > 0).any() and (own == 0).any()
    grad = rows(dtype, 5, 4, seed=1)
    assert torch.equal(
        activation.pass_where_positive(grad, own, applied.scale),
        on_cpu(activation.pass_where_positive, grad, own, applied.scale),
    )


def on_cpu(function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function`` with the CPU's kernels."""
    simulated, trainer.nn.kernels.device._SIMULATED = trainer.nn.kernels.device._SIMULATED, False
    try:
        return function(*args)
    finally:
        trainer.nn.kernels.device._SIMULATED = simulated


@pytest.mark.parametrize(("block", "dtype"), CASES)
def test_graphsage_is_equal(block: Block, dtype: torch.dtype) -> None:
    x = rows(dtype, block.num_src, 3)
    assert torch.equal(sage.mean_and_self(block, x, dtype), on_cpu(sage.mean_and_self, block, x, dtype))
    grad, activated = rows(dtype, block.num_dst, 6), rows(dtype, block.num_src, 3, seed=4)
    for before in (None, activated):
        results = []
        for run in (lambda f, *a: f(*a), on_cpu):
            block.__dict__.pop("_transposed", None)
            results.append(run(sage.sources_of, block, grad, None if before is None else before.clone(), 1.25))
        torch.testing.assert_close(*results, rtol=0.01 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)


class Quiet(MetricsLog):
    def step_due(self) -> bool:
        return False


STEPS: list[tuple[str, dict[str, Any]]] = [
    ("sage", {"dropout": 0.5}),
    ("gcn", {}),
    ("gat", {"hidden": 4, "heads": 2}),
    ("rsage", {}),
]


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_parts(tmp_path_factory.mktemp("graph") / "parts", num_nodes=40, num_features=4, avg_degree=5)


@pytest.mark.parametrize(("model", "more"), STEPS)
def test_a_training_step_has_the_loss_and_gradients_of_the_cpu(
    model: str, more: dict[str, Any], parts: Path, tmp_path: Path
) -> None:
    settings = {"batch_size": 4, "fanouts": (2, 2), "hidden": 4, "model": model, **more}
    made, group = job(parts, tmp_path, **settings), RankGroup(Ranks())
    fit = _prepare(made, open_job_graph(made, Ranks()), group, Quiet(tmp_path, 0))
    batch = next(iter(fit.loaders["train"].epoch(1)))

    def step() -> list[Tensor]:
        for block in batch.blocks:
            for one in block.values() if isinstance(block, dict) else [block]:
                one.__dict__.pop("_transposed", None)
        fit.model.zero_grad()
        loss = fit.task.loss_sum(fit.model(batch), batch)
        loss.backward()  # type: ignore[no-untyped-call]
        return [loss.detach(), *(weight.grad.clone() for weight in fit.model.parameters() if weight.grad is not None)]

    fit.model.train()
    for own, cpu in zip(step(), on_cpu(step), strict=True):
        torch.testing.assert_close(own, cpu, rtol=1e-4, atol=1e-5)
