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
from trainer.data.dataset import Dataset, EdgeData

VAL_LINKS, TEST_LINKS = "val_links", "test_links"  #: names of graph attributes, int64 [2, n], original ids

HELD_OUT = "held_out_type"  #: graph attribute with the links' edge type, uint8 [1, bytes] (``encode_texts``)

_Flags = npt.NDArray[np.bool_]

_REVERSE = "rev_"


class HoldOut(Protocol):
    @property
    def hold_out(self) -> str | None: ...
    @property
    def hold_out_val(self) -> float: ...
    @property
    def hold_out_test(self) -> float: ...


def hold_out_links(dataset: Dataset, options: HoldOut) -> Dataset:
    """Move some links of the edge type ``hold_out`` to the graph attributes ``val_links`` and ``test_links``.

    A hash of source and target decides whether a link is moved, so all copies of an edge are moved together. If both
    ends have the same node type, both directions are moved together, and self loops are not moved.

    The reverses of the moved links are removed from the reverse edge type, ``rev_<relation>`` (or ``<relation>`` for an
    edge type ``rev_<relation>``), if it exists, and from any other edge type that contains all of them. A type that
    contains only some of them is left unchanged, and the dataset gets a note. Raises ``DataError`` for an unknown edge
    type and for shares out of range.
    """
    if options.hold_out is None:
        return dataset
    _check(dataset, options)
    of = _edge_type(dataset, options.hold_out)
    chosen = _HeldOutLinks(of[0] == of[2], options.hold_out_val, options.hold_out_test)
    edges = dict(dataset.edges)
    val, test = chosen.of(edges[of].edge_index)
    links = {VAL_LINKS: _distinct(edges[of].edge_index, val), TEST_LINKS: _distinct(edges[of].edge_index, test)}
    edges[of] = _kept(edges[of], ~(val | test))
    back = _reverse(of)
    if back in edges:
        val, test = chosen.of(edges[back].edge_index[::-1])
        edges[back] = _kept(edges[back], ~(val | test))
    notes = _remove_from_other_reverses(edges, of, np.concatenate(list(links.values()), axis=1))
    attrs = {**dataset.graph_attrs, **links, HELD_OUT: encode_texts([type_name(of)])}
    return replace(dataset, edges=edges, graph_attrs=attrs, notes=(*dataset.notes, *notes))


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


@dataclass(frozen=True)
class _HeldOutLinks:
    either_way: bool  #: treat (u, v) and (v, u) as the same link
    val: float  #: share of the links, 0 to 1
    test: float  #: share of the links, 0 to 1

    def of(self, ends: Array) -> tuple[_Flags, _Flags]:
        """Return two masks of the edges ``ends`` [2, E]: held out for validation, and for test, bool [E] each."""
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


def _check(dataset: Dataset, options: HoldOut) -> None:
    shares = options.hold_out_val, options.hold_out_test
    if min(shares) < 0 or not 0 < sum(shares) < 1:
        raise DataError(
            f"{dataset.name}: options hold_out_val={shares[0]:g} and hold_out_test={shares[1]:g} must be shares of the "
            "links, none negative, together more than 0 and less than 1"
        )
    if existing := {VAL_LINKS, TEST_LINKS, HELD_OUT} & set(dataset.graph_attrs):
        raise DataError(
            f"{dataset.name}: graph attribute {sorted(existing)[0]} already exists; leave out option hold_out, or "
            "rename it"
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


def _distinct(edge_index: Array, chosen: _Flags) -> Array:
    links: Array = np.unique(edge_index[:, chosen].astype(np.int64), axis=1)
    return links
