"""Measures `check`, `launch`, `status` and `stop` on many sshd hosts in network namespaces of this machine.

python benchmarks/bench_hosts.py --hosts 200

All hosts share the processors of this machine, so the seconds include the work of all hosts. For comparison: the same
number of plain `ssh` logins, and of Python starts on the hosts. The ranks run `sleep`; the first host serves the graph.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
if __name__ == "__main__":
    sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "tests" / "cluster")]

import click  # noqa: E402
import yaml  # noqa: E402

from netns import NetCluster, unavailable  # noqa: E402
from table import Row, show  # noqa: E402

LAUNCH = HERE.parent / "launch.py"
LIMIT = 600.0  # seconds of one command
WORKDIR = "/tmp/work"  # in memory on each host: one disk would have to create the files of all hosts
GRAPH = {"num_nodes": 1000, "avg_degree": 4, "num_classes": 2, "num_features": 4}

#: The end of each phase of a launch: kind of the event, and its stage or the name of the process.
PHASES = (
    ("connect", "stage", "preflight"),
    ("preflight", "stage", "partition"),
    ("plan", "stage", "sync"),
    ("send files", "stage", "start"),
    ("supervisors run", "supervisor-start", ""),
    ("ranks run", "process-start", "rank"),
)


class Used(NamedTuple):
    seconds: float
    launcher_cpu: float  #: CPU seconds of the launcher's process
    cpu: float  #: CPU seconds of the launcher and of all processes on the hosts
    megabytes: float  #: largest resident memory of the launcher


class CpuCgroup:
    """A CPU cgroup with this process and all that it starts, hosts included. A context manager.

    Other work on the machine changes the seconds of a command, but not these CPU seconds.
    """

    def __init__(self) -> None:
        self._old = Path("/sys/fs/cgroup/cpuacct")
        top = self._old if self._old.is_dir() else Path("/sys/fs/cgroup")
        self._parent, self._folder = top / "cgroup.procs", top / f"gfbench{os.getpid()}"

    def __enter__(self) -> CpuCgroup:
        self._folder.mkdir()
        (self._folder / "cgroup.procs").write_text("0")
        return self

    def __exit__(self, *_: object) -> None:
        self._parent.write_text("0")
        with contextlib.suppress(OSError):  # processes that have not ended yet
            self._folder.rmdir()

    def seconds(self) -> float:
        if self._old.is_dir():
            return int((self._folder / "cpuacct.usage").read_text()) / 1e9
        usage = (self._folder / "cpu.stat").read_text().split("\n", 1)[0]  # usage_usec N
        return int(usage.split()[1]) / 1e6


def run(small: bool) -> list[Row]:
    return list(measure(4 if small else 50))


def measure(hosts: int) -> Iterator[Row]:
    """Yield the figures of ``hosts`` hosts, each as soon as it is known."""
    if reason := unavailable():
        print(f"hosts: skipped, {reason}")
        return
    begun = time.perf_counter()
    with CpuCgroup() as group, NetCluster(hosts) as cluster, tempfile.TemporaryDirectory() as folder:
        cluster.know_neighbours()
        yield Row(f"{hosts} hosts made", time.perf_counter() - begun, "s")
        yield from floor(cluster, group)
        yield from commands(cluster, group, Path(folder))


def floor(cluster: NetCluster, group: CpuCgroup) -> Iterator[Row]:
    """Yield the seconds of logins by the OpenSSH client, 32 at a time, and of Python starts by way of them."""
    hosts = "\n".join(host.address for host in cluster.hosts)
    for what, command in (("ssh HOST true", "true"), ("ssh HOST python -S -c ''", f"{sys.executable} -S -c ''")):
        ssh = ["ssh", "-F", str(cluster.operator_ssh_config), "-o", "BatchMode=yes", "{}", command]
        before, begun = group.seconds(), time.perf_counter()
        subprocess.run(["xargs", "-P", "32", "-I", "{}", *ssh], input=hosts, text=True, check=True, timeout=LIMIT)
        yield Row(what, time.perf_counter() - begun, "s")
        yield Row("… CPU of clients and hosts", group.seconds() - before, "s")


def commands(cluster: NetCluster, group: CpuCgroup, folder: Path) -> Iterator[Row]:
    config = folder / "cluster.yml"
    config.write_text(yaml.safe_dump(cluster_yml(cluster)))
    env = {**cluster.environment(), "XDG_STATE_HOME": str(folder / "state")}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    at = ("--config", str(config))

    def rows(*words: str) -> list[Row]:
        return rows_of(words[0], gnnfleet(words, group, folder, env))

    gnnfleet(("partition", "make", *at), group, folder, env)
    for _ in range(2):
        yield from rows("check", *at)
    for run_id in ("first", "again"):  # the second launch finds gnnfleet's code on the hosts
        begun = time.time()
        yield from rows("launch", *at, "--run-id", run_id, "--detach", "--", "sleep", "3600")
        yield from phases(folder / "runs" / run_id, begun)
        yield from rows("status", run_id)
        yield from rows("stop", run_id)


def cluster_yml(cluster: NetCluster) -> Mapping[str, Any]:
    """Return a config in which the first host serves the graph and each of the others runs one rank."""
    env = {"GNNFLEET_KERNELS": str(HERE.parent / ".gnnfleet/kernels")}  # compiled once, for all calls
    common = {"user": "root", "workdir": WORKDIR, "python": sys.executable, "env": env}
    roles = ["server"] + ["client"] * (len(cluster.hosts) - 1)
    nodes = [{"host": host.address, "role": role, **common} for host, role in zip(cluster.hosts, roles, strict=True)]
    data = {"dataset": "synthetic", "options": GRAPH, "folder": "parts", "num_parts": 1}
    # two cores do the work of all hosts: an answer may take long
    return {"nodes": nodes, "data": data, "run": {"peer_timeout": 60, "start_timeout": 300}}


def gnnfleet(words: Sequence[str], group: CpuCgroup, folder: Path, env: Mapping[str, str]) -> Used:
    """Run a gnnfleet command. Raises RuntimeError, with its output, if it fails."""
    output = folder / f"{words[0]}.log"
    before, begun = group.seconds(), time.perf_counter()
    with output.open("w") as file:
        argv = [sys.executable, str(LAUNCH), *words]
        started = subprocess.Popen(
            argv, cwd=folder, env=dict(env), stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
        )
        _, status, used = os.wait4(started.pid, 0)
    if status and words[0] != "status":  # `stop` and `status` report the state of the run as exit status
        raise RuntimeError(f"gnnfleet {' '.join(words)}:\n{output.read_text()[-5000:]}")
    seconds, cpu = time.perf_counter() - begun, group.seconds() - before
    return Used(seconds, used.ru_utime + used.ru_stime, cpu, used.ru_maxrss / 1024)


def rows_of(name: str, used: Used) -> list[Row]:
    return [
        Row(name, used.seconds, "s"),
        Row("… CPU of launcher and hosts", used.cpu, "s"),
        Row("… CPU of the launcher", used.launcher_cpu, "s"),
        Row("… memory of the launcher", used.megabytes, "MB"),
    ]


def phases(folder: Path, begun: float) -> Iterator[Row]:
    """Yield the seconds of each phase of the launch in ``folder``, until the last node has ended the phase."""
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    last = begun
    for phase, kind, what in PHASES:
        times = [event["t"] for event in events if event["kind"] == kind and _is(event, what)]
        end = max(times, default=last)
        yield Row(f"… {phase} ({len(times)})", end - last, "s")
        last = max(last, end)


def _is(event: Mapping[str, Any], what: str) -> bool:
    return event.get("stage", what) == what and str(event.get("name", what)).startswith(what)


@click.command(help=__doc__)
@click.option("--hosts", default=200, show_default=True, help="Number of hosts, at most 240.")
def main(hosts: int) -> None:
    rows = []
    for row in measure(hosts):
        print(f"{row.what}: {row.value:.2f} {row.unit}", flush=True)
        rows.append(row)
    show(f"{hosts} hosts, load {os.getloadavg()[0]:.1f}", rows)


if __name__ == "__main__":
    main()
