"""The wire format: a fixed header and raw little-endian arrays; nothing is unpickled.

A message is a list of frames. Frame 0, the head, holds the header, one descriptor per array, the records and the
text of the kind (``protocol``), then the small arrays, each from a multiple of 8 bytes on. Each further frame is the
memory of one larger C-contiguous array. Ids travel as int32 where they fit.

======  =====================================================================
header  magic ``GNFS`` · version u16 · kind u8 · status u8 · request id u64 · arrays u32 · bytes of records u32 ·
        bytes of UTF-8 text u32 · 4 zero bytes
each    dtype code u8 · ndim u8 · in the head u8 · 5 zero bytes · shape 8 × u64 (0 beyond ndim)
======  =====================================================================
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.arrays import Array, Ids
from trainer.errors import WireError

VERSION = 2
MAX_FRAME = 1 << 30  #: bytes; no array on the wire is larger
MAX_ARRAYS = 4096
MAX_RECORDS = 1 << 20  #: bytes
MAX_TEXT = 1 << 16  #: bytes of UTF-8
SMALL = 4096  #: bytes; arrays up to this travel in the head: measured, a frame of its own costs more than the copy

_MAGIC = b"GNFS"
_HEADER = struct.Struct("<4sHBBQIII4s")
_MAX_NDIM = 8
_DESCRIPTOR = struct.Struct(f"<BBB5s{_MAX_NDIM}Q")
_ALIGN = 8
_ZEROS = bytes(5)
_INT32_MAX = np.iinfo(np.int32).max
_DTYPES: tuple[npt.DTypeLike, ...] = (
    "?", "i1", "<i2", "<i4", "<i8", "u1", "<u2", "<u4", "<u8", "<f2", "<f4", "<f8", "<c8", "<c16",
)  # fmt: skip
_DTYPE_OF_CODE = tuple(np.dtype(name) for name in _DTYPES)
_CODE_OF_DTYPE = {dtype: code for code, dtype in enumerate(_DTYPE_OF_CODE)}

#: Largest head that a valid message can have.
MAX_HEAD = _HEADER.size + MAX_ARRAYS * (_DESCRIPTOR.size + SMALL) + MAX_RECORDS + MAX_TEXT + _ALIGN


class Kind(IntEnum):
    """What is asked for."""

    HELLO = 1
    SAMPLE = 2
    GATHER = 3
    STATS = 4
    HAS_EDGES = 5
    EDGES = 6


class Status(IntEnum):
    """A request, or one of the two replies; an error's cause is in the text."""

    REQUEST = 0
    OK = 1
    ERROR = 2


@dataclass(frozen=True)
class Message:
    """One request or reply."""

    kind: Kind
    status: Status
    request_id: int  #: uint64, chosen by the client; the reply repeats it
    arrays: tuple[Array, ...] = ()
    text: str = ""
    records: bytes = b""  #: what a request says of its arrays, in structs of its kind

    def reply(self, arrays: Sequence[Array] = (), text: str = "") -> Message:
        """The answer to this request."""
        return Message(self.kind, Status.OK, self.request_id, tuple(arrays), text)

    def error(self, cause: str) -> Message:
        """The answer when this request failed; a long cause is cut."""
        text = cause.encode("utf-8", "replace")[:MAX_TEXT].decode("utf-8", "ignore")
        return Message(self.kind, Status.ERROR, self.request_id, (), text)


def encode(message: Message, max_frame: int = MAX_FRAME, request_id: int | None = None) -> list[Any]:
    """Frames to send: the head as bytes, then the larger arrays themselves, not copied when C-contiguous.

    ``request_id`` replaces the message's own. Raises ``WireError`` for what ``decode`` would refuse.
    """
    text, records = message.text.encode(), message.records
    if len(message.arrays) > MAX_ARRAYS or len(text) > MAX_TEXT or len(records) > MAX_RECORDS:
        raise WireError(
            f"{len(message.arrays)} arrays, {len(text)} bytes of names and {len(records)} of records cannot be sent "
            f"at once; a message holds {MAX_ARRAYS}, {MAX_TEXT} and {MAX_RECORDS}"
        )
    arrays = [_on_wire(array, max_frame) for array in message.arrays]
    number = message.request_id if request_id is None else request_id
    header = _HEADER.pack(
        _MAGIC, VERSION, message.kind, message.status, number, len(arrays), len(records), len(text), b""
    )
    head = bytearray(header + b"".join(map(_describe, arrays)) + records + text)
    for array in arrays:
        if array.nbytes <= SMALL:
            head += bytes(-len(head) % _ALIGN) + array.tobytes()
    return [bytes(head), *(array.reshape(-1).view(np.uint8) for array in arrays if array.nbytes > SMALL)]


def _on_wire(array: Array, max_frame: int) -> Array:
    """The array little-endian and C-contiguous."""
    dtype = array.dtype.newbyteorder("<")
    if dtype not in _CODE_OF_DTYPE:
        raise WireError(f"arrays of dtype {array.dtype} cannot be sent; only booleans and numbers up to 128 bits can")
    if array.ndim > _MAX_NDIM:
        raise WireError(f"an array of {array.ndim} dimensions cannot be sent; the most is {_MAX_NDIM}")
    if array.nbytes > max_frame:
        raise WireError(f"an array of {array.nbytes} bytes is over {max_frame}; ask for fewer nodes at once")
    return np.asarray(array, dtype=dtype, order="C")


def _describe(array: Array) -> bytes:
    shape = array.shape + (0,) * (_MAX_NDIM - array.ndim)
    return _DESCRIPTOR.pack(_CODE_OF_DTYPE[array.dtype], array.ndim, array.nbytes <= SMALL, b"", *shape)


def decode(frames: Sequence[Any], max_frame: int = MAX_FRAME) -> Message:
    """A message from received frames (bytes or anything with the buffer protocol).

    Large arrays are views of the frames where alignment allows, else copies. Raises ``WireError`` for
    whatever is not exactly a message of this version.
    """
    if not frames:
        raise WireError("a message without frames")
    head = bytes(frames[0]) if len(frames[0]) <= MAX_HEAD else b""
    if len(head) < _HEADER.size:
        raise WireError(f"a head of {len(frames[0])} bytes")
    magic, version, kind, status, request_id, count, records_len, text_len, zeros = _HEADER.unpack_from(head)
    if magic != _MAGIC or version != VERSION or zeros != bytes(4):
        raise WireError(f"magic {magic!r} version {version}; expected {_MAGIC!r} version {VERSION}")
    if count > MAX_ARRAYS or records_len > MAX_RECORDS or text_len > MAX_TEXT:
        raise WireError(f"{count} arrays, {records_len} bytes of records, {text_len} of text announced")
    records_at = _HEADER.size + count * _DESCRIPTOR.size
    text_at = records_at + records_len
    if text_at + text_len > len(head):
        raise WireError(f"a head of {len(head)} bytes; its fields need {text_at + text_len}")
    arrays = _arrays(head, count, text_at + text_len, frames[1:], max_frame)
    try:
        text = head[text_at : text_at + text_len].decode()
        return Message(Kind(kind), Status(status), request_id, arrays, text, head[records_at:text_at])
    except ValueError as error:
        raise WireError(str(error)) from None


def _arrays(head: bytes, count: int, end: int, frames: Sequence[Any], max_frame: int) -> tuple[Array, ...]:
    """All arrays, the small ones from ``end`` of the head on; both head and frames must be used up exactly."""
    arrays, used = [], 0
    for position in range(count):
        code, ndim, small, zeros, *dims = _DESCRIPTOR.unpack_from(head, _HEADER.size + position * _DESCRIPTOR.size)
        if code >= len(_DTYPE_OF_CODE) or ndim > _MAX_NDIM or zeros != _ZEROS or any(dims[ndim:]):
            raise WireError(f"array {position}: dtype code {code}, {ndim} dimensions, shape {dims}")
        dtype, shape = _DTYPE_OF_CODE[code], dims[:ndim]
        size = _num_bytes(shape, dtype, max_frame)
        if small != (size <= SMALL):
            raise WireError(f"array {position}: {size} bytes at place {small}")
        if small:
            begin = end + -end % _ALIGN
            end = begin + size
            arrays.append(_array(head[begin:end], size, dtype, shape).copy())  # writable
        else:
            used += 1
            arrays.append(_array(frames[used - 1] if used <= len(frames) else b"", size, dtype, shape))
    if end != len(head) or used != len(frames):
        raise WireError(f"{len(head)} bytes and {len(frames)} frames; {end} and {used} were announced")
    return tuple(arrays)


def _num_bytes(shape: list[int], dtype: np.dtype[Any], limit: int) -> int:
    """Bytes of an array. Raises ``WireError`` beyond ``limit``; an empty array's other dimensions must fit it too."""
    size = math.prod(shape) * dtype.itemsize
    if size > limit or (not size and math.prod(filter(None, shape)) * dtype.itemsize > limit):
        raise WireError(f"shape {shape} of {dtype} is over {limit} bytes")
    return size


def _array(buffer: Any, size: int, dtype: np.dtype[Any], shape: list[int]) -> Array:
    if len(buffer) != size:
        raise WireError(f"{len(buffer)} bytes for shape {shape} of {dtype} ({size} bytes)")
    if not size:
        return np.empty(shape, dtype)
    array = np.frombuffer(buffer, dtype=dtype)
    return (array if array.flags.aligned else array.copy()).reshape(shape)


def narrow_ids(ids: Array) -> Array:
    """Ids as int32 where they fit, else int64; a copy unless they are int32 already."""
    fits = not len(ids) or (int(ids.max()) <= _INT32_MAX and int(ids.min()) >= -_INT32_MAX)
    return ids.astype(np.int32, copy=ids.dtype != np.int32) if fits else ids.astype(np.int64)


def check_ids(array: Array) -> Array:
    """Received ids, unchanged. Raises ``WireError`` unless they are a vector of int32 or int64."""
    if array.ndim != 1 or array.dtype not in (np.int32, np.int64):
        raise WireError(f"ids of dtype {array.dtype} and shape {array.shape}; expected int32 or int64 [n]")
    return array


def widen_ids(array: Array) -> Ids:
    """Received ids as int64 [n]. Raises ``WireError`` unless they are a vector of int32 or int64."""
    return check_ids(array).astype(np.int64)
