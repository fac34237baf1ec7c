"""Chooses whether a rank's batches are sampled and gathered on its GPU or on the CPU, and prepares the GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from trainer.core.errors import SettingsError, TrainingError
from trainer.core.schema import AnyType
from trainer.cuda.availability import simulator_wanted, why_no_kernels
from trainer.graph.device import DeviceRows, tensors_of
from trainer.graph.open import Graph
from trainer.loader.block_loader import BlockLoader
from trainer.sampler.subgraph_sampler import SubgraphSampler

if TYPE_CHECKING:
    from trainer.cuda.features import DeviceCache
    from trainer.cuda.topology import TopologyPlan

Sampling = Literal["auto", "cpu", "cuda"]  #: setting ``sampling``


@dataclass(frozen=True)
class SamplingChoice:
    """Whether a rank's batches are made on its GPU or on the CPU, and the reason."""

    on_device: bool
    why: str  #: for people; '' if there was no choice to make

    def __str__(self) -> str:
        return f"sampling on the {'GPU' if self.on_device else 'CPU'}: {self.why}"


def choose_sampling(
    graph: Graph, loaders: Mapping[str, BlockLoader], wanted: Sampling, device: torch.device
) -> SamplingChoice:  # fmt: skip
    """Choose whether ``device`` or the CPU makes the batches of all loaders. The batches do not depend on the choice.

    For ``device``, copies the topology to the device or to pinned memory, and copies as many rows of features as fit to
    pinned memory. Then device and CPU both make the first batch, and the two batches are compared.

    With ``wanted`` = ``cuda``, raises ``SettingsError`` if ``device`` cannot make batches, and ``TrainingError`` if its
    first batch differs from the CPU's. With ``wanted`` = ``auto``, chooses the CPU instead of raising these errors.
    """
    if wanted == "cpu" or (wanted == "auto" and device.type != "cuda"):
        return SamplingChoice(False, "")
    reason = why_not(graph, device)
    if not reason:
        try:
            choice = _try_device(graph, loaders, device)
        except Exception as error:  # of CUDA, torch or numba-cuda, of many types
            for loader in loaders.values():
                loader.sample_with(None)
            if wanted == "cuda":
                raise
            return SamplingChoice(False, f"the GPU cannot be prepared: {' '.join(str(error).split())[:300]}")
        if choice.on_device:
            return choice
        reason = choice.why
    if wanted == "cuda":
        raise SettingsError(f"sampling: cuda is not possible on this rank: {reason}; use sampling: auto or cpu")
    return SamplingChoice(False, reason)


def _try_device(graph: Graph, loaders: Mapping[str, BlockLoader], device: torch.device) -> SamplingChoice:
    from trainer.cuda.topology import TopologyPlan  # imports numba-cuda

    settings = [loader.host_sampler.settings for loader in loaders.values()]
    plan = TopologyPlan.of(graph.store, settings, device, graph.ranks.local_world_size)
    if plan.place is None:
        return SamplingChoice(False, plan.why)
    first = next(iter(loaders.values()))
    share = next(first.shares(1))
    expected = first.load(share).to(device)
    pinned = _use_device(graph, loaders, device, plan)
    found = first.load(share).to(device)
    pairs = zip(tensors_of(found), tensors_of(expected), strict=True)
    if not all(torch.equal(one, other) for one, other in pairs):
        raise TrainingError("the first batch that the GPU sampled differs from the CPU's; use sampling: cpu")
    return SamplingChoice(True, "; ".join(filter(None, [plan.why, pinned])))


def why_not(graph: Graph, device: torch.device) -> str:
    """Return why ``device`` cannot sample batches of this graph, or '' if it can. Does not check its memory."""
    if device.type != "cuda" and not simulator_wanted():
        return f"this rank trains on the {device.type.upper()}"
    if graph.gateway:
        return "graph servers make the batches of a client"
    if not graph.store.whole_topology:
        missing = graph.manifest.num_parts - len(graph.store.topology)
        parts = graph.manifest.num_parts
        return f"the edges of {missing} of {parts} parts are not on this host (data.topology: replicated)"
    return why_no_kernels(device)


def _use_device(graph: Graph, loaders: Mapping[str, BlockLoader], device: torch.device, plan: TopologyPlan) -> str:
    """Prepare the device and let it make the batches of all loaders. Returns a text about the pinned rows."""
    from trainer.cuda.device_sampler import DeviceSampler
    from trainer.cuda.features import FeatureRows, PinnedPlan, pin_rows
    from trainer.cuda.streams import StreamPool
    from trainer.cuda.topology import load_topology

    assert plan.place is not None
    store, samplers = graph.store, [loader.host_sampler for loader in loaders.values()]
    topology = load_topology(store, [sampler.settings for sampler in samplers], device, plan.place)
    wanted = _features(samplers[0])
    pins = PinnedPlan.of(store, wanted, graph.ranks.local_world_size)
    kept = next(iter(loaders.values())).kept
    caches = {of: _cache(rows, device) for of, rows in kept.items()}
    features = {
        (of, name): FeatureRows(
            store, of, name, device,
            pinned=pin_rows(store, of, name, device) if (of, name) in pins.pinned else None,
            cache=caches.get(of) if isinstance(of, str) and name == "x" else None,
        )
        for of, names in wanted.items()
        for name in names
    }  # fmt: skip
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # sampler threads use other streams
    streams = StreamPool(device)
    for loader, sampler in zip(loaders.values(), samplers, strict=True):
        loader.sample_with(DeviceSampler(sampler, store, topology, features, device, streams), streams.stream)
    return pins.why


def _cache(rows: DeviceRows, device: torch.device) -> DeviceCache:
    from trainer.cuda.features import DeviceCache

    slots, tables = (
        (rows.slots, (rows.rows.float(),)) if rows.shared is None else (rows.shared.slots, rows.shared.tables)
    )
    return DeviceCache(torch.from_numpy(slots).to(device), tables)


def _features(sampler: SubgraphSampler) -> dict[AnyType, tuple[str, ...]]:
    """Return the attributes to gather, by type. In-degrees are left out: the device computes them from the topology."""
    return {of: tuple(name for name in names if name != "in_degree") for of, names in sampler.attrs.items()}
