"""Holds out links of one edge type for validation and test, and removes them from the edges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from trainer.core.arrays import Array
from trainer.core.errors import DataError
from trainer.core.rng import GOLDEN, hashed
from trainer.core.schema import EdgeType, type_name
from trainer.core.texts import encode_texts
from trainer.data.dataset import Dataset, EdgeData, is_time
from trainer.data.time_split import TimeSplit, split_times

VAL_LINKS, TEST_LINKS = "val_links", "test_links"  #: names of graph attributes, int64 [2, n], original ids

VAL_TIMES, TEST_TIMES = "val_link_times", "test_link_times"  #: graph attributes with their times, int64 [n]

HELD_OUT = "held_out_type"  #: graph attribute with the links' edge type, uint8 [1, bytes] (``encode_texts``)

HELD_OUT_TIME = "held_out_time"  #: graph attribute with the name of the edge attribute of the times, as ``HELD_OUT``

_Flags = npt.NDArray[np.bool_]

_REVERSE = "rev_"


class HoldOut(Protocol):
    @property
    def hold_out(self) -> str | None: ...
    @property
    def hold_out_val(self) -> float: ...
    @property
    def hold_out_test(self) -> float: ...
    @property
    def hold_out_time(self) -> str | None: ...


def hold_out_links(dataset: Dataset, options: HoldOut) -> Dataset:
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

    Raises ``DataError`` for an unknown edge type or attribute, for shares out of range, and for times that cannot be
    split.
    """
    if options.hold_out is None:
        if options.hold_out_time is not None:
            raise DataError(
                f"{dataset.name}: option hold_out_time={options.hold_out_time} needs option hold_out, the edge type"
            )
        return dataset
    _check(dataset, options)
    of = _edge_type(dataset, options.hold_out)
    rule = _rule(dataset, of, options)
    edges = dict(dataset.edges)
    val, test = rule.of(edges[of], backward=False)
    found = {
        **rule.links(edges[of], val, (VAL_LINKS, VAL_TIMES)),
        **rule.links(edges[of], test, (TEST_LINKS, TEST_TIMES)),
    }
    notes = rule.notes(of, val, test)
    edges[of] = _kept(edges[of], ~(val | test))
    back = _reverse(of)
    if back in edges:
        val, test = rule.of(edges[back], backward=True)
        edges[back] = _kept(edges[back], ~(val | test))
    notes += _remove_from_other_reverses(edges, of, np.concatenate([found[VAL_LINKS], found[TEST_LINKS]], axis=1))
    found[HELD_OUT] = encode_texts([type_name(of)])
    return replace(
        dataset, edges=edges, graph_attrs={**dataset.graph_attrs, **found}, notes=(*dataset.notes, *notes)
    )  # fmt: skip


def _remove_from_other_reverses(edges: dict[EdgeType, EdgeData], of: EdgeType, links: Array) -> list[str]:
    """Remove the reverses of ``links`` [2, n] from each edge type that contains all of them.

    Does nothing for links between nodes of one type. Returns a note for each edge type that contains some, but not all.
    """
    notes = []
    for back in edges:
        if of[0] == of[2] or (back[0], back[2]) != (of[2], of[0]) or back == _reverse(of):
            continue
        target, source = edges[back].edge_index.astype(np.int64)
        width = 1 + max(int(target.max(initial=0)), int(links[1].max(initial=0)))
        wanted, there = links[0] * width + links[1], source * width + target
        count = int(np.isin(wanted, there).sum())
        if count == len(wanted) > 0:
            edges[back] = _kept(edges[back], ~np.isin(there, wanted))
            notes.append(f"held-out links of {type_name(of)} are also removed from their reverse, {type_name(back)}")
        elif count:
            notes.append(
                f"{count:,} of the {len(wanted):,} held-out links of {type_name(of)} are still in {type_name(back)}, "
                "reversed; if it is the reverse type, leave it out and set undirected: true"
            )
    return notes


class _Rule(Protocol):
    """Decides which links are held out."""

    def of(self, data: EdgeData, *, backward: bool) -> tuple[_Flags, _Flags]:
        """Return two masks, bool [E]: the edges held out for validation, and those for test.

        ``backward``: whether ``data`` are the edges of the reverse type.
        """

    def links(self, data: EdgeData, chosen: _Flags, names: tuple[str, str]) -> dict[str, Array]:
        """Return the edges where ``chosen`` is true, sorted and without duplicates, as graph attributes.

        ``names``: the name of the attribute for the links, and that for their times.
        """

    def notes(self, of: EdgeType, val: _Flags, test: _Flags) -> list[str]:
        """Return messages to the user about the links of type ``of`` that are held out."""


@dataclass(frozen=True)
class _ByHash:
    """Holds out links by a hash of their source and target."""

    either_way: bool  #: treat (u, v) and (v, u) as the same link
    val: float  #: share of the links, 0 to 1
    test: float  #: share of the links, 0 to 1

    def of(self, data: EdgeData, *, backward: bool) -> tuple[_Flags, _Flags]:
        ends = data.edge_index[::-1] if backward else data.edge_index
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

    def links(self, data: EdgeData, chosen: _Flags, names: tuple[str, str]) -> dict[str, Array]:
        return {names[0]: np.unique(data.edge_index[:, chosen].astype(np.int64), axis=1)}

    def notes(self, of: EdgeType, val: _Flags, test: _Flags) -> list[str]:
        return []


@dataclass(frozen=True)
class _ByTime:
    """Holds out the latest links."""

    attr: str  #: edge attribute with the times
    split: TimeSplit

    def of(self, data: EdgeData, *, backward: bool) -> tuple[_Flags, _Flags]:
        return self.split.of(data.attrs[self.attr].reshape(-1))

    def links(self, data: EdgeData, chosen: _Flags, names: tuple[str, str]) -> dict[str, Array]:
        times = data.attrs[self.attr].reshape(-1)[chosen].astype(np.int64)
        rows = np.unique(np.concatenate([times[None], data.edge_index[:, chosen].astype(np.int64)]), axis=1)
        return {names[0]: rows[1:], names[1]: rows[0], HELD_OUT_TIME: encode_texts([self.attr])}

    def notes(self, of: EdgeType, val: _Flags, test: _Flags) -> list[str]:
        splits = (("validation", self.split.val, val), ("test", self.split.test, test))
        later = [
            f"{np.count_nonzero(flags):,} links from {self.attr} {first} on are for {name}"
            for name, first, flags in splits
            if first is not None
        ]
        left = len(val) - np.count_nonzero(val | test)
        return [f"{type_name(of)}: {'; '.join(later)}; the {left:,} earlier ones are for training"]


def _rule(dataset: Dataset, of: EdgeType, options: HoldOut) -> _Rule:
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
    times = dataset.edges[of].attrs[attr].reshape(-1)
    return _ByTime(attr, split_times(times, val, test, f"{dataset.name}: {attr} of the edges {type_name(of)}"))


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


def _kept(data: EdgeData, keep: _Flags) -> EdgeData:
    attrs = {name: values[keep] for name, values in data.attrs.items()}
    return EdgeData(np.ascontiguousarray(data.edge_index[:, keep]), attrs, data.bfloat16)
