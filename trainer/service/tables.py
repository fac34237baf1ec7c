"""What several requests of one message share: every distinct array and name is sent once and referred to by place."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import numpy as np

from trainer.core import slabs
from trainer.core.arrays import Array, Ids
from trainer.core.errors import DataError, WireError
from trainer.core.schema import AnyType, EdgeType, NodeType, type_name, type_of
from trainer.service.frames import Kind, Message, Status, narrow, narrow_ids, widen_ids

NONE = -1  #: the place of what is not there


class TableWriter:
    """Collects the arrays and names of a message."""

    def __init__(self) -> None:
        self._arrays: list[Array] = []
        self._places: dict[int, tuple[int, Array]] = {}  # holds the array, so that its id() stays its own
        self._names: dict[str, int] = {}

    def ids(self, array: Ids | None) -> int:
        """The place of an array of int64 [n], which travels as int32 where it fits."""
        if array is None:
            return NONE
        if id(array) not in self._places:
            self._places[id(array)] = len(self._arrays), array
            self._arrays.append(narrow_ids(array))
        return self._places[id(array)][0]

    def array(self, array: Array | None) -> int:
        """What ``TableReader.array`` takes: an array of any dtype, int64 travelling as int32 where it fits."""
        if array is None:
            return NONE
        self._arrays.append(sent := narrow(array))
        return 2 * (len(self._arrays) - 1) + (sent.dtype != array.dtype)

    def name(self, name: str | None) -> int:
        """The place of a name. Raises ``WireError`` for one with a line break, since these end names."""
        if name is None:
            return NONE
        if "\n" in name:
            raise WireError(f"{name!r} is no name")
        return self._names.setdefault(name, len(self._names))

    def type(self, of: AnyType) -> int:
        """The place of a type's name."""
        return self.name(type_name(of))

    def message(self, kind: Kind, records: bytes) -> Message:
        """The request; its request id is still 0."""
        return Message(kind, Status.REQUEST, 0, tuple(self._arrays), "\n".join(self._names), records)

    def reply_to(self, request: Message, records: bytes) -> Message:
        """The answer to a request."""
        return request.reply(self._arrays, "\n".join(self._names), records)


class TableReader:
    """The arrays and names of a received message. All methods raise ``WireError`` for places that are not there."""

    def __init__(self, message: Message):
        self._message = message
        self._names = message.text.split("\n")
        self._wide: dict[int, Ids] = {}
        self._types: dict[int, AnyType] = {}

    def records(self, record: struct.Struct) -> Iterator[tuple[Any, ...]]:
        """The message's records."""
        if len(self._message.records) % record.size:
            raise WireError(f"{len(self._message.records)} bytes of records of {record.size}")
        return record.iter_unpack(self._message.records)

    def ids(self, place: int) -> Ids:
        """int64 [n]; the same object whenever asked for the same place."""
        if place not in self._wide:
            self._wide[place] = widen_ids(self._message.arrays[self._check(place, len(self._message.arrays), "array")])
        return self._wide[place]

    def array(self, place: int) -> Array:
        """An array as it was, in dtype and shape."""
        sent = self._message.arrays[self._check(place // 2, len(self._message.arrays), "array")]
        if place % 2 and sent.dtype != np.int32:
            raise WireError(f"array {place // 2} of dtype {sent.dtype} in place of int32")
        return slabs.cast(sent, np.int64) if place % 2 else sent

    def name(self, place: int) -> str:
        return self._names[self._check(place, len(self._names), "name")]

    def type(self, place: int) -> AnyType:
        """A well-formed name of a type; whether the graph has it is the graph's to say."""
        if place not in self._types:
            try:
                self._types[place] = type_of(self.name(place))
            except DataError as error:
                raise WireError(str(error)) from None
        return self._types[place]

    def edge_type(self, place: int) -> EdgeType:
        of = self.type(place)
        if isinstance(of, str):
            raise WireError(f"{of!r} is no edge type")
        return of

    def node_type(self, place: int) -> NodeType:
        of = self.type(place)
        if not isinstance(of, str):
            raise WireError(f"{of} is no node type")
        return of

    @staticmethod
    def _check(place: int, count: int, what: str) -> int:
        if not 0 <= place < count:
            raise WireError(f"{what} {place} of {count}")
        return place
