"""An opened partition folder: everything memory-mapped, nothing copied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trainer.arrays import Array
from trainer.errors import PartitionError
from trainer.partition.book import PartitionBook
from trainer.partition.format import Manifest, read_manifest


@dataclass(frozen=True)
class Part:
    """The nodes one part owns, with their in-edges (CSC: row = target node)."""

    part_id: int
    start: int  #: first owned global id
    orig_id: Array  #: [n] original ids, ascending
    indptr: Array  #: int64 [n + 1]
    indices: Array  #: int32|int64 [e] global ids of sources
    edge_id: Array  #: int32|int64 [e] original edge ids
    attrs: Mapping[str, Array]  #: name -> [n, …]; includes what the dataset gave (x, y, …)

    @property
    def num_nodes(self) -> int:
        return len(self.orig_id)


@dataclass(frozen=True)
class PartStore:
    """Some parts of one partition folder, opened read-only."""

    folder: Path
    manifest: Manifest
    book: PartitionBook
    parts: Mapping[int, Part]

    def seeds(self, split: str) -> npt.NDArray[np.int64]:
        """Global ids of a split's nodes, int64 [n], in the dataset's order."""
        if split not in self.manifest.splits:
            raise PartitionError(f"{self.folder}: no split {split!r}; there are {sorted(self.manifest.splits)}")
        return _map(self.folder / "shared" / "seeds" / f"{split}.npy")


def open_parts(folder: str | Path, part_ids: Sequence[int] | None = None) -> PartStore:
    """Open ``part_ids`` (default: all) of a partition folder.

    Raises ``PartitionError`` when the folder, its manifest or a part is missing.
    """
    root = Path(folder)
    manifest = read_manifest(root)
    wanted = range(manifest.num_parts) if part_ids is None else part_ids
    parts = {part_id: _open_part(root, manifest, part_id) for part_id in wanted}
    return PartStore(root, manifest, PartitionBook.from_offsets(manifest.offsets), parts)


def _open_part(root: Path, manifest: Manifest, part_id: int) -> Part:
    if not 0 <= part_id < manifest.num_parts:
        raise PartitionError(f"{root}: no part {part_id}; the folder has {manifest.num_parts} parts")
    nodes, edges = root / f"part{part_id}" / "nodes", root / f"part{part_id}" / "edges"
    return Part(
        part_id=part_id,
        start=manifest.offsets[part_id],
        orig_id=_map(nodes / "orig_id.npy"),
        indptr=_map(edges / "indptr.npy"),
        indices=_map(edges / "indices.npy"),
        edge_id=_map(edges / "edge_id.npy"),
        attrs={name: _map(nodes / f"{name}.npy") for name in manifest.attrs},
    )


def _map(path: Path) -> Array:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise PartitionError(f"{path} is missing; send or make the part again (partition verify lists all)") from None
    except (ValueError, OSError) as error:
        raise PartitionError(f"{path} cannot be read: {error}") from error
    return array.view(np.ndarray)  # kernels are compiled for plain arrays
