"""``Request``: what a client asks of a graph server in one message, and the reply to it; and the body of a message.

A body is a value of dataclasses in msgpack, in which each array is an index into the arrays beside it. An array of
int64 travels as int32 if its values fit, except rows of attributes, as the traffic of an epoch is predicted from their
dtype. Indices are doubled, and 1 is added where the receiver widens the array again.
"""

from __future__ import annotations

import functools
import threading
from typing import Any, ClassVar, Generic, TypeVar, get_args

import msgspec
import numpy as np

from trainer.core import slabs
from trainer.core.arrays import Array, Ids
from trainer.core.errors import WireError
from trainer.core.typed import msgpack_decoder
from trainer.wire.columns import FormOf
from trainer.wire.frames import Flag, Kind, Message, Status

A = TypeVar("A")  #: an answer

R = TypeVar("R", bound="Request[Any]")

T = TypeVar("T")

_INT32_MAX = np.iinfo(np.int32).max

_beside = threading.local()  # ``arrays``: those of the message that this thread encodes or decodes


class _Written:
    def __init__(self, narrow: bool) -> None:
        self._narrow = narrow
        self.arrays: list[Array] = []
        self._places: dict[int, tuple[int, Array]] = {}  # refers to the array, so that its id() is not reused

    def place(self, array: Array) -> int:
        if id(array) not in self._places:
            narrow = narrowed(array) if self._narrow else array
            self._places[id(array)] = 2 * len(self.arrays) + (narrow.dtype != array.dtype), array
            self.arrays.append(narrow)
        return self._places[id(array)][0]


class _Read:
    def __init__(self, arrays: tuple[Array, ...]):
        self._arrays = arrays
        self._found: dict[int, Array] = {}

    def array(self, place: object) -> Array:
        """Return an array. The same index always gives the same object, which bounds memory and is relied on."""
        if not isinstance(place, int) or not 0 <= place < 2 * len(self._arrays):
            raise WireError(f"the message refers to array {place!r:.99}, but has only {len(self._arrays)}")
        if place not in self._found:
            sent = self._arrays[place // 2]
            if place % 2 and sent.dtype != np.int32:
                raise WireError(f"array {place // 2} has dtype {sent.dtype}, expected int32")
            self._found[place] = slabs.cast(sent, np.int64) if place % 2 else sent
        return self._found[place]


def narrowed(array: Array) -> Array:
    """Return an array of int64 as int32 if its values fit, else the array itself."""
    if array.dtype != np.int64 or (array.size and not -_INT32_MAX <= array.min() <= array.max() <= _INT32_MAX):
        return array
    return slabs.cast(array, np.int32)


def check_ids(array: Array) -> Array:
    """Return received ids unchanged. Raises ``WireError`` unless they are int32 or int64 [n]."""
    if array.ndim != 1 or array.dtype not in (np.int32, np.int64):
        raise WireError(f"ids of dtype {array.dtype} and shape {array.shape}; expected int32 or int64 [n]")
    return array


def widened_ids(array: Array) -> Ids:
    """Return received ids as int64 [n]. Raises ``WireError`` unless they are int32 or int64 [n]."""
    return slabs.cast(check_ids(array), np.int64)


def _encoded(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return _beside.arrays.place(value)
    if isinstance(value, np.integer):
        return int(value)
    raise TypeError(f"{type(value)} cannot be sent")


def _decoded(kind: Any, place: Any) -> Array:
    """Return the array at ``place``. An annotation with a dtype, such as ``Ids``, means one dimension of this dtype."""
    array: Array = _beside.arrays.array(place)
    (dtype,) = get_args(get_args(kind)[1])
    if dtype is not Any and (array.ndim != 1 or array.dtype != dtype):
        raise WireError(f"the message has an array {array.dtype} {list(array.shape)}, expected {dtype.__name__} [n]")
    return array


_encoder = msgspec.msgpack.Encoder(enc_hook=_encoded)


def pack(value: Any, narrow: bool = True) -> tuple[list[Array], bytes]:
    """Return the arrays and the body of a message. An array that occurs several times is sent once.

    ``narrow``: send int64 as int32 where the values fit.
    """
    _beside.arrays = written = _Written(narrow)
    try:
        body = _encoder.encode(value)
    finally:
        del _beside.arrays
    return written.arrays, body


class Body(Generic[T]):
    """Decodes bodies of one type."""

    def __init__(self, kind: Any):
        self._decoder: msgspec.msgpack.Decoder[T] = msgpack_decoder(kind, _decoded)

    def read(self, message: Message) -> T:
        """Raises ``WireError`` if the body is not a value of the type, or refers to arrays that do not fit it."""
        _beside.arrays = _Read(message.arrays)
        try:
            return self._decoder.decode(message.body)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:  # ValueError: a text that is not UTF-8
            raise WireError(f"the body of the message cannot be read: {error}") from None
        finally:
            del _beside.arrays  # it refers to the arrays


class Request(msgspec.Struct, Generic[A], frozen=True, array_like=True, eq=False):
    """One kind of request. Its fields are sent, and its answer is an ``A``.

    What a stranger sends is checked by ``check``, a reply by ``read_reply``.
    """

    kind: ClassVar[Kind]
    replies: ClassVar[Any] = None  #: type of the body of a reply; None: a reply has arrays only

    def message(self, flags: Flag = Flag.NONE) -> Message:
        """Encode the request. The channel sets its id. Raises ``WireError`` if it exceeds a limit."""
        arrays, body = pack(self)
        return Message(self.kind, Status.REQUEST, 0, tuple(arrays), body, flags)

    @classmethod
    def read(cls: type[R], message: Message) -> R:
        """Decode a request. Raises ``WireError`` if it is invalid or exceeds a limit."""
        request: R = _body(cls).read(message)
        request.check()
        return request

    def check(self) -> None:
        """Raise ``WireError`` for values that no server accepts."""

    def reply(self, message: Message, answer: A, form_of: FormOf) -> Message:
        """Encode the answer to this request, which came as ``message``.

        ``form_of``: in which form rows of attributes are sent. Raises ``DataError`` for rows that this form cannot
        represent.
        """
        return message.reply(*pack(answer)) if self.replies else message.reply([answer])  # type: ignore[list-item]

    def read_reply(self, message: Message) -> A:
        """Decode the reply. Raises ``WireError`` if it does not fit the request."""
        answer: A = _body(self.replies).read(message)
        return answer


@functools.cache
def _body(of: Any) -> Body[Any]:
    return Body(of)
