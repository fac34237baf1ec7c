"""ShaDow: for every root its own small neighbourhood, with all edges inside it.

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

from trainer.core.arrays import Ids
from trainer.core.compiled import njit
from trainer.core.schema import HOMO_EDGE, HOMO_NODE
from trainer.loader.arguments import AttrNames, OutputOptions, load_options, sample_settings, wanted_attrs, whole_number
from trainer.loader.in_memory import as_graph
from trainer.loader.induced import check_homogeneous, induced_settings, tensor_of
from trainer.loader.join import Attrs
from trainer.loader.node_seeds import node_inputs, split_name
from trainer.loader.open import Graph
from trainer.loader.pyg_batch import Output
from trainer.loader.pyg_loader import PyGLoader, Seeded
from trainer.loader.samplers import Sampler
from trainer.loader.seed_order import OTHER_STREAM, STREAMS, RankLayout, Share
from trainer.sampler.subgraph import NodeSet, Positions, SampledSubgraph, SampleSettings, SeedSet
from trainer.sampler.subgraph_sampler import Sampled


@dataclass(frozen=True)
class Neighbourhoods(SampledSubgraph):
    """Several roots' neighbourhoods as one subgraph: every node once, with all edges between; and who has which."""

    member: Positions = field(kw_only=True)  #: int32 [m] position of a node in the subgraph; the roots' own come first
    root: Positions = field(kw_only=True)  #: int32 [m] the root that has it


class NeighbourhoodSampler:
    """Draws by disjoint sampling, then asks for edges and rows of a node once, however many roots have it."""

    def __init__(self, graph: Graph, settings: SampleSettings, attrs: Attrs):
        self._draw = graph.sampler(settings, {})
        self._join = graph.sampler(induced_settings(graph.manifest), attrs)

    def subgraph(self, seeds: SeedSet, key: int) -> Neighbourhoods:
        """The neighbourhoods without rows."""
        drawn, distinct, member = self._drawn(seeds, key)
        return _joined(drawn, member, self._join.subgraph(distinct, key))

    def sample(self, seeds: SeedSet, key: int) -> Sampled:
        """The neighbourhoods, and rows of their distinct nodes and edges."""
        drawn, distinct, member = self._drawn(seeds, key)
        sampled = self._join.sample(distinct, key)
        return changed(sampled, subgraph=_joined(drawn, member, sampled.subgraph))

    def _drawn(self, seeds: SeedSet, key: int) -> tuple[NodeSet, SeedSet, Positions]:
        """The nodes drawn, the distinct ones among them, and each one's place among those."""
        drawn = self._draw.subgraph(seeds, key).nodes[HOMO_NODE]
        distinct, member = np.unique(drawn.ids, return_inverse=True)
        return drawn, SeedSet({HOMO_NODE: distinct}), member.astype(np.int32)


def _joined(drawn: NodeSet, member: Positions, union: SampledSubgraph) -> Neighbourhoods:
    assert drawn.tree is not None
    return Neighbourhoods(union.num_hops, union.nodes, union.edges, True, member=member, root=drawn.tree)


class DistShaDowKHopSampler(PyGLoader):
    """torch_geometric's ``ShaDowKHopSampler`` on a partitioned graph: a subgraph for each root.

    Every rank passes the same arguments, all roots included; each global batch is shared out as
    ``DistNeighborLoader`` does it. What a root gets depends on its place in the global batch, not on ranks.

    Args:
        data: an opened graph (``trainer.open``), or ``Data`` or stores in memory; homogeneous.
        depth: hops from the root.
        num_neighbors: neighbours drawn for each node in each hop; -1 takes all.
        node_idx: the roots: None (all nodes), ids, a boolean mask, or the name of a split.
        replace: draw with replacement, also from nodes with few neighbours (torch_geometric's takes those whole).
        batch_size, shuffle and other arguments of torch's ``DataLoader``; transform, attrs, seed, threads,
            prefetch, deadline, rank, layout: as in ``DistNeighborLoader``.

    Batches are torch_geometric's ``Batch`` of one subgraph per root, disjoint, each with its nodes by id and
    all edges between them: ``batch`` and ``ptr`` say which nodes are whose, ``root_n_id`` where the roots are;
    ``y`` is that of the roots, other node attributes are of all nodes. Also ``n_id`` and ``e_id``.
    Raises ``SettingsError`` for arguments that make no sense, ``ServiceError`` while iterating when
    another host fails.
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
                f"{len(inputs)} roots for {self.layout.world_size} ranks: some batches have none",
                stacklevel=2,
            )

    def make_sampler(self, attrs: Attrs) -> Sampler:
        return NeighbourhoodSampler(self.graph, self.settings, attrs)

    @property
    def num_requests(self) -> int:
        return self.settings.num_hops + 3

    def part_of(self, positions: Ids) -> Ids:
        return self.graph.store.books[HOMO_NODE].part_of(self.roots.nodes[positions])

    def seeds(self, share: Share) -> Seeded:
        roots = self.roots.nodes[share.positions]
        return Seeded(SeedSet({HOMO_NODE: roots}, {HOMO_NODE: share.places}), None)

    def output(self, sampled: Sampled, seeded: Seeded) -> Output:
        """The neighbourhoods one after the other, nodes by id, edges by target."""
        found = sampled.subgraph
        assert isinstance(found, Neighbourhoods)
        ids, edges = sampled.rows[HOMO_NODE]["orig_id"], found.edges[HOMO_EDGE]
        order = np.lexsort((ids[found.member], found.root))
        member, root = found.member[order], found.root[order]
        ptr = np.searchsorted(root, np.arange(len(seeded.seeds.nodes[HOMO_NODE]) + 1))
        row, col, slot = edges_within(edges.row_begin, edges.row_count, edges.src, member, ptr, len(ids))
        root_n_id = np.empty(len(ptr) - 1, np.int64)
        first = np.flatnonzero(order < len(root_n_id))  # the roots were found first
        root_n_id[root[first]] = first
        return SamplerOutput(
            tensor_of(ids[member]), tensor_of(row), tensor_of(col),
            tensor_of(sampled.rows[HOMO_EDGE]["orig_id"][slot]), tensor_of(root),
            metadata=(tensor_of(ptr), tensor_of(root_n_id)),
        )  # fmt: skip

    def annotate(self, data: Any, out: Output) -> None:
        data.ptr, data.root_n_id = out.metadata
        if "y" in data and torch.is_tensor(data.y) and data.y.dim() and len(data.y) == len(out.node):
            data.y = data.y[data.root_n_id]

    def _joined(self, made: Any) -> Any:
        data = super()._joined(made)
        if isinstance(data, Batch):
            return data
        batch = Batch()  # data in memory is joined as what it is
        for name, value in data:
            batch[name] = value
        return batch


def edges_within(
    row_begin: Ids, row_count: Positions, src: Positions, member: Positions, ptr: Ids, num_nodes: int
) -> tuple[Ids, Ids, Ids]:
    """The edges inside each group of nodes: (sources, targets, edges), int64 [e], grouped by target.

    row_begin, row_count, src: edges of the union by target. Group r is ``member[ptr[r]:ptr[r + 1]]``; sources
    and targets are places in ``member``, edges are places in ``src``.
    """
    at = np.full(num_nodes, -1, np.int64)
    found = np.empty((3, _visit(row_begin, row_count, src, member, ptr, at, np.empty((3, 0), np.int64))), np.int64)
    _visit(row_begin, row_count, src, member, ptr, at, found)
    return found[0], found[1], found[2]


@njit()
def _visit(row_begin: Any, row_count: Any, src: Any, member: Any, ptr: Any, at: Any, found: Any) -> int:
    """Count the edges, or fill ``found`` where it has room. ``at`` is all -1, before and after."""
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
