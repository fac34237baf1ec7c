"""Planted communities with skewed degrees: a degree-corrected block model, any size, seeded."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit

from trainer.arrays import Array
from trainer.data.dataset import Dataset
from trainer.data.edges import symmetric_adjacency
from trainer.data.options import SyntheticOptions
from trainer.errors import DataError
from trainer.rng import GOLDEN, fraction, mix

_SHARE_OF_LARGEST = 0.02  #: a hub's expected degree is at most this share of the nodes
_ROWS_AT_ONCE = 1 << 16


def make_synthetic(options: SyntheticOptions, fingerprint: str) -> Dataset:
    """A simple undirected graph (both directions stored, sorted by source) with x, y and splits.

    Labels are the communities. An edge's source is drawn in proportion to power-law weights, its
    target likewise, inside the source's community with probability ``homophily``. Self loops and
    duplicates are dropped, after drawing a few edges more to make up for them.
    Raises ``DataError`` for options out of range.
    """
    _check(options)
    rng = np.random.default_rng(options.seed)
    y = rng.integers(options.num_classes, size=options.num_nodes, dtype=np.int64)
    edge_index = _edges(options, y, rng)
    return Dataset(
        name="synthetic",
        num_nodes=options.num_nodes,
        edge_index=edge_index,
        attrs={"x": _features(options, y, rng), "y": y},
        splits=_splits(options, rng),
        num_classes=options.num_classes,
        fingerprint=fingerprint,
    )


def _check(options: SyntheticOptions) -> None:
    limits = {
        "num_nodes": (1, 2**31 - 1),
        "avg_degree": (0, max(1.0, options.num_nodes / 4)),
        "num_classes": (1, options.num_nodes),
        "num_features": (1, 2**20),
        "homophily": (0, 1),
        "skew": (1.5, 1e6),
        "noise": (0, 1e6),
        "seed": (0, 2**63 - 1),
    }
    for name, (low, high) in limits.items():
        value = getattr(options, name)
        if not low <= value <= high:
            raise DataError(f"dataset synthetic: option {name} must be from {low} to {high}, not {value}")


def _edges(options: SyntheticOptions, y: Array, rng: np.random.Generator) -> Array:
    by_class = np.argsort(y, kind="stable").astype(np.int32)
    cumulative = np.concatenate(([0.0], np.cumsum(_expected_degrees(options, rng)[by_class])))
    class_starts = np.searchsorted(y[by_class], np.arange(options.num_classes + 1))
    drawn = np.empty((2, round(options.num_nodes * options.avg_degree / 2)), np.int32)
    _draw(drawn, np.uint64(rng.integers(2**63)), options.homophily, cumulative, cumulative[class_starts], by_class)
    indptr, neighbours = symmetric_adjacency(drawn, options.num_nodes)
    del drawn
    edge_index = np.empty((2, len(neighbours)), np.int32)
    edge_index[0] = np.repeat(np.arange(options.num_nodes, dtype=np.int32), np.diff(indptr))
    edge_index[1] = neighbours
    return edge_index


def _expected_degrees(options: SyntheticOptions, rng: np.random.Generator) -> Array:
    degrees = rng.random(options.num_nodes) ** (-1.0 / (options.skew - 1.0))
    degrees *= options.avg_degree / degrees.mean()
    return np.minimum(degrees, max(_SHARE_OF_LARGEST * options.num_nodes, 1.0))


@njit(nogil=True, cache=True)
def _uniform(seed: np.uint64, counter: np.uint64) -> float:
    """A number in [0, 1) that depends on seed and counter alone."""
    return fraction(mix(seed + (counter + np.uint64(1)) * GOLDEN))


@njit(nogil=True, cache=True)
def _draw(drawn: Array, seed: np.uint64, homophily: float, cumulative: Array, bounds: Array, by_class: Array) -> None:
    """Fill ``drawn`` [2, E]; ``bounds`` are the classes' limits on the scale of ``cumulative``."""
    total, last = cumulative[-1], len(by_class) - 1
    for edge in range(drawn.shape[1]):
        counter = np.uint64(3 * edge)
        at = _uniform(seed, counter) * total
        drawn[0, edge] = by_class[min(np.searchsorted(cumulative, at, side="right") - 1, last)]
        low, high = 0.0, total
        if _uniform(seed, counter + np.uint64(1)) < homophily:
            own = np.searchsorted(bounds, at, side="right") - 1
            low, high = bounds[own], bounds[own + 1]
        at = low + _uniform(seed, counter + np.uint64(2)) * (high - low)
        drawn[1, edge] = by_class[min(np.searchsorted(cumulative, at, side="right") - 1, last)]


def _features(options: SyntheticOptions, y: Array, rng: np.random.Generator) -> Array:
    """Centre of the class plus noise, float32 [N, F]; centres are random unit-length directions times two."""
    centres = rng.standard_normal((options.num_classes, options.num_features), dtype=np.float32)
    centres *= 2.0 / np.linalg.norm(centres, axis=1, keepdims=True)
    x = np.empty((options.num_nodes, options.num_features), np.float32)
    for start in range(0, len(x), _ROWS_AT_ONCE):
        rows = x[start : start + _ROWS_AT_ONCE]
        rng.standard_normal(out=rows, dtype=np.float32)
        rows *= np.float32(options.noise)
        rows += centres[y[start : start + _ROWS_AT_ONCE]]
    return x


def _splits(options: SyntheticOptions, rng: np.random.Generator) -> dict[str, npt.NDArray[np.int64]]:
    shuffled = rng.permutation(options.num_nodes)
    splits, start = {}, 0
    for name in ("train", "val", "test"):
        asked = getattr(options, name)
        size = int(asked if asked >= 1 else asked * options.num_nodes)
        splits[name] = np.sort(shuffled[start : start + size])
        start += size
    if min(options.train, options.val, options.test) < 0 or start > options.num_nodes:
        raise DataError(
            f"dataset synthetic: train={options.train}, val={options.val}, test={options.test} "
            f"do not fit {options.num_nodes} nodes"
        )
    return splits
