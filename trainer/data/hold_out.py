"""Holds out links of one edge type for validation and test, and removes them from the edges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from trainer.core.arrays import Array
from trainer.core.errors import DataError
from trainer.core.memory import size_text
from trainer.core.rng import GOLDEN, hashed
from trainer.core.row_sort import Scratch
from trainer.core.schema import EdgeType, type_name
from trainer.core.texts import encode_texts
from trainer.data.dataset import Dataset, EdgeData, is_time
from trainer.data.time_split import TimeSplit, counted_times, split_times
from trainer.data.work_arrays import kept_edges, slices

VAL_LINKS, TEST_LINKS = "val_links", "test_links"  #: names of graph attributes, int64 [2, n], original ids

VAL_TIMES, TEST_TIMES = "val_link_times", "test_link_times"  #: graph attributes with their times, int64 [n]

HELD_OUT = "held_out_type"  #: graph attribute with the links' edge type, uint8 [1, bytes] (``encode_texts``)

HELD_OUT_TIME = "held_out_time"  #: graph attribute with the name of the edge attribute of the times, as ``HELD_OUT``

_Flags = npt.NDArray[np.bool_]

_REVERSE = "rev_"

_LINK_BYTES = 80  #: of memory per held-out link while they are sorted


class HoldOut(Protocol):
    @property
    def hold_out(self) -> str | None: ...
    @property
    def hold_out_val(self) -> float: ...
    @property
    def hold_out_test(self) -> float: ...
    @property
    def hold_out_time(self) -> str | None: ...


def hold_out_links(dataset: Dataset, options: HoldOut, scratch: Scratch | None = None) -> Dataset:
    """Move some links of the edge type ``hold_out`` to the graph attributes ``val_links`` and ``test_links``.

    The options state which share of the links to move. The graph attribute ``held_out_type`` names the edge type.

    Without ``hold_out_time``, a hash of source and target decides whether a link is moved. Therefore all copies of an
    edge are moved together. If both ends have the same node type, a link and its reverse are also moved together, and
    self loops are not moved. ``val_links`` and ``test_links`` contain each link once, sorted by source, then target.

    ``hold_out_time`` names an integer attribute of the edges. With it, the latest edges are moved to ``test_links``,
    and the edges just before them to ``val_links``. ``split_times`` chooses the limits. Copies of an edge at different
    times are different links. Links are sorted by time, source and target. The graph attributes ``val_link_times`` and
    ``test_link_times`` contain their times, and ``held_out_time`` the name of the edge attribute.

    The reverse edge type of ``<relation>`` is ``rev_<relation>``, and vice versa. If the dataset has it, the reverses
    of the moved links are removed from it. With ``hold_out_time``, its edges from the earliest limit on are removed.

    If the two node types differ, other edge types from the target type to the source type are checked too. If such a
    type contains the reverses of all moved links, they are removed. If it contains only some of them, it is left
    unchanged, and the dataset gets a note.

    Edges are read in pieces. With ``scratch``, the remaining edges are memory-mapped files in its folder, and only the
    held-out links are in memory.

    Raises ``DataError`` for an unknown edge type or attribute, for shares out of range, for times that cannot be
    split, and for held-out links that do not fit into ``scratch.memory``.
    """
    if options.hold_out is None:
        if options.hold_out_time is not None:
            raise DataError(
                f"{dataset.name}: option hold_out_time={options.hold_out_time} needs option hold_out, the edge type"
            )
        return dataset
    _check(dataset, options)
    of = _edge_type(dataset, options.hold_out)
    rule = _rule(dataset, of, options, scratch)
    edges = dict(dataset.edges)
    found, notes = _links(rule, of, edges[of], scratch)
    edges[of] = _remaining(rule, of, edges[of], scratch)
    back = _reverse(of)
    if back in edges:
        edges[back] = _remaining(rule, back, edges[back], scratch, backward=True)
    notes += _remove_from_other_reverses(dataset, edges, of, found, scratch)
    found[HELD_OUT] = encode_texts([type_name(of)])
    return replace(
        dataset, edges=edges, graph_attrs={**dataset.graph_attrs, **found}, notes=(*dataset.notes, *notes)
    )  # fmt: skip


def _links(
    rule: _Rule, of: EdgeType, data: EdgeData, scratch: Scratch | None
) -> tuple[dict[str, Array], list[str]]:  # fmt: skip
    """Return the held-out links as graph attributes, and notes about them."""
    held: tuple[list[Array], list[Array]] = ([], [])  # columns of the links for validation and for test, int64 [k, n]
    for piece in slices(data.num_edges):
        columns = rule.columns(data, piece)
        for found, chosen in zip(held, rule.of(data, piece, backward=False), strict=True):
            found.append(np.stack([each[chosen].astype(np.int64) for each in columns]))
        size = _LINK_BYTES * sum(each.shape[1] for found in held for each in found)
        if scratch is not None and size > scratch.memory:
            raise DataError(
                f"the held-out links of {type_name(of)} take more than the {size_text(scratch.memory)} of memory that "
                "may be used; lower options hold_out_val and hold_out_test, or raise data.partition.memory (--memory)"
            )
    sizes = [sum(each.shape[1] for each in found) for found in held]
    empty = np.empty((len(rule.columns(data, slice(0, 0))), 0), np.int64)
    val, test = (np.concatenate([empty, *found], axis=1) for found in held)
    notes = rule.notes(of, sizes[0], sizes[1], data.num_edges)
    return {
        **rule.links(_unique(val), (VAL_LINKS, VAL_TIMES)), **rule.links(_unique(test), (TEST_LINKS, TEST_TIMES))
    }, notes  # fmt: skip


def _unique(columns: Array) -> Array:
    """Sort columns [k, n] by row 0, then row 1, …, and leave out repeated ones."""
    columns = columns[:, np.lexsort(columns[::-1])]
    new = np.ones(columns.shape[1], bool)
    new[1:] = (columns[:, 1:] != columns[:, :-1]).any(axis=0)
    return columns[:, new]


def _remaining(
    rule: _Rule, of: EdgeType, data: EdgeData, scratch: Scratch | None, backward: bool = False
) -> EdgeData:  # fmt: skip
    def keep(piece: slice) -> _Flags:
        val, test = rule.of(data, piece, backward=backward)
        return ~(val | test)

    return kept_edges(data, keep, scratch, f"held_out-{type_name(of)}")


def _remove_from_other_reverses(
    dataset: Dataset, edges: dict[EdgeType, EdgeData], of: EdgeType, found: Mapping[str, Array], scratch: Scratch | None
) -> list[str]:  # fmt: skip
    """Remove the reverses of the links in ``found`` from each edge type that contains all of them.

    Does nothing for links between nodes of one type. Returns a note for each edge type that contains some, but not all.
    """
    notes = []
    links, width = np.concatenate([found[VAL_LINKS], found[TEST_LINKS]], axis=1), dataset.nodes[of[2]].num_nodes
    wanted, copies = np.unique(links[0] * width + links[1], return_counts=True)
    for back, data in list(edges.items()):
        if of[0] == of[2] or (back[0], back[2]) != (of[2], of[0]) or back == _reverse(of):
            continue

        def among(piece: slice, data: EdgeData = data) -> tuple[_Flags, Array]:
            """Return which edges are reverses of links, and the place of each in ``wanted``."""
            target, source = data.edge_index[:, piece].astype(np.int64)
            key = source * width + target
            place = np.minimum(np.searchsorted(wanted, key), max(len(wanted) - 1, 0))
            return (wanted[place] == key if len(wanted) else np.zeros(len(key), bool)), place

        there = np.zeros(len(wanted), bool)
        for piece in slices(data.num_edges):
            flags, place = among(piece)
            there[place[flags]] = True
        count = int(copies[there].sum())
        if there.all() and count:
            name = f"held_out-{type_name(back)}"
            edges[back] = kept_edges(data, lambda piece, among=among: ~among(piece)[0], scratch, name)  # type: ignore[misc]
            notes.append(f"held-out links of {type_name(of)} are also removed from their reverse, {type_name(back)}")
        elif count:
            notes.append(
                f"{count:,} of the {links.shape[1]:,} held-out links of {type_name(of)} are still in {type_name(back)},"
                " reversed; if it is the reverse type, leave it out and set undirected: true"
            )
    return notes


class _Rule(Protocol):
    """Decides which links are held out."""

    def of(self, data: EdgeData, piece: slice, *, backward: bool) -> tuple[_Flags, _Flags]:
        """Return which edges of a slice are held out for validation, and which for test: two masks, bool [n].

        ``backward``: whether ``data`` are the edges of the reverse type.
        """

    def columns(self, data: EdgeData, piece: slice) -> Sequence[Array]:
        """Return the values that tell links of a slice apart, integers [n] each, the first to sort by first."""

    def links(self, columns: Array, names: tuple[str, str]) -> dict[str, Array]:
        """Return links as graph attributes. ``columns``: int64 [k, n], as from ``columns``.

        ``names``: the name of the attribute for the links, and that for their times.
        """

    def notes(self, of: EdgeType, val: int, test: int, total: int) -> list[str]:
        """Return messages to the user about the numbers of links of type ``of`` that are held out."""


@dataclass(frozen=True)
class _ByHash:
    """Holds out links by a hash of their source and target."""

    either_way: bool  #: treat (u, v) and (v, u) as the same link
    val: float  #: share of the links, 0 to 1
    test: float  #: share of the links, 0 to 1

    def of(self, data: EdgeData, piece: slice, *, backward: bool) -> tuple[_Flags, _Flags]:
        ends = data.edge_index[::-1, piece] if backward else data.edge_index[:, piece]
        first, second = np.asarray(ends[0], np.int64), np.asarray(ends[1], np.int64)
        loops: _Flags = np.zeros(len(first), bool)
        if self.either_way:
            loops = first == second
            first, second = np.minimum(first, second), np.maximum(first, second)
        with np.errstate(over="ignore"):
            key = hashed(hashed(first.astype(np.uint64) + GOLDEN) + second.astype(np.uint64))
        place = (key >> np.uint64(11)).astype(np.float64) / float(1 << 53)
        test: _Flags = (place < self.test) & ~loops
        return (place < self.test + self.val) & ~test & ~loops, test

    def columns(self, data: EdgeData, piece: slice) -> Sequence[Array]:
        return list(data.edge_index[:, piece])

    def links(self, columns: Array, names: tuple[str, str]) -> dict[str, Array]:
        return {names[0]: columns}

    def notes(self, of: EdgeType, val: int, test: int, total: int) -> list[str]:
        return []


@dataclass(frozen=True)
class _ByTime:
    """Holds out the latest links."""

    attr: str  #: edge attribute with the times
    split: TimeSplit

    def of(self, data: EdgeData, piece: slice, *, backward: bool) -> tuple[_Flags, _Flags]:
        return self.split.of(data.attrs[self.attr][piece].reshape(-1))

    def columns(self, data: EdgeData, piece: slice) -> Sequence[Array]:
        return [data.attrs[self.attr][piece].reshape(-1), *data.edge_index[:, piece]]

    def links(self, columns: Array, names: tuple[str, str]) -> dict[str, Array]:
        return {names[0]: columns[1:], names[1]: columns[0], HELD_OUT_TIME: encode_texts([self.attr])}

    def notes(self, of: EdgeType, val: int, test: int, total: int) -> list[str]:
        splits = (("validation", self.split.val, val), ("test", self.split.test, test))
        later = [
            f"{count:,} links from {self.attr} {first} on are for {name}"
            for name, first, count in splits
            if first is not None
        ]
        return [f"{type_name(of)}: {'; '.join(later)}; the {total - val - test:,} earlier ones are for training"]


def _rule(dataset: Dataset, of: EdgeType, options: HoldOut, scratch: Scratch | None) -> _Rule:
    val, test, attr = options.hold_out_val, options.hold_out_test, options.hold_out_time
    if attr is None:
        return _ByHash(of[0] == of[2], val, test)
    for each in (of, *({_reverse(of)} & set(dataset.edges))):
        data = dataset.edges[each]
        where = f"{dataset.name}: option hold_out_time={attr}"
        if attr not in data.attrs:
            known = ", ".join(sorted(data.attrs)) or "none"
            raise DataError(f"{where}, but the attributes of the edges {type_name(each)} are: {known}")
        values = data.attrs[attr]
        if not is_time(values, attr in data.bfloat16):
            raise DataError(
                f"{where}: {attr} of the edges {type_name(each)} is {values.dtype} {list(values.shape)}; times must be "
                "one integer (of 63 bits) per edge, for example seconds"
            )
    where = f"{dataset.name}: {attr} of the edges {type_name(of)}"
    counted = counted_times(dataset.edges[of].attrs[attr], None if scratch is None else scratch.memory, where)
    return _ByTime(attr, split_times(*counted, val, test, where))


def _check(dataset: Dataset, options: HoldOut) -> None:
    shares = options.hold_out_val, options.hold_out_test
    if min(shares) < 0 or not 0 < sum(shares) < 1:
        raise DataError(
            f"{dataset.name}: options hold_out_val={shares[0]:g} and hold_out_test={shares[1]:g} must be shares of the "
            "links: each at least 0, their sum more than 0 and less than 1"
        )
    if existing := {VAL_LINKS, TEST_LINKS, VAL_TIMES, TEST_TIMES, HELD_OUT, HELD_OUT_TIME} & set(dataset.graph_attrs):
        raise DataError(
            f"{dataset.name}: graph attribute {sorted(existing)[0]} already exists; leave out option hold_out, or "
            "rename the attribute"
        )


def _edge_type(dataset: Dataset, name: str) -> EdgeType:
    found: Mapping[str, EdgeType] = {type_name(of): of for of in dataset.edges}
    if name not in found:
        raise DataError(f"{dataset.name}: option hold_out={name}, but the edge types are: {', '.join(sorted(found))}")
    return found[name]


def _reverse(of: EdgeType) -> EdgeType:
    relation = of[1].removeprefix(_REVERSE) if of[1].startswith(_REVERSE) else _REVERSE + of[1]
    return of[2], relation, of[0]
