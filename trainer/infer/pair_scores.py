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
from trainer.core.schema import NodeType
from trainer.graph.open import Graph
from trainer.infer.prediction_files import ROWS_AT_ONCE, Column, id_attr, write_table
from trainer.nn.link_embeddings import LinkEmbeddings
from trainer.sampler.types import RowRequest
from trainer.sources.table_columns import INTEGER

#: The rule of ``trainer.sources.table_columns``: as numbers ``12`` and ``12.0`` are the same id, ``012`` is none.
_WHOLE, _DECIMAL = re.compile(rf"({INTEGER})(?:\.0*)?"), re.compile(rf"({INTEGER})\.0+")

_NONE = 1 << 63  #: no id: too large for 64 bits


def write_pair_scores(out: Path, graph: Graph, links: LinkEmbeddings, path: Path, parquet: bool) -> None:
    """Write ``pairs.csv``: source, target and score of each pair in ``path``, in the same order. Collective.

    ``path``: a CSV file whose first two columns are ids of sources and targets; its first row is a header unless both
    of its cells are such ids. Only rank 0 reads it. Raises ``DataError`` that names the row of an unknown id.
    """
    group, (source, _, target) = links.group, links.edge_type
    names: list[list[str]] = [[], []]
    found: list[Ids] = []

    def read() -> None:
        if group.rank == 0:
            names[:] = _columns(path)
            ids = [_nodes(graph, of, texts) for of, texts in zip((source, target), names, strict=True)]
            header = int(any(len(column) and column[0] < 0 for column in ids))
            names[:], found[:] = [texts[header:] for texts in names], [column[header:] for column in ids]
            for of, role, texts, column in zip((source, target), ("source", "target"), names, found, strict=True):
                if len(unknown := np.flatnonzero(column < 0)):
                    row = int(unknown[0])
                    raise DataError(
                        f"{path}, {role} {texts[row]!r} in row {row + 1} is not the id of a node of type {of} "
                        f"({len(unknown):,} such rows)"
                    )

    group.agree(read)
    none = np.empty(0, np.int64)
    scores: list[list[float]] = []
    for begin in range(0, group.from_first(len(names[0])), ROWS_AT_ONCE):
        src, dst = (ids[begin : begin + ROWS_AT_ONCE] for ids in found or (none, none))
        scores.append((links.source.fetch(src) * links.target.fetch(dst)).sum(1).tolist())
    if group.rank == 0:
        columns = [Column("source", "VARCHAR"), Column("target", "VARCHAR"), Column("score", "DOUBLE")]
        write_table(out / "pairs", columns, _blocks(names, scores), parquet)


def _blocks(names: Sequence[Sequence[str]], scores: Sequence[Sequence[float]]) -> Iterator[list[Sequence[Any]]]:
    for number, some in enumerate(scores):
        rows = slice(number * ROWS_AT_ONCE, (number + 1) * ROWS_AT_ONCE)
        yield [names[0][rows], names[1][rows], some]


def _columns(path: Path) -> list[list[str]]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.reader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as CSV: {error}") from None
    for number, row in enumerate(rows):
        if len(row) < 2:
            raise DataError(f"{path}, row {number}: {len(row)} columns; expected the ids of a source and of a target")
    return [[row[0] for row in rows], [row[1] for row in rows]]


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
