"""Tests of ``gnnfleet export --to kubernetes``: simulated hosts run the pods of the exported manifests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

from launcher.config.loader import load_config
from launcher.config.resolve import resolve_run
from launcher.export.kubernetes import export_kubernetes
from launcher.export.placed_plan import ExportRequest
from launcher.export.pods import Cluster
from netns import REPOSITORY, NetCluster
from pod_kit import Kubelet, Pod
from s3_kit import KEYS, s3_server
from waiting import DEADLINE, wait_until

CONFIG = """
name: toy
nodes: {nodes}
data:
  dataset: synthetic
  options: {{num_nodes: 4000, avg_degree: 10, num_features: 16, num_classes: 4}}
{data}
train: {{hidden: 32, fanouts: [5, 5], batch_size: 256, epochs: 3, dropout: 0.1}}
run: {{restarts: 1}}
"""
SCRIPT = """
import pathlib
import time
import gnnfleet as gf
graph = gf.open()
loader = gf.DistNeighborLoader(graph, [4, 4], "train", batch_size=256)
print("seeds:", sum(batch.batch_size for batch in loader), flush=True)
if not pathlib.Path("../stopped").exists():  # in the first attempt
    pathlib.Path("../stopped").touch()
    time.sleep(600)
"""


class Scene:
    """The exported manifests of one run, and a simulated host for each pod."""

    def __init__(
        self,
        folder: Path,
        cluster: NetCluster,
        kind: Literal["jobset", "job"],
        script: str = "",
        nodes: str = "[a, b]",
        data: str = "",
    ) -> None:
        folder.mkdir()
        (folder / "cluster.yml").write_text(CONFIG.format(nodes=nodes, data=data))
        (folder / "mine.py").write_text(script)
        config = resolve_run(load_config(folder / "cluster.yml"))
        own = ("python", "mine.py") if script else ()
        settings = Cluster("image", kind, store_secret="s3" if data else "")
        made = export_kubernetes(ExportRequest(config, "Toy", own, folder), settings)
        self.kubelet = Kubelet([*made.manifests, made.secret], folder, {"s3": KEYS})
        self.nodes = [pod for pod in self.kubelet.pods if pod.indexed]
        self.hosts = dict(zip(self.nodes, cluster.hosts, strict=True))
        for pod in self.kubelet.pods:
            if not pod.indexed:
                self.partition = pod
                self.hosts[pod] = cluster.hosts[0]
        self.names = {f"{pod.hostname}.{pod.subdomain}": self.hosts[pod].address for pod in self.nodes}

    def start(self, *pods: Pod) -> list[subprocess.Popen[str]]:
        return [self.kubelet.start(pod, self.hosts[pod], self.names) for pod in pods]

    def logs(self) -> str:
        return "\n".join(self.kubelet.log(pod) for pod in self.kubelet.pods)

    def node_file(self, k: int, name: str) -> Path:
        return self.kubelet.volume / f"runs/toy/node{k}/{name}"

    def losses(self) -> dict[int, float]:
        """Return the train loss by epoch."""
        lines = map(json.loads, self.node_file(0, "metrics-rank0.jsonl").read_text().splitlines())
        return {line["epoch"]: line["loss"] for line in lines if line["kind"] == "epoch"}


@pytest.mark.slow
def test_pods_train_and_resume_with_equal_losses(tmp_path: Path, make_cluster: Callable[..., NetCluster]) -> None:
    cluster = make_cluster(2, shared_folder=tmp_path)
    first = Scene(tmp_path / "jobset", cluster, "jobset")
    assert [process.wait(DEADLINE) for process in first.start(first.partition)] == [0], first.logs()
    assert [process.wait(DEADLINE) for process in first.start(*first.nodes)] == [0, 0], first.logs()
    assert "rank0 | " in first.kubelet.log(first.nodes[0])
    assert len(first.losses()) == 3

    scene = Scene(tmp_path / "job", cluster, "job")  # its pods start in any order
    *nodes, partition = scene.start(*scene.nodes, scene.partition)
    wait_until(lambda: scene.node_file(0, "checkpoints/epoch-0001.pt").exists())
    alive = scene.nodes[0].container["livenessProbe"]["exec"]["command"]
    assert scene.kubelet.execute(scene.nodes[0], alive).returncode == 0
    (rank,) = [
        pid
        for pid, line in scene.kubelet.processes(scene.nodes[1])
        if " -m trainer train " in line and "rank_runner" not in line
    ]
    os.kill(rank, signal.SIGKILL)
    assert [process.wait(DEADLINE) for process in (partition, *nodes)] == [0, 1, 1], scene.logs()
    assert "node1: failed: rank 1 was killed by signal 9 (SIGKILL)" in scene.kubelet.log(scene.nodes[1])

    later, lead = scene.start(*reversed(scene.nodes))
    assert [process.wait(DEADLINE) for process in (lead, later)] == [0, 0], scene.logs()
    assert "attempt 1: resuming from /gnnfleet/runs/toy/node0/checkpoints/epoch-000" in scene.logs()
    assert scene.losses() == pytest.approx(first.losses(), abs=1e-5)
    attempts = [json.loads(scene.node_file(k, "attempt.json").read_text()) for k in (0, 1)]
    assert attempts == [{"attempt": 1}] * 2


@pytest.mark.slow
def test_own_script_of_clients_and_the_end_of_a_pod(tmp_path: Path, make_cluster: Callable[..., NetCluster]) -> None:
    cluster = make_cluster(2, shared_folder=tmp_path)
    nodes = "[{host: a, role: server}, {host: b, role: client}]"
    scene = Scene(tmp_path / "roles", cluster, "jobset", SCRIPT, nodes)
    assert [pod.hostname for pod in scene.nodes] == ["toy-servers-0-0", "toy-clients-0-0"]
    assert [process.wait(DEADLINE) for process in scene.start(scene.partition)] == [0], scene.logs()
    server, client = scene.start(*scene.nodes)
    wait_until(lambda: "seeds: 1200" in scene.kubelet.log(scene.nodes[1]))
    command = " ".join(scene.nodes[1].container["command"])
    (pid,) = [pid for pid, line in scene.kubelet.processes(scene.nodes[1]) if line == command]
    os.kill(pid, signal.SIGTERM)  # as kubectl delete does
    assert [server.wait(DEADLINE), client.wait(DEADLINE)] == [1, 1], scene.logs()
    assert "node1: stopped: its supervisor got SIGTERM" in scene.kubelet.log(scene.nodes[1])
    assert "node0: done: node1 (toy-clients-0-0.toy): its supervisor got SIGTERM" in scene.kubelet.log(scene.nodes[0])
    assert [process.wait(DEADLINE) for process in scene.start(*scene.nodes)] == [0, 0], scene.logs()


@pytest.mark.slow
def test_pods_fetch_their_parts_from_a_store(tmp_path: Path, make_cluster: Callable[..., NetCluster]) -> None:
    pytest.importorskip("moto", reason="the S3 server moto is not installed")
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    cluster = make_cluster(2, shared_folder=tmp_path)
    with s3_server(f"{cluster.prefix}.1") as s3:
        data = f"  store: s3://bucket/toy\n  store_options: {{endpoint_url: '{s3.endpoint}'}}\n  topology: partitioned"
        scene = Scene(tmp_path / "store", cluster, "jobset", data=data)
        early = scene.start(scene.nodes[1])
        assert [process.wait(DEADLINE) for process in early] == [2], scene.logs()
        assert "s3://bucket/toy has no parts, as it has no manifest.json" in scene.kubelet.log(scene.nodes[1])
        words = ["partition", "push", "--config", "cluster.yml"]
        program = [sys.executable, str(REPOSITORY / "launch.py"), *words]
        subprocess.run(program, cwd=tmp_path / "store", env={**os.environ, **KEYS}, check=True, timeout=DEADLINE)
        s3.requests.clear()
        assert [process.wait(DEADLINE) for process in scene.start(*scene.nodes)] == [0, 0], scene.logs()
        assert len(scene.losses()) == 3
        for k, pod in enumerate(scene.nodes):
            tops = {request.path.split("/")[2] for request in s3.of(scene.hosts[pod].address) if "/" in request.path}
            assert tops == {"manifest.json", "shared", f"part{k}"}
        s3.flip_byte("toy/part1/nodes/node/attrs/x.npy")
        again = scene.start(scene.nodes[1])
        assert [process.wait(DEADLINE) for process in again] == [1], scene.logs()
        log = scene.kubelet.log(scene.nodes[1])
        assert "error: s3://bucket/toy/part1/nodes/node/attrs/x.npy: digest " in log and "Traceback" not in log
