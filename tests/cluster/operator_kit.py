"""Test kit: calls ``gnnfleet status``, ``stop`` and ``resume``, as a user does, for runs in network namespaces."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

from launching import REPOSITORY, Launched
from netns import NetCluster
from waiting import DEADLINE


class Operator:
    def __init__(self, cluster: NetCluster, home: Path):
        self.cwd = home / "somewhere"
        self.cwd.mkdir(parents=True)
        shutil.copytree(cluster.operator_home / ".ssh", home / ".ssh", dirs_exist_ok=True)
        self.env = cluster.environment(HOME=str(home), XDG_STATE_HOME=str(home / ".local/state"), COLUMNS="200")

    def gnnfleet(self, *words: str, timeout: float = DEADLINE) -> Launched:
        argv = [sys.executable, str(REPOSITORY / "launch.py"), *words]
        done = subprocess.run(argv, cwd=self.cwd, env=self.env, capture_output=True, text=True, timeout=timeout)
        return Launched(done.returncode, done.stdout + done.stderr, self.cwd)

    def status(self, *words: str) -> dict:
        argv = [sys.executable, str(REPOSITORY / "launch.py"), "status", "--json", *words]
        done = subprocess.run(argv, cwd=self.cwd, env=self.env, capture_output=True, text=True, timeout=DEADLINE)
        status: dict = json.loads(done.stdout)
        assert status["exit_status"] == done.returncode, done.stderr
        return status


def stage_in(project: Path) -> str:
    """Return the stage (e.g. ``sync``) of the only launch from ``project``, or '' before the launch."""
    found = list((project / "runs").glob("*/launch.json"))
    return str(json.loads(found[0].read_text())["stage"]) if found else ""


def await_stage(project: Path, stage: str, seconds: float = DEADLINE) -> None:
    deadline = time.monotonic() + seconds
    while (at := stage_in(project)) != stage:
        assert at != "end" and time.monotonic() < deadline, f"the launcher is at {at!r} and not at {stage!r}"
        time.sleep(0.002)


def run_processes(cluster: NetCluster) -> list[str]:
    return [f"{host.name}: {process}" for host in cluster.hosts for process in host.processes()]


def end_processes(cluster: NetCluster) -> None:
    for host in cluster.hosts:
        for process in host.processes():
            host.run(["kill", "-9", str(process.pid)], check=False)
