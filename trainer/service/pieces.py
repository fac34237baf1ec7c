"""Many rows asked of a graph server piece by piece, so that neither side holds much that is under way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from trainer.core import slabs
from trainer.core.arrays import Array
from trainer.core.errors import WireError
from trainer.core.schema import AnyType
from trainer.sampler.types import RowRequest

PIECE = 4 << 20  #: bytes of an answer, about

UNDER_WAY = 4  #: pieces

_ROW = 1 << 10  #: bytes of a row, as long as none has come

Rows = dict[str, Array]  #: attribute -> [n, …]


class PendingRows(Protocol):
    """An answer under way; ``client.Pending`` is one."""

    received: int

    def result(self, timeout: float | None = None) -> list[Rows]: ...


class RowSizes:
    """How many bytes rows have taken on the wire, by type and attributes. Safe to use from several threads."""

    def __init__(self) -> None:
        self._found: dict[tuple[AnyType, tuple[str, ...]], int] = {}

    def rows_of(self, requests: Sequence[RowRequest]) -> int:
        """How many rows of the widest of these requests make a piece."""
        widest = max((self._found.get((request.of, request.attrs), _ROW) for request in requests), default=_ROW)
        return max(1, PIECE // widest)

    def note(self, requests: Sequence[RowRequest], rows: Sequence[Mapping[str, Array]]) -> None:
        for request, found in zip(requests, rows, strict=True):
            if count := len(request.ids):
                size = sum(values.nbytes for values in found.values()) // count
                self._found[request.of, request.attrs] = max(1, size)


@dataclass(frozen=True)
class Slice:
    """Some rows of a request that lie next to each other."""

    number: int  #: of the request
    begin: int
    end: int


def cut(requests: Sequence[RowRequest], most: int) -> Iterator[list[Slice]]:
    """Pieces of at most ``most`` rows, in order; a request without rows has a slice, too."""
    piece: list[Slice] = []
    room = most
    for number, request in enumerate(requests):
        begin, count = 0, len(request.ids)
        while True:
            end = min(count, begin + room)
            piece.append(Slice(number, begin, end))
            room -= end - begin
            begin = end
            if room == 0 and not (begin == count and number + 1 == len(requests)):
                yield piece
                piece, room = [], most
            if begin == count:
                break
    if piece:
        yield piece


class InPieces:
    """The answers to ``requests``, some pieces at a time; used as ``client.Pending``, by one thread."""

    def __init__(
        self, requests: Sequence[RowRequest], submit: Callable[[Sequence[RowRequest]], PendingRows], sizes: RowSizes
    ):
        self.received = 0  #: bytes of the answers that are here
        self._requests, self._submit, self._sizes = requests, submit, sizes
        self._waiting = deque(cut(requests, sizes.rows_of(requests)))
        self._asked: deque[tuple[list[Slice], list[RowRequest], PendingRows]] = deque()
        self._found: list[Rows] = [{} for _ in requests]
        self._ask()

    def result(self, timeout: float | None = None) -> list[Rows]:
        """``timeout``: for each piece. Raises as ``client.Pending`` does, and ``WireError`` for pieces that differ."""
        while self._asked:
            slices, requests, pending = self._asked[0]
            rows = pending.result(timeout)
            self.received += pending.received
            self._asked.popleft()
            self._ask()
            self._sizes.note(requests, rows)
            for part, found in zip(slices, rows, strict=True):
                self._put(part, found)
        return self._found

    def _ask(self) -> None:
        while self._waiting and len(self._asked) < UNDER_WAY:
            slices = self._waiting.popleft()
            asked = [self._requests[part.number] for part in slices]
            requests = [
                replace(request, ids=request.ids[part.begin : part.end])
                for part, request in zip(slices, asked, strict=True)
            ]
            self._asked.append((slices, requests, self._submit(requests)))

    def _put(self, part: Slice, rows: Rows) -> None:
        found, count = self._found[part.number], len(self._requests[part.number].ids)
        for name, values in rows.items():
            if part.end - part.begin == count:
                found[name] = values
                continue
            whole = found.get(name)
            if whole is None:
                whole = found[name] = slabs.empty((count, *values.shape[1:]), values.dtype)
            if (whole.dtype, whole.shape[1:]) != (values.dtype, values.shape[1:]):
                raise WireError(
                    f"rows of {name} came as {whole.dtype} {whole.shape[1:]} and as {values.dtype} {values.shape[1:]}"
                )
            whole[part.begin : part.end] = values
