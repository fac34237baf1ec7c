"""Test kit for a serving cluster on hosts in network namespaces, and for runs that attach to it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from launching import REPOSITORY, SYNTHETIC, TRAIN, Launched, Running
from netns import NetCluster
from operator_kit import Operator
from ssh_nodes import WORKDIR, ssh_nodes
from waiting import DEADLINE

SERVERS = (0, 1)  #: hosts of the graph servers
CLIENTS = (2, 3)
NAME = "toy"


class ServingHosts:
    def __init__(self, cluster: NetCluster, home: Path):
        self.cluster, self.operator = cluster, Operator(cluster, home)
        self.folder = self.operator.cwd

    def gnnfleet(self, *words: str, timeout: float = DEADLINE) -> Launched:
        return self.operator.gnnfleet(*words, timeout=timeout)

    def serve(self, **sections: Any) -> Launched:
        data = {"dataset": "synthetic", "options": SYNTHETIC, "folder": "parts", "num_parts": 4, "replicas": 2}
        config = {"name": NAME, "nodes": self._nodes(SERVERS, role="server"), "data": data, **sections}
        return self.gnnfleet("serve", "--config", str(self._write(NAME, config)))

    def training(self, name: str, clients: tuple[int, ...], epochs: int = 2, servers: tuple[int, ...] = ()) -> Path:
        """Write the config of a run with one process on each of the hosts ``clients``.

        servers: further hosts, on which gnnfleet looks for the serving cluster.
        """
        nodes = [*self._nodes(servers, role="server"), *self._nodes(clients, role="client")]
        data, train = {"serving": NAME}, TRAIN | {"epochs": epochs, "batch_size": 128}
        run = {"server_wait": 30}
        return self._write(name, {"name": name, "nodes": nodes, "data": data, "train": train, "run": run})

    def start(self, name: str, clients: tuple[int, ...], epochs: int = 2, servers: tuple[int, ...] = ()) -> Running:
        config = self.training(name, clients, epochs, servers)
        return Running(config, "--run-id", name, "--plain", env=self.operator.env)

    def _nodes(self, hosts: tuple[int, ...], role: str) -> list[dict[str, Any]]:
        nodes = ssh_nodes(self.cluster)
        for k in hosts:
            del nodes[k]["procs"]
        return [{**nodes[k], "role": role} for k in hosts]

    def _write(self, name: str, values: dict[str, Any]) -> Path:
        path = self.folder / f"{name}.yml"
        path.write_text(yaml.safe_dump(values))
        return path

    def status(self) -> dict[str, Any]:
        argv = [sys.executable, str(REPOSITORY / "launch.py"), "serve", "status", NAME, "--json"]
        done = subprocess.run(
            argv, cwd=self.folder, env=self.operator.env, capture_output=True, text=True, timeout=DEADLINE
        )
        status: dict[str, Any] = json.loads(done.stdout)
        assert status["exit_status"] == done.returncode, done.stderr
        return status

    def served_batches(self) -> dict[str, int]:
        """Return the number of batches made for each run id, over all servers."""
        made: dict[str, int] = {}
        for node in self.status()["nodes"]:
            for client in node["stats"].get("clients", ()):
                run = client["name"].split("/")[0]
                made[run] = made.get(run, 0) + client["batches"]
        return made

    def guests(self, k: int) -> list[str]:
        folder = self.cluster.hosts[k].root_path(f"{WORKDIR}/runs/{NAME}/node{k}/clients")
        return sorted(path.stem for path in folder.glob("*.key"))

    def endpoints(self) -> list[str]:
        """Return the addresses of all servers, as the second server knows them."""
        path = self.cluster.hosts[1].root_path(f"{WORKDIR}/runs/{NAME}/node1/cluster.json")
        return [node["endpoint"] for node in json.loads(path.read_text())["nodes"]]

    def supervisor(self, k: int) -> int:
        """Return the supervisor's pid, as the host sees it."""
        path = self.cluster.hosts[k].root_path(f"{WORKDIR}/runs/{NAME}/node{k}/state.json")
        return int(json.loads(path.read_text())["pid"])

    def kill_run(self, running: Running, clients: tuple[int, ...]) -> None:
        running.process.kill()
        for k in clients:
            for process in self.cluster.hosts[k].processes():
                self.cluster.hosts[k].run(["kill", "-9", str(process.pid)], check=False)

    def curve(self, name: str) -> list[float]:
        lines = map(json.loads, (self.folder / "runs" / name / "metrics.jsonl").read_text().splitlines())
        epochs = {line["epoch"]: line["step_loss"] for line in lines if line["kind"] == "epoch" and "step_loss" in line}
        return [loss for epoch in sorted(epochs) for loss in epochs[epoch]]
