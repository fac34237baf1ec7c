"""The topology of a graph on a CUDA device: edges, original ids, times and weights of all parts.

The arrays of all parts are joined, so that global ids index them. They are copied to the device if they fit there, else
to pinned memory of the host, which the device reads over the bus (UVA). The mapped files themselves cannot be used, as
the driver cannot pin them in general.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from trainer.core.arrays import Array
from trainer.core.memory import available_memory, size_text
from trainer.core.schema import EdgeType, NodeType
from trainer.cuda.launch import Mapped
from trainer.cuda.pinned_arrays import PinnedArrays
from trainer.sampler.settings import bound_here
from trainer.sampler.types import SampleSettings
from trainer.store.part_store import EdgePart, PartStore

Place = Literal["device", "pinned"]  #: device memory, or pinned memory of the host

_DEVICE_SHARE = 0.5  #: largest share of a device's free memory for topology; the rest is for model and batches

_PINNED_SHARE = 0.5  #: largest share of the host's available memory for topology

_CHUNK_BYTES = 64 << 20  #: bytes of a file that are copied at once

_SINGLE_EXACT = {"b1", "i1", "u1", "i2", "u2", "f2", "f4"}  #: dtypes whose values float32 holds exactly


@dataclass(frozen=True)
class DeviceArray:
    """The arrays of all parts, joined to one array that kernels can read."""

    tensor: Tensor  #: on the device, or pinned on the host
    place: Place

    @property
    def argument(self) -> Any:
        """The array in the form in which it is passed to kernels."""
        return Mapped(self.tensor) if self.place == "pinned" else self.tensor


@dataclass(frozen=True)
class DeviceEdges:
    """The edges of one type of the whole graph in CSC: grouped by target. An edge's slot is its global id."""

    indptr: DeviceArray  #: int64 [n + 1]
    indices: DeviceArray  #: int32|int64 [e] global ids of sources
    times: DeviceArray | None = None  #: int32|int64 [e], with temporal sampling
    weights: DeviceArray | None = None  #: float32|float64 [e], with weighted sampling


@dataclass(frozen=True)
class DeviceTopology:
    """The part of a graph that sampling reads."""

    nodes: Mapping[NodeType, DeviceArray]  #: int32|int64 [num_nodes] original ids
    edges: Mapping[EdgeType, DeviceEdges]
    num_bytes: int
    place: Place


@dataclass(frozen=True)
class TopologyPlan:
    """The size of the arrays that sampling reads, and where they are put."""

    num_bytes: int
    place: Place | None  #: None: they fit neither on the device nor in pinned memory
    why: str  #: for people: the sizes that decided

    @classmethod
    def of(cls, store: PartStore, settings: Sequence[SampleSettings], device: torch.device) -> TopologyPlan:
        """Choose where to store the arrays, by the memory that is free now on the device and on the host."""
        needed = sum(one.num_bytes for one in _sources(store, settings))
        if device.type != "cuda":
            return cls(needed, "device", f"topology of {size_text(needed)} in the simulator's memory")
        on_device = int(torch.cuda.mem_get_info(device)[0] * _DEVICE_SHARE)
        return cls.choose(needed, on_device, int((available_memory() or 0) * _PINNED_SHARE))

    @classmethod
    def choose(cls, needed: int, on_device: int, on_host: int) -> TopologyPlan:
        """Choose whether the arrays of the topology are stored on the device, or in pinned memory of the host.

        The place is None if the arrays fit in neither. ``needed``: bytes of the arrays. ``on_device``, ``on_host``:
        bytes that may be used there.
        """
        size = f"topology of {size_text(needed)}"
        if needed <= on_device:
            return cls(needed, "device", f"{size} in device memory (up to {size_text(on_device)} may be used)")
        if needed <= on_host:
            return cls(
                needed, "pinned",
                f"{size} in pinned host memory, read over the bus: more than the {size_text(on_device)} that may be "
                "used on the device",
            )  # fmt: skip
        return cls(
            needed, None,
            f"{size} fits neither in the {size_text(on_device)} that may be used on the device nor in the "
            f"{size_text(on_host)} of pinned host memory that may be used",
        )  # fmt: skip


def load_topology(
    store: PartStore, settings: Sequence[SampleSettings], device: torch.device, place: Place, pinned: PinnedArrays
) -> DeviceTopology:  # fmt: skip
    """Copy the topology that sampling with ``settings`` reads. The store must have the whole topology.

    ``pinned``: makes or maps the arrays, if ``place`` is pinned.
    """
    loaded: dict[tuple[Any, str], DeviceArray] = {}
    total = 0
    for source in _sources(store, settings):
        loaded[source.of, source.name] = DeviceArray(source.load(device, place, pinned), place)
        total += source.num_bytes
    edges = {
        of: DeviceEdges(
            loaded[of, "indptr"], loaded[of, "indices"], loaded.get((of, "times")), loaded.get((of, "weights"))
        )
        for of in store.manifest.edges
        if (of, "indptr") in loaded
    }
    return DeviceTopology({of: loaded[of, "orig_id"] for of in store.manifest.nodes}, edges, total, place)


@dataclass(frozen=True)
class _Source:
    """One array of the topology, in pieces that are to be joined."""

    of: Any  #: node type or edge type
    name: str
    pieces: Sequence[Array]  #: of each part
    dtype: torch.dtype
    size: int  #: number of elements
    shift: Sequence[int] = field(default=())  #: for each piece, a number to add to its elements; default: 0

    @property
    def num_bytes(self) -> int:
        return self.size * self.dtype.itemsize

    def load(self, device: torch.device, place: Place, pinned: PinnedArrays) -> Tensor:
        if place == "pinned":
            return pinned.array(f"topology {self.of} {self.name}", (self.size,), self.dtype, self._copy)
        out = torch.empty(self.size, dtype=self.dtype, device=device)
        self._copy(out)
        return out

    def _copy(self, out: Tensor) -> None:
        join_pieces(self.pieces, out, self.shift)


def join_pieces(pieces: Sequence[Array], out: Tensor, shift: Sequence[int] = ()) -> None:
    """Copy the arrays of all parts, one after the other, into one tensor, a chunk at a time.

    ``shift``: for each piece, a number to add to its elements; a last one is the value of what is left of ``out``, else
    0: the last offset of a CSC.
    """
    at = 0
    for number, piece in enumerate(pieces):
        step = max(1, _CHUNK_BYTES // max(1, piece[:1].nbytes))
        for begin in range(0, len(piece), step):
            chunk = torch.from_numpy(np.array(piece[begin : begin + step])).to(out.dtype)
            out[at : at + len(chunk)] = chunk + shift[number] if shift and shift[number] else chunk
            at += len(chunk)
    if at < len(out):
        out[at:] = shift[-1] if shift else 0


def _sources(store: PartStore, settings: Sequence[SampleSettings]) -> Iterator[_Source]:
    manifest, parts = store.manifest, list(store.topology.values())
    for of, nodes in manifest.nodes.items():
        ids = [part.nodes[of].orig_id for part in parts]
        yield _Source(of, "orig_id", ids, _widest(ids), nodes.num_nodes)
    sampled = {of for one in settings for of, fanouts in one.fanouts.items() if any(fanouts)}
    for edge_type in manifest.edges:
        if edge_type in sampled:
            yield from _edge_sources(store, edge_type, [part.edges[edge_type] for part in parts], settings)


def _edge_sources(
    store: PartStore, of: EdgeType, parts: Sequence[EdgePart], settings: Sequence[SampleSettings]
) -> Iterator[_Source]:  # fmt: skip
    spec = store.manifest.edges[of]
    firsts = [part.start for part in parts]
    yield _Source(
        of, "indptr", [part.indptr[:-1] for part in parts], torch.int64, store.manifest.nodes[of[2]].num_nodes + 1,
        [*firsts, spec.num_edges],
    )  # fmt: skip
    indices = [part.indices for part in parts]
    yield _Source(of, "indices", indices, _widest(indices), spec.num_edges)
    for one in settings:
        if one.time is not None and bound_here(one.time, spec):
            times = [(part.src_times if one.time.on == "node" else part.attrs)[one.time.attr] for part in parts]
            yield _Source(of, "times", times, torch.int64, spec.num_edges)
            break
    for one in settings:
        if one.weight is not None and one.weight in spec.attrs:
            weights = [part.attrs[one.weight] for part in parts]
            exact = all(piece.dtype.str[1:] in _SINGLE_EXACT for piece in weights)
            yield _Source(of, "weights", weights, torch.float32 if exact else torch.float64, spec.num_edges)
            break


def _widest(pieces: Sequence[Array]) -> torch.dtype:
    return torch.int64 if any(piece.dtype.itemsize > 4 for piece in pieces) else torch.int32
