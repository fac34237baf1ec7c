"""Test kit: ranks of a host share page-locked memory, and their batches are those of the CPU.

Usage: ``python tests/trainer/shared_memory_kit.py PARTS CASE``, as one rank of torchrun. The kernels run in numba's
simulator if ``NUMBA_ENABLE_CUDASIM=1`` is set, else on one or several GPUs.
"""

from __future__ import annotations

import os
import sys
from itertools import islice
from pathlib import Path

import pytest
import torch

from oracle import assert_identical
from train_kit import sample_on
from trainer.core.ranks import Ranks, join_ranks
from trainer.core.remote_settings import CacheSize
from trainer.cuda import shared_memory
from trainer.cuda.availability import simulator_wanted
from trainer.graph.cache_fill import device_rows
from trainer.graph.open import open_graph
from trainer.graph.seed_order import RankLayout
from trainer.loader.block_loader import BatchLoader, LoaderSettings
from trainer.train.device_sampling import SamplingPlan, choose_sampling
from trainer.train.job import batch_plan

CPU = torch.device("cpu")


def memory_of(tensor):
    """Return the inode of the memory-mapped file that a tensor is in."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, _, _, inode, *_ = line.split()
        begin, end = (int(each, 16) for each in span.split("-"))
        if begin <= tensor.data_ptr() < end:
            return inode
    raise AssertionError("no such memory")


def check_shared(graph, group, loaders, patch):
    """Ranks share one page-locked copy, each caches rows on its device, and the batches are those of the CPU."""
    loader, plain = loaders
    rows = device_rows(graph, batch_plan(graph, loader), CacheSize.parse("20%"), group.device)
    assert sum(len(each.rows) for each in rows.values()) > 0
    loader.keep(rows)
    choice = sample_on(graph, {"train": loader}, "cuda", group)
    assert choice.on_device, choice
    pinned = next(each._pinned.table for each in loader._device_sampler.features.values())
    assert len(set(group.gather(memory_of(pinned)))) == 1, "each rank has a copy of its own"
    for share in islice(plain.shares(1), 2):
        assert_identical(loader.load(share).to(CPU), plain.load(share))


def check_hosts(graph, group, loaders, patch):
    """Ranks that cannot map each other's memory make copies of their own; the first failing rank fails its group."""
    if group.rank == 2:
        patch.setattr(shared_memory, "map_shared", denied)
    loader = loaders[0]
    assert sample_on(graph, {"train": loader}, "cuda", group).on_device
    memory = group.gather(memory_of(next(each._pinned.table for each in loader._device_sampler.features.values())))
    assert memory[0] == memory[1] != memory[2], memory
    plan = SamplingPlan("auto", "pinned", "topology in pinned memory")
    assert choose_sampling(graph, {"train": loader}, plan, group).why.startswith("topology in pinned memory; rows of")
    assert loader._device_sampler.topology.place == "pinned"
    with patch.context() as wrong:
        if group.rank == 1:
            wrong.setattr(shared_memory.JoinedArray, "copy_to", denied)
        choice = choose_sampling(graph, {"train": loader}, plan, group)
    text = "rank 1: the GPU cannot be prepared: [Errno 13] not here"
    assert (choice.why == text) == (group.rank < 2) and choice.on_device == (group.rank == 2), choice
    cpu = SamplingPlan("auto", None, "no kernels") if group.rank == 0 else plan
    choice = choose_sampling(graph, {"train": loader}, cpu, group)
    assert choice.on_device == (group.rank > 0), choice


def denied(*_):
    raise PermissionError(13, "not here")


def main(parts, case):
    ranks = Ranks.from_env(os.environ)
    device = CPU if simulator_wanted() else torch.device("cuda", ranks.local_rank % torch.cuda.device_count())
    layout = RankLayout(ranks.world_size, (tuple(range(ranks.world_size)),))
    with pytest.MonkeyPatch.context() as patch, join_ranks(ranks, device, "gloo", 60) as group:
        graph = open_graph(parts, ranks=ranks)
        target = next(of for of, spec in graph.manifest.nodes.items() if "train" in spec.splits)
        settings = LoaderSettings("train", (3, 2), 7 * ranks.world_size, target=target)
        loaders = [BatchLoader(graph, settings, ranks.rank, layout) for _ in range(2)]
        globals()[f"check_{case}"](graph, group, loaders, patch)
    print("same")


if __name__ == "__main__":
    main(*sys.argv[1:])
