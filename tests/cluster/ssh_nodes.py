"""Builds the nodes of a cluster.yml from namespaced hosts; all use the same compiled kernels of the graph server."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from netns import DISK, NetCluster

#: The same path on every host of all clusters.
WORKDIR = DISK


def ssh_nodes(cluster: NetCluster, procs: Sequence[int] = (), pythons: Sequence[str] = ()) -> list[dict]:
    """Return one node per host (or per entry of ``procs``), with one process by default and the tests' own Python."""
    return [
        {
            "host": host.address,
            "user": "root",
            "procs": procs[k] if procs else 1,
            "python": pythons[k] if pythons else sys.executable,
            "workdir": WORKDIR,
            "env": {"GNNFLEET_KERNELS": os.environ["GNNFLEET_KERNELS"]},
        }
        for k, host in enumerate(cluster.hosts[: len(procs) or None])
    ]
