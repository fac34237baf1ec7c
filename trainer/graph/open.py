"""Opens a graph: memory-maps the parts of this host, and connects to the graph servers for other parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.core.errors import PartitionError, SettingsError
from trainer.core.files import allow_many_files
from trainer.core.ranks import Ranks
from trainer.core.remote_settings import RemoteAccess
from trainer.core.schema import HOMO_NODE, AnyType, EdgeType, NodeType
from trainer.graph.prefetch import RemoteSampler, Sampler
from trainer.graph.seed_order import RankLayout
from trainer.sampler.dist_graph import DistGraph
from trainer.sampler.local_graph import LocalGraph
from trainer.sampler.subgraph_sampler import SubgraphSampler
from trainer.sampler.types import SampleSettings
from trainer.store.manifest import Manifest, manifest_digest
from trainer.store.part_store import PartStore, open_parts

if TYPE_CHECKING:
    from trainer.graph.cache_policy import Prediction
    from trainer.sampler.in_edges import InEdgesOf
    from trainer.service.client import HostClient
    from trainer.service.remote_graph import Gateway


@dataclass(frozen=True)
class Graph:
    """An opened graph, from ``gnnfleet.open`` or ``gnnfleet.connect``.

    Pass it to the loaders. Close it after use, or use it in a ``with`` statement.

    Args:
        store: Manifest, splits, and memory maps of the parts on this host.
        access: Reads edges and rows of all parts, also those on other hosts. In a client this is a ``Gateway``.
        clients: Connections to the graph servers of other hosts, by node rank.
        ranks: Rank and world size of this process.
        placed: For each part, the ranks on hosts that store it. Default: every rank reads every part.
        source: The user's ``Data``, ``HeteroData`` or (feature store, graph store) if the graph was made from one.

    Example:
        ```python
        import gnnfleet as gf
        from torch_geometric.nn import GraphSAGE

        graph = gf.open("parts")
        model = GraphSAGE(graph.num_features, 64, num_layers=2, out_channels=graph.num_classes)
        graph.close()
        ```
    """

    store: PartStore
    access: DistGraph | Gateway
    clients: dict[int, HostClient] = field(default_factory=dict)
    ranks: Ranks = Ranks()
    placed: RankLayout | None = None
    source: Any = None

    def __repr__(self) -> str:
        here = ", ".join(map(str, self.store.parts))
        where = f"served by {self.gateway.home.name}" if self.gateway else f"parts here: {here or 'none'}"
        manifest = self.manifest
        size = f"{manifest.num_nodes:,} nodes, {manifest.num_edges:,} edges, {manifest.num_parts} parts"
        return f"Graph({manifest.dataset}: {size}; {where})"

    @property
    def manifest(self) -> Manifest:
        """Types, sizes, attributes and parts of the graph: the content of ``manifest.json``."""
        return self.store.manifest

    @property
    def layout(self) -> RankLayout:
        """For each part, the ranks on hosts that hold the part."""
        return self.placed or RankLayout.everywhere(self.ranks.world_size, self.manifest.num_parts)

    @property
    def gateway(self) -> Gateway | None:
        """The connection of a client to its graph servers, or None in a process that holds parts."""
        return None if isinstance(self.access, DistGraph) else self.access

    @cached_property
    def _in_edges(self) -> InEdgesOf:
        from trainer.sampler.in_edges import InEdgesOf

        return InEdgesOf(self.store)

    @property
    def digest(self) -> str:
        """sha256 of ``manifest.json``, hexadecimal. Equal digests mean equal partitions.

        Raises:
            PartitionError: The manifest cannot be read.
        """
        return self.gateway.digest if self.gateway else manifest_digest(self.store.folder)

    @property
    def near_parts(self) -> tuple[int, ...]:
        """Parts that are opened in this process. In a client: parts of its home server."""
        return self.gateway.home.parts if self.gateway else tuple(self.store.parts)

    def sampler(
        self, settings: SampleSettings, attrs: Mapping[AnyType, tuple[str, ...]],
        labels: tuple[NodeType, tuple[str, ...]] = ("", ()),
    ) -> Sampler:  # fmt: skip
        """Return a sampler, which samples subgraphs and gathers their rows.

        Args:
            settings: How neighbours are drawn.
            attrs: Attributes to gather of each type, besides ``orig_id``.
            labels: A node type, and attributes to gather of its seeds only.
        """
        if self.gateway:
            return RemoteSampler(self.gateway, settings, attrs, labels)
        in_edges = self._in_edges if settings.rule is not None else None
        return SubgraphSampler(self.access, self.manifest, settings, attrs, labels, in_edges=in_edges)

    def threads(self, threads: int, prefetch: int) -> int:
        """Return the number of sampler threads of a loader.

        ``threads`` is the wanted number. A client gets at least ``prefetch`` threads. Any other process gets at least 2
        if the parts are larger than the memory.
        """
        if self.gateway:
            return max(threads, prefetch)
        return max(threads, 2) if self.store.larger_than_memory else threads

    def patience(self, deadline: float, num_requests: int) -> float:
        """Return the seconds that a batch of ``num_requests`` consecutive requests may take.

        ``deadline``: seconds that one request may take. A client adds the time to wait for a lost server.
        """
        return (deadline + (self.gateway.server_wait if self.gateway else 0.0)) * num_requests

    @property
    def node_types(self) -> list[NodeType]:
        """Node types in the partition's order, which may differ from the order in the data.

        ``["node"]`` if the graph is homogeneous.
        """
        return list(self.manifest.nodes)

    @property
    def edge_types(self) -> list[EdgeType]:
        """Edge types in the partition's order. ``[("node", "to", "node")]`` if the graph is homogeneous."""
        return list(self.manifest.edges)

    def metadata(self) -> tuple[list[NodeType], list[EdgeType]]:
        """Node types and edge types, in the form that torch_geometric's ``to_hetero`` and ``HGTConv`` accept.

        Returns:
            The list of node types and the list of edge types.
        """
        return self.node_types, self.edge_types

    @property
    def num_nodes(self) -> int:
        """Number of nodes of all types and parts."""
        return self.manifest.num_nodes

    @property
    def num_edges(self) -> int:
        """Number of edges of all types and parts."""
        return self.manifest.num_edges

    @property
    def num_node_features(self) -> int | dict[NodeType, int]:
        """Number of columns of attribute ``x``, 0 without ``x``. A dict by node type if the graph is heterogeneous."""
        shapes = {
            of: spec.attrs["x"].shape if "x" in spec.attrs else (0, 0) for of, spec in self.manifest.nodes.items()
        }
        widths = {of: 1 if len(shape) == 1 else shape[-1] for of, shape in shapes.items()}
        return widths if self.manifest.hetero else widths[HOMO_NODE]

    num_features = num_node_features

    @property
    def num_classes(self) -> int:
        """Number of classes of the labelled node type.

        Raises:
            SettingsError: No node type has class labels, or several have.
        """
        classes = {of: spec.num_classes for of, spec in self.manifest.nodes.items() if spec.num_classes}
        if len(classes) == 1:
            return next(iter(classes.values()))
        if not classes:
            raise SettingsError("num_classes: no node type has class labels (y, whole numbers from 0)")
        raise SettingsError(
            f"num_classes: several node types have labels, {classes}; read graph.manifest.nodes[TYPE].num_classes"
        )

    def cache_rows(
        self, fanouts: Sequence[int] | Mapping[EdgeType, Sequence[int]], split: str = "train", *, batch_size: int,
        size: str = "10%", node_type: NodeType | None = None, replace: bool = False,
        attrs: Mapping[NodeType, Sequence[str]] | None = None,
    ) -> Prediction | None:  # fmt: skip
        """Cache on this host the rows of other hosts that batches of ``split`` request most often.

        Samples some batches in advance to find these rows. If ``torch.distributed`` is initialized, all its processes
        must call this.

        Args:
            fanouts: ``num_neighbors`` of the loader: a list, or a mapping over edge types.
            split: Name of the split that the loader reads.
            batch_size: Seeds per step and rank.
            size: Share of the rows of other hosts (``"10%"``), or bytes (``"512MB"``).
            node_type: Node type of the seeds. Default: the only type that has ``split``.
            replace: ``replace`` of the loader.
            attrs: Attributes that the loader gathers of each node type. Default: all.

        Returns:
            The bytes that this rank is expected to receive in an epoch. None if all parts are on this host, or in a
                client, whose graph servers send whole batches.

        Raises:
            SettingsError: The arguments do not fit the graph, or the process group does not match the graph's ranks.
            ServiceError: Another host does not answer.

        Example:
            ```python
            import gnnfleet as gf

            graph = gf.open("parts")
            prediction = graph.cache_rows([10, 5], "train", batch_size=256, size="10%")
            ```
        """
        from trainer.graph.cache_fill import cache_rows

        return cache_rows(self, fanouts, split, batch_size, size, node_type, replace, attrs)

    def close(self) -> None:
        """Close all connections. Waiting requests raise ``ServiceError``."""
        for client in self.clients.values():
            client.close()
        if self.gateway:
            self.gateway.close()

    def __enter__(self) -> Graph:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_graph(
    parts: str | Path, part_ids: Sequence[int] | None = None, *, cluster_file: str | Path | None = None,
    node_rank: int = 0, key_file: str | Path | None = None, deadline: float = 120.0, ranks: Ranks | None = None,
    placed: RankLayout | None = None, remote_access: RemoteAccess | None = None,
) -> Graph:  # fmt: skip
    """Open the parts ``part_ids`` (default: all) of a partition folder and connect to the hosts of the other parts.

    Args:
        cluster_file: ``cluster.json``; None if no other host serves parts.
        placed: For each part, the ranks on hosts that store it. Default: every rank reads every part.
        remote_access: Whether topology is replicated, size of the row cache, type that rows are rounded to when sent,
            and seconds to wait for a lost server.

    Raises:
        PartitionError: A part is neither opened here nor served by another node, or another host has a different
            manifest.
        ServiceError: A host does not answer within ``deadline`` seconds.
    """
    allow_many_files()  # of each attribute of each part
    remote_access = remote_access or RemoteAccess()
    store = open_parts(parts, part_ids, remote_access.topology)
    clients: dict[int, HostClient] = {}
    if cluster_file:
        from trainer.service.cluster import connect_cluster
        from trainer.service.service_keys import read_key_file

        keys, digest = key_file and read_key_file(key_file) or None, manifest_digest(store.folder)
        clients = connect_cluster(
            cluster_file, node_rank, digest, deadline, keys, wire_rows=remote_access.wire_rows
        )  # fmt: skip
    access = DistGraph(
        LocalGraph(store),
        clients,
        server_wait=remote_access.server_wait,
        turn=node_rank,
        wire_rows=remote_access.wire_rows,
    )
    graph = Graph(store, access, clients, ranks or Ranks(), placed)
    served = set(store.parts) | {part for client in clients.values() for part in client.part_ids}
    if missing := set(range(graph.manifest.num_parts)) - served:
        graph.close()
        raise PartitionError(
            f"parts {sorted(missing)} of {store.folder} are neither opened here nor served by another node;"
            " open all parts, or pass the cluster file of the run"
        )
    return graph
