"""Test kit: fills the caches of several ranks' devices together, and compares batches with those of the CPU.

Usage: ``python tests/trainer/shared_cache_kit.py PARTS CASE``, as one rank of torchrun. The kernels run in numba's
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
from trainer.core.errors import PeerError, SettingsError
from trainer.core.ranks import Ranks, join_ranks
from trainer.core.remote_settings import CacheSize
from trainer.cuda import peer_rows
from trainer.cuda.availability import simulator_wanted
from trainer.graph import shared_device_cache
from trainer.graph.open import open_graph
from trainer.graph.seed_order import RankLayout
from trainer.graph.shared_device_cache import fill_device_cache
from trainer.loader.block_loader import BatchLoader, LoaderSettings
from trainer.train.device_sampling import choose_sampling
from trainer.train.job import batch_plan

CPU = torch.device("cpu")


def fill(graph, group, loader, size="20%", share="always", why_alone=""):
    plan = batch_plan(graph, loader)
    return fill_device_cache(graph, plan, CacheSize.parse(size), group, share, why_alone)


def memory_of(tensor):
    """Return the inode of the memory-mapped file that a tensor is in."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, _, _, inode, *_ = line.split()
        begin, end = (int(each, 16) for each in span.split("-"))
        if begin <= tensor.data_ptr() < end:
            return inode
    raise AssertionError("no such memory")


def check_same_batches(graph, group, loaders, filled):
    loader, plain = loaders
    loader.keep(filled.rows)
    choice = choose_sampling(graph, {"train": loader}, "cuda", group)
    assert choice.on_device, choice
    pinned = next(each._pinned.table for each in loader._device_sampler.features.values())
    assert len(set(group.gather(memory_of(pinned)))) == 1, "each rank has a copy of its own"
    for share in islice(plain.shares(1), 2):
        assert_identical(loader.load(share).to(CPU), plain.load(share))
    group.barrier()  # keeps this rank's rows until all have read them


def check_shared(graph, group, loaders, patch):
    """Every device caches other rows, and batches have the rows of all."""
    filled = fill(graph, group, loaders[0])
    listed = ", ".join(map(str, range(group.size)))
    assert filled.text.endswith(f"; the GPUs of ranks {listed} read each other's rows"), filled.text
    for of, rows in filled.rows.items():
        size = max(graph.manifest.nodes[of].num_nodes * group.size // 5, 1)
        own, every = (torch.from_numpy(slots >= 0) for slots in (rows.slots, rows.shared.slots))
        assert len(rows.shared.tables) == group.size and int(own.sum()) == len(rows.rows)
        counted = group.gather((int(own.sum()), own.nonzero().flatten().tolist()))
        assert sum(count for count, _ in counted) == int(every.sum()) <= size
        assert sorted(sum((ids for _, ids in counted), [])) == every.nonzero().flatten().tolist()
    check_same_batches(graph, group, loaders, filled)


def check_problems(graph, group, loaders, patch):
    """Rows that one rank cannot map, or reads wrongly, are not shared; every rank keeps its own."""

    def fail(*_):
        raise RuntimeError("CUDA driver: CUDA_ERROR_MAP_FAILED")

    with patch.context() as wrong:
        if group.rank == 0:
            wrong.setattr(peer_rows, "open_rows", lambda handle, count, width, device: torch.zeros(count, width))
        text = fill(graph, group, loaders[0]).text
        assert "; not shared with ranks 0, 1: rank 0: the memory of another GPU is read wrongly" in text, text
    if group.rank == 1:
        patch.setattr(peer_rows, "open_rows", fail)
    filled = fill(graph, group, loaders[0])
    assert "; not shared with ranks 0, 1: rank 1: CUDA driver: CUDA_ERROR_MAP_FAILED" in filled.text, filled.text
    assert all(rows.shared is None and len(rows.rows) for rows in filled.rows.values())
    check_same_batches(graph, group, loaders, filled)


def check_choices(graph, group, loaders, patch):
    """``auto`` shares over NVLink only, ``always`` needs devices that can be read, ``never`` shares nothing."""
    alone = fill(graph, group, loaders[0], share="never")
    patch.setattr(shared_device_cache, "link_between", lambda *_: "pcie")
    assert fill(graph, group, loaders[0], share="auto").text == alone.text
    assert "read each other's rows" in fill(graph, group, loaders[0], share="always").text
    patch.setattr(shared_device_cache, "link_between", lambda *_: "")
    with pytest.raises(
        (SettingsError, PeerError), match="share_device_cache: always is not possible on rank . .*its GPU"
    ):
        fill(graph, group, loaders[0], share="always")
    patch.setattr(shared_device_cache, "link_between", lambda *_: "nvlink")
    why = "numba-cuda is not installed" if group.rank == 0 else ""
    with pytest.raises((SettingsError, PeerError), match="on rank 0 .*numba-cuda is not installed; use auto or never"):
        fill(graph, group, loaders[0], share="always", why_alone=why)
    partly = fill(graph, group, loaders[0], share="auto", why_alone=why)  # of three ranks, two share
    assert ("the GPUs of ranks 1, 2" in partly.text) == (group.rank > 0), partly.text
    check_same_batches(graph, group, loaders, partly)


def main(parts, case):
    ranks = Ranks.from_env(os.environ)
    device = CPU if simulator_wanted() else torch.device("cuda", ranks.local_rank % torch.cuda.device_count())
    layout = RankLayout(ranks.world_size, (tuple(range(ranks.world_size)),))
    with pytest.MonkeyPatch.context() as patch, join_ranks(ranks, device, "gloo", 60) as group:
        patch.setattr(shared_device_cache, "link_between", lambda *_: "nvlink")  # two ranks may use one GPU
        graph = open_graph(parts, ranks=ranks)
        target = next(of for of, spec in graph.manifest.nodes.items() if "train" in spec.splits)
        settings = LoaderSettings("train", (3, 2), 7 * ranks.world_size, target=target)
        loaders = [BatchLoader(graph, settings, ranks.rank, layout) for _ in range(2)]
        globals()[f"check_{case}"](graph, group, loaders, patch)
    print("same")


if __name__ == "__main__":
    main(*sys.argv[1:])
