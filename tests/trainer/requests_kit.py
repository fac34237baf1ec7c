"""Test kit: hop requests with every combination of fields."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

from trainer.core.schema import HOMO_EDGE
from trainer.sampler.types import HopRequest, TimeBound

WRITES = ("author", "writes", "paper")
NODES = np.array([7, 0, 3, 7])
PLAIN = HopRequest(HOMO_EDGE, NODES, fanout=-1, shuffle=0, key=2**64 - 1)


def hops_of_every_kind(nodes=NODES, edge_type=WRITES, num_sources=9, top=40) -> list[HopRequest]:
    """Return one ``HopRequest`` per combination of options.

    top: times are at least -``top`` and less than ``top``.
    """
    rng = np.random.default_rng(len(nodes))
    trees, times = rng.integers(0, 5, len(nodes)), rng.integers(-top, top, len(nodes))
    pairs = nodes[rng.integers(0, len(nodes), 30)], rng.integers(0, num_sources, 30)
    bounds = [None, *(TimeBound(times, "time", on, last) for on in ("node", "edge") for last in (False, True))]
    choices = itertools.product(
        (-1, 3), (False, True), (False, True), (None, trees), bounds, (None, "weight"), (None, pairs),
        (None, np.unique(rng.integers(0, num_sources, num_sources))),
    )  # fmt: skip
    names = ("fanout", "replace", "with_edge", "trees", "bound", "weight", "exclude", "sources")
    base = dataclasses.replace(PLAIN, edge_type=edge_type, nodes=nodes, shuffle=2)
    return [dataclasses.replace(base, **dict(zip(names, choice, strict=True))) for choice in choices]
