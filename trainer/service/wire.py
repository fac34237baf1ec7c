"""The wire format: a fixed header and raw little-endian arrays; nothing is unpickled.

A message is a list of frames. Frame 0 holds the header, one descriptor per array and a short UTF-8 text;
each further frame is the memory of one C-contiguous array. Ids travel as int32 where they fit.

======  =====================================================================
header  magic ``GNFS`` · version u16 · kind u8 · status u8 · request id u64 · arrays u16 · flags u16 ·
        text bytes u32 · fanout i64 · shuffle i64 · key u64
each    dtype code u8 · ndim u8 · 6 zero bytes · shape 4 × u64 (0 beyond ndim)
======  =====================================================================
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.arrays import Array, Ids
from trainer.errors import WireError

VERSION = 1
MAX_FRAME = 1 << 30  #: bytes; no array on the wire is larger
MAX_ARRAYS = 64
MAX_TEXT = 1 << 16  #: bytes of UTF-8

_MAGIC = b"GNFS"
_HEADER = struct.Struct("<4sHBBQHHIqqQ")
_DESCRIPTOR = struct.Struct("<BB6s4Q")
_MAX_NDIM = 4
_INT32_MAX = np.iinfo(np.int32).max
_DTYPES: tuple[npt.DTypeLike, ...] = ("?", "i1", "<i2", "<i4", "<i8", "u1", "<u2", "<u4", "<u8", "<f2", "<f4", "<f8")
_DTYPE_OF_CODE = tuple(np.dtype(name) for name in _DTYPES)
_CODE_OF_DTYPE = {dtype: code for code, dtype in enumerate(_DTYPE_OF_CODE)}

#: Largest frame 0 that a valid message can have.
MAX_HEAD = _HEADER.size + MAX_ARRAYS * _DESCRIPTOR.size + MAX_TEXT


class Kind(IntEnum):
    """What is asked for."""

    HELLO = 1
    SAMPLE_HOP = 2
    GATHER = 3
    STATS = 4


class Status(IntEnum):
    """A request, or one of the two replies; an error's cause is in the text."""

    REQUEST = 0
    OK = 1
    ERROR = 2


@dataclass(frozen=True)
class Message:
    """One request or reply. ``fanout``, ``shuffle``, ``key`` and ``flags`` belong to ``SAMPLE_HOP``."""

    kind: Kind
    status: Status
    request_id: int  #: uint64, chosen by the client; the reply repeats it
    arrays: tuple[Array, ...] = ()
    text: str = ""
    fanout: int = 0
    shuffle: int = 0
    key: int = 0
    flags: int = 0

    def reply(self, arrays: Sequence[Array] = (), text: str = "") -> Message:
        """The answer to this request."""
        return Message(self.kind, Status.OK, self.request_id, tuple(arrays), text)

    def error(self, cause: str) -> Message:
        """The answer when this request failed; a long cause is cut."""
        text = cause.encode("utf-8", "replace")[:MAX_TEXT].decode("utf-8", "ignore")
        return Message(self.kind, Status.ERROR, self.request_id, (), text)


def encode(message: Message, max_frame: int = MAX_FRAME, request_id: int | None = None) -> list[Any]:
    """Frames to send: the head as bytes, then the arrays themselves, not copied when C-contiguous.

    ``request_id`` replaces the message's own. Raises ``WireError`` for what ``decode`` would refuse.
    """
    text = message.text.encode()
    if len(message.arrays) > MAX_ARRAYS or len(text) > MAX_TEXT:
        raise WireError(f"a message holds at most {MAX_ARRAYS} arrays and {MAX_TEXT} bytes of text")
    arrays = [_on_wire(array, max_frame) for array in message.arrays]
    head = _HEADER.pack(
        _MAGIC,
        VERSION,
        message.kind,
        message.status,
        message.request_id if request_id is None else request_id,
        len(arrays),
        message.flags,
        len(text),
        message.fanout,
        message.shuffle,
        message.key,
    )
    return [head + b"".join(map(_describe, arrays)) + text, *(array.reshape(-1).view(np.uint8) for array in arrays)]


def _on_wire(array: Array, max_frame: int) -> Array:
    """The array little-endian and C-contiguous."""
    dtype = array.dtype.newbyteorder("<")
    if dtype not in _CODE_OF_DTYPE:
        raise WireError(f"arrays of dtype {array.dtype} cannot be sent; only booleans, integers and floats can")
    if array.ndim > _MAX_NDIM:
        raise WireError(f"an array of {array.ndim} dimensions cannot be sent; the most is {_MAX_NDIM}")
    if array.nbytes > max_frame:
        raise WireError(f"an array of {array.nbytes} bytes is over {max_frame}; ask for fewer nodes at once")
    return np.asarray(array, dtype=dtype, order="C")


def _describe(array: Array) -> bytes:
    shape = array.shape + (0,) * (_MAX_NDIM - array.ndim)
    return _DESCRIPTOR.pack(_CODE_OF_DTYPE[array.dtype], array.ndim, b"", *shape)


def decode(frames: Sequence[Any], max_frame: int = MAX_FRAME) -> Message:
    """A message from received frames (bytes or anything with the buffer protocol).

    Arrays are views of the frames where alignment allows, else copies. Raises ``WireError`` for
    whatever is not exactly a message of this version.
    """
    if not frames:
        raise WireError("a message without frames")
    head = bytes(frames[0]) if len(frames[0]) <= MAX_HEAD else b""
    if len(head) < _HEADER.size:
        raise WireError(f"a head of {len(frames[0])} bytes")
    magic, version, kind, status, request_id, count, flags, text_len, fanout, shuffle, key = _HEADER.unpack_from(head)
    if magic != _MAGIC or version != VERSION:
        raise WireError(f"magic {magic!r} version {version}; expected {_MAGIC!r} version {VERSION}")
    if count > MAX_ARRAYS or count != len(frames) - 1:
        raise WireError(f"{count} arrays announced, {len(frames) - 1} frames followed")
    text_start = _HEADER.size + count * _DESCRIPTOR.size
    if text_start + text_len != len(head):
        raise WireError(f"a head of {len(head)} bytes; expected {text_start + text_len}")
    arrays = tuple(_arrays(head, frames[1:], max_frame))
    try:
        text = head[text_start:].decode()
        return Message(Kind(kind), Status(status), request_id, arrays, text, fanout, shuffle, key, flags)
    except ValueError as error:
        raise WireError(str(error)) from None


def _arrays(head: bytes, frames: Sequence[Any], max_frame: int) -> Iterator[Array]:
    for position, frame in enumerate(frames):
        code, ndim, zeros, *dims = _DESCRIPTOR.unpack_from(head, _HEADER.size + position * _DESCRIPTOR.size)
        if code >= len(_DTYPE_OF_CODE) or ndim > _MAX_NDIM or any(zeros) or any(dims[ndim:]):
            raise WireError(f"array {position}: dtype code {code}, {ndim} dimensions, shape {dims}")
        yield _array(frame, _DTYPE_OF_CODE[code], tuple(dims[:ndim]), max_frame)


def _array(frame: Any, dtype: np.dtype[Any], shape: tuple[int, ...], max_frame: int) -> Array:
    room = math.prod(size for size in shape if size) * dtype.itemsize  # bounds every dimension of an empty array too
    expected = 0 if 0 in shape else room
    if room > max_frame or len(frame) != expected:
        raise WireError(f"a frame of {len(frame)} bytes for shape {shape} of {dtype} ({expected} bytes)")
    if not expected:
        return np.empty(shape, dtype)
    array = np.frombuffer(frame, dtype=dtype)
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
