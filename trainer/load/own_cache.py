"""``Graph.cache_rows``: rows of other hosts kept here, for scripts of one's own."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from trainer.errors import SettingsError
from trainer.load.asked import wire_bytes
from trainer.load.expected import Prediction
from trainer.load.hot import BatchPlan
from trainer.load.keep import Processes, keep_hot_rows
from trainer.load.open import Graph
from trainer.load.seeds import OTHER_STREAM, STREAMS, SeedOrder, shares
from trainer.reach import CacheSize
from trainer.sample.multi_hop import check_settings
from trainer.sample.routing import DistGraph
from trainer.sample.sampler import SubgraphSampler
from trainer.sample.subgraph import SampleSettings, SeedSet
from trainer.sample.types import RowRequest
from trainer.schema import AnyType, EdgeType, NodeType

_EDGE_IDS = 12  #: bytes of an edge's global id, as int32, and original id


def cache_rows(
    graph: Graph, fanouts: Sequence[int] | Mapping[EdgeType, Sequence[int]], split: str, batch_size: int, size: str,
    node_type: NodeType | None, replace: bool, attrs: Mapping[NodeType, Sequence[str]] | None,
) -> Prediction | None:  # fmt: skip
    """See ``Graph.cache_rows``."""
    plan = _plan(graph, fanouts, split, batch_size, node_type, replace, attrs)
    limit, together = CacheSize.parse(size), Processes.now(graph.ranks)
    if together.size != graph.layout.world_size:
        raise SettingsError(
            f"cache_rows: the graph is read by {graph.layout.world_size} ranks, but torch.distributed has"
            f" {together.size}; call torch.distributed.init_process_group before trainer.open"
        )
    folder = Path(os.environ.get("GNNFLEET_RUN_DIR") or tempfile.gettempdir())
    node = f"{graph.ranks.node_rank} {graph.ranks.host}"
    kept = keep_hot_rows(graph.access, graph.store, plan, graph.layout, node, limit, folder, together)
    return None if kept is None else kept.prediction


def _plan(
    graph: Graph, fanouts: Sequence[int] | Mapping[EdgeType, Sequence[int]], split: str, batch_size: int,
    node_type: NodeType | None, replace: bool, attrs: Mapping[NodeType, Sequence[str]] | None,
) -> BatchPlan:  # fmt: skip
    given = fanouts if isinstance(fanouts, Mapping) else dict.fromkeys(graph.manifest.edges, fanouts)
    hops = {of: tuple(values) for of, values in given.items()}
    check_settings(graph.manifest, SampleSettings(hops, replace=replace))
    nodes, target = graph.manifest.nodes, node_type or _only_type_with(graph, split)
    seeds = graph.store.seeds(target, split)
    order = SeedOrder(len(seeds), batch_size * graph.layout.world_size, 0, stream=STREAMS.get(split, OTHER_STREAM))
    chosen = {of: tuple(spec.attrs) if attrs is None else tuple(attrs.get(of, ())) for of, spec in nodes.items()}
    columns = {of: ("orig_id", *names) for of, names in chosen.items()}
    edges = {of: _edge_bytes(graph, of) for of in hops}
    plan = BatchPlan(target, seeds, order, hops, columns, edge_bytes=edges, replace=replace, again=False)
    attrs_of: dict[AnyType, tuple[str, ...]] = {of: tuple(names) for of, names in chosen.items()}
    attrs_of |= {of: tuple(graph.manifest.edges[of].attrs) for of in hops}
    settings = SampleSettings(hops, replace=replace, edge_ids=any(edges.values()), ask_again=False)
    return dataclasses.replace(plan, coming=lambda: _coming(graph, plan, settings, attrs_of))


def _coming(
    graph: Graph, plan: BatchPlan, settings: SampleSettings, attrs: Mapping[AnyType, tuple[str, ...]]
) -> Iterator[list[RowRequest]]:
    """What batches like those of the loader gather; its own seeds are not known."""
    assert isinstance(graph.access, DistGraph)
    sampler, book = SubgraphSampler(graph.access, graph.manifest, settings, attrs), graph.store.books[plan.target]
    part_of = lambda positions: book.part_of(plan.seeds[positions])  # noqa: E731
    for share in shares(plan.order, part_of, graph.ranks.rank, graph.layout, 1):
        yield sampler.requests(SeedSet({plan.target: plan.seeds[share.positions]}), share.key)


def _edge_bytes(graph: Graph, of: EdgeType) -> int:
    """What other hosts are asked of an edge: with replicated topology only attributes of several dimensions."""
    store, wire_rows = graph.store, graph.access.wire_rows if isinstance(graph.access, DistGraph) else "stored"
    wide = {name: len(spec.shape) > 1 for name, spec in graph.manifest.edges[of].attrs.items()}
    light = 0 if store.whole_topology else _EDGE_IDS
    asked = [name for name in wide if wide[name] or not store.whole_topology]
    return light + sum(wire_bytes(store, of, name, wire_rows) for name in asked)


def _only_type_with(graph: Graph, split: str) -> NodeType:
    types = sorted(of for of, name in graph.store.splits if name == split)
    if len(types) == 1:
        return types[0]
    known = sorted({name for _, name in graph.store.splits})
    raise SettingsError(
        f"cache_rows: node_type must be one of {types}, each has a split {split!r}" if types
        else f"cache_rows: no node type has a split {split!r}; there are {known}"
    )  # fmt: skip
