"""Scores of pairs of source and target that the user lists by id in a CSV file."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainer.core.arrays import Array, Ids
from trainer.core.errors import DataError
from trainer.core.schema import NodeType, type_name
from trainer.graph.open import Graph
from trainer.infer.prediction_files import ROWS_AT_ONCE, TableColumn, id_attr, write_table
from trainer.nn.link_embeddings import LinkEmbeddings
from trainer.sampler.types import RowRequest
from trainer.sources.table_columns import INTEGER

#: The rule of ``trainer.sources.table_columns``: as numbers ``12`` and ``12.0`` are the same id, ``012`` is none.
_WHOLE, _DECIMAL = re.compile(rf"({INTEGER})(?:\.0*)?"), re.compile(rf"({INTEGER})\.0+")

_NONE = 1 << 63  #: no id: too large for 64 bits


def write_pair_scores(out: Path, graph: Graph, links: Sequence[LinkEmbeddings], path: Path, parquet: bool) -> None:
    """Write ``pairs.csv``: source, target and score of each pair in ``path``, in the same order. Collective.

    ``links``: of each edge type; if there are several, the third column of ``path`` has the edge type or the relation
    of each pair, and so has ``pairs.csv``. ``path``: a CSV file whose first two columns are ids of sources and targets;
    its first row is a header unless all these cells are such ids and names. Only rank 0 reads it. Raises ``DataError``
    that names the row of an unknown id.
    """
    group, several = links[0].group, len(links) > 1
    relations = [each.edge_type[1] for each in links]
    # an edge type may be given by its relation if no other has the same
    numbers = {name: k for k, name in enumerate(relations) if relations.count(name) == 1}
    numbers |= {type_name(each.edge_type): k for k, each in enumerate(links)}
    names: list[list[str]] = []
    found: list[Ids] = []

    def read() -> None:
        if group.rank == 0:
            names[:] = _columns(path, 3 if several else 2)
            of = np.array([numbers.get(name, -1) for name in names[2]] if several else [0] * len(names[0]), np.int64)
            sources = {each.ends[0] for each in links}
            if several and len(of) and of[0] < 0 and all(_nodes(graph, kind, names[0][:1])[0] < 0 for kind in sources):
                names[:], of = [texts[1:] for texts in names], of[1:]
            if (unknown := np.flatnonzero(of < 0)).size:
                _raise(path, "edge type", names[2], unknown, "an edge type of the model")
            ends: list[Ids] = [np.full(len(of), -1, np.int64) for _ in range(2)]
            for k, each in enumerate(links):
                own = np.flatnonzero(of == k)
                for column, kind, texts in zip(ends, each.ends, names, strict=False):
                    column[own] = _nodes(graph, kind, [texts[i] for i in own]) if len(own) else column[own]
            header = int(not several and any(len(column) and column[0] < 0 for column in ends))
            names[:] = [texts[header:] for texts in names]
            found[:] = [of[header:], *(column[header:] for column in ends)]
            for role, texts, column in zip(("source", "target"), names, found[1:], strict=False):
                if (unknown := np.flatnonzero(column < 0)).size:
                    kind = links[found[0][unknown[0]]].ends[role == "target"]
                    _raise(path, role, texts, unknown, f"the id of a node of type {kind}")

    group.agree(read)
    none = np.empty(0, np.int64)
    scores: list[list[float]] = []
    for begin in range(0, group.from_first(len(found[0]) if found else 0), ROWS_AT_ONCE):
        of, src, dst = (each[begin : begin + ROWS_AT_ONCE] for each in found or (none, none, none))
        some = np.empty(len(of), np.float32)
        for k, each in enumerate(links):
            own = np.flatnonzero(of == k)
            left = each.queries(each.source.fetch(src[own]))
            some[own] = each.pair_scores(left, each.target.fetch(dst[own])).numpy()
        scores.append(some.tolist())
    if group.rank == 0:
        roles = ("source", "target", *(["edge_type"] if several else []))
        columns = [*(TableColumn(role, "VARCHAR") for role in roles), TableColumn("score", "DOUBLE")]
        starts = range(0, len(scores) * ROWS_AT_ONCE, ROWS_AT_ONCE)
        blocks: Iterator[list[Sequence[Any]]] = (
            [*(texts[at : at + ROWS_AT_ONCE] for texts in names), some] for at, some in zip(starts, scores, strict=True)
        )
        write_table(out / "pairs", columns, blocks, parquet)


def _raise(path: Path, role: str, texts: Sequence[str], wrong: Ids, what: str) -> None:
    row = int(wrong[0])
    raise DataError(f"{path}, {role} {texts[row]!r} in row {row + 1} is not {what} ({len(wrong):,} such rows)")


def _columns(path: Path, count: int) -> list[list[str]]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.reader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as CSV: {error}") from None
    wanted = "the ids of a source and of a target" + (" and an edge type" if count == 3 else "")
    for number, row in enumerate(rows):
        if len(row) < count:
            raise DataError(f"{path}, row {number}: {len(row)} columns; expected {wanted}")
    return [[row[k] for row in rows] for k in range(count)]


def _nodes(graph: Graph, of: NodeType, texts: Sequence[str]) -> Ids:
    """Return the global ids of nodes, given as texts: ids in the node table, or else original ids. -1: unknown."""
    known, is_id = _all_ids(graph, of), np.ones(len(texts), bool)
    if known.dtype.kind == "S":
        candidates = known[np.char.find(known, b".0") >= 0].tolist()
        as_written = any(_DECIMAL.fullmatch(one.decode()) for one in candidates)
        decimals = [None if as_written else _DECIMAL.fullmatch(one) for one in texts]
        keys = [match[1] if match else one for match, one in zip(decimals, texts, strict=True)]
        wanted: Array = np.array([key.encode() for key in keys], dtype=bytes)
    else:
        found = [_WHOLE.fullmatch(one.strip(" ")) for one in texts]
        numbers = [int(match[1]) if match and len(match[1]) <= 20 else _NONE for match in found]
        is_id = np.array([-_NONE <= number < _NONE for number in numbers], bool)
        wanted = np.array([number if fits else 0 for number, fits in zip(numbers, is_id, strict=True)], np.int64)
    order = np.argsort(known, kind="stable")
    place = np.minimum(np.searchsorted(known[order], wanted), len(known) - 1)
    ids = order[place]
    return np.where((known[ids] == wanted) & is_id, ids, -1).astype(np.int64)


def _all_ids(graph: Graph, of: NodeType) -> Array:
    name, count = id_attr(graph, of), graph.manifest.nodes[of].num_nodes
    pieces = []
    for begin in range(0, count, ROWS_AT_ONCE):
        nodes = np.arange(begin, min(begin + ROWS_AT_ONCE, count))
        pieces.append(np.ascontiguousarray(graph.access.gather([RowRequest(of, nodes, (name,))])[0][name]))
    ids = np.concatenate(pieces)
    return ids.view(f"S{ids.shape[1]}")[:, 0] if ids.ndim == 2 else ids
