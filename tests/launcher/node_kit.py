"""Test kit for the supervisor and other node programs: run folders of single nodes, with real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from launcher.node import procs
from ports import free_port
from waiting import DEADLINE, wait_until

ROOT = Path(__file__).resolve().parents[2]
NODE = ROOT / "launcher" / "node"
SUPERVISOR = NODE / "supervisor" / "supervisor.py"
RANK_RUNNER = NODE / "supervisor" / "rank_runner.py"
PYTHON = sys.executable
GRACE = 1.0


def python(code: str) -> list[str]:
    return [PYTHON, "-c", code]


class RunFolder:
    def __init__(self, path: Path, *, server: list[str] | None = None, num_nodes: int = 1, **more: Any) -> None:
        self.path = path
        self.token = uuid.uuid4().hex
        env = {"GNNFLEET_KERNELS": str(path / "kernels")}
        self.spec: dict[str, Any] = {
            "run_id": "test",
            "token": self.token,
            "node_rank": 0,
            "run_dir": str(path),
            "nodes": [{"label": f"node{k}"} for k in range(max(num_nodes, more.get("node_rank", 0) + 1))],
            "server": {"argv": server, "env": env, "cwd": str(path)} if server else None,
            "trainer": None,
            "start_timeout": 10.0,
            "grace": GRACE,
            "server_restarts": 0,
            **more,
        }
        (path / "kernels").mkdir(parents=True, exist_ok=True)
        (path / "kernels/compiled.nbc").touch()  # without it, a server may take minutes to compile its own
        self.supervisor: subprocess.Popen[bytes] | None = None

    @property
    def own(self) -> dict[str, Any]:
        """This node in the list of all nodes."""
        nodes: list[dict[str, Any]] = self.spec["nodes"]
        return nodes[self.spec["node_rank"]]

    def rank(self, argv: list[str], env: Mapping[str, str] | None = None) -> RunFolder:
        return self.ranks(argv, 1, env)

    def ranks(self, argv: list[str], nproc: int, env: Mapping[str, str] | None = None) -> RunFolder:
        """Let the node run ``nproc`` ranks, through the rank runner as in a real launch."""
        runner = [PYTHON, str(RANK_RUNNER), "--run-dir", str(self.path), "--await-server", "--", *argv]
        self.spec["trainer"] = {"argv": runner, "env": dict(env or {}), "cwd": str(self.path)}
        self.own.update({"ranks": list(range(nproc)), "address": "127.0.0.1", "master_port": free_port()})
        return self

    def write_spec(self) -> Path:
        path = self.path / "node.json"
        path.write_text(json.dumps(self.spec))
        return path

    def start(self) -> RunFolder:
        argv = [PYTHON, "-S", str(SUPERVISOR), str(self.write_spec())]  # as in a run
        self.supervisor = subprocess.Popen(argv, stdout=subprocess.DEVNULL, start_new_session=True)
        return self

    def end(self, timeout: float = DEADLINE) -> dict[str, Any]:
        """Wait for the end of the supervisor and return its result.json. Fails if a process of the run still lives."""
        assert self.supervisor is not None
        status = self.supervisor.wait(timeout)
        result: dict[str, Any] = self.json("result.json")
        assert status == (0 if result["state"] == "done" else 1)
        assert self.processes() == []
        return result

    def run(self, timeout: float = DEADLINE) -> dict[str, Any]:
        return self.start().end(timeout)

    def processes(self) -> list[str]:
        """Return the command lines of all processes of this node, except the supervisor."""
        found = procs.with_variable(f"{procs.TOKEN}={procs.node_token(self.token, self.spec['node_rank'])}")
        return [procs.command_line(process.pid) for process in found]

    def json(self, name: str) -> Any:
        return json.loads((self.path / name).read_text())

    def outcome(self, name: str) -> dict[str, Any]:
        record: dict[str, Any] = self.json(f"outcomes/{name}.json")
        return record

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.path / "events.jsonl").read_text().splitlines()]

    def log(self, name: str) -> list[str]:
        """Return the lines of ``logs/<name>.log`` without their time stamps; [] if the file does not exist."""
        path = self.path / "logs" / f"{name}.log"
        return [line.partition(" ")[2] for line in path.read_text().split("\n")[:-1]] if path.exists() else []

    def says(self, name: str, text: str) -> Callable[[], bool]:
        """Return a condition for ``wait_until``: a line of ``logs/<name>.log`` contains ``text``."""
        return lambda: any(text in line for line in self.log(name))

    def pid(self, name: str) -> int:
        """Return the pid of process ``name`` as soon as state.json has it."""
        return int(wait_until(lambda: self._recorded(name)))

    def _recorded(self, name: str) -> int | None:
        path = self.path / "state.json"
        found = json.loads(path.read_text())["processes"] if path.exists() else []
        return next((process["pid"] for process in found if process["name"] == name), None)

    def kill(self) -> None:
        if self.supervisor is not None and self.supervisor.poll() is None:
            self.supervisor.kill()
            self.supervisor.wait()
        for process in procs.with_variable(f"{procs.TOKEN}={procs.node_token(self.token, self.spec['node_rank'])}"):
            with suppress(ProcessLookupError):  # the process died together with the supervisor
                os.kill(process.pid, 9)


MakeFolder = Callable[..., RunFolder]
