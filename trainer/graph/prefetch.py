"""Makes batches ahead in threads and delivers them in order."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import Protocol, TypeVar

from trainer.core.errors import ServiceError
from trainer.core.schema import AnyType, NodeType
from trainer.sampler.subgraph_sampler import BatchWork, SampledBatch
from trainer.sampler.types import SampledSubgraph, SampleSettings, SeedSet
from trainer.service.remote_graph import Gateway

Item = TypeVar("Item")

Result = TypeVar("Result")


def ordered_ahead(
    work: Callable[[Item], Result], items: Iterable[Item], *, threads: int, ahead: int, deadline: float,
    thread_init: Callable[[int], object] | None = None,
) -> Generator[Result, None, None]:  # fmt: skip
    """Yield ``work(item)`` for each job in order, made on ``threads`` threads; up to ``ahead`` are there at once.

    The one in use counts until the next is asked for, and nothing here refers to it: memory is bounded by ``ahead``
    results where whoever iterates lets go of one before asking for the next. There may always be one more than threads.

    What ``work`` raises is raised here, at its place in the order, and no later job is begun: after a lost host each
    would wait for its deadline, and a process ends when its threads do. Raises ``ServiceError`` when one job takes
    longer than ``deadline`` seconds after it is waited for.

    ``thread_init`` is called with each thread's number, from 0, before the thread's first job. What it raises is raised
    here in place of that job's result.
    """
    pending: deque[Future[Result]] = deque()
    failed: list[int] = []  #: numbers of jobs that raised
    started, of_thread = count(), threading.local()

    def begin() -> None:
        if thread_init is not None and not hasattr(of_thread, "number"):
            of_thread.number = next(started)
            thread_init(of_thread.number)

    def run(numbered: tuple[int, Item]) -> Result:
        number, item = numbered
        if failed and number > min(failed):
            raise CancelledError
        try:
            begin()
            return work(item)
        except BaseException:
            failed.append(number)
            raise

    source = enumerate(items)
    pool = ThreadPoolExecutor(threads, thread_name_prefix="sampler")
    try:
        pending.extend(pool.submit(run, item) for item in islice(source, max(ahead, threads + 1)))
        while pending:
            yield _wait(pending.popleft(), deadline)
            pending.extend(pool.submit(run, item) for item in islice(source, 1))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _wait(future: Future[Result], deadline: float) -> Result:
    try:
        return future.result(deadline)
    except FutureTimeout:
        if future.done():
            raise
        raise ServiceError(f"no batch within {deadline:g} s from the sampler threads of this process") from None


class Sampler(Protocol):
    """Makes batches of one kind; safe to call from several threads. Both methods raise ``ServiceError``."""

    def sample(self, seeds: SeedSet, key: int) -> SampledBatch:
        """Subgraph and rows."""

    def subgraph(self, seeds: SeedSet, key: int) -> SampledSubgraph:
        """Nodes and edges alone."""


@dataclass(frozen=True)
class RemoteSampler:
    """Has each batch made by a graph server, with one request."""

    gateway: Gateway
    settings: SampleSettings
    attrs: Mapping[AnyType, tuple[str, ...]]
    labels: tuple[NodeType, tuple[str, ...]] = ("", ())

    def sample(self, seeds: SeedSet, key: int) -> SampledBatch:
        began = time.perf_counter()
        sampled = self.gateway.sample_batch(BatchWork(self.settings, seeds, key, self.attrs, self.labels))
        return replace(sampled, cost=replace(sampled.cost, wait_s=time.perf_counter() - began))

    def subgraph(self, seeds: SeedSet, key: int) -> SampledSubgraph:
        return self.gateway.sample_batch(BatchWork(self.settings, seeds, key, {})).subgraph
