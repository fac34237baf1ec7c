"""Measures seconds and peak memory of partitioning a graph in memory into files, compared with METIS alone."""

from __future__ import annotations

import multiprocessing
import re
import shutil
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from graphs import CACHE, LARGE, SMALL
from table import Row

NUM_PARTS = 2
STREAMING_MEMORY = 64 << 20  #: bytes
SPAWN = multiprocessing.get_context("spawn")


def run(small: bool) -> list[Row]:
    # each method in a process of its own, because the peak memory of a process is measured
    ways = ("random", "streaming", "metis", "pymetis alone")
    random, streaming, metis, alone = (in_process(way, small) for way in ways)
    return [
        Row("random, assign and write", random[0], "s"),
        Row("random, memory above the graph's own", random[1], "GB"),
        Row("streaming, assign and write", streaming[0], "s", "METIS", metis[0]),
        Row("streaming, memory above the graph's own", streaming[1], "GB", "METIS", metis[1]),
        Row("streaming, edges cut", 100 * streaming[2], "%", "METIS", 100 * metis[2]),
        Row("METIS, assign and write", metis[0], "s", "pymetis on its own, no files", alone[0]),
        Row("METIS, memory above the graph's own", metis[1], "GB", "pymetis on its own, no files", alone[1]),
        Row("METIS, edges cut", 100 * metis[2], "%", "pymetis on its own", 100 * alone[2]),
    ]


def in_process(way: str, small: bool) -> tuple[float, float, float]:
    """Partition in a new process. Returns seconds, GB of additional peak memory, and the share of cut edges.

    way: partition method, or "pymetis alone".
    """
    ours, theirs = SPAWN.Pipe()
    worker = SPAWN.Process(target=measure, args=(way, small, theirs))
    worker.start()
    theirs.close()
    result: tuple[float, float, float] = ours.recv()
    worker.join()
    return result


def measure(way: str, small: bool, out: Connection) -> None:
    from trainer.core.row_sort import Scratch
    from trainer.core.schema import HOMO_EDGE
    from trainer.partition.methods.assign import assign_parts
    from trainer.partition.write import write_partition
    from trainer.sources.load import load_dataset

    options = {name: str(value) for name, value in (SMALL if small else LARGE).items()}
    dataset = load_dataset("synthetic", None, options)
    warm = load_dataset("synthetic", None, {"num_nodes": "2000"})
    folder = CACHE / f"partition-{way.replace(' ', '-')}"
    for graph in (warm, dataset):  # the first graph compiles the kernels
        shutil.rmtree(folder, ignore_errors=True)
        forget_peak()
        before, begun = memory("VmRSS"), time.perf_counter()
        if way == "pymetis alone":
            cut = pymetis_alone(graph.edges[HOMO_EDGE].edge_index, graph.num_nodes)
        else:
            scratch = Scratch(Path(tempfile.mkdtemp(dir=CACHE)), STREAMING_MEMORY)
            assignment = assign_parts(graph, NUM_PARTS, way, 0, scratch)
            shutil.rmtree(scratch.folder)
            write_partition(graph, assignment, folder)
            cut = assignment.edge_cut
        seconds = time.perf_counter() - begun
    out.send((seconds, memory("VmHWM") - before, cut))
    shutil.rmtree(folder, ignore_errors=True)


def pymetis_alone(edge_index: np.ndarray, num_nodes: int) -> float:
    """Partition with scipy and pymetis in memory, and return the share of cut edges."""
    import pymetis
    from scipy.sparse import coo_matrix

    ones = np.ones(edge_index.shape[1], np.int8)
    adjacency = coo_matrix((ones, tuple(edge_index)), (num_nodes, num_nodes)).tocsr()
    adjacency = (adjacency + adjacency.T).tocsr()
    adjacency.setdiag(0)
    adjacency.eliminate_zeros()
    _, membership = pymetis.part_graph(NUM_PARTS, xadj=adjacency.indptr, adjncy=adjacency.indices)
    parts = np.asarray(membership)
    return float((parts[edge_index[0]] != parts[edge_index[1]]).mean())


def forget_peak() -> None:
    """Reset the peak memory that the kernel reports as ``VmHWM``."""
    Path("/proc/self/clear_refs").write_text("5")


def memory(which: str) -> float:
    """Return memory of this process in GB: ``VmRSS`` is the current memory, ``VmHWM`` the peak."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{which}:\s+(\d+) kB", status)[1]) * 1024 / 1e9  # type: ignore[index]
