"""One simulated host that trains with gnnfleet, for `make bench-peers`: a graph server and the bundled trainer.

python our_train.py train PLAIN SETTINGS

PLAIN is not used. SETTINGS is JSON as for the task ``parts`` of our_job.py, with hidden, lr and optionally prefetch and
precision. This process does not import torch: the benchmark counts the process as part of the simulated host and
measures the host's memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = "127.0.0.1"
HOSTS = 2
Settings = dict[str, Any]


@contextlib.contextmanager
def graph_server(settings: Settings) -> Iterator[Path]:
    """Run this host's graph server as the launcher does. Yields the path of ``cluster.json``."""
    rank, folder = settings["rank"], Path(settings["folder"])
    cluster, ready = folder.with_suffix(".cluster.json"), folder.with_suffix(".ready")
    places = [f"tcp://{HERE}:{port}" for port in settings["ports"][1 : 1 + HOSTS]]
    nodes = [
        {"node_rank": k, "host": f"host{k}", "endpoint": place, "parts": [k], "ranks": [k]}
        for k, place in enumerate(places)
    ]
    cluster.write_text(json.dumps({"run_id": "bench", "num_parts": HOSTS, "nodes": nodes}))
    ready.unlink(missing_ok=True)
    command = [sys.executable, "-m", "trainer", "serve", "--parts", folder, "--own", str(rank), "--bind", places[rank]]
    command += ["--cluster", cluster, "--node-rank", str(rank), "--ready-file", ready]
    server = subprocess.Popen(command, stdout=sys.stderr)
    try:
        while not ready.exists():
            if server.poll() is not None:
                raise SystemExit(f"the graph server ended: {server.returncode}")
            time.sleep(0.05)
        yield cluster
    finally:
        server.terminate()
        server.wait(10)


def train(settings: Settings) -> Settings:
    rank, folder = settings["rank"], Path(settings["folder"])
    run = folder.with_suffix(".run")
    shutil.rmtree(run, ignore_errors=True)
    ranks = {"RANK": rank, "WORLD_SIZE": HOSTS, "LOCAL_RANK": 0, "NODE_RANK": rank}
    ranks |= {"MASTER_ADDR": HERE, "MASTER_PORT": settings["ports"][0]}
    command = [sys.executable, "-m", "trainer", "train", "--run-dir", run, "--parts", folder, "--part-ids", rank]
    command += ["--topology", settings["topology"], "--cache", settings["cache"], "--hidden", settings["hidden"]]
    command += ["--fanouts", ",".join(map(str, settings["fanouts"])), "--batch-size", HOSTS * settings["batch"]]
    command += ["--eval-batch-size", HOSTS * settings["batch"], "--epochs", settings["epochs"], "--lr", settings["lr"]]
    command += ["--dropout", "0", "--eval-every", "0", "--checkpoint-every", "0", "--backend", "gloo"]
    for name in {"prefetch", "precision"} & set(settings):
        command += [f"--{name}", settings[name]]
    with graph_server(settings) as cluster:
        environment = os.environ | {name: str(value) for name, value in ranks.items()}
        subprocess.run(list(map(str, [*command, "--cluster", cluster])), env=environment, stdout=sys.stderr, check=True)
    lines = [json.loads(line) for line in (run / f"metrics-rank{rank}.jsonl").read_text().splitlines()]
    epochs = [line for line in lines if line["kind"] == "epoch"]
    test = [line["accuracy"] for line in lines if line["kind"] == "eval" and line["split"] == "test"]
    return {
        "seconds": [line["seconds"] for line in epochs], "loss": [line["loss"] for line in epochs],
        "seeds": sum(line["seeds"] for line in epochs) // len(epochs), "accuracy": test[-1] if test else None,
    }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(train(json.loads(sys.argv[3]))), flush=True)
