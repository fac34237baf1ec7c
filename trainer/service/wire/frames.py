"""The wire format: a fixed header and raw little-endian arrays, without pickle.

A message is a list of frames. Frame 0, the head, consists of the header, one descriptor per array, the records (structs
whose format depends on the kind of message), text, and the small arrays, each aligned to 8 bytes. Each further frame is
the memory of a larger, C-contiguous array.

======  =====================================================================
header  magic ``GNFS`` · version u16 · kind u8 · status u8 · request id u64 · number of arrays u32 ·
        bytes of records u32 · bytes of UTF-8 text u32 · flags u32 (``Flag``)
array   dtype code u8 · ndim u8 · 6 zero bytes · shape 8 × u64 (0 beyond ndim)
======  =====================================================================
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, IntFlag
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.core import slabs
from trainer.core.arrays import Array, Ids
from trainer.core.errors import DataError, WireError
from trainer.core.schema import AnyType, EdgeType, NodeType, type_name, type_of

VERSION = 7

MAX_ARRAY = 1 << 30  #: bytes of one array

MAX_MESSAGE = 1 << 32  #: bytes of all arrays of a message

MAX_ARRAYS = 4096

MAX_RECORDS = 1 << 20  #: bytes

MAX_TEXT = 1 << 16  #: bytes of UTF-8

SMALL = 4096  #: bytes; arrays up to this size are copied into the head, which is faster than a separate part (measured)

_MAGIC = b"GNFS"

_HEADER = struct.Struct("<4sHBBQIIII")

_MAX_NDIM = 8

_DESCRIPTOR = struct.Struct(f"<BB6s{_MAX_NDIM}Q")

_ALIGN = 8

_PAD = bytes(6)

_INT32_MAX = np.iinfo(np.int32).max

_DTYPES: tuple[npt.DTypeLike, ...] = (
    "?", "i1", "<i2", "<i4", "<i8", "u1", "<u2", "<u4", "<u8", "<f2", "<f4", "<f8", "<c8", "<c16",
)  # fmt: skip

_DTYPE_OF_CODE = tuple(np.dtype(name) for name in _DTYPES)

_CODE_OF_DTYPE = {dtype: code for code, dtype in enumerate(_DTYPE_OF_CODE)}

#: Bytes of the largest head that a valid message can have.
MAX_HEAD = _HEADER.size + MAX_ARRAYS * (_DESCRIPTOR.size + SMALL) + MAX_RECORDS + MAX_TEXT + _ALIGN


class Kind(IntEnum):
    HELLO = 1
    SAMPLE = 2
    GATHER = 3
    STATS = 4
    HAS_EDGES = 5
    BATCH = 7  #: a whole batch: subgraph and rows
    ACK = 8  #: acknowledges the batch with this request id; has no reply
    MANIFEST = 9  #: manifest.json
    SHARED = 10  #: a slice of an array common to all parts: seeds of a split, graph attributes
    TO_GLOBAL = 11  #: global ids of original ids
    ALIVE = 12  #: keep-alive from a server to clients that wait for a batch; has no reply
    ENDPOINTS = 13  #: sources and targets of edges given by original ids


NONE = -1  #: index of an absent array or name


class Flag(IntFlag):
    NONE = 0
    ROUTE = 1  #: answer for the whole graph, by requests to other servers where needed
    FLOAT16 = 2  #: floating-point rows of the reply may be rounded to float16 (``rounded``)
    INT8 = 4  #: they may be rounded to int8


class Status(IntEnum):
    """Whether a message is a request, a reply or an error reply. The text of an ERROR message is the cause."""

    REQUEST = 0
    OK = 1
    ERROR = 2


_KINDS = frozenset(Kind)

_ALL_FLAGS = Flag.ROUTE | Flag.FLOAT16 | Flag.INT8


@dataclass(frozen=True)
class Message:
    kind: Kind
    status: Status
    request_id: int  #: uint64, chosen by the client; the reply repeats it
    arrays: tuple[Array, ...] = ()
    text: str = ""
    records: bytes = b""  #: structs whose format depends on the kind
    flags: Flag = Flag.NONE
    size: int = field(default=0, compare=False)  #: bytes of its frames; 0 unless received

    def reply(self, arrays: Sequence[Array] = (), text: str = "", records: bytes = b"") -> Message:
        return Message(self.kind, Status.OK, self.request_id, tuple(arrays), text, records)

    def error(self, cause: str) -> Message:
        """Return an error reply to this request. A long cause is truncated."""
        text = cause.encode("utf-8", "replace")[:MAX_TEXT].decode("utf-8", "ignore")
        return Message(self.kind, Status.ERROR, self.request_id, (), text)


def encode(message: Message, max_array: int = MAX_ARRAY, request_id: int | None = None) -> list[Any]:
    """Return the frames to send: the head as bytes, then the larger arrays, without a copy if they are C-contiguous.

    ``request_id`` is used in place of ``message.request_id``. Raises ``WireError`` for a message that ``decode`` would
    reject.
    """
    text, records = message.text.encode(), message.records
    if len(message.arrays) > MAX_ARRAYS or len(text) > MAX_TEXT or len(records) > MAX_RECORDS:
        raise WireError(
            f"{len(message.arrays)} arrays, {len(text)} bytes of names and {len(records)} of records are too many for "
            f"one message; the limits are {MAX_ARRAYS}, {MAX_TEXT} and {MAX_RECORDS}"
        )
    arrays = [_on_wire(array, max_array) for array in message.arrays]
    if (total := sum(array.nbytes for array in arrays)) > MAX_MESSAGE:
        raise WireError(f"the arrays take {total} bytes, over the limit of {MAX_MESSAGE}; ask for fewer nodes at once")
    number = message.request_id if request_id is None else request_id
    header = _HEADER.pack(
        _MAGIC, VERSION, message.kind, message.status, number, len(arrays), len(records), len(text), message.flags
    )
    head = bytearray(header + b"".join(map(_describe, arrays)) + records + text)
    frames: list[Any] = []
    for array in arrays:
        if array.nbytes <= SMALL:
            head += bytes(-len(head) % _ALIGN) + array.tobytes()
        else:
            frames.append(array.reshape(-1).view(np.uint8))
    return [bytes(head), *frames]


def _on_wire(array: Array, max_array: int) -> Array:
    """Return the array as little-endian and C-contiguous. Raises ``WireError`` if it cannot be sent."""
    dtype = array.dtype.newbyteorder("<")
    if dtype not in _CODE_OF_DTYPE:
        raise WireError(f"arrays of dtype {array.dtype} cannot be sent; only booleans and numbers up to 128 bits can")
    if array.ndim > _MAX_NDIM:
        raise WireError(f"an array of {array.ndim} dimensions cannot be sent; the most is {_MAX_NDIM}")
    if array.nbytes > max_array:
        raise WireError(
            f"an array takes {array.nbytes} bytes, over the limit of {max_array}; ask for fewer nodes at once"
        )
    return np.asarray(array, dtype=dtype, order="C")


def _describe(array: Array) -> bytes:
    shape = array.shape + (0,) * (_MAX_NDIM - array.ndim)
    return _DESCRIPTOR.pack(_CODE_OF_DTYPE[array.dtype], array.ndim, _PAD, *shape)


def decode(frames: Sequence[Any], max_array: int = MAX_ARRAY, max_message: int = MAX_MESSAGE) -> Message:
    """Decode a message from received frames, which are bytes or other buffers.

    Larger arrays are views of their frames if alignment allows. Raises ``WireError`` if the message is invalid or of
    another version, if an array is over ``max_array`` bytes, or if all arrays are over ``max_message`` bytes. Sizes are
    checked before memory is allocated.
    """
    if not frames:
        raise WireError("the message has no frames")
    head = bytes(frames[0]) if len(frames[0]) <= MAX_HEAD else b""
    if len(head) < _HEADER.size:
        raise WireError(f"the head has {len(frames[0])} bytes, expected {_HEADER.size} to {MAX_HEAD}")
    magic, version, kind, status, request_id, count, records_len, text_len, flags = _HEADER.unpack_from(head)
    if magic != _MAGIC or version != VERSION or flags > _ALL_FLAGS:
        raise WireError(
            f"the message has magic {magic!r}, version {version} and flags {flags}; expected magic {_MAGIC!r} and "
            f"version {VERSION}"
        )
    if count > MAX_ARRAYS or records_len > MAX_RECORDS or text_len > MAX_TEXT:
        raise WireError(
            f"the head announces {count} arrays, {records_len} bytes of records and {text_len} of text; the limits are "
            f"{MAX_ARRAYS}, {MAX_RECORDS} and {MAX_TEXT}"
        )
    records_at = _HEADER.size + count * _DESCRIPTOR.size
    text_at = records_at + records_len
    if text_at + text_len > len(head):
        raise WireError(f"the head has {len(head)} bytes, but its fields need {text_at + text_len}")
    arrays = _read_arrays(head, count, text_at + text_len, frames[1:], max_array, max_message)
    try:
        text, records = head[text_at : text_at + text_len].decode(), head[records_at:text_at]
        size = sum(map(len, frames))
        return Message(Kind(kind), Status(status), request_id, arrays, text, records, Flag(flags), size)
    except ValueError as error:
        raise WireError(str(error)) from None


def head_of(frames: Sequence[Any]) -> Message | None:
    """Decode only the kind and the id of a request. Returns None if the header is not that of a request."""
    head = bytes(memoryview(frames[0])[: _HEADER.size]) if frames else b""
    if len(head) < _HEADER.size:
        return None
    magic, version, kind, status, request_id, *_ = _HEADER.unpack(head)
    if magic != _MAGIC or version != VERSION or kind not in _KINDS or status != Status.REQUEST:
        return None
    return Message(Kind(kind), Status.REQUEST, request_id)


@dataclass(frozen=True)
class _ArrayHeader:
    dtype: np.dtype[Any]
    shape: list[int]
    size: int  #: bytes of the array


def _read_arrays(
    head: bytes, count: int, end: int, frames: Sequence[Any], max_array: int, max_message: int
) -> tuple[Array, ...]:
    """Decode all arrays of a message. The small arrays begin at offset ``end`` of the head.

    Raises ``WireError`` for an invalid descriptor, a wrong number of frames, and a head that is too short or too long.
    """
    headers = [_read_descriptor(head, position, max_array) for position in range(count)]
    total, needed = sum(one.size for one in headers), sum(one.size > SMALL for one in headers)
    if total > max_message or needed != len(frames):
        raise WireError(
            f"arrays of {total} bytes in {len(frames)} frames; expected at most {max_message} bytes in {needed} frames"
        )
    arrays, further = [], iter(frames)
    for one in headers:
        if one.size <= SMALL:
            begin = end + -end % _ALIGN
            end = begin + one.size
            arrays.append(_array(head[begin:end], one).copy())  # writable
        else:
            arrays.append(_array(next(further), one))
    if end != len(head):
        raise WireError(f"the head has {len(head)} bytes, expected {end}")
    return tuple(arrays)


def _read_descriptor(head: bytes, position: int, max_array: int) -> _ArrayHeader:
    code, ndim, pad, *dims = _DESCRIPTOR.unpack_from(head, _HEADER.size + position * _DESCRIPTOR.size)
    if code >= len(_DTYPE_OF_CODE) or ndim > _MAX_NDIM or any(dims[ndim:]) or pad != _PAD:
        raise WireError(
            f"array {position} has an invalid descriptor: dtype code {code}, {ndim} dimensions, shape {dims}"
        )
    dtype, shape = _DTYPE_OF_CODE[code], dims[:ndim]
    return _ArrayHeader(dtype, shape, _num_bytes(shape, dtype, max_array))


def _num_bytes(shape: list[int], dtype: np.dtype[Any], limit: int) -> int:
    """Return the size of an array in bytes. Raises ``WireError`` if it exceeds ``limit``.

    In this check, a dimension of 0 counts as 1, because numpy limits the other dimensions of empty arrays, too.
    """
    size = math.prod(shape) * dtype.itemsize
    if size > limit or (not size and math.prod(filter(None, shape)) * dtype.itemsize > limit):
        raise WireError(f"an array of shape {shape} and dtype {dtype} is over {limit} bytes")
    return size


def _array(buffer: Any, one: _ArrayHeader) -> Array:
    if len(buffer) != one.size:
        raise WireError(
            f"an array of shape {one.shape} and dtype {one.dtype} has {len(buffer)} bytes, expected {one.size}"
        )
    if not one.size:
        return np.empty(one.shape, one.dtype)
    array = np.frombuffer(buffer, dtype=one.dtype)
    return (array if array.flags.aligned else array.copy()).reshape(one.shape)


def narrow_ids(ids: Array) -> Array:
    """Return ids as int32 if they fit, else as int64. The result is a copy unless the ids are int32 already."""
    fits = not len(ids) or (int(ids.max()) <= _INT32_MAX and int(ids.min()) >= -_INT32_MAX)
    if not fits:
        return slabs.cast(ids, np.int64)
    return ids if ids.dtype == np.int32 else slabs.cast(ids, np.int32)


def narrow(array: Array) -> Array:
    if array.dtype != np.int64 or (array.size and not -_INT32_MAX <= array.min() <= array.max() <= _INT32_MAX):
        return array
    return slabs.cast(array, np.int32)


def check_ids(array: Array) -> Array:
    """Return received ids unchanged. Raises ``WireError`` unless they are int32 or int64 [n]."""
    if array.ndim != 1 or array.dtype not in (np.int32, np.int64):
        raise WireError(f"ids of dtype {array.dtype} and shape {array.shape}; expected int32 or int64 [n]")
    return array


def widen_ids(array: Array) -> Ids:
    """Return received ids as int64 [n]. Raises ``WireError`` unless they are int32 or int64 [n]."""
    return slabs.cast(check_ids(array), np.int64)


class TableWriter:
    """Collects the arrays and names of a message.

    The methods that add an array or a name return an index. The records of the message refer to it by this index.
    """

    def __init__(self) -> None:
        self._arrays: list[Array] = []
        self._places: dict[int, tuple[int, Array]] = {}  # refers to the array, so that its id() is not reused
        self._names: dict[str, int] = {}

    def ids(self, array: Ids | None) -> int:
        """Add ids int64 [n], which are sent as int32 if they fit. Adding an array again returns the same index."""
        if array is None:
            return NONE
        if id(array) not in self._places:
            self._places[id(array)] = len(self._arrays), array
            self._arrays.append(narrow_ids(array))
        return self._places[id(array)][0]

    def array(self, array: Array | None) -> int:
        """Add an array of any dtype, and return twice its index, plus 1 if it is an int64 array sent as int32.

        int64 arrays are sent as int32 if their values fit. Returns ``NONE`` for None.
        """
        if array is None:
            return NONE
        self._arrays.append(sent := narrow(array))
        return 2 * (len(self._arrays) - 1) + (sent.dtype != array.dtype)

    def name(self, name: str | None) -> int:
        """Add a name. Raises ``WireError`` for a name with a line break."""
        if name is None:
            return NONE
        if "\n" in name:
            raise WireError(f"{name!r} has a line break, which names cannot have")
        return self._names.setdefault(name, len(self._names))

    def type(self, of: AnyType) -> int:
        return self.name(type_name(of))

    def message(self, kind: Kind, records: bytes) -> Message:
        # The channel sets the request id.
        return Message(kind, Status.REQUEST, 0, tuple(self._arrays), "\n".join(self._names), records)

    def reply_to(self, request: Message, records: bytes) -> Message:
        return request.reply(self._arrays, "\n".join(self._names), records)


class TableReader:
    """The arrays and names of a received message, by index.

    All methods raise ``WireError`` for an index out of range.
    """

    def __init__(self, message: Message):
        self._message = message
        self._names = message.text.split("\n")
        self._wide: dict[int, Ids] = {}
        self._types: dict[int, AnyType] = {}

    def records(self, record: struct.Struct) -> Iterator[tuple[Any, ...]]:
        if len(self._message.records) % record.size:
            raise WireError(
                f"the message has {len(self._message.records)} bytes of records, expected a multiple of {record.size}"
            )
        return record.iter_unpack(self._message.records)

    def ids(self, place: int) -> Ids:
        """Return ids as int64 [n]. The same index always gives the same object."""
        if place not in self._wide:
            self._wide[place] = widen_ids(self._message.arrays[self._check(place, len(self._message.arrays), "array")])
        return self._wide[place]

    def array(self, place: int) -> Array:
        sent = self._message.arrays[self._check(place // 2, len(self._message.arrays), "array")]
        if place % 2 and sent.dtype != np.int32:
            raise WireError(f"array {place // 2} has dtype {sent.dtype}, expected int32")
        return slabs.cast(sent, np.int64) if place % 2 else sent

    def name(self, place: int) -> str:
        return self._names[self._check(place, len(self._names), "name")]

    def type(self, place: int) -> AnyType:
        """Return a node type or edge type, without a check that it is in the graph."""
        if place not in self._types:
            try:
                self._types[place] = type_of(self.name(place))
            except DataError as error:
                raise WireError(str(error)) from None
        return self._types[place]

    def edge_type(self, place: int) -> EdgeType:
        of = self.type(place)
        if isinstance(of, str):
            raise WireError(f"{of!r} is not an edge type")
        return of

    def node_type(self, place: int) -> NodeType:
        of = self.type(place)
        if not isinstance(of, str):
            raise WireError(f"{of} is not a node type")
        return of

    @staticmethod
    def _check(place: int, count: int, what: str) -> int:
        if not 0 <= place < count:
            raise WireError(f"the message refers to {what} {place}, but has only {count}")
        return place
