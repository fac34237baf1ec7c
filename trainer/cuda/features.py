"""Gathers rows of attributes on a CUDA device, from its cache and from pinned memory of the host.

The CPU gathers the rows that are in neither: rows of other hosts, and attributes too large for pinned memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trainer.core.arrays import Array
from trainer.core.batch import DeviceRows
from trainer.core.memory import available_memory, size_text
from trainer.core.schema import AnyType, type_name
from trainer.cuda import gather_kernels
from trainer.cuda.launch import Mapped
from trainer.cuda.shared_memory import JoinedArray
from trainer.store.part_store import PartStore

_PINNED_SHARE = 0.5  #: largest share of the host's available memory for pinned rows

_KINDS = "biuf"  #: kinds of dtypes that kernels convert to float32


@dataclass(frozen=True)
class _PinnedRows:
    """One attribute of all parts on this host, joined to one array in pinned memory."""

    table: Tensor  #: [rows, width] in the stored dtype, pinned
    scales: Tensor | None  #: float32 [rows, 1], pinned, for rows stored as int8
    bases: Tensor  #: int64 [parts], on the device: the first row of each part, -1 for parts of other hosts


class FeatureRows:
    """Gathers rows of one attribute of one node or edge type, as float32."""

    def __init__(
        self, store: PartStore, of: AnyType, name: str, device: torch.device, *, pinned: _PinnedRows | None,
        cache: DeviceRows | None,
    ):  # fmt: skip
        spec = store.manifest.nodes[of] if isinstance(of, str) else store.manifest.edges[of]
        self.of, self.name, self.spec = of, name, spec.attrs[name]
        self._width, self._device = math.prod(self.spec.shape[1:]), device
        self._offsets = torch.tensor(spec.offsets, dtype=torch.int64, device=device)
        self._bases = pinned.bases if pinned else torch.full_like(self._offsets[:-1], -1)
        self._pinned = pinned
        self._slots = torch.from_numpy(cache.slots if cache else np.empty(0, np.int32)).to(device)
        self._empty = torch.empty((0, self._width), dtype=torch.float32, device=device)
        self._cached = cache.rows.float().reshape(-1, self._width) if cache else self._empty
        self._no_scales = torch.empty((0, 1), dtype=torch.float32, device=device)
        self._all_near = pinned is not None and bool((pinned.bases >= 0).all())

    def take(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Gather the rows of ``ids``, int64 [n] on the device, as far as the device can read them.

        Returns n rows, float32 [n, …], and the positions of those that the device cannot read, int64 [m]. ``join`` must
        fill these positions. Waits for the stream, unless the device can read every row of the graph.
        """
        sources = torch.empty(len(ids), dtype=torch.int64, device=self._device)
        out = torch.empty((len(ids), self._width), dtype=torch.float32, device=self._device)
        gather_kernels.locate_rows(len(ids), ids, self._slots, self._offsets, self._bases, sources)
        pinned, take = self._pinned, gather_kernels.take_rows
        host: Tensor | Mapped = self._empty
        scales: Tensor | Mapped = self._no_scales
        if pinned is not None:
            host = Mapped(pinned.table)
            if pinned.scales is not None:
                scales, take = Mapped(pinned.scales), gather_kernels.take_scaled_rows
            elif self.spec.dtype == "bfloat16":
                take = gather_kernels.take_bfloat16_rows
        take(out.numel(), sources, host, scales, self._cached, out)
        missing = ids[:0] if self._all_near else torch.nonzero(sources == gather_kernels.ELSEWHERE).flatten()
        return out.reshape(len(ids), *self.spec.shape[1:]), missing

    def join(self, out: Tensor, missing: Tensor, rows: Array) -> None:
        """Copy rows that the CPU gathered, in the stored dtype, to the positions ``missing`` of ``out``."""
        bfloat16 = self.spec.dtype == "bfloat16"
        values = torch.from_numpy(rows.view(np.int16)).view(torch.bfloat16) if bfloat16 else torch.from_numpy(rows)
        out.index_copy_(0, missing, values.float().to(self._device))  # waits: the rows may be freed then


@dataclass(frozen=True)
class PinnedPlan:
    """Which attributes are copied to pinned memory."""

    pinned: tuple[tuple[AnyType, str], ...]
    why: str  #: for people: the sizes that decided; '' without attributes

    @classmethod
    def of(
        cls, store: PartStore, wanted: Mapping[AnyType, tuple[str, ...]], taken: int = 0, num_copies: int = 1
    ) -> PinnedPlan:  # fmt: skip
        """Choose the attributes that fit in a share of the memory that the host has available now.

        ``wanted``: names of attributes by type. ``taken``: bytes that will be pinned for other arrays. ``num_copies``:
        number of processes of this host that make a copy.
        """
        left = max(0, (available_memory() or 0) - taken * num_copies)
        return cls.choose(store, wanted, int(left * _PINNED_SHARE / num_copies))

    @classmethod
    def choose(cls, store: PartStore, wanted: Mapping[AnyType, tuple[str, ...]], limit: int) -> PinnedPlan:
        """Choose the attributes that fit in ``limit`` bytes, the largest attributes first."""
        keys = [(of, name) for of, names in wanted.items() for name in names]
        sizes = {
            key: sum(array.num_bytes for array in feature_arrays(store, *key))
            for key in keys
            if store.manifest.attrs_of(key[0])[key[1]].stored.kind in _KINDS  # kernels convert these to float32
        }
        chosen, left = [], limit
        for key, size in sorted(sizes.items(), key=lambda each: -each[1]):
            if size <= left:
                chosen.append(key)
                left -= size
        others = [key for key in sizes if key not in chosen]
        text = []
        if chosen:
            text.append(f"rows of {size_text(limit - left)} in pinned host memory")
        if others:
            names = ", ".join(f"{name} of {type_name(of)}" for of, name in others)
            text.append(
                f"{names} gathered by the CPU: {size_text(sum(sizes[key] for key in others))} are more than the "
                f"{size_text(limit)} that may be pinned"
            )
        return cls(tuple(chosen), "; ".join(text))


def feature_arrays(store: PartStore, of: AnyType, name: str) -> list[JoinedArray]:
    """Return one attribute of all parts on this host as an array: its rows, and the scales of rows stored as int8."""
    spec, parts = store.manifest.attrs_of(of)[name], [part.table(of) for part in store.parts.values()]
    count = sum(len(part.attrs[name]) for part in parts)
    first = parts[0].attrs[name] if parts else np.empty(0, spec.in_files)
    dtype = torch.from_numpy(np.empty(0, first.dtype)).dtype
    pieces = [part.attrs[name].reshape(len(part.attrs[name]), math.prod(spec.shape[1:])) for part in parts]
    arrays = [JoinedArray(f"rows {of} {name}", pieces, (count, math.prod(spec.shape[1:])), dtype)]
    if spec.kept:
        scales = [part.scales[name] for part in parts]
        arrays.append(JoinedArray(f"scales {of} {name}", scales, (count, 1), torch.float32))
    return arrays


def pinned_rows(
    store: PartStore, of: AnyType, name: str, device: torch.device, pinned: Mapping[str, Tensor]
) -> _PinnedRows | None:  # fmt: skip
    """Return an attribute in pinned memory; None if it is not there. ``pinned``: the pinned arrays, by name."""
    table, scales = ([pinned.get(array.name) for array in feature_arrays(store, of, name)] + [None])[:2]
    if table is None:
        return None
    bases, count = [-1] * store.manifest.num_parts, 0
    for part_id, part in store.parts.items():
        bases[part_id] = count
        count += len(part.table(of).attrs[name])
    return _PinnedRows(table, scales, torch.tensor(bases, dtype=torch.int64, device=device))
