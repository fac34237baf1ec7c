"""What a partition folder holds, in figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainer.partition.book import PartitionBook
from trainer.partition.format import Manifest
from trainer.partition.kernels import mark_outside, new_bitset
from trainer.store.part import Part, open_parts


@dataclass(frozen=True)
class PartFigures:
    """One part. Edges are counted where their target is owned."""

    part_id: int
    nodes: int
    edges: int
    cut_edges: int  #: edges whose source another part owns
    halo: int  #: nodes of other parts that are sources of these edges
    seeds: dict[str, int]  #: per split
    bytes: int


@dataclass(frozen=True)
class Description:
    """A partition folder in figures."""

    folder: str
    dataset: str
    algorithm: str
    seed: int
    num_nodes: int
    num_edges: int
    num_classes: int
    edge_cut: float
    balance: float
    shared_bytes: int
    attrs: dict[str, str]  #: name -> dtype and shape
    parts: tuple[PartFigures, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def describe(folder: str | Path) -> Description:
    """Figures of every part. Raises ``PartitionError`` when a file is missing."""
    store = open_parts(folder)
    manifest = store.manifest
    seeds = {
        split: np.bincount(store.book.part_of(store.seeds(split)), minlength=manifest.num_parts)
        for split in manifest.splits
    }
    return Description(
        folder=str(folder),
        dataset=manifest.dataset,
        algorithm=manifest.algorithm,
        seed=manifest.seed,
        num_nodes=manifest.num_nodes,
        num_edges=manifest.num_edges,
        num_classes=manifest.num_classes,
        edge_cut=manifest.edge_cut,
        balance=manifest.balance,
        shared_bytes=sum(entry.bytes for entry in manifest.files_of(None)),
        attrs={name: f"{spec.dtype} {list(spec.shape)}" for name, spec in manifest.attrs.items()},
        parts=tuple(
            _figures(part, store.book, manifest, {split: int(counts[part_id]) for split, counts in seeds.items()})
            for part_id, part in store.parts.items()
        ),
    )


def _figures(part: Part, book: PartitionBook, manifest: Manifest, seeds: dict[str, int]) -> PartFigures:
    low, high = book.range_of(part.part_id)
    cut, halo = mark_outside(part.indices, low, high, new_bitset(manifest.num_nodes))
    size = sum(entry.bytes for entry in manifest.files_of(part.part_id))
    return PartFigures(part.part_id, part.num_nodes, len(part.indices), int(cut), int(halo), seeds, size)


def render(description: Description) -> str:
    """The description as text: a few lines, then a table with one row per part."""
    d = description
    splits = list(d.parts[0].seeds)
    head = [
        f"{d.folder}: {d.dataset}, {len(d.parts)} parts by {d.algorithm} (seed {d.seed})",
        f"{d.num_nodes:,} nodes, {d.num_edges:,} edges, {d.num_classes} classes; "
        f"cut {d.edge_cut:.2%} of edges, balance {d.balance:.3f} (largest / mean nodes)",
        "attributes: " + (", ".join(f"{name} {spec}" for name, spec in d.attrs.items()) or "none"),
    ]
    titles = ["part", "nodes", "edges", "cut edges", "halo nodes", *splits, "MB"]
    rows = [
        [
            str(p.part_id),
            *(f"{n:,}" for n in (p.nodes, p.edges, p.cut_edges, p.halo, *p.seeds.values())),
            f"{p.bytes / 1e6:,.1f}",
        ]
        for p in d.parts
    ]
    return "\n".join([*head, "", *_table([titles, *rows])])


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
