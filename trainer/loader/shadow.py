"""ShaDow: batches are the subgraphs induced by the sampled neighbourhood of each seed.

Zeng et al., "Decoupling the Depth and Scope of Graph Neural Networks", NeurIPS 2021.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from dataclasses import replace as changed
from typing import Any

import numpy as np
import torch
from torch_geometric.data import Batch
from torch_geometric.sampler import SamplerOutput

from trainer.core.arrays import Array, Ids
from trainer.core.compiled import njit
from trainer.core.schema import HOMO_EDGE, HOMO_NODE
from trainer.graph.in_memory import as_graph
from trainer.graph.open import Graph
from trainer.graph.prefetch import Sampler
from trainer.graph.seed_order import OTHER_STREAM, STREAMS, RankLayout, SeedShare
from trainer.loader.arguments import (
    AttrNames,
    OutputOptions,
    check_homogeneous,
    induced_settings,
    load_options,
    sample_settings,
    wanted_attrs,
    whole_number,
)
from trainer.loader.node_seeds import node_inputs, split_name
from trainer.loader.pyg_batch import Attrs, Output
from trainer.loader.pyg_loader import BatchSeeds, PyGLoader
from trainer.sampler.subgraph_sampler import SampledBatch
from trainer.sampler.types import NodeSet, Positions, SampledSubgraph, SampleSettings, SeedSet


def _int64(values: Array) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int64, copy=False))


@dataclass(frozen=True)
class _Neighbourhoods(SampledSubgraph):
    #: int32 [m] position of a node in the union; the first entries are the roots
    member: Positions = field(kw_only=True)
    root: Positions = field(kw_only=True)  #: int32 [m] index of the root whose neighbourhood has the member


class _NeighbourhoodSampler:
    """Samples the nodes around each root, then requests edges and attributes once for each distinct node."""

    def __init__(self, graph: Graph, settings: SampleSettings, attrs: Attrs):
        self._draw = graph.sampler(settings, {})
        self._join = graph.sampler(induced_settings(graph.manifest), attrs)

    def subgraph(self, seeds: SeedSet, key: int) -> _Neighbourhoods:
        drawn, distinct, member = self._drawn(seeds, key)
        return _joined(drawn, member, self._join.subgraph(distinct, key))

    def sample(self, seeds: SeedSet, key: int) -> SampledBatch:
        drawn, distinct, member = self._drawn(seeds, key)
        sampled = self._join.sample(distinct, key)
        return changed(sampled, subgraph=_joined(drawn, member, sampled.subgraph))

    def _drawn(self, seeds: SeedSet, key: int) -> tuple[NodeSet, SeedSet, Positions]:
        """Sample the nodes around each seed. ``key``: random key of the batch.

        Returns (nodes, distinct, member). ``nodes``: the nodes of all trees, seeds first. ``distinct``: the same nodes
        without duplicates. ``member``: index in ``distinct`` of each of ``nodes``.
        """
        drawn = self._draw.subgraph(seeds, key).nodes[HOMO_NODE]
        distinct, member = np.unique(drawn.ids, return_inverse=True)
        return drawn, SeedSet({HOMO_NODE: distinct}), member.astype(np.int32)


def _joined(drawn: NodeSet, member: Positions, union: SampledSubgraph) -> _Neighbourhoods:
    assert drawn.tree is not None
    return _Neighbourhoods(union.num_hops, union.nodes, union.edges, True, member=member, root=drawn.tree)


class DistShaDowKHopSampler(PyGLoader):
    """Yield one subgraph per root, as torch_geometric's ``ShaDowKHopSampler`` on a partitioned graph.

    Batches are torch_geometric's ``Batch``: one disjoint subgraph per root, with all edges between its nodes. The nodes
    of a subgraph are sorted by id. Every rank passes the same arguments, including all roots; the loader splits global
    batches over the ranks as ``DistNeighborLoader`` does. Subgraphs do not depend on the number of ranks.

    Args:
        data: An opened homogeneous graph (``gnnfleet.open``), or ``Data`` or stores in memory.
        depth: Number of hops from the root.
        num_neighbors: Number of neighbours drawn for each node in each hop; -1 takes all.
        node_idx: Roots: None (all nodes), ids, a boolean mask, or the name of a split.
        replace: Draw neighbours with replacement. If a node has at most ``num_neighbors`` neighbours, torch_geometric
            takes all of them; this class draws with replacement from these, too.
        transform: Function called with each batch; its result is yielded instead.
        attrs: Names of the attributes that batches have, or a mapping of types to names. Default: all.
        seed: Random seed of the order and of all draws; the same on every rank. Default: 0.
        threads: Number of sampler threads. Default: ``num_workers``, at least 1.
        prefetch: Number of batches to make ahead. Default: ``prefetch_factor`` (3) per thread.
        deadline: Seconds that one request to another host may take.
        rank: Rank of this process in ``layout``. Default: the rank of the process group.
        layout: For each part, the ranks on hosts that store it. Default: taken from the cluster file and the process
            group.
        **kwargs: Arguments of torch's ``DataLoader``: ``batch_size`` (per rank), ``shuffle``, ``drop_last``,
            ``pin_memory``, ``num_workers`` (sampler threads), ``prefetch_factor``, ``worker_init_fn``, ``timeout``
            (replaces ``deadline``), ``generator`` (gives the seed). ``local=True`` makes a loader of this process
            alone: it yields all roots, and other ranks need not iterate it.

    Shapes:
        - ``n_id``: int64 ``[nodes]``, original ids, subgraph after subgraph
        - ``batch``: int64 ``[nodes]``, subgraph of each node; ``ptr``: int64 ``[roots + 1]``
        - ``root_n_id``: int64 ``[roots]``, positions of the roots in ``n_id``
        - ``y``: ``[roots, ...]``, labels of the roots only; other node attributes ``[nodes, ...]``
        - ``edge_index``: int64 ``[2, edges]``; ``e_id``: int64 ``[edges]``

    Raises:
        SettingsError: Arguments contradict each other or do not fit the graph, or the graph is heterogeneous.
        ServiceError: Another host fails, while making the loader or iterating it.

    Example:
        ```python
        import gnnfleet as gf

        graph = gf.open("parts")
        loader = gf.DistShaDowKHopSampler(graph, depth=2, num_neighbors=5, node_idx="train", batch_size=64)
        for batch in loader:
            roots = batch.n_id[batch.root_n_id]
        ```
    """

    def __init__(
        self, data: Any, depth: int, num_neighbors: int, node_idx: Any = None, replace: bool = False, *,
        transform: Callable[[Any], Any] | None = None, attrs: AttrNames | None = None, seed: int | None = None,
        threads: int | None = None, prefetch: int | None = None, deadline: float = 120.0, rank: int | None = None,
        layout: RankLayout | None = None, **kwargs: Any,
    ):  # fmt: skip
        fanouts = [whole_number("num_neighbors", num_neighbors, -1)] * whole_number("depth", depth, 1)
        options = load_options(kwargs, seed=seed, threads=threads, prefetch=prefetch, deadline=deadline)
        graph = as_graph(data)
        check_homogeneous(graph, "ShaDow")
        settings = changed(sample_settings(graph, fanouts, replace=replace, disjoint=True), edge_ids=False)
        inputs = node_inputs(graph, node_idx)
        (self.roots,) = inputs.of.values()
        super().__init__(
            graph, len(inputs), inputs.digest(), settings, wanted_attrs(graph, attrs), options,
            OutputOptions("induced", transform, custom_cls=Batch),
            stream=STREAMS.get(split_name(node_idx) or "", OTHER_STREAM), rank=rank, layout=layout,
        )  # fmt: skip
        if 0 < len(inputs) < self.layout.world_size:
            warnings.warn(
                f"{len(inputs)} roots for {self.layout.world_size} ranks: some batches have no root; start fewer ranks",
                stacklevel=2,
            )

    def make_sampler(self, attrs: Attrs) -> Sampler:
        return _NeighbourhoodSampler(self.graph, self.settings, attrs)

    @property
    def num_requests(self) -> int:
        return self.settings.num_hops + 3

    def part_of(self, positions: Ids) -> Ids:
        return self.graph.store.books[HOMO_NODE].part_of(self.roots.nodes[positions])

    def seeds(self, share: SeedShare) -> BatchSeeds:
        roots = self.roots.nodes[share.positions]
        return BatchSeeds(SeedSet({HOMO_NODE: roots}, {HOMO_NODE: share.places}), None)

    def output(self, sampled: SampledBatch, seeded: BatchSeeds) -> Output:
        """Return the neighbourhoods as one graph, concatenated in the order of the seeds.

        In each neighbourhood, nodes are sorted by id and edges by source, then target.
        """
        found = sampled.subgraph
        assert isinstance(found, _Neighbourhoods)
        ids, edges = sampled.rows[HOMO_NODE]["orig_id"], found.edges[HOMO_EDGE]
        order = np.lexsort((ids[found.member], found.root))
        member, root = found.member[order], found.root[order]
        ptr = np.searchsorted(root, np.arange(len(seeded.seeds.nodes[HOMO_NODE]) + 1))
        row, col, slot = _edges_within(edges.row_begin, edges.row_count, edges.src, member, ptr, len(ids))
        by_source = np.lexsort((col, row))
        row, col, slot = row[by_source], col[by_source], slot[by_source]
        root_n_id = np.empty(len(ptr) - 1, np.int64)
        first = np.flatnonzero(order < len(root_n_id))  # the roots are the first members
        root_n_id[root[first]] = first
        return SamplerOutput(
            _int64(ids[member]), _int64(row), _int64(col),
            _int64(sampled.rows[HOMO_EDGE]["orig_id"][slot]), _int64(root),
            metadata=(_int64(ptr), _int64(root_n_id)),
        )  # fmt: skip

    def annotate(self, data: Any, out: Output) -> None:
        data.ptr, data.root_n_id = out.metadata
        if "y" in data and torch.is_tensor(data.y) and data.y.dim() and len(data.y) == len(out.node):
            data.y = data.y[data.root_n_id]

    def _joined(self, seeded: BatchSeeds, sampled: SampledBatch) -> Any:
        data = super()._joined(seeded, sampled)
        if isinstance(data, Batch):
            return data
        batch = Batch()  # batches of data in memory have the class of the data
        for name, value in data:
            batch[name] = value
        return batch


def _edges_within(
    row_begin: Ids, row_count: Positions, src: Positions, member: Positions, ptr: Ids, num_nodes: int
) -> tuple[Ids, Ids, Ids]:
    """Return the edges inside each group of nodes: (sources, targets, edges), int64 [e] each, grouped by target.

    ``row_begin``, ``row_count`` and ``src``: edges of a graph with ``num_nodes`` nodes, grouped by target. Group r is
    ``member[ptr[r]:ptr[r + 1]]``. In the result, sources and targets are indices into ``member``, edges are indices
    into ``src``.
    """
    at = np.full(num_nodes, -1, np.int64)
    found = np.empty((3, _visit(row_begin, row_count, src, member, ptr, at, np.empty((3, 0), np.int64))), np.int64)
    _visit(row_begin, row_count, src, member, ptr, at, found)
    return found[0], found[1], found[2]


@njit()
def _visit(row_begin: Any, row_count: Any, src: Any, member: Any, ptr: Any, at: Any, found: Any) -> int:
    """Return the number of edges inside the groups, and write the edges to ``found`` [3, e] unless it is empty.

    ``at`` [num_nodes]: a work array, all -1 before and after the call. Other arguments: as in ``_edges_within``.
    """
    count, fill = 0, found.shape[1] > 0
    for group in range(len(ptr) - 1):
        for place in range(ptr[group], ptr[group + 1]):
            at[member[place]] = place
        for place in range(ptr[group], ptr[group + 1]):
            begin = row_begin[member[place]]
            for slot in range(begin, begin + row_count[member[place]]):
                source = at[src[slot]]
                if source >= 0:
                    if fill:
                        found[0, count], found[1, count], found[2, count] = source, place, slot
                    count += 1
        for place in range(ptr[group], ptr[group + 1]):
            at[member[place]] = -1
    return count
