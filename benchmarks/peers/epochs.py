"""Times and checks epochs of any system's loader. This module imports only numpy, so it runs in every environment."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np


def timed_epochs(
    loader: Iterable[Any],
    look: Callable[[Any], tuple[Any, int, int]],
    expected: Any,
    warm: int,
    epochs: int,
    meet: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """Load ``warm`` untimed and ``epochs`` timed epochs, and return measurements.

    look: returns a batch's seeds, number of edges and number of nodes.
    expected: all seeds of an epoch; None if other processes load a share of the seeds.
    meet: called before each epoch, to wait for other processes.

    Returns lists with one value per timed epoch: ``seconds`` until the last batch, ``ended`` (seconds until the
    iterator stopped), ``cpu`` (seconds), ``bytes`` received on the loopback, ``seeds`` (distinct ones). ``complete``:
    each expected seed came exactly once in every epoch.
    """
    for _ in range(warm):
        meet()
        for batch in loader:
            del batch  # graphlearn-torch stops while the loop keeps batches, which occupy its ring buffer
    seconds, ended, counts, bytes_moved, cpu, complete = [], [], [], [], [], True
    edges = nodes = batches = 0
    for _ in range(epochs):
        meet()
        found, moved, spent, begun = [], loopback_bytes(), cpu_seconds(), time.perf_counter()
        last = begun
        for batch in loader:
            last = time.perf_counter()
            seeds, num_edges, num_nodes = look(batch)
            found.append(np.asarray(seeds).copy())
            edges, nodes, batches = edges + num_edges, nodes + num_nodes, batches + 1
            del batch, seeds
        ended.append(time.perf_counter() - begun)
        seconds.append(last - begun)
        bytes_moved.append(loopback_bytes() - moved)
        cpu.append(cpu_seconds() - spent)
        came = np.concatenate(found)
        if expected is not None:
            complete = complete and np.array_equal(np.sort(came), np.sort(np.asarray(expected)))
        counts.append(len(np.unique(came)))
    return {
        "seconds": seconds, "ended": ended, "seeds": counts, "complete": bool(complete), "bytes": bytes_moved,
        "cpu": cpu, "edges": edges // epochs, "nodes": nodes // epochs, "batches": batches // epochs,
    }  # fmt: skip


def learned_epochs(
    loader: Iterable[Any], step: Callable[[Any], Any], epochs: int, meet: Callable[[], object]
) -> dict[str, Any]:
    """Train ``epochs`` epochs, and return seconds, mean loss and CPU seconds of each.

    step: trains on a batch and returns the loss.
    meet: called before each epoch, to wait for other processes.
    """
    seconds, losses, cpu = [], [], []
    for _ in range(epochs):
        meet()
        spent, begun, found = cpu_seconds(), time.perf_counter(), []
        for batch in loader:
            found.append(step(batch))
            del batch
        losses.append(float(np.mean([float(loss) for loss in found])))
        seconds.append(time.perf_counter() - begun)
        cpu.append(cpu_seconds() - spent)
    return {"seconds": seconds, "loss": losses, "cpu": cpu}


def cpu_seconds() -> float:
    """Return the CPU seconds of this process, of the processes in ``BENCH_SERVERS``, and of all their children."""
    return sum(map(_tree_seconds, [os.getpid(), *map(int, os.environ.get("BENCH_SERVERS", "").split())]))


def _tree_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        children = [
            int(child) for file in Path(f"/proc/{pid}/task").glob("*/children") for child in file.read_text().split()
        ]
    except OSError:  # the process has ended
        return 0.0
    own = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")  # includes children that have ended
    return own + sum(map(_tree_seconds, children))


def loopback_bytes() -> int:
    """Return the bytes received on ``lo`` so far by all processes of this network namespace."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    return next(int(line.split()[1]) for line in (line.replace(":", " ") for line in lines) if line.split()[0] == "lo")
