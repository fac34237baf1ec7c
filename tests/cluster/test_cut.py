"""Test of a network cut of five seconds between supervisors with default settings: no run ends, no node is lost."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from netns import REPOSITORY, Host, NetCluster
from waiting import wait_until

CUT = 5.0  # seconds
PORT = 29400
SUPERVISOR = REPOSITORY / "launcher/node/supervisor/supervisor.py"
RANK = REPOSITORY / "launcher/node/supervisor/rank_runner.py"
ROLES = ["server", "client", "client"]
SERVE = "import pathlib, time; pathlib.Path('server.ready').touch(); time.sleep(300)"
WAIT = "import os, time\nwhile not os.path.exists('go'): time.sleep(0.05)"


@pytest.fixture(scope="module")
def cluster() -> Iterator[NetCluster]:
    with NetCluster(3) as made:
        yield made


def spec(cluster: NetCluster, k: int) -> dict:
    """Return the content of node k's node.json. Node 0 is a server; nodes 1 (the lead node) and 2 are clients."""
    folder, trains = f"{cluster.hosts[k].home}/run", ROLES[k] == "client"
    runner = [sys.executable, str(RANK), "--run-dir", folder, "--", sys.executable, "-c", WAIT]
    server = {"argv": [sys.executable, "-c", SERVE], "env": {}, "cwd": folder}
    return {
        "run_id": "cut",
        "token": "t" * 16,
        "node_rank": k,
        "run_dir": folder,
        "server": None if trains else server,
        "trainer": {"argv": runner, "env": {"RANK": str(k)}, "cwd": folder} if trains else None,
        "start_timeout": 20.0,
        "grace": 5.0,
        "hub": 1,
        "nodes": [
            {"label": "node0", "role": "server", "parts": [0, 1]},
            {"label": "node1", "role": "client", "ranks": [1], "address": cluster.hosts[1].address}
            | {"bind": "0.0.0.0", "control_port": PORT},
            {"label": "node2", "role": "client", "ranks": [2]},
        ],
    }


def start(host: Host, node_spec: dict) -> None:
    host.run(["mkdir", "-p", node_spec["run_dir"]])
    host.write(f"{node_spec['run_dir']}/node.json", json.dumps(node_spec))
    words = f"setsid {sys.executable} {SUPERVISOR} {node_spec['run_dir']}/node.json </dev/null >/dev/null 2>&1 &"
    host.run(["bash", "-c", words])


def read(host: Host, name: str) -> dict:
    path = host.root_path(f"~/run/{name}")
    return json.loads(path.read_text()) if path.exists() else {}


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.quiet
def test_a_cut_of_five_seconds_ends_no_run(cluster: NetCluster) -> None:
    # The network of each host is cut once or twice, each time at another moment between two heartbeats.
    for k, host in enumerate(cluster.hosts):
        start(host, spec(cluster, k))
    lead = cluster.hosts[1]
    wait_until(lambda: {peer["state"] for peer in read(lead, "state.json").get("peers", {}).values()} >= {"training"})
    time.sleep(2)
    for pause, host in [(0.1, cluster.hosts[0]), (0.6, cluster.hosts[2]), (0.3, lead), (0.9, cluster.hosts[0])]:
        time.sleep(2 + pause)
        host.cut_network()
        time.sleep(CUT)
        host.restore_network()
        wait_until(lambda: all(peer["age"] < 1.5 for peer in read(lead, "state.json")["peers"].values()))
        assert read(lead, "state.json")["state"] == "training", Path(lead.root_path("~/run/events.jsonl")).read_text()
    for host in cluster.hosts[1:]:
        host.write("~/run/go", "")
    wait_until(lambda: all(read(host, "result.json") for host in cluster.hosts))
    results = [read(host, "result.json") for host in cluster.hosts]
    assert [result["state"] for result in results] == ["done"] * 3
    assert not any(result["lost"] or result["gone"] for result in results)
