"""Chooses whether a rank's batches are sampled and gathered on its GPU or on the CPU, and prepares the GPU."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from trainer.core.errors import SettingsError, TrainingError
from trainer.core.ranks import RankGroup
from trainer.core.schema import AnyType
from trainer.core.shared_memory import Place
from trainer.cuda.availability import simulator_wanted, why_no_kernels
from trainer.graph.device import DeviceRows, tensors_of
from trainer.graph.open import Graph
from trainer.loader.block_loader import BlockLoader
from trainer.sampler.subgraph_sampler import SubgraphSampler

if TYPE_CHECKING:
    from trainer.cuda.features import DeviceCache
    from trainer.cuda.pinned_arrays import PinnedArrays

Sampling = Literal["auto", "cpu", "cuda"]  #: setting ``sampling``


@dataclass(frozen=True)
class SamplingChoice:
    """Whether a rank's batches are made on its GPU or on the CPU, and the reason."""

    on_device: bool
    why: str  #: for people; '' if there was no choice to make

    def __str__(self) -> str:
        return f"sampling on the {'GPU' if self.on_device else 'CPU'}: {self.why}"


@dataclass(frozen=True)
class _DevicePlan:
    place: Literal["device", "pinned"] | None  #: where this rank's device reads the topology; None: the CPU samples
    why: str  #: for people


_Copies = tuple[dict[str, Place], str]  #: of ``PinnedArrays`` of one rank, and for people: which rows are among them


def choose_sampling(
    graph: Graph, loaders: Mapping[str, BlockLoader], wanted: Sampling, group: RankGroup
) -> SamplingChoice:  # fmt: skip
    """Choose whether this rank's device or the CPU makes the batches of all loaders. Collective.

    The batches do not depend on the choice. For the device, copies the topology to the device or to pinned memory, and
    as many rows of features as fit to pinned memory; the ranks of a host share one copy. Then device and CPU both make
    the first batch, and the two batches are compared.

    With ``wanted`` = ``cuda``, raises ``SettingsError`` if the device cannot make batches, and ``TrainingError`` if its
    first batch differs from the CPU's. With ``wanted`` = ``auto``, chooses the CPU instead of raising these errors.
    """
    plan = group.agree(lambda: _plan(graph, loaders, wanted, group.device))
    node = f"{group.ranks.node_rank} {group.ranks.host} {list(graph.store.parts)}"
    places = group.gather((node, plan.place))
    here = [rank for rank, (other, place) in enumerate(places) if other == node and place]
    # The first rank makes the copies of all, so it must need every array that another rank needs.
    first = min(here, key=lambda rank: places[rank][1] != "pinned", default=-1)
    choice, copies = SamplingChoice(False, plan.why), None
    with ExitStack() as opened:

        def prepare(made: _Copies | None) -> tuple[SamplingChoice, _Copies | None]:
            return _prepare(graph, loaders, wanted, group.device, plan, made, opened)

        if group.rank == first:
            choice, copies = group.agree(lambda: prepare(None))
        else:
            group.agree(lambda: None)
        of_first = group.gather(copies)[first]
        if not plan.place or group.rank == first:
            group.agree(lambda: None)  # the copies stay open until the other ranks have mapped them
        elif of_first:
            choice, _ = group.agree(lambda: prepare(of_first))
        else:
            choice = group.agree(lambda: SamplingChoice(False, f"rank {first} of this host cannot prepare its GPU"))
    return choice


def _plan(
    graph: Graph, loaders: Mapping[str, BlockLoader], wanted: Sampling, device: torch.device
) -> _DevicePlan:  # fmt: skip
    """Choose where ``device`` reads the topology. Raises ``SettingsError`` if it must make batches, and cannot."""
    if wanted == "cpu" or (wanted == "auto" and device.type != "cuda"):
        return _DevicePlan(None, "")
    plan = _DevicePlan(None, why_not(graph, device))
    if not plan.why:
        from trainer.cuda.topology import TopologyPlan  # imports numba-cuda

        found = TopologyPlan.of(graph.store, [one.host_sampler.settings for one in loaders.values()], device)
        plan = _DevicePlan(found.place, found.why)
    if plan.place is None and wanted == "cuda":
        raise SettingsError(f"sampling: cuda is not possible on this rank: {plan.why}; use sampling: auto or cpu")
    return plan


def _prepare(
    graph: Graph, loaders: Mapping[str, BlockLoader], wanted: Sampling, device: torch.device, plan: _DevicePlan,
    copies: _Copies | None, opened: ExitStack,
) -> tuple[SamplingChoice, _Copies | None]:  # fmt: skip
    """Let ``device`` make the batches of all loaders, and compare its first batch with the CPU's.

    ``copies``: of another rank; None: this rank makes them. ``opened`` closes those that are made here. Returns the
    choice, and the copies, None if the device cannot be prepared.
    """
    from trainer.cuda.pinned_arrays import PinnedArrays  # imports numba-cuda

    try:
        pinned = opened.enter_context(PinnedArrays(device, copies[0] if copies else None))
        first = next(iter(loaders.values()))
        share = next(first.shares(1))
        expected = first.load(share).to(device)
        which = _use_device(graph, loaders, device, plan, pinned, copies[1] if copies else None)
        found = first.load(share).to(device)
        pairs = zip(tensors_of(found), tensors_of(expected), strict=True)
        if not all(torch.equal(one, other) for one, other in pairs):
            raise TrainingError("the first batch that the GPU sampled differs from the CPU's; use sampling: cpu")
    except Exception as error:  # of CUDA, torch or numba-cuda, of many types
        for loader in loaders.values():
            loader.sample_with(None)
        if wanted == "cuda":
            raise
        return SamplingChoice(False, f"the GPU cannot be prepared: {' '.join(str(error).split())[:300]}"), None
    return SamplingChoice(True, "; ".join(filter(None, [plan.why, which]))), (pinned.places, which)


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


def _use_device(
    graph: Graph, loaders: Mapping[str, BlockLoader], device: torch.device, plan: _DevicePlan, pinned: PinnedArrays,
    which: str | None,
) -> str:  # fmt: skip
    """Prepare the device, and let it make the batches of all loaders.

    ``which``: says which rows another rank has copied to ``pinned``; None: this rank chooses them. Returns it.
    """
    from trainer.cuda.device_sampler import DeviceSampler
    from trainer.cuda.features import FeatureRows, PinnedPlan, pin_rows
    from trainer.cuda.streams import StreamPool
    from trainer.cuda.topology import load_topology

    assert plan.place is not None
    store, samplers = graph.store, [loader.host_sampler for loader in loaders.values()]
    topology = load_topology(store, [sampler.settings for sampler in samplers], device, plan.place, pinned)
    wanted = _features(samplers[0])
    pins = PinnedPlan.of(store, wanted) if which is None else PinnedPlan.made(pinned, wanted, which)
    kept = next(iter(loaders.values())).kept
    caches = {of: _cache(rows, device) for of, rows in kept.items()}
    features = {
        (of, name): FeatureRows(
            store, of, name, device,
            pinned=pin_rows(store, of, name, device, pinned) if (of, name) in pins.pinned else None,
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

    if rows.shared is None:
        return DeviceCache(torch.from_numpy(rows.slots).to(device), (rows.rows.float(),))
    return DeviceCache(torch.from_numpy(rows.shared.slots).to(device), rows.shared.tables)


def _features(sampler: SubgraphSampler) -> dict[AnyType, tuple[str, ...]]:
    """Return the attributes to gather, by type. In-degrees are left out: the device computes them from the topology."""
    return {of: tuple(name for name in names if name != "in_degree") for of, names in sampler.attrs.items()}
