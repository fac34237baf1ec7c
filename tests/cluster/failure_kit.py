"""Test kit for failures on real hosts: three nodes, a run folder, and checks for leftover files and processes."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from launching import Launched, Running, launch, write_config
from netns import DISK, NetCluster
from netns_tools import Process
from ssh_nodes import ssh_nodes

#: A user script that trains nothing; all ranks call all_reduce in every step, as in data-parallel training.
STEPS = """
import os, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
for step in range(10000):
    dist.all_reduce(torch.ones(1000))
    print("step", step, flush=True)
    if step == 20 and sys.argv[1:] == ["raise", str(dist.get_rank())]:
        raise ValueError("no such column: age")
    time.sleep(0.05)
"""
#: A user script that only counts steps, without torch; no rank waits for another rank.
COUNTS = """
import os, sys, time
for step in range(10000):
    print("step", step, flush=True)
    if step == 20 and sys.argv[1:] == ["raise", os.environ["RANK"]]:
        raise ValueError("no such column: age")
    time.sleep(0.05)
"""
WAITS = "import os, time; print('here is rank', os.environ['RANK'], flush=True); time.sleep(300)\n"
#: Shell command that lists the files on a node; tests compare its output before and after a launch. -xdev because the
#: repository itself may be bind-mounted under /tmp.
STATE_OF = f"find ~ /tmp {DISK} /dev/shm -xdev -path ~/.ssh -prune -o -type f -print 2>/dev/null | sort"


@dataclass
class Scene:
    """A test's folder: a cluster.yml of three nodes (with one, two and one process) and three user scripts."""

    cluster: NetCluster
    folder: Path
    parts: Path
    nodes: list[dict] = field(default_factory=list)
    run: dict = field(default_factory=dict)
    data: dict = field(default_factory=dict)
    train: dict = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.nodes = ssh_nodes(self.cluster, (1, 2, 1))
        for name, text in (("steps.py", STEPS), ("counts.py", COUNTS), ("waits.py", WAITS)):
            (self.folder / name).write_text(text)

    @property
    def config(self) -> Path:
        data = {"folder": str(self.parts)} | self.data
        return write_config(self.folder, self.nodes, data=data, train=self.train, run=self.run)

    def host(self, k: int) -> str:
        return self.cluster.hosts[k].address

    def launch(self, *words: str) -> Launched:
        return launch(self.config, *words, env=self.cluster.environment(**self.env))

    def running(self, *words: str) -> Running:
        return Running(self.config, *words, env=self.cluster.environment(**self.env))

    def own_home(self, *, hosts_known: bool = True) -> Path:
        """Create a home folder without the cluster's SSH key, and use it as HOME of later launches."""
        home = self.folder / "home"
        (home / ".ssh").mkdir(parents=True)
        if hosts_known:
            shutil.copy(self.cluster.operator_ssh_config.with_name("known_hosts"), home / ".ssh/known_hosts")
        self.env["HOME"] = str(home)
        return home

    def give_keys(self, *ranks: int) -> None:
        for k in ranks:
            self.nodes[k]["key"] = str(self.cluster.identity)

    def files(self, k: int) -> str:
        return self.cluster.hosts[k].run(["bash", "-c", STATE_OF], check=False).stdout

    def processes(self, k: int, words: str) -> list[Process]:
        """Return the processes of host k whose command line is a program, usually Python, followed by ``words``."""
        return [each for each in self.cluster.hosts[k].processes() if each.cmdline.partition(" ")[2].startswith(words)]

    def left_behind(self) -> list[str]:
        hosts = [host for host in self.cluster.hosts if host.init_pid]
        found = [f"{host.name}: {process}" for host in hosts for process in host.processes()]
        return found + [line for k in range(len(hosts)) for line in self.files(k).splitlines() if line.endswith("lock")]


@pytest.fixture
def scene(cluster: NetCluster, tmp_path: Path, parts: Path) -> Scene:
    return Scene(cluster, tmp_path, parts)


@pytest.fixture(scope="session")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parts") / "synthetic"


def assert_one_message(done: Launched, status: int, *words: str) -> None:
    assert done.status == status, done.output
    assert done.output.count("error:") == 1, done.output
    assert "Traceback" not in done.output
    for word in words:
        assert word in done.output, f"{word!r} is not in:\n{done.output}"


def mount(scene: Scene, size: str, k: int = 1) -> None:
    # Below /tmp, which each host has for itself. Elsewhere, hosts of another worker share the folder, and removing it
    # would unmount their disk.
    script = f"mkdir -p /tmp/small && mount -t tmpfs -o size={size} tmpfs /tmp/small"
    scene.cluster.hosts[k].run(["bash", "-c", script])


def unmount(scene: Scene, k: int = 1) -> None:
    scene.cluster.hosts[k].run(["bash", "-c", "umount /tmp/small 2>/dev/null; rm -rf /tmp/small"])
