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
from train_kit import sample_on
from trainer.core import shared_memory
from trainer.core.errors import PeerError, SettingsError
from trainer.core.ranks import Ranks, join_ranks
from trainer.core.remote_settings import CacheSize
from trainer.cuda import peer_rows, pinned_arrays
from trainer.cuda.availability import simulator_wanted
from trainer.graph import shared_device_cache
from trainer.graph.open import open_graph
from trainer.graph.seed_order import RankLayout
from trainer.graph.shared_device_cache import fill_device_cache
from trainer.loader.block_loader import BatchLoader, LoaderSettings
from trainer.train.device_sampling import SamplingPlan, choose_sampling
from trainer.train.job import batch_plan

CPU = torch.device("cpu")


def fill(graph, group, loader, size="20%", share="auto", why_cpu=""):
    plan = batch_plan(graph, loader)
    return fill_device_cache(graph, plan, CacheSize.parse(size), group, share, why_cpu)


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
    choice = sample_on(graph, {"train": loader}, "cuda", group)
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
    """If one rank cannot export or map rows, or reads them wrongly, each rank caches the rows that it requests most."""

    def fail(*_):
        raise RuntimeError("CUDA driver: CUDA_ERROR_NOT_SUPPORTED")

    alone = fill(graph, group, loaders[0], share="never")
    problems = {
        "open_rows": (1, fail, "rank 1: CUDA driver: CUDA_ERROR_NOT_SUPPORTED"),
        "export_rows": (0, fail, "rank 0: CUDA driver: CUDA_ERROR_NOT_SUPPORTED"),
        "ends_of": (1, lambda *_: b"other rows", "rank 0: the memory of another GPU is read wrongly"),
    }
    for name, (rank, broken, text) in problems.items():
        with patch.context() as wrong:
            if group.rank == rank:
                wrong.setattr(peer_rows, name, broken)
            filled = fill(graph, group, loaders[0])
            assert filled.text == f"{alone.text}; not shared: {text}", (name, filled.text)
            for of, rows in filled.rows.items():
                assert rows.shared is None and (rows.slots == alone.rows[of].slots).all()
            with pytest.raises((SettingsError, PeerError), match="always is not possible on rank .*: rank "):
                fill(graph, group, loaders[0], share="always")
    check_same_batches(graph, group, loaders, filled)


def check_choices(graph, group, loaders, patch):
    """``auto`` shares over NVLink only, ``always`` needs devices that can be read, ``never`` shares nothing."""
    alone = fill(graph, group, loaders[0], share="never")
    patch.setattr(shared_device_cache, "link_between", lambda *_: "pcie")
    assert fill(graph, group, loaders[0], share="auto").text == alone.text
    assert "read each other's rows" in fill(graph, group, loaders[0], share="always").text
    patch.setattr(shared_device_cache, "link_between", lambda *_: "")
    with pytest.raises((SettingsError, PeerError), match="always is not possible on rank . .*: it is in no group"):
        fill(graph, group, loaders[0], share="always")
    patch.setattr(shared_device_cache, "link_between", no_nvml)
    assert fill(graph, group, loaders[0]).text == f"{alone.text}; not shared: NVML cannot be loaded"
    patch.setattr(shared_device_cache, "link_between", lambda *_: "nvlink")
    why = "numba-cuda is not installed" if group.rank == 0 else ""
    with pytest.raises((SettingsError, PeerError), match="on rank 0 .*numba-cuda is not installed; use auto or never"):
        fill(graph, group, loaders[0], share="always", why_cpu=why)
    partly = fill(graph, group, loaders[0], why_cpu=why)  # of three ranks, two share
    assert ("the GPUs of ranks 1, 2" in partly.text) == (group.rank > 0), partly.text
    check_same_batches(graph, group, loaders, partly)


def no_nvml(*_):
    raise RuntimeError("NVML cannot be loaded")


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
            wrong.setattr(pinned_arrays.JoinedArray, "copy_to", denied)
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
        patch.setattr(shared_device_cache, "link_between", lambda *_: "nvlink")  # two ranks may use one GPU
        graph = open_graph(parts, ranks=ranks)
        target = next(of for of, spec in graph.manifest.nodes.items() if "train" in spec.splits)
        settings = LoaderSettings("train", (3, 2), 7 * ranks.world_size, target=target)
        loaders = [BatchLoader(graph, settings, ranks.rank, layout) for _ in range(2)]
        globals()[f"check_{case}"](graph, group, loaders, patch)
    print("same")


if __name__ == "__main__":
    main(*sys.argv[1:])
