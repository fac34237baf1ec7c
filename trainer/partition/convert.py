"""Converts partition folders: from other programs, and to another number of parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainer.core.errors import PartitionError
from trainer.core.remote_settings import WireRows
from trainer.partition.make import PartitionSpec, make_partition
from trainer.partition.methods.assign import KEEP, METHODS, fanouts_of, made_by
from trainer.partition.methods.frequency import Fanouts
from trainer.partition.source import DATASET, open_source
from trainer.store.manifest import Manifest


def convert_partition(
    source: str | Path, folder: str | Path, options: Mapping[str, Any] | None = None, *, rows: WireRows = "stored",
    force: bool = False, say: Callable[[str], None] = print,
) -> Manifest:  # fmt: skip
    """Convert the partition folder of another program to ``folder``. Every node stays in its part.

    ``options``: as for ``open_source``; ``rows`` and ``force``: as in ``PartitionSpec``. Raises ``DataError`` or
    ``PartitionError``. After an error, no new files are left.
    """
    found = open_source(source, options)
    if found.format is None:
        raise PartitionError(
            f"{found.folder} is a partition of gnnfleet already; `partition repartition` changes its parts"
        )
    say(f"{found.folder}: {found.title}, {found.num_parts or 'not assigned to'} parts")
    spec = PartitionSpec(
        DATASET, str(folder), str(found.folder), options or {}, found.num_parts, KEEP, rows=rows, force=force
    )
    return make_partition(spec, say)


def repartition_spec(
    source: str | Path, folder: str | Path, num_parts: int, method: str | None = None, seed: int | None = None,
    balance: str | None = None, fanouts: Fanouts | None = None,
) -> PartitionSpec:  # fmt: skip
    """Return how to divide the graph of the partition folder ``source`` into ``num_parts`` parts.

    Arguments that are None get the values that ``source`` was made with, or else their defaults. Raises ``DataError``
    or ``PartitionError``.
    """
    made = open_source(source).manifest
    kept = made if made is not None and made.algorithm in METHODS else None
    method = method or (made_by(kept) if kept else "auto")
    same = kept.options if kept is not None and made_by(kept) == method else {}
    options = made.options if made is not None else {}
    return PartitionSpec(
        dataset=DATASET,
        folder=str(folder),
        source=str(source),
        num_parts=num_parts,
        method=method,
        seed=seed if seed is not None else made.seed if made is not None else 0,
        balance=balance or same.get("balance"),
        fanouts=fanouts or (fanouts_of(same["fanouts"]) if "fanouts" in same else None),
        clusters=options.get("clusters", 0),
        rows=options.get("rows", "stored"),
    )
