"""Caches the rows of ``x`` that training requests most, on devices of a host that read each other's memory.

Each of L such devices caches every L-th of the rows that their ranks together request most. Its kernels read the other
rows from the other devices. So L devices cache L times as many rows as one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
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
from trainer.core.shared_memory import SharedArray, map_shared, mappable_ranks, mutual_groups
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


@dataclass(frozen=True)
class FilledDeviceCache:
    rows: Mapping[NodeType, DeviceRows]  #: only types with cached rows
    text: str  #: for people: number of rows, and the ranks whose devices share them


@dataclass(frozen=True)
class _Groups:
    of_all: Sequence[tuple[int, ...]] = ()  #: ranks that share their caches; each rank is in one group
    why_alone: str = ""  #: for people: an error for which this rank is alone in its group

    def members(self, rank: int) -> tuple[int, ...]:
        return next((ranks for ranks in self.of_all if rank in ranks), (rank,))


@dataclass(frozen=True)
class _Exported:
    """The rows that this rank's device caches, in memory that other processes can read."""

    rows: dict[NodeType, Tensor] = field(default_factory=dict)  #: float32 [k, width]
    #: of each type: handle, number of rows, bytes of the first and the last row
    handles: dict[NodeType, tuple[Any, int, bytes]] = field(default_factory=dict)
    problem: str = ""  #: why nothing is exported


def fill_device_cache(
    graph: OpenedGraph, plan: BatchPlan, size: CacheSize, group: RankGroup, share: ShareCache, why_cpu: str
) -> FilledDeviceCache:
    """Cache the rows that batches request most on the device of each rank. Collective.

    Args:
        graph: The graph. Its rows of ``x`` are cached as float32.
        plan: This rank's batches.
        size: Size of the cache of one device: bytes, or a share of all rows of ``x`` in the graph.
        group: All ranks, with their devices.
        share: Which devices share their caches. auto: those connected by NVLink; always: all that can read each
            other's memory.
        why_cpu: Why the CPU makes this rank's batches, so that they cannot have rows of other devices; '' if the device
            makes them.

    Raises:
        SettingsError: In a client; or if ``share`` is always and this rank's device can share with no other.
        ServiceError: A host does not answer.
    """
    groups = _find_groups(group, share, why_cpu) if cache_bytes(graph, size) else _Groups()
    members, problem = groups.members(group.rank), groups.why_alone
    if any(len(ranks) > 1 for ranks in groups.of_all):
        rows, failed = _cache_together(graph, plan, size, group, members, share == "always")
        problem = problem or failed
    else:
        rows = group.agree(lambda: device_rows(graph, plan, size, group.device))
    text = _text(rows)
    if len(members) > 1 and not problem:
        text += f"; the GPUs of ranks {', '.join(map(str, members))} read each other's rows"
    return FilledDeviceCache(rows, f"{text}; not shared: {problem}" if problem else text)


def _find_groups(group: RankGroup, share: ShareCache, why_cpu: str) -> _Groups:
    """Find the ranks of each host that share their caches. Collective.

    Raises ``SettingsError`` if ``share`` is always and this rank's device cannot read the memory of any other.
    """
    if share == "never" or group.size == 1:
        return _Groups()
    node = f"{group.ranks.node_rank} {group.ranks.host}"
    reachable = mappable_ranks(group, "" if why_cpu else node)[group.rank]
    names = group.gather(group.agree(lambda: device_name(group.device) if reachable else ""))
    wanted, linked, problem = ("nvlink",) if share == "auto" else ("nvlink", "pcie"), list[int](), ""
    for rank in reachable if names[group.rank] else ():
        try:
            if names[rank] and link_between(names[group.rank], names[rank]) in wanted:
                linked.append(rank)
        except RuntimeError as error:
            problem = str(error)
    groups = _Groups(mutual_groups(group.gather(linked), MOST_DEVICES), "" if linked else problem)

    def check() -> None:
        if share == "always" and group.ranks.local_world_size > 1 and len(groups.members(group.rank)) == 1:
            away = "its process cannot map memory of the node's other processes"
            no_group = f"it is in no group of at most {MOST_DEVICES} GPUs that can all read each other's memory"
            _refuse(group, why_cpu or problem or (no_group if reachable else away))

    group.agree(check)
    return groups


def _refuse(group: RankGroup, why: str) -> None:
    raise SettingsError(f"share_device_cache: always is not possible on {group.ranks}: {why}; use auto or never")


def _cache_together(
    graph: OpenedGraph, plan: BatchPlan, size: CacheSize, group: RankGroup, members: tuple[int, ...], must: bool
) -> tuple[dict[NodeType, DeviceRows], str]:
    """Cache rows on the devices of ``members``. Collective: a rank that is its only member caches its own rows.

    Returns the rows that this rank's device has; and why the devices cannot share them, '' if they can. With ``must``,
    raises ``SettingsError`` if they cannot.
    """
    device, lone = group.device, len(members) == 1
    counts = group.agree(lambda: {} if lone else count_requests(graph, plan))
    total = _added_up(counts, members, group)
    budget = cache_bytes(graph, size) * len(members)
    chosen = group.agree(lambda: {} if lone else choose_rows(graph, total, budget))
    own = {of: ids[members.index(group.rank) :: len(members)] for of, ids in chosen.items()}
    rows: dict[NodeType, DeviceRows] = {}

    def load() -> _Exported:
        if lone:
            rows.update(device_rows(graph, plan, size, device))
        return _export(graph, own, device)

    exported = group.agree(load)
    tables, problem = _read_others(graph, exported, members, group)

    def join() -> None:
        if problem:
            _close(exported, tables, device)
            return
        for of, ids in chosen.items():
            slots = CachedRows.of(ids, {}, graph.manifest.nodes[of].num_nodes).slots
            shared = SharedRows(slots, tuple(tables[of]))
            rows[of] = replace(device_rows_of(graph, of, own[of], exported.rows[of]), shared=shared)

    def load_alone() -> None:
        if problem and must:
            _refuse(group, problem)
        if problem:
            _free(exported.rows, device)
            rows.update(device_rows(graph, plan, size, device))

    group.agree(join)  # no process frees rows that another one has mapped
    group.agree(load_alone)
    return rows, problem


def _added_up(
    counts: Mapping[NodeType, RowCounts], members: Sequence[int], group: RankGroup
) -> dict[NodeType, RowCounts]:  # fmt: skip
    """Return the sums of the counts of ``members``. Collective."""
    with ExitStack() as stack:
        shared = group.agree(
            lambda: {
                of: stack.enter_context(SharedArray.of(np.stack([own.ids, own.counts]))) for of, own in counts.items()
            }
        )
        handles = group.gather({of: (each.handle, each.values.shape[1]) for of, each in shared.items()})

        def add_up() -> dict[NodeType, RowCounts]:
            found: dict[NodeType, list[RowCounts]] = {}
            for rank in members:
                for of, (handle, num_rows) in handles[rank].items():
                    found.setdefault(of, []).append(RowCounts(*map_shared(handle, (2, num_rows), np.int64)))
            return {of: RowCounts.sum(parts) for of, parts in found.items()}

        return group.agree(add_up)  # memory stays open until all ranks have read it


def _export(graph: OpenedGraph, ids: Mapping[NodeType, Ids], device: torch.device) -> _Exported:
    """Gather rows of ``x`` into memory of ``device`` that other processes can read.

    Raises ``ServiceError`` if a host does not answer, and ``RuntimeError`` if the device has too little memory.
    """
    exported = _Exported()
    if not ids:
        return exported
    from trainer.cuda.peer_rows import ends_of, export_rows  # imports numba-cuda

    handles = {}
    try:
        for of, each in ids.items():
            exported.rows[of], handles[of] = export_rows(len(each), row_width(graph, of), device)
    except (OSError, RuntimeError) as error:
        _free(exported.rows, device)
        if "OUT_OF_MEMORY" in str(error):
            raise
        return _Exported(problem=_one_line(error))
    for of, each in ids.items():
        load_rows(graph, of, each, exported.rows[of])
    try:
        for of, each in ids.items():
            exported.handles[of] = handles[of], len(each), ends_of(exported.rows[of], device)
    except Exception as error:  # of the driver or numba-cuda, of many types
        _free(exported.rows, device)
        return _Exported(problem=_one_line(error))
    return exported


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _free(rows: Mapping[NodeType, Tensor], device: torch.device) -> None:
    if rows:
        from trainer.cuda.peer_rows import free_rows

        for each in rows.values():
            free_rows(each, device)


def _read_others(
    graph: OpenedGraph, exported: _Exported, members: Sequence[int], group: RankGroup
) -> tuple[dict[NodeType, list[Any]], str]:
    """Map the rows that the other members have exported. Collective.

    Returns by type the rows of each member, as arguments of kernels; and why a member cannot read them, '' if all can.
    """
    gathered = group.gather((exported.handles, exported.problem))
    tables: dict[NodeType, list[Any]] = {of: [] for of in exported.rows}
    no_export, problem = _first_problem([text for _, text in gathered], members), ""
    try:
        for rank in members if not no_export else ():
            for of, own in exported.rows.items():
                width, handle = row_width(graph, of), gathered[rank][0][of]
                tables[of].append(own if rank == group.rank else _opened(*handle, width, group.device))
    except Exception as error:  # of the driver, numba-cuda or the system, of many types
        problem = _one_line(error)
    unread = _first_problem(group.gather(problem), members)
    return tables, no_export or unread


def _first_problem(problems: Sequence[str], members: Sequence[int]) -> str:
    return next((f"rank {rank}: {problems[rank]}" for rank in members if problems[rank]), "")


def _opened(handle: Any, count: int, ends: bytes, width: int, device: torch.device) -> Any:
    """Map rows of another process. Checks some, as a kernel that reads a wrong address ends its process."""
    from trainer.cuda.peer_rows import close_rows, ends_of, open_rows

    rows = open_rows(handle, count, width, device)
    try:
        if ends_of(rows, device) != ends:
            raise RuntimeError("the memory of another GPU is read wrongly")
    except BaseException:
        with suppress(RuntimeError):
            close_rows(rows, device)
        raise
    return rows


def _close(exported: _Exported, tables: Mapping[NodeType, Sequence[Any]], device: torch.device) -> None:
    """Unmap the rows of other ranks."""
    for of, each in tables.items():
        for rows in each:
            if rows is not exported.rows[of]:
                from trainer.cuda.peer_rows import close_rows

                with suppress(RuntimeError):  # an error of the driver has been reported already
                    close_rows(rows, device)


def _text(rows: Mapping[NodeType, DeviceRows]) -> str:
    count, size = (sum(map(of, rows.values())) for of in (lambda each: len(each.rows), lambda each: each.rows.nbytes))
    return f"{count:,} rows ({size_text(size)}) cached on each device"
