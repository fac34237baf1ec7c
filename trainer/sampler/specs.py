"""What a manifest says of types and attributes, or why it does not."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from trainer.core.arrays import Array
from trainer.core.errors import PartitionError
from trainer.core.schema import AnyType
from trainer.store.part_store import PartStore


def check_type(store: PartStore, of: AnyType) -> None:
    """Raise ``PartitionError`` for a type the graph does not have."""
    manifest = store.manifest
    known: Collection[AnyType] = manifest.nodes if isinstance(of, str) else manifest.edges
    if of not in known:
        kind = "node" if isinstance(of, str) else "edge"
        raise PartitionError(f"no {kind} type {of!r} in {store.folder}; there are {list(known)}")


def row_spec(store: PartStore, of: AnyType, name: str) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """dtype and shape of one row of what can be gathered. Raises ``PartitionError`` for what cannot."""
    check_type(store, of)
    if name == "orig_id" or (name == "in_degree" and isinstance(of, str)):
        return np.dtype(np.int64), ()
    manifest = store.manifest
    attrs = manifest.nodes[of].attrs if isinstance(of, str) else manifest.edges[of].attrs
    if name not in attrs:
        raise PartitionError(f"no attribute {name!r} of {of!r}; there are {sorted(attrs)}")
    return attrs[name].stored, tuple(attrs[name].shape[1:])


def blank_rows(count: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    """``dtype`` [count, …] without memory, read-only: one row of zeros over and over."""
    return np.broadcast_to(np.zeros((), dtype), (count, *shape))
