"""Planted communities with skewed degrees: a degree-corrected block model, any size, seeded."""

from __future__ import annotations

import numpy as np

from trainer.core.arrays import Array
from trainer.core.compiled import njit
from trainer.core.rng import GOLDEN, fraction, mix
from trainer.data.dataset import Dataset, EdgeData, NodeData
from trainer.data.edges import symmetric_adjacency
from trainer.data.options import SyntheticOptions
from trainer.data.planted import (
    check_limits,
    class_features,
    edge_times,
    edge_weights,
    mostly_forward,
    node_splits,
    node_times,
)

_SHARE_OF_LARGEST = 0.02  #: a hub's expected degree is at most this share of the nodes


def make_synthetic(options: SyntheticOptions, fingerprint: str) -> Dataset:
    """A simple undirected graph (both directions stored, sorted by source) with x, y and splits.

    Labels are the communities. An edge's source is drawn in proportion to power-law weights, its
    target likewise, inside the source's community with probability ``homophily``. Self loops and
    duplicates are dropped, after drawing a few edges more to make up for them.
    With times most edges that lead from a later to an earlier node are left out.
    Raises ``DataError`` for options out of range.
    """
    _check(options)
    rng = np.random.default_rng(options.seed)
    y = rng.integers(options.num_classes, size=options.num_nodes, dtype=np.int64)
    edge_index = _edges(options, y, rng)
    attrs = {"x": class_features(y, options, rng), "y": y}
    shuffled = rng.permutation(options.num_nodes)
    if options.time:  # drawn apart from the rest, which stays what it is without times
        attrs["time"] = node_times(options.num_nodes, np.random.default_rng([options.seed, 1]))
    splits = node_splits("synthetic", options, shuffled, attrs.get("time"))
    edges = _edge_data(options, edge_index, y, attrs.get("time"))
    return Dataset.homogeneous("synthetic", NodeData(len(y), attrs, splits, options.num_classes), edges, fingerprint)


def _edge_data(options: SyntheticOptions, edge_index: Array, y: Array, time: Array | None) -> EdgeData:
    attrs = {}
    if time is not None:
        rng = np.random.default_rng([options.seed, 2])
        edge_index = edge_index[:, mostly_forward(time[edge_index[0]], time[edge_index[1]], rng)]
        attrs["edge_time"] = edge_times(time[edge_index[0]], time[edge_index[1]], rng)
    if options.edge_weight:
        attrs["edge_weight"] = _equal_both_ways(edge_index, y, np.random.default_rng([options.seed, 3]))
    return EdgeData(edge_index, attrs)


def _equal_both_ways(edge_index: Array, y: Array, rng: np.random.Generator) -> Array:
    """Weights that are the same for both directions of an edge."""
    pairs = edge_index.min(axis=0).astype(np.int64) * len(y) + edge_index.max(axis=0)
    pairs, place = np.unique(pairs, return_inverse=True)
    return edge_weights(y[pairs // len(y)] == y[pairs % len(y)], rng)[place]


def _check(options: SyntheticOptions) -> None:
    check_limits(
        "synthetic",
        options,
        {
            "num_nodes": (1, 2**31 - 1),
            "avg_degree": (0, max(1.0, options.num_nodes / 4)),
            "num_classes": (1, options.num_nodes),
            "num_features": (1, 2**20),
            "homophily": (0, 1),
            "skew": (1.5, 1e6),
            "noise": (0, 1e6),
            "seed": (0, 2**63 - 1),
        },
    )


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


@njit()
def _uniform(seed: np.uint64, counter: np.uint64) -> float:
    """A number in [0, 1) that depends on seed and counter alone."""
    return fraction(mix(seed + (counter + np.uint64(1)) * GOLDEN))


@njit()
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
