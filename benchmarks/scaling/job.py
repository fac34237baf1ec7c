"""Runs one training on several simulated hosts of this machine, each with one rank and one graph server."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.cli import main as trainer_cli  # noqa: F401

from .model import HostFigures
from .places import Place, free_ports, places

REPOSITORY = Path(__file__).resolve().parents[2]
_TICKS = os.sysconf("SC_CLK_TCK")
_TIMEOUT = 1800.0  #: most seconds of a run
_GLANCE = 0.02  #: seconds between reads of the metrics lines


@dataclass(frozen=True)
class Case:
    name: str
    dataset: str
    options: Mapping[str, str]
    batch: int  #: global batch size
    fanouts: tuple[int, ...]
    hidden: int
    epochs: int
    source: str | None = None


def train_on(case: Case, folder: Path, count: int, run_dir: Path, cores: Sequence[int]) -> list[HostFigures]:
    """Train on ``count`` hosts that share ``cores``. Raises ``RuntimeError`` with all logs if a process fails."""
    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.mkdir(parents=True)
    with pinned(cores), places(count) as where, contextlib.ExitStack() as stack:
        ports = free_ports(count + 1)
        cluster = run_dir / "cluster.json"
        cluster.write_text(json.dumps(_cluster(where, ports)))
        servers = _servers(stack, folder, run_dir, cluster, where, ports) if count > 1 else []
        ranks = [
            stack.enter_context(_process(_train_words(case, folder, run_dir, cluster, k, count), place, run_dir,
                                         f"rank{k}", _rank_env(k, count, where[0], ports[-1], place)))
            for k, place in enumerate(where)
        ]  # fmt: skip
        marks = [_mark(case, epoch, run_dir, servers, ranks, where) for epoch in range(1, case.epochs + 1)]
        for process in ranks:
            process.wait(_TIMEOUT)
    return [_figures(run_dir, k, marks) for k in range(count)]


@contextlib.contextmanager
def pinned(cores: Sequence[int]) -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def environment(**more: str) -> dict[str, str]:
    """Return this process's environment for a trainer on CPU: without GNNFLEET_… variables, and with ``more``."""
    # one thread: threads of torch that share a core would spin while they wait for each other
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GNNFLEET_")}
    return kept | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | more


def _cluster(where: Sequence[Place], ports: Sequence[int]) -> dict[str, Any]:
    nodes = [
        {
            "node_rank": k,
            "host": f"host{k}",
            "endpoint": f"tcp://{place.address}:{ports[k]}",
            "parts": [k],
            "ranks": [k],
        }
        for k, place in enumerate(where)
    ]
    return {"run_id": "scaling", "num_parts": len(where), "nodes": nodes}


def _servers(
    stack: contextlib.ExitStack,
    folder: Path,
    run_dir: Path,
    cluster: Path,
    where: Sequence[Place],
    ports: Sequence[int],
) -> list[subprocess.Popen[bytes]]:  # fmt: skip
    found = []
    for k, place in enumerate(where):
        words = ["serve", "--parts", str(folder), "--own", str(k), "--bind", f"tcp://{place.address}:{ports[k]}"]
        words += ["--cluster", str(cluster), "--node-rank", str(k), "--ready-file", str(run_dir / f"ready{k}")]
        found.append(stack.enter_context(_process(words, place, run_dir, f"server{k}", environment())))
    deadline = time.monotonic() + _TIMEOUT
    while not all((run_dir / f"ready{k}").exists() for k in range(len(where))):
        _check(found, run_dir, deadline, ())
    return found


def _train_words(case: Case, folder: Path, run_dir: Path, cluster: Path, rank: int, count: int) -> list[str]:
    words = ["train", "--parts", str(folder), "--run-dir", str(run_dir), "--part-ids", str(rank)]
    words += ["--cluster", str(cluster), "--topology", "replicated", "--cache", "10%"] if count > 1 else []
    words += ["--batch-size", str(case.batch), "--fanouts", ",".join(map(str, case.fanouts))]
    words += ["--hidden", str(case.hidden), "--epochs", str(case.epochs), "--backend", "gloo", "--timeout", "600"]
    return [*words, "--eval-every", "0", "--checkpoint-every", "0"]


def _rank_env(rank: int, count: int, lead: Place, port: int, place: Place) -> dict[str, str]:
    numbers = {"RANK": rank, "WORLD_SIZE": count, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "NODE_RANK": rank}
    texts = {name: str(value) for name, value in numbers.items()}
    return environment(**texts, MASTER_ADDR=lead.address, MASTER_PORT=str(port), GLOO_SOCKET_IFNAME=place.interface)


@contextlib.contextmanager
def _process(
    words: Sequence[str], place: Place, run_dir: Path, name: str, env: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Run ``python -m trainer *words`` on a host until the context ends. Output goes to a file."""
    argv = [*place.enter, sys.executable, "-m", "trainer", *words]
    with (run_dir / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(argv, env=env, stdout=log, stderr=subprocess.STDOUT, cwd=run_dir)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@dataclass(frozen=True)
class _Mark:
    server_cpu: tuple[float, ...]  #: CPU seconds of each host's server
    received: tuple[int, ...]  #: bytes that each host has received


def _mark(
    case: Case, epoch: int, run_dir: Path, servers: Sequence[subprocess.Popen[bytes]],
    ranks: Sequence[subprocess.Popen[bytes]], where: Sequence[Place],
) -> _Mark:  # fmt: skip
    """Wait until all ranks have trained ``epoch`` epochs. Return server CPU seconds and received bytes per host."""
    # after the last epoch, they include some milliseconds of the evaluation, which has a few seeds
    deadline = time.monotonic() + _TIMEOUT
    while any(len(epoch_lines(run_dir, k)) < epoch for k in range(len(where))):
        _check(servers, run_dir, deadline, ranks if epoch < case.epochs else ())
        if any(process.poll() for process in ranks):
            _check(ranks, run_dir, deadline, ())
    spent = tuple(_cpu_seconds(server.pid) for server in servers) or (0.0,) * len(where)
    return _Mark(spent, tuple(place.received for place in where))


def _check(
    living: Sequence[subprocess.Popen[bytes]], run_dir: Path, deadline: float,
    more: Sequence[subprocess.Popen[bytes]],
) -> None:  # fmt: skip
    """Sleep for ``_GLANCE`` seconds. Raises ``RuntimeError`` if one of the processes has ended, or at ``deadline``."""
    if time.monotonic() > deadline or any(process.poll() is not None for process in (*living, *more)):
        logs = [f"{log.name}: {log.read_text(errors='replace')[-1500:]}" for log in sorted(run_dir.glob("*.log"))]
        raise RuntimeError("a process ended, or took too long\n" + "\n".join(logs))
    time.sleep(_GLANCE)


def epoch_lines(run_dir: Path, rank: int) -> list[dict[str, Any]]:
    path = run_dir / f"metrics-rank{rank}.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines() if '"kind": "epoch"' in line]


def _cpu_seconds(pid: int) -> float:
    """Return user plus system seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _figures(run_dir: Path, rank: int, marks: Sequence[_Mark]) -> HostFigures:
    lines, epochs = epoch_lines(run_dir, rank)[1:], len(marks) - 1
    first, last = marks[0], marks[-1]
    traffic = ("remote_bytes", "rows", "remote_rows", "cached_rows", "held_rows")
    sums = {name: sum(line["traffic"][name] for line in lines) / epochs for name in traffic}
    return HostFigures(
        rank_cpu=sum(line["cpu_s"] for line in lines) / epochs,
        server_cpu=(last.server_cpu[rank] - first.server_cpu[rank]) / epochs,
        network_bytes=(last.received[rank] - first.received[rank]) / epochs,
        steps=sum(line["traffic"]["batches"] for line in lines) / epochs,
        **sums,
    )
