"""Loaders of induced subgraphs: ShaDow and Cluster-GCN.

Zeng et al., "Decoupling the Depth and Scope of Graph Neural Networks", NeurIPS 2021.

Chiang et al., "Cluster-GCN: An Efficient Algorithm for Training Deep and Large Graph Convolutional
Networks", KDD 2019.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from dataclasses import replace as changed
from typing import Any

import numpy as np
import torch
from torch_geometric.data import Batch
from torch_geometric.sampler import SamplerOutput

from trainer.core.arrays import Array, Ids
from trainer.core.compiled import njit
from trainer.core.errors import SettingsError
from trainer.core.schema import HOMO_EDGE, HOMO_NODE, NodeType
from trainer.data.dataset import Dataset, EdgeData, NodeData
from trainer.graph.in_memory import as_graph
from trainer.graph.open import Graph
from trainer.graph.prefetch import Sampler
from trainer.graph.seed_order import OTHER_STREAM, STREAMS, RankLayout, SeedShare, split_step
from trainer.loader.arguments import AttrNames, OutputOptions, load_options, sample_settings, wanted_attrs, whole_number
from trainer.loader.node_seeds import node_inputs, split_name
from trainer.loader.pyg_batch import Attrs, Output, sort_edges
from trainer.loader.pyg_loader import BatchSeeds, PyGLoader
from trainer.sampler.subgraph_sampler import SampledBatch
from trainer.sampler.types import GraphSchema, NodeSet, Positions, RowRequest, SampledSubgraph, SampleSettings, SeedSet


def induced_settings(schema: GraphSchema) -> SampleSettings:
    """Return settings for the subgraph induced by the seeds: no further nodes, all edges between the seeds."""
    return SampleSettings(dict.fromkeys(schema.edges, (0,)), induced=True, edge_ids=True, ask_again=False)


def check_homogeneous(graph: Graph, what: str) -> None:
    if graph.manifest.hetero:
        one_type = "HeteroData.to_homogeneous()" if graph.source is not None else "a partition of its to_homogeneous()"
        raise SettingsError(
            f"{what} takes homogeneous graphs only, as in torch_geometric, but the graph is heterogeneous;"
            f" pass {one_type}, or use DistNeighborLoader or DistClusterLoader"
        )


def tensor_of(values: Array) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int64, copy=False))


@dataclass(frozen=True)
class Neighbourhoods(SampledSubgraph):
    #: int32 [m] position of a node in the union; the first entries are the roots
    member: Positions = field(kw_only=True)
    root: Positions = field(kw_only=True)  #: int32 [m] index of the root whose neighbourhood has the member


class NeighbourhoodSampler:
    """Samples the nodes around each root, then requests edges and attributes once for each distinct node."""

    def __init__(self, graph: Graph, settings: SampleSettings, attrs: Attrs):
        self._draw = graph.sampler(settings, {})
        self._join = graph.sampler(induced_settings(graph.manifest), attrs)

    def subgraph(self, seeds: SeedSet, key: int) -> Neighbourhoods:
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


def _joined(drawn: NodeSet, member: Positions, union: SampledSubgraph) -> Neighbourhoods:
    assert drawn.tree is not None
    return Neighbourhoods(union.num_hops, union.nodes, union.edges, True, member=member, root=drawn.tree)


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
        return NeighbourhoodSampler(self.graph, self.settings, attrs)

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
        assert isinstance(found, Neighbourhoods)
        ids, edges = sampled.rows[HOMO_NODE]["orig_id"], found.edges[HOMO_EDGE]
        order = np.lexsort((ids[found.member], found.root))
        member, root = found.member[order], found.root[order]
        ptr = np.searchsorted(root, np.arange(len(seeded.seeds.nodes[HOMO_NODE]) + 1))
        row, col, slot = edges_within(edges.row_begin, edges.row_count, edges.src, member, ptr, len(ids))
        by_source = np.lexsort((col, row))
        row, col, slot = row[by_source], col[by_source], slot[by_source]
        root_n_id = np.empty(len(ptr) - 1, np.int64)
        first = np.flatnonzero(order < len(root_n_id))  # the roots are the first members
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
        batch = Batch()  # batches of data in memory have the class of the data
        for name, value in data:
            batch[name] = value
        return batch


def edges_within(
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

    ``at`` [num_nodes]: a work array, all -1 before and after the call. Other arguments: as in ``edges_within``.
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


CLUSTER = "cluster"  #: node attribute that ``partition make --clusters`` writes

_NODES_AT_ONCE = 1 << 22  #: nodes per request for their clusters


class DistClusterLoader(PyGLoader):
    """Yield the subgraphs of several clusters, as torch_geometric's ``ClusterData`` and ``ClusterLoader`` together.

    The ranks together yield every cluster once per epoch. All ranks get about the same number of clusters, and exactly
    the same number of batches. Where possible, a rank gets clusters of parts on its host. A last step with fewer
    clusters than ranks is merged into the previous step.

    A batch has all nodes of its clusters and all edges between these nodes. Nodes are grouped by cluster and sorted by
    id within a cluster. ``loader(index)`` returns a batch of the clusters at the given positions; clusters without
    nodes have no position. Memory: 8 bytes per node.

    Args:
        data: An opened graph (``gnnfleet.open``), or ``Data``, ``HeteroData`` or stores in memory.
        num_clusters: Number of clusters that METIS makes of a graph in memory. Must be None for a partition: its
            clusters are those of ``partition make --clusters K``, or its parts if it has no clusters.
        sparse_format: Order of the edges: ``"csr"`` by source, then target; ``"csc"`` by target, then source.
        keep_inter_cluster_edges: Not supported; must be False. The other ends of these edges are not in the batch.
        transform: Function called with each batch; its result is yielded instead.
        attrs: Names of the attributes that batches have, or a mapping of types to names. Default: all.
        seed: Random seed of the order and of all draws; the same on every rank. Default: 0.
        threads: Number of sampler threads. Default: ``num_workers``, at least 1.
        prefetch: Number of batches to make ahead. Default: ``prefetch_factor`` (3) per thread.
        deadline: Seconds that one request to another host may take.
        rank: Rank of this process in ``layout``. Default: the rank of the process group.
        layout: For each part, the ranks on hosts that store it. Default: taken from the cluster file and the process
            group.
        **kwargs: Arguments of torch's ``DataLoader``: ``batch_size`` (clusters per rank), ``shuffle``, ``drop_last``,
            ``pin_memory``, ``num_workers`` (sampler threads), ``prefetch_factor``, ``worker_init_fn``, ``timeout``
            (replaces ``deadline``), ``generator`` (gives the seed). ``local=True`` makes a loader of this process
            alone: it yields all clusters, and other ranks need not iterate it.

    Shapes:
        - ``n_id``: int64 ``[nodes]``, original ids
        - ``x``, ``y`` and other node attributes: ``[nodes, ...]``
        - ``edge_index``: int64 ``[2, edges]``; ``e_id``: int64 ``[edges]``

    Raises:
        SettingsError: Arguments contradict each other or do not fit the graph.
        PartitionError: METIS cannot divide the graph.
        ServiceError: Another host fails, while making the loader or iterating it.

    Example:
        ```python
        import gnnfleet as gf

        graph = gf.open("parts")  # made with: partition make --clusters 20
        loader = gf.DistClusterLoader(graph, batch_size=2, shuffle=True)
        for batch in loader:
            x, edge_index = batch.x, batch.edge_index
        ```
    """

    def __init__(
        self, data: Any, num_clusters: int | None = None, *, sparse_format: str = "csr",
        keep_inter_cluster_edges: bool = False, transform: Callable[[Any], Any] | None = None,
        attrs: AttrNames | None = None, seed: int | None = None, threads: int | None = None,
        prefetch: int | None = None, deadline: float = 120.0, rank: int | None = None,
        layout: RankLayout | None = None, **kwargs: Any,
    ):  # fmt: skip
        if sparse_format not in ("csr", "csc"):
            raise SettingsError(f"sparse_format {sparse_format!r}; expected 'csr' or 'csc'")
        if keep_inter_cluster_edges:
            raise SettingsError(
                "keep_inter_cluster_edges: not supported, as the other ends of these edges are not in the batch. Edges"
                " between the clusters of one batch are always included. Where nodes need all their neighbours, use"
                " DistNeighborLoader with num_neighbors=[-1]"
            )
        options = load_options(kwargs, seed=seed, threads=threads, prefetch=prefetch, deadline=deadline)
        self.sparse_format = sparse_format
        graph = as_graph(data)
        self.clusters = Clusters.of(graph, _cluster_of_nodes(graph, num_clusters, options.seed))
        super().__init__(
            graph, len(self.clusters.part), self.clusters.digest(), induced_settings(graph.manifest),
            wanted_attrs(graph, attrs), options, OutputOptions("induced", transform), rank=rank, layout=layout,
        )  # fmt: skip
        if len(self.clusters.part) < self.layout.world_size:
            warnings.warn(
                f"{len(self.clusters.part)} clusters for {self.layout.world_size} ranks: some batches have no node;"
                " make more clusters, or start fewer ranks",
                stacklevel=2,
            )

    def part_of(self, positions: Ids) -> Ids:
        return self.clusters.part[positions]

    def shares(self, epoch: int, first_step: int = 0) -> Iterator[SeedShare]:
        # Split for the whole epoch, so that more clusters go to a rank on a host of their part.
        o, order = self.order, self.order.epoch(epoch)
        rank_of = split_step(self.part_of(order), self.layout)
        of_rank = [order[rank_of == rank] for rank in range(self.layout.world_size)]
        size = self.options.batch_size
        for step in range(first_step, o.num_steps):
            last = step == o.num_steps - 1 and not o.drop_last
            batches = [own[step * size : None if last else (step + 1) * size] for own in of_rank]
            begin = sum(map(len, batches[: self.rank]))
            mine, batch = batches[self.rank], np.concatenate(batches)
            yield SeedShare(step, o.key(epoch, step), len(batch), mine, np.arange(begin, begin + len(mine)), batch)

    def seeds(self, share: SeedShare) -> BatchSeeds:
        nodes = {of: members.of(share.positions) for of, members in self.clusters.members.items()}
        return BatchSeeds(SeedSet(nodes), None)

    def output(self, sampled: SampledBatch, seeded: BatchSeeds) -> Output:
        out = super().output(sampled, seeded)
        for of in [None] if isinstance(out, SamplerOutput) else list(out.row):
            sort_edges(out, of, self.sparse_format == "csr")
        return out

    def annotate(self, data: Any, out: Output) -> None: ...


@dataclass(frozen=True)
class ClusterMembers:
    nodes: Ids  #: int64 [N] global ids, by original id within a cluster
    begin: Ids  #: int64 [clusters + 1] where each cluster begins in ``nodes``

    def of(self, clusters: Ids) -> Ids:
        pieces = [self.nodes[self.begin[c] : self.begin[c + 1]] for c in clusters]
        return np.concatenate([np.empty(0, np.int64), *pieces])


@dataclass(frozen=True)
class Clusters:
    """All clusters that have nodes, in the order of the cluster numbers."""

    members: Mapping[NodeType, ClusterMembers]
    part: Ids  #: int64 [clusters] part that has most of the cluster's nodes

    @classmethod
    def of(cls, graph: Graph, cluster: Mapping[NodeType, Array]) -> Clusters:
        """Make clusters. ``cluster``: for each node type the cluster number of each node, indexed by original id."""
        numbers = np.unique(np.concatenate(list(cluster.values())))
        members, votes = {}, np.zeros((len(numbers), graph.manifest.num_parts), np.int64)
        for of, values in cluster.items():
            place, nodes = np.searchsorted(numbers, values), graph.store.to_global(of, np.arange(len(values)))
            order = np.argsort(place, kind="stable")
            members[of] = ClusterMembers(nodes[order], np.searchsorted(place[order], np.arange(len(numbers) + 1)))
            np.add.at(votes, (place, graph.store.books[of].part_of(nodes)), 1)
        return cls(members, votes.argmax(1))

    def digest(self) -> str:
        total = hashlib.sha256()
        for members in self.members.values():
            total.update(members.nodes.data)
            total.update(members.begin.data)
        return total.hexdigest()


def _cluster_of_nodes(graph: Graph, num_clusters: int | None, seed: int) -> dict[NodeType, Array]:
    """Return for every node type the cluster number of each node: integers [N], indexed by original id."""
    if num_clusters is not None:
        return _by_metis(graph, whole_number("num_clusters", num_clusters, 1), seed)
    having = [of for of, spec in graph.manifest.nodes.items() if CLUSTER in spec.attrs]
    if not having and graph.source is not None:
        raise SettingsError(
            "num_clusters is not set: for a graph in memory, pass the number of clusters that METIS makes"
        )
    if not having:
        return {of: _part_of_nodes(graph, of) for of in graph.manifest.nodes}
    return {of: _given_clusters(graph, of) for of in graph.manifest.nodes}


def _part_of_nodes(graph: Graph, of: NodeType) -> Array:
    nodes = graph.store.to_global(of, np.arange(graph.manifest.nodes[of].num_nodes))
    return graph.store.books[of].part_of(nodes)


def _given_clusters(graph: Graph, of: NodeType) -> Array:
    spec = graph.manifest.nodes[of]
    if CLUSTER not in spec.attrs or spec.attrs[CLUSTER].stored.kind not in "iu" or len(spec.attrs[CLUSTER].shape) != 1:
        raise SettingsError(
            f"{of!r} nodes have no attribute {CLUSTER!r} with one integer per node, but other types do; give it to all"
            " types or to none"
        )
    cluster = np.empty(spec.num_nodes, np.int64)
    for first in range(0, spec.num_nodes, _NODES_AT_ONCE):
        ids = np.arange(first, min(first + _NODES_AT_ONCE, spec.num_nodes))
        (rows,) = graph.access.gather([RowRequest(of, graph.store.to_global(of, ids), (CLUSTER,))])
        cluster[ids] = rows[CLUSTER]
    return cluster


def _by_metis(graph: Graph, num_clusters: int, seed: int) -> dict[NodeType, Array]:
    if graph.source is None:
        raise SettingsError(
            "num_clusters is for graphs in memory; make the clusters of a partition by: partition make --clusters K"
        )
    from trainer.partition.methods.assign import assign_parts  # METIS is slow to import

    nodes = {of: NodeData(spec.num_nodes) for of, spec in graph.manifest.nodes.items()}
    found = {of: graph.access.edge_list(of) for of in graph.manifest.edges}  # in memory, global ids equal original ids
    edges = {of: EdgeData(np.stack([ends.src, ends.dst])) for of, ends in found.items()}
    dataset = Dataset(graph.manifest.dataset, nodes, edges, "in memory", graph.manifest.hetero)
    return dict(assign_parts(dataset, num_clusters, "metis", seed, balance="nodes").parts)
