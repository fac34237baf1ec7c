"""The row cache: remote rows in files that all processes of a host memory-map."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trainer.core.arrays import Array, Ids
from trainer.core.errors import PartitionError
from trainer.core.schema import NodeType
from trainer.store.npy import map_npy

_INDEX = "cache.json"


@dataclass(frozen=True)
class CachedRows:
    slots: npt.NDArray[np.int32]  #: int32 [num_nodes], index into ``rows`` for each global id, -1 if not cached
    rows: Mapping[str, Array]  #: name of an attribute, ``orig_id`` or ``in_degree`` -> [k, …], in the stored dtype

    @classmethod
    def of(cls, ids: Ids, rows: Mapping[str, Array], num_nodes: int) -> CachedRows:
        """Make the cache of a node type with ``num_nodes`` nodes. ``rows[name][i]`` is the row of gid ``ids[i]``."""
        slots = np.full(num_nodes, -1, np.int32)
        slots[ids] = np.arange(len(ids), dtype=np.int32)
        return cls(slots, {name: np.ascontiguousarray(values) for name, values in rows.items()})

    @property
    def num_rows(self) -> int:
        return max(map(len, self.rows.values()), default=0)

    @property
    def num_bytes(self) -> int:
        """Size of the cached rows in bytes, without the index ``slots``."""
        return sum(values.nbytes for values in self.rows.values())


@dataclass(frozen=True)
class RowCache:
    types: Mapping[NodeType, CachedRows]  #: only types with cached rows

    @property
    def num_rows(self) -> int:
        return sum(cached.num_rows for cached in self.types.values())

    @property
    def num_bytes(self) -> int:
        return sum(cached.num_bytes for cached in self.types.values())

    def save(self, folder: str | Path) -> None:
        """Write the cache to ``folder``. Processes that opened an earlier cache of this folder can continue to use it.

        Raises ``PartitionError`` when the cache cannot be written.
        """
        target = Path(folder)
        new, old = (target.with_name(f".{target.name}.{what}.{os.getpid()}") for what in ("new", "old"))
        try:
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir(parents=True)
            for place, cached in enumerate(self.types.values()):
                np.save(new / f"{place}.slots.npy", cached.slots)
                for number, values in enumerate(cached.rows.values()):
                    np.save(new / f"{place}.{number}.npy", values)
            index = {of: list(cached.rows) for of, cached in self.types.items()}
            (new / _INDEX).write_text(json.dumps(index), encoding="utf-8")
            if target.exists():
                target.rename(old)
            new.rename(target)
        except OSError as error:
            raise PartitionError(
                f"cache {target} cannot be written: {error.strerror}; free disk space, or lower data.cache"
            ) from error
        finally:
            shutil.rmtree(new, ignore_errors=True)
            shutil.rmtree(old, ignore_errors=True)

    @classmethod
    def open(cls, folder: str | Path) -> RowCache:
        """Memory-map a saved cache. Raises ``PartitionError`` when the cache cannot be read."""
        root = Path(folder)
        try:
            index: dict[NodeType, list[str]] = json.loads((root / _INDEX).read_text(encoding="utf-8"))
            return cls(
                {
                    of: CachedRows(
                        _map(root / f"{place}.slots.npy"),
                        {name: _map(root / f"{place}.{number}.npy") for number, name in enumerate(names)},
                    )
                    for place, (of, names) in enumerate(index.items())
                }
            )
        except (OSError, ValueError) as error:
            raise PartitionError(f"cache {root} cannot be read: {error}; delete it to create it again") from error


def _map(path: Path) -> Array:
    return map_npy(path).view(np.ndarray)  # kernels are compiled for plain arrays
