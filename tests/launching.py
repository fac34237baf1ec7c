"""Runs launch.py as a process, as a user does, and reads its output and run folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import yaml

from ports import free_port

REPOSITORY = Path(__file__).resolve().parents[1]
SYNTHETIC = {"num_nodes": 3000, "avg_degree": 12, "num_classes": 5, "num_features": 16}
TRAIN = {"hidden": 32, "fanouts": [5, 5], "batch_size": 256, "epochs": 2, "seed": 3, "timeout": 60}


@dataclass(frozen=True)
class Launched:
    status: int
    output: str  #: stdout and stderr
    folder: Path  #: its working directory, which contains runs/

    @property
    def run_dir(self) -> Path:
        (run_dir,) = (self.folder / "runs").iterdir()
        return run_dir

    @property
    def result(self) -> dict:
        return json.loads((self.run_dir / "result.json").read_text())

    def metrics(self, kind: str) -> list[dict]:
        lines = (self.run_dir / "metrics.jsonl").read_text().splitlines()
        return [line for line in map(json.loads, lines) if line["kind"] == kind]

    def step_losses(self, epoch: int = 1) -> list[float]:
        (line,) = (line for line in self.metrics("epoch") if line["epoch"] == epoch and "step_loss" in line)
        return line["step_loss"]


def write_config(folder: Path, nodes: list[dict], **sections: dict) -> Path:
    data = {"dataset": "synthetic", "options": SYNTHETIC, "folder": "parts"} | sections.pop("data", {})
    train = TRAIN | sections.pop("train", {})
    path = folder / "cluster.yml"
    path.write_text(yaml.safe_dump({"nodes": nodes, "data": data, "train": train, **sections}))
    return path


def local_config(folder: Path, procs: list[int], workdirs: Path | None = None, **sections: dict) -> Path:
    """Write a cluster.yml of local nodes with reserved ports.

    procs: number of processes of each node. workdirs: parent of the work folders, by default ``folder``.
    """
    # ports are reserved: two runs that choose ports with `auto` at the same moment may choose the same ones
    state = workdirs or folder
    own = {"python": sys.executable, "env": {"GNNFLEET_KERNELS": os.environ["GNNFLEET_KERNELS"]}}
    nodes = [
        {"host": "localhost", "procs": count, "workdir": str(state / f"node{rank}"), **own}
        for rank, count in enumerate(procs)
    ]
    run = own_ports() | sections.pop("run", {})
    return write_config(folder, nodes, transport="local", run=run, **sections)


def own_ports() -> dict[str, int]:
    """Reserve ports for a run on local nodes, and return them as settings of the section `run`."""
    first = free_port(10)  # a run on one machine also uses ports after these three
    return {"master_port": first, "control_port": first + 1, "service_port": first + 2}


def start(config: Path, *words: str, env: dict[str, str] | None = None, own_group: bool = False) -> subprocess.Popen:
    """Start ``launch.py --config`` in the folder of the config. Its stdout and stderr go to one pipe."""
    command = [sys.executable, str(REPOSITORY / "launch.py"), "--config", str(config), *words]
    environment = {"COLUMNS": "200"} | dict(os.environ if env is None else env)  # tables without wrapped cells
    environment.pop("TMUX", None)
    return subprocess.Popen(
        command, cwd=config.parent, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL, text=True, start_new_session=own_group,
    )  # fmt: skip


def launch(config: Path, *words: str, env: dict[str, str] | None = None, timeout: float = 200) -> Launched:
    process = start(config, *words, env=env)
    try:
        output, _ = process.communicate(timeout=timeout)
    except BaseException:
        process.kill()
        raise
    return Launched(process.returncode, output, config.parent)


class Running:
    def __init__(self, config: Path, *words: str, env: dict[str, str] | None = None, own_group: bool = False):
        self.folder, self.process = config.parent, start(config, *words, env=env, own_group=own_group)
        self.lines: list[str] = []
        self._news = threading.Condition()
        self._over = False
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._news:
                self.lines.append(line)
                self._news.notify_all()
        with self._news:
            self._over = True
            self._news.notify_all()

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def await_line(self, text: str, timeout: float = 90) -> Running:
        with self._news:
            self._news.wait_for(lambda: self._over or any(text in line for line in self.lines), timeout)
        if not any(text in line for line in self.lines):
            self.process.kill()
            raise AssertionError(f"launch.py has not printed {text!r}:\n{self.output}")
        return self

    def send(self, signum: int) -> Running:
        self.process.send_signal(signum)
        return self

    def end(self, timeout: float = 60) -> Launched:
        """Wait until launch.py ends, and kill it after ``timeout`` seconds."""
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"launch.py has not ended within {timeout:g} s:\n{self.output}") from None
        with self._news:
            self._news.wait_for(lambda: self._over, 5)
        return Launched(self.process.returncode, self.output, self.folder)
