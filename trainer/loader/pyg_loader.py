"""Base classes of the loaders that return torch_geometric's batches.

A loader implements ``seeds``, the seeds of a rank for one step, and ``annotate``, which adds attributes about the seeds
to a batch.
"""

from __future__ import annotations

import hashlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch_geometric.sampler import HeteroSamplerOutput, SamplerOutput

from trainer.core.arrays import Ids
from trainer.core.batch_cost import Cost, CostSum
from trainer.core.errors import SettingsError
from trainer.core.ranks import RankGroup, Ranks
from trainer.core.rng import batch_key
from trainer.graph.open import Graph
from trainer.graph.prefetch import Sampler, ordered_ahead
from trainer.graph.seed_order import OTHER_STREAM, RankLayout, SeedOrder, SeedShare, shares
from trainer.loader.arguments import LoadOptions, OutputOptions, whole_number
from trainer.loader.block_loader import hetero_blocks, homo_blocks
from trainer.loader.link_ends import ROLE
from trainer.loader.node_seeds import as_array
from trainer.loader.pyg_batch import Attrs, LazyBlocks, Output, join_of, sampler_output
from trainer.sampler.rules import num_requests
from trainer.sampler.subgraph_sampler import SampledBatch
from trainer.sampler.types import SampleSettings, SeedSet

_TRAINER = str(Path(__file__).resolve().parents[1])

_COMPARED = 32  #: loaders of one place in the user's code that are compared

_EARLIER = "…"  #: in place of the digests of earlier loaders, if there are more

_made: dict[str, list[str]] = {}  #: digests of the loaders made at each place in the user's code


class SameOnAllRanks:
    """Checks that all ranks gave a loader the same seeds. No rank waits for another.

    The first rank to check publishes digests of the loaders that it has made at one place in the user's code: the lines
    of the user's functions that led there. Every other rank compares them with those of the loaders that it has made
    there. One rank may have made more loaders than the other, but not each of them one that the other lacks. After very
    many different loaders of one place this is not known.
    """

    def __init__(self, digest: str, rank: int, world_size: int):
        self._digest, self._rank, self._world_size = digest[:16], rank, world_size
        self._done = world_size == 1
        if self._done:
            return
        # File and line of each caller outside this package, the innermost first.
        frame: FrameType | None = sys._getframe(1)
        lines = []
        while frame is not None:
            if not frame.f_code.co_filename.startswith(_TRAINER):
                lines.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
            frame = frame.f_back
        self._made_at, self._place = lines[0], " ".join(lines)
        known = _made.setdefault(self._place, [])
        if self._digest not in known:
            known[:] = [_EARLIER, *known[2 - _COMPARED :]] if len(known) == _COMPARED else known
            known.append(self._digest)

    def check(self) -> None:
        """Raise ``SettingsError`` if another rank has different seeds or settings.

        Does nothing unless a process group has as many ranks as the loader.
        """
        if self._done or not (dist.is_available() and dist.is_initialized()):
            return
        if dist.get_world_size() != self._world_size:
            return
        # unlike ``get`` of the rendezvous store, ``compare_set`` does not block
        store, key = dist.distributed_c10d._get_default_store(), f"gnnfleet/loader/{self._place}"
        known = _made[self._place]
        own = f"{self._rank} {' '.join(known)}"
        found = store.compare_set(key, "", own).decode()
        first, *theirs = found.split()
        if first == str(self._rank):
            if found != own:  # made more loaders since
                store.compare_set(key, found, own)
            self._done = True
            return
        self._done = self._digest in theirs
        if not self._done and _EARLIER not in (*known, *theirs) and not set(theirs) <= set(known):
            raise SettingsError(
                f"the loader made at {self._made_at} has other seeds, times or settings on rank {self._rank} than on"
                f" rank {first}. Pass the same, complete seeds on every rank: the loader splits each batch"
                " over the ranks. Do not split seeds by rank, and shuffle them by shuffle=True."
                " For a loader of this rank alone, pass local=True"
            )


_NO_STEP = -2  #: step number of the batches of ``loader(index)``


@dataclass(frozen=True)
class BatchSeeds:
    seeds: SeedSet
    metadata: Any = None  #: ``metadata`` of torch_geometric's SamplerOutput


class RankLoader(ABC):
    """Yields for every step a batch from this rank's share of the global batch. One iteration is one epoch.

    The *inputs* of a loader are the seed nodes, links or clusters that it divides into batches. The position of an
    input is its index.
    """

    batch_sampler = None  #: as of a ``DataLoader`` without one; Lightning reads it

    def __init__(self, options: LoadOptions, order: SeedOrder, rank: int, layout: RankLayout, digest: str):
        self.options, self.order, self.rank, self.layout = options, order, rank, layout
        self.digest = hashlib.sha256(
            f"{digest} {order}".encode()
        ).hexdigest()  #: equal on ranks with equal seeds and settings
        self._same = SameOnAllRanks(self.digest, rank, layout.world_size)
        self._epoch = self._first_step = 0
        self.step_inputs = 0, 0  #: inputs of this rank and of all ranks in the batch that was yielded last

    @abstractmethod
    def part_of(self, positions: Ids) -> Ids:
        """Return the part of each input, int64 [n]."""

    @abstractmethod
    def work(self, share: SeedShare) -> Any:
        """Make a batch. Runs in a sampler thread. Raises ``ServiceError``."""

    @abstractmethod
    def finish(self, made: Any) -> Any:
        """Complete a batch that ``work`` made. Runs in the iterating thread."""

    @property
    @abstractmethod
    def threads(self) -> int: ...

    @property
    @abstractmethod
    def cost(self) -> Cost:
        """Cost of all batches made so far, also of batches made ahead: bytes, rows, and seconds of sampler threads."""

    @property
    @abstractmethod
    def patience(self) -> float:
        """Seconds that making a batch may take."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    @property
    def batch_size(self) -> int:
        return self.options.batch_size

    @property
    def dataset(self) -> range:
        """Positions of the inputs of all ranks."""
        return range(self.order.num_seeds)

    def __len__(self) -> int:
        return self.order.num_steps

    def set_epoch(self, epoch: int, first_step: int = 0) -> None:
        """Set the epoch of the next iteration.

        Args:
            epoch: Number of the epoch; the first is 0.
            first_step: Number of the first batch to yield, from 0. Later epochs begin at batch 0.
        """
        self._epoch = whole_number("epoch", epoch, None)
        self._first_step = whole_number("first_step", first_step, 0)

    def __iter__(self) -> Iterator[Any]:
        self._same.check()
        epoch, first = self._epoch, self._first_step
        self._epoch, self._first_step = epoch + 1, 0
        return self._batches(epoch, first)

    def __call__(self, index: Any) -> Any:
        """Return a batch of the inputs at the positions ``index``, for this rank alone.

        Calls with equal positions return equal batches within an epoch. Raises ``SettingsError`` for a position out of
        range.
        """
        positions = as_array(index)
        plain = positions.ndim == 1 and positions.dtype.kind in "iu"
        if not plain or (len(positions) and not 0 <= positions.min() <= positions.max() < len(self.dataset)):
            raise SettingsError(f"index: expected positions of inputs [n], from 0 to {len(self.dataset) - 1}")
        o, n = self.order, len(positions)
        key = batch_key(o.seed, o.stream, self._epoch, _NO_STEP)
        own = positions.astype(np.int64)
        share = SeedShare(_NO_STEP, key, n, own, np.arange(n), own)
        return self.finish(self.work(share))

    def shares(self, epoch: int, first_step: int = 0) -> Iterator[SeedShare]:
        """Yield the inputs of this rank for every step of an epoch, from ``first_step`` on."""
        return shares(self.order, self.part_of, self.rank, self.layout, epoch, first_step)

    def work_items(self, epoch: int, first_step: int) -> Iterator[Any]:
        """Yield one item for every step, from ``first_step`` on. ``share`` returns this rank's inputs for an item."""
        return self.shares(epoch, first_step)

    def share(self, item: Any) -> SeedShare:
        """Return this rank's inputs for one of ``work_items()``. Runs in a sampler thread. Raises ``ServiceError``."""
        share: SeedShare = item
        return share

    def group(self) -> RankGroup:
        """Return the process group if it has the loader's number of ranks, else a group of this rank alone.

        All ranks must call this method.
        """
        world_size = self.layout.world_size
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() == world_size:
            return RankGroup.of_process(Ranks(self.rank, world_size))
        return RankGroup(Ranks())

    def _batches(self, epoch: int, first_step: int) -> Iterator[Any]:
        o = self.options

        def work(item: Any) -> tuple[tuple[int, int], Any]:
            share = self.share(item)
            return (len(share.positions), share.global_seeds), self.work(share)

        def finish(made: tuple[tuple[int, int], Any]) -> Any:
            self.step_inputs = made[0]
            return self.finish(made[1])

        ahead = ordered_ahead(
            work, self.work_items(epoch, first_step), threads=self.threads, ahead=o.prefetch, deadline=self.patience,
            thread_init=o.thread_init,
        )  # fmt: skip
        with closing(ahead):
            yield from map(finish, ahead)  # keeps no reference to a yielded batch


class PyGLoader(RankLoader):
    _by_owner = False  #: whether ``batch`` of disjoint batches counts links or anchors, not seeds

    def __init__(
        self, graph: Graph, num_inputs: int, digest: str, settings: SampleSettings, attrs: Attrs,
        options: LoadOptions, output: OutputOptions, *, stream: int = OTHER_STREAM, rank: int | None = None,
        layout: RankLayout | None = None, keyed: bool = False,
    ):  # fmt: skip
        self.graph, self.settings, self.output_options = graph, settings, output
        rank, layout = _rank_and_layout(graph, options.local, rank, layout)
        world = layout.world_size
        order = SeedOrder(
            num_inputs, options.batch_size * world, options.seed, options.shuffle, stream, options.drop_last, world,
            keyed,
        )  # fmt: skip
        # of a graph in memory, ``join_of`` takes the attributes
        self.sampler = self.make_sampler(attrs if graph.source is None else {})
        self._join = join_of(graph, attrs, output.custom_cls)
        self.costs = CostSum()
        super().__init__(options, order, rank, layout, f"{digest} {settings}")

    @property
    def cost(self) -> Cost:
        return self.costs.sum

    def make_sampler(self, attrs: Attrs) -> Sampler:
        return self.graph.sampler(self.settings, attrs)

    @abstractmethod
    def seeds(self, share: SeedShare) -> BatchSeeds:
        """Return the seed nodes of a rank for one step. Raises ``ServiceError``."""

    @abstractmethod
    def annotate(self, data: Any, out: Output) -> None:
        """Add attributes about the seeds (``out.metadata``) to a batch."""

    def output(self, sampled: SampledBatch, seeded: BatchSeeds) -> Output:
        """Convert a subgraph to torch_geometric's sampler output, with metadata about the seeds."""
        copy_ids = self.output_options.transform_sampler_output is not None
        out = sampler_output(sampled, self.graph.manifest.hetero, self.settings.induced, copy_ids)
        out.metadata = seeded.metadata
        if self._by_owner and out.batch is not None:
            # ``out.batch`` has the seed of each node's tree; links and anchors have several.
            places = np.concatenate(list(seeded.seeds.trees.values())) % ROLE
            owner = torch.from_numpy(np.unique(places, return_inverse=True)[1].reshape(-1))  # ranks of the places
            is_dict = isinstance(out.batch, dict)
            out.batch = {of: owner[trees] for of, trees in out.batch.items()} if is_dict else owner[out.batch]
        return out

    @property
    def num_requests(self) -> int:
        """Largest number of consecutive requests for one batch. ``patience`` is proportional to it."""
        return num_requests(self.graph.manifest, self.settings)

    @property
    def threads(self) -> int:
        return self.graph.threads(self.options.threads, self.options.prefetch)

    @property
    def patience(self) -> float:
        return self.graph.patience(self.options.deadline, self.num_requests)

    @property
    def _joins_late(self) -> bool:
        return self.output_options.transform_sampler_output is not None and not self.output_options.on_threads

    def work(self, share: SeedShare) -> Any:
        seeded = self.seeds(share)
        sampled = self.sampler.sample(seeded.seeds, share.key)
        self.costs.add(sampled.cost)
        if self._joins_late:
            return seeded, sampled
        data = self._joined(seeded, sampled)
        return self._transformed(data) if self.output_options.on_threads else data

    def finish(self, made: Any) -> Any:
        data = self._joined(*made) if self._joins_late else made
        if not self.output_options.on_threads:
            data = self._transformed(data)
        return data.pin_memory() if self.options.pin_memory and torch.cuda.is_available() else data

    def _transformed(self, data: Any) -> Any:
        return data if self.output_options.transform is None else self.output_options.transform(data)

    def _joined(self, seeded: BatchSeeds, sampled: SampledBatch) -> Any:
        o, out = self.output_options, self.output(sampled, seeded)
        if o.subgraph_type == "bidirectional":
            out = out.to_bidirectional()
        if o.transform_sampler_output is not None:
            out = o.transform_sampler_output(out)
            if not isinstance(out, (SamplerOutput, HeteroSamplerOutput)):
                raise SettingsError(
                    "transform_sampler_output must return a SamplerOutput or HeteroSamplerOutput, not"
                    f" {type(out).__name__}"
                )
        data = self._join(out, sampled)
        if isinstance(out, SamplerOutput):
            if "n_id" not in data:
                data.n_id = out.node
            if out.edge is not None and "e_id" not in data:
                data.e_id = out.edge
            data.batch = out.batch
            data.num_sampled_nodes, data.num_sampled_edges = out.num_sampled_nodes, out.num_sampled_edges
        else:
            for ids, name in ((out.node, "n_id"), (out.edge or {}, "e_id")):
                for of, values in ids.items():
                    if values is not None and name not in data[of]:
                        data[of][name] = values
            for name in ("batch", "num_sampled_nodes", "num_sampled_edges"):
                data.set_value_dict(name, getattr(out, name))
        # with another type or a transform, blocks would not match the batch's edges
        if o.subgraph_type == "directional" and o.transform_sampler_output is None:
            subgraph, cut = sampled.subgraph, hetero_blocks if self.graph.manifest.hetero else homo_blocks
            data.blocks = LazyBlocks(subgraph.num_hops, partial(cut, subgraph))
        self.annotate(data, out)
        return data


def _rank_and_layout(graph: Graph, local: bool, rank: int | None, layout: RankLayout | None) -> tuple[int, RankLayout]:
    num_parts = graph.manifest.num_parts
    if local:
        if rank is not None or layout is not None:
            raise SettingsError("local=True makes a loader of this process alone; leave rank and layout out")
        return 0, RankLayout.single(num_parts)
    if rank is not None and layout is None:
        raise SettingsError(
            "rank is given without layout. Leave rank out to use the rank of the process group; for a loader of this"
            " rank alone pass local=True"
        )
    rank, layout = graph.ranks.rank if rank is None else rank, layout or graph.layout
    layout.check(rank, num_parts)
    return rank, layout
