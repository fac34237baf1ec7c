"""Who finds the subgraphs and rows of batches: this process, or the graph servers."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from trainer.core.schema import AnyType, NodeType
from trainer.sampler.subgraph import SampledSubgraph, SampleSettings, SeedSet
from trainer.sampler.subgraph_sampler import BatchWork, Sampled
from trainer.service.remote_graph import Gateway


class Sampler(Protocol):
    """Makes batches of one kind; safe to call from several threads. Both methods raise ``ServiceError``."""

    def sample(self, seeds: SeedSet, key: int) -> Sampled:
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

    def sample(self, seeds: SeedSet, key: int) -> Sampled:
        began = time.perf_counter()
        sampled = self.gateway.sample_batch(BatchWork(self.settings, seeds, key, self.attrs, self.labels))
        return replace(sampled, cost=replace(sampled.cost, wait_s=time.perf_counter() - began))

    def subgraph(self, seeds: SeedSet, key: int) -> SampledSubgraph:
        return self.gateway.sample_batch(BatchWork(self.settings, seeds, key, {})).subgraph
