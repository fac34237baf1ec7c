"""Tests of attribute rows kept on the device and of copies to a GPU; tests that need CUDA are skipped without it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from cache_kit import hosts
from oracle import assert_identical
from train_kit import job, write_parts
from trainer.core import slabs
from trainer.core.batch import Batch, DeviceRows, HeteroBatch, KeptRows
from trainer.core.errors import SettingsError
from trainer.core.remote_settings import CacheSize
from trainer.core.schema import NodeType
from trainer.graph.cache_fill import device_rows
from trainer.graph.device import feed, tensors_of
from trainer.graph.open import Graph, open_graph
from trainer.graph.seed_order import RankLayout
from trainer.loader.block_loader import BatchLoader, LoaderSettings
from trainer.partition.make import PartitionSpec, make_partition
from trainer.sampler.types import RowRequest
from trainer.store.row_cache import CachedRows
from trainer.train.job import batch_plan, train

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=["synthetic", "synthetic-hetero"])
def graph(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Graph:
    folder = tmp_path_factory.mktemp("parts") / "parts"
    make_partition(PartitionSpec(request.param, str(folder), None, {"num_nodes": 2000}, 2, "random"))
    return open_graph(folder)


def loader_of(graph: Graph) -> BatchLoader:
    target = next(of for of, spec in graph.manifest.nodes.items() if "train" in spec.splits)
    return BatchLoader(graph, LoaderSettings("train", (4, 3), 64, target=target), 0, RankLayout.single(2))


def kept_of(graph: Graph, share: float, device: torch.device = CPU) -> dict[NodeType, DeviceRows]:
    found = {}
    for of, spec in graph.manifest.nodes.items():
        if "x" in spec.attrs:
            ids = np.random.default_rng(0).permutation(spec.num_nodes)[: int(share * spec.num_nodes)]
            (rows,) = graph.access.gather([RowRequest(of, ids, ("x",))])
            slots = CachedRows.of(ids, {}, spec.num_nodes).slots
            found[of] = DeviceRows(slots, torch.from_numpy(rows["x"]).float().to(device))
    return found


def all_moved(loader: BatchLoader, device: torch.device = CPU) -> list[Batch | HeteroBatch]:
    return [batch.to(device) for batch in loader.epoch(1)]


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_batches_are_the_same_with_rows_kept_on_the_device(graph: Graph, share: float) -> None:
    loader, plain = loader_of(graph), all_moved(loader_of(graph))
    loader.keep(kept_of(graph, share))
    before = list(loader.epoch(1))
    for batch, expected in zip(before, plain, strict=True):
        rows, whole = _num_rows(batch), _num_rows(expected)
        assert rows == whole if share == 0 else rows < whole if share < 1 else rows == 0
        assert_identical(batch.to(CPU), expected)


def _num_rows(batch: Batch | HeteroBatch) -> int:
    return len(batch.x) if isinstance(batch, Batch) else sum(map(len, batch.x.values()))


def test_joined_puts_each_row_in_its_place() -> None:
    slots, missing = torch.tensor([1, -1, 0, -1], dtype=torch.int32), torch.tensor([1, 3])
    kept = KeptRows(slots, missing, torch.tensor([[10.0], [11.0]]))
    assert kept.joined(torch.tensor([[1.0], [2.0]])).tolist() == [[11.0], [1.0], [10.0], [2.0]]


def test_a_batch_for_the_cpu_is_not_copied(graph: Graph) -> None:
    batch = next(loader_of(graph).epoch(1))
    assert feed(CPU)(batch) is batch and len(list(tensors_of(batch))) > 5


def test_a_process_has_one_copy_stream_per_device(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "Stream", made.append)
    monkeypatch.setattr(slabs, "use_pinned", lambda: None)
    devices = [torch.device("cuda", index) for index in (0, 1)]
    try:
        assert feed(devices[0]) is feed(torch.device("cuda", 0)) is not feed(devices[1])
        assert made == devices
    finally:
        feed.cache_clear()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_batches_on_a_gpu_equal_those_on_the_cpu(graph: Graph, tmp_path: Path) -> None:
    device = torch.device("cuda", 0)
    loader, bring = loader_of(graph), feed(device)
    loader.keep(kept_of(graph, 0.3, device))
    for batch, expected in zip(loader.epoch(1), all_moved(loader_of(graph)), strict=True):
        moved = bring(batch)
        assert all(tensor.is_cuda for tensor in tensors_of(moved))
        assert_identical(moved.to(CPU), expected)


def test_the_most_requested_rows_are_kept_up_to_the_cache_size(graph: Graph) -> None:
    loader = loader_of(graph)
    plan = batch_plan(graph, loader)
    rows = device_rows(graph, plan, CacheSize.parse("20%"), CPU)
    whole = device_rows(graph, plan, CacheSize.parse("100%"), CPU)
    every = [4 * int(np.prod(spec.attrs["x"].shape)) for spec in graph.manifest.nodes.values() if "x" in spec.attrs]
    assert 0 < sum(kept.rows.nbytes for kept in rows.values()) <= 0.2 * sum(every)
    loader.keep(rows)
    left = sum(map(_num_rows, loader.epoch(1))) / sum(map(_num_rows, loader_of(graph).epoch(1)))
    assert left < 0.8, "no better than rows picked at random"
    loader.keep(whole)
    assert [_num_rows(batch) for batch in loader.epoch(1)] == [0] * len(loader)
    assert device_rows(graph, plan, CacheSize.parse("0"), CPU) == {}


def test_training_with_rows_on_the_device_gives_the_same_losses(tmp_path: Path) -> None:
    parts = write_parts(tmp_path / "parts")
    curves = [train(job(parts, tmp_path / share, epochs=1, device_cache=share)).step_loss for share in ("0", "30%")]
    assert torch.equal(*(curve[0] for curve in curves))


def test_rows_of_other_hosts_stay_on_the_device_with_partitioned_topology(tmp_path: Path) -> None:
    graph = hosts(write_parts(tmp_path / "parts", 2), 2, "partitioned")[0]
    loader, plain = (BatchLoader(graph, LoaderSettings("train", (4, 3), 64), 0, graph.layout) for _ in range(2))
    loader.keep(device_rows(graph, batch_plan(graph, loader), CacheSize.parse("30%"), CPU))
    for batch, expected in zip(loader.epoch(1), plain.epoch(1), strict=True):
        assert _num_rows(batch) < 0.7 * _num_rows(expected)
        assert_identical(batch.to(CPU), expected)


def test_an_invalid_cache_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="device_cache: expected a share of all rows .*, found 'half'"):
        job(tmp_path, tmp_path, device_cache="half")
