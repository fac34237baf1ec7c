"""The requests and replies of the graph service, except those for whole batches: their types, and checks of both.

A request is a value in the body of its message (``body.py``). Rows that are rounded carry a *mark*, which states how
and from which dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from trainer.core import rounding
from trainer.core.arrays import Array, Ids
from trainer.core.errors import DataError, WireError
from trainer.core.remote_settings import WireRows
from trainer.core.schema import AnyType, EdgeType, NodeType
from trainer.sampler.types import HopRequest, HopSample, RowRequest
from trainer.service.wire.body import Body, check_ids, narrowed, pack, widened_ids
from trainer.service.wire.frames import MAX_ARRAY, MAX_ARRAYS, Flag, Kind, Message, Status

MAX_ROWS = 1 << 25  #: nodes, excluded edges and allowed sources of all sample requests of a message

_MAX_FANOUT = (1 << 31) - 1  # counts are int32

_MAX_SLOT = 1 << 62

_F2, _F4, _F8 = map(np.dtype, ("<f2", "<f4", "<f8"))

_NOT_ROUNDED: tuple[WireRows, np.dtype] = ("stored", _F4)

_MARKS = (_NOT_ROUNDED, ("float16", _F4), ("float16", _F8), ("int8", _F2), ("int8", _F4), ("int8", _F8))

_MARK_OF = {rounding_of: mark for mark, rounding_of in enumerate(_MARKS)}

#: Flag with which a request allows rows to be rounded to a form.
FLAG_OF: dict[WireRows, Flag] = {"stored": Flag.NONE, "float16": Flag.FLOAT16, "int8": Flag.INT8}


def form_of(flags: Flag) -> WireRows:
    """Return the dtype (stored, float16 or int8) of rows in the reply to a request with ``flags``."""
    return "int8" if flags & Flag.INT8 else "float16" if flags & Flag.FLOAT16 else "stored"


class Column(msgspec.Struct, frozen=True, array_like=True):
    """An attribute's rows as they are sent."""

    mark: int  #: index into ``_MARKS``: the original dtype, and whether and how the rows were rounded
    array: Array  #: [n, …]
    scales: Array | None = None  #: float32 [n, 1] of rows rounded to int8


def rounded(name: str, rows: Array, form: WireRows) -> Column:
    """Round an attribute's rows to ``form``. Raises ``DataError`` for rows that ``form`` cannot represent."""
    if not rounding.rounds(name, rows.dtype, rows.shape, form):
        return Column(0, rows)
    try:
        arrays = [rounding.to_float16(rows)] if form == "float16" else list(rounding.to_int8(rows))
    except DataError as error:
        raise DataError(f"rows of {name} cannot be sent as {form}: {error}; use --wire-rows stored") from None
    return Column(_MARK_OF[form, rows.dtype], *arrays)


def restored(column: Column, used: set[int]) -> Array:
    """Return an attribute's rows, as they were before ``rounded``.

    ``used``: ids of the arrays of this message that were restored; each may be restored once, or a small message could
    take much memory. Raises ``WireError`` for invalid marks or arrays.
    """
    if not 0 <= column.mark < len(_MARKS):
        raise WireError(f"rows have the unknown mark {column.mark}; marks go from 0 to {len(_MARKS) - 1}")
    (form, dtype), sent = _MARKS[column.mark], column.array
    if column.mark == 0:
        return sent
    if id(sent) in used:
        raise WireError("two attributes refer to the same array of rounded rows")
    used.add(id(sent))
    if sent.ndim < 2 or sent.dtype != form or sent.size * dtype.itemsize > MAX_ARRAY:
        raise WireError(
            f"the reply has rows of dtype {sent.dtype} and shape {sent.shape}, expected {form} rows with at least 2 "
            f"dimensions and at most {MAX_ARRAY} bytes in their original dtype {dtype}"
        )
    if form == "float16":
        return rounding.from_float16(sent, dtype)
    scales = column.scales
    if scales is None or scales.dtype != _F4 or scales.shape != (len(sent), 1) or not np.isfinite(scales).all():
        raise WireError(f"int8 rows have no finite float32 scale for each of {len(sent)} rows")
    return rounding.from_int8(sent, scales, dtype)


@dataclass(frozen=True)
class ServerAddress:
    name: str  #: name in messages: ``node2 (gpu3)``, or ``node0 (gpu1) of products`` in a serving cluster
    node_rank: int  #: node rank in the run or serving cluster that started the server
    host: str
    endpoint: str  #: tcp://address:port
    parts: tuple[int, ...]


FormOf = Callable[[AnyType, str], WireRows]  #: the form in which rows of an attribute are sent


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
class SharedSlice:
    """A range of rows of an array that belongs to the whole graph: the seeds of a split, or a graph attribute."""

    of: NodeType | None  #: the type of which ``name`` is a split; None: ``name`` is an attribute of the whole graph
    name: str
    first: int
    count: int  #: 1 for an array without dimensions


@dataclass(frozen=True)
class ServerStats:
    requests: int  #: answered, including errors
    errors: int  #: answered with an error
    malformed: int  #: dropped without a reply
    refused: int  #: connections that were not admitted, or did not complete the handshake
    bytes_in: int
    bytes_out: int
    seconds: Mapping[str, float]  #: time in handlers per kind, summed over threads


class Pairs(msgspec.Struct, frozen=True):
    """A request whether the edges ``src[i]`` -> ``dst[i]`` exist."""

    edge_type: EdgeType
    src: Ids
    dst: Ids


SAMPLE: Body[list[HopRequest]] = Body(list[HopRequest])
GATHER: Body[list[RowRequest]] = Body(list[RowRequest])
ROWS: Body[list[dict[str, Column]]] = Body(list[dict[str, Column]])
HAS_EDGES: Body[Pairs] = Body(Pairs)
ENDPOINTS: Body[tuple[EdgeType, Ids]] = Body(tuple[EdgeType, Ids])  #: edge type and original edge ids
TO_GLOBAL: Body[tuple[NodeType, Ids]] = Body(tuple[NodeType, Ids])  #: node type and original ids
SHARED: Body[SharedSlice] = Body(SharedSlice)
HELLO: Body[HelloInfo] = Body(HelloInfo)
STATS: Body[ServerStats] = Body(ServerStats)


def request(kind: Kind, value: Any = None) -> Message:
    """Encode a request. The channel sets its id. Raises ``WireError`` if it exceeds a limit."""
    arrays, body = ([], b"") if value is None else pack(value)
    return Message(kind, Status.REQUEST, 0, tuple(arrays), body)


def reply_to(message: Message, value: Any) -> Message:
    return message.reply(*pack(value))


def read_sample_request(message: Message) -> list[HopRequest]:
    """Decode the requests in a message. Raises ``WireError`` if one is invalid."""
    requests, rows = SAMPLE.read(message), 0
    for one in requests:
        if not -1 <= one.fanout <= _MAX_FANOUT or one.shuffle < 0 or not 0 <= one.key < 1 << 64:
            raise WireError(f"a request has invalid values: fanout {one.fanout}, shuffle {one.shuffle}, key {one.key}")
        times = None if one.bound is None else one.bound.times
        lengths = {len(ids) for ids in (one.nodes, one.trees, times) if ids is not None}
        if len(lengths) > 1 or (one.exclude is not None and len(one.exclude[0]) != len(one.exclude[1])):
            raise WireError("the arrays of a request have different lengths")
        if one.sources is not None and np.any(one.sources[1:] < one.sources[:-1]):
            raise WireError("the allowed sources of a request are not in ascending order")
        rows += sum(len(ids) for ids in (one.nodes, one.exclude and one.exclude[0], one.sources) if ids is not None)
        if rows > MAX_ROWS:  # many requests may refer to the same array
            raise WireError(f"the requests have more than {MAX_ROWS} nodes and excluded edges; ask for fewer at once")
    if sum(2 + one.with_edge for one in requests) > MAX_ARRAYS:
        raise WireError(f"a reply to {len(requests)} requests would have more than {MAX_ARRAYS} arrays")
    return requests


def sample_arrays(samples: Sequence[HopSample]) -> list[Array]:
    """Return the reply to sample requests: for each in turn the arrays counts, sources and, if requested, edge ids."""
    arrays: list[Array] = []
    for sample in samples:
        arrays += sample.counts, narrowed(sample.src)
        if sample.edge is not None:
            arrays.append(narrowed(sample.edge))
    return arrays


def read_samples(message: Message, requests: Sequence[HopRequest]) -> list[HopSample]:
    """Decode the reply to ``requests``. Raises ``WireError`` if the reply does not fit the requests."""
    if len(message.arrays) != sum(2 + one.with_edge for one in requests):
        raise WireError(f"the reply has {len(message.arrays)} arrays for {len(requests)} requests")
    arrays, samples = iter(message.arrays), []
    for one in requests:
        sample = HopSample(next(arrays), next(arrays), next(arrays) if one.with_edge else None)
        counts, num_nodes = sample.counts, len(one.nodes)
        if counts.dtype != np.int32 or counts.shape != (num_nodes,) or (num_nodes and counts.min() < 0):
            raise WireError(
                f"the reply has counts of dtype {counts.dtype} and shape {counts.shape} for {num_nodes} nodes"
            )
        total = counts.sum(dtype=np.int64)
        for ids in (sample.src, sample.edge):
            if ids is not None and len(check_ids(ids)) != total:
                raise WireError(f"the reply has {len(ids)} neighbours, but its counts add up to {total}")
        samples.append(sample)
    return samples


def read_gather_request(message: Message) -> list[RowRequest]:
    """Decode requests for attributes. Raises ``WireError``."""
    requests = GATHER.read(message)
    if (number := sum(len(one.attrs) for one in requests)) > MAX_ARRAYS:
        raise WireError(f"{number} arrays requested; the limit is {MAX_ARRAYS}")
    return requests


def rows_reply(
    message: Message, requests: Sequence[RowRequest], rows: Sequence[Mapping[str, Array]], form_of: FormOf
) -> Message:  # fmt: skip
    """Encode the reply to a request for attributes.

    Raises ``DataError`` for rows that cannot be rounded to the requested form.
    """
    pairs = zip(requests, rows, strict=True)
    columns = [{a: rounded(a, np.asarray(found[a]), form_of(one.of, a)) for a in one.attrs} for one, found in pairs]
    return message.reply(*pack(columns, narrow=False))


def read_rows(message: Message, requests: Sequence[RowRequest]) -> list[dict[str, Array]]:
    """Decode attributes, in their stored dtype.

    Raises ``WireError`` unless each requested attribute has one row per id.
    """
    sent, used = ROWS.read(message), set[int]()
    if [list(columns) for columns in sent] != [list(dict.fromkeys(one.attrs)) for one in requests]:
        raise WireError(f"the reply does not have the attributes {[one.attrs for one in requests]}")
    rows = [{name: restored(column, used) for name, column in columns.items()} for columns in sent]
    for one, columns in zip(requests, rows, strict=True):
        for name, array in columns.items():
            if array.shape[:1] != (len(one.ids),):
                raise WireError(f"attribute {name} has shape {array.shape}, expected {len(one.ids)} rows")
    return rows


def read_has_edges_request(message: Message) -> Pairs:
    """Decode a request whether edges exist. Raises ``WireError`` for an invalid request."""
    pairs = HAS_EDGES.read(message)
    if len(pairs.src) != len(pairs.dst):
        raise WireError(f"the request has {len(pairs.src)} sources, {len(pairs.dst)} targets; expected equal numbers")
    return pairs


def read_found(message: Message, count: int) -> npt.NDArray[np.bool_]:
    """Decode the reply to ``Pairs``: bool [count]. Raises ``WireError`` for any other reply."""
    if len(message.arrays) != 1 or message.arrays[0].dtype != np.bool_ or message.arrays[0].shape != (count,):
        raise WireError(
            f"the reply has the arrays {[(str(array.dtype), array.shape) for array in message.arrays]}, expected bool "
            f"[{count}]"
        )
    return message.arrays[0]


def read_endpoints(message: Message, count: int) -> tuple[Ids, Ids]:
    """Decode the sources and targets of ``count`` edges, int64. Raises ``WireError`` for any other reply."""
    if len(message.arrays) != 2 or any(check_ids(ids).shape != (count,) for ids in message.arrays):
        raise WireError(f"the reply has arrays of shapes {[array.shape for array in message.arrays]} for {count} edges")
    src, dst = map(widened_ids, message.arrays)
    return src, dst


def read_manifest_text(message: Message) -> bytes:
    """Decode the bytes of manifest.json. Raises ``WireError`` for any other reply."""
    if len(message.arrays) != 1 or message.arrays[0].dtype != np.uint8 or message.arrays[0].ndim != 1:
        raise WireError("the manifest in the reply is not one array of bytes")
    return message.arrays[0].tobytes()


def read_shared_request(message: Message) -> SharedSlice:
    """Decode a request for rows of a ``SharedSlice``. Raises ``WireError``."""
    asked = SHARED.read(message)
    if not 0 <= asked.first <= _MAX_SLOT or not 0 <= asked.count <= _MAX_SLOT:
        raise WireError(f"the request asks for an invalid range of rows, {asked.first} to {asked.first + asked.count}")
    return asked


def read_shared(message: Message, asked: SharedSlice) -> Array:
    """Decode the rows of a ``SharedSlice``. Raises ``WireError`` if their number is wrong."""
    rows = [array.shape[0] if array.ndim else 1 for array in message.arrays]
    if rows != [asked.count]:
        raise WireError(f"the reply has arrays of {rows} rows for the request {asked}")
    return message.arrays[0]


def read_ids(message: Message, count: int) -> Ids:
    """Decode a reply of ``count`` ids, int64. Raises ``WireError`` for any other reply."""
    if len(message.arrays) != 1 or message.arrays[0].shape != (count,):
        raise WireError(f"the reply has arrays of shapes {[array.shape for array in message.arrays]} for {count} ids")
    return widened_ids(message.arrays[0])


def acknowledgement(request_id: int) -> Message:
    """Return the message by which a client acknowledges a batch. It has no reply."""
    return Message(Kind.ACK, Status.REQUEST, request_id)


def alive() -> Message:
    """Return a keep-alive to a client that waits for batches. It has no reply."""
    return Message(Kind.ALIVE, Status.OK, 0)
