"""Chooses whether a rank's batches are sampled and gathered on its GPU or on the CPU, and prepares the GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeVar

import torch
from torch import Tensor

from trainer.core.errors import SettingsError, TrainingError
from trainer.core.memory import available_memory, size_text
from trainer.core.ranks import RankGroup
from trainer.core.schema import AnyType
from trainer.graph.device import tensors_of
from trainer.graph.open import Graph
from trainer.loader.block_loader import BlockLoader
from trainer.sampler.types import SampleSettings
from trainer.store.manifest import LOOPLESS_DEGREE

if TYPE_CHECKING:
    from trainer.cuda.shared_memory import Handle, HostArrays

T = TypeVar("T")

Sampling = Literal["auto", "cpu", "cuda"]  #: setting ``sampling``


@dataclass(frozen=True)
class SamplingPlan:
    """Whether a rank's batches are made on its GPU or on the CPU, and the reason."""

    wanted: Sampling
    place: Literal["device", "pinned"] | None  #: where the device reads the topology; None: the CPU makes the batches
    why: str  #: for people; '' if there was no choice to make

    @property
    def on_device(self) -> bool:
        return self.place is not None

    def __str__(self) -> str:
        return f"sampling on the {'GPU' if self.on_device else 'CPU'}: {self.why}"


def plan_sampling(
    graph: Graph, loaders: Mapping[str, BlockLoader], wanted: Sampling, device: torch.device, reserved: int = 0
) -> SamplingPlan:  # fmt: skip
    """Choose whether ``device`` makes the batches of all loaders, by what is known before anything is copied.

    ``reserved``: bytes of the device's memory that are kept for cached rows. Raises ``SettingsError`` if the device
    must make batches (``wanted`` = ``cuda``), and cannot.
    """
    if wanted == "cpu" or (wanted == "auto" and device.type != "cuda"):
        return SamplingPlan(wanted, None, "")
    try:
        place, why = _place(graph, loaders, device, reserved)
    except Exception as error:  # of CUDA, torch or numba-cuda, of many types
        if wanted == "cuda":
            raise
        place, why = None, _cannot_prepare(error)
    if place is None and wanted == "cuda":
        raise SettingsError(f"sampling: cuda is not possible on this rank: {why}; use sampling: auto or cpu")
    return SamplingPlan(wanted, place, why)


def _place(
    graph: Graph, loaders: Mapping[str, BlockLoader], device: torch.device, reserved: int
) -> tuple[Literal["device", "pinned"] | None, str]:
    if why := why_not(graph, device):
        return None, why
    if any(loader.settings.categories for loader in loaders.values()):
        return None, "columns of categories are gathered by the CPU"
    if rules := {loader.settings.rule.name for loader in loaders.values() if loader.settings.rule}:
        return None, f"neighbours by {rules.pop()} are chosen by the CPU"
    from trainer.cuda.topology import TopologyPlan  # imports numba-cuda

    found = TopologyPlan.of(graph.store, _settings(loaders), device, reserved)
    return found.place, found.why


def choose_sampling(
    graph: Graph, loaders: Mapping[str, BlockLoader], plan: SamplingPlan, group: RankGroup
) -> SamplingPlan:  # fmt: skip
    """Let this rank's device make the batches of all loaders, if that was planned and works. Returns what is done.

    Collective.

    The batches do not depend on the choice. Copies the topology to the device or to pinned memory, and as many rows of
    features as fit to pinned memory. The ranks of a host share its pinned memory, and fill it together. Then device and
    CPU both make the first batch, and the two batches are compared.

    With ``plan.wanted`` = ``auto``, the CPU makes the batches if there is an error. Else raises the error; it is a
    ``TrainingError`` if the batches differ.
    """
    node = f"{group.ranks.node_rank} {group.ranks.host} {list(graph.store.parts)}" if plan.place else ""
    places = group.gather((node, plan.place))
    if not any(place for _, place in places):
        return replace(plan, place=None)
    from trainer.cuda.shared_memory import mappable_ranks, mutual_groups

    sharing = mutual_groups(mappable_ranks(group, node))
    members = next(ranks for ranks in sharing if group.rank in ranks)
    copies = sum(places[ranks[0]][0] == node for ranks in sharing)
    with_topology = any(places[rank][1] == "pinned" for rank in members)
    makes, shared = bool(plan.place) and group.rank == members[0], len(members) > 1

    def filled(handles: Mapping[str, Handle]) -> HostArrays:  # by this rank's share
        memory = made.memory if made else _mapped(graph, loaders, handles)
        memory.fill(members.index(group.rank), len(members))
        return memory

    with ExitStack() as opened:
        made, problem = group.agree(
            lambda: (
                _attempt(plan, lambda: _allocate(graph, loaders, with_topology, copies, shared, opened))
                if makes
                else (None, "")
            )
        )
        of_first = group.gather((made.memory.handles, made.why) if made else None)[members[0]]
        memory, later = group.agree(lambda: _attempt(plan, lambda: filled(of_first[0])) if of_first else (None, ""))
        problems = group.gather(problem or later)  # the memory stays open until all ranks have mapped it
    failed = next((rank for rank in members if problems[rank]), group.rank)
    problem = f"rank {failed}: {problems[failed]}" if shared and problems[failed] else problems[failed]

    def use() -> SamplingPlan:
        if not (memory and of_first) or problem:
            return replace(plan, place=None, why=problem or plan.why)
        _, own = _attempt(plan, lambda: _use_device(graph, loaders, group.device, plan, memory.lock(group.device)))
        if own:
            return replace(plan, place=None, why=own)
        return replace(plan, why="; ".join(filter(None, [plan.why, of_first[1]])))

    return group.agree(use)


def _attempt(plan: SamplingPlan, work: Callable[[], T]) -> tuple[T | None, str]:
    """Return the result of ``work``, or why it failed; raises its error if the device must make the batches."""
    try:
        return work(), ""
    except Exception as error:  # of CUDA, torch or numba-cuda, of many types
        if plan.wanted == "cuda":
            raise
        return None, _cannot_prepare(error)


def _cannot_prepare(error: Exception) -> str:
    return f"the GPU cannot be prepared: {' '.join(str(error).split())[:300]}"


@dataclass(frozen=True)
class _Pinned:
    """Memory of the host that ranks share, not yet filled and page-locked."""

    memory: HostArrays
    why: str  #: for people: which features are in it


def _allocate(
    graph: Graph, loaders: Mapping[str, BlockLoader], with_topology: bool, copies: int, shared: bool, opened: ExitStack
) -> _Pinned:
    """Allocate memory for the features that fit, and with ``with_topology`` for the topology.

    ``copies``: number of ranks of this host that do so. ``shared``: other ranks map the memory until ``opened`` closes.
    Raises ``SettingsError`` if the host has too little memory for all copies of the topology.
    """
    from trainer.cuda.features import PinnedPlan, feature_arrays  # imports numba-cuda
    from trainer.cuda.shared_memory import HostArrays
    from trainer.cuda.topology import topology_arrays

    arrays = topology_arrays(graph.store, _settings(loaders)) if with_topology else []
    size = sum(each.num_bytes for each in arrays)
    if copies > 1 and size * copies > (available_memory() or 0):
        raise SettingsError(
            f"{copies} copies of the topology, {size_text(size)} each, are more than this host's memory, and its "
            "processes cannot share one; let them run in one container, or use sampling: cpu"
        )
    pins = PinnedPlan.of(graph.store, _features(loaders), size, copies)
    arrays += [each for key in pins.pinned for each in feature_arrays(graph.store, *key)]
    return _Pinned(HostArrays.shared(arrays, opened) if shared else HostArrays.alone(arrays), pins.why)


def _mapped(graph: Graph, loaders: Mapping[str, BlockLoader], handles: Mapping[str, Handle]) -> HostArrays:
    """Map the memory that another rank has allocated, given the handles of its arrays."""
    from trainer.cuda.features import feature_arrays  # imports numba-cuda
    from trainer.cuda.shared_memory import HostArrays
    from trainer.cuda.topology import topology_arrays

    arrays = topology_arrays(graph.store, _settings(loaders))
    for of, names in _features(loaders).items():
        arrays += [each for name in names for each in feature_arrays(graph.store, of, name)]
    return HostArrays.mapped([each for each in arrays if each.name in handles], handles)


def _use_device(
    graph: Graph, loaders: Mapping[str, BlockLoader], device: torch.device, plan: SamplingPlan,
    pinned: Mapping[str, Tensor],
) -> None:  # fmt: skip
    """Let ``device`` make the batches of all loaders, and compare its first batch with the CPU's.

    ``pinned``: arrays in pinned memory, by name. Raises ``TrainingError`` if the batches differ.
    """
    from trainer.cuda.device_sampler import DeviceSampler, StreamPool
    from trainer.cuda.features import FeatureRows, pinned_rows
    from trainer.cuda.topology import load_topology

    first = next(iter(loaders.values()))
    share = next(first.shares(1))
    expected = first.load(share).to(device)
    store = graph.store
    topology = load_topology(store, _settings(loaders), device, pinned if plan.place == "pinned" else None)
    features = {
        (of, name): FeatureRows(
            store, of, name, device,
            pinned=pinned_rows(store, of, name, device, pinned),
            cache=first.kept.get(of) if isinstance(of, str) and name == "x" else None,
        )
        for of, names in _features(loaders).items()
        for name in names
    }  # fmt: skip
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # sampler threads use other streams
    streams = StreamPool(device)
    try:
        for loader in loaders.values():
            sampler = DeviceSampler(loader.host_sampler, store, topology, features, device, streams)
            loader.sample_with(sampler, streams.stream)
        found = first.load(share).to(device)
        if not all(_equal(one, other) for one, other in zip(tensors_of(found), tensors_of(expected), strict=True)):
            raise TrainingError("the first batch that the GPU sampled differs from the CPU's; use sampling: cpu")
    except BaseException:
        for loader in loaders.values():
            loader.sample_with(None)
        raise


def _equal(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same dtype, shape and values; NaN equals NaN."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())


def why_not(graph: Graph, device: torch.device) -> str:
    """Return why ``device`` cannot sample batches of this graph, or '' if it can. Does not check its memory."""
    from trainer.cuda.availability import simulator_wanted, why_no_kernels

    if device.type != "cuda" and not simulator_wanted():
        return f"this rank trains on the {device.type.upper()}"
    if graph.gateway:
        return "graph servers make the batches of a client"
    if not graph.store.whole_topology:
        missing = graph.manifest.num_parts - len(graph.store.topology)
        parts = graph.manifest.num_parts
        return f"the edges of {missing} of {parts} parts are not on this host (data.topology: replicated)"
    return why_no_kernels(device)


def _settings(loaders: Mapping[str, BlockLoader]) -> list[SampleSettings]:
    return [loader.host_sampler.settings for loader in loaders.values()]


def _features(loaders: Mapping[str, BlockLoader]) -> dict[AnyType, tuple[str, ...]]:
    """Return the attributes to gather, by type, without in-degrees, of which the sampler has a table."""
    attrs = next(iter(loaders.values())).host_sampler.attrs
    return {of: tuple(name for name in names if name != LOOPLESS_DEGREE) for of, names in attrs.items()}
