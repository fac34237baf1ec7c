"""The measurements of benchmarks/gpu.py, in sections. Each section yields the rows of one result table."""

from __future__ import annotations

import platform
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE

import trainer.nn.kernels.rows as kernel_rows
from bench_training import products
from graphs import BATCH, FANOUTS, partitioned
from table import Row
from trainer.core.batch import Batch, DeviceRows
from trainer.core.memory import size_text
from trainer.core.ranks import RankGroup, Ranks
from trainer.core.schema import HOMO_EDGE, HOMO_NODE
from trainer.cuda.features import FeatureRows
from trainer.graph.device import feed, tensors_of
from trainer.graph.open import Graph, open_graph
from trainer.graph.seed_order import RankLayout, SeedShare
from trainer.loader.block_loader import BatchLoader, LoaderSettings
from trainer.loader.neighbor_loader import DistNeighborLoader
from trainer.nn.graph_facts import facts_of
from trainer.nn.models import build_model
from trainer.partition.make import PartitionSpec, make_partition
from trainer.sampler.types import RowRequest
from trainer.train.device_sampling import choose_sampling, plan_sampling
from trainer.train.settings import TrainSettings

TINY = {"num_nodes": 60, "avg_degree": 6.0, "num_classes": 4, "num_features": 8, "train": 8}  #: for the simulator

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Setup:
    """The graph, model size and device with which everything is measured."""

    device: torch.device
    graph: Graph
    simulated: bool
    fanouts: tuple[int, ...]
    batch: int  #: seeds of a step
    hidden: int
    batches: int  #: number of batches per measurement
    repeats: int  #: number of times that each measurement is repeated; the median counts

    @classmethod
    @contextmanager
    def of(cls, device: torch.device, small: bool, simulated: bool) -> Iterator[Setup]:
        """Open a graph: a tiny one if ``simulated``, else the small or large graph of ``benchmarks/graphs.py``."""
        if not simulated:
            with open_graph(partitioned(small, 1)) as graph:
                yield cls(device, graph, simulated, FANOUTS, BATCH, 256, 8, 5)
            return
        folder = Path(tempfile.mkdtemp())
        try:
            options = {name: str(value) for name, value in TINY.items()}
            make_partition(PartitionSpec("synthetic", str(folder / "parts"), None, options, 1, "random"))
            with open_graph(folder / "parts") as graph:
                yield cls(device, graph, simulated, (2, 2), 4, 4, 2, 1)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def loader(self, sampling: str) -> BatchLoader:
        """Return a loader of train batches that samples on the CPU or, for ``cuda``, on the device."""
        settings = LoaderSettings("train", self.fanouts, self.batch)
        loader = BatchLoader(self.graph, settings, 0, RankLayout.single(1))
        if sampling == "cuda":
            loaders = {"train": loader}
            plan = plan_sampling(self.graph, loaders, "cuda", self.device)
            choose_sampling(self.graph, loaders, plan, RankGroup(Ranks(), self.device))
        return loader

    @cached_property
    def loaders(self) -> dict[str, BatchLoader]:
        return {sampling: self.loader(sampling) for sampling in ("cpu", "cuda")}

    @cached_property
    def shares(self) -> list[SeedShare]:
        return list(islice(self.loaders["cpu"].shares(0), self.batches))

    @cached_property
    def held(self) -> list[Batch]:
        """The first ``self.batches`` batches of an epoch, sampled by the CPU and copied to the device."""
        bring: Any = feed(self.device)
        return [bring(self.loaders["cpu"].load(share)) for share in self.shares]

    def seconds(self, work: Callable[[], object]) -> float:
        """Return the median seconds that ``work`` takes, work on the device included. An untimed call comes first."""
        work()
        return median(self._once(work) for _ in range(self.repeats))

    def _once(self, work: Callable[[], object]) -> float:
        self.wait()
        begun = time.perf_counter()
        work()
        self.wait()
        return time.perf_counter() - begun

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def machine(setup: Setup) -> str:
    """Describe device, processor, versions and graph in one line."""
    if setup.device.type == "cuda":
        facts = torch.cuda.get_device_properties(setup.device)
        name = f"{facts.name}, {size_text(facts.total_memory)}, CUDA {torch.version.cuda}"
    else:
        name = "numba's simulator on the CPU: the times mean nothing"
    counts = setup.graph.manifest
    return (
        f"{name}; {platform.machine()}, {torch.get_num_threads()} torch threads; torch {torch.__version__}; "
        f"{counts.num_nodes:,} nodes, {counts.num_edges:,} edges; fanouts {setup.fanouts}, batch {setup.batch}, hidden "
        f"{setup.hidden}"
    )


def measurements(setup: Setup) -> Iterator[tuple[str, Iterator[Row]]]:
    """Yield the title and the rows of each section."""
    yield "batches", batches(setup)
    yield "sampling", sampling(setup)
    yield "gathering", gathering(setup)
    yield "training step", steps(setup)
    yield "epoch", epochs(setup)


def batches(setup: Setup) -> Iterator[Row]:
    """Compare the batches of the device with those of the CPU, bit for bit."""
    own, cpu = ([setup.loaders[name].load(share) for share in setup.shares] for name in ("cuda", "cpu"))
    equal = sum(
        all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(tensors_of(one), tensors_of(other), strict=True))
        for one, other in zip(own, cpu, strict=True)
    )
    yield Row("batches equal bit for bit", equal, "", "all", len(own), "equal")


def sampling(setup: Setup) -> Iterator[Row]:
    """Measure sampled edges per second, and the time of whole batches: sampling, gathering and the copy."""
    loaders, edges = setup.loaders, sum(len(block.indices) for batch in setup.held for block in batch.blocks)
    works = {
        name: lambda sampler=sampler: [
            sampler.subgraph(loaders["cpu"]._seed_set(share), share.key) for share in setup.shares
        ]
        for name, sampler in (("cuda", loaders["cuda"]._device_sampler), ("cpu", loaders["cpu"].host_sampler))
    }
    own, cpu = (edges / 1e6 / setup.seconds(works[name]) for name in ("cuda", "cpu"))
    yield Row("sampling", own, "M edges/s", "CPU, 1 thread", cpu, "more")
    bring: Any = feed(setup.device)
    whole = {
        name: 1e3 * setup.seconds(lambda name=name: [bring(loaders[name].load(share)) for share in setup.shares])
        for name in ("cuda", "cpu")
    }
    count = len(setup.shares)
    yield Row("a batch on the device", whole["cuda"] / count, "ms", "sampled by the CPU", whole["cpu"] / count)
    if find_spec("pyg_lib") is not None:
        plain = setup.seconds(lambda: list(islice(iter(neighbor_loader(setup)), count))) / count
        yield Row("a batch on the device", whole["cuda"] / count, "ms", "NeighborLoader, not copied", 1e3 * plain)


def neighbor_loader(setup: Setup) -> Any:
    """Return a NeighborLoader of torch_geometric for the same graph, without worker processes."""
    from torch_geometric.loader import NeighborLoader

    return NeighborLoader(
        whole_graph(setup), list(setup.fanouts), batch_size=setup.batch, shuffle=True,
        input_nodes=torch.from_numpy(setup.graph.store.seeds(HOMO_NODE, "train")),
    )  # fmt: skip


def whole_graph(setup: Setup) -> Data:
    """Return the whole graph as torch_geometric's ``Data``."""
    (part,) = setup.graph.store.parts.values()
    edges, nodes = part.edges[HOMO_EDGE], part.nodes[HOMO_NODE]
    indptr = torch.from_numpy(edges.indptr[:].astype("int64"))
    targets = torch.repeat_interleave(indptr.diff())
    x, y = (torch.from_numpy(nodes.attrs[name][:]) for name in ("x", "y"))
    return Data(
        x=x.float(), y=y.long(), edge_index=torch.stack([torch.from_numpy(edges.indices[:].astype("int64")), targets])
    )


def gathering(setup: Setup) -> Iterator[Row]:
    """Measure the GB/s of gathering rows of ``x``, from pinned host memory and from a cache on the device."""
    graph, device = setup.graph, setup.device
    sampler: Any = setup.loaders["cuda"]._device_sampler
    ids = [batch.n_id for batch in setup.held]  # one part: global and original ids are the same rows in another order
    feature = sampler.features[HOMO_NODE, "x"]
    size = sum(feature.take(each)[0].nbytes for each in ids) / 1e9
    near = size / setup.seconds(lambda: [feature.take(each) for each in ids])

    def by_cpu() -> None:
        for batch in setup.held:
            (rows,) = graph.access.gather([RowRequest(HOMO_NODE, batch.n_id.cpu().numpy(), ("x",))])
            torch.from_numpy(rows["x"]).float().to(device)

    far = size / setup.seconds(by_cpu)
    yield Row("rows from pinned memory", near, "GB/s", "gathered by the CPU, then copied", far, "more")
    yield Row("rows from pinned memory", near, "GB/s", "one copy of pinned memory", copied(setup, pinned=True), "more")
    nodes = graph.manifest.nodes[HOMO_NODE]
    rows = torch.zeros((nodes.num_nodes, nodes.attrs["x"].shape[1]), dtype=torch.float32, device=device)
    cache = DeviceRows(np.arange(nodes.num_nodes, dtype=np.int32), rows)
    cached = FeatureRows(graph.store, HOMO_NODE, "x", device, pinned=None, cache=cache)
    speed = size / setup.seconds(lambda: [cached.take(each) for each in ids])
    yield Row("rows cached on the device", speed, "GB/s", "one copy on the device", copied(setup, pinned=False), "more")


def copied(setup: Setup, pinned: bool) -> float:
    """Return the GB/s of copying to device memory: from pinned host memory if ``pinned``, else from device memory."""
    size = 1 << (12 if setup.simulated else 28)
    source = torch.empty(size, dtype=torch.uint8, device=CPU if pinned else setup.device)
    source = source.pin_memory() if pinned and not setup.simulated else source
    target = torch.empty(size, dtype=torch.uint8, device=setup.device)
    return size / 1e9 / setup.seconds(lambda: target.copy_(source, non_blocking=True))


def steps(setup: Setup) -> Iterator[Row]:
    """Measure training steps on batches that are on the device."""
    floor = sum(product_seconds(setup, *shape) for shape in products(setup.graph, setup.held[0]))
    ours = step_seconds(setup, "sage")
    yield Row("training step, sage", 1e3 * ours, "ms", "its dense products alone", 1e3 * floor)
    yield Row("training step, sage", 1e3 * ours, "ms", "with torch operations", 1e3 * torch_only(setup, "sage"))
    yield Row("training step, sage", 1e3 * ours, "ms", "torch_geometric's GraphSAGE", 1e3 * pyg_step_seconds(setup))
    yield Row("training step, sage", 1e3 * ours, "ms", "on the CPU", 1e3 * step_seconds(setup, "sage", CPU))
    rounded = step_seconds(setup, "sage", precision="bfloat16")
    yield Row("training step, sage, bfloat16", 1e3 * rounded, "ms", "float32", 1e3 * ours)
    for model in ("gcn", "gat"):
        own = step_seconds(setup, model)
        yield Row(f"training step, {model}", 1e3 * own, "ms", "with torch operations", 1e3 * torch_only(setup, model))
    yield Row("synchronising calls in a step", synchronisations(setup), "")
    if setup.device.type == "cuda":
        yield Row("peak memory of a step", peak_bytes(setup) / 1e6, "MB", "held before it", held_bytes(setup) / 1e6)


def model_step(
    setup: Setup, model: str, device: torch.device, precision: str = "float32"
) -> Callable[[Batch], None]:  # fmt: skip
    """Return a function that trains one step on a batch."""
    heads = 2 if setup.simulated else 4
    settings = TrainSettings(model=model, hidden=setup.hidden, heads=heads, fanouts=setup.fanouts, precision=precision)  # type: ignore[arg-type]
    network = build_model(settings, facts_of(setup.graph.manifest)).to(device).train()
    optimizer = torch.optim.Adam(network.parameters(), lr=0.004)

    def step(batch: Batch) -> None:
        optimizer.zero_grad()
        functional.cross_entropy(network(batch), batch.y).backward()  # type: ignore[arg-type, no-untyped-call]
        optimizer.step()

    return step


def step_seconds(
    setup: Setup, model: str, device: torch.device | None = None, precision: str = "float32"
) -> float:  # fmt: skip
    """Return the seconds of a training step."""
    on = device or setup.device
    work = model_step(setup, model, on, precision)
    held = [with_degree(setup, batch, model).to(on) for batch in setup.held]
    with cpu_kernels(device is not None):
        return setup.seconds(lambda: [work(batch) for batch in held]) / len(held)


def with_degree(setup: Setup, batch: Batch, model: str) -> Batch:
    """Return the batch; for gcn, with in-degrees of 1. gcn needs in-degrees; their values do not change the time."""
    if model != "gcn":
        return batch
    return replace(batch, degree=torch.ones_like(batch.n_id))


@contextmanager
def cpu_kernels(wanted: bool) -> Iterator[None]:
    """If ``wanted``, compute on CPU tensors with the CPU's kernels in this context, even if the simulator is on."""
    with mock.patch.object(kernel_rows, "_SIMULATED", kernel_rows._SIMULATED and not wanted):
        yield


def torch_only(setup: Setup, model: str) -> float:
    """Return the seconds of a training step that uses torch operations in place of CUDA kernels."""
    with mock.patch.object(kernel_rows, "_TORCH_ONLY", True):
        return step_seconds(setup, model)


def pyg_step_seconds(setup: Setup) -> float:
    """Return the seconds of a training step of torch_geometric's GraphSAGE, with ``setup``'s fanouts and batch size."""
    facts = facts_of(setup.graph.manifest)
    model = GraphSAGE(facts.in_dims[facts.target], setup.hidden, len(setup.fanouts), facts.num_classes)
    model = model.to(setup.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.004)
    loader = DistNeighborLoader(setup.graph, list(setup.fanouts), "train", batch_size=setup.batch, shuffle=True)
    held = [batch.to(setup.device) for batch in islice(iter(loader), setup.batches)]

    def step(batch: Data) -> None:
        out = model(batch.x.float(), batch.edge_index)[: batch.batch_size]
        loss = functional.cross_entropy(out, batch.y[: batch.batch_size])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return setup.seconds(lambda: [step(batch) for batch in held]) / len(held)


def product_seconds(setup: Setup, m: int, k: int, n: int) -> float:
    """Return the seconds of the dense product of [m, k] and [k, n] on the device."""
    a, b = torch.ones(m, k, device=setup.device), torch.ones(k, n, device=setup.device)
    return setup.seconds(lambda: torch.mm(a, b))


def synchronisations(setup: Setup) -> int:
    """Count the calls in a training step that make the host wait for the device. The simulator counts none."""
    work = model_step(setup, "sage", setup.device)
    work(setup.held[0])  # compiles kernels
    if setup.device.type != "cuda":
        return 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        work(setup.held[-1])
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(each.message) for each in caught)


def held_bytes(setup: Setup) -> int:
    """Return the bytes of device memory that this process uses now, between two measurements."""
    return torch.cuda.memory_allocated(setup.device)


def peak_bytes(setup: Setup) -> int:
    """Return the most bytes of device memory that this process uses during a training step of sage."""
    work = model_step(setup, "sage", setup.device)
    work(setup.held[0])
    setup.wait()
    torch.cuda.reset_peak_memory_stats(setup.device)
    work(setup.held[-1])
    setup.wait()
    return torch.cuda.max_memory_allocated(setup.device)


def epochs(setup: Setup) -> Iterator[Row]:
    """Measure whole epochs: sampling, gathering, copies and training steps."""
    own, by_cpu = (epoch_seconds(setup, sampling) for sampling in ("cuda", "cpu"))
    yield Row("epoch, sampled by the device", own, "s", "sampled by the CPU", by_cpu)
    with cpu_kernels(True):
        yield Row("epoch, sampled by the device", own, "s", "all on the CPU", epoch_seconds(setup, "cpu", CPU))
    if find_spec("pyg_lib") is not None:
        yield Row("epoch, sampled by the device", own, "s", "NeighborLoader and GraphSAGE", pyg_epoch_seconds(setup))


def epoch_seconds(setup: Setup, sampling: str, device: torch.device | None = None) -> float:
    """Return the seconds of a training epoch. An unmeasured warm-up epoch comes first."""
    on = device or setup.device
    loader, bring, work = setup.loaders[sampling], feed(on), model_step(setup, "sage", on)
    return setup.seconds(lambda: [work(bring(batch)) for batch in loader.epoch(1)])  # type: ignore[arg-type, type-var]


def pyg_epoch_seconds(setup: Setup) -> float:
    """Return the seconds of an epoch with torch_geometric's loader and model on the device."""
    facts = facts_of(setup.graph.manifest)
    model = GraphSAGE(facts.in_dims[facts.target], setup.hidden, len(setup.fanouts), facts.num_classes)
    model = model.to(setup.device)
    optimizer, loader = torch.optim.Adam(model.parameters(), lr=0.004), neighbor_loader(setup)

    def epoch() -> None:
        for batch in loader:
            moved = batch.to(setup.device)
            out: Tensor = model(moved.x, moved.edge_index)[: moved.batch_size]
            optimizer.zero_grad()
            functional.cross_entropy(out, moved.y[: moved.batch_size]).backward()
            optimizer.step()

    return setup.seconds(epoch)
