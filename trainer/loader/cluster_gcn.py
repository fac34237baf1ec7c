"""Cluster-GCN: batches are the subgraphs induced by several clusters of nodes.

Chiang et al., "Cluster-GCN: An Efficient Algorithm for Training Deep and Large Graph Convolutional Networks", KDD 2019.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch_geometric.sampler import SamplerOutput

from trainer.core.arrays import Array, Ids
from trainer.core.errors import SettingsError
from trainer.core.schema import NodeType
from trainer.data.dataset import Dataset, EdgeData, NodeData
from trainer.graph.in_memory import as_graph
from trainer.graph.open import Graph
from trainer.graph.seed_order import RankLayout, SeedShare, split_step
from trainer.loader.arguments import (
    AttrNames,
    OutputOptions,
    induced_settings,
    load_options,
    wanted_attrs,
    whole_number,
)
from trainer.loader.pyg_batch import Output, sort_edges
from trainer.loader.pyg_loader import BatchSeeds, PyGLoader
from trainer.sampler.subgraph_sampler import SampledBatch
from trainer.sampler.types import RowRequest, SeedSet

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
class _ClusterMembers:
    nodes: Ids  #: int64 [N] global ids, by original id within a cluster
    begin: Ids  #: int64 [clusters + 1] where each cluster begins in ``nodes``

    def of(self, clusters: Ids) -> Ids:
        pieces = [self.nodes[self.begin[c] : self.begin[c + 1]] for c in clusters]
        return np.concatenate([np.empty(0, np.int64), *pieces])


@dataclass(frozen=True)
class Clusters:
    """All clusters that have nodes, in the order of the cluster numbers."""

    members: Mapping[NodeType, _ClusterMembers]
    part: Ids  #: int64 [clusters] part that has most of the cluster's nodes

    @classmethod
    def of(cls, graph: Graph, cluster: Mapping[NodeType, Array]) -> Clusters:
        """Make clusters. ``cluster``: for each node type the cluster number of each node, indexed by original id."""
        numbers = np.unique(np.concatenate(list(cluster.values())))
        members, votes = {}, np.zeros((len(numbers), graph.manifest.num_parts), np.int64)
        for of, values in cluster.items():
            place, nodes = np.searchsorted(numbers, values), graph.store.to_global(of, np.arange(len(values)))
            order = np.argsort(place, kind="stable")
            members[of] = _ClusterMembers(nodes[order], np.searchsorted(place[order], np.arange(len(numbers) + 1)))
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
        number = whole_number("num_clusters", num_clusters, 1)
        if graph.source is None:
            raise SettingsError(
                "num_clusters is for graphs in memory; make the clusters of a partition by: partition make --clusters K"
            )
        from trainer.partition.methods.assign import assign_parts  # METIS is slow to import

        node_data = {of: NodeData(spec.num_nodes) for of, spec in graph.manifest.nodes.items()}
        edges = {
            of: EdgeData(np.stack(graph.access.endpoints(of, np.arange(spec.num_edges))))
            for of, spec in graph.manifest.edges.items()
        }  # in memory, global ids equal original ids
        dataset = Dataset(graph.manifest.dataset, node_data, edges, "in memory", graph.manifest.hetero)
        return dict(assign_parts(dataset, number, "metis", seed, balance="nodes").parts)
    having = [of for of, spec in graph.manifest.nodes.items() if CLUSTER in spec.attrs]
    if not having and graph.source is not None:
        raise SettingsError(
            "num_clusters is not set: for a graph in memory, pass the number of clusters that METIS makes"
        )
    if not having:
        nodes = {of: np.arange(spec.num_nodes) for of, spec in graph.manifest.nodes.items()}
        return {of: graph.store.books[of].part_of(graph.store.to_global(of, ids)) for of, ids in nodes.items()}
    found: dict[NodeType, Array] = {}
    for of, spec in graph.manifest.nodes.items():
        attr = spec.attrs.get(CLUSTER)
        if attr is None or attr.stored.kind not in "iu" or len(attr.shape) != 1:
            raise SettingsError(
                f"{of!r} nodes have no attribute {CLUSTER!r} with one integer per node, but other types do; give it to"
                " all types or to none"
            )
        found[of] = np.empty(spec.num_nodes, np.int64)
        for first in range(0, spec.num_nodes, _NODES_AT_ONCE):
            ids = np.arange(first, min(first + _NODES_AT_ONCE, spec.num_nodes))
            (rows,) = graph.access.gather([RowRequest(of, graph.store.to_global(of, ids), (CLUSTER,))])
            found[of][ids] = rows[CLUSTER]
    return found
