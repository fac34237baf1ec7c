"""Tests of the fused GraphSAGE layer and of the activation: equal to the plain formulas."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nn_kit import Config, homogeneous
from test_nn import dense, random_block
from trainer.core.batch import Batch
from trainer.nn import layers
from trainer.nn.kernels.activation import Activation
from trainer.nn.kernels.dropout import hash_dropout
from trainer.nn.models import build_model


def batch_of(dtype: torch.dtype) -> Batch:
    sizes, torch_rng = (9, 40, 90, 150), torch.Generator().manual_seed(0)
    blocks = tuple(random_block(sizes[hop], sizes[hop + 1], 6, hop) for hop in (2, 1, 0))
    x, ids = torch.randn(150, 5, generator=torch_rng, dtype=dtype), torch.arange(150) * 3
    return Batch(0, 77, 9, 9, ids, x, torch.arange(9) % 4, torch.arange(9), blocks, torch.full((150,), 8))


def plain_sage(model: torch.nn.Module, batch: Batch, p: float) -> Tensor:
    h = batch.x
    for number, (layer, block) in enumerate(zip(model.layers, batch.blocks, strict=True)):
        if number:
            h = hash_dropout(h.relu(), batch.n_id[: len(h)], p, batch.key, number, p > 0)
        mean = dense(block).to(h.dtype) / dense(block).sum(1, keepdim=True).clamp(min=1).to(h.dtype)
        h = layer.lin_l(mean @ h) + layer.lin_r(h[: block.num_dst])
    return h


def gradients(loss: Tensor, model: torch.nn.Module) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.parametrize("p", [0.0, 0.4])
@pytest.mark.parametrize("transform_first", [False, True])
def test_sage_equals_its_formula_in_values_and_gradients(
    p: float, transform_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "linear_first", lambda *_: transform_first)
    model, batch = build_model(Config("sage", dropout=p), homogeneous()).double(), batch_of(torch.float64)
    ours, theirs = model(batch), plain_sage(model, batch, p)
    torch.testing.assert_close(ours, theirs)
    weights = torch.randn(ours.shape, dtype=torch.float64)
    for a, b in zip(gradients((ours * weights).sum(), model), gradients((theirs * weights).sum(), model), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", ["sage", "gcn", "gat"])
def test_a_forward_pass_does_not_change_the_batch(name: str) -> None:
    model, batch = build_model(Config(name), homogeneous()), batch_of(torch.float32)
    before, first = batch.x.clone(), model(batch)
    assert torch.equal(batch.x, before) and torch.equal(model(batch), first)


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_activation_is_bias_relu_and_dropout(p: float) -> None:
    h, bias = torch.randn(50, 7, dtype=torch.float64), torch.randn(7, dtype=torch.float64, requires_grad=True)
    activation = Activation(bias, torch.arange(50) * 5, p, 11, 2)
    source = h.clone().requires_grad_()
    expected = hash_dropout((source + bias).relu(), activation.n_id, p, 11, 2, p > 0)
    torch.testing.assert_close(activation.of(h.clone()), expected)
    wanted = torch.autograd.grad(expected.square().sum(), [source, bias])
    other = h.clone().requires_grad_()
    found = torch.autograd.grad(activation.of(other * 1).square().sum(), [other, bias])
    torch.testing.assert_close(found, wanted)


def test_nan_is_passed_on() -> None:
    h = torch.tensor([[float("nan"), 1.0, -1.0]])
    out = Activation(torch.zeros(3), torch.zeros(1, dtype=torch.int64), 0.0, 1, 1).of(h)
    assert out.isnan().tolist() == [[True, False, False]]
    model, batch = build_model(Config("sage", dropout=0.0), homogeneous()), batch_of(torch.float32)
    assert model(replace(batch, x=batch.x * float("nan"))).isnan().any()
