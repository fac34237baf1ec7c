"""Tests that runs lose no output line when SSH sessions of the launcher or of ``gnnfleet follow`` are killed."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from launching import REPOSITORY, write_config
from netns import Host, NetCluster
from ssh_nodes import ssh_nodes
from waiting import DEADLINE, wait_until

CUTS = int(os.environ.get("GNNFLEET_CUTS", "6"))  #: number of killed sessions of the launcher, and of the viewer
PRINTS = """
import os, time
number, folder = 0, os.environ["GNNFLEET_RUN_DIR"]
while not os.path.exists(folder + "/enough"):
    print(f"LINE {number} " + "x" * 200_000, flush=True)
    number += 1
    time.sleep(0.05)  # so often that most cuts are in the middle of a line
print(f"{number} lines", flush=True)
"""
LINE = re.compile(rb"^node(\d)/rank\1 +\| (?:LINE (\d+) |(\d+) lines$)", re.MULTILINE)


@dataclass
class Watcher:
    process: subprocess.Popen[bytes]
    output: Path
    cuts: int = 0

    def ports(self, host: Host) -> set[str]:
        """Return the local ports of this process's SSH connections to a host."""
        listed = subprocess.run(["ss", "-Htnp", "dst", host.address], capture_output=True, text=True, check=True)
        mine = [line.split() for line in listed.stdout.splitlines() if f"pid={self.process.pid}," in line]
        return {words[3].rpartition(":")[2] for words in mine if words[4].endswith(":22")}

    def cut(self, host: Host) -> None:
        (port,) = wait_until(lambda: self.ports(host))
        listed = host.run(["ss", "-Htnp", "sport", "=", ":22", "and", "dport", "=", f":{port}"]).stdout
        pids = set(re.findall(r"pid=(\d+)", listed))
        assert pids, listed
        host.run(["kill", "-9", *pids])
        self.cuts += 1

    def numbers(self) -> dict[int, list[int]]:
        """Return the numbers of the shown lines, by rank.

        Each rank numbers the lines that it prints; its last line has their total number.
        """
        shown: dict[int, list[int]] = {}
        for k, number, total in LINE.findall(self.output.read_bytes()):
            shown.setdefault(int(k), []).append(int(number or total))
        return shown


@pytest.fixture
def watch(cluster: NetCluster, tmp_path: Path) -> Callable[..., Watcher]:
    """Return a function that starts ``launch.py`` with arguments ``words``, and writes its output to ``<name>.txt``."""

    def start(name: str, *words: str) -> Watcher:
        output = tmp_path / f"{name}.txt"
        with output.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, str(REPOSITORY / "launch.py"), *words], cwd=tmp_path, stdin=subprocess.DEVNULL,
                stdout=file, stderr=subprocess.STDOUT, env=cluster.environment(), start_new_session=True,
            )  # fmt: skip
        return Watcher(process, output)

    return start


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_sessions_stop_no_run_and_lose_no_line(
    cluster: NetCluster, tmp_path: Path, watch: Callable[..., Watcher]
) -> None:
    (tmp_path / "prints.py").write_text(PRINTS)
    write_config(tmp_path, ssh_nodes(cluster))
    words = ("--config", "cluster.yml", "--run-id", "cuts", "--plain", "--", "python", "prints.py")
    launcher = watch("launcher", *words)
    wait_until(lambda: len(launcher.numbers()) == 3)
    viewer = watch("viewer", "follow", "cuts", "--plain")
    wait_until(lambda: len(viewer.numbers()) == 3)
    draw = random.Random(7)
    for i in range(2 * CUTS):
        (launcher, viewer)[i % 2].cut(cluster.hosts[i // 2 % 3])
        time.sleep(draw.uniform(0.1, 1.5))
        assert launcher.process.poll() is None and viewer.process.poll() is None, launcher.output.read_text()[-3000:]
    for k, host in enumerate(cluster.hosts):
        host.write(f"/tmp/gnnfleet/runs/cuts/node{k}/enough", "")
    for watcher in (launcher, viewer):
        assert watcher.process.wait(DEADLINE) == 0, watcher.output.read_text()[-3000:]
        assert watcher.cuts == CUTS
        for k, shown in watcher.numbers().items():
            *lines, total = shown
            assert lines == list(range(lines[0], total)), f"rank {k}"
            assert watcher is viewer or lines[0] == 0
    text = launcher.output.read_text()
    assert "Done in" in text and text.count(": disconnected (") >= CUTS / 2
