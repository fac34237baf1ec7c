"""Encodes and decodes the requests and replies of the graph service, except those for sampled neighbours and batches.

Each array of rows has a *mark*, a byte that states whether and how the array was rounded, and its original dtype. Rows
rounded to int8 are sent as two arrays: codes [n, …] and scales float32 [n, 1].
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.core import rounding
from trainer.core.arrays import Array, Ids
from trainer.core.errors import DataError, WireError
from trainer.core.remote_settings import WireRows
from trainer.core.schema import AnyType, EdgeType, NodeType
from trainer.sampler.types import RowRequest
from trainer.service.wire.frames import (
    MAX_ARRAY,
    MAX_ARRAYS,
    NONE,
    Flag,
    Kind,
    Message,
    Status,
    TableReader,
    TableWriter,
    check_ids,
    narrow_ids,
    widen_ids,
)

_F2, _F4, _F8 = map(np.dtype, ("<f2", "<f4", "<f8"))

_NOT_ROUNDED: tuple[WireRows, np.dtype] = ("stored", _F4)

_MARKS = (_NOT_ROUNDED, ("float16", _F4), ("float16", _F8), ("int8", _F2), ("int8", _F4), ("int8", _F8))

_MARK_OF = {rounding_of: mark for mark, rounding_of in enumerate(_MARKS)}

#: Flag with which a request allows rows to be rounded to a form.
FLAG_OF: dict[WireRows, Flag] = {"stored": Flag.NONE, "float16": Flag.FLOAT16, "int8": Flag.INT8}


def form_of(flags: Flag) -> WireRows:
    """Return the dtype (stored, float16 or int8) of rows in the reply to a request with ``flags``."""
    return "int8" if flags & Flag.INT8 else "float16" if flags & Flag.FLOAT16 else "stored"


def rounded(name: str, rows: Array, form: WireRows) -> tuple[int, list[Array]]:
    """Round an attribute's rows to ``form``. Returns the mark of the rows, and the arrays to send.

    The mark is a byte that states the original dtype, and whether and how the rows were rounded.

    Raises ``DataError`` for rows that ``form`` cannot represent.
    """
    if not rounding.rounds(name, rows.dtype, rows.shape, form):
        return 0, [rows]
    try:
        arrays = [rounding.to_float16(rows)] if form == "float16" else list(rounding.to_int8(rows))
    except DataError as error:
        raise DataError(f"rows of {name} cannot be sent as {form}: {error}; use --wire-rows stored") from None
    return _MARK_OF[form, rows.dtype], arrays


def restored(mark: int, arrays: Iterator[Array]) -> Array:
    """Return an attribute's rows, given their mark and the arrays that ``rounded`` made.

    Takes one or two arrays from ``arrays``. Raises ``WireError`` for invalid marks or arrays.
    """
    if not 0 <= mark < len(_MARKS):
        raise WireError(f"rows have the unknown mark {mark}; marks go from 0 to {len(_MARKS) - 1}")
    form, dtype = _MARKS[mark]
    sent = _next(arrays)
    if mark == 0:
        return sent
    if sent.ndim < 2 or sent.dtype != form or sent.size * dtype.itemsize > MAX_ARRAY:
        raise WireError(
            f"the reply has rows of dtype {sent.dtype} and shape {sent.shape}, expected {form} rows with at least 2 "
            f"dimensions and at most {MAX_ARRAY} bytes in their original dtype {dtype}"
        )
    if form == "float16":
        return rounding.from_float16(sent, dtype)
    scales = _next(arrays)
    if scales.dtype != _F4 or scales.shape != (len(sent), 1) or not np.isfinite(scales).all():
        raise WireError(
            f"the scales are {scales.dtype} {scales.shape}, expected a finite float32 for each of {len(sent)} rows"
        )
    return rounding.from_int8(sent, scales, dtype)


def _next(arrays: Iterator[Array]) -> Array:
    found = next(arrays, None)
    if found is None:
        raise WireError("the reply has fewer arrays than marks")
    return found


@dataclass(frozen=True)
class ServerAddress:
    name: str  #: name in messages: ``node2 (gpu3)``, or ``node0 (gpu1) of products`` in a serving cluster
    node_rank: int  #: node rank in the run or serving cluster that started the server
    host: str
    endpoint: str  #: tcp://address:port
    parts: tuple[int, ...]


_ROW_RECORD = struct.Struct("<iii")  # type, ids, attribute

_PAIR_RECORD = struct.Struct("<iii")  # edge type, sources, targets


_SHARED_RECORD = struct.Struct("<iiqq")  # node type, name, first row, number of rows

_IDS_RECORD = struct.Struct("<ii")  # node type or edge type, ids

_MAX_SLOT = 1 << 62

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


def gather_request(requests: Sequence[RowRequest]) -> Message:
    table = TableWriter()
    records = [
        _ROW_RECORD.pack(table.type(request.of), table.ids(request.ids), table.name(name))
        for request in requests
        for name in request.attrs
    ]
    return table.message(Kind.GATHER, b"".join(records))


def read_gather_request(message: Message) -> list[RowRequest]:
    """Decode requests for attributes. Raises ``WireError``."""
    if len(message.records) > MAX_ARRAYS * _ROW_RECORD.size:
        raise WireError(f"{len(message.records) // _ROW_RECORD.size} arrays requested; the limit is {MAX_ARRAYS}")
    table, requests = TableReader(message), []
    for (of, ids), records in groupby(table.records(_ROW_RECORD), key=lambda record: record[:2]):
        names = tuple(table.name(place) for _, _, place in records)
        requests.append(RowRequest(table.type(of), table.ids(ids), names))
    return requests


def rows_reply(
    message: Message, requests: Sequence[RowRequest], rows: Sequence[Mapping[str, Array]], form_of: FormOf
) -> Message:  # fmt: skip
    """Encode the reply to a request for attributes.

    If any array is rounded, the records of the reply are the marks of all arrays. A mark states how its array was
    rounded.

    Raises ``DataError`` for rows that cannot be rounded to the requested form.
    """
    columns = [
        rounded(name, np.asarray(found[name]), form_of(request.of, name))
        for request, found in zip(requests, rows, strict=True)
        for name in request.attrs
    ]
    marks = bytes(mark for mark, _ in columns)
    return message.reply([array for _, arrays in columns for array in arrays], records=marks if any(marks) else b"")


def read_rows(message: Message, requests: Sequence[RowRequest]) -> list[dict[str, Array]]:
    """Decode attributes, in their stored dtype.

    Raises ``WireError`` unless each requested attribute has one row per id.
    """
    number = sum(len(request.attrs) for request in requests)
    marks, arrays = iter(message.records or bytes(number)), iter(message.arrays)
    if len(message.records) not in (0, number):
        raise WireError(
            f"the reply has {len(message.records)} marks for the attributes {[request.attrs for request in requests]}"
        )
    rows = [{name: restored(next(marks), arrays) for name in request.attrs} for request in requests]
    if next(arrays, None) is not None:
        raise WireError(
            f"the reply has {len(message.arrays)} arrays for the attributes {[request.attrs for request in requests]}"
        )
    for request, columns in zip(requests, rows, strict=True):
        for name, array in columns.items():
            if array.shape[:1] != (len(request.ids),):
                raise WireError(f"attribute {name} has shape {array.shape}, expected {len(request.ids)} rows")
    return rows


def has_edges_request(edge_type: EdgeType, src: Ids, dst: Ids) -> Message:
    table = TableWriter()
    return table.message(Kind.HAS_EDGES, _PAIR_RECORD.pack(table.type(edge_type), table.ids(src), table.ids(dst)))


def read_has_edges_request(message: Message) -> tuple[EdgeType, Ids, Ids]:
    """Decode the request of ``has_edges_request``: edge type, sources and targets.

    Raises ``WireError`` for an invalid request.
    """
    table = TableReader(message)
    of, src, dst = _only(table.records(_PAIR_RECORD))
    if len(table.ids(src)) != len(table.ids(dst)):
        raise WireError(
            f"the request has {len(table.ids(src))} sources, {len(table.ids(dst))} targets; expected equal numbers"
        )
    return table.edge_type(of), table.ids(src), table.ids(dst)


def read_found(message: Message, count: int) -> npt.NDArray[np.bool_]:
    """Decode the reply to ``has_edges_request``: bool [count]. Raises ``WireError`` for any other reply."""
    if len(message.arrays) != 1 or message.arrays[0].dtype != np.bool_ or message.arrays[0].shape != (count,):
        raise WireError(
            f"the reply has the arrays {[(str(array.dtype), array.shape) for array in message.arrays]}, expected bool "
            f"[{count}]"
        )
    return message.arrays[0]


def endpoints_request(edge_type: EdgeType, edges: Ids) -> Message:
    table = TableWriter()
    return table.message(Kind.ENDPOINTS, _IDS_RECORD.pack(table.type(edge_type), table.ids(edges)))


def read_endpoints_request(message: Message) -> tuple[EdgeType, Ids]:
    """Decode edge type and original edge ids of ``endpoints_request``. Raises ``WireError``."""
    table = TableReader(message)
    of, edges = _only(table.records(_IDS_RECORD))
    return table.edge_type(of), table.ids(edges)


def endpoint_arrays(ends: tuple[Ids, Ids]) -> list[Array]:
    return [narrow_ids(nodes) for nodes in ends]


def read_endpoints(message: Message, count: int) -> tuple[Ids, Ids]:
    """Decode the sources and targets of ``count`` edges, int64. Raises ``WireError`` for any other reply."""
    if len(message.arrays) != 2 or any(check_ids(ids).shape != (count,) for ids in message.arrays):
        raise WireError(f"the reply has arrays of shapes {[array.shape for array in message.arrays]} for {count} edges")
    src, dst = map(widen_ids, message.arrays)
    return src, dst


def read_manifest_text(message: Message) -> bytes:
    """Decode the bytes of manifest.json. Raises ``WireError`` for any other reply."""
    if len(message.arrays) != 1 or message.arrays[0].dtype != np.uint8 or message.arrays[0].ndim != 1:
        raise WireError("the manifest in the reply is not one array of bytes")
    return message.arrays[0].tobytes()


def shared_request(asked: SharedSlice) -> Message:
    table = TableWriter()
    of = NONE if asked.of is None else table.type(asked.of)
    return table.message(Kind.SHARED, _SHARED_RECORD.pack(of, table.name(asked.name), asked.first, asked.count))


def read_shared_request(message: Message) -> SharedSlice:
    """Decode a request for rows of a ``SharedSlice``. Raises ``WireError``."""
    table = TableReader(message)
    of, name, first, count = _only(table.records(_SHARED_RECORD))
    if not 0 <= first <= _MAX_SLOT or not 0 <= count <= _MAX_SLOT:
        raise WireError(f"the request asks for an invalid range of rows, {first} to {first + count}")
    return SharedSlice(None if of == NONE else table.node_type(of), table.name(name), first, count)


def read_shared(message: Message, asked: SharedSlice) -> Array:
    """Decode the rows of a ``SharedSlice``. Raises ``WireError`` if their number is wrong."""
    rows = [array.shape[0] if array.ndim else 1 for array in message.arrays]
    if rows != [asked.count]:
        raise WireError(f"the reply has arrays of {rows} rows for the request {asked}")
    return message.arrays[0]


def to_global_request(of: NodeType, orig_ids: Ids) -> Message:
    table = TableWriter()
    return table.message(Kind.TO_GLOBAL, _IDS_RECORD.pack(table.type(of), table.ids(orig_ids)))


def read_to_global_request(message: Message) -> tuple[NodeType, Ids]:
    """Decode a request for global ids: node type and original ids. Raises ``WireError``."""
    table = TableReader(message)
    of, ids = _only(table.records(_IDS_RECORD))
    return table.node_type(of), table.ids(ids)


def read_ids(message: Message, count: int) -> Ids:
    """Decode a reply of ``count`` ids, int64. Raises ``WireError`` for any other reply."""
    if len(message.arrays) != 1 or message.arrays[0].shape != (count,):
        raise WireError(f"the reply has arrays of shapes {[array.shape for array in message.arrays]} for {count} ids")
    return widen_ids(message.arrays[0])


def acknowledgement(request_id: int) -> Message:
    """Return the message by which a client acknowledges a batch. It has no reply."""
    return Message(Kind.ACK, Status.REQUEST, request_id)


def alive() -> Message:
    """Return a keep-alive to a client that waits for batches. It has no reply."""
    return Message(Kind.ALIVE, Status.OK, 0)


def _only(records: Iterator[tuple[Any, ...]]) -> tuple[Any, ...]:
    first = next(records, None)
    if first is None or next(records, None) is not None:
        raise WireError("the message does not have exactly one record")
    return first


def info_text(info: HelloInfo | ServerStats) -> str:
    return json.dumps(asdict(info))


def read_hello(message: Message) -> HelloInfo:
    fields = _json_object(message)
    try:
        parts = tuple(int(part) for part in fields["part_ids"])
        return HelloInfo(
            node_rank=int(fields["node_rank"]),
            host=str(fields["host"]),
            part_ids=parts,
            manifest_digest=str(fields["manifest_digest"]),
            version=int(fields["version"]),
            servers=tuple(map(_address, fields["servers"])),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise WireError(f"an invalid reply to hello: {error!r}") from None


def _address(raw: Mapping[str, Any]) -> ServerAddress:
    name, host, endpoint = (str(raw[key]) for key in ("name", "host", "endpoint"))
    return ServerAddress(name, int(raw["node_rank"]), host, endpoint, tuple(map(int, raw["parts"])))


def read_stats(message: Message) -> ServerStats:
    try:
        return ServerStats(**_json_object(message))
    except TypeError as error:
        raise WireError(f"an invalid reply to stats: {error}") from None


def _json_object(message: Message) -> dict[str, Any]:
    try:
        value = json.loads(message.text)
    except ValueError as error:
        raise WireError(f"the text of the reply is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise WireError("the text of the reply is not a JSON object")
    return value
