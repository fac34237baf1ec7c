"""What the made graphs have in common: features, splits, weights and times that fit planted classes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from trainer.core.arrays import Array, Ids
from trainer.core.errors import DataError
from trainer.data.options import SyntheticHeteroOptions, SyntheticOptions

AnySynthetic = SyntheticOptions | SyntheticHeteroOptions

TIMES = 1000  #: node times are drawn from 0 to TIMES - 1

_AGAINST_TIME = 0.2  #: share of the edges from later to earlier nodes that stay

_LATE = 0.25  #: share of edges that appear some time after both ends

_INSIDE = 4.0  #: how much heavier edges inside a class are

_ROWS_AT_ONCE = 1 << 16


def check_limits(dataset: str, options: AnySynthetic, limits: Mapping[str, tuple[float, float]]) -> None:
    """Raise ``DataError`` for an option out of range."""
    for name, (low, high) in limits.items():
        value = getattr(options, name)
        if not low <= value <= high:
            raise DataError(f"dataset {dataset}: option {name} must be from {low} to {high}, not {value}")


def class_features(y: Array, options: AnySynthetic, rng: np.random.Generator) -> Array:
    """Centre of the class plus noise, float32 [N, F]; centres are random unit-length directions times two."""
    centres = rng.standard_normal((options.num_classes, options.num_features), dtype=np.float32)
    centres *= 2.0 / np.linalg.norm(centres, axis=1, keepdims=True)
    x = np.empty((len(y), options.num_features), np.float32)
    for start in range(0, len(x), _ROWS_AT_ONCE):
        rows = x[start : start + _ROWS_AT_ONCE]
        rng.standard_normal(out=rows, dtype=np.float32)
        rows *= np.float32(options.noise)
        rows += centres[y[start : start + _ROWS_AT_ONCE]]
    return x


def node_splits(dataset: str, options: AnySynthetic, shuffled: Array, time: Array | None = None) -> dict[str, Ids]:
    """Train, val and test from ``shuffled`` node ids; with times the latest nodes, train before val before test."""
    sizes = {
        name: int(asked if (asked := getattr(options, name)) >= 1 else asked * options.num_nodes)
        for name in ("train", "val", "test")
    }
    if min(sizes.values()) < 0 or sum(sizes.values()) > options.num_nodes:
        raise DataError(
            f"dataset {dataset}: train={options.train}, val={options.val}, test={options.test} "
            f"do not fit {options.num_nodes} nodes"
        )
    start = 0
    if time is not None:
        shuffled = shuffled[np.argsort(time[shuffled], kind="stable")]
        start = options.num_nodes - sum(sizes.values())
    splits = {}
    for name, size in sizes.items():
        splits[name] = np.sort(shuffled[start : start + size])
        start += size
    return splits


def node_times(num_nodes: int, rng: np.random.Generator) -> Array:
    """int64 [N]."""
    return rng.integers(TIMES, size=num_nodes)


def mostly_forward(earlier: Array, later: Array, rng: np.random.Generator) -> Array:
    """Which edges stay, bool [E], when most shall lead from earlier to later; given both ends' times."""
    return (earlier <= later) | (rng.random(len(earlier)) < _AGAINST_TIME)


def edge_times(one: Array, other: Array, rng: np.random.Generator) -> Array:
    """int64 [E]: the later of both ends' times, for some edges later still."""
    late = (rng.random(len(one)) < _LATE) * rng.integers(TIMES // 10, size=len(one))
    return np.maximum(one, other) + late


def edge_weights(inside: Array, rng: np.random.Generator) -> Array:
    """Positive float32 [E], lognormal, larger where ``inside`` a class."""
    weights = rng.lognormal(0.0, 0.5, len(inside)) * np.where(inside, _INSIDE, 1.0)
    return weights.astype(np.float32)
