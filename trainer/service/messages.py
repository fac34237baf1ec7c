"""The requests to a graph server that are not operations on a graph, except those for batches, and their answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from trainer.core.arrays import Array, Ids
from trainer.core.errors import WireError
from trainer.core.schema import NodeType
from trainer.wire.columns import FormOf
from trainer.wire.frames import Kind, Message, Status
from trainer.wire.request import Request, widened_ids

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
