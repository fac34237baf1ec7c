"""One simulated host with graphlearn-torch's worker mode, for `make bench-peers`. Run with the Python of ``envs.GLT``.

python glt_hosts.py TASK PLAIN SETTINGS
TASK is ``loader`` (one machine), ``parts``, ``train`` or ``partition``. PLAIN is a folder from ``plain.py``. SETTINGS
is JSON: folder (from ``glt_job.py cut``), fanouts, batch, warm, epochs; some tasks also need seed (null: default),
rank, ports, trim, hidden, lr, classes.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from epochs import cpu_seconds, learned_epochs, timed_epochs
from glt_job import LOCAL, look, part_of, whole
from graphlearn_torch import distributed as glt
from graphlearn_torch.loader import NeighborLoader
from graphlearn_torch.partition import RandomPartitioner
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.nn import GraphSAGE

HERE = "127.0.0.1"
HOSTS = 2
Settings = dict[str, Any]


def loader(plain: Path, settings: Settings) -> Settings:
    train = torch.from_numpy(np.load(plain / "train.npy"))
    loading = NeighborLoader(
        whole(str(plain)), settings["fanouts"], train, batch_size=settings["batch"], shuffle=True, device=LOCAL,
        seed=settings["seed"],
    )  # fmt: skip
    return timed_epochs(loading, look, train, settings["warm"], settings["epochs"])


def parts(plain: Path, settings: Settings) -> Settings:
    _join(settings)
    loading = _loader(plain, "train", settings, 1, shuffle=True)
    found = timed_epochs(loading, look, None, settings["warm"], settings["epochs"], torch.distributed.barrier)
    torch.distributed.barrier()
    loading.shutdown()
    return found


def train(plain: Path, settings: Settings) -> Settings:
    """Train with the loop in graphlearn-torch's documentation.

    With ``trim`` in the settings, each layer uses only the edges that later layers need.
    """
    _join(settings)
    train, test = (_loader(plain, name, settings, k, name == "train") for k, name in enumerate(("train", "test"), 1))
    torch.manual_seed(0)
    width = np.load(plain / "x.npy", mmap_mode="r").shape[1]
    model = DistributedDataParallel(GraphSAGE(width, settings["hidden"], len(settings["fanouts"]), settings["classes"]))
    optimizer = torch.optim.Adam(model.parameters(), lr=settings["lr"])

    def step(batch: Any) -> torch.Tensor:
        optimizer.zero_grad()
        out = _forward(model, batch, settings).log_softmax(dim=-1)
        loss = functional.nll_loss(out, batch.y[: batch.batch_size])
        loss.backward()
        optimizer.step()
        return loss.detach()

    found = learned_epochs(train, step, settings["epochs"], torch.distributed.barrier)
    model.eval()
    right = count = 0
    with torch.no_grad():
        for batch in test:
            best = _forward(model.module, batch, settings).argmax(dim=1)
            right += int((best == batch.y[: batch.batch_size]).sum())
            count += batch.batch_size
    torch.distributed.barrier()
    for loading in (train, test):
        loading.shutdown()
    return found | {"right": right, "scored": count}


def _forward(model: Any, batch: Any, settings: Settings) -> torch.Tensor:
    hops = {}
    if settings["trim"]:
        hops["num_sampled_nodes_per_hop"] = list(map(int, batch.num_sampled_nodes))
        hops["num_sampled_edges_per_hop"] = list(map(int, batch.num_sampled_edges))
    return model(batch.x, batch.edge_index, **hops)[: batch.batch_size]  # type: ignore[no-any-return]


def partition(plain: Path, settings: Settings) -> Settings:
    edges, x = (torch.from_numpy(np.load(plain / f"{name}.npy")) for name in ("edge_index", "x"))
    edges = edges.long()
    spent, begun = cpu_seconds(), time.perf_counter()
    RandomPartitioner(settings["folder"], HOSTS, len(x), edges, node_feat=x).partition()
    return {"seconds": [time.perf_counter() - begun], "cpu": [cpu_seconds() - spent]}


def _join(settings: Settings) -> None:
    glt.init_worker_group(HOSTS, settings["rank"], "bench")
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://{HERE}:{settings['ports'][0]}", rank=settings["rank"], world_size=HOSTS
    )


def _loader(plain: Path, split: str, settings: Settings, port: int, shuffle: bool) -> Any:
    seeds = torch.from_numpy(np.load(plain / f"{split}.npy")).chunk(HOSTS)[settings["rank"]]
    options = glt.MpDistSamplingWorkerOptions(
        num_workers=1, worker_devices=[LOCAL], worker_concurrency=4, master_addr=HERE,
        master_port=settings["ports"][port], channel_size="1GB",
    )  # fmt: skip
    return glt.DistNeighborLoader(
        part_of(settings["folder"], settings["rank"]), settings["fanouts"], seeds, batch_size=settings["batch"],
        shuffle=shuffle, collect_features=True, to_device=LOCAL, random_seed=settings["seed"], worker_options=options,
    )  # fmt: skip


if __name__ == "__main__":
    torch.multiprocessing.set_start_method("spawn", force=True)
    result = globals()[sys.argv[1]](Path(sys.argv[2]), json.loads(sys.argv[3]))
    print("\n" + json.dumps(result), flush=True)
