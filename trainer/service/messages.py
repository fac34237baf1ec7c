"""The requests to a graph server that are not operations on a graph, also those for whole batches, and the answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import msgspec
import numpy as np

from trainer.core.arrays import Array, Columns, Ids
from trainer.core.batch_cost import Cost
from trainer.core.errors import WireError
from trainer.core.schema import AnyType, EdgeType, NodeType
from trainer.sampler.subgraph_sampler import BatchWork, SampledBatch
from trainer.sampler.types import EdgeSet, NodeSet, SampledSubgraph
from trainer.wire.columns import Column, FormOf, restored, rounded
from trainer.wire.frames import Kind, Message, Status
from trainer.wire.request import Body, Request, pack, widened_ids

_MAX_SLOT = 1 << 62


@dataclass(frozen=True)
class ServerAddress:
    name: str  #: name in messages: ``node2 (gpu3)``, or ``node0 (gpu1) of products`` in a serving cluster
    node_rank: int  #: node rank in the run or serving cluster that started the server
    host: str
    endpoint: str  #: tcp://address:port
    parts: tuple[int, ...]
    cluster: str = ""  #: name of the serving cluster, of a server that a run is attached to


@dataclass(frozen=True)
class HelloInfo:
    """The reply of a graph server to HELLO: which server answers, its parts, and all servers that it knows."""

    node_rank: int
    host: str
    part_ids: tuple[int, ...]
    manifest_digest: str  #: sha256 of its manifest.json, hex
    version: int = 1  #: version of the cluster.json that the server read last
    servers: tuple[ServerAddress, ...] = ()  #: all graph servers of that cluster.json


@dataclass(frozen=True)
class ClientName:
    """The identity of a client that requests batches. A client is one training process with all its connections."""

    number: int  #: random uint64, by which the server accounts shares and buffers
    name: str  #: description of the client, such as ``run-7/rank3 on gpu2 (pid 811)``


@dataclass(frozen=True)
class ServerStats:
    requests: int  #: answered, including errors
    errors: int  #: answered with an error
    malformed: int  #: dropped without a reply
    refused: int  #: connections that were not admitted, or did not complete the handshake
    bytes_in: int
    bytes_out: int
    seconds: Mapping[str, float]  #: time in handlers per kind, summed over threads


class Hello(Request[HelloInfo], frozen=True):
    kind: ClassVar = Kind.HELLO
    replies: ClassVar = HelloInfo


class Stats(Request[ServerStats], frozen=True):
    kind: ClassVar = Kind.STATS
    replies: ClassVar = ServerStats


class ManifestText(Request[bytes], frozen=True):
    """The bytes of manifest.json."""

    kind: ClassVar = Kind.MANIFEST

    def reply(self, message: Message, answer: bytes, form_of: FormOf) -> Message:
        return message.reply([np.frombuffer(answer, np.uint8)])

    def read_reply(self, message: Message) -> bytes:
        if len(message.arrays) != 1 or message.arrays[0].dtype != np.uint8 or message.arrays[0].ndim != 1:
            raise WireError("the manifest in the reply is not one array of bytes")
        return message.arrays[0].tobytes()


class SharedSlice(Request[Array], frozen=True):
    """A range of rows of an array that belongs to the whole graph: the seeds of a split, or a graph attribute."""

    kind: ClassVar = Kind.SHARED
    of: NodeType | None  #: the type of which ``name`` is a split; None: ``name`` is an attribute of the whole graph
    name: str
    first: int
    count: int  #: 1 for an array without dimensions

    def check(self) -> None:
        if not 0 <= self.first <= _MAX_SLOT or not 0 <= self.count <= _MAX_SLOT:
            raise WireError(f"the request asks for an invalid range of rows, {self.first} to {self.first + self.count}")

    def read_reply(self, message: Message) -> Array:
        rows = [array.shape[0] if array.ndim else 1 for array in message.arrays]
        if rows != [self.count]:
            raise WireError(f"the reply has arrays of {rows} rows for the request {self}")
        return message.arrays[0]


class ToGlobal(Request[Ids], frozen=True):
    """Global ids of nodes given by original id."""

    kind: ClassVar = Kind.TO_GLOBAL
    of: NodeType
    ids: Ids

    def read_reply(self, message: Message) -> Ids:
        if len(message.arrays) != 1 or message.arrays[0].shape != (len(self.ids),):
            shapes = [array.shape for array in message.arrays]
            raise WireError(f"the reply has arrays of shapes {shapes} for {len(self.ids)} ids")
        return widened_ids(message.arrays[0])


def acknowledgement(request_id: int) -> Message:
    """Return the message by which a client acknowledges a batch. It has no reply."""
    return Message(Kind.ACK, Status.REQUEST, request_id)


def alive() -> Message:
    """Return a keep-alive to a client that waits for batches. It has no reply."""
    return Message(Kind.ALIVE, Status.OK, 0)


MAX_SEEDS = 1 << 20  #: largest number of seeds of one batch, over all types

_MAX_HOPS = 64

_MAX_CLIENT_NAME = 200  #: characters

_FANOUT_LIMIT = 1 << 31


class _BatchReply(msgspec.Struct, frozen=True):
    num_hops: int
    induced: bool
    nodes: dict[NodeType, NodeSet]
    edges: dict[EdgeType, EdgeSet]
    rows: dict[AnyType, dict[str, Column]]
    labels: dict[str, Array]


_REPLY: Body[_BatchReply] = Body(_BatchReply)


class BatchRequest(Request[SampledBatch], frozen=True):
    """A whole batch. Its ``cost`` counts the bytes of the reply, and counts all rows as remote."""

    kind: ClassVar = Kind.BATCH
    work: BatchWork
    client: ClientName

    def check(self) -> None:
        work, client, seeds = self.work, self.client, self.work.seeds
        if len(client.name) > _MAX_CLIENT_NAME or not client.name.isprintable():
            raise WireError(
                f"the client's name has {len(client.name)} characters, expected at most {_MAX_CLIENT_NAME}, all "
                "printable"
            )
        if not 0 <= client.number < 1 << 64 or not 0 <= work.key < 1 << 64:
            raise WireError(
                f"the client's number {client.number} or the key {work.key} is not an unsigned 64-bit number"
            )
        for fanouts in work.settings.fanouts.values():
            if len(fanouts) > _MAX_HOPS or not all(-1 <= fanout < _FANOUT_LIMIT for fanout in fanouts):
                raise WireError(
                    f"the request has {len(fanouts)} hops with fanouts {fanouts[:_MAX_HOPS]}, expected at most "
                    f"{_MAX_HOPS} hops and fanouts from -1 to {_FANOUT_LIMIT - 1}"
                )
        if (number := sum(map(len, seeds.nodes.values()))) > MAX_SEEDS:
            raise WireError(
                f"a batch of {number} seeds; a graph server accepts at most {MAX_SEEDS}; use smaller batches"
            )
        for more in (seeds.trees, seeds.times):
            if any(of not in seeds.nodes or len(ids) != len(seeds.nodes[of]) for of, ids in more.items()):
                raise WireError("the request does not have one tree or time for each seed")
        if any(len(targets) != len(sources) for targets, sources in seeds.exclude.values()):
            raise WireError("the excluded edges have different numbers of targets and sources")
        label_type, labels = work.labels
        if labels and label_type not in seeds.nodes:
            raise WireError(f"the request asks for labels {labels} of {label_type!r}, which has no seeds")

    def reply(self, message: Message, answer: SampledBatch, form_of: FormOf) -> Message:
        subgraph, labels = answer.subgraph, dict(answer.labels)
        rows = {
            of: {name: rounded(name, values, form_of(of, name)) for name, values in columns.items()}
            for of, columns in answer.rows.items()
        }
        reply = _BatchReply(
            subgraph.num_hops, subgraph.induced, dict(subgraph.nodes), dict(subgraph.edges), rows, labels
        )  # fmt: skip
        return message.reply(*pack(reply))

    def read_reply(self, message: Message) -> SampledBatch:
        work, reply, used = self.work, _REPLY.read(message), set[int]()
        if reply.num_hops != work.settings.num_hops or reply.induced != work.settings.induced:
            raise WireError(
                f"the batch has {reply.num_hops} hops (induced: {reply.induced}), expected {work.settings.num_hops} "
                f"(induced: {work.settings.induced})"
            )
        subgraph = SampledSubgraph(reply.num_hops, reply.nodes, reply.edges, reply.induced)
        for node_type, seeds in work.seeds.nodes.items():
            if node_type not in subgraph.nodes or subgraph.nodes[node_type].per_hop[:1] != (len(seeds),):
                raise WireError(f"the batch does not begin with the requested seeds of type {node_type!r}")
        for node_type, nodes in subgraph.nodes.items():
            if sum(nodes.per_hop) != len(nodes.ids) or any(number < 0 for number in nodes.per_hop):
                raise WireError(f"{len(nodes.ids)} nodes of type {node_type!r} with {nodes.per_hop} nodes per hop")
            if nodes.tree is not None and len(nodes.tree) != len(nodes.ids):
                raise WireError(f"{len(nodes.tree)} tree numbers for {len(nodes.ids)} nodes of type {node_type!r}")
        for edge_type, edges in subgraph.edges.items():
            if edges.edge is not None and len(edges.edge) != len(edges.src):
                raise WireError(f"edges of type {edge_type} have {len(edges.src)} sources and {len(edges.edge)} ids")
            if any(values is not None and len(values) != len(edges.src) for values in (edges.scores, edges.hops)):
                raise WireError(f"edges of type {edge_type} do not have one score and one distance each")
            _check_ranges(edges.row_begin, edges.row_count, len(edges.src))
            if edges.whole is not None:
                _check_ranges(edges.whole.begin, edges.whole.count, len(edges.src))
            ends = [subgraph.nodes.get(edge_type[0]), subgraph.nodes.get(edge_type[2])]
            num_src, num_dst = (0 if end is None else len(end.ids) for end in ends)
            if len(edges.src) and not 0 <= edges.src.min() <= edges.src.max() < num_src:
                raise WireError(f"edges of type {edge_type} have sources that are not in the batch")
            if len(edges.row_count) > num_dst:
                raise WireError(
                    f"edges of type {edge_type} have {len(edges.row_count)} targets, but the batch has only {num_dst} "
                    f"nodes of type {edge_type[2]!r}"
                )
        rows = {of: {name: restored(one, used) for name, one in columns.items()} for of, columns in reply.rows.items()}
        found: dict[AnyType, Ids] = {of: nodes.ids for of, nodes in subgraph.nodes.items()}
        found |= {of: edges.edge for of, edges in subgraph.edges.items() if edges.edge is not None}
        for of, ids in found.items():
            _check_columns(of, rows.get(of, {}), ("orig_id", *work.attrs.get(of, ())), len(ids))
        of, names = work.labels
        num_labels = len(work.seeds.nodes[of]) if names else 0
        _check_columns(of, reply.labels, names, num_labels)
        gathered = sum(map(len, found.values())) + num_labels
        return SampledBatch(
            subgraph, rows, reply.labels, Cost(remote_bytes=message.size, rows=gathered, remote_rows=gathered)
        )


def _check_ranges(begin: Array, count: Array, num_edges: int) -> None:
    if len(begin) != len(count):
        raise WireError(f"the edge ranges have {len(begin)} begins and {len(count)} counts")
    if len(count) and (begin.min() < 0 or count.min() < 0 or (begin + count).max() > num_edges):
        raise WireError(f"an edge range is outside the {num_edges} edges")


def _check_columns(of: AnyType, columns: Columns, names: tuple[str, ...], number: int) -> None:
    if set(columns) != set(names) or any(array.shape[:1] != (number,) for array in columns.values()):
        shapes = {name: array.shape for name, array in columns.items()}
        raise WireError(f"the reply has attributes {shapes} of {of!r}, expected {number} rows of {list(names)}")
