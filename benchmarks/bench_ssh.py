"""Measures how long gnnfleet and other tools take to connect to sshd hosts, check them, and start a session on each.

The other tools are ssh, fabric and parallel-ssh. Their check only prints versions and tests one port, and their session
is a bare tmux session.
"""

from __future__ import annotations

import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from launcher.config.resolve import ResolvedConfig, resolve_run
from launcher.config.schema import ClusterConfig, DataConfig, NodeConfig
from launcher.plan.build import make_plan
from launcher.plan.placement import run_dir
from launcher.preflight.preflight import run_preflight
from launcher.run.tmux_session import start_session
from launcher.transport import Transport, close_all, connect_all
from launcher.transport.fanout import on_nodes
from netns import Host, NetCluster, unavailable
from table import Row

REPEATS = 3
RUN = "bench"
PYTHON = sys.executable  # available on every host
PROGRAM = """
import socket, sys
from importlib import metadata
for name in ("torch", "torch_geometric", "numba", "numpy", "msgspec"):
    print(name, metadata.version(name))
with socket.socket() as sock:
    sock.bind(("", 29500))
"""
TOOLS = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gnnfleet-bench/parallel-ssh"
PARALLEL_SSH = """
import json, sys, time
from pssh.clients import ParallelSSHClient
hosts, key, command = json.load(sys.stdin)
begun = time.perf_counter()
client = ParallelSSHClient(hosts, user="root", pkey=key, pool_size=len(hosts))
done = list(client.run_command(command))
for one in done:
    list(one.stdout)
assert all(one.exit_code == 0 for one in done), [one.exit_code for one in done]
print(time.perf_counter() - begun)
"""


@dataclass(frozen=True)
class Scene:
    cluster: NetCluster
    config: ResolvedConfig

    @property
    def hosts(self) -> list[Host]:
        return self.cluster.hosts


def run(small: bool) -> list[Row]:
    if reason := unavailable():
        print(f"ssh: skipped, {reason}")
        return []
    other_python = parallel_ssh()
    rows: list[Row] = []
    for count in (3,) if small else (8, 32, 100):
        with NetCluster(count) as cluster, mock.patch.dict(os.environ, cluster.environment(), clear=True):
            cluster.know_neighbours()
            nodes = tuple(NodeConfig(host=host.address, user="root", python=PYTHON) for host in cluster.hosts)
            config = resolve_run(ClusterConfig(nodes, DataConfig("synthetic")))
            rows += fan_out(Scene(cluster, config), other_python)
    return rows


def fan_out(scene: Scene, other_python: Path | None) -> Iterator[Row]:
    count = len(scene.hosts)
    prepare_sessions(scene)
    for name, work, command in (
        (f"connect + preflight, {count} hosts", preflight, check_command()),
        (f"connect + preflight + start, {count} hosts", preflight_and_start, check_and_start_command()),
    ):
        ways = {"": lambda work=work: timed(lambda: work(scene)), **others(scene, command, other_python)}
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(1 + REPEATS):
            for way, once in ways.items():
                seconds[way].append(once())
                end_sessions(scene)
        medians = {way: statistics.median(found[1:]) for way, found in seconds.items()}
        yield from (Row(name, medians[""], "s", way, medians[way]) for way in ways if way)
    yield Row(f"… known pairs left out, {count} hosts", known(scene), "s")


def others(scene: Scene, command: str, other_python: Path | None) -> dict[str, Callable[[], float]]:
    """Return a function for each tool, by name. The function runs ``command`` on all hosts and returns the seconds."""
    ways: dict[str, Callable[[], float]] = {
        "ssh processes, xargs -P 32": lambda: timed(lambda: with_openssh(scene.cluster, command)),
        "fabric ThreadingGroup": lambda: timed(lambda: with_fabric(scene.cluster, command)),
    }
    if other_python:
        ways["parallel-ssh"] = lambda: with_parallel_ssh(scene.cluster, command, other_python)
    return ways


def timed(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


# -- gnnfleet ------------------------------------------------------------


def preflight(scene: Scene) -> None:
    with opened(scene.config) as lines:
        report = run_preflight(scene.config, dict(lines))
    assert len(report.facts) == len(scene.hosts) and not report.blocked, report.findings


def known(scene: Scene) -> float:
    def once() -> None:
        with opened(scene.config) as lines:
            run_preflight(scene.config, dict(lines))

    once()
    return statistics.median(timed(once) for _ in range(REPEATS))


def preflight_and_start(scene: Scene) -> None:
    with opened(scene.config) as lines:
        report = run_preflight(scene.config, dict(lines))
        plan = make_plan(scene.config, run_id=RUN, code_digest="0" * 64, facts=report.facts)
        on_nodes(lines, lambda k: start_session(lines[k], plan.nodes[k], start_timeout=60)).or_raise()


@contextmanager
def opened(config: ResolvedConfig) -> Iterator[dict[int, Transport]]:
    lines = {rank: line for rank, line in connect_all(config).items() if isinstance(line, Transport)}
    assert len(lines) == len(config.nodes)
    try:
        yield lines
    finally:
        close_all(dict(lines))


# -- other tools ---------------------------------------------------------


def check_command() -> str:
    return shlex.join([PYTHON, "-c", PROGRAM])


def check_and_start_command() -> str:
    return f"{check_command()} && {shlex.join(['tmux', 'new-session', '-d', '-s', 'bench', 'sleep 60'])}"


def with_openssh(cluster: NetCluster, command: str) -> None:
    hosts = "\n".join(host.address for host in cluster.hosts)
    ssh = ["ssh", "-F", str(cluster.operator_ssh_config), "-o", "BatchMode=yes", "{}", command]
    argv = ["xargs", "-P", "32", "-I", "{}", *ssh]
    subprocess.run(argv, input=hosts, text=True, check=True, timeout=300, stdout=subprocess.DEVNULL)


def with_fabric(cluster: NetCluster, command: str) -> None:
    from fabric import ThreadingGroup

    key = {"key_filename": str(cluster.identity)}
    with ThreadingGroup(*(host.address for host in cluster.hosts), user="root", connect_kwargs=key) as group:
        group.run(command, hide=True, in_stream=False)


def with_parallel_ssh(cluster: NetCluster, command: str, python: Path) -> float:
    """Run ``command`` on all hosts. Return the seconds, without the import of parallel-ssh."""
    asked = json.dumps([[host.address for host in cluster.hosts], str(cluster.identity), command])
    done = subprocess.run(
        [python, "-c", PARALLEL_SSH], input=asked, text=True, check=True, timeout=300, capture_output=True
    )
    return float(done.stdout)


def parallel_ssh() -> Path | None:
    """Return the Python of an environment with parallel-ssh, or None if it cannot be installed."""
    python = TOOLS / "bin/python"
    if not (TOOLS / "ready").exists():
        pip = [python, "-m", "pip", "install", "--quiet", "parallel-ssh"]
        try:
            subprocess.run([sys.executable, "-m", "venv", TOOLS], check=True, timeout=300, capture_output=True)
            subprocess.run(pip, check=True, timeout=300, capture_output=True)
            (TOOLS / "ready").touch()
        except (OSError, subprocess.SubprocessError) as error:
            print(f"ssh: without parallel-ssh, which cannot be installed: {error}")
            return None
    return python


# -- sessions ------------------------------------------------------------


def prepare_sessions(scene: Scene) -> None:
    """Write a start.sh on each host. The script reports ready at once."""
    for k, host in enumerate(scene.hosts):
        folder = run_dir(f"{host.home}/gnnfleet-work/node{k}", RUN, k)
        host.write(f"{folder}/start.sh", f"touch {folder}/state.json; sleep 60")


def end_sessions(scene: Scene) -> None:
    script = "tmux kill-server 2>/dev/null; rm -f ~/gnnfleet-work/node*/runs/*/node*/state.json"
    for host in scene.hosts:
        host.run(["bash", "-c", script])


if __name__ == "__main__":
    raise SystemExit(f"start this benchmark with: python {Path(__file__).with_name('run.py')} ssh")
