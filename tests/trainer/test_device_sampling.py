"""Tests of sampling and gathering by CUDA kernels, which run in numba's simulator in processes of their own."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from threading import Barrier, Thread
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from cache_kit import hosts
from forked import REPOSITORY, fork
from train_kit import sample_on, write_parts
from trainer.core.errors import SettingsError
from trainer.core.ranks import RankGroup, Ranks
from trainer.core.schema import HOMO_NODE
from trainer.cuda.availability import why_no_kernels
from trainer.cuda.device_sampler import StreamPool
from trainer.cuda.features import PinnedPlan
from trainer.cuda.shared_memory import HostArrays
from trainer.cuda.topology import TopologyPlan
from trainer.graph.open import open_graph
from trainer.loader import block_loader
from trainer.loader.block_loader import BatchLoader, BlockLoader, LoaderSettings
from trainer.loader.link_block_loader import LinkBlockLoader, LinkBlockSettings
from trainer.loader.link_seeds import link_inputs
from trainer.sampler import multi_hop
from trainer.sampler.subgraph_sampler import SampledBatch
from trainer.sampler.types import SampledSubgraph, SeedSet
from trainer.train import device_sampling
from trainer.train.device_sampling import why_not

CPU = torch.device("cpu")
_RUN = "import numba.core.config as c; c.reload_config(); import sys, cuda_kit; cuda_kit.main(sys.argv[1:])"


def simulated(*words: str) -> None:
    """Run checks of ``cuda_kit`` in a forked process, in which the simulator is on."""
    paths = f"{REPOSITORY}:{REPOSITORY / 'tests'}:{Path(__file__).parent}"
    process = fork(["-c", _RUN, *words], {**os.environ, "NUMBA_ENABLE_CUDASIM": "1", "PYTHONPATH": paths})
    process.wait(280)
    assert process.returncode == 0, process.output[-3000:]
    assert process.output.endswith("same\n"), process.output[-3000:]


def test_kernels_sample_the_same_subgraphs_as_the_cpu() -> None:
    simulated("hetero", "0", "homo", "1", "hubs", "0", "errors", "0")


@pytest.mark.slow
def test_batches_of_kernels_equal_those_of_the_cpu() -> None:
    simulated("batches", "2", "links", "0", "training", "0", "wrong-batch", "0")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_samples_the_same_batches_as_the_cpu() -> None:
    words = ["hetero", *map(str, range(20)), "homo", *map(str, range(20)), "hubs", "0", "errors", "0"]
    words += ["batches", *map(str, range(6)), "links", "0", "training", "0"]
    paths = f"{REPOSITORY}:{REPOSITORY / 'tests'}:{Path(__file__).parent}"
    script = [sys.executable, str(Path(__file__).parent / "cuda_kit.py"), *words]
    subprocess.run(script, cwd=REPOSITORY, env={**os.environ, "PYTHONPATH": paths}, check=True, timeout=280)


@pytest.mark.slow
@pytest.mark.parametrize("share", range(10))
def test_two_hundred_random_graphs(share: int) -> None:
    simulated("hetero", *map(str, range(share, 100, 10)), "homo", *map(str, range(share, 100, 10)))


@pytest.mark.slow
def test_batches_of_every_type_of_rows() -> None:
    simulated("batches", *map(str, range(12)), "links", "1", "2", "training", "1")


def test_the_place_of_the_topology_follows_from_its_bytes() -> None:
    free = (10**9, 0), (10**8, 10**9), (10**8, 10**9 - 1)
    assert [TopologyPlan.choose(10**9, *each).place for each in free] == ["device", "pinned", None]
    why = TopologyPlan.choose(10**10, 10**8, 10**9).why
    assert "10.0 GB fits neither in the 100 MB that may be used on the device nor in the 1.0 GB of pinned" in why


def test_rows_that_do_not_fit_in_pinned_memory_are_gathered_by_the_cpu(tmp_path: Path) -> None:
    store = open_graph(write_parts(tmp_path / "parts")).store
    needed = 600 * 48  # bytes of the rows
    assert PinnedPlan.choose(store, {HOMO_NODE: ("x",)}, needed).pinned == ((HOMO_NODE, "x"),)
    small = PinnedPlan.choose(store, {HOMO_NODE: ("x",)}, needed - 1)
    assert small.pinned == () and small.why.startswith("x of node gathered by the CPU: 0 MB are more than the 0 MB")


def test_sampling_on_the_cpu_imports_no_kernels(tmp_path: Path) -> None:
    parts = write_parts(tmp_path / "parts")
    code = f"""
import sys
from pathlib import Path
from trainer.train.job import train
from trainer.train.settings import TrainJob, TrainSettings
train(TrainJob(TrainSettings(fanouts=(2,), epochs=1, hidden=4), Path({str(parts)!r}), Path({str(tmp_path)!r})))
loaded = [name for name in sys.modules if name.startswith(("numba.cuda", "trainer.cuda"))]
assert loaded == [], loaded
"""
    process = fork(["-c", code], dict(os.environ))
    process.wait()
    assert process.returncode == 0, process.output


def test_what_the_device_cannot_sample_is_named(tmp_path: Path) -> None:
    graph = open_graph(write_parts(tmp_path / "parts", 2))
    loaders = {"train": BatchLoader(graph, LoaderSettings("train", (2,), 64), 0, graph.layout)}
    assert sample_on(graph, loaders, "auto", RankGroup(Ranks(), CPU)).why == ""
    assert not sample_on(graph, loaders, "cpu", RankGroup(Ranks(), torch.device("cuda", 0))).on_device
    with pytest.raises(SettingsError, match="sampling: cuda is not possible on this rank: this rank trains on the CPU"):
        sample_on(graph, loaders, "cuda", RankGroup(Ranks(), CPU))
    partitioned = hosts(tmp_path / "parts", 2, "partitioned")[0]
    assert why_not(partitioned, torch.device("cuda", 0)) == (
        "the edges of 1 of 2 parts are not on this host (data.topology: replicated)"
    )


def test_batches_with_missing_labels_are_equal_to_themselves() -> None:
    y, ids = torch.tensor([[1.0, torch.nan], [torch.nan, 2.0]]), torch.arange(4)
    assert device_sampling._equal(y, y.clone()) and device_sampling._equal(ids, ids.clone())
    for other in (y.nan_to_num(), y.double(), y[:1], torch.where(y == 1, torch.nan, y), torch.where(y == 1, 3, y)):
        assert not device_sampling._equal(y, other)
    assert not device_sampling._equal(ids, ids.flip(0))


@pytest.mark.parametrize("failing", ["_place", "_allocate", "_use_device"])
def test_auto_samples_on_the_cpu_if_the_device_cannot_be_prepared(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = open_graph(write_parts(tmp_path / "parts"))
    loaders = {"train": BatchLoader(graph, LoaderSettings("train", (2,), 64), 0, graph.layout)}

    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error: out of\nmemory")

    monkeypatch.setattr(device_sampling, "_place", lambda *_: ("device", ""))
    monkeypatch.setattr(device_sampling, failing, fail)
    monkeypatch.setattr(HostArrays, "lock", lambda self, device: {})
    choice = sample_on(graph, loaders, "auto", RankGroup(Ranks(), torch.device("cuda", 0)))
    assert str(choice) == "sampling on the CPU: the GPU cannot be prepared: CUDA error: out of memory"
    with pytest.raises(RuntimeError, match="out of"):
        sample_on(graph, loaders, "cuda", RankGroup(Ranks(), torch.device("cuda", 0)))


@pytest.mark.parametrize("links", [False, True])
def test_blocks_are_cut_on_the_stream_on_which_their_edges_were_sampled(
    links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, inside, cut = open_graph(write_parts(tmp_path / "parts")), list[bool](), list[int]()
    settings = LoaderSettings("train", (2, 2), 64)
    loader: BlockLoader = BatchLoader(graph, settings, 0, graph.layout)
    if links:
        given = link_inputs(graph, None)
        loader = LinkBlockLoader(graph, settings, given, LinkBlockSettings(4, True), 0, graph.layout)

    @contextmanager
    def stream() -> Iterator[None]:
        inside.append(True)
        yield
        inside.pop()

    class Recorded:
        def sample(self, seeds: SeedSet, key: int) -> SampledBatch:
            assert inside
            return loader.host_sampler.sample(seeds, key)

        def subgraph(self, seeds: SeedSet, key: int) -> SampledSubgraph:
            raise NotImplementedError

    def cut_block(*args: Any) -> Any:
        cut.append(len(inside))
        return multi_hop.cut_block(*args)

    monkeypatch.setattr(block_loader, "cut_block", cut_block)
    loader.sample_with(Recorded(), stream)
    assert next(iter(loader.epoch(1))).blocks and cut[:2] == [1, 1]


class Stream:
    """A fake ``torch.cuda.Stream``."""

    made: ClassVar[list[Stream]] = []

    def __init__(self, device: torch.device):
        self.waits = 0
        Stream.made.append(self)

    def synchronize(self) -> None:
        self.waits += 1


@pytest.fixture
def fake_streams(monkeypatch: pytest.MonkeyPatch) -> list[Stream]:
    monkeypatch.setattr(Stream, "made", [])
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    return Stream.made


def test_threads_of_later_epochs_use_the_same_streams(fake_streams: list[Stream]) -> None:
    pool, both = StreamPool(torch.device("cuda", 0)), Barrier(2)

    def work() -> None:
        for _ in range(3):
            with pool.stream():
                both.wait(30)

    for _ in range(4):
        threads = [Thread(target=work) for _ in range(2)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
    assert len(fake_streams) == 2, "two threads at a time"
    assert sum(stream.waits for stream in fake_streams) == 4 * 2 * 3


def test_a_context_within_another_uses_its_stream_and_errors_return_it(fake_streams: list[Stream]) -> None:
    pool = StreamPool(torch.device("cuda", 0))
    with pool.stream(), pool.stream():
        pass
    with pytest.raises(ValueError), pool.stream(), pool.stream():
        raise ValueError
    with pool.stream():
        pass
    (stream,) = fake_streams
    assert stream.waits == 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_driver_is_named() -> None:
    assert why_no_kernels(torch.device("cuda", 0)).startswith("numba-cuda finds no usable CUDA driver")


def test_tensors_are_passed_to_kernels_without_copies() -> None:
    from trainer.cuda.launch import _DeviceView

    strided = torch.arange(12, dtype=torch.float32).reshape(3, 4)[:, ::2]
    view = _DeviceView.of(strided).__cuda_array_interface__
    assert view["data"] == (strided.data_ptr(), False) and view["strides"] == (16, 8) and view["typestr"] == "<f4"
    assert _DeviceView.of(torch.zeros(2, dtype=torch.bfloat16)).__cuda_array_interface__["typestr"] == "<u2"
    typeof = importlib.import_module("numba.cuda.typing.typeof").typeof
    for dtype in (torch.float32, torch.int32, torch.bool, torch.bfloat16):
        for shape in ((6,), (2, 3), (0, 3)):
            given = _DeviceView.of(torch.zeros(shape, dtype=dtype))
            assert given._numba_type_ == typeof(
                SimpleNamespace(__cuda_array_interface__=given.__cuda_array_interface__)
            )
    far = _DeviceView.of(torch.zeros(3, 4, 8)[:, :, 0])._numba_type_
    assert far.layout == _DeviceView.of(strided)._numba_type_.layout == "A"
    empty = _DeviceView.of(torch.empty(0, dtype=torch.int32)).__cuda_array_interface__
    assert empty["shape"] == (0,) and empty["data"][0] != 0
