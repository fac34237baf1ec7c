"""Caches the rows of ``x`` that training requests most, on devices of a host that read each other's memory.

Each of L such devices caches every L-th of the rows that their ranks together request most. Its kernels read the other
rows from the other devices. So L devices cache L times as many rows as one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from trainer.core.arrays import Ids
from trainer.core.errors import SettingsError
from trainer.core.memory import size_text
from trainer.core.ranks import RankGroup
from trainer.core.remote_settings import CacheSize
from trainer.core.schema import NodeType
from trainer.core.shared_memory import Place, SharedArray, map_shared
from trainer.cuda.peer_links import MOST_DEVICES, device_name, link_between
from trainer.graph.cache_fill import OpenedGraph
from trainer.graph.cache_policy import BatchPlan, RowCounts
from trainer.graph.device import DeviceRows, SharedRows
from trainer.graph.device_cache import (
    cache_bytes,
    choose_rows,
    count_requests,
    device_rows,
    device_rows_of,
    load_rows,
    row_width,
)
from trainer.store.row_cache import CachedRows

ShareCache = Literal["auto", "always", "never"]  #: setting ``share_device_cache``

Tables = tuple[Any, ...]  #: the rows of one node type that each device of a group caches, as arguments of kernels


@dataclass(frozen=True)
class FilledDeviceCache:
    rows: Mapping[NodeType, DeviceRows]  #: only types with cached rows
    text: str  #: for people: number of rows, and the ranks whose devices share them


def fill_device_cache(
    graph: OpenedGraph, plan: BatchPlan, size: CacheSize, group: RankGroup, share: ShareCache, why_alone: str
) -> FilledDeviceCache:
    """Cache the rows that batches request most on the device of each rank. Collective.

    Args:
        graph: The graph. Its rows of ``x`` are cached as float32.
        plan: This rank's batches.
        size: Size of the cache of one device: bytes, or a share of all rows of ``x`` in the graph.
        group: All ranks, with their devices.
        share: Which devices share their caches. auto: those connected by NVLink; always: all that can read each
            other's memory.
        why_alone: Why this rank cannot read rows of other devices; '' if it can, as its device makes the batches.

    Raises:
        SettingsError: In a client; or if ``share`` is always and this rank can share with no other of its host.
        ServiceError: A host does not answer.
    """
    budget = cache_bytes(graph, size)
    groups = _groups(group, share, why_alone) if budget else []
    if all(len(ranks) == 1 for ranks in groups):
        rows = group.agree(lambda: device_rows(graph, plan, size, group.device))
        return FilledDeviceCache(rows, _text(rows))
    members = next(ranks for ranks in groups if group.rank in ranks)
    counts = group.agree(lambda: count_requests(graph, plan))
    chosen = choose_rows(graph, _added_up(counts, members, group), budget * len(members))
    own = {of: ids[members.index(group.rank) :: len(members)] for of, ids in chosen.items()}
    held = group.agree(lambda: {of: _load(graph, of, ids, group.device, len(members) > 1) for of, ids in own.items()})
    tables, problem = _read_others(graph, held, members, group)
    rows = {of: device_rows_of(graph, of, ids, held[of].rows) for of, ids in own.items()}
    if len(members) == 1:
        return FilledDeviceCache(rows, _text(rows))
    if problem:
        return FilledDeviceCache(rows, f"{_text(rows)}; not shared with ranks {_listed(members)}: {problem}")
    for of, ids in chosen.items():
        slots = CachedRows.of(ids, {}, graph.manifest.nodes[of].num_nodes).slots
        rows[of] = replace(rows[of], shared=SharedRows(slots, tables[of]))
    return FilledDeviceCache(rows, f"{_text(rows)}; the GPUs of ranks {_listed(members)} read each other's rows")


def sharing_groups(readable: Sequence[Iterable[int]]) -> list[tuple[int, ...]]:
    """Divide ranks into groups of at most ``MOST_DEVICES``, in each of which every rank can read from every other.

    ``readable``: for each rank, the ranks that it can read from. A rank joins the first group that it fits in.
    """
    can, groups = [set(ranks) for ranks in readable], list[list[int]]()
    for rank in range(len(can)):
        for group in groups:
            if len(group) < MOST_DEVICES and all(one in can[rank] and rank in can[one] for one in group):
                group.append(rank)
                break
        else:
            groups.append([rank])
    return [tuple(group) for group in groups]


def _groups(group: RankGroup, share: ShareCache, why_alone: str) -> list[tuple[int, ...]]:
    """Return the groups of ranks that share their caches; all ranks are in one of them. Collective."""
    if share == "never" or group.size == 1:
        return [(rank,) for rank in range(group.size)]
    with group.agree(lambda: SharedArray.of(np.array([group.rank]))) as probe:
        name = "" if why_alone else device_name(group.device)
        node = f"{group.ranks.node_rank} {group.ranks.host}"
        gathered = group.gather((node, name, probe.place))
        wanted = ("nvlink",) if share == "auto" else ("nvlink", "pcie")
        readable = [
            rank
            for rank, (other_node, other, place) in enumerate(gathered)
            if rank != group.rank and other_node == node and name and other
            if link_between(name, other) in wanted and _is_mapped(place, rank)
        ]
        groups = sharing_groups(group.gather(readable))

    def check() -> None:
        if share == "always" and group.ranks.local_world_size > 1 and (group.rank,) in groups:
            why = why_alone or "its GPU cannot read the memory of the host's other GPUs"
            raise SettingsError(
                f"share_device_cache: always is not possible on {group.ranks}: {why}; use auto or never"
            )

    group.agree(check)
    return groups


def _is_mapped(place: Place, rank: int) -> bool:
    try:
        return bool(map_shared(place, (1,), np.int64)[0] == rank)
    except OSError:  # the other process is in another container
        return False


def _added_up(
    counts: Mapping[NodeType, RowCounts], members: Sequence[int], group: RankGroup
) -> dict[NodeType, RowCounts]:  # fmt: skip
    """Return the sums of the counts of ``members``. Collective."""
    with ExitStack() as stack:
        arrays = {of: np.stack([own.ids, own.counts]) for of, own in counts.items()}
        shared = group.agree(lambda: {of: stack.enter_context(SharedArray.of(each)) for of, each in arrays.items()})
        places = group.gather({of: (each.place, each.values.shape[1]) for of, each in shared.items()})

        def add_up() -> dict[NodeType, RowCounts]:
            found: dict[NodeType, list[RowCounts]] = {}
            for rank in members:
                for of, (place, num_rows) in places[rank].items():
                    found.setdefault(of, []).append(RowCounts(*map_shared(place, (2, num_rows), np.int64)))
            return {of: RowCounts.sum(parts) for of, parts in found.items()}

        return group.agree(add_up)  # memory stays open until all ranks have read it


@dataclass(frozen=True)
class _HeldRows:
    rows: Tensor  #: float32 [k, width], on this rank's device
    handle: Any = None  #: for ``open_rows`` in other processes; None if they cannot read the rows


def _load(graph: OpenedGraph, of: NodeType, ids: Ids, device: torch.device, export: bool) -> _HeldRows:
    """Gather rows of ``x`` to ``device``; with ``export`` into memory that other processes can read."""
    shape = len(ids), row_width(graph, of)
    if export:
        from trainer.cuda.peer_rows import export_rows  # imports numba-cuda

        held = _HeldRows(*export_rows(*shape, device))
    else:
        held = _HeldRows(torch.empty(shape, dtype=torch.float32, device=device))
    load_rows(graph, of, ids, held.rows)
    return held


def _read_others(
    graph: OpenedGraph, held: Mapping[NodeType, _HeldRows], members: Sequence[int], group: RankGroup
) -> tuple[dict[NodeType, Tables], str]:  # fmt: skip
    """Map the rows that the other members cache. Collective.

    Returns the tables by type, one of each member; and why a member cannot read them, '' if all can.
    """
    handles = group.agree(lambda: {of: (each.handle, len(each.rows), _ends(each, group)) for of, each in held.items()})
    gathered = group.gather(handles)
    tables, problem = dict[NodeType, Tables](), ""
    try:
        for of, own in held.items():
            others = (_opened(*gathered[r][of], row_width(graph, of), group.device) for r in members if r != group.rank)
            found = list(others)
            found.insert(members.index(group.rank), own.rows)
            tables[of] = tuple(found)
    except (OSError, RuntimeError) as error:
        problem = f"rank {group.rank}: {error}"
    problems = group.gather(problem)
    return tables, next(filter(None, (problems[rank] for rank in members)), "")


def _ends(held: _HeldRows, group: RankGroup) -> bytes:
    if held.handle is None:
        return b""
    from trainer.cuda.peer_rows import ends_of

    return ends_of(held.rows, group.device)


def _opened(handle: Any, count: int, ends: bytes, width: int, device: torch.device) -> Any:
    """Map rows of another process. Checks some, as a kernel that reads a wrong address ends its process.

    Raises ``OSError`` or ``RuntimeError``.
    """
    from trainer.cuda.peer_rows import ends_of, open_rows

    rows = open_rows(handle, count, width, device)
    if ends_of(rows, device) != ends:
        raise RuntimeError("the memory of another GPU is read wrongly")
    return rows


def _text(rows: Mapping[NodeType, DeviceRows]) -> str:
    count, size = (sum(map(of, rows.values())) for of in (lambda each: len(each.rows), lambda each: each.rows.nbytes))
    return f"{count:,} rows ({size_text(size)}) cached on each GPU"


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
