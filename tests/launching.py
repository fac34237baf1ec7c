"""Runs launch.py as a process, as a user does, and reads its output and run folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from launcher.command import Command
from launcher.config.loader import load_config
from launcher.config.resolve import resolve_run
from launcher.plan import partition
from ports import free_port
from waiting import DEADLINE

REPOSITORY = Path(__file__).resolve().parents[1]
SYNTHETIC = {"num_nodes": 3000, "avg_degree": 12, "num_classes": 5, "num_features": 16}
TRAIN = {"hidden": 32, "fanouts": [5, 5], "batch_size": 256, "epochs": 2, "seed": 3, "timeout": 60}


#: Returns the path on this machine for the address of a node's host and a path on that host.
Place = Callable[[str, str], Path]


def here(address: str, path: str) -> Path:
    return Path(path)


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


def json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a JSON Lines file; [] if there is no file."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.rpartition("\n")[0].splitlines()]


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
    # one thread: beside other tests, those of an operation of torch spend most of their time waiting for each other
    env = {"GNNFLEET_KERNELS": os.environ["GNNFLEET_KERNELS"], "OMP_NUM_THREADS": "1"}
    own = {"python": sys.executable, "env": env}
    nodes = [
        {"host": "localhost", "procs": count, "workdir": str(state / f"node{rank}"), **own}
        for rank, count in enumerate(procs)
    ]
    run = own_ports() | sections.pop("run", {})
    return write_config(folder, nodes, transport="local", run=run, **sections)


def make_parts(config: Path) -> None:
    """Make the parts that the launch of ``config`` would make, in a forked process that has loaded torch."""
    from forked import fork  # of the trainer's tests

    def partition_in_fork(command: Command, console: Console) -> None:
        done = fork(command.argv[1:], {**os.environ, **command.env}, config.parent)
        assert done.wait() == 0, done.output

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(config.parent)
        patch.setattr(partition, "run_partitioner", partition_in_fork)
        partition.ensure_parts(resolve_run(load_config(config)), Console(quiet=True))


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


def launch(config: Path, *words: str, env: dict[str, str] | None = None, timeout: float = DEADLINE) -> Launched:
    process = start(config, *words, env=env)
    try:
        output, _ = process.communicate(timeout=timeout)
    except BaseException:
        process.kill()
        raise
    return Launched(process.returncode, output, config.parent)


class Running:
    def __init__(self, config: Path, *words: str, env: dict[str, str] | None = None, own_group: bool = False):
        self.folder = config.parent
        self._earlier = set(self.folder.glob("runs/*"))
        self.process = start(config, *words, env=env, own_group=own_group)
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

    def await_line(self, text: str, timeout: float = DEADLINE) -> Running:
        with self._news:
            self._news.wait_for(lambda: self._over or any(text in line for line in self.lines), timeout)
        if not any(text in line for line in self.lines):
            self.process.kill()
            raise AssertionError(f"launch.py has not printed {text!r}:\n{self.output}")
        return self

    @property
    def run_dir(self) -> Path:
        """Return the folder of this launch in ``runs``. Fails if there is none yet."""
        (run_dir,) = set(self.folder.glob("runs/*")) - self._earlier
        return run_dir

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Return the events of ``kind`` that the run has recorded in events.jsonl so far."""
        paths = [path / "events.jsonl" for path in set(self.folder.glob("runs/*")) - self._earlier]
        return [line for path in paths for line in json_lines(path) if line["kind"] == kind]

    def await_event(self, kind: str, number: int = 1, **values: Any) -> Running:
        """Wait until the run has recorded ``number`` events of ``kind`` with these values."""

        def come() -> bool:
            return sum(values.items() <= event.items() for event in self.events(kind)) >= number

        return self.await_true(come, f"an event {kind} with {values}")

    def epoch(self, place: Place = here) -> int:
        """Return the last epoch of which a rank has recorded a step or the end on its node, or 0."""
        nodes = json.loads((self.run_dir / "run.json").read_text())["plan"]["nodes"]
        folders = [place((node["login"] or {"host": "localhost"})["host"], node["run_dir"]) for node in nodes]
        lines = [line for folder in folders for path in folder.glob("metrics-*") for line in json_lines(path)]
        return max((line.get("epoch", 0) for line in lines), default=0)

    def await_epoch(self, epoch: int, place: Place = here) -> Running:
        """Wait until a rank has recorded a step or the end of ``epoch``, or of a later one."""
        self.await_event("stage", stage="start")
        return self.await_true(lambda: self.epoch(place) >= epoch, f"epoch {epoch}")

    def await_true(self, true: Callable[[], bool], what: str) -> Running:
        """Call ``true`` until its result is true. Fail if launch.py ends before; ``what`` is for the message."""
        deadline = time.monotonic() + DEADLINE
        over = False
        while not true():
            if over or time.monotonic() > deadline:
                self.process.kill()
                raise AssertionError(f"{what} has not come:\n{self.output}")
            over = self.process.poll() is not None
            time.sleep(0.05)
        return self

    def send(self, signum: int) -> Running:
        self.process.send_signal(signum)
        return self

    def end(self, timeout: float = DEADLINE) -> Launched:
        """Wait until launch.py ends, and kill it after ``timeout`` seconds."""
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"launch.py has not ended within {timeout:g} s:\n{self.output}") from None
        with self._news:
            self._news.wait_for(lambda: self._over, 5)
        return Launched(self.process.returncode, self.output, self.folder)
