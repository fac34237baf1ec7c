"""``DistZipLoader``: torch_geometric's ``ZipLoader`` for the loaders of this package."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from trainer.core.arrays import Ids
from trainer.core.batch_cost import Cost, CostSum
from trainer.core.errors import SettingsError
from trainer.core.rng import GOLDEN, hashed
from trainer.graph.seed_order import OTHER_STREAM, GlobalBatch, SeedOrder, SeedShare, global_batches
from trainer.loader.arguments import load_options
from trainer.loader.graph_saint import GraphSAINTSampler
from trainer.loader.pyg_loader import PyGLoader, RankLoader


class DistZipLoader(RankLoader):
    """Yield tuples with one batch from each of several loaders. All batches of a tuple have the same input positions.

    A position is an index into the inputs of each loader. Positions end where the loader with the fewest inputs ends.
    Each global batch of positions is split over the ranks as by ``DistNeighborLoader``; the parts of the first loader's
    inputs decide. The loaders draw independently, even if they have the same random seed.

    Args:
        loaders: Loaders of this package, except GraphSAINT samplers, which have no inputs. Their ranks, or
            ``local=True``, also apply to this loader; their ``batch_size``, ``shuffle``, ``drop_last`` and ``threads``
            have no effect.
        filter_per_worker: As in ``DistNeighborLoader``, for all loaders. Default: the setting of each loader.
        seed: Random seed of the order and of all draws; the same on every rank. Default: 0.
        threads: Number of sampler threads. Default: ``num_workers``, at least 1.
        prefetch: Number of tuples to make ahead. Default: ``prefetch_factor`` (3) per thread.
        deadline: Seconds that one request to another host may take.
        **kwargs: Arguments of torch's ``DataLoader``, as in ``DistNeighborLoader``.

    Raises:
        SettingsError: The loaders cannot be combined, or an argument is invalid.
        ServiceError: Another host fails while iterating.

    Example:
        ```python
        import gnnfleet as gf

        graph = gf.open("parts")
        near = gf.DistNeighborLoader(graph, [5], "train")
        far = gf.DistNeighborLoader(graph, [5, 5], "train")
        for one_hop, two_hops in gf.DistZipLoader([near, far], batch_size=64):
            same_seeds = one_hop.input_id.equal(two_hops.input_id)
        ```
    """

    def __init__(
        self, loaders: Sequence[PyGLoader], filter_per_worker: bool | None = None, *, seed: int | None = None,
        threads: int | None = None, prefetch: int | None = None, deadline: float = 120.0, **kwargs: Any,
    ):  # fmt: skip
        loaders = list(loaders)
        if not loaders:
            raise SettingsError("loaders is empty; pass at least one loader")
        first = loaders[0]
        for loader in loaders:
            if not isinstance(loader, PyGLoader):
                raise SettingsError(
                    f"loaders: {type(loader).__name__} is not a loader of gnnfleet; use torch_geometric's ZipLoader"
                )
            if isinstance(loader, GraphSAINTSampler):
                raise SettingsError(
                    f"loaders: {type(loader).__name__} draws its own nodes and has no inputs, so it cannot be zipped;"
                    " leave it out"
                )
            if (loader.rank, loader.layout.world_size) != (first.rank, first.layout.world_size):
                raise SettingsError("loaders: all must use the same ranks; pass local=True to all of them or to none")
        self.loaders = [copy(loader) for loader in loaders]  # the caller's loaders stay as they are
        options = load_options(kwargs, seed=seed, threads=threads, prefetch=prefetch, deadline=deadline)
        if options.local:
            raise SettingsError("local: DistZipLoader uses the ranks of its loaders; pass local=True to each of them")
        for loader in self.loaders:
            loader.costs = CostSum()
            if filter_per_worker is not None:
                loader.output_options = replace(loader.output_options, on_threads=bool(filter_per_worker))
        num_inputs, world = min(len(loader.dataset) for loader in self.loaders), first.layout.world_size
        order = SeedOrder(
            num_inputs, options.batch_size * world, options.seed, options.shuffle, OTHER_STREAM, options.drop_last,
            world, any(loader.order.keyed for loader in self.loaders),
        )  # fmt: skip
        digests = " ".join(loader.digest for loader in self.loaders)
        super().__init__(options, order, first.rank, first.layout, digests)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(loaders={self.loaders})"

    @property
    def cost(self) -> Cost:
        return Cost.total(loader.cost for loader in self.loaders)

    @property
    def threads(self) -> int:
        o = self.options
        return max(loader.graph.threads(o.threads, o.prefetch) for loader in self.loaders)

    @property
    def patience(self) -> float:
        return sum(loader.graph.patience(self.options.deadline, loader.num_requests) for loader in self.loaders)

    def part_of(self, positions: Ids) -> Ids:
        return self.loaders[0].part_of(positions)

    def work_items(self, epoch: int, first_step: int) -> Iterator[GlobalBatch]:
        # Sampler threads split the batches, because ``part_of`` may ask other hosts.
        return global_batches(self.order, epoch, first_step)

    def share(self, item: GlobalBatch) -> SeedShare:
        return item.share(self.part_of(item.positions), self.rank, self.layout)

    def work(self, share: SeedShare) -> Any:
        made = [self.loaders[0].work(share)]
        for number, loader in enumerate(self.loaders[1:], start=1):
            key = int(hashed(np.uint64(share.key) ^ hashed(np.uint64(number) + GOLDEN)))
            made.append(loader.work(replace(share, key=key)))
        return made

    def finish(self, made: Any) -> Any:
        batches = tuple(loader.finish(batch) for loader, batch in zip(self.loaders, made, strict=True))
        pinned = self.options.pin_memory and torch.cuda.is_available()
        return tuple(batch.pin_memory() for batch in batches) if pinned else batches
