"""graphlearn-torch's server-client mode on one machine. Run with the Python of ``envs.GLT``.

glt_job.py cut     PLAIN FOLDER SERVERS             partition a graph of ``plain.py``, one part per server
glt_job.py server  PLAIN FOLDER RANK SERVERS PORT   run a graph server until the client ends
glt_job.py client  PLAIN SETTINGS                   load epochs and print one JSON line

SETTINGS is JSON: folder, servers, port, fanouts, batch, warm, epochs, and options of graphlearn-torch's loader: seed,
workers, concurrency, prefetch, buffer.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from epochs import timed_epochs
from graphlearn_torch import distributed as glt
from graphlearn_torch.partition import RandomPartitioner

NAMES = ("edge_index", "x", "y", "train")
HERE = "127.0.0.1"
LOCAL = torch.device("cpu")


def cut(plain: str, folder: str, servers: str) -> None:
    """Write the graph as one part per server, and one file of train seeds per server."""
    # graphlearn-torch cannot make a single part; a single server reads PLAIN instead
    source, target, parts = Path(plain), Path(folder), int(servers)
    target.mkdir(parents=True, exist_ok=True)
    edges, x, y, train = (torch.from_numpy(np.load(source / f"{name}.npy")) for name in NAMES)
    if parts > 1:
        RandomPartitioner(str(target), parts, len(x), edges.long(), node_feat=x).partition()
    torch.save(y, target / "label.pt")
    for part, seeds in enumerate(train.chunk(parts)):
        torch.save(seeds, target / f"train{part}.pt")
    (target / "ready").touch()


def server(plain: str, folder: str, rank: str, servers: str, port: str) -> None:
    torch.multiprocessing.set_start_method("spawn")  # the default, a mix of fork and spawn, fails since Python 3.11.5
    data = whole(plain) if servers == "1" else part_of(folder, int(rank))
    glt.init_server(int(servers), int(rank), data, HERE, int(port), num_clients=1)
    glt.wait_and_shutdown_server()


def part_of(folder: str, rank: int) -> glt.DistDataset:
    data = glt.DistDataset()
    data.load(folder, rank, graph_mode="CPU", feature_with_gpu=False, whole_node_label_file=f"{folder}/label.pt")
    return data


def whole(plain: str) -> glt.DistDataset:
    edges, x, y, _ = (torch.from_numpy(np.load(Path(plain) / f"{name}.npy")) for name in NAMES)
    data = glt.DistDataset(1, 0, node_pb=torch.zeros(len(x), dtype=torch.uint8), edge_pb=torch.zeros(edges.shape[1]))
    data.init_graph(edges.long(), graph_mode="CPU")
    data.init_node_features(x, with_gpu=False)
    data.init_node_labels(y)
    return data


def client(plain: str, text: str) -> None:
    settings = json.loads(text)
    servers = settings["servers"]
    glt.init_client(servers, 1, 0, HERE, settings["port"])
    loader = glt.DistNeighborLoader(
        None,
        settings["fanouts"],
        [f"{settings['folder']}/train{part}.pt" for part in range(servers)],
        batch_size=settings["batch"],
        shuffle=True,
        collect_features=True,
        to_device=LOCAL,
        random_seed=settings["seed"],
        worker_options=worker_options(settings),
    )
    seeds = np.load(Path(plain) / "train.npy")
    found = timed_epochs(loader, look, seeds, settings["warm"], settings["epochs"])
    print(json.dumps(found), flush=True)
    loader.shutdown()
    glt.shutdown_client()


def look(batch: object) -> tuple[torch.Tensor, int, int]:
    return batch.batch, batch.edge_index.shape[1], len(batch.x)


def worker_options(settings: dict[str, object]) -> glt.RemoteDistSamplingWorkerOptions:
    given = {"num_workers": "workers", "worker_concurrency": "concurrency", "prefetch_size": "prefetch"}
    more = {name: settings[key] for name, key in given.items() if key in settings}
    workers = more.get("num_workers", 1)
    return glt.RemoteDistSamplingWorkerOptions(
        server_rank=list(range(settings["servers"])),
        worker_devices=[LOCAL] * workers,
        master_addr=HERE,
        master_port=settings["port"] + 1,
        buffer_size=settings.get("buffer"),
        worker_key="train",
        **more,
    )


if __name__ == "__main__":
    {"cut": cut, "server": server, "client": client}[sys.argv[1]](*sys.argv[2:])
