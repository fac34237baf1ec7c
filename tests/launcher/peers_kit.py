"""Test kit for the connections between supervisors: several supervisors of one run on this machine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from launcher.node.child_process import Loop
from launcher.node.peers.hub import Hub
from launcher.node.spec import NodeSpec, RunNode
from launcher.node.supervisor.health import Health
from launcher.node.supervisor.journal import Journal
from launcher.node.supervisor.outcomes import OutcomeBook
from node_kit import NODE, PYTHON, RANK_RUNNER, RunFolder
from ports import free_port
from waiting import DEADLINE, wait_until

SLEEP = "import time; print('up', flush=True); time.sleep(60)"
SERVE = "import pathlib, time; pathlib.Path('server.ready').touch(); print('serving', flush=True); time.sleep(60)"


class Run:
    """A run of ``count`` nodes without a launcher: a supervisor on each, and a rank unless the node is a server.

    roles: one letter per node (w: worker, s: server, c: client). parts: the parts of each node.
    """

    def __init__(
        self, folder: Path, count: int, *, argv: list[str] | None = None, roles: str = "", parts: Any = (), **more: Any
    ) -> None:
        self.port = free_port()
        self.lead = next((k for k, role in enumerate(roles) if role != "s"), 0)
        self.nodes: list[RunFolder] = []
        here = {"address": "127.0.0.1", "bind": "127.0.0.1"}
        everyone: list[dict[str, Any]] = [{"label": f"node{k} (gpu{k})", **here} for k in range(count)]
        everyone[self.lead]["control_port"] = self.port
        for k in range(count):
            node = RunFolder(folder / f"node{k}", node_rank=k, num_nodes=count, **more)
            node.token = node.spec["token"] = self.nodes[0].token if k else node.token
            node.spec |= {"hub": self.lead, "nodes": everyone}
            node.spec.setdefault("peer_timeout", 3.0)
            self.rank(node, argv or [PYTHON, "-c", SLEEP])
            if roles:
                self.give_role(node, roles, parts)
            self.nodes.append(node)

    def give_role(self, node: RunFolder, roles: str, parts: Any) -> None:
        k = node.spec["node_rank"]
        role = {"w": "worker", "s": "server", "c": "client"}[roles[k]]
        node.own.update({"role": role, "parts": parts[k] if parts else []})
        if role == "server":
            node.spec["trainer"] = None
            node.own["ranks"] = []
        if role != "client":
            node.spec["server"] = {"argv": [PYTHON, "-c", SERVE], "env": {}, "cwd": str(node.path)}

    def rank(self, node: RunFolder, argv: list[str]) -> None:
        """Let the node run one rank, numbered like the node."""
        k = node.spec["node_rank"]
        runner = [PYTHON, str(RANK_RUNNER), "--run-dir", str(node.path), "--await-server", "--", *argv]
        node.spec["trainer"] = {
            "argv": runner,
            "env": {"PYTHONPATH": str(NODE / "site")},
            "cwd": str(node.path),
        }
        node.own["ranks"] = [k]

    def reach_hub_at(self, k: int, port: int) -> None:
        """Let node ``k`` connect to another port than that of the hub."""
        node = self.nodes[k]
        node.spec["nodes"] = [dict(each) for each in node.spec["nodes"]]
        node.spec["nodes"][self.lead]["control_port"] = port

    def start(self, *, up: bool = True) -> Run:
        """Start every supervisor. With ``up``, wait until all ranks run and all nodes are connected."""
        for node in self.nodes:
            node.start()
        if up:
            self.wait_up()
        return self

    def wait_up(self) -> None:
        for k, node in enumerate(self.nodes):
            if node.spec["trainer"]:
                wait_until(node.says(f"rank{k}", "up"))
        wait_until(lambda: self.met())

    def met(self) -> bool:
        hub = self.nodes[self.lead]
        peers = hub.json("state.json")["peers"] if (hub.path / "state.json").exists() else {}
        connected = ("training", "serving", "failed")
        return len(peers) == len(self.nodes) - 1 and all(peer["state"] in connected for peer in peers.values())

    def ends(self, since: float, within: float = 10.0) -> list[dict[str, Any]]:
        """Return each node's result.json, or {} without one.

        Fails unless all processes end within ``within`` seconds of the time ``since``.
        """
        for node in self.nodes:
            assert node.supervisor is not None
            node.supervisor.wait(max(0.1, since + within + 5 - time.monotonic()))
        wait_until(
            lambda: not any(node.processes() for node in self.nodes), max(0.1, since + within - time.monotonic())
        )
        seconds = time.monotonic() - since
        print(f"clean after {seconds:.1f} s")
        assert seconds < within
        results = [node.path / "result.json" for node in self.nodes]
        return [self.nodes[k].json("result.json") if path.exists() else {} for k, path in enumerate(results)]

    def kill(self) -> None:
        for node in self.nodes:
            if node.supervisor is not None and node.supervisor.poll() is None:
                os.kill(node.supervisor.pid, signal.SIGCONT)
            node.kill()


class Proxy:
    """A TCP proxy to ``port``. While ``cut`` is true, it forwards nothing but keeps all connections open."""

    def __init__(self, port: int) -> None:
        self.target, self.cut = port, False
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                here = self._listener.accept()[0]
                while self.cut:
                    time.sleep(0.02)
                connected = socket.create_connection(("127.0.0.1", self.target), 5)
            except OSError:
                if self._listener.fileno() < 0:
                    return
                here.close()
                continue
            self._sockets += [here, connected]
            for source, sink in ((here, connected), (connected, here)):
                threading.Thread(target=self._carry, args=(source, sink), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        while True:
            try:
                data = source.recv(1 << 16)
                while self.cut:
                    time.sleep(0.02)
                if not data:
                    return sink.close()
                sink.sendall(data)
            except OSError:
                return

    def close(self) -> None:
        self.cut = False
        for opened in [self._listener, *self._sockets]:
            opened.close()


@contextmanager
def tcp_proxy(port: int) -> Iterator[Proxy]:
    made = Proxy(port)
    try:
        yield made
    finally:
        made.close()


def control(action: str, node: RunFolder, *options: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, str(NODE / "control.py"), action, str(node.path), *options]
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=DEADLINE)


def health_of(tmp_path: Path, **more: Any) -> tuple[Health, Hub]:
    """Return the ``Health`` of node 0 of two nodes, and its hub, which has no connections."""
    nodes = (RunNode("node0 (gnn1)", ranks=(0,)), RunNode("node1 (gnn2)", ranks=(1,)))
    spec = NodeSpec("r1", "t", 0, str(tmp_path), nodes, None, None, start_timeout=9.0, grace=1.0, **more)
    hub = Hub(spec, loop=cast(Loop, None))
    hub.members[1].own_ranks = (1,)
    for folder in ("procs", "logs"):
        (tmp_path / folder).mkdir()
    book = OutcomeBook(Journal(str(tmp_path), 0), 0, (0,))
    return Health(spec, book, hub, lambda seconds: None), hub
