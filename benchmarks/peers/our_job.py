"""One simulated host with gnnfleet, for `make bench-peers`. Prints one JSON line. Training is in our_train.py.

python our_job.py TASK PLAIN SETTINGS
TASK is ``loader`` (load batches on one machine), ``parts`` (load batches on one of two hosts) or ``partition``. PLAIN
is a folder from ``plain.py``. SETTINGS is a JSON object. All tasks need folder. ``loader`` and ``parts`` need fanouts,
batch (seeds per batch), warm (untimed epochs) and epochs (timed ones), and may have kind (``blocks`` or ``data``),
threads and prefetch. ``parts`` also needs rank, ports, topology and cache. ``partition`` needs method.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from epochs import cpu_seconds, timed_epochs
from our_client import look_at_data
from our_train import HERE, HOSTS, graph_server

from trainer.core.batch import Batch
from trainer.core.batch_cost import Cost
from trainer.core.ranks import Ranks
from trainer.core.remote_settings import CacheSize, RemoteAccess
from trainer.graph.open import Graph, open_graph
from trainer.graph.seed_order import RankLayout
from trainer.loader.block_loader import BatchLoader, LoaderSettings

if TYPE_CHECKING:
    from trainer.data.dataset import Dataset

Settings = dict[str, Any]


class Epochs:
    """Iterates over the epochs of a ``BatchLoader``. Sums the batches' layer sizes and costs."""

    def __init__(self, loader: BatchLoader):
        self._loader, self._epoch = loader, -1
        self.layers: list[list[int]] = []
        self.costs: list[Cost] = []

    def __iter__(self) -> Iterator[Batch]:
        self._epoch += 1
        self.layers, self.costs = [], []
        return self._loader.epoch(self._epoch)

    def look(self, batch: Batch) -> tuple[torch.Tensor, int, int]:
        sizes = [[block.num_dst, block.num_src, len(block.indices)] for block in batch.blocks]
        before = self.layers or [[0, 0, 0]] * len(sizes)
        self.layers = [[a + b for a, b in zip(*pair, strict=True)] for pair in zip(before, sizes, strict=True)]
        self.costs.append(batch.cost)
        return batch.n_id[: batch.num_seeds], sum(edges for *_, edges in sizes), len(batch.x)


def loader(plain: Path, settings: Settings) -> Settings:
    expected = np.load(plain / "train.npy")
    with open_graph(settings["folder"]) as graph:
        loading, look = _loading(graph, settings)
        found = timed_epochs(loading, look, expected, settings["warm"], settings["epochs"])
    return found | _more(loading)


def _loading(graph: Graph, settings: Settings, rank: int = 0, layout: RankLayout | None = None) -> tuple[Any, Any]:
    threads, batch = settings.get("threads", 1), settings["batch"]
    ahead = settings.get("prefetch", settings.get("threads", 1) + 1)
    if settings.get("kind") == "data":
        from trainer.loader.neighbor_loader import DistNeighborLoader

        loading = DistNeighborLoader(
            graph, settings["fanouts"], "train", batch_size=batch, shuffle=True, threads=threads, prefetch=ahead,
            rank=rank if layout else None, layout=layout,
        )  # fmt: skip
        return loading, look_at_data
    layout = layout or RankLayout.single(graph.manifest.num_parts)
    chosen = LoaderSettings(
        "train", tuple(settings["fanouts"]), batch * layout.world_size, threads=threads, prefetch=ahead
    )
    epochs = Epochs(BatchLoader(graph, chosen, rank, layout))
    return epochs, epochs.look


def _more(loading: Any) -> Settings:
    if not isinstance(loading, Epochs):
        return {}
    names = ("remote_bytes", "rows", "remote_rows", "cached_rows", "held_rows")
    sums = {name: int(sum(getattr(cost, name) for cost in loading.costs)) for name in names}
    return {"layers": loading.layers, "traffic": sums}


def parts(plain: Path, settings: Settings) -> Settings:
    rank = settings["rank"]
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://{HERE}:{settings['ports'][0]}", rank=rank, world_size=HOSTS
    )
    layout = RankLayout(HOSTS, ((0,), (1,)))
    with graph_server(settings) as cluster, open_graph(
        settings["folder"], [rank], cluster_file=cluster, node_rank=rank, ranks=Ranks(rank, HOSTS, node_rank=rank),
        placed=layout, remote_access=_remote_access(settings),
    ) as graph:  # fmt: skip
        if settings["cache"] != "0":
            graph.cache_rows(settings["fanouts"], batch_size=settings["batch"], size=settings["cache"])
        loading, look = _loading(graph, settings, rank, layout)
        found = timed_epochs(loading, look, None, settings["warm"], settings["epochs"], torch.distributed.barrier)
        torch.distributed.barrier()
        return found | _more(loading)


def _remote_access(settings: Settings) -> RemoteAccess:
    return RemoteAccess(topology=settings["topology"], cache=CacheSize.parse(settings["cache"]))


def partition(plain: Path, settings: Settings) -> Settings:
    # first a small graph, so that all kernels are compiled before the measurement
    from trainer.data.dataset import Dataset, EdgeData, NodeData

    names = ("edge_index", "x", "y", "train", "val", "test")
    edges, x, y, *splits = (np.load(plain / f"{name}.npy") for name in names)
    few = 2_000
    kept = edges[:, (edges < few).all(axis=0)]
    _cut(Dataset.homogeneous("warm", NodeData(few, {"x": x[:few]}, {}), EdgeData(kept), "warm"), settings)
    nodes = NodeData(len(x), {"x": x, "y": y}, dict(zip(names[3:], splits, strict=True)), int(y.max()) + 1)
    return _cut(Dataset.homogeneous("bench", nodes, EdgeData(edges), "bench"), settings)


def _cut(graph: Dataset, settings: Settings) -> Settings:
    from trainer.partition.methods.assign import assign_parts
    from trainer.partition.write import write_partition

    folder = Path(settings["folder"])
    shutil.rmtree(folder, ignore_errors=True)
    spent, begun = cpu_seconds(), time.perf_counter()
    assignment = assign_parts(graph, HOSTS, settings["method"], 0)
    write_partition(graph, assignment, folder)
    return {
        "seconds": [time.perf_counter() - begun], "cpu": [cpu_seconds() - spent], "edge_cut": assignment.edge_cut,
        "written": sum(file.stat().st_size for file in folder.rglob("*.npy")),
    }  # fmt: skip


if __name__ == "__main__":
    result = globals()[sys.argv[1]](Path(sys.argv[2]), json.loads(sys.argv[3]))
    print(json.dumps(result), flush=True)
