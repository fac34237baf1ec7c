"""Test of check, launch, status and stop on many sshd hosts; ``benchmarks/bench_hosts.py`` measures more of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from netns import NetCluster
from operator_kit import Operator, run_processes

HOSTS = 50
WORKDIR = "/tmp/work"  # in memory: one disk would have to create the files of all hosts


@pytest.mark.slow
@pytest.mark.quiet
def test_fifty_hosts_are_checked_started_and_stopped(make_cluster: Callable[..., NetCluster], tmp_path: Path) -> None:
    cluster = make_cluster(HOSTS)
    cluster.know_neighbours()
    user, config = Operator(cluster, tmp_path / "home"), tmp_path / "cluster.yml"
    common = {"user": "root", "workdir": WORKDIR, "python": sys.executable}
    common["env"] = {"GNNFLEET_KERNELS": os.environ["GNNFLEET_KERNELS"]}
    roles = ["server", *["client"] * (HOSTS - 1)]
    nodes = [{"host": host.address, "role": role, **common} for host, role in zip(cluster.hosts, roles, strict=True)]
    data = {"dataset": "synthetic", "options": {"num_nodes": 500, "avg_degree": 4}, "folder": "parts", "num_parts": 1}
    run = {"peer_timeout": 60, "start_timeout": 300}  # a few processors do the work of all hosts
    config.write_text(yaml.safe_dump({"nodes": nodes, "data": data, "run": run}))

    checked = user.gnnfleet("check", "--config", str(config))
    assert checked.status == 0 and "Ready: 50 nodes, no errors" in checked.output, checked.output

    words = ("launch", "--config", str(config), "--run-id", "many", "--detach", "--", "sleep", "3600")
    launched = user.gnnfleet(*words, timeout=400)
    assert launched.status == 0 and "node[1-49]" in launched.output, launched.output
    sleeping = [line for line in run_processes(cluster) if "sleep 3600" in line]
    assert len({line.partition(":")[0] for line in sleeping}) == HOSTS - 1
    status = user.gnnfleet("status", "many")
    assert status.status == 0 and "50 nodes" in status.output, status.output

    stopped = user.gnnfleet("stop", "many", timeout=300)
    assert "no process of it is left on its 50 nodes" in stopped.output, stopped.output
    assert run_processes(cluster) == []
