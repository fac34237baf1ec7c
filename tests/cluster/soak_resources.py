"""Measures the resources that the soak and its hosts use, and finds those that have grown."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from contracts import leases_of, sockets_of
from netns import NetCluster
from ssh_nodes import WORKDIR

Sample = dict[str, float]

#: Resource -> by how much it may be larger at the end than after the warm-up.
MAY_GROW: dict[str, float] = {
    "memory of the soak (MB)": 30,
    "open files of the soak": 4,
    "threads of the soak": 2,
    "child processes of the soak": 0,
    "processes on the hosts": 0,
    "tmux servers on the hosts": 0,
    "SSH connections to the hosts": 0,
    "sockets on the hosts": 0,
    "leases on the hosts": 0,
    "files on the hosts": 12,
}
#: Lists the files of a host except those of runs, parts and compiled code; the repository may lie below /tmp.
FILES = (
    f"find ~ /tmp {WORKDIR} /dev/shm -xdev \\( -path ~/.ssh -o -path ~/venv -o -path {WORKDIR}/runs "
    f"-o -path {WORKDIR}/data -o -name __pycache__ \\) -prune -o -type f -print 2>/dev/null | sort -u"
)


def files_of(cluster: NetCluster) -> list[str]:
    """Return all files on the hosts except those of runs, parts and compiled code."""
    return [line for host in cluster.hosts for line in host.run(["bash", "-c", FILES], check=False).stdout.splitlines()]


def sample(cluster: NetCluster) -> Sample:
    status = Path("/proc/self/status").read_text()
    processes = [each.cmdline for host in cluster.hosts for each in host.processes(system=True)]
    children = [path.read_text().split() for path in Path("/proc/self/task").glob("*/children")]
    own = [line for line in processes if not line.startswith(("sshd: ", "/usr/sbin/sshd", "bash -c set -e"))]
    values = [
        _number(status, "VmRSS") / 1024,
        len(os.listdir("/proc/self/fd")),
        _number(status, "Threads"),
        sum(map(len, children)) - sum(host.init_pid != 0 for host in cluster.hosts),
        len(own),
        sum("tmux" in line for line in processes),
        sum(len(host.ssh_sessions()) for host in cluster.hosts),
        sum(len(sockets_of(host)) for host in cluster.hosts),
        len(leases_of(cluster.hosts)),
        len(files_of(cluster)),
    ]
    return dict(zip(MAY_GROW, map(float, values), strict=True))


def growth(samples: Mapping[int, Sample], warm_up: int) -> list[str]:
    """Return the resources that have grown too much since the first sample after ``warm_up`` runs."""
    warm = [number for number in samples if number >= warm_up]
    if not warm:
        return []
    before, after = samples[min(warm)], samples[max(warm)]
    return [name for name, limit in MAY_GROW.items() if after[name] - before[name] > limit]


def resource_table(samples: Mapping[int, Sample]) -> str:
    numbers = sorted(samples)
    shown = sorted({numbers[0], *numbers[1:2], numbers[len(numbers) // 2], numbers[-1]})
    lines = ["| resource | " + " | ".join(f"after {number} runs" for number in shown) + " |"]
    lines += ["|---|" + "---|" * len(shown)]
    for name in MAY_GROW:
        lines.append(f"| {name} | " + " | ".join(f"{samples[number][name]:.0f}" for number in shown) + " |")
    return "\n".join(lines)


def _number(text: str, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+)", text, re.M)
    assert found
    return int(found[1])
