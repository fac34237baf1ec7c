"""Requests and replies of the graph service as typed values, to and from frames.

An array of rows goes with a *mark* of one byte: how it was rounded, and from which dtype. float16 rows are one array,
int8 rows two: codes [n, …] and scales float32 [n, 1] (``trainer.core.rounding``). Mark 0: the array as it is.
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
from trainer.sampler.request_split import EDGES_AT_ONCE
from trainer.sampler.types import EdgeList, RowRequest
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

_AS_IT_IS: tuple[WireRows, np.dtype] = ("stored", _F4)

_MARKS = (_AS_IT_IS, ("float16", _F4), ("float16", _F8), ("int8", _F2), ("int8", _F4), ("int8", _F8))

_MARK_OF = {what: mark for mark, what in enumerate(_MARKS)}

#: How a request asks for rows in a form.
FLAG_OF: dict[WireRows, Flag] = {"stored": Flag.NONE, "float16": Flag.FLOAT16, "int8": Flag.INT8}


def form_of(flags: Flag) -> WireRows:
    """The form that a request asks for; int8 where it names both."""
    return "int8" if flags & Flag.INT8 else "float16" if flags & Flag.FLOAT16 else "stored"


def rounded(name: str, rows: Array, form: WireRows) -> tuple[int, list[Array]]:
    """Mark and arrays of an attribute's rows. Raises ``DataError`` for rows that ``form`` cannot hold."""
    if not rounding.rounds(name, rows.dtype, rows.shape, form):
        return 0, [rows]
    try:
        arrays = [rounding.to_float16(rows)] if form == "float16" else list(rounding.to_int8(rows))
    except DataError as error:
        raise DataError(f"rows of {name} cannot travel as {form}: {error}; use --wire-rows stored") from None
    return _MARK_OF[form, rows.dtype], arrays


def restored(mark: int, arrays: Iterator[Array]) -> Array:
    """The rows, from the arrays that are next. Raises ``WireError`` for what ``rounded`` cannot have made."""
    if not 0 <= mark < len(_MARKS):
        raise WireError(f"rows of mark {mark}; marks go to {len(_MARKS) - 1}")
    form, dtype = _MARKS[mark]
    sent = _next(arrays)
    if mark == 0:
        return sent
    if sent.ndim < 2 or sent.dtype != form or sent.size * dtype.itemsize > MAX_ARRAY:
        raise WireError(f"{sent.dtype} {sent.shape} in place of {form} rows of at most {MAX_ARRAY} bytes of {dtype}")
    if form == "float16":
        return rounding.from_float16(sent, dtype)
    scales = _next(arrays)
    if scales.dtype != _F4 or scales.shape != (len(sent), 1) or not np.isfinite(scales).all():
        raise WireError(f"{scales.dtype} {scales.shape} in place of a finite scale for each of {len(sent)} rows")
    return rounding.from_int8(sent, scales, dtype)


def _next(arrays: Iterator[Array]) -> Array:
    found = next(arrays, None)
    if found is None:
        raise WireError("fewer arrays than rows were marked")
    return found


@dataclass(frozen=True)
class ServerAddress:
    """A graph server, as others find it."""

    name: str  #: in messages: ``node2 (gpu3)``, or ``node0 (gpu1) of products`` of a serving cluster
    node_rank: int  #: in its own run
    host: str
    endpoint: str  #: tcp://address:port
    parts: tuple[int, ...]


_ROW_RECORD = struct.Struct("<iii")  # type, ids, attribute

_PAIR_RECORD = struct.Struct("<iii")  # edge type, sources, targets

_SLICE_RECORD = struct.Struct("<iiqq")  # edge type, part id, first slot, number of edges

_SHARED_RECORD = struct.Struct("<iiqq")  # node type, name, first row, number of rows

_IDS_RECORD = struct.Struct("<ii")  # node type, ids

_MAX_SLOT = 1 << 62

FormOf = Callable[[AnyType, str], WireRows]  #: how the rows of an attribute are to travel


@dataclass(frozen=True)
class HelloInfo:
    """Who a graph server is."""

    node_rank: int
    host: str
    part_ids: tuple[int, ...]
    manifest_digest: str  #: sha256 of its manifest.json, hex
    version: int = 1  #: of the cluster.json it has read last
    servers: tuple[ServerAddress, ...] = ()  #: all graph servers, as written there


@dataclass(frozen=True)
class ClientName:
    """Who asks for batches: one training process, over all its connections."""

    number: int  #: uint64, drawn at random: what shares and buffers are counted by
    name: str  #: for people: ``run-7/rank3 on gpu2 (pid 811)``


@dataclass(frozen=True)
class SharedSlice:
    """Some rows of an array that all parts share."""

    of: NodeType | None  #: the type whose split it is; None: ``name`` is an attribute of the graph as a whole
    name: str
    first: int
    count: int  #: an array without dimensions is one row


@dataclass(frozen=True)
class ServerStats:
    """Counters of a graph server since its start."""

    requests: int  #: answered, errors included
    errors: int  #: answered with an error
    malformed: int  #: dropped without an answer
    refused: int  #: connections that were not admitted, or did not speak as clients do
    bytes_in: int
    bytes_out: int
    seconds: Mapping[str, float]  #: time in handlers per kind, summed over threads


def gather_request(requests: Sequence[RowRequest]) -> Message:
    """The message asking for rows: a record of type, ids and name for each array wanted."""
    table = TableWriter()
    records = [
        _ROW_RECORD.pack(table.type(request.of), table.ids(request.ids), table.name(name))
        for request in requests
        for name in request.attrs
    ]
    return table.message(Kind.GATHER, b"".join(records))


def read_gather_request(message: Message) -> list[RowRequest]:
    """Neighbouring records of the same rows as one request. Raises ``WireError`` for anything else than requests."""
    if len(message.records) > MAX_ARRAYS * _ROW_RECORD.size:
        raise WireError(f"{len(message.records) // _ROW_RECORD.size} arrays asked for; an answer holds {MAX_ARRAYS}")
    table, requests = TableReader(message), []
    for (of, ids), records in groupby(table.records(_ROW_RECORD), key=lambda record: record[:2]):
        names = tuple(table.name(place) for _, _, place in records)
        requests.append(RowRequest(table.type(of), table.ids(ids), names))
    return requests


def rows_reply(
    message: Message, requests: Sequence[RowRequest], rows: Sequence[Mapping[str, Array]], form_of: FormOf
) -> Message:  # fmt: skip
    """The answer to ``gather``; its records are the marks of the arrays asked for, none where all are as stored.

    Raises ``DataError`` for rows that their form cannot hold.
    """
    columns = [
        rounded(name, np.asarray(found[name]), form_of(request.of, name))
        for request, found in zip(requests, rows, strict=True)
        for name in request.attrs
    ]
    marks = bytes(mark for mark, _ in columns)
    return message.reply([array for _, arrays in columns for array in arrays], records=marks if any(marks) else b"")


def read_rows(message: Message, requests: Sequence[RowRequest]) -> list[dict[str, Array]]:
    """Rows in the dtype they have there. Raises ``WireError`` unless each attribute asked for has one row per id."""
    number = sum(len(request.attrs) for request in requests)
    marks, arrays = iter(message.records or bytes(number)), iter(message.arrays)
    if len(message.records) not in (0, number):
        raise WireError(f"{len(message.records)} marks for {[request.attrs for request in requests]}")
    rows = [{name: restored(next(marks), arrays) for name in request.attrs} for request in requests]
    if next(arrays, None) is not None:
        raise WireError(f"{len(message.arrays)} arrays for {[request.attrs for request in requests]}")
    for request, columns in zip(requests, rows, strict=True):
        for name, array in columns.items():
            if array.shape[:1] != (len(request.ids),):
                raise WireError(f"{name} of shape {array.shape} for {len(request.ids)} ids")
    return rows


def has_edges_request(edge_type: EdgeType, src: Ids, dst: Ids) -> Message:
    """The message asking which of these edges exist."""
    table = TableWriter()
    return table.message(Kind.HAS_EDGES, _PAIR_RECORD.pack(table.type(edge_type), table.ids(src), table.ids(dst)))


def read_has_edges_request(message: Message) -> tuple[EdgeType, Ids, Ids]:
    """Edge type, sources and targets. Raises ``WireError`` unless the message is a complete request."""
    table = TableReader(message)
    of, src, dst = _only(table.records(_PAIR_RECORD))
    if len(table.ids(src)) != len(table.ids(dst)):
        raise WireError(f"{len(table.ids(src))} sources, {len(table.ids(dst))} targets")
    return table.edge_type(of), table.ids(src), table.ids(dst)


def read_found(message: Message, count: int) -> npt.NDArray[np.bool_]:
    """Raises ``WireError`` unless the answer is one boolean per edge."""
    if len(message.arrays) != 1 or message.arrays[0].dtype != np.bool_ or message.arrays[0].shape != (count,):
        raise WireError(f"arrays {[(str(array.dtype), array.shape) for array in message.arrays]} for {count} edges")
    return message.arrays[0]


def edges_request(part_id: int, edge_type: EdgeType, first: int, count: int) -> Message:
    """The message asking for a slice of a part's edges."""
    table = TableWriter()
    return table.message(Kind.EDGES, _SLICE_RECORD.pack(table.type(edge_type), part_id, first, count))


def read_edges_request(message: Message) -> tuple[int, EdgeType, int, int]:
    """Part, edge type, first slot and number of edges. Raises ``WireError`` for too many at once."""
    table = TableReader(message)
    of, part_id, first, count = _only(table.records(_SLICE_RECORD))
    if not 0 <= count <= EDGES_AT_ONCE or not 0 <= first <= _MAX_SLOT:
        raise WireError(f"edges {first} to {first + count}; at most {EDGES_AT_ONCE} are sent at once")
    return part_id, table.edge_type(of), first, count


def edge_arrays(edges: EdgeList) -> list[Array]:
    """The arrays of the answer to ``edges``."""
    return [narrow_ids(edges.src), narrow_ids(edges.dst), narrow_ids(edges.orig_id)]


def read_edges(message: Message, count: int) -> EdgeList:
    """Raises ``WireError`` unless the answer is ``count`` edges."""
    if len(message.arrays) != 3 or any(len(check_ids(ids)) != count for ids in message.arrays):
        raise WireError(f"arrays of shapes {[array.shape for array in message.arrays]} for {count} edges")
    src, dst, orig_id = map(widen_ids, message.arrays)
    return EdgeList(src, dst, orig_id)


def read_manifest_text(message: Message) -> bytes:
    """The file as it is. Raises ``WireError`` for anything else than bytes."""
    if len(message.arrays) != 1 or message.arrays[0].dtype != np.uint8 or message.arrays[0].ndim != 1:
        raise WireError("a manifest that is not one run of bytes")
    return message.arrays[0].tobytes()


def shared_request(asked: SharedSlice) -> Message:
    """The message asking for some rows of a shared array."""
    table = TableWriter()
    of = NONE if asked.of is None else table.type(asked.of)
    return table.message(Kind.SHARED, _SHARED_RECORD.pack(of, table.name(asked.name), asked.first, asked.count))


def read_shared_request(message: Message) -> SharedSlice:
    """Raises ``WireError`` unless the message is a complete request."""
    table = TableReader(message)
    of, name, first, count = _only(table.records(_SHARED_RECORD))
    if not 0 <= first <= _MAX_SLOT or not 0 <= count <= _MAX_SLOT:
        raise WireError(f"rows {first} to {first + count}")
    return SharedSlice(None if of == NONE else table.node_type(of), table.name(name), first, count)


def read_shared(message: Message, asked: SharedSlice) -> Array:
    """Raises ``WireError`` unless the answer is one array of as many rows."""
    rows = [array.shape[0] if array.ndim else 1 for array in message.arrays]
    if rows != [asked.count]:
        raise WireError(f"arrays of {rows} rows for {asked}")
    return message.arrays[0]


def to_global_request(of: NodeType, orig_ids: Ids) -> Message:
    """The message asking for the global ids of original ids."""
    table = TableWriter()
    return table.message(Kind.TO_GLOBAL, _IDS_RECORD.pack(table.type(of), table.ids(orig_ids)))


def read_to_global_request(message: Message) -> tuple[NodeType, Ids]:
    """Node type and original ids. Raises ``WireError`` unless the message is a complete request."""
    table = TableReader(message)
    of, ids = _only(table.records(_IDS_RECORD))
    return table.node_type(of), table.ids(ids)


def read_ids(message: Message, count: int) -> Ids:
    """int64 [count]. Raises ``WireError`` for another answer."""
    if len(message.arrays) != 1 or message.arrays[0].shape != (count,):
        raise WireError(f"arrays of shapes {[array.shape for array in message.arrays]} for {count} ids")
    return widen_ids(message.arrays[0])


def taken(request_id: int) -> Message:
    """Tells the server that the batch of this request has arrived; nobody answers."""
    return Message(Kind.TAKEN, Status.REQUEST, request_id)


def alive() -> Message:
    """Tells a client that its server is still at work on its batches; nobody answers."""
    return Message(Kind.ALIVE, Status.OK, 0)


def _only(records: Iterator[tuple[Any, ...]]) -> tuple[Any, ...]:
    first = next(records, None)
    if first is None or next(records, None) is not None:
        raise WireError("expected one record")
    return first


def info_text(info: HelloInfo | ServerStats) -> str:
    """JSON for the text of a reply to ``hello`` or ``stats``."""
    return json.dumps(asdict(info))


def read_hello(message: Message) -> HelloInfo:
    """Raises ``WireError`` unless the reply describes a server."""
    fields = _json_object(message)
    try:
        parts = tuple(int(part) for part in fields["part_ids"])
        return HelloInfo(
            node_rank=int(fields["node_rank"]),
            host=str(fields["host"]),
            part_ids=parts,
            manifest_digest=str(fields["manifest_digest"]),
            version=int(fields["version"]),
            servers=tuple(map(_place, fields["servers"])),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise WireError(f"a hello that cannot be understood: {error!r}") from None


def _place(raw: Mapping[str, Any]) -> ServerAddress:
    name, host, endpoint = (str(raw[key]) for key in ("name", "host", "endpoint"))
    return ServerAddress(name, int(raw["node_rank"]), host, endpoint, tuple(map(int, raw["parts"])))


def read_stats(message: Message) -> ServerStats:
    """Raises ``WireError`` unless the reply holds exactly the counters."""
    try:
        return ServerStats(**_json_object(message))
    except TypeError as error:
        raise WireError(f"stats that cannot be understood: {error}") from None


def _json_object(message: Message) -> dict[str, Any]:
    try:
        value = json.loads(message.text)
    except ValueError as error:
        raise WireError(f"text that is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise WireError("text that is not a JSON object")
    return value
