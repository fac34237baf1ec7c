"""Generates graphs with planted communities and skewed degrees (degree-corrected block model) from a seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from trainer.core.arrays import Array, Ids
from trainer.core.compiled import njit
from trainer.core.errors import DataError
from trainer.core.rng import GOLDEN, fraction, mix
from trainer.data.dataset import Dataset, EdgeData, NodeData
from trainer.data.edges import symmetric_adjacency
from trainer.data.options import SyntheticHeteroOptions, SyntheticOptions
from trainer.data.undirected import both_ways

_AnySynthetic = SyntheticOptions | SyntheticHeteroOptions

_TIMES = 1000  #: node times are drawn from 0 to _TIMES - 1

_AGAINST_TIME = 0.2  #: share of the edges from later to earlier nodes that are kept

_LATE = 0.25  #: share of the edges whose time is later than that of both ends

_INSIDE = 4.0  #: factor of the weights of edges within a class

_ROWS_AT_ONCE = 1 << 16


def _check_limits(dataset: str, options: _AnySynthetic, limits: Mapping[str, tuple[float, float]]) -> None:
    for name, (low, high) in limits.items():
        value = getattr(options, name)
        if not low <= value <= high:
            raise DataError(f"dataset {dataset}: option {name} must be from {low} to {high}, not {value}")


def _class_features(y: Array, options: _AnySynthetic, rng: np.random.Generator) -> Array:
    """Return features, float32 [N, F]: a random vector of norm 2 per class, plus normal noise per node."""
    centres = rng.standard_normal((options.num_classes, options.num_features), dtype=np.float32)
    centres *= 2.0 / np.linalg.norm(centres, axis=1, keepdims=True)
    x = np.empty((len(y), options.num_features), np.float32)
    for start in range(0, len(x), _ROWS_AT_ONCE):
        rows = x[start : start + _ROWS_AT_ONCE]
        rng.standard_normal(out=rows, dtype=np.float32)
        rows *= np.float32(options.noise)
        rows += centres[y[start : start + _ROWS_AT_ONCE]]
    return x


def _node_splits(dataset: str, options: _AnySynthetic, shuffled: Array, time: Array | None = None) -> dict[str, Ids]:
    """Return the node ids of splits train, val and test: consecutive slices of ``shuffled``, sorted.

    With ``time``, the nodes of train are earlier than those of val, and those of val earlier than those of test.
    """
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


def _mostly_forward(first: Array, second: Array, rng: np.random.Generator) -> Array:
    """Return a mask of the edges to keep, bool [E]: all edges with ``first <= second``, and a few random others.

    ``first`` and ``second``: times of the two ends of each edge, [E].
    """
    return (first <= second) | (rng.random(len(first)) < _AGAINST_TIME)


def _edge_times(one: Array, other: Array, rng: np.random.Generator) -> Array:
    """Draw a time for each edge, int64 [E]: the larger of ``one`` and ``other``, plus a delay for some edges.

    ``one`` and ``other``: times of the two ends of each edge, [E].
    """
    late = (rng.random(len(one)) < _LATE) * rng.integers(_TIMES // 10, size=len(one))
    return np.maximum(one, other) + late


def _edge_weights(inside: Array, rng: np.random.Generator) -> Array:
    """Draw positive edge weights, float32 [E], lognormal, larger where ``inside`` (bool [E]: within a class)."""
    weights = rng.lognormal(0.0, 0.5, len(inside)) * np.where(inside, _INSIDE, 1.0)
    return weights.astype(np.float32)


_SHARE_OF_LARGEST = 0.02  #: a hub's expected degree is at most this share of the nodes


def make_synthetic(options: SyntheticOptions, fingerprint: str) -> Dataset:
    """Generate a simple undirected graph (both directions stored, sorted by source) with x, y and splits.

    The label of a node is its community. Degrees follow a power law; with probability ``homophily`` the target of an
    edge is drawn from the community of the source. With option ``time``, most edges whose source is later than
    their target are left out. Raises ``DataError`` for options out of range.
    """
    _check_limits("synthetic", options, {**_limits(options.num_nodes), "skew": (1.5, 1e6)})
    rng = np.random.default_rng(options.seed)
    y = rng.integers(options.num_classes, size=options.num_nodes, dtype=np.int64)
    edge_index = _edges(options, y, rng)
    attrs = {"x": _class_features(y, options, rng), "y": y}
    shuffled = rng.permutation(options.num_nodes)
    if options.time:  # drawn by a generator of its own, so that the rest of the graph is the same without times
        attrs["time"] = np.random.default_rng([options.seed, 1]).integers(_TIMES, size=options.num_nodes)
    splits = _node_splits("synthetic", options, shuffled, attrs.get("time"))
    nodes = NodeData(len(y), attrs, splits, options.num_classes)
    edge_attrs = {}
    if options.time:
        time, rng = attrs["time"], np.random.default_rng([options.seed, 2])
        edge_index = edge_index[:, _mostly_forward(time[edge_index[0]], time[edge_index[1]], rng)]
        edge_attrs["edge_time"] = _edge_times(time[edge_index[0]], time[edge_index[1]], rng)
    if options.edge_weight:
        # Both directions of an edge have the same weight.
        pairs = edge_index.min(axis=0).astype(np.int64) * len(y) + edge_index.max(axis=0)
        pairs, place = np.unique(pairs, return_inverse=True)
        rng = np.random.default_rng([options.seed, 3])
        edge_attrs["edge_weight"] = _edge_weights(y[pairs // len(y)] == y[pairs % len(y)], rng)[place]
    return Dataset.homogeneous("synthetic", nodes, EdgeData(edge_index, edge_attrs), fingerprint)


def _limits(num_nodes: int) -> dict[str, tuple[float, float]]:
    return {
        "num_nodes": (1, 2**31 - 1),
        "avg_degree": (0, max(1.0, num_nodes / 4)),
        "num_classes": (1, num_nodes),
        "num_features": (1, 2**20),
        "homophily": (0, 1),
        "noise": (0, 1e6),
        "seed": (0, 2**63 - 1),
    }


def _edges(options: SyntheticOptions, y: Array, rng: np.random.Generator) -> Array:
    by_class = np.argsort(y, kind="stable").astype(np.int32)
    expected = rng.random(options.num_nodes) ** (-1.0 / (options.skew - 1.0))
    expected *= options.avg_degree / expected.mean()
    expected = np.minimum(expected, max(_SHARE_OF_LARGEST * options.num_nodes, 1.0))
    cumulative = np.concatenate(([0.0], np.cumsum(expected[by_class])))
    class_starts = np.searchsorted(y[by_class], np.arange(options.num_classes + 1))
    drawn = np.empty((2, round(options.num_nodes * options.avg_degree / 2)), np.int32)
    _draw(drawn, np.uint64(rng.integers(2**63)), options.homophily, cumulative, cumulative[class_starts], by_class)
    indptr, neighbours = symmetric_adjacency(drawn, options.num_nodes)
    del drawn
    edge_index = np.empty((2, len(neighbours)), np.int32)
    edge_index[0] = np.repeat(np.arange(options.num_nodes, dtype=np.int32), np.diff(indptr))
    edge_index[1] = neighbours
    return edge_index


@njit()
def _uniform(seed: np.uint64, counter: np.uint64) -> float:
    return fraction(mix(seed + (counter + np.uint64(1)) * GOLDEN))


@njit()
def _draw(drawn: Array, seed: np.uint64, homophily: float, cumulative: Array, bounds: Array, by_class: Array) -> None:
    """Draw edges and write their sources and targets to ``drawn`` [2, E].

    ``by_class``: nodes sorted by class; ``cumulative``: running sum of the expected degrees of these nodes; ``bounds``:
    values of ``cumulative`` where classes begin and end.
    """
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


_AUTHORS, _FIELDS = 2, 20  #: papers per author, per field

_AUTHORS_OF_A_PAPER, _FIELDS_OF_A_PAPER = 3, 2


@dataclass(frozen=True)
class _DrawnLinks:
    papers: Array  #: int64 [E]
    others: Array  #: int64 [E], the other ends
    hit: Array  #: bool [E], whether the other end has the class that the relation points to


def make_synthetic_hetero(options: SyntheticHeteroOptions, fingerprint: str) -> Dataset:
    """Generate a heterogeneous graph of papers (with x, y and splits), authors and fields.

    ``author writes paper``, ``paper cites paper`` and ``paper about field`` connect nodes of one class with probability
    ``homophily``; ``paper disputes paper`` connects class c to class c + 1. With times, a paper mostly cites and
    disputes earlier papers. Raises ``DataError`` for options out of range.
    """
    _check_limits("synthetic-hetero", options, _limits(options.num_nodes))
    rng = np.random.default_rng(options.seed)
    counts = {
        "paper": options.num_nodes,
        "author": -(-options.num_nodes // _AUTHORS),
        "field": -(-options.num_nodes // _FIELDS),
    }
    classes = {of: rng.integers(options.num_classes, size=count) for of, count in counts.items()}
    features = {of: _class_features(y, options, rng) for of, y in classes.items()}
    time = rng.integers(_TIMES, size=options.num_nodes)
    papers = {"x": features["paper"], "y": classes["paper"]} | ({"time": time} if options.time else {})
    shuffled = rng.permutation(options.num_nodes)
    splits = _node_splits("synthetic-hetero", options, shuffled, time if options.time else None)
    nodes = {"paper": NodeData(options.num_nodes, papers, splits, options.num_classes)}
    for of in ("author", "field"):
        nodes[of] = NodeData(counts[of], {"x": features[of]} if options.all_features else {})

    # Edges of each relation, their weights and times.
    y = classes["paper"]
    degrees = {
        ("author", "writes", "paper"): (y, _AUTHORS_OF_A_PAPER),
        ("paper", "cites", "paper"): (y, options.avg_degree),
        ("paper", "disputes", "paper"): ((y + 1) % options.num_classes, options.avg_degree),
        ("paper", "about", "field"): (y, _FIELDS_OF_A_PAPER),
    }
    edges = {}
    for edge_type, (wanted, degree) in degrees.items():
        source, _, target = edge_type
        other = source if source != "paper" else target
        links = _draw_links(wanted, classes[other], degree, options.homophily, rng)
        if other == "paper":
            keep = links.papers != links.others
            if options.time:
                keep &= _mostly_forward(time[links.others], time[links.papers], rng)
            links = _DrawnLinks(links.papers[keep], links.others[keep], links.hit[keep])
        ends = (links.others, links.papers) if source == other != "paper" else (links.papers, links.others)
        attrs = {}
        if options.edge_weight:
            attrs["edge_weight"] = _edge_weights(links.hit, rng)
        if options.time:
            own = time[links.papers]
            attrs["edge_time"] = _edge_times(own, time[links.others] if other == "paper" else own, rng)
        edges[edge_type] = EdgeData(np.stack(ends), attrs)
    if options.undirected:
        edges = both_ways(edges, counts, True, "dataset synthetic-hetero")
    return Dataset("synthetic-hetero", nodes, edges, fingerprint, hetero=True)


def _draw_links(
    wanted: Array, classes: Array, degree: float, homophily: float, rng: np.random.Generator
) -> _DrawnLinks:
    """Draw on average ``degree`` nodes of one type for each paper, and drop duplicates.

    With probability ``homophily`` a node is drawn from class ``wanted[paper]``, else from all classes. ``classes``: the
    class of each node that can be drawn.
    """
    papers = np.repeat(np.arange(len(wanted)), rng.poisson(degree, len(wanted)))
    by_class = np.argsort(classes, kind="stable")
    bounds = np.searchsorted(classes[by_class], [wanted[papers], wanted[papers] + 1])
    anywhere = (rng.random(len(papers)) >= homophily) | (bounds[0] == bounds[1])
    low, high = np.where(anywhere, [[0], [len(classes)]], bounds)
    others = by_class[low + (rng.random(len(papers)) * (high - low)).astype(np.int64)]
    pairs = np.unique(papers * len(classes) + others)
    papers, others = pairs // len(classes), pairs % len(classes)
    return _DrawnLinks(papers, others, classes[others] == wanted[papers])
