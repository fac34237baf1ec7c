"""Cluster-GCN: a batch is the subgraph of some whole clusters, edges between them included.

Chiang et al., "Cluster-GCN: An Efficient Algorithm for Training Deep and Large Graph Convolutional
Networks", KDD 2019.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainer.core.arrays import Array, Ids
from trainer.core.errors import SettingsError
from trainer.core.schema import NodeType
from trainer.data.dataset import Dataset, EdgeData, NodeData
from trainer.loader.arguments import AttrNames, OutputOptions, load_options, wanted_attrs, whole_number
from trainer.loader.in_memory import as_graph
from trainer.loader.induced import induced_settings
from trainer.loader.open import Graph
from trainer.loader.pyg_batch import Output
from trainer.loader.pyg_loader import PyGLoader, Seeded
from trainer.loader.seed_order import RankLayout, Share, split_step
from trainer.sampler.subgraph import SeedSet
from trainer.sampler.types import RowRequest

CLUSTER = "cluster"  #: the node attribute that ``partition make --clusters`` writes

_NODES_AT_ONCE = 1 << 22


class DistClusterLoader(PyGLoader):
    """torch_geometric's ``ClusterData`` and ``ClusterLoader`` in one, on a partitioned graph.

    An epoch takes every cluster once over all ranks. Each rank takes those of its own host's parts first; only
    what is too many there goes to other ranks, so that all get equally many, or one less. Batches are steps of
    ``batch_size`` clusters, equally many on every rank; a last step with fewer clusters than ranks joins the one
    before.

    Args:
        data: an opened graph (``trainer.open``), or ``Data``, ``HeteroData`` or stores in memory.
        num_clusters: of a graph in memory, made by METIS here; of an opened partition the clusters are those it was
            made with (``partition make --clusters K``, node attribute ``cluster``), else its whole parts.
        batch_size: clusters per step and rank. shuffle, drop_last and other arguments of torch's ``DataLoader``;
            transform, attrs, seed, threads, prefetch, deadline, rank, layout: as in ``DistNeighborLoader``.

    A batch has all nodes of its clusters, cluster after cluster, by id, and all edges between them; also ``n_id`` and
    ``e_id``. ``loader(index)`` joins the clusters at some positions: positions count the clusters that have nodes, in
    their order. Memory: 8 bytes a node. Raises ``SettingsError`` for arguments that make no sense,
    ``PartitionError`` when METIS cannot divide the graph, and ``ServiceError`` when another host fails.
    """

    def __init__(
        self, data: Any, num_clusters: int | None = None, *, transform: Callable[[Any], Any] | None = None,
        attrs: AttrNames | None = None, seed: int | None = None, threads: int | None = None,
        prefetch: int | None = None, deadline: float = 120.0, rank: int | None = None,
        layout: RankLayout | None = None, **kwargs: Any,
    ):  # fmt: skip
        options = load_options(kwargs, seed=seed, threads=threads, prefetch=prefetch, deadline=deadline)
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

    def shares(self, epoch: int) -> Iterator[Share]:
        """As the other loaders', but shared out over the epoch as a whole: more of it stays on its host."""
        o, order = self.order, self.order.epoch(epoch)
        rank_of = split_step(self.part_of(order), self.layout)
        of_rank = [order[rank_of == rank] for rank in range(self.layout.world_size)]
        size = self.options.batch_size
        for step in range(o.num_steps):
            last = step == o.num_steps - 1 and not o.drop_last
            batches = [own[step * size : None if last else (step + 1) * size] for own in of_rank]
            begin = sum(map(len, batches[: self.rank]))
            mine, batch = batches[self.rank], np.concatenate(batches)
            yield Share(step, o.key(epoch, step), len(batch), mine, np.arange(begin, begin + len(mine)), batch)

    def seeds(self, share: Share) -> Seeded:
        nodes = {of: members.of(share.positions) for of, members in self.clusters.members.items()}
        return Seeded(SeedSet(nodes), None)

    def annotate(self, data: Any, out: Output) -> None:
        """Nothing more to tell."""


@dataclass(frozen=True)
class Members:
    """The nodes of one type, cluster after cluster."""

    nodes: Ids  #: int64 [N] global ids, within a cluster by original id
    begin: Ids  #: int64 [clusters + 1]

    def of(self, clusters: Ids) -> Ids:
        """The nodes of several clusters: int64 global ids."""
        pieces = [self.nodes[self.begin[c] : self.begin[c + 1]] for c in clusters]
        return np.concatenate([np.empty(0, np.int64), *pieces])


@dataclass(frozen=True)
class Clusters:
    """All clusters with nodes, by number."""

    members: Mapping[NodeType, Members]
    part: Ids  #: int64 [clusters] where most of its nodes live

    @classmethod
    def of(cls, graph: Graph, cluster: Mapping[NodeType, Array]) -> Clusters:
        """From the cluster of each node, by original id."""
        numbers = np.unique(np.concatenate(list(cluster.values())))
        members, votes = {}, np.zeros((len(numbers), graph.manifest.num_parts), np.int64)
        for of, values in cluster.items():
            place, nodes = np.searchsorted(numbers, values), graph.store.to_global(of, np.arange(len(values)))
            order = np.argsort(place, kind="stable")
            members[of] = Members(nodes[order], np.searchsorted(place[order], np.arange(len(numbers) + 1)))
            np.add.at(votes, (place, graph.store.books[of].part_of(nodes)), 1)
        return cls(members, votes.argmax(1))

    def digest(self) -> str:
        """Equal on ranks that have equal clusters."""
        total = hashlib.sha256()
        for members in self.members.values():
            total.update(members.nodes.data)
            total.update(members.begin.data)
        return total.hexdigest()


def _cluster_of_nodes(graph: Graph, num_clusters: int | None, seed: int) -> dict[NodeType, Array]:
    """The cluster of each node by original id, for every type: integers [N]."""
    if num_clusters is not None:
        return _by_metis(graph, whole_number("num_clusters", num_clusters, 1), seed)
    having = [of for of, spec in graph.manifest.nodes.items() if CLUSTER in spec.attrs]
    if not having and graph.source is not None:
        raise SettingsError("a graph in memory has no parts to serve as clusters; give num_clusters")
    if not having:
        return {of: _part_of_nodes(graph, of) for of in graph.manifest.nodes}
    return {of: _given_clusters(graph, of) for of in graph.manifest.nodes}


def _part_of_nodes(graph: Graph, of: NodeType) -> Array:
    nodes = graph.store.to_global(of, np.arange(graph.manifest.nodes[of].num_nodes))
    return graph.store.books[of].part_of(nodes)


def _given_clusters(graph: Graph, of: NodeType) -> Array:
    spec = graph.manifest.nodes[of]
    if CLUSTER not in spec.attrs or spec.attrs[CLUSTER].stored.kind not in "iu" or len(spec.attrs[CLUSTER].shape) != 1:
        raise SettingsError(f"{of!r} nodes need an attribute {CLUSTER!r}, one integer each, as the other types have it")
    cluster = np.empty(spec.num_nodes, np.int64)
    for first in range(0, spec.num_nodes, _NODES_AT_ONCE):
        ids = np.arange(first, min(first + _NODES_AT_ONCE, spec.num_nodes))
        (rows,) = graph.access.gather([RowRequest(of, graph.store.to_global(of, ids), (CLUSTER,))])
        cluster[ids] = rows[CLUSTER]
    return cluster


def _by_metis(graph: Graph, num_clusters: int, seed: int) -> dict[NodeType, Array]:
    if graph.source is None:
        raise SettingsError(
            "num_clusters is for graphs in memory; a partition keeps its clusters: partition make --clusters K"
        )
    from trainer.partition.assign import assign_parts  # METIS is slow to import where there is nothing to divide

    nodes = {of: NodeData(spec.num_nodes) for of, spec in graph.manifest.nodes.items()}
    found = {of: graph.access.edge_list(of) for of in graph.manifest.edges}  # in memory ids are original ids
    edges = {of: EdgeData(np.stack([ends.src, ends.dst])) for of, ends in found.items()}
    dataset = Dataset(graph.manifest.dataset, nodes, edges, "in memory", graph.manifest.hetero)
    return dict(assign_parts(dataset, num_clusters, "metis", seed, balance="nodes").parts)
