"""Finds the source of each row of a request: a part of this host, the row cache, a held answer or another host."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.core.arrays import Array, Ids, read_only
from trainer.core.compiled import njit
from trainer.sampler import neighbor_kernels
from trainer.sampler.relabel import MOST_HASHED, free_slots, shift_of, slot_of

_jit = njit(boundscheck=False)

_NO_SLOTS: Any = read_only(np.empty(0, np.int32))

_S32, _LOW = np.uint64(32), np.uint64(0xFFFFFFFF)


@dataclass(frozen=True)
class RowPlacement:
    """Which rows of one source to copy, and to which positions of the answer."""

    rows: Array  #: int32|int64 [m] row numbers in the source
    at: npt.NDArray[np.int32]  #: int32 [m] positions in the request, ascending

    @classmethod
    def in_order(cls, at: npt.NDArray[np.int32]) -> RowPlacement:
        return cls(np.arange(len(at), dtype=np.int32), at)


@dataclass(frozen=True)
class IdIndex:
    """A hash table from ids to their positions in the concatenation of several arrays.

    Ids of 2**32 and more are never found.
    """

    #: uint64 [a power of two], as in ``HashTable``; holds the position in the concatenated arrays
    slots: npt.NDArray[np.uint64]
    ends: Ids  #: int64 [arrays] end of each array in the concatenation

    @classmethod
    def of(cls, arrays: Sequence[Ids]) -> IdIndex:
        """Make an index of the ids in these arrays. For a repeated id, the index has the last position."""
        bits = max(4, int(2 * sum(map(len, arrays))).bit_length())
        return cls(free_slots(bits), cls.ends_of(()))._entered(arrays)

    @staticmethod
    def ends_of(arrays: Sequence[Ids]) -> Ids:
        return read_only(np.cumsum([len(ids) for ids in arrays], dtype=np.int64))

    def with_more(self, arrays: Sequence[Ids]) -> IdIndex | None:
        """Return a copy with the ids of more arrays, or None if its table would then be more than half full."""
        total = int(self.ends[-1]) if len(self.ends) else 0
        if 2 * (total + sum(map(len, arrays))) > len(self.slots):
            return None
        return replace(self, slots=self.slots.copy())._entered(arrays)

    def _entered(self, arrays: Sequence[Ids]) -> IdIndex:
        ends = [int(self.ends[-1])] if len(self.ends) else [0]
        for ids in arrays:
            _enter(read_only(ids), ends[-1], self.slots)
            ends.append(ends[-1] + len(ids))
        known = np.array([*self.ends, *ends[1:]], np.int64)
        return IdIndex(read_only(self.slots), read_only(known))


NO_INDEX = IdIndex(read_only(np.empty(0, np.uint64)), read_only(np.empty(0, np.int64)))


@dataclass(frozen=True)
class SourceCodes:
    """Integer codes of the sources of rows, in the order: parts of this host, cache, held answers, other hosts.

    A negative code stands for a row in no part.
    """

    num_parts: int
    num_held: int

    @property
    def cached(self) -> int:
        return self.num_parts

    def held(self, number: int) -> int:
        return self.num_parts + 1 + number

    @property
    def first_host(self) -> int:
        return self.num_parts + 1 + self.num_held

    def of_parts(self, hosts: Array, here: int) -> Array:
        """Return for each part the code of the source of its rows: int32 [num_parts + 2]. Part p is at index p + 1.

        The first and last entries, for ids in no part, are -1. ``hosts``: result of ``PartHolders.table``. ``here``:
        the value in ``hosts`` that means this host.
        """
        codes = hosts.astype(np.int32) + self.first_host
        parts = np.arange(-1, self.num_parts + 1, dtype=np.int32)
        return np.where(hosts == here, parts, np.where(hosts < 0, -1, codes)).astype(np.int32)

    def of_hosts(self, hosts: Array) -> Array:
        return np.where(hosts < -1, -1, hosts.astype(np.int32) + self.first_host + 1).astype(np.int32)


def locate(
    ids: Ids, offsets: Ids, of_part: Array, codes: SourceCodes, slots: Array | None = None, held: IdIndex = NO_INDEX
) -> tuple[int, Mapping[int, RowPlacement]]:
    """Find the source of each row. Returns (-1, mapping from the code of a source to the rows to copy from it).

    If an id is in no part, returns (position of the id in ``ids``, empty mapping) instead.

    Args:
        ids: int64 [n], global ids.
        offsets: first global id of each part, as in ``PartitionBook``.
        of_part: code of the source of each part's rows, from ``SourceCodes.of_parts``.
        codes: the codes of all sources.
        slots: row in the cache of each global id, -1 if not cached. Used for remote rows only.
        held: index of the ids in held answers. Used for remote rows only.
    """
    wide = offsets[-1] >= 2**31  # a part may then have more rows than int32 can count
    source, row = np.empty(len(ids), np.int16), np.empty(len(ids), np.int64 if wide else np.int32)
    counts = np.zeros(max(int(of_part.max(initial=0)) + 1, codes.first_host), np.int64)
    wrong = _locate(
        read_only(ids), read_only(offsets), read_only(of_part), codes.cached, codes.first_host,
        _NO_SLOTS if slots is None else read_only(slots), held.slots, held.ends, source, row, counts,
    )  # fmt: skip
    if wrong >= 0 or len(ids) == 0:
        return wrong, {}
    present = np.flatnonzero(counts).tolist()
    if len(present) == 1:
        return -1, {present[0]: RowPlacement(row, np.arange(len(ids), dtype=np.int32))}
    begins = np.cumsum(counts) - counts
    at, rows = np.empty(len(ids), np.int32), np.empty_like(row)
    _group_by_source(source, row, begins.copy(), at, rows)
    return -1, {
        code: RowPlacement(rows[begin : begin + count], at[begin : begin + count])
        for code in present
        for begin, count in [(begins[code], counts[code])]
    }


def put_rows(source: Array, placed: RowPlacement, out: Array) -> None:
    """Set ``out[placed.at] = source[placed.rows]``. Both arrays have the same dtype, or both are integers."""
    if len(placed.at) == 0:
        return
    if source.dtype != out.dtype:
        neighbor_kernels.take_numbers(read_only(source.reshape(-1)), placed.rows, placed.at, out.reshape(-1))
        return
    words, places = _as_words(source), _as_words(out)
    if words.shape[1] == 1:
        neighbor_kernels.take_numbers(read_only(words.reshape(-1)), placed.rows, placed.at, places.reshape(-1))
    else:
        neighbor_kernels.take_rows(read_only(words), placed.rows, placed.at, places)


def _as_words(array: Array) -> Array:
    dtype = array.dtype
    flat = np.ascontiguousarray(array).reshape(len(array), math.prod(array.shape[1:]))
    # One kernel then serves all dtypes of the same width.
    return flat.view(np.dtype(f"u{dtype.itemsize}")) if dtype.itemsize in (1, 2, 4, 8) else flat.view(np.uint8)


@_jit
def _locate(
    ids: Any, offsets: Any, of_part: Any, cached: int, first_host: int, slots: Any, held: Any, ends: Any,
    source: Any, row: Any, counts: Any,
) -> int:  # fmt: skip
    part, shift = 0, shift_of(held)  # ids of a part tend to be adjacent
    for i in range(len(ids)):
        number = ids[i]
        if not (0 <= part < len(offsets) - 1 and offsets[part] <= number < offsets[part + 1]):
            part = _part_of(offsets, number)
        code, place = of_part[part + 1], 0
        if code < 0:
            return i
        if code < first_host:
            place = number - offsets[part]
        else:
            if len(slots) and slots[number] >= 0:
                code, place = cached, slots[number]
            elif len(held):
                place = _find(held, shift, number)
                if place >= 0:
                    code, begin = cached + 1, 0
                    while place >= ends[code - cached - 1]:
                        begin = ends[code - cached - 1]
                        code += 1
                    place -= begin
            if code >= first_host:
                place = counts[code]
        source[i], row[i] = code, place
        counts[code] += 1
    return -1


@_jit
def _part_of(offsets: Any, number: int) -> int:
    """Return the part of an id: -1 for a negative id, the number of parts for an id that is too large."""
    low, high = 0, len(offsets)
    while low < high:
        middle = (low + high) >> 1
        if offsets[middle] <= number:
            low = middle + 1
        else:
            high = middle
    return low - 1


@_jit
def _group_by_source(source: Any, row: Any, begins: Any, at: Any, rows: Any) -> None:
    for i in range(len(source)):
        place = begins[source[i]]
        at[place], rows[place] = i, row[i]
        begins[source[i]] = place + 1


@_jit
def _enter(ids: Any, begin: int, held: Any) -> None:
    shift = shift_of(held)
    for i in range(len(ids)):
        if ids[i] < MOST_HASHED:
            held[slot_of(ids[i], held, shift)] = np.uint64(ids[i]) << _S32 | np.uint64(begin + i + 1)


@_jit
def _find(held: Any, shift: Any, number: Any) -> Any:
    if number >= MOST_HASHED:
        return -1
    return np.int64(held[slot_of(number, held, shift)] & _LOW) - 1
