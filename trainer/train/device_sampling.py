"""Chooses whether this rank's device samples and gathers its batches, or the CPU, and prepares the device for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from trainer.core.errors import SettingsError
from trainer.core.schema import AnyType
from trainer.cuda.availability import simulator_wanted, why_no_kernels
from trainer.graph.open import Graph
from trainer.loader.block_loader import BlockLoader
from trainer.sampler.subgraph_sampler import SubgraphSampler

if TYPE_CHECKING:
    from trainer.cuda.topology import TopologyPlan

Sampling = Literal["auto", "cpu", "cuda"]  #: setting ``sampling``


@dataclass(frozen=True)
class SamplingChoice:
    """Where a rank's batches are made, and why."""

    on_device: bool
    why: str  #: for people; '' if there was no choice to make

    def __str__(self) -> str:
        return f"sampling on the {'GPU' if self.on_device else 'CPU'}: {self.why}"


def choose_sampling(
    graph: Graph, loaders: Mapping[str, BlockLoader], wanted: Sampling, device: torch.device
) -> SamplingChoice:  # fmt: skip
    """Let ``device`` make the batches of all loaders, if ``wanted`` and possible. Batches are the same either way.

    Copies the topology to the device or to pinned memory, and rows of features to pinned memory as far as they fit.
    Raises ``SettingsError`` if ``wanted`` is ``cuda`` and it is not possible.
    """
    if wanted == "cpu" or (wanted == "auto" and device.type != "cuda"):
        return SamplingChoice(False, "")
    reason = why_not(graph, device)
    if not reason:
        from trainer.cuda.topology import TopologyPlan  # imports numba-cuda

        settings = [loader.host_sampler.settings for loader in loaders.values()]
        plan = TopologyPlan.of(graph.store, settings, device, graph.ranks.local_world_size)
        if plan.place is not None:
            return SamplingChoice(True, "; ".join(filter(None, [plan.why, _use_device(graph, loaders, device, plan)])))
        reason = plan.why
    if wanted == "cuda":
        raise SettingsError(f"sampling: cuda is not possible on this rank: {reason}; use sampling: auto or cpu")
    return SamplingChoice(False, reason)


def why_not(graph: Graph, device: torch.device) -> str:
    """Return why ``device`` cannot sample batches of this graph, or '' if it can, apart from its memory."""
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
    """Prepare the device and let it make the batches of all loaders. Returns what was pinned, for people."""
    from trainer.cuda.device_sampler import DeviceSampler
    from trainer.cuda.features import DeviceCache, FeatureRows, PinnedPlan, pin_rows
    from trainer.cuda.topology import load_topology

    assert plan.place is not None
    store, samplers = graph.store, [loader.host_sampler for loader in loaders.values()]
    topology = load_topology(store, [sampler.settings for sampler in samplers], device, plan.place)
    wanted = _features(samplers[0])
    pins = PinnedPlan.of(store, wanted, graph.ranks.local_world_size)
    kept = next(iter(loaders.values())).kept
    caches = {of: DeviceCache(torch.from_numpy(rows.slots).to(device), rows.rows.float()) for of, rows in kept.items()}
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
    for loader, sampler in zip(loaders.values(), samplers, strict=True):
        loader.sample_with(DeviceSampler(sampler, store, topology, features, device))
    return pins.why


def _features(sampler: SubgraphSampler) -> dict[AnyType, tuple[str, ...]]:
    """Return the attributes that a sampler gathers besides those that it takes from the topology."""
    return {of: tuple(name for name in names if name != "in_degree") for of, names in sampler.attrs.items()}
