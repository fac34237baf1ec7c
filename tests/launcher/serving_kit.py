"""Test kit: starts serving clusters of local nodes, and runs that attach to them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from launching import REPOSITORY, SYNTHETIC, TRAIN
from waiting import DEADLINE


@dataclass(frozen=True)
class Finished:
    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Parse stdout, or else its last line, as JSON."""
        try:
            return json.loads(self.out)
        except ValueError:
            return json.loads(self.out.splitlines()[-1])


class ServingKit:
    """Runs ``gnnfleet`` commands in ``folder``. Work folders of nodes are below ``workdirs``."""

    def __init__(self, folder: Path, workdirs: Path):
        self.folder, self.workdirs = folder, workdirs

    def gnnfleet(self, *words: str, timeout: float = DEADLINE, env: dict[str, str] | None = None) -> Finished:
        process = self.start(*words, env=env)
        out, err = process.communicate(timeout=timeout)
        return Finished(process.returncode, out, err)

    def start(self, *words: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        environment = {"COLUMNS": "200", **os.environ, **(env or {})}
        environment.pop("TMUX", None)
        command = [sys.executable, str(REPOSITORY / "launch.py"), *words]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command, cwd=self.folder, env=environment, stdout=pipe, stderr=pipe, stdin=subprocess.DEVNULL, text=True
        )

    def serving(self, name: str, servers: int, **sections: Any) -> Path:
        nodes = [self._node(f"node{k}", role="server") for k in range(servers)]
        data = {"dataset": "synthetic", "options": SYNTHETIC, "folder": "parts"} | sections.pop("data", {})
        return self._write(f"{name}.yml", {"name": name, "nodes": nodes, "data": data, **sections})

    def training(self, name: str, serving: str, clients: int = 2, **sections: Any) -> Path:
        nodes = [self._node(f"node{k}") for k in range(clients)]
        train = TRAIN | sections.pop("train", {})
        values = {"name": name, "nodes": nodes, "data": {"serving": serving}, "train": train, **sections}
        return self._write(f"{name}.yml", values)

    def _node(self, folder: str, **more: Any) -> dict[str, Any]:
        return {"host": "localhost", "workdir": str(self.workdirs / folder), "python": sys.executable, **more}

    def _write(self, name: str, values: dict[str, Any]) -> Path:
        path = self.folder / name
        path.write_text(yaml.safe_dump({"transport": "local", **values}))
        return path

    def run_dir(self, name: str, server: int) -> Path:
        return self.workdirs / f"node{server}" / "runs" / name / f"node{server}"

    def state(self, name: str, server: int) -> dict[str, Any]:
        return json.loads((self.run_dir(name, server) / "state.json").read_text())

    def cluster(self, name: str, server: int) -> dict[str, Any]:
        return json.loads((self.run_dir(name, server) / "cluster.json").read_text())
