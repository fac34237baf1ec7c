"""Holds out links for validation and test, and removes them from the edges: by a given split, at random, or by time."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from trainer.core.arrays import Array
from trainer.core.errors import DataError
from trainer.core.graph_attrs import (
    HELD_OUT,
    HELD_OUT_TIME,
    TEST_LINKS,
    TEST_TIMES,
    TEST_TYPES,
    VAL_LINKS,
    VAL_TIMES,
    VAL_TYPES,
    encode_texts,
)
from trainer.core.memory import size_text
from trainer.core.rng import GOLDEN, hashed
from trainer.core.row_sort import Scratch
from trainer.core.schema import EdgeType, NodeType, type_name
from trainer.data.dataset import Dataset, EdgeData, is_time
from trainer.data.options import SourceOptions
from trainer.data.time_split import TimeSplit, counted_times, split_times
from trainer.data.work_arrays import kept_edges, slices

_NAMES = (VAL_LINKS, TEST_LINKS, VAL_TIMES, TEST_TIMES, VAL_TYPES, TEST_TYPES, HELD_OUT, HELD_OUT_TIME)

_Flags = npt.NDArray[np.bool_]

_REVERSE = "rev_"

_LINK_BYTES = 80  #: of memory per held-out link while they are sorted


class _HoldOut(Protocol):
    @property
    def hold_out(self) -> str | None: ...
    @property
    def hold_out_val(self) -> float: ...
    @property
    def hold_out_test(self) -> float: ...
    @property
    def hold_out_time(self) -> str | None: ...


def hold_out_given(
    edges: Mapping[EdgeType, EdgeData], num_nodes: Mapping[NodeType, int], options: SourceOptions, where: str,
    scratch: Scratch | None = None,
) -> tuple[dict[EdgeType, EdgeData], dict[str, Array], list[str]]:  # fmt: skip
    """Move the links that option ``hold_out_split`` gives to val or test out of the edges, before reverses are added.

    The option names an edge attribute: 0 for links of training, 1 for validation, 2 for test. Its edge type is option
    ``hold_out``; default: all types that have the attribute and no labels ``y``. These types lose the attribute. Each
    edge goes where its row says: of a link in several rows, some may remain edges, which a note tells. Own reverses, of
    a type ``rev_<relation>`` or of another type with all of them, are removed.

    Returns the remaining edges, graph attributes as from ``hold_out_links``, and notes. The links have times if option
    ``hold_out_time`` names an attribute. With several types, links are ordered by type, and ``val_link_types`` and
    ``test_link_types`` hold the row of each in ``held_out_type``.

    Raises ``DataError`` for an unknown type or attribute, other values, and if no link is held out.
    """
    attr, time, remaining = options.hold_out_split, options.hold_out_time, dict(edges)
    if attr is None:
        return remaining, {}, []
    where = f"{where}: option hold_out_split={attr}"
    types = [of for of, data in edges.items() if attr in data.attrs and "y" not in data.attrs]
    if options.hold_out is not None:
        types = [_edge_type(edges, options.hold_out, where)]
    if not types:
        raise DataError(f"{where}, but no edge type has this attribute")
    found: list[dict[str, Array]] = []
    notes: list[str] = []
    for of in types:
        data, about = edges[of], f"{where}: edges {type_name(of)}"
        if attr not in data.attrs:
            raise DataError(f"{about} have no such attribute, but: {', '.join(sorted(data.attrs)) or 'none'}")
        given = data.attrs[attr]
        if given.dtype.kind not in "iu" or given.size != data.num_edges:
            raise DataError(f"{about}: expected one integer per edge, not {given.dtype} {list(given.shape)}")
        for piece in slices(data.num_edges):
            part = given[piece].reshape(-1)
            if (wrong := (part < 0) | (part > 2)).any():
                at = int(np.argmax(wrong))
                raise DataError(
                    f"{about}: edge {piece.start + at} has {part[at]}; 0 is for training, 1 for validation, 2 for test"
                )
        if time is not None:
            _check_times(data, time, of, where)
        rule = _Given(attr, time)
        links, more = _links(rule, of, data, scratch)
        kept = _remaining(rule, of, data, scratch)
        remaining[of] = replace(kept, attrs={name: values for name, values in kept.attrs.items() if name != attr})
        found.append(links)
        notes += more
    for of, links in zip(types, found, strict=True):
        notes += _remove_from_other_reverses(num_nodes[of[2]], remaining, of, links, scratch, types)
        if time is None:
            notes += _also_edges(remaining[of], num_nodes[of[2]], of, links, options.undirected)
    joined = {name: np.concatenate([links[name] for links in found], axis=-1) for name in found[0]}
    if not joined[VAL_LINKS].size + joined[TEST_LINKS].size:
        raise DataError(f"{where}: no edge of {', '.join(map(type_name, types))} is for validation or test")
    if len(types) > 1:
        for name, of_links in ((VAL_TYPES, VAL_LINKS), (TEST_TYPES, TEST_LINKS)):
            joined[name] = np.repeat(np.arange(len(found)), [links[of_links].shape[1] for links in found])
    if time is not None:
        joined[HELD_OUT_TIME] = encode_texts([time])
    joined[HELD_OUT] = encode_texts([type_name(of) for of in types])
    return remaining, joined, notes


def _also_edges(data: EdgeData, width: int, of: EdgeType, links: Mapping[str, Array], undirected: bool) -> list[str]:
    """Return a note if some held-out links are also edges that remain."""
    held = np.concatenate([links[VAL_LINKS], links[TEST_LINKS]], axis=1)
    either_way = undirected and of[0] == of[2]
    wanted = np.unique(held[0] * width + held[1])
    there = np.zeros(len(wanted), bool)
    for piece in slices(data.num_edges):
        source, target = data.edge_index[:, piece].astype(np.int64)
        for key in (source * width + target, *((target * width + source,) if either_way else ())):
            flags, place = _among(key, wanted)
            there[place[flags]] = True
    count = int(np.count_nonzero(there))
    return [
        f"{count:,} of the {len(wanted):,} held-out links of {type_name(of)} are also edges for training"
        + (", in one direction or the other" if either_way else "")
    ] if count else []  # fmt: skip


def _among(keys: Array, wanted: Array) -> tuple[_Flags, Array]:
    """Return which of ``keys`` are in the sorted array ``wanted``, and the place of each there."""
    place = np.minimum(np.searchsorted(wanted, keys), max(len(wanted) - 1, 0))
    return (wanted[place] == keys if len(wanted) else np.zeros(len(keys), bool)), place


def hold_out_links(dataset: Dataset, options: _HoldOut, scratch: Scratch | None = None) -> Dataset:
    """Move some links of the edge type ``hold_out`` to the graph attributes ``val_links`` and ``test_links``.

    The options state which share of the links to move. With ``hold_out_split``, ``hold_out_given`` did it when the
    dataset was built, and nothing is done. The graph attribute ``held_out_type`` names the edge type.

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
    if getattr(options, "hold_out_split", None) is not None:
        return dataset  # ``hold_out_given`` has done it
    if options.hold_out is None:
        if options.hold_out_time is not None:
            raise DataError(
                f"{dataset.name}: option hold_out_time={options.hold_out_time} needs option hold_out, the edge type"
            )
        return dataset
    shares = options.hold_out_val, options.hold_out_test
    if min(shares) < 0 or not 0 < sum(shares) < 1:
        raise DataError(
            f"{dataset.name}: options hold_out_val={shares[0]:g} and hold_out_test={shares[1]:g} must be shares of the "
            "links: each at least 0, their sum more than 0 and less than 1"
        )
    if existing := set(_NAMES) & set(dataset.graph_attrs):
        raise DataError(
            f"{dataset.name}: graph attribute {sorted(existing)[0]} already exists; leave out option hold_out, or "
            "rename the attribute"
        )
    of = _edge_type(dataset.edges, options.hold_out, f"{dataset.name}: option hold_out={options.hold_out}")
    edges, back, time = dict(dataset.edges), _reverse(of), options.hold_out_time
    rule: _Rule = _ByHash(of[0] == of[2], *shares)
    if time is not None:
        for each in (of, *({back} & set(edges))):
            _check_times(edges[each], time, each, f"{dataset.name}: option hold_out_time={time}")
        where = f"{dataset.name}: {time} of the edges {type_name(of)}"
        memory = None if scratch is None else scratch.memory
        rule = _ByTime(time, split_times(*counted_times(edges[of].attrs[time], memory, where), *shares, where))
    found, notes = _links(rule, of, edges[of], scratch)
    edges[of] = _remaining(rule, of, edges[of], scratch)
    if back in edges:
        edges[back] = _remaining(rule, back, edges[back], scratch, backward=True)
    width = dataset.nodes[of[2]].num_nodes
    notes += _remove_from_other_reverses(width, edges, of, found, scratch, (back,))
    if time is not None:
        found[HELD_OUT_TIME] = encode_texts([time])
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
        # what tells links apart, the first to sort by first
        times = [] if rule.time is None else [data.attrs[rule.time][piece].reshape(-1)]
        columns = [*times, *data.edge_index[:, piece]]
        for found, chosen in zip(held, rule.of(data, piece, backward=False), strict=True):
            found.append(np.stack([each[chosen].astype(np.int64) for each in columns]))
        size = _LINK_BYTES * sum(each.shape[1] for found in held for each in found)
        if scratch is not None and size > scratch.memory:
            raise DataError(
                f"the held-out links of {type_name(of)} take more than the {size_text(scratch.memory)} of memory that "
                "may be used; lower options hold_out_val and hold_out_test, or raise data.partition.memory (--memory)"
            )
    sizes = [sum(each.shape[1] for each in found) for found in held]
    empty = np.empty((2 if rule.time is None else 3, 0), np.int64)
    val, test = (_unique(np.concatenate([empty, *found], axis=1)) for found in held)
    notes = rule.notes(of, sizes[0], sizes[1], data.num_edges)
    if rule.time is None:
        return {VAL_LINKS: val, TEST_LINKS: test}, notes
    return {VAL_LINKS: val[1:], TEST_LINKS: test[1:], VAL_TIMES: val[0], TEST_TIMES: test[0]}, notes


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
    width: int, edges: dict[EdgeType, EdgeData], of: EdgeType, found: Mapping[str, Array], scratch: Scratch | None,
    done: Collection[EdgeType],
) -> list[str]:  # fmt: skip
    """Remove the reverses of the links in ``found`` from ``rev_<relation>``, and from types that contain all of them.

    ``width``: number of nodes of the target type. Types in ``done`` are left alone, and for links between nodes of one
    type all but ``rev_<relation>``. Returns a note for each edge type that contains some, but not all.
    """
    notes = []
    links = np.concatenate([found[VAL_LINKS], found[TEST_LINKS]], axis=1)
    wanted, copies = np.unique(links[0] * width + links[1], return_counts=True)
    for back, data in list(edges.items()):
        named = back == _reverse(of)
        if back in done or not (named or (of[0] != of[2] and (back[0], back[2]) == (of[2], of[0]))):
            continue

        def among(piece: slice, data: EdgeData = data) -> tuple[_Flags, Array]:
            """Return which edges are reverses of links, and the place of each in ``wanted``."""
            target, source = data.edge_index[:, piece].astype(np.int64)
            return _among(source * width + target, wanted)

        there = np.zeros(len(wanted), bool)
        for piece in slices(data.num_edges):
            flags, place = among(piece)
            there[place[flags]] = True
        count = int(copies[there].sum())
        if count and (named or there.all()):
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

    @property
    def time(self) -> str | None:
        """Edge attribute with the times of the links; None: they have none."""

    def of(self, data: EdgeData, piece: slice, *, backward: bool) -> tuple[_Flags, _Flags]:
        """Return which edges of a slice are held out for validation, and which for test: two masks, bool [n].

        ``backward``: whether ``data`` are the edges of the reverse type.
        """

    def notes(self, of: EdgeType, val: int, test: int, total: int) -> list[str]:
        """Return messages to the user about the numbers of links of type ``of`` that are held out."""


@dataclass(frozen=True)
class _Given:
    """Holds out the links that an edge attribute gives to validation (1) or test (2)."""

    attr: str
    time: str | None

    def of(self, data: EdgeData, piece: slice, *, backward: bool) -> tuple[_Flags, _Flags]:
        values = data.attrs[self.attr][piece].reshape(-1)
        return values == 1, values == 2

    def notes(self, of: EdgeType, val: int, test: int, total: int) -> list[str]:
        rest = f"the {total - val - test:,} others are for training"
        return [f"{type_name(of)}: {val:,} links are for validation and {test:,} for test, as given; {rest}"]


@dataclass(frozen=True)
class _ByHash:
    """Holds out links by a hash of their source and target."""

    either_way: bool  #: treat (u, v) and (v, u) as the same link
    val: float  #: share of the links, 0 to 1
    test: float  #: share of the links, 0 to 1
    time: None = None

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

    def notes(self, of: EdgeType, val: int, test: int, total: int) -> list[str]:
        return []


@dataclass(frozen=True)
class _ByTime:
    """Holds out the latest links."""

    time: str
    split: TimeSplit

    def of(self, data: EdgeData, piece: slice, *, backward: bool) -> tuple[_Flags, _Flags]:
        return self.split.of(data.attrs[self.time][piece].reshape(-1))

    def notes(self, of: EdgeType, val: int, test: int, total: int) -> list[str]:
        splits = (("validation", self.split.val, val), ("test", self.split.test, test))
        later = [
            f"{count:,} links from {self.time} {first} on are for {name}"
            for name, first, count in splits
            if first is not None
        ]
        return [f"{type_name(of)}: {'; '.join(later)}; the {total - val - test:,} earlier ones are for training"]


def _check_times(data: EdgeData, attr: str, of: EdgeType, where: str) -> None:
    if attr not in data.attrs:
        known = ", ".join(sorted(data.attrs)) or "none"
        raise DataError(f"{where}, but the attributes of the edges {type_name(of)} are: {known}")
    values = data.attrs[attr]
    if not is_time(values, attr in data.bfloat16):
        raise DataError(
            f"{where}: {attr} of the edges {type_name(of)} is {values.dtype} {list(values.shape)}; times must be "
            "one integer (of 63 bits) per edge, for example seconds"
        )


def _edge_type(edges: Mapping[EdgeType, EdgeData], name: str, where: str) -> EdgeType:
    found = {type_name(of): of for of in edges}
    if name not in found:
        raise DataError(f"{where}, but the edge types are: {', '.join(sorted(found))}")
    return found[name]


def _reverse(of: EdgeType) -> EdgeType:
    relation = of[1].removeprefix(_REVERSE) if of[1].startswith(_REVERSE) else _REVERSE + of[1]
    return of[2], relation, of[0]
