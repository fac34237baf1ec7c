"""Lists hosts in network namespaces as nodes of a cluster.yml."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from netns import DISK, NetCluster

#: The work folder on every host; each host has its own folder at this path.
WORKDIR = DISK


def ssh_nodes(cluster: NetCluster, procs: Sequence[int] = (), pythons: Sequence[str] = ()) -> list[dict]:
    """Return one node for each of the first ``len(procs)`` hosts, or for all hosts if ``procs`` is empty.

    procs: number of processes of each node (default: 1). pythons: path of each node's Python (default: that of the
    tests).
    """
    return [
        {
            "host": host.address,
            "user": "root",
            "procs": procs[k] if procs else 1,
            "python": pythons[k] if pythons else sys.executable,
            "workdir": WORKDIR,
            "env": {"GNNFLEET_KERNELS": os.environ["GNNFLEET_KERNELS"], "OMP_NUM_THREADS": "1"},
        }
        for k, host in enumerate(cluster.hosts[: len(procs) or None])
    ]
