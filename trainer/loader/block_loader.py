"""The loader of the bundled trainer: batches of blocks, several ahead."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from trainer.core.arrays import Array, Ids
from trainer.core.batch import Batch, Block, HeteroBatch, KeptRows
from trainer.core.errors import SettingsError
from trainer.core.schema import HOMO_EDGE, HOMO_NODE, AnyType, EdgeType, NodeType
from trainer.graph.device import DeviceRows, as_tensor
from trainer.graph.open import Graph
from trainer.graph.prefetch import ordered_ahead
from trainer.graph.seed_order import OTHER_STREAM, STREAMS, RankLayout, SeedOrder, SeedShare, shares
from trainer.loader.arguments import time_level
from trainer.sampler.multi_hop import cut_block
from trainer.sampler.settings import check_settings
from trainer.sampler.subgraph_sampler import SampledBatch, SubgraphSampler
from trainer.sampler.types import RowRequest, SampledSubgraph, SampleSettings, SeedSet, TimeRule

AnyBatch: TypeAlias = Batch | HeteroBatch


@dataclass(frozen=True)
class LoaderSettings:
    """What to load and how far ahead."""

    split: str  #: name of the seed list: train, val, test
    fanouts: tuple[int, ...] | Mapping[EdgeType, tuple[int, ...]]  #: seeds outward, -1 takes all; or per edge type
    global_batch: int  #: seeds per step over all ranks
    seed: int = 0
    replace: bool = False
    shuffle: bool = True
    threads: int = 1
    prefetch: int = 2  #: batches at once per rank, the one in use included; at least one more than threads
    want_degree: bool = False  #: also bring whole-graph in-degrees (GCN); homogeneous graphs only
    deadline: float = 120.0  #: seconds
    target: NodeType = HOMO_NODE  #: node type of the seeds
    weight: str | None = None  #: edge attribute that a neighbour's chance goes with
    time_attr: str | None = None  #: no neighbour later than its seed, by the attribute of this name
    last: bool = False  #: with ``time_attr``: the latest neighbours rather than drawn ones
    disjoint: bool = False  #: a subgraph per seed


class BatchLoader:
    """One rank's batches of a split: ``Batch`` of a homogeneous graph, else ``HeteroBatch``.

    Every rank yields the same number, some perhaps without seeds. Raises ``SettingsError`` for fanouts
    that cannot be sampled and ``PartitionError`` for a split that is not there.
    """

    def __init__(self, graph: Graph, settings: LoaderSettings, rank: int, layout: RankLayout):
        self.graph, self.settings, self.rank, self.layout = graph, settings, rank, layout
        if settings.target not in graph.manifest.nodes:
            raise SettingsError(f"no node type {settings.target!r}; there are {list(graph.manifest.nodes)}")
        self._seeds = graph.store.seeds(settings.target, settings.split)
        stream = STREAMS.get(settings.split, OTHER_STREAM)
        self.order = SeedOrder(len(self._seeds), settings.global_batch, settings.seed, settings.shuffle, stream)
        sampling = sampling_of(graph, settings)
        check_settings(graph.manifest, sampling)
        if settings.time_attr is not None and settings.time_attr not in graph.manifest.nodes[settings.target].attrs:
            raise SettingsError(
                f"seeds, of type {settings.target!r}, have no {settings.time_attr!r} to compare times with"
            )
        self._patience = graph.patience(settings.deadline, sampling.num_hops + 2)  # every request has its own deadline
        self._kept: dict[NodeType, DeviceRows] = {}
        self.sampler = graph.sampler(sampling, columns_of(graph, settings), labels_of(graph, settings))

    def __len__(self) -> int:
        return self.order.num_steps

    def keep(self, rows: Mapping[NodeType, DeviceRows]) -> None:
        """Leave ``x`` of these rows, which stay on the device, out of batches until those are moved there.

        Raises ``SettingsError`` in a client, which is sent whole batches.
        """
        if not isinstance(self.sampler, SubgraphSampler):
            raise SettingsError("rows cannot be kept on the device of a client node, which is sent whole batches")
        self._kept = dict(rows)
        self.sampler.kept = {of: kept.slots for of, kept in rows.items()}

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[AnyBatch]:
        """Batches of one epoch from ``first_step`` on. Raises ``ServiceError``."""
        s, work = self.settings, self.shares(epoch, first_step)
        threads = self.graph.threads(s.threads, s.prefetch)
        return ordered_ahead(self.load, work, threads=threads, ahead=s.prefetch, deadline=self._patience)

    def shares(self, epoch: int, first_step: int = 0) -> Iterator[SeedShare]:
        """This rank's seeds, step by step."""
        return shares(self.order, self._part_of, self.rank, self.layout, epoch, first_step)

    def load(self, share: SeedShare) -> AnyBatch:
        """The batch of one share."""
        sampled = self.sample(share)
        return self._hetero(share, sampled) if self.graph.manifest.hetero else self._homo(share, sampled)

    def sample(self, share: SeedShare) -> SampledBatch:
        """Subgraph and rows of one share, still numpy."""
        return self.sampler.sample(self._seed_set(share), share.key)

    def requests(self, epoch: int) -> Iterator[list[RowRequest]]:
        """What its batches gather, step by step, without gathering it. Not in a client, which is sent whole batches."""
        assert isinstance(self.sampler, SubgraphSampler)
        sampler = replace(self.sampler, _local=threading.local())  # whose tables go with it
        return (sampler.requests(self._seed_set(share), share.key) for share in self.shares(epoch))

    def _seed_set(self, share: SeedShare) -> SeedSet:
        target, seeds = self.settings.target, self._seeds[share.positions]
        trees, attr = {target: share.places}, self.settings.time_attr
        if attr is None:
            return SeedSet({target: seeds}, trees)
        (rows,) = self.graph.access.gather([RowRequest(target, seeds, (attr,))])
        return SeedSet({target: seeds}, trees, {target: rows[attr].astype(np.int64)})

    def _part_of(self, positions: Ids) -> Ids:
        return self.graph.store.books[self.settings.target].part_of(self._seeds[positions])

    def _homo(self, share: SeedShare, sampled: SampledBatch) -> Batch:
        rows = sampled.rows[HOMO_NODE]
        return Batch(
            step=share.step,
            key=share.key,
            num_seeds=len(share.positions),
            global_seeds=share.global_seeds,
            n_id=torch.from_numpy(rows["orig_id"]),
            x=self._features(HOMO_NODE, rows["x"]),
            y=self._y(sampled),
            input_id=torch.from_numpy(share.positions),
            blocks=homo_blocks(sampled.subgraph),
            degree=torch.from_numpy(rows["in_degree"]) if "in_degree" in rows else None,
            kept=self._kept_rows(sampled).get(HOMO_NODE),
            cost=sampled.cost,
        )

    def _hetero(self, share: SeedShare, sampled: SampledBatch) -> HeteroBatch:
        nodes, rows = sampled.subgraph.nodes, sampled.rows
        return HeteroBatch(
            step=share.step,
            key=share.key,
            num_seeds=len(share.positions),
            global_seeds=share.global_seeds,
            target=self.settings.target,
            n_id={of: torch.from_numpy(rows[of]["orig_id"]) for of in nodes},
            x={of: self._features(of, rows[of]["x"]) for of in nodes if "x" in rows[of]},
            y=self._y(sampled),
            input_id=torch.from_numpy(share.positions),
            blocks=hetero_blocks(sampled.subgraph),
            num_nodes={of: tuple(np.cumsum(found.per_hop).tolist()) for of, found in nodes.items()},
            kept=self._kept_rows(sampled),
            cost=sampled.cost,
        )

    def _kept_rows(self, sampled: SampledBatch) -> dict[NodeType, KeptRows]:
        return {of: KeptRows(torch.from_numpy(slots), self._kept[of].rows) for of, slots in sampled.kept.items()}

    def _features(self, of: NodeType, rows: Array) -> Tensor:
        return as_tensor(rows, self.graph.manifest.nodes[of].attrs["x"]).float()

    def _y(self, sampled: SampledBatch) -> Tensor | None:
        if "y" not in sampled.labels:
            return None
        return as_label(as_tensor(sampled.labels["y"], self.graph.manifest.nodes[self.settings.target].attrs["y"]))


def sampling_of(graph: Graph, settings: LoaderSettings) -> SampleSettings:
    """How the neighbours of a bundled trainer's batch are drawn: exact blocks, no edge ids."""
    given = settings.fanouts
    every = {of: tuple(given) for of in graph.manifest.edges} if not isinstance(given, Mapping) else dict(given)
    time = None
    if settings.time_attr is not None:
        time = TimeRule(settings.time_attr, time_level(graph.manifest, settings.time_attr), settings.last)
    disjoint = settings.disjoint or time is not None
    return SampleSettings(every, replace=settings.replace, disjoint=disjoint, weight=settings.weight, time=time)


def columns_of(graph: Graph, settings: LoaderSettings) -> dict[AnyType, tuple[str, ...]]:
    """Rows to gather: features of the types that have some."""
    wanted: dict[AnyType, tuple[str, ...]] = {
        of: ("x",) for of, spec in graph.manifest.nodes.items() if "x" in spec.attrs
    }
    if settings.want_degree and not graph.manifest.hetero:
        wanted[HOMO_NODE] = (*wanted.get(HOMO_NODE, ()), "in_degree")
    return wanted


def labels_of(graph: Graph, settings: LoaderSettings) -> tuple[NodeType, tuple[str, ...]]:
    """Rows to gather of the seeds alone."""
    return settings.target, (("y",) if "y" in graph.manifest.nodes[settings.target].attrs else ())


def as_label(labels: Tensor) -> Tensor:
    """Integer labels as int64 (what cross entropy wants), others as they are."""
    whole = not (labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool)
    return labels.long() if whole else labels


def homo_blocks(subgraph: SampledSubgraph) -> tuple[Block, ...]:
    """Blocks of a homogeneous graph in layer order: the outermost hop first."""
    return tuple(_block(subgraph, HOMO_EDGE, hop) for hop in reversed(range(subgraph.num_hops)))


def hetero_blocks(subgraph: SampledSubgraph) -> tuple[dict[EdgeType, Block], ...]:
    """The same per edge type that has fanouts."""
    sampled = [of for of, edges in subgraph.edges.items() if edges.fanouts]
    return tuple({of: _block(subgraph, of, hop) for of in sampled} for hop in reversed(range(subgraph.num_hops)))


def _block(subgraph: SampledSubgraph, edge_type: EdgeType, hop: int) -> Block:
    indptr, indices, num_src = cut_block(subgraph, edge_type, hop)
    return Block(torch.from_numpy(indptr), torch.from_numpy(indices), num_src)
