"""From seeds to batches: sample, gather, hand over in order, several batches ahead."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from trainer.arrays import Array, Ids
from trainer.batch import Batch, Block
from trainer.load.open import Graph
from trainer.load.prefetch import ordered_ahead
from trainer.load.seeds import OTHER_STREAM, STREAMS, RankLayout, SeedOrder, split_step
from trainer.sample.multi_hop import RelabelTable, SampledSubgraph, check_fanouts, sample_multi_hop


@dataclass(frozen=True)
class LoaderSettings:
    """What to load and how far ahead."""

    split: str  #: name of the seed list: train, val, test
    fanouts: tuple[int, ...]  #: seeds outward; -1 takes all
    global_batch: int  #: seeds per step over all ranks
    seed: int = 0
    replace: bool = False
    shuffle: bool = True
    threads: int = 1
    prefetch: int = 3  #: batches under way per rank
    want_degree: bool = False  #: also bring whole-graph in-degrees (GCN)
    deadline: float = 120.0  #: seconds

    def __post_init__(self) -> None:
        check_fanouts(self.fanouts, self.replace)  # now, not when the first evaluation begins

    @property
    def patience(self) -> float:
        """Seconds until a batch that does not come means a stuck thread; every request has its own deadline."""
        return self.deadline * (len(self.fanouts) + 2)


@dataclass(frozen=True)
class Share:
    """One rank's part of one global batch."""

    step: int
    key: int
    global_seeds: int
    input_id: Ids  #: positions in the split's seed list
    seeds: Ids  #: global ids


@dataclass(frozen=True)
class Sampled:
    """A share with its subgraph and gathered rows, still numpy."""

    share: Share
    subgraph: SampledSubgraph
    rows: Mapping[str, Array]
    labels: Array | None
    remote_bytes: int


class BatchLoader:
    """One rank's batches of a split. Every rank yields the same number, some perhaps without seeds."""

    def __init__(self, graph: Graph, settings: LoaderSettings, rank: int, layout: RankLayout):
        self.graph, self.settings, self.rank, self.layout = graph, settings, rank, layout
        self._seeds = graph.store.seeds(settings.split)
        stream = STREAMS.get(settings.split, OTHER_STREAM)
        self.order = SeedOrder(len(self._seeds), settings.global_batch, settings.seed, settings.shuffle, stream)
        self.sampler = BatchSampler(graph, settings)

    def __len__(self) -> int:
        return self.order.num_steps

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """Batches of one epoch from ``first_step`` on. Raises ``ServiceError``."""
        s, shares = self.settings, self.shares(epoch, first_step)
        return ordered_ahead(self._batch, shares, threads=s.threads, ahead=s.prefetch, deadline=s.patience)

    def _batch(self, share: Share) -> Batch:
        return to_batch(self.sampler.sample(share))

    def shares(self, epoch: int, first_step: int = 0) -> Iterator[Share]:
        """This rank's seeds, step by step."""
        order = self.order.epoch(epoch)
        for step in range(first_step, len(self)):
            positions = self.order.step(order, step)
            ranks = split_step(self.graph.book.part_of(self._seeds[positions]), self.layout)
            own = positions[ranks == self.rank]
            yield Share(step, self.order.key(epoch, step), len(positions), own, self._seeds[own])


@dataclass
class BatchSampler:
    """Samples shares; safe to call from several threads (each keeps its own relabel table)."""

    graph: Graph
    settings: LoaderSettings
    edges: bool = False  #: list edges with ids for PyG's view
    attrs: tuple[str, ...] = ("x",)  #: gathered for every node
    _local: threading.local = field(default_factory=threading.local, repr=False)

    def sample(self, share: Share) -> Sampled:
        """Subgraph and rows of one share. Raises ``ServiceError``."""
        s, access = self.settings, self.graph.access
        access.take_remote_bytes()
        subgraph = sample_multi_hop(
            access, share.seeds, s.fanouts, share.key, self._table(), replace=s.replace, edges=self.edges
        )
        wanted = [*self.attrs, "orig_id", *(["in_degree"] if s.want_degree else [])]
        rows = access.gather(subgraph.nodes, wanted)
        labels = access.gather(share.seeds, ["y"])["y"] if "y" in self.graph.manifest.attrs else None
        return Sampled(share, subgraph, rows, labels, access.take_remote_bytes())

    def _table(self) -> RelabelTable:
        if not hasattr(self._local, "table"):
            self._local.table = RelabelTable(self.graph.manifest.num_nodes)
        table: RelabelTable = self._local.table
        return table


def to_batch(sampled: Sampled) -> Batch:
    """The tensors a model wants: features as float32, one block per layer, outermost hop first."""
    share, subgraph = sampled.share, sampled.subgraph
    return Batch(
        step=share.step,
        key=share.key,
        num_seeds=len(share.seeds),
        global_seeds=share.global_seeds,
        n_id=torch.from_numpy(sampled.rows["orig_id"]),
        x=torch.from_numpy(sampled.rows["x"]).float(),
        y=None if sampled.labels is None else as_label(sampled.labels),
        input_id=torch.from_numpy(share.input_id),
        blocks=to_blocks(subgraph),
        degree=torch.from_numpy(sampled.rows["in_degree"]) if "in_degree" in sampled.rows else None,
        remote_bytes=sampled.remote_bytes,
    )


def to_blocks(subgraph: SampledSubgraph) -> tuple[Block, ...]:
    """Blocks in layer order: the outermost hop first."""
    parts = (subgraph.block(hop) for hop in reversed(range(len(subgraph.fanouts))))
    return tuple(Block(torch.from_numpy(indptr), torch.from_numpy(indices), n) for indptr, indices, n in parts)


def as_label(labels: Array) -> torch.Tensor:
    """Integer labels as int64 (what cross entropy wants), others in their own dtype."""
    return torch.from_numpy(labels.astype(np.int64) if np.issubdtype(labels.dtype, np.integer) else labels)
