"""Test kit for runs of graph servers and clients on hosts in network namespaces."""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from launching import Launched, Running, launch, local_config, write_config
from netns import Host, NetCluster
from netns_tools import Process
from ssh_nodes import ssh_nodes
from waiting import DEADLINE

SERVERS, CLIENTS = (0, 1), (2, 3, 4)  #: node ranks; the first client is the lead node
EPOCHS, SEEDS, STEPS = 3, 900, 30  #: epochs of a run; train seeds and steps of each epoch
GRAPH = {"num_nodes": 3000, "avg_degree": 12, "num_classes": 5, "num_features": 16}
TRAIN = {"hidden": 16, "fanouts": [5, 5], "batch_size": 30, "epochs": EPOCHS, "seed": 3, "timeout": 60}
Section = dict[str, Any]
RESTARTS = {"restarts": 3, "train": {"checkpoint_seconds": 0.2}}  #: arguments of ``Stage.run``
#: The bundled trainer with a pause after each step. It records the seeds of each step and, as ``generation``, how often
#: the run has started again.
NOTED = """
import json, os, sys, time
from trainer import __main__ as program
from trainer.cli import main
from trainer.loader.block_loader import BatchLoader

pause, words = float(sys.argv[1]), sys.argv[2:]
generation = int(os.environ.get("GNNFLEET_RESTART") or 0)
name = f"notes-{generation}-{os.environ['RANK']}"
notes = open(os.path.join(os.environ["GNNFLEET_RUN_DIR"], name), "w", buffering=1)
epoch_of = BatchLoader.epoch

def batches(loader, epoch, first_step=0):
    for batch in epoch_of(loader, epoch, first_step):
        if loader.settings.split == "train":
            at = {"generation": generation, "epoch": epoch, "step": batch.step}
            notes.write(json.dumps({**at, "seeds": batch.input_id.tolist()}) + chr(10))
        yield batch
        if loader.settings.split == "train":
            time.sleep(pause)

BatchLoader.epoch = batches
main(["train", *words])
program._status.append(0)  # so that no destructor aborts the finished rank, as in `python -m trainer`
"""


@dataclass
class Stage:
    """Five hosts for runs of two graph servers and several clients, and the losses of a run with one process."""

    cluster: NetCluster
    folder: Path  #: folder of all runs, and of the parts that all runs use
    curves: list[list[float]]  #: losses of the run with one process: for each epoch, the global loss of each step
    procs: Sequence[int] = (2, 2, 2)  #: number of processes of each client
    serial: int = 0  #: number of the latest run

    def run(
        self, *, pause: float = 0.02, replicas: int = 1, data: Section | None = None, train: Section | None = None,
        **run: Any,
    ) -> Run:  # fmt: skip
        """Start a run.

        data, run: settings in the sections ``data`` and ``run`` of the cluster.yml. train: options of the trainer.
        pause: seconds that a rank waits after each step. replicas: number of copies of each part.
        """
        self.serial += 1
        folder = self.folder / f"{self.folder.name}-{self.serial}"
        folder.mkdir()
        (folder / "noted.py").write_text(NOTED)
        settings, parts = TRAIN | (train or {}), {"folder": str(self.folder / "parts")}
        config = write_config(
            folder,
            server_client_nodes(self.cluster, self.procs),
            data={"options": GRAPH, "num_parts": 4, "replicas": replicas, **parts, **(data or {})},
            run={"connect_timeout": 3, **run},
        )
        argv = ("--run-id", folder.name, "--", "python", "noted.py", str(pause), *flags(settings))
        return Run(self, folder, Running(config, *argv, env=self.cluster.environment()))

    def left(self, besides: Iterable[int] = ()) -> list[str]:
        hosts = [host for k, host in enumerate(self.cluster.hosts) if k not in besides and host.init_pid]
        return [f"{host.name}: {process}" for host in hosts for process in host.processes()]


@dataclass
class Run:
    stage: Stage
    folder: Path
    running: Running
    began: float = field(default_factory=time.monotonic)

    def host(self, k: int) -> Host:
        return self.stage.cluster.hosts[k]

    def path(self, k: int, name: str = "") -> Path:
        """Return the path of ``name`` in node ``k``'s run folder, as seen from outside the host."""
        return self.host(k).folder / "disk/runs" / self.folder.name / f"node{k}" / name

    def await_step(self, epoch: int, step: int, timeout: float = DEADLINE) -> Run:
        until = time.monotonic() + timeout
        while not any((each["epoch"], each["step"]) >= (epoch, step) for each in self.notes(CLIENTS[0])):
            assert self.running.process.poll() is None and time.monotonic() < until, self.running.output
            time.sleep(0.05)
        return self

    def processes(self, k: int, words: str) -> list[Process]:
        """Return the processes of node ``k`` whose command line is a program, usually Python, followed by ``words``."""
        return [each for each in self.host(k).processes() if each.cmdline.partition(" ")[2].startswith(words)]

    def kill_server(self, k: int) -> None:
        self._signal_server(k, signal.SIGKILL)

    def stop_server(self, k: int) -> None:
        """Suspend the graph server of node ``k`` with SIGSTOP."""
        self._signal_server(k, signal.SIGSTOP)

    def _signal_server(self, k: int, signum: int) -> None:
        (process,) = self.processes(k, "-m trainer serve")
        self.host(k).kill(process.pid, signum)

    def kill_rank(self, k: int) -> None:
        self.host(k).kill(self.processes(k, "noted.py")[0].pid)

    def end(self, timeout: float = DEADLINE) -> Launched:
        return self.running.end(timeout)

    def notes(self, k: int) -> list[dict[str, Any]]:
        """Return epoch, step, generation and seeds of each step of node ``k``'s ranks."""
        texts = [path.read_text().rpartition("\n")[0] for path in self.path(k).glob("notes-*")]
        return [json.loads(line) for text in texts for line in text.splitlines()]

    def trained(self) -> Counter[tuple[int, int]]:
        """Count how often each (epoch, seed) was trained. Of a repeated step, only the last execution counts."""
        notes = [note for k, _ in zip(CLIENTS, self.stage.procs, strict=False) for note in self.notes(k)]
        begins: dict[int, tuple[int, int]] = {}  # generation → its first step
        for note in notes:
            at = note["epoch"], note["step"]
            begins[note["generation"]] = min(at, begins.get(note["generation"], at))
        counted: Counter[tuple[int, int]] = Counter()
        for note in notes:
            later = [at for generation, at in begins.items() if generation > note["generation"]]
            if all((note["epoch"], note["step"]) < at for at in later):
                counted.update((note["epoch"], seed) for seed in note["seeds"])
        return counted


def server_client_nodes(cluster: NetCluster, procs: Sequence[int] = (2, 2, 2)) -> list[dict[str, Any]]:
    nodes = ssh_nodes(cluster, (1, 1, *procs))
    for k, node in enumerate(nodes):
        node["role"] = "server" if k in SERVERS else "client"
        if k in SERVERS:
            del node["procs"]
    return nodes


def flags(settings: dict[str, Any]) -> list[str]:
    words = {
        name: ",".join(map(str, value)) if isinstance(value, list) else str(value) for name, value in settings.items()
    }
    return [word for name, value in words.items() for word in (f"--{name.replace('_', '-')}", value)]


def curves_of_one_process(
    folder: Path, workdirs: Path, data: Section | None = None, train: Section | None = None
) -> list[list[float]]:
    """Train in one process on this machine. Return the loss of each step, by epoch."""
    folder.mkdir()
    settings = TRAIN | (train or {})
    done = launch(local_config(folder, [1], workdirs, data=data or {"options": GRAPH}, train=settings), timeout=900)
    assert done.status == 0, done.output
    return [done.step_losses(epoch) for epoch in range(1, settings["epochs"] + 1)]


def same_curves(done: Launched, stage: Stage, rel: float = 1e-4) -> None:
    assert done.status == 0, done.output
    for epoch, curve in enumerate(stage.curves, 1):
        lines = [line for line in done.metrics("epoch") if line["epoch"] == epoch and "step_loss" in line]
        assert lines, f"epoch {epoch}"
        for line in lines:  # several, if the run started again after the epoch and before its checkpoint
            assert line["step_loss"] == pytest.approx(curve, rel=rel), f"epoch {epoch}"


def every_seed_once(run: Run, seeds: int = SEEDS) -> None:
    counted = run.trained()
    assert set(counted.values()) == {1}
    epochs = range(1, len(run.stage.curves) + 1)
    assert Counter(epoch for epoch, _ in counted) == dict.fromkeys(epochs, seeds)
