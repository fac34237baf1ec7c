"""Opens a graph: own parts by memory map, other parts through their hosts."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.core.errors import PartitionError, ServiceError, SettingsError
from trainer.core.ranks import Ranks
from trainer.core.remote_settings import RemoteAccess
from trainer.core.schema import HOMO_NODE, AnyType, EdgeType, NodeType
from trainer.graph.prefetch import RemoteSampler, Sampler
from trainer.graph.seed_order import RankLayout
from trainer.sampler.dist_graph import DistGraph
from trainer.sampler.local_graph import LocalGraph
from trainer.sampler.subgraph_sampler import SubgraphSampler
from trainer.sampler.types import SampleSettings
from trainer.service.channel import GONE_AFTER
from trainer.service.client import HostClient
from trainer.service.cluster import Cluster, connect_cluster
from trainer.service.remote_graph import Gateway, client_name
from trainer.service.service_keys import ServiceKeys, read_key_file
from trainer.service.wire.messages import HelloInfo, ServerAddress
from trainer.store.client_store import RemoteStore
from trainer.store.manifest import Manifest, manifest_digest
from trainer.store.part_store import PartStore, open_parts

if TYPE_CHECKING:
    from trainer.graph.cache_policy import Prediction


@dataclass(frozen=True)
class Graph:
    """An opened graph; close it, or use it as a context manager."""

    store: PartStore
    access: DistGraph | Gateway  #: a gateway where this process is a client and holds no part
    clients: dict[int, HostClient] = field(default_factory=dict)
    ranks: Ranks = Ranks()  #: this process among those that load from the graph
    placed: RankLayout | None = None  #: ranks beside each part; default: every rank reads every part
    #: The user's ``Data``, ``HeteroData`` or (feature store, graph store) when the graph was made from one.
    source: Any = None

    def __repr__(self) -> str:
        """One line, as a notebook shows it."""
        here = ", ".join(map(str, self.store.parts))
        where = f"served by {self.gateway.home.name}" if self.gateway else f"parts here: {here or 'none'}"
        manifest = self.manifest
        size = f"{manifest.num_nodes:,} nodes, {manifest.num_edges:,} edges, {manifest.num_parts} parts"
        return f"Graph({manifest.dataset}: {size}; {where})"

    @property
    def manifest(self) -> Manifest:
        return self.store.manifest

    @property
    def layout(self) -> RankLayout:
        """Which ranks sit beside which part."""
        return self.placed or RankLayout.everywhere(self.ranks.world_size, self.manifest.num_parts)

    @property
    def gateway(self) -> Gateway | None:
        """Where this process is a client: what asks the graph servers."""
        return self.access if isinstance(self.access, Gateway) else None

    @property
    def digest(self) -> str:
        """sha256 of ``manifest.json``, hex: equal digests mean equal partitions. Raises ``PartitionError``."""
        return self.gateway.digest if self.gateway else manifest_digest(self.store.folder)

    @property
    def near_parts(self) -> tuple[int, ...]:
        """Parts that are opened here, or that this client's home server has."""
        return self.gateway.home.parts if self.gateway else tuple(self.store.parts)

    def sampler(
        self, settings: SampleSettings, attrs: Mapping[AnyType, tuple[str, ...]],
        labels: tuple[NodeType, tuple[str, ...]] = ("", ()),
    ) -> Sampler:  # fmt: skip
        """What makes batches: the rows of ``attrs`` besides ``orig_id``; ``labels`` are those of the seeds only."""
        if self.gateway:
            return RemoteSampler(self.gateway, settings, attrs, labels)
        return SubgraphSampler(self.access, self.manifest, settings, attrs, labels)

    def threads(self, threads: int, prefetch: int) -> int:
        """Sampler threads of a loader: in a client each only waits for the batch it has asked for."""
        return max(threads, prefetch) if self.gateway else threads

    def patience(self, deadline: float, num_requests: int) -> float:
        """Seconds that a batch of several requests, one after the other, may take."""
        return (deadline + (self.gateway.server_wait if self.gateway else 0.0)) * num_requests

    @property
    def node_types(self) -> list[NodeType]:
        """In the order of the partition, which need not be the data's; ``["node"]`` of a homogeneous graph."""
        return list(self.manifest.nodes)

    @property
    def edge_types(self) -> list[EdgeType]:
        """In the order of the partition; ``[("node", "to", "node")]`` of a homogeneous graph."""
        return list(self.manifest.edges)

    def metadata(self) -> tuple[list[NodeType], list[EdgeType]]:
        """Node and edge types, as torch_geometric's ``to_hetero`` and ``HGTConv`` take them."""
        return self.node_types, self.edge_types

    @property
    def num_nodes(self) -> int:
        """Nodes of all types and parts."""
        return self.manifest.num_nodes

    @property
    def num_edges(self) -> int:
        """Edges of all types and parts."""
        return self.manifest.num_edges

    @property
    def num_node_features(self) -> int | dict[NodeType, int]:
        """Width of ``x``, 0 without; by node type where the graph is heterogeneous."""
        shapes = {
            of: spec.attrs["x"].shape if "x" in spec.attrs else (0, 0) for of, spec in self.manifest.nodes.items()
        }
        widths = {of: 1 if len(shape) == 1 else shape[-1] for of, shape in shapes.items()}
        return widths if self.manifest.hetero else widths[HOMO_NODE]

    num_features = num_node_features

    @property
    def num_classes(self) -> int:
        """Classes of the labelled node type. Raises ``SettingsError`` where none is labelled, or several are."""
        classes = {of: spec.num_classes for of, spec in self.manifest.nodes.items() if spec.num_classes}
        if len(classes) == 1:
            return next(iter(classes.values()))
        if not classes:
            raise SettingsError("num_classes: no node type has class labels (y, whole numbers from 0)")
        raise SettingsError(
            f"num_classes: several node types have labels, {classes}; take graph.manifest.nodes[TYPE].num_classes"
        )

    def cache_rows(
        self, fanouts: Sequence[int] | Mapping[EdgeType, Sequence[int]], split: str = "train", *, batch_size: int,
        size: str = "10%", node_type: NodeType | None = None, replace: bool = False,
        attrs: Mapping[NodeType, Sequence[str]] | None = None,
    ) -> Prediction | None:  # fmt: skip
        """Keep on this host those rows of others that batches of ``split`` request most.

        Some batches are sampled in advance, and the rows that they would gather are counted.

        fanouts, replace: as the loader has them; batch_size: seeds per step and rank; size: a share of the rows of
        other hosts, or bytes as ``512MB``; node_type: of the seeds; attrs: of the nodes, default: all. Returns what
        this rank is expected to receive in an epoch; None where all parts are here, or graph servers send whole
        batches. All processes of an initialized ``torch.distributed`` call this. Raises ``SettingsError`` for what
        does not fit the graph, ``ServiceError`` for hosts that do not answer.
        """
        from trainer.graph.cache_fill import cache_rows

        return cache_rows(self, fanouts, split, batch_size, size, node_type, replace, attrs)

    def close(self) -> None:
        """Let the connections go; waiting requests raise ``ServiceError``."""
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
    """Open ``part_ids`` (default: all) of a partition folder here and connect to the hosts of the others.

    ``remote_access``: how to get at what is on the others.
    Raises ``PartitionError`` for a part that is neither here nor served, or a manifest that
    differs between hosts, and ``ServiceError`` when a host does not answer within ``deadline``.
    """
    remote_access = remote_access or RemoteAccess()
    store = open_parts(parts, part_ids, remote_access.topology)
    clients = {}
    if cluster_file:
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
    try:
        _check_complete(graph)
    except PartitionError:
        graph.close()
        raise
    return graph


def _check_complete(graph: Graph) -> None:
    served = set(graph.store.parts) | {part for client in graph.clients.values() for part in client.part_ids}
    if missing := set(range(graph.manifest.num_parts)) - served:
        raise PartitionError(
            f"parts {sorted(missing)} of {graph.store.folder} are neither opened here nor served by another node;"
            " open all parts, or name the cluster file of the run"
        )


_HELLO = 10.0  #: seconds a server may take to say who it is


def open_client(
    cluster: Cluster, ranks: Ranks, *, key_file: str | Path | None = None, deadline: float = 120.0,
    remote_access: RemoteAccess | None = None, placed: RankLayout | None = None,
) -> Graph:  # fmt: skip
    """The graph as a client node of a run has it: all of it through the servers, home first.

    Raises ``ServiceError`` when no server answers within ``deadline``, or another partition is served there.
    """
    remote_access, asker = remote_access or RemoteAccess(), client_name(f"{cluster.run_id}/rank{ranks.rank}")
    home = cluster.home_of(ranks.node_rank)
    others = [place for place in cluster.gateways() if place != home]
    turn = ranks.rank % max(len(others), 1)
    gateway = Gateway(
        [home, *others[turn:], *others[:turn]], deadline, key_file and read_key_file(key_file) or None,
        server_wait=remote_access.server_wait, client=asker, wire_rows=remote_access.wire_rows,
    )  # fmt: skip
    return _opened(gateway, deadline, ranks, placed)


def connect_servers(
    endpoints: str | Sequence[str] | None, key: str | Path | None, ranks: Ranks, *, deadline: float, name: str,
) -> Graph:  # fmt: skip
    """``gnnfleet.connect``: see there."""
    keys = None if key is None else read_key_file(Path(key).expanduser())
    named = endpoints or (keys.endpoints if keys else ())
    given = list(named) if isinstance(named, Sequence) and not isinstance(named, str) else [named]
    if not given:
        raise SettingsError(
            "no endpoint to connect to: give tcp://host:port of a graph server, or a key file that names some"
            " (gnnfleet serve key NAME -o FILE)"
        )
    for endpoint in given:
        _check_endpoint(endpoint)
    gateway = Gateway(
        _places(given, keys, deadline), deadline, keys, server_wait=deadline, client=client_name(name),
    )  # fmt: skip
    return _opened(gateway, deadline, ranks, None)


def _opened(gateway: Gateway, patience: float, ranks: Ranks, placed: RankLayout | None) -> Graph:
    try:
        manifest = gateway.open(patience)
    except Exception:
        gateway.close()
        raise
    store = RemoteStore.of(manifest, gateway, f"the graph served by {gateway.home.name}")
    return Graph(store, gateway, ranks=ranks, placed=placed)


def _check_endpoint(endpoint: object) -> None:
    address, _, port = str(endpoint).removeprefix("tcp://").rpartition(":")
    if not (str(endpoint).startswith("tcp://") and address and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise SettingsError(f"{endpoint!r} is no endpoint of a graph server; those are tcp://host:port")


def _places(endpoints: Sequence[str], keys: ServiceKeys | None, deadline: float) -> list[ServerAddress]:
    """The servers at these endpoints that answer, then the others that they know of.

    Raises ``ServiceError`` when none answers, saying why for each.
    """
    patience, gone_after = min(deadline, _HELLO), min(GONE_AFTER, deadline)
    unknown = [ServerAddress("", -1, "", endpoint, ()) for endpoint in endpoints]
    clients = [HostClient(server, patience, keys, gone_after=gone_after) for server in unknown]
    try:
        found, problems = _greeted(clients, patience)
    finally:
        for client in clients:
            client.close()
    if not found:
        raise ServiceError(_why_none(endpoints, problems))
    met = {info.node_rank for _, info in found}
    places = [_address_of(endpoint, info) for endpoint, info in found]
    return places + [place for place in found[0][1].servers if place.node_rank not in met]


def _greeted(clients: Sequence[HostClient], patience: float) -> tuple[list[tuple[str, HelloInfo]], list[str]]:
    """Who answers at each endpoint, and what is wrong with the others, in words."""
    until = time.monotonic() + patience
    hellos = [(client, client.submit_hello()) for client in clients]
    found, problems = [], []
    for client, hello in hellos:
        try:
            found.append((client.endpoint, hello.result(max(0.0, until - time.monotonic()))))
        except ServiceError as error:
            problems.append(str(error))
    return found, problems


def _why_none(endpoints: Sequence[str], problems: Sequence[str]) -> str:
    """The problem with each endpoint; once where it is the same everywhere."""
    kinds = {
        re.sub(r"within [\d.]+ s", "", problem.replace(endpoint, ""))
        for endpoint, problem in zip(endpoints, problems, strict=True)
    }
    if len(problems) > 1 and len(kinds) == 1:
        return f"{problems[0]} It is the same at {', '.join(endpoints[1:])}"
    return "\n".join(problems)


def _address_of(endpoint: str, info: HelloInfo) -> ServerAddress:
    """A server as it says who it is, where the user reaches it."""
    listed = [place for place in info.servers if place.node_rank == info.node_rank]
    name = listed[0].name if listed else f"node{info.node_rank} ({info.host})"
    return ServerAddress(name, info.node_rank, info.host, endpoint, info.part_ids)
