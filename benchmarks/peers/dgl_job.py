"""One simulated host with DGL 2.1.0, for `make bench-peers`. Run with the Python of ``envs.DGL``.

python dgl_job.py TASK PLAIN SETTINGS
TASK is ``loader``, ``graphbolt``, ``parts``, ``train`` or ``partition``. ``parts`` and ``train`` start a second process
with TASK ``server``. PLAIN is a folder from ``plain.py``. SETTINGS is JSON: folder, fanouts, batch, warm, epochs; some
tasks also need workers, rank, ports, method, hidden, lr, classes. Two hosts on one machine must not share /dev/shm:
start each with ``unshare --mount sh -c 'mount -t tmpfs tmpfs /dev/shm && exec "$@"' sh python dgl_job.py …``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import dgl
import dgl.distributed as dist
import dgl.nn.pytorch as dglnn
import numpy as np
import torch
from dgl.distributed import rpc_client
from epochs import cpu_seconds, learned_epochs, timed_epochs
from torch import nn
from torch.nn import functional

HERE = "127.0.0.1"
HOSTS = 2
Settings = dict[str, Any]


def loader(plain: Path, settings: Settings) -> Settings:
    """Iterate over the batches of epochs without training, and return the measured times.

    Uses DGL's ``DataLoader`` on one machine, with a ``NeighborSampler`` that prefetches features and labels.
    """
    graph, train = _graph(plain), torch.from_numpy(np.load(plain / "train.npy"))
    graph = graph.formats("csc")
    sampler = dgl.dataloading.NeighborSampler(
        settings["fanouts"][::-1], prefetch_node_feats=["features"], prefetch_labels=["labels"]
    )
    workers = {"num_workers": settings["workers"], "persistent_workers": True} if settings["workers"] else {}
    loading = dgl.dataloading.DataLoader(
        graph, train, sampler, batch_size=settings["batch"], shuffle=True, drop_last=False, **workers
    )

    def look(batch: Any) -> tuple[torch.Tensor, int, int]:
        _, seeds, blocks = batch
        return seeds, _edges(blocks), len(blocks[0].srcdata["features"])

    return timed_epochs(loading, look, train, settings["warm"], settings["epochs"])


def graphbolt(plain: Path, settings: Settings) -> Settings:
    """Load epochs on one machine with GraphBolt's data pipeline on a graph in memory."""
    import dgl.graphbolt as gb

    train = torch.from_numpy(np.load(plain / "train.npy"))
    rows = {"feat": np.load(plain / "x.npy"), "label": np.load(plain / "y.npy")[:, None]}
    kept = {("node", None, name): gb.TorchBasedFeature(torch.from_numpy(of)) for name, of in rows.items()}
    store = gb.BasicFeatureStore(kept)
    graph = gb.from_dglgraph(_graph(plain, rows=False), is_homogeneous=True)
    pipe = gb.ItemSampler(gb.ItemSet(train, names="seed_nodes"), batch_size=settings["batch"], shuffle=True)
    pipe = pipe.sample_neighbor(graph, settings["fanouts"])
    pipe = pipe.fetch_feature(store, node_feature_keys=["feat", "label"])
    loading = gb.DataLoader(pipe, num_workers=settings["workers"])

    def look(batch: Any) -> tuple[torch.Tensor, int, int]:
        return batch.seed_nodes, _edges(batch.blocks), len(batch.node_features["feat"])

    return timed_epochs(loading, look, train, settings["warm"], settings["epochs"])


def _graph(plain: Path, rows: bool = True) -> dgl.DGLGraph:
    source, target = torch.from_numpy(np.load(plain / "edge_index.npy")).long()
    y = torch.from_numpy(np.load(plain / "y.npy"))
    graph = dgl.graph((source, target), num_nodes=len(y))
    if rows:
        graph.ndata["features"], graph.ndata["labels"] = torch.from_numpy(np.load(plain / "x.npy")), y
        for split in ("train", "val", "test"):
            mask = torch.zeros(len(y), dtype=torch.bool)
            mask[torch.from_numpy(np.load(plain / f"{split}.npy"))] = True
            graph.ndata[f"{split}_mask"] = mask
    return graph


def _edges(blocks: Any) -> int:
    return sum(block.num_edges() for block in blocks)


def partition(plain: Path, settings: Settings) -> Settings:
    """Partition a graph in memory into files, with ``dgl.distributed.partition_graph``."""
    graph = _graph(plain)
    spent, begun = cpu_seconds(), time.perf_counter()
    dist.partition_graph(graph, "bench", HOSTS, settings["folder"], part_method=settings["method"], graph_formats="csc")
    return {"seconds": [time.perf_counter() - begun], "cpu": [cpu_seconds() - spent]}


# -- two hosts -----------------------------------------------------------


def parts(plain: Path, settings: Settings) -> Settings:
    """Load this host's half of the seeds, with features and labels, as in DGL's documentation."""
    graph = _joined(settings)
    loading = _loader(graph, "train_mask", settings, shuffle=True)

    def look(batch: Any) -> tuple[torch.Tensor, int, int]:
        nodes, seeds, blocks = batch
        rows, _ = graph.ndata["features"][nodes], graph.ndata["labels"][seeds].long()
        return seeds, _edges(blocks), len(rows)

    return timed_epochs(loading, look, None, settings["warm"], settings["epochs"], torch.distributed.barrier)


def train(plain: Path, settings: Settings) -> Settings:
    """Train with the loop in DGL's documentation, then score the test split on sampled neighbours."""
    graph = _joined(settings)
    loading = _loader(graph, "train_mask", settings, shuffle=True)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Sage(graph.ndata["features"].shape[1], settings))
    optimizer = torch.optim.Adam(model.parameters(), lr=settings["lr"])

    def step(batch: Any) -> torch.Tensor:
        nodes, seeds, blocks = batch
        x, y = graph.ndata["features"][nodes], graph.ndata["labels"][seeds].long()
        loss = functional.cross_entropy(model(blocks, x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    found = learned_epochs(loading, step, settings["epochs"], torch.distributed.barrier)
    return found | _score(graph, model.module, settings)


class Sage(nn.Module):
    """The GraphSAGE model of DGL's documentation, without dropout."""

    def __init__(self, width: int, settings: Settings):
        super().__init__()
        widths = [width, *[settings["hidden"]] * (len(settings["fanouts"]) - 1), settings["classes"]]
        self.layers = nn.ModuleList(dglnn.SAGEConv(a, b, "mean") for a, b in zip(widths, widths[1:]))  # noqa: B905

    def forward(self, blocks: Any, h: torch.Tensor) -> torch.Tensor:
        for k, (layer, block) in enumerate(zip(self.layers, blocks)):  # noqa: B905
            h = layer(block, h)
            h = functional.relu(h) if k + 1 < len(self.layers) else h
        return h


def _score(graph: Any, model: nn.Module, settings: Settings) -> Settings:
    model.eval()
    right = count = 0
    with torch.no_grad():
        for nodes, seeds, blocks in _loader(graph, "test_mask", settings, shuffle=False):
            found = model(blocks, graph.ndata["features"][nodes]).argmax(dim=1)
            right, count = right + int((found == graph.ndata["labels"][seeds]).sum()), count + len(seeds)
    torch.distributed.barrier()
    return {"right": right, "scored": count}


def _loader(graph: Any, mask: str, settings: Settings, shuffle: bool) -> Any:
    nodes = dist.node_split(graph.ndata[mask], graph.get_partition_book(), force_even=True)
    sampler = dgl.dataloading.NeighborSampler(settings["fanouts"][::-1])
    return dgl.dataloading.DistNodeDataLoader(
        graph, nodes, sampler, batch_size=settings["batch"], shuffle=shuffle, drop_last=False
    )


def _joined(settings: Settings) -> Any:
    """Start this host's server as DGL's launcher does, and open the distributed graph."""
    rank, folder = settings["rank"], Path(settings["folder"])
    places = folder.with_suffix(f".ip{rank}")
    places.write_text("".join(f"{HERE} {port}\n" for port in settings["ports"][1 : 1 + HOSTS]))
    config = {
        "DGL_DIST_MODE": "distributed", "DGL_NUM_CLIENT": HOSTS, "DGL_NUM_SERVER": 1, "DGL_IP_CONFIG": places,
        "DGL_CONF_PATH": folder / "bench.json", "DGL_GRAPH_FORMAT": "csc", "DGL_GROUP_ID": 0,
        "DGL_NUM_SAMPLER": settings.get("workers", 0), "DGL_KEEP_ALIVE": 0,
    }  # fmt: skip
    os.environ |= {name: str(value) for name, value in config.items()}
    server = os.environ | {"DGL_ROLE": "server", "DGL_SERVER_ID": str(rank)}
    subprocess.Popen([sys.executable, __file__, "server", "-", json.dumps(settings)], env=server, stdout=sys.stderr)
    os.environ |= {"DGL_ROLE": "client"}
    rpc_client.get_local_machine_id = lambda _: rank  # both hosts have the loopback's address
    dist.initialize(str(places), num_worker_threads=1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://{HERE}:{settings['ports'][0]}", rank=rank, world_size=HOSTS
    )
    return dist.DistGraph("bench", part_config=str(folder / "bench.json"))


def server(_plain: Path, settings: Settings) -> Settings:
    dist.initialize(os.environ["DGL_IP_CONFIG"])  # does not return
    return {}


if __name__ == "__main__":
    result = globals()[sys.argv[1]](Path(sys.argv[2]), json.loads(sys.argv[3]))
    print("\n" + json.dumps(result), flush=True)
