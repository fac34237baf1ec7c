"""The ``PartStore`` of a client process, which has the manifest but no parts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import numpy as np

from trainer.core.arrays import Array, Ids
from trainer.core.schema import NodeType
from trainer.store.manifest import Manifest
from trainer.store.part_store import PartStore

K = TypeVar("K")

_TABLE_FROM = 0.25  #: share of a type's nodes; after requests for so many ids, the ids of all nodes are fetched


class _SharedArrays(Protocol):
    """Asks graph servers for arrays that do not belong to a single part. All methods raise ``ServiceError``."""

    def seeds(self, of: NodeType, split: str) -> Ids:
        """Return the global ids of a split, int64 [n]."""
        ...

    def graph_attr(self, name: str) -> Array: ...

    def to_global(self, of: NodeType, orig_ids: Ids) -> Ids:
        """Return the global ids of original ids, int64, same shape."""
        ...


@dataclass(frozen=True)
class RemoteStore(PartStore):
    """A ``PartStore`` without parts. Fetches seeds, global ids and graph attributes on first use, and keeps them."""

    source: _SharedArrays = field(kw_only=True)
    _num_requested: dict[NodeType, int] = field(kw_only=True, default_factory=dict, repr=False)  #: ids mapped so far

    @classmethod
    def of(cls, manifest: Manifest, source: _SharedArrays, name: str) -> RemoteStore:
        """Make the store for the graph of a manifest. Error messages show ``name`` in place of a folder."""

        def table(of: NodeType) -> Array:
            return source.to_global(of, np.arange(manifest.nodes[of].num_nodes))

        splits = [(of, split) for of, spec in manifest.nodes.items() for split in spec.splits]
        return cls(
            folder=Path(name),
            manifest=manifest,
            parts={},
            global_ids=_FetchedArrays(manifest.nodes if manifest.num_parts > 1 else (), table),
            splits=_FetchedArrays(splits, lambda key: source.seeds(*key)),
            graph_attrs=_FetchedArrays(manifest.graph_attrs, source.graph_attr),
            source=source,
        )

    def to_global(self, node_type: NodeType, orig_ids: Ids) -> Ids:
        if node_type not in self.global_ids:
            return orig_ids
        requested = self._num_requested[node_type] = self._num_requested.get(node_type, 0) + len(orig_ids)
        # After requests for as many ids as a quarter of the nodes, all global ids are fetched and kept.
        if requested >= _TABLE_FROM * self.manifest.nodes[node_type].num_nodes:
            return super().to_global(node_type, orig_ids)
        return self.source.to_global(node_type, orig_ids)


class _FetchedArrays(Mapping[K, Array], Generic[K]):
    def __init__(self, keys: Iterable[K], fetch: Callable[[K], Array]):
        self._fetch = fetch
        self._arrays: dict[K, Array | None] = dict.fromkeys(keys)
        self._lock = threading.Lock()

    def __getitem__(self, key: K) -> Array:
        with self._lock:
            found = self._arrays[key]
            if found is None:
                found = self._arrays[key] = self._fetch(key)
            return found

    def __contains__(self, key: object) -> bool:
        return key in self._arrays

    def __iter__(self) -> Iterator[K]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)
