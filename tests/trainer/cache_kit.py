"""Simulated hosts of a partition in one process: each opens its own parts. Ranks are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trainer.core.batch_cost import Cost
from trainer.graph.open import Graph
from trainer.graph.seed_order import RankLayout
from trainer.loader.block_loader import BatchLoader, LoaderSettings
from trainer.sampler.dist_graph import DistGraph
from trainer.sampler.local_graph import LocalGraph
from trainer.sampler.replicas import ReadyAnswer
from trainer.sampler.types import HopSample
from trainer.store.part_store import open_parts


class LocalClient:
    """Answers requests from a host's ``LocalGraph``, without a network."""

    def __init__(self, part_ids: Sequence[int], local: LocalGraph):
        self.part_ids, self.name, self._local = tuple(part_ids), f"host of {part_ids}", local

    def submit(self, request: Any) -> Any:
        return ready(request.answer(self._local))


def ready(answer: Any) -> Any:
    """Return a reply that has arrived."""
    return ReadyAnswer(answer, sum(array.nbytes for array in _arrays(answer)))


def _arrays(answer: Any) -> Iterator[np.ndarray]:
    if isinstance(answer, HopSample):
        answer = [answer.counts, answer.src, *([] if answer.edge is None else [answer.edge])]
    for one in [answer] if isinstance(answer, np.ndarray) else answer:
        yield from [one] if isinstance(one, np.ndarray) else _arrays(one.values() if isinstance(one, dict) else one)


@dataclass
class _Exchange:
    size: int
    values: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size, timeout=60)
        self.values = [None] * self.size


@dataclass(frozen=True)
class Threads:
    """A group of ranks that are threads, with the methods of ``RankGroup`` that ``fill_cache`` calls."""

    rank: int
    exchange: _Exchange

    @property
    def size(self) -> int:
        return self.exchange.size

    def gather(self, value: Any) -> list[Any]:
        self.exchange.values[self.rank] = value
        self.exchange.barrier.wait()
        found = list(self.exchange.values)
        self.exchange.barrier.wait()
        return found

    def agree(self, work: Callable[[], Any]) -> Any:
        result = work()
        self.exchange.barrier.wait()
        return result


def run_ranks(size: int, work: Callable[[Threads], Any]) -> list[Any]:
    """Run ``work`` for every rank, each in a thread. Return the results by rank."""
    exchange = _Exchange(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: work(Threads(rank, exchange)), range(size)))


def hosts(folder: Any, num_parts: int, topology: str = "partitioned", **options: Any) -> list[Graph]:
    """Return one graph per host. Host p holds part p and runs one rank."""
    locals_ = [LocalGraph(open_parts(folder, [part])) for part in range(num_parts)]
    layout = RankLayout(num_parts, tuple((part,) for part in range(num_parts)))
    graphs = []
    for own in range(num_parts):
        store = open_parts(folder, [own], topology)
        others = {part: LocalClient([part], locals_[part]) for part in range(num_parts) if part != own}
        graphs.append(Graph(store, DistGraph(LocalGraph(store), others, **options), placed=layout))
    return graphs


def loader_of(graph: Graph, rank: int, fanouts: Any, batch: int, **options: Any) -> BatchLoader:
    return BatchLoader(graph, LoaderSettings("train", fanouts, batch, **options), rank, graph.layout)


def received(loader: BatchLoader, epoch: int = 1) -> Cost:
    """Return the total ``Cost`` of the batches of an epoch."""
    return Cost.total(loader.load(share).cost for share in loader.shares(epoch))
