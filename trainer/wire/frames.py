"""The wire format: a fixed header and raw little-endian arrays, without pickle.

A message is a list of frames. Frame 0, the head, consists of the header, one descriptor per array, the body (a value in
msgpack, see ``body.py``), and the small arrays, each aligned to 8 bytes. Each further frame is the memory of a larger,
C-contiguous array.

======  =====================================================================
header  magic ``GNFS`` · version u16 · kind u8 · status u8 · request id u64 · number of arrays u32 ·
        bytes of the body u32 · flags u32 (``Flag``)
array   dtype code u8 · ndim u8 · 6 zero bytes · shape 8 × u64 (0 beyond ndim)
======  =====================================================================
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum, IntFlag
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from trainer.core.arrays import Array
from trainer.core.errors import Wait, WireError
from trainer.core.typed import msgpack_decoder

VERSION = 9

MAX_ARRAY = 1 << 30  #: bytes of one array

MAX_MESSAGE = 1 << 32  #: bytes of all arrays of a message

MAX_ARRAYS = 4096

MAX_BODY = 1 << 20  #: bytes

_MAX_CAUSE = 1 << 16  # characters of an error reply

SMALL = 4096  #: bytes; arrays up to this size are copied into the head, which is faster than a separate part (measured)

_MAGIC = b"GNFS"

_HEADER = struct.Struct("<4sHBBQIII")

_MAX_NDIM = 8

_DESCRIPTOR = struct.Struct(f"<BB6s{_MAX_NDIM}Q")

_ALIGN = 8

_PAD = bytes(6)

_DTYPES: tuple[npt.DTypeLike, ...] = (
    "?", "i1", "<i2", "<i4", "<i8", "u1", "<u2", "<u4", "<u8", "<f2", "<f4", "<f8", "<c8", "<c16",
)  # fmt: skip

_DTYPE_OF_CODE = tuple(np.dtype(name) for name in _DTYPES)

_CODE_OF_DTYPE = {dtype: code for code, dtype in enumerate(_DTYPE_OF_CODE)}

#: Bytes of the largest head that a valid message can have.
MAX_HEAD = _HEADER.size + MAX_ARRAYS * (_DESCRIPTOR.size + SMALL) + MAX_BODY + _ALIGN


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


class Flag(IntFlag):
    NONE = 0
    ROUTE = 1  #: answer for the whole graph, by requests to other servers where needed
    FLOAT16 = 2  #: floating-point rows of the reply may be rounded to float16 (``rounded``)
    INT8 = 4  #: they may be rounded to int8


class Status(IntEnum):
    """Whether a message is a request, a reply or an error reply. The body of an ERROR message is a ``Failure``."""

    REQUEST = 0
    OK = 1
    ERROR = 2


_KINDS = frozenset(Kind)

_ALL_FLAGS = Flag.ROUTE | Flag.FLOAT16 | Flag.INT8


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """Why a request has failed."""

    cause: str
    wait: Wait | None = None  #: the timeout that led to it, if the server has waited for another one


_failure = msgpack_decoder(Failure)


@dataclass(frozen=True)
class Message:
    kind: Kind
    status: Status
    request_id: int  #: uint64, chosen by the client; the reply repeats it
    arrays: tuple[Array, ...] = ()
    body: bytes = b""  #: a value in msgpack, whose type depends on kind and status
    flags: Flag = Flag.NONE
    size: int = field(default=0, compare=False)  #: bytes of its frames; 0 unless received

    def reply(self, arrays: Sequence[Array] = (), body: bytes = b"") -> Message:
        return Message(self.kind, Status.OK, self.request_id, tuple(arrays), body)

    def error(self, cause: str, wait: Wait | None = None) -> Message:
        """Return an error reply to this request. A long cause is truncated."""
        failure = Failure(cause.encode("utf-8", "replace").decode()[:_MAX_CAUSE], wait)
        return Message(self.kind, Status.ERROR, self.request_id, (), msgspec.msgpack.encode(failure))

    @property
    def failure(self) -> Failure:
        """The content of an ERROR message. Raises ``WireError`` if it is none."""
        try:
            return _failure.decode(self.body)
        except (msgspec.DecodeError, ValueError) as error:
            raise WireError(f"the cause in an error reply cannot be read: {error}") from None


def encode(message: Message, max_array: int = MAX_ARRAY, request_id: int | None = None) -> list[Any]:
    """Return the frames to send: the head as bytes, then the larger arrays, without a copy if they are C-contiguous.

    ``request_id`` is used in place of ``message.request_id``. Raises ``WireError`` for a message that ``decode`` would
    reject.
    """
    if len(message.arrays) > MAX_ARRAYS or len(message.body) > MAX_BODY:
        raise WireError(
            f"{len(message.arrays)} arrays and a body of {len(message.body)} bytes are too many for one message; the "
            f"limits are {MAX_ARRAYS} and {MAX_BODY}"
        )
    arrays, descriptors = [], []
    for array in message.arrays:
        dtype = array.dtype.newbyteorder("<")
        if dtype not in _CODE_OF_DTYPE:
            raise WireError(
                f"arrays of dtype {array.dtype} cannot be sent; only booleans and numbers up to 128 bits can"
            )
        if array.ndim > _MAX_NDIM:
            raise WireError(f"an array of {array.ndim} dimensions cannot be sent; the most is {_MAX_NDIM}")
        if array.nbytes > max_array:
            raise WireError(
                f"an array takes {array.nbytes} bytes, over the limit of {max_array}; ask for fewer nodes at once"
            )
        shape = array.shape + (0,) * (_MAX_NDIM - array.ndim)
        descriptors.append(_DESCRIPTOR.pack(_CODE_OF_DTYPE[dtype], array.ndim, _PAD, *shape))
        arrays.append(np.asarray(array, dtype=dtype, order="C"))
    if (total := sum(array.nbytes for array in arrays)) > MAX_MESSAGE:
        raise WireError(f"the arrays take {total} bytes, over the limit of {MAX_MESSAGE}; ask for fewer nodes at once")
    number = message.request_id if request_id is None else request_id
    header = _HEADER.pack(
        _MAGIC, VERSION, message.kind, message.status, number, len(arrays), len(message.body), message.flags
    )
    head = bytearray(header + b"".join(descriptors) + message.body)
    frames: list[Any] = []
    for array in arrays:
        if array.nbytes <= SMALL:
            head += bytes(-len(head) % _ALIGN) + array.tobytes()
        else:
            frames.append(array.reshape(-1).view(np.uint8))
    return [bytes(head), *frames]


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
    magic, version, kind, status, request_id, count, body_len, flags = _HEADER.unpack_from(head)
    if magic != _MAGIC or version != VERSION or flags > _ALL_FLAGS:
        raise WireError(
            f"the message has magic {magic!r}, version {version} and flags {flags}; expected magic {_MAGIC!r} and "
            f"version {VERSION}"
        )
    if count > MAX_ARRAYS or body_len > MAX_BODY:
        raise WireError(
            f"the head announces {count} arrays and a body of {body_len} bytes; the limits are {MAX_ARRAYS} and "
            f"{MAX_BODY}"
        )
    body_at = _HEADER.size + count * _DESCRIPTOR.size
    end = body_at + body_len
    if end > len(head):
        raise WireError(f"the head has {len(head)} bytes, but its fields need {end}")

    # Descriptors of the arrays.
    announced, total = [], 0
    for position in range(count):
        code, ndim, pad, *dims = _DESCRIPTOR.unpack_from(head, _HEADER.size + position * _DESCRIPTOR.size)
        if code >= len(_DTYPE_OF_CODE) or ndim > _MAX_NDIM or any(dims[ndim:]) or pad != _PAD:
            raise WireError(
                f"array {position} has an invalid descriptor: dtype code {code}, {ndim} dimensions, shape {dims}"
            )
        dtype, shape = _DTYPE_OF_CODE[code], dims[:ndim]
        size = math.prod(shape) * dtype.itemsize
        # A dimension of 0 counts as 1, because numpy limits the other dimensions of empty arrays, too.
        if size > max_array or (not size and math.prod(filter(None, shape)) * dtype.itemsize > max_array):
            raise WireError(f"an array of shape {shape} and dtype {dtype} is over {max_array} bytes")
        announced.append((dtype, shape, size))
        total += size
    needed = sum(size > SMALL for _, _, size in announced)
    if total > max_message or needed != len(frames) - 1:
        raise WireError(
            f"arrays of {total} bytes in {len(frames) - 1} frames; expected at most {max_message} bytes in {needed} "
            "frames"
        )

    # The arrays: small ones follow the body, and each of the others has a frame.
    arrays: list[Array] = []
    further = iter(frames[1:])
    for dtype, shape, size in announced:
        small = size <= SMALL  # copied, to be writable
        if small:
            begin = end + -end % _ALIGN
            end = begin + size
        buffer = head[begin:end] if small else next(further)
        if len(buffer) != size:
            raise WireError(f"an array of shape {shape} and dtype {dtype} has {len(buffer)} bytes, expected {size}")
        array = np.frombuffer(buffer, dtype=dtype) if size else np.empty(0, dtype)
        arrays.append((array.copy() if small or not array.flags.aligned else array).reshape(shape))
    if end != len(head):
        raise WireError(f"the head has {len(head)} bytes, expected {end}")

    try:
        size, body = sum(map(len, frames)), head[body_at : body_at + body_len]
        return Message(Kind(kind), Status(status), request_id, tuple(arrays), body, Flag(flags), size)
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
