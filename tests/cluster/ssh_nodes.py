"""Nodes of a cluster.yml over namespaced hosts, all of which share the compiled kernels of the graph server."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from netns import DISK, NetCluster
from netns_tools import STATE, start_ticks

#: The same path on every host of all clusters, since numba's cache goes by the path of the code.
WORKDIR = DISK


def ssh_nodes(cluster: NetCluster, procs: Sequence[int] = (), pythons: Sequence[str] = ()) -> list[dict]:
    """One node for each host, or as many as ``procs`` has; one process each, and the tests' own Python."""
    return [
        {
            "host": host.address,
            "user": "root",
            "procs": procs[k] if procs else 1,
            "python": pythons[k] if pythons else sys.executable,
            "workdir": WORKDIR,
            "env": {"NUMBA_CACHE_DIR": str(kernels())},
        }
        for k, host in enumerate(cluster.hosts[: len(procs) or None])
    ]


@functools.cache
def kernels() -> Path:
    """A folder of this test run that all hosts see; laid out so that ``remove_leftovers`` knows whose it is."""
    folder = STATE / f"gf{os.getpid()}k"
    (folder / "numba").mkdir(parents=True)
    (folder / "owner").write_text(f"{os.getpid()} {start_ticks(os.getpid())}")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder / "numba"
