"""Files of full-graph inference: an array and a table of predictions for each part."""

from __future__ import annotations

import csv
import importlib.util
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.core.arrays import Array
from trainer.core.errors import SettingsError
from trainer.core.graph_attrs import KEY_COLUMNS, decode_texts, key_attr
from trainer.core.ranks import RankGroup
from trainer.core.schema import NodeType
from trainer.graph.open import Graph
from trainer.nn.layerwise_inference import LayerRows
from trainer.sampler.types import RowRequest
from trainer.sources.table_database import Database, text

ROWS_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class OutputArray:
    name: str  #: file name without ``.npy``
    width: int
    dtype: str  #: numpy's name
    of: Callable[[Tensor], Tensor] = lambda rows: rows  #: converts the model's output [n, f] to rows [n, width]


@dataclass(frozen=True)
class TableColumn:
    name: str
    type: str  #: BIGINT, DOUBLE or VARCHAR
    digits: int = 9  #: significant digits of DOUBLE in the CSV file; 9 tell all float32 apart


def write_array(out: Path, graph: Graph, of: NodeType, rows: LayerRows, array: OutputArray, group: RankGroup) -> None:
    """Write this rank's rows to ``out/part<p>/<array>.npy``. Collective.

    ``array``: name and dtype of the file, and how values are computed from ``rows``. Also writes ``orig_id.npy`` and
    ``id.npy`` with the ids of the part's nodes. Raises ``SettingsError`` if ranks with nodes of the same part do not
    see the same folder ``out``.
    """
    offsets = graph.manifest.nodes[of].offsets
    own = rows.shares.own(group.rank)
    for piece in own:
        if piece.first != offsets[piece.part_id]:
            continue
        folder = out / f"part{piece.part_id}"
        folder.mkdir(parents=True, exist_ok=True)
        ids = np.arange(offsets[piece.part_id], offsets[piece.part_id + 1])
        name, keys = id_attr(graph, of), [key_attr(column) for column in key_columns(graph, of)]
        (found,) = graph.access.gather([RowRequest(of, ids, ("orig_id", name, *keys))])
        np.save(folder / "orig_id.npy", np.asarray(found["orig_id"], np.int64))
        np.save(folder / "id.npy", np.asarray(found[name]))
        for key in keys:
            np.save(folder / f"{key}.npy", np.asarray(found[key]))
        path, dtype = folder / f"{array.name}.npy", np.dtype(array.dtype)
        np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=(len(ids), array.width)).flush()
    group.barrier()
    for piece in own:
        path = out / f"part{piece.part_id}" / f"{array.name}.npy"
        if not path.exists():
            raise SettingsError(
                f"{path} does not exist: ranks that share part {piece.part_id} must see the same --out; "
                "give a shared folder, or give each host its own parts (--part-ids, --cluster)"
            )
        values, begin = np.lib.format.open_memmap(path, mode="r+"), piece.first - offsets[piece.part_id]
        for first in range(0, piece.last - piece.first, ROWS_AT_ONCE):
            last = min(first + ROWS_AT_ONCE, piece.last - piece.first)
            block = torch.from_numpy(np.array(rows.values[piece.row + first : piece.row + last]))
            values[begin + first : begin + last] = array.of(block).numpy()
        values.flush()
    group.barrier()  # the rows of a part may come from several ranks


def id_attr(graph: Graph, of: NodeType) -> str:
    """Return the attribute with the ids that users see: ``id`` if the nodes are from a table, else ``orig_id``."""
    return "id" if "id" in graph.manifest.nodes[of].attrs else "orig_id"


def key_columns(graph: Graph, of: NodeType) -> list[str]:
    """Return the names of the key columns of a task table's rows; [] for other nodes."""
    found = graph.store.graph_attrs.get(f"{of}__{KEY_COLUMNS}")
    return [] if found is None else decode_texts(np.asarray(found))


def own_parts(out: Path, graph: Graph, of: NodeType, rows: LayerRows, group: RankGroup) -> Iterator[Path]:
    """Yield the folder of each part whose first node this rank computes. No other rank yields these folders."""
    offsets = graph.manifest.nodes[of].offsets
    for piece in rows.shares.own(group.rank):
        if piece.first == offsets[piece.part_id]:
            yield out / f"part{piece.part_id}"


def merge_parts(out: Path, own: Sequence[Path], parquet: bool, group: RankGroup) -> str:
    """Write ``out/predictions.csv`` of rank 0 with the rows of all parts, in their order. Collective.

    ``own``: the part folders whose tables this rank has written; those that rank 0 does not see are sent to it. Returns
    where the predictions are, in words.
    """
    kinds = ("predictions.csv", *(["predictions.parquet"] if parquet else []))

    def stamp(path: Path) -> tuple[int, int]:
        try:
            found = path.stat()
        except OSError:
            return 0, 0
        return found.st_size, found.st_mtime_ns

    shares = group.gather([(folder.name, kind, *stamp(folder / kind)) for folder in own for kind in kinds])
    tables = [(*table, rank) for rank, share in enumerate(shares) for table in share]
    seen = group.from_first([stamp(out / name / kind) == (size, t) for name, kind, size, t, _ in tables])
    with ExitStack() as stack:
        received = out
        if group.rank == 0:
            out.mkdir(parents=True, exist_ok=True)
            for kind in ("predictions.csv", "predictions.parquet"):
                (out / kind).unlink(missing_ok=True)
            received = Path(stack.enter_context(TemporaryDirectory(prefix=".predictions-", dir=out)))
        folders: dict[str, Path] = {}
        for (name, kind, size, _, rank), is_seen in zip(tables, seen, strict=True):
            folder = folders[name] = (out if is_seen else received) / name
            if not is_seen:
                folder.mkdir(exist_ok=True)
                group.copy_to_first(rank, out / name / kind, folder / kind, size)
        if group.rank == 0:
            in_order = sorted(folders, key=lambda name: int(name.removeprefix("part")))
            _merge(out, [folders[name] for name in in_order], parquet)
    group.barrier()
    return f"{out}/predictions.csv{' and .parquet' if parquet else ''}"


def _merge(out: Path, folders: Sequence[Path], parquet: bool) -> None:
    with (out / "predictions.csv").open("wb") as merged:
        for number, folder in enumerate(folders):
            with (folder / "predictions.csv").open("rb") as part:
                if (head := part.readline()) and number == 0:
                    merged.write(head)
                shutil.copyfileobj(part, merged, 1 << 20)
    if parquet:
        tables = ", ".join(text(str(folder / "predictions.parquet")) for folder in folders)
        _copy(f"read_parquet([{tables}])", out / "predictions.parquet")


def id_column(name: str, ids: Array) -> TableColumn:
    """Return the column for ``ids``: VARCHAR for encoded texts (uint8 [n, width]), BIGINT for integers [n]."""
    return TableColumn(name, "VARCHAR" if ids.ndim == 2 else "BIGINT")


def id_list(ids: Array) -> list[Any]:
    return decode_texts(ids) if ids.ndim == 2 else [int(value) for value in ids]


def write_table(
    stem: Path, columns: Sequence[TableColumn], blocks: Iterable[Sequence[Sequence[Any]]], parquet: bool
) -> None:  # fmt: skip
    """Write a table as ``<stem>.csv`` and, with ``parquet``, as ``<stem>.parquet``.

    blocks: the rows in pieces; each piece has one list of values for each column.
    """
    path = stem.with_suffix(".csv")
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([column.name for column in columns])
        for block in blocks:
            shown = [
                [f"{value:.{column.digits}g}" for value in values] if column.type == "DOUBLE" else values
                for column, values in zip(columns, block, strict=True)
            ]
            writer.writerows(zip(*shown, strict=True))
    target = stem.with_suffix(".parquet")
    target.unlink(missing_ok=True)
    if parquet:
        types = ", ".join(f"{text(column.name)}: {text(column.type)}" for column in columns)
        texts = ", ".join(text(column.name) for column in columns if column.type == "VARCHAR")
        filled = f", force_not_null = [{texts}]" if texts else ""  # else an empty id would be NULL
        source = (
            f"read_csv({text(str(path))}, header = true, auto_detect = false, delim = ',', quote = '\"', "
            f"escape = '\"', columns = {{{types}}}, parallel = false{filled})"
        )
        _copy(source, target)


def _copy(source: str, target: Path) -> None:
    """Write the rows of ``source``, a table in SQL, to the Parquet file ``target``."""
    scratch = target.with_name(f".{target.name}.duckdb")
    scratch.mkdir(exist_ok=True)
    database = Database(scratch, 1 << 30)
    try:
        database.run(f"COPY (SELECT * FROM {source}) TO {text(str(target))} (FORMAT parquet)", str(target))
    finally:
        database.close()
        shutil.rmtree(scratch, ignore_errors=True)


def writes_parquet(wanted: bool | None) -> bool:
    """Return whether to write Parquet files: ``wanted``, or if it is None, whether DuckDB is installed.

    Raises ``SettingsError`` if ``wanted`` is True and DuckDB is not installed.
    """
    installed = importlib.util.find_spec("duckdb") is not None
    if wanted and not installed:
        raise SettingsError("--parquet needs the package duckdb: pip install duckdb, or leave --parquet out")
    return installed if wanted is None else wanted
