"""The topology of a graph on a CUDA device: edges, original ids, times and weights of all parts.

The arrays of all parts are joined, so that global ids index them. They are copied to the device if they fit there, else
to pinned memory of the host, which the device reads over the bus (UVA). The mapped files themselves cannot be used, as
the driver cannot pin them in general.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from trainer.core.arrays import Array
from trainer.core.memory import available_memory, size_text
from trainer.core.schema import EdgeType, NodeType
from trainer.cuda.launch import Mapped
from trainer.cuda.shared_memory import JoinedArray
from trainer.sampler.settings import bound_here
from trainer.sampler.types import SampleSettings
from trainer.store.part_store import PartStore

Place = Literal["device", "pinned"]  #: device memory, or pinned memory of the host

_DEVICE_SHARE = 0.5  #: largest share of a device's free memory for topology; the rest is for model and batches

_PINNED_SHARE = 0.5  #: largest share of the host's available memory for topology

_SINGLE_EXACT = {"b1", "i1", "u1", "i2", "u2", "f2", "f4"}  #: dtypes whose values float32 holds exactly


@dataclass(frozen=True)
class _DeviceArray:
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

    indptr: _DeviceArray  #: int64 [n + 1]
    indices: _DeviceArray  #: int32|int64 [e] global ids of sources
    times: _DeviceArray | None = None  #: int32|int64 [e], with temporal sampling
    weights: _DeviceArray | None = None  #: float32|float64 [e], with weighted sampling


@dataclass(frozen=True)
class DeviceTopology:
    """The part of a graph that sampling reads."""

    nodes: Mapping[NodeType, _DeviceArray]  #: int32|int64 [num_nodes] original ids
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
    def of(
        cls, store: PartStore, settings: Sequence[SampleSettings], device: torch.device, reserved: int = 0
    ) -> TopologyPlan:  # fmt: skip
        """Choose where to store the arrays, by the memory that is free now on the device and on the host.

        ``reserved``: bytes of free memory of the device that are kept for other data.
        """
        needed = sum(array.num_bytes for array in topology_arrays(store, settings))
        if device.type != "cuda":
            return cls(needed, "device", f"topology of {size_text(needed)} in the simulator's memory")
        on_device = int(max(0, torch.cuda.mem_get_info(device)[0] - reserved) * _DEVICE_SHARE)
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


def topology_arrays(store: PartStore, settings: Sequence[SampleSettings]) -> list[JoinedArray]:
    """Return the arrays that sampling with ``settings`` reads. The store must have the whole topology."""
    return [source.array for source in _sources(store, settings)]


def load_topology(
    store: PartStore, settings: Sequence[SampleSettings], device: torch.device, pinned: Mapping[str, Tensor] | None
) -> DeviceTopology:  # fmt: skip
    """Copy the topology that sampling with ``settings`` reads to ``device``.

    ``pinned``: the arrays in page-locked memory of the host, by name, which are then used instead.
    """
    loaded: dict[tuple[Any, str], _DeviceArray] = {}
    total = 0
    for of, name, array in _sources(store, settings):
        if pinned is not None:
            loaded[of, name] = _DeviceArray(pinned[array.name], "pinned")
        else:
            loaded[of, name] = _DeviceArray(torch.empty(array.shape, dtype=array.dtype, device=device), "device")
            array.copy_to(loaded[of, name].tensor)
        total += array.num_bytes
    edges = {
        of: DeviceEdges(
            loaded[of, "indptr"], loaded[of, "indices"], loaded.get((of, "times")), loaded.get((of, "weights"))
        )
        for of in store.manifest.edges
        if (of, "indptr") in loaded
    }
    nodes = {of: loaded[of, "orig_id"] for of in store.manifest.nodes}
    return DeviceTopology(nodes, edges, total, "device" if pinned is None else "pinned")


class _Source(NamedTuple):
    """One array of the topology."""

    of: Any  #: node type or edge type
    name: str
    array: JoinedArray


def _source(
    of: Any, name: str, pieces: Sequence[Array], dtype: torch.dtype, size: int, shift: Sequence[int] = ()
) -> _Source:  # fmt: skip
    return _Source(of, name, JoinedArray(f"topology {of} {name}", pieces, (size,), dtype, shift))


def _sources(store: PartStore, settings: Sequence[SampleSettings]) -> Iterator[_Source]:
    manifest, parts = store.manifest, list(store.topology.values())
    for of, nodes in manifest.nodes.items():
        ids = [part.nodes[of].orig_id for part in parts]
        yield _source(of, "orig_id", ids, _widest(ids), nodes.num_nodes)
    sampled = {of for one in settings for of, fanouts in one.fanouts.items() if any(fanouts)}
    for edge_type, spec in manifest.edges.items():
        if edge_type not in sampled:
            continue
        own = [part.edges[edge_type] for part in parts]
        yield _source(
            edge_type, "indptr", [each.indptr[:-1] for each in own], torch.int64,
            manifest.nodes[edge_type[2]].num_nodes + 1, [*(each.start for each in own), spec.num_edges],
        )  # fmt: skip
        indices = [each.indices for each in own]
        yield _source(edge_type, "indices", indices, _widest(indices), spec.num_edges)
        for one in settings:
            if one.time is not None and bound_here(one.time, spec):
                times = [(each.src_times if one.time.on == "node" else each.attrs)[one.time.attr] for each in own]
                yield _source(edge_type, "times", times, torch.int64, spec.num_edges)
                break
        for one in settings:
            if one.weight is not None and one.weight in spec.attrs:
                weights = [each.attrs[one.weight] for each in own]
                exact = all(piece.dtype.str[1:] in _SINGLE_EXACT for piece in weights)
                yield _source(edge_type, "weights", weights, torch.float32 if exact else torch.float64, spec.num_edges)
                break


def _widest(pieces: Sequence[Array]) -> torch.dtype:
    return torch.int64 if any(piece.dtype.itemsize > 4 for piece in pieces) else torch.int32
