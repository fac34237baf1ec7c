"""Makes batches in background threads, some in advance, and yields them in order."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import TYPE_CHECKING, Protocol, TypeVar

from trainer.core.errors import ServiceError, Wait
from trainer.core.schema import AnyType, NodeType
from trainer.sampler.subgraph_sampler import BatchWork, SampledBatch
from trainer.sampler.types import SampledSubgraph, SampleSettings, SeedSet

if TYPE_CHECKING:
    from trainer.service.remote_graph import Gateway

Item = TypeVar("Item")

Result = TypeVar("Result")


def ordered_ahead(
    work: Callable[[Item], Result], items: Iterable[Item], *, threads: int, ahead: int, deadline: float,
    thread_init: Callable[[int], object] | None = None,
) -> Generator[Result, None, None]:  # fmt: skip
    """Yield ``work(item)`` for each item, in order. ``threads`` threads compute the results in advance.

    At most ``max(ahead, threads + 1)`` results exist at once, including the result that the caller uses.

    If ``work`` raises, the error is raised in place of the item's result, and no later item is started. Raises
    ``ServiceError`` if a result is not ready ``deadline`` seconds after it is requested.

    ``thread_init`` is called with the number of each thread, from 0, before the thread's first item. Its error is
    raised in place of that item's result.
    """
    pending: deque[Future[Result]] = deque()
    failed: list[int] = []  #: numbers of the items whose work raised
    started, of_thread = count(), threading.local()

    def init_thread() -> None:
        if thread_init is not None and not hasattr(of_thread, "number"):
            of_thread.number = next(started)
            thread_init(of_thread.number)

    def run(numbered: tuple[int, Item]) -> Result:
        number, item = numbered
        if failed and number > min(failed):
            raise CancelledError
        try:
            init_thread()
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
        return future.result(min(deadline, threading.TIMEOUT_MAX))
    except FutureTimeout:
        if future.done():
            raise
        text = f"the sampler threads of this process made no batch within {deadline:g} s"
        raise ServiceError(text, wait=Wait("threads", deadline)) from None


class Sampler(Protocol):
    """Makes batches with fixed settings. Thread-safe. Both methods raise ``ServiceError``."""

    def sample(self, seeds: SeedSet, key: int) -> SampledBatch:
        """Sample a subgraph around ``seeds`` and gather the rows of its nodes and edges."""

    def subgraph(self, seeds: SeedSet, key: int) -> SampledSubgraph:
        """Sample a subgraph around ``seeds`` without gathering rows."""


@dataclass(frozen=True)
class RemoteSampler:
    """A ``Sampler`` that requests each batch from a graph server, with one message per batch."""

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
