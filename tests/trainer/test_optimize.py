"""Tests of the optimizer that updates all weights by one kernel, which runs on a CPU too."""

from __future__ import annotations

import inspect
import io
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainer.core.errors import SettingsError
from trainer.core.train_config import OPTIMIZERS, TrainConfig, problems
from trainer.train import optimize
from trainer.train.optimize import optimizer_of
from trainer.train.settings import TrainSettings

SETTINGS = TrainSettings(lr=0.01, weight_decay=0.001)


def weights_of(seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    return [nn.Parameter(torch.randn(7, 5)), nn.Parameter(torch.randn(5))]


def steps(adam: torch.optim.Optimizer, weights: list[Tensor], count: int) -> list[Tensor]:
    """Take ``count`` steps with gradients that depend on the weights. Returns the weights."""
    for _ in range(count):
        for weight in weights:
            weight.grad = weight.detach().cos()
        adam.step()
    return [weight.detach().clone() for weight in weights]


def saved(adam: torch.optim.Optimizer) -> Any:
    file = io.BytesIO()
    torch.save(adam.state_dict(), file)
    return torch.load(io.BytesIO(file.getvalue()), map_location="cpu", weights_only=True)


def test_a_gpu_updates_all_weights_by_one_kernel_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, fused = weights_of(0), weights_of(0)
    expected = steps(optimizer_of(plain, SETTINGS), plain, 5)
    monkeypatch.setattr(optimize, "on_gpu", lambda weights: True)
    adam = optimizer_of(fused, SETTINGS)
    assert adam.param_groups[0]["fused"] is True
    for one, other in zip(steps(adam, fused, 5), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("first", [True, False])
def test_a_run_continues_on_another_kind_of_device(first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = weights_of(1)
    expected = steps(optimizer_of(whole, SETTINGS), whole, 6)
    monkeypatch.setattr(optimize, "on_gpu", lambda weights: first)
    weights = weights_of(1)
    adam = optimizer_of(weights, SETTINGS)
    steps(adam, weights, 3)
    state = saved(adam)
    monkeypatch.setattr(optimize, "on_gpu", lambda weights: not first)
    resumed = optimizer_of(weights, SETTINGS)
    resumed.load_state_dict(state)
    assert resumed.param_groups[0]["fused"] is (None if first else True)
    for one, other in zip(steps(resumed, weights, 3), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_on_a_cpu_weights_are_updated_as_before() -> None:
    assert optimizer_of(weights_of(0), SETTINGS).param_groups[0]["fused"] is None


def test_the_launcher_knows_every_optimizer_and_its_arguments() -> None:
    offered = {name: kind for name, kind in vars(torch.optim).items() if isinstance(kind, type)}
    assert offered.keys() - OPTIMIZERS.keys() == {"Optimizer", "LBFGS", "SparseAdam", "Muon", "Adafactor"}
    own = {"self", "params", "lr", "weight_decay", "foreach", "fused", "capturable", "differentiable"}
    for name, arguments in OPTIMIZERS.items():
        assert set(arguments.split()) == inspect.signature(offered[name]).parameters.keys() - own, name
        ours, theirs = weights_of(0), weights_of(0)
        settings = TrainSettings(lr=0.01, weight_decay=0.0, optimizer={"name": name})
        decay = {} if name == "Rprop" else {"weight_decay": 0.0}
        stepped = steps(offered[name](theirs, lr=0.01, **decay), theirs, 3)
        torch.testing.assert_close(steps(optimizer_of(ours, settings), ours, 3), stepped, msg=name)


#: Values of arguments that some optimizers refuse.
NUMBERS = {name: [-0.1, math.nan, 0.0, 1.1] for name in "eps rho momentum_decay lr_decay alpha".split()}
TRIED = NUMBERS | {
    "momentum": [-0.1, 0.0, 1.1],
    "initial_accumulator_value": [-0.1, 0.0],
    "betas": [(0.9, 1.0), (-0.1, 0.9), (0.0, 0.99), (math.nan, 0.9)],
    "etas": [(0.5, 1.2), (0.0, 1.2), (0.5, 1.0)],
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_arguments_out_of_range_are_problems_of_the_settings(name: str) -> None:
    for argument, value in [(key, value) for key in OPTIMIZERS[name].split() for value in TRIED.get(key, [])]:
        if (name, argument) == ("ASGD", "alpha"):
            continue  # torch accepts a negative one, with which the rate grows
        found = [*problems(TrainConfig(optimizer={"name": name, argument: value}, weight_decay=0.0))]
        try:
            getattr(torch.optim, name)(weights_of(0), **{argument: value})
        except ValueError:
            assert [problem.place for problem in found] == [("optimizer", argument)], value
        else:
            assert not found, (argument, value)


@pytest.mark.parametrize(
    "optimizer,message",
    [
        ("Adm", "optimizer: there is no optimizer of torch.optim 'Adm'; did you mean Adam?"),
        ({"name": "SGD", "betas": [0.9, 0.99]}, "optimizer: SGD has no argument 'betas'; it has momentum, "),
        ({"name": "AdamW", "betas": [0.9, 1.5]}, "optimizer.betas: expected two numbers of at least 0 and "),
        ({"name": "Rprop"}, "weight_decay: Rprop has none"),
    ],
)
def test_arguments_that_an_optimizer_refuses(optimizer: Any, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        optimizer_of(weights_of(0), replace(SETTINGS, optimizer=optimizer))
