"""Connecting to many hosts and running one command on each, ours beside other ways, on real sshd hosts."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

from launcher.config import ClusterConfig, DataConfig, NodeConfig
from launcher.preflight import run_preflight
from launcher.script import Command
from launcher.transport import Transport, close_all, connect_all
from netns import NetCluster, unavailable
from table import Row, median_seconds


def run(small: bool) -> list[Row]:
    if reason := unavailable():
        print(f"ssh: skipped, {reason}")
        return []
    rows: list[Row] = []
    for count in (3,) if small else (8, 24):
        with NetCluster(count) as cluster, mock.patch.dict(os.environ, cluster.environment(), clear=True):
            rows += fan_out(cluster)
    return rows


def fan_out(cluster: NetCluster) -> list[Row]:
    """Seconds until `true` has run on every host, connections opened and closed."""
    count = len(cluster.hosts)
    nodes = tuple(NodeConfig(host=host.address, user="root") for host in cluster.hosts)
    config = ClusterConfig(nodes, DataConfig("synthetic"))
    ours = median_seconds(lambda: with_gnnfleet(config), repeats=3)
    name = f"connect + true, {count} hosts"
    return [
        Row(name, ours, "s", "ssh processes, 16 at once", median_seconds(lambda: with_openssh(cluster), repeats=3)),
        Row(name, ours, "s", "fabric ThreadingGroup", median_seconds(lambda: with_fabric(cluster), repeats=3)),
        Row(f"connect + preflight, {count} hosts", median_seconds(lambda: with_preflight(config), repeats=3), "s"),
    ]


def with_gnnfleet(config: ClusterConfig) -> None:
    lines = opened(config)
    with ThreadPoolExecutor(len(lines)) as pool:
        done = list(pool.map(lambda line: line.run(Command(("true",)), timeout=20), lines.values()))
    close_all(dict(lines))
    assert all(one.returncode == 0 for one in done)


def with_preflight(config: ClusterConfig) -> None:
    lines = opened(config)
    report = run_preflight(config, dict(lines))
    close_all(dict(lines))
    assert len(report.facts) == len(config.nodes), report.findings


def opened(config: ClusterConfig) -> dict[int, Transport]:
    lines = {rank: line for rank, line in connect_all(config).items() if isinstance(line, Transport)}
    assert len(lines) == len(config.nodes)
    return lines


def with_openssh(cluster: NetCluster) -> None:
    hosts = "\n".join(host.address for host in cluster.hosts)
    ssh = ["ssh", "-F", str(cluster.operator_ssh_config), "-o", "BatchMode=yes", "{}", "true"]
    subprocess.run(["xargs", "-P", "16", "-I", "{}", *ssh], input=hosts, text=True, check=True, timeout=120)


def with_fabric(cluster: NetCluster) -> None:
    from fabric import ThreadingGroup

    key = {"key_filename": str(cluster.identity)}
    with ThreadingGroup(*(host.address for host in cluster.hosts), user="root", connect_kwargs=key) as group:
        group.run("true", hide=True, in_stream=False)


if __name__ == "__main__":
    raise SystemExit(f"run it through {Path(__file__).with_name('run.py')} ssh")
