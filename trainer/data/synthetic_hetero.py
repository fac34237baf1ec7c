"""A planted heterogeneous graph: papers to classify, their authors and fields, two kinds of citation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trainer.core.arrays import Array
from trainer.core.schema import EdgeType
from trainer.data.both_ways import both_ways
from trainer.data.dataset import Dataset, EdgeData, NodeData
from trainer.data.options import SyntheticHeteroOptions
from trainer.data.planted import (
    check_limits,
    class_features,
    edge_times,
    edge_weights,
    mostly_forward,
    node_splits,
    node_times,
)

_AUTHORS, _FIELDS = 2, 20  #: papers per author, per field

_AUTHORS_OF_A_PAPER, _FIELDS_OF_A_PAPER = 3, 2


@dataclass(frozen=True)
class _Links:
    """Drawn edges from papers to the nodes of one type."""

    papers: Array
    others: Array
    hit: Array  #: bool; the other end has the class that the relation points to


def make_synthetic_hetero(options: SyntheticHeteroOptions, fingerprint: str) -> Dataset:
    """Papers have x, y and splits; authors and fields have a class too, which nobody is told.

    ``author writes paper``, ``paper cites paper`` and ``paper about field`` join ends of one class with probability
    ``homophily``; ``paper disputes paper`` joins class c to class c + 1, so a model that does not tell the relations
    apart learns less. With times a paper cites and disputes mostly earlier ones.
    Raises ``DataError`` for options out of range.
    """
    _check(options)
    rng = np.random.default_rng(options.seed)
    counts = {
        "paper": options.num_nodes,
        "author": -(-options.num_nodes // _AUTHORS),
        "field": -(-options.num_nodes // _FIELDS),
    }
    classes = {of: rng.integers(options.num_classes, size=count) for of, count in counts.items()}
    features = {of: class_features(y, options, rng) for of, y in classes.items()}
    time = node_times(options.num_nodes, rng)
    papers = {"x": features["paper"], "y": classes["paper"]} | ({"time": time} if options.time else {})
    shuffled = rng.permutation(options.num_nodes)
    splits = node_splits("synthetic-hetero", options, shuffled, time if options.time else None)
    nodes = {"paper": NodeData(options.num_nodes, papers, splits, options.num_classes)}
    for of in ("author", "field"):
        nodes[of] = NodeData(counts[of], {"x": features[of]} if options.all_features else {})
    edges = _relations(options, classes, time, rng)
    if options.undirected:
        edges = both_ways(edges, counts, True, "dataset synthetic-hetero")
    return Dataset("synthetic-hetero", nodes, edges, fingerprint, hetero=True)


def _check(options: SyntheticHeteroOptions) -> None:
    check_limits(
        "synthetic-hetero",
        options,
        {
            "num_nodes": (1, 2**31 - 1),
            "avg_degree": (0, max(1.0, options.num_nodes / 4)),
            "num_classes": (1, options.num_nodes),
            "num_features": (1, 2**20),
            "homophily": (0, 1),
            "noise": (0, 1e6),
            "seed": (0, 2**63 - 1),
        },
    )


def _relations(
    options: SyntheticHeteroOptions, classes: dict[str, Array], time: Array, rng: np.random.Generator
) -> dict[EdgeType, EdgeData]:
    y = classes["paper"]
    degrees = {
        ("author", "writes", "paper"): (y, _AUTHORS_OF_A_PAPER),
        ("paper", "cites", "paper"): (y, options.avg_degree),
        ("paper", "disputes", "paper"): ((y + 1) % options.num_classes, options.avg_degree),
        ("paper", "about", "field"): (y, _FIELDS_OF_A_PAPER),
    }
    edges = {}
    for of, (wanted, degree) in degrees.items():
        other = of[0] if of[0] != "paper" else of[2]
        links = _draw(wanted, classes[other], degree, options.homophily, rng)
        if other == "paper":
            links = _among_papers(links, time if options.time else None, rng)
        ends = (links.others, links.papers) if of[0] == other != "paper" else (links.papers, links.others)
        edges[of] = EdgeData(np.stack(ends), _attrs(links, other, time, options, rng))
    return edges


def _draw(wanted: Array, classes: Array, degree: float, homophily: float, rng: np.random.Generator) -> _Links:
    """About ``degree`` different others for each paper, of its ``wanted`` class with chance ``homophily``, else any."""
    papers = np.repeat(np.arange(len(wanted)), rng.poisson(degree, len(wanted)))
    by_class = np.argsort(classes, kind="stable")
    bounds = np.searchsorted(classes[by_class], [wanted[papers], wanted[papers] + 1])
    anywhere = (rng.random(len(papers)) >= homophily) | (bounds[0] == bounds[1])
    low, high = np.where(anywhere, [[0], [len(classes)]], bounds)
    others = by_class[low + (rng.random(len(papers)) * (high - low)).astype(np.int64)]
    pairs = np.unique(papers * len(classes) + others)
    papers, others = pairs // len(classes), pairs % len(classes)
    return _Links(papers, others, classes[others] == wanted[papers])


def _among_papers(links: _Links, time: Array | None, rng: np.random.Generator) -> _Links:
    """No self loops; with times mostly references to earlier papers."""
    keep = links.papers != links.others
    if time is not None:
        keep &= mostly_forward(time[links.others], time[links.papers], rng)
    return _Links(links.papers[keep], links.others[keep], links.hit[keep])


def _attrs(
    links: _Links, other: str, time: Array, options: SyntheticHeteroOptions, rng: np.random.Generator
) -> dict[str, Array]:
    attrs = {}
    if options.edge_weight:
        attrs["edge_weight"] = edge_weights(links.hit, rng)
    if options.time:
        own = time[links.papers]
        attrs["edge_time"] = edge_times(own, time[links.others] if other == "paper" else own, rng)
    return attrs
