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

SERVERS = (0, 1)  #: hosts of the graph servers
CLIENTS = (2, 3)
SPARE = 4  #: host of a graph server that joins later
NAME = "toy"


class ServingHosts:
    """One user of the serving cluster ``toy``: commands that this user runs, and checks of the cluster's servers."""

    def __init__(self, cluster: NetCluster, home: Path):
        self.cluster, self.operator = cluster, Operator(cluster, home)
        self.folder = self.operator.cwd

    def gnnfleet(self, *words: str, timeout: float = 150) -> Launched:
        return self.operator.gnnfleet(*words, timeout=timeout)

    def serve(self, hosts: tuple[int, ...] = SERVERS, **sections: Any) -> Launched:
        """Run ``gnnfleet serve`` with a config file that lists graph servers on the hosts ``hosts``."""
        data = {"dataset": "synthetic", "options": SYNTHETIC, "folder": "parts", "num_parts": 4, "replicas": 2}
        config = {"name": NAME, "nodes": self._nodes(hosts, role="server"), "data": data, **sections}
        return self.gnnfleet("serve", "--config", str(self._write(NAME, config)))

    def training(self, name: str, clients: tuple[int, ...], epochs: int = 2, servers: tuple[int, ...] = ()) -> Path:
        """Write the config file of a run with one process on each of the hosts ``clients``. If ``servers`` is given,
        the file also lists these hosts, and gnnfleet looks for the serving cluster there.
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
        """Return the parsed output of ``gnnfleet serve status --json``."""
        argv = [sys.executable, str(REPOSITORY / "launch.py"), "serve", "status", NAME, "--json"]
        done = subprocess.run(argv, cwd=self.folder, env=self.operator.env, capture_output=True, text=True, timeout=60)
        status: dict[str, Any] = json.loads(done.stdout)
        assert status["exit_status"] == done.returncode, done.stderr
        return status

    def served_batches(self) -> dict[str, int]:
        """Return, by run id, the number of batches that all servers together have made for the clients of the run so
        far.
        """
        made: dict[str, int] = {}
        for node in self.status()["nodes"]:
            for client in node["stats"].get("clients", ()):
                run = client["name"].split("/")[0]
                made[run] = made.get(run, 0) + client["batches"]
        return made

    def guests(self, k: int, node_rank: int | None = None) -> list[str]:
        """Return the names of the client keys that the graph server on host k accepts.

        ``node_rank`` is the node rank of the server, by default k.
        """
        run_dir = f"{WORKDIR}/runs/{NAME}/node{k if node_rank is None else node_rank}"
        folder = self.cluster.hosts[k].root_path(f"{run_dir}/clients")
        return sorted(path.stem for path in folder.glob("*.key"))

    def supervisor(self, k: int) -> int:
        """Return the pid of the supervisor of graph server k, as its host sees it."""
        path = self.cluster.hosts[k].root_path(f"{WORKDIR}/runs/{NAME}/node{k}/state.json")
        return int(json.loads(path.read_text())["pid"])

    def kill_run(self, running: Running, clients: tuple[int, ...]) -> None:
        """Kill the launcher of a run and all processes on the hosts ``clients`` with SIGKILL."""
        running.process.kill()
        for k in clients:
            for process in self.cluster.hosts[k].processes():
                self.cluster.hosts[k].run(["kill", "-9", str(process.pid)], check=False)

    def curve(self, name: str) -> list[float]:
        """Return the global loss of each step of the finished run ``name``."""
        lines = map(json.loads, (self.folder / "runs" / name / "metrics.jsonl").read_text().splitlines())
        epochs = {line["epoch"]: line["step_loss"] for line in lines if line["kind"] == "epoch" and "step_loss" in line}
        return [loss for epoch in sorted(epochs) for loss in epochs[epoch]]
