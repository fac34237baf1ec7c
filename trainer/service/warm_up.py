"""Compiles all Numba kernels that requests to a graph server can need, by running each once."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from trainer.core import rounding
from trainer.core.arrays import Array, Ids
from trainer.core.errors import DataError
from trainer.core.schema import AnyType, EdgeType
from trainer.sampler.dist_graph import DistGraph
from trainer.sampler.local_graph import LocalGraph
from trainer.sampler.replicas import PendingAnswer, ReadyAnswer
from trainer.sampler.requests import Gather, SampleHops
from trainer.sampler.settings import row_spec
from trainer.sampler.subgraph_sampler import SubgraphSampler
from trainer.sampler.types import HopRequest, HopSample, RowRequest, SampleSettings, SeedSet, TimeBound
from trainer.store.manifest import LOOPLESS_DEGREE
from trainer.store.part_store import Part, PartStore
from trainer.wire.request import Request

_OTHER_NODE = 0  #: a node rank


def warm_up(graph: LocalGraph) -> None:
    """Compile the kernels for requests that need only the parts on this host."""
    manifest = graph.store.manifest
    types: list[AnyType] = [*manifest.nodes, *manifest.edges]
    specs = [(name, spec) for of in types for name, spec in manifest.attrs_of(of).items()]
    if any(rounding.rounds(name, spec.stored, spec.shape, "int8") for name, spec in specs):
        numbers = np.zeros((1, 2), np.float32)
        rounding.from_int8(*rounding.to_int8(numbers))
        rounding.to_float16(numbers)
    done: set[tuple[np.dtype[Any], ...]] = set()
    for part in graph.store.parts.values():
        first = {of: np.array([nodes.start]) for of, nodes in part.nodes.items() if nodes.num_nodes}
        rows = [
            RowRequest(of, ids, ("orig_id", "in_degree", LOOPLESS_DEGREE, *part.nodes[of].attrs))
            for of, ids in first.items()
        ]
        edges = {of: np.array([edges.start]) for of, edges in part.edges.items() if edges.num_edges}
        rows += [RowRequest(of, ids, ("orig_id", *part.edges[of].attrs)) for of, ids in edges.items()]
        graph.gather(rows)
        for edge_type in part.edges:
            if edge_type[2] in first:
                _warm_hops(graph, part, edge_type, first[edge_type[2]], done)


def _warm_hops(
    graph: LocalGraph, part: Part, edge_type: EdgeType, nodes: Ids, done: set[tuple[np.dtype[Any], ...]]
) -> None:
    whole = HopRequest(edge_type, nodes, -1, 1, 0, with_edge=True, trees=nodes)
    chosen = replace(whole, exclude=(nodes, nodes))
    graph.sample_hops([whole, replace(whole, fanout=1), replace(whole, fanout=1, replace=True), chosen])
    graph.has_edges(edge_type, nodes, nodes)
    graph.sample_hops([replace(whole, sources=nodes[:0])])
    edges, target = part.edges[edge_type], part.nodes[edge_type[2]]
    for name, spec in graph.store.manifest.edges[edge_type].attrs.items():
        kinds = edges.attrs[name].dtype, edges.indices.dtype, target.orig_id.dtype
        usual = spec.dtype in ("float16", "float32")  # compiled above
        if kinds in done or usual or len(spec.shape) != 1 or spec.dtype == "bfloat16" or spec.stored.kind not in "biuf":
            continue
        done.add(kinds)
        with suppress(DataError):  # the attribute is not valid as weights
            graph.sample_hops([replace(whole, fanout=1, weight=name)])
        if spec.stored.kind in "iu":
            graph.sample_hops([replace(whole, fanout=1, bound=TimeBound(nodes, name, "edge"))])


def warm_up_batches(graph: LocalGraph) -> None:
    """Compile the kernels for batches with nodes of other servers."""
    store = graph.store
    others = tuple(part for part in range(store.manifest.num_parts) if part not in store.parts)
    routed = DistGraph(graph, {_OTHER_NODE: _EmptyHost(store, others)} if others else {})
    hops = dict.fromkeys(store.manifest.edges, (2, 2))
    attrs: dict[AnyType, tuple[str, ...]] = {of: tuple(spec.attrs) for of, spec in store.manifest.nodes.items()}
    attrs |= {of: tuple(spec.attrs) for of, spec in store.manifest.edges.items()}
    plain = SampleSettings(hops, edge_ids=True)
    for settings in (plain, replace(plain, disjoint=True), replace(plain, induced=True)):
        sampler = SubgraphSampler(routed, store.manifest, settings, attrs)
        for of in store.manifest.nodes:
            begins = [store.books[of].range_of(part) for part in (*store.parts, *others[:1])]
            seeds = np.array([begin for begin, end in begins if begin < end], np.int64)
            found = sampler.sample(SeedSet({of: seeds}), 0).subgraph
            for edges in found.edges.values():
                edges.ends()


class _EmptyHost:
    """A substitute for another server: its nodes have no neighbours, and all its attributes are zeros."""

    name = "elsewhere"

    def __init__(self, store: PartStore, part_ids: Sequence[int]):
        self._store, self.part_ids = store, part_ids

    def greet(self) -> PendingAnswer[Any]:
        return ReadyAnswer(None)

    def submit(self, request: Request[Any]) -> PendingAnswer[Any]:
        if isinstance(request, Gather):
            rows: list[dict[str, Array]] = [{} for _ in request.requests]
            for one, columns in zip(request.requests, rows, strict=True):
                for name in one.attrs:
                    dtype, shape = row_spec(self._store, one.of, name)
                    columns[name] = np.zeros((len(one.ids), *shape), dtype)
            return ReadyAnswer(rows)
        assert isinstance(request, SampleHops)
        none = np.empty(0, np.int32)
        return ReadyAnswer([HopSample(np.zeros(len(of.nodes), np.int32), none, none) for of in request.requests])
