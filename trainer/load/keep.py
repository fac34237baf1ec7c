"""Filling a host's cache with rows of others that its ranks will ask for, and what they will receive all the same."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch.distributed as dist
from torch import Tensor

from trainer.arrays import Ids
from trainer.errors import PartitionError, PeerError, TrainerError
from trainer.load.asked import AskedColumns
from trainer.load.expected import Prediction, predicted
from trainer.load.hot import (
    BatchPlan,
    HostVisits,
    Together,
    budget_of,
    hottest,
    leader_of,
    places_of,
    remote_chances,
    visits_of_host,
)
from trainer.load.rehearsal import rehearse
from trainer.load.seeds import RankLayout
from trainer.ranks import Ranks
from trainer.reach import CacheSize
from trainer.sample.routing import DistGraph
from trainer.sample.specs import row_spec
from trainer.sample.types import RowRequest
from trainer.schema import NodeType
from trainer.store.cache import CachedRows, RowCache
from trainer.store.part import PartStore

T = TypeVar("T")

_FETCH = 64 << 20  #: bytes of rows that are fetched in one call


@dataclass(frozen=True)
class Kept:
    """What a host keeps, and what each of its ranks is expected to receive."""

    prediction: Prediction
    seconds: float  #: that it took to find and fetch the rows

    def __str__(self) -> str:
        p, kept = self.prediction, "no rows of other hosts are kept here"
        if p.cache_rows:
            kept = f"{p.cache_rows:,} rows of other hosts are kept here ({megabytes(p.cache_bytes)})"
        without = f", {megabytes(p.remote_bytes_without_cache)} without them" if p.cache_rows else ""
        return f"{kept}; each rank expects {megabytes(p.remote_bytes)} of other hosts an epoch{without}"


def keep_hot_rows(
    access: object, store: PartStore, plan: BatchPlan, layout: RankLayout, node: str, size: CacheSize, folder: Path,
    together: Together,
) -> Kept | None:  # fmt: skip
    """Keep the rows that this host's ranks are most likely to ask others for. Collective.

    One rank of each host fetches them into files below ``folder``, which the others map; their names are gone
    afterwards, their memory with the last of the processes. ``node`` is the host's name, the same on its ranks.
    None where nothing is asked of other hosts' parts, or not known what: on clients of graph servers, and where some
    part's edges are with none of the ranks. Raises ``TrainerError`` on all ranks.
    """
    began = time.perf_counter()
    places = places_of(store, node, together)
    visits = visits_of_host(plan, store, layout, places, together)
    with _emptied() as scratch:
        made = together.agree(lambda: _made(access, store, plan, visits, size, folder, scratch))
        prediction, path = together.gather(made)[leader_of(places, together.rank)]
        together.agree(lambda: _use(access, path))
    return None if prediction is None else Kept(prediction, time.perf_counter() - began)


def _made(
    access: object, store: PartStore, plan: BatchPlan, visits: HostVisits | None, size: CacheSize, folder: Path,
    scratch: list[Path],
) -> tuple[Prediction | None, Path | None]:  # fmt: skip
    """The prediction and the cache's folder, in a new one that is added to ``scratch``."""
    if visits is None or not isinstance(access, DistGraph):
        return None, None
    columns = AskedColumns.of(plan, store, access.wire_rows)
    wide = {of: columns.row_bytes[of] for of in plan.columns if of in columns.wide}
    worth = {of: remote_chances(visits.chances[of], of, store) for of in wide}
    kept = hottest(worth, wide, budget_of(size, store, wide))
    cache = RowCache({of: _fetched(access, store, of, ids, columns) for of, ids in kept.items() if len(ids)})
    rehearsal = rehearse(access, plan, cache if cache.num_rows else None)
    prediction = predicted(plan, visits, store, columns, kept, access.held, rehearsal)
    access.take_cost()  # no batch's
    return prediction, _saved(cache, folder, scratch) if cache.num_rows else None


def _saved(cache: RowCache, folder: Path, scratch: list[Path]) -> Path:
    """Written into a new folder below ``folder``, which is added to ``scratch``. Raises ``PartitionError``."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        scratch.append(Path(tempfile.mkdtemp(prefix="cache-", dir=folder)))
    except OSError as error:
        raise PartitionError(f"no cache of rows can be written below {folder}: {error.strerror}") from error
    path = scratch[0] / "rows"
    cache.save(path)
    return path


def _fetched(access: DistGraph, store: PartStore, of: NodeType, ids: Ids, columns: AskedColumns) -> CachedRows:
    """The rows of ``ids`` from their owners. Raises ``ServiceError``."""
    names = columns.names[of]
    specs = {name: row_spec(store, of, name) for name in names}
    rows = {name: np.empty((len(ids), *shape), dtype) for name, (dtype, shape) in specs.items()}
    at_once = max(1, _FETCH // columns.row_bytes[of])
    for start in range(0, len(ids), at_once):
        (found,) = access.gather([RowRequest(of, ids[start : start + at_once], names)])
        for name in names:
            rows[name][start : start + at_once] = found[name]
    return CachedRows.of(ids, rows, store.manifest.nodes[of].num_nodes)


def _use(access: object, path: Path | None) -> None:
    if isinstance(access, DistGraph):
        access.use_cache(None if path is None else RowCache.open(path))


@contextmanager
def _emptied() -> Iterator[list[Path]]:
    """Folders that are gone afterwards."""
    scratch: list[Path] = []
    try:
        yield scratch
    finally:
        for folder in scratch:
            shutil.rmtree(folder, ignore_errors=True)


def megabytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:,.1f} MB"


@dataclass(frozen=True)
class Processes:
    """The processes of an initialized ``torch.distributed``, of whatever backend; one alone without."""

    ranks: Ranks
    group: Any = None

    @classmethod
    def now(cls, ranks: Ranks) -> Processes:
        """Collective."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls(ranks)
        return cls(ranks, dist.new_group(backend="gloo"))

    @property
    def rank(self) -> int:
        return 0 if self.group is None else dist.get_rank(self.group)

    @property
    def size(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)

    def sum(self, values: Tensor) -> Tensor:
        """Over processes, in place."""
        if self.group is not None:
            dist.all_reduce(values, group=self.group)
        return values

    def gather(self, value: T) -> list[T]:
        """Every process's value."""
        values: list[Any] = [value] * self.size
        if self.group is not None:
            dist.all_gather_object(values, value, group=self.group)
        return values

    def agree(self, work: Callable[[], T]) -> T:
        """Do ``work`` everywhere; where it fails on one, all raise."""
        result, error = None, None
        try:
            result = work()
        except TrainerError as raised:
            error = raised
        failures = self.gather(f"{self.ranks}: {error}" if error else "")
        if error is not None:
            raise error
        if any(failures):
            raise PeerError(next(filter(None, failures)))
        return result  # type: ignore[return-value]
