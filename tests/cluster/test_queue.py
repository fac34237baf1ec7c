"""Runs of three users that wait in line on four hosts, through a killed supervisor, a power cut and a closed laptop."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from launching import REPOSITORY, write_config
from netns import HOMES, Machine, NetCluster
from netns_tools import ip
from operator_kit import Operator, end_processes
from waiting import DEADLINE

pytestmark = pytest.mark.slow

USERS = ("ann", "bob", "cat")

#: A user script that notes on its host when it began and ended. It ends when its file in /tmp appears, or after 2 s.
NOTES = """
import json, os, sys, time
run, began = sys.argv[1], time.time()
while sys.argv[2:] and not os.path.exists(f"/tmp/end-{run}") or time.time() < began + 2:
    time.sleep(0.05)
with open(f"/tmp/ran-{run}-{os.environ['RANK']}", "a") as file:
    file.write(json.dumps([began, time.time()]) + "\\n")
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[NetCluster]:
    with NetCluster(4, machines={k: Machine(users=USERS) for k in range(4)}) as made:
        for host in made.hosts:
            host.welcome()
        yield made


class Laptop:
    """A network namespace on the bridge of the hosts, from which runs are launched."""

    def __init__(self, cluster: NetCluster) -> None:
        self.name = f"{cluster.name}lap"
        ip(f"netns add {self.name}")
        ip(f"link add {self.name} type veth peer name eth0 netns {self.name}")
        ip(f"-n {self.name} addr add {cluster.prefix}.3/24 dev eth0")
        ip(f"-n {self.name} link set lo up")
        ip(f"-n {self.name} link set eth0 up")
        ip(f"link set {self.name} master {cluster.bridge} up")
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, words: list[str], operator: Operator, output: Path) -> subprocess.Popen[str]:
        argv = ["ip", "netns", "exec", self.name, sys.executable, str(REPOSITORY / "launch.py"), *words]
        with output.open("w") as file:
            started = subprocess.Popen(
                argv, cwd=operator.cwd, env=operator.env, stdin=subprocess.DEVNULL, stdout=file,
                stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip
        self.processes.append(started)
        return started

    def remove(self) -> None:
        ip(f"link del {self.name}", check=False)
        for process in self.processes:
            process.kill()
            process.wait()
        ip(f"netns del {self.name}", check=False)


@dataclass
class Lab:
    cluster: NetCluster
    folder: Path
    parts: Path
    laptop: Laptop
    operators: dict[str, Operator]

    def config(self, user: str, hosts: list[int]) -> Path:
        folder = self.folder / f"{user}-{'-'.join(map(str, hosts))}"
        folder.mkdir(exist_ok=True)
        env = {"GNNFLEET_KERNELS": f"{HOMES}/{user}/kernels", "OMP_NUM_THREADS": "1"}
        nodes = [
            {
                "host": self.cluster.hosts[k].address,
                "user": user,
                "python": sys.executable,
                "workdir": f"/tmp/work-{user}",
                "env": env,
            }
            for k in hosts
        ]
        data = {"folder": str(self.parts / str(len(hosts))), "options": {"num_nodes": 400, "num_features": 4}}
        return write_config(folder, nodes, data=data, run={"peer_timeout": 8})

    def launch(self, user: str, run_id: str, hosts: list[int], *words: str, detach: bool = True) -> Path:
        """Launch a run from the laptop; wait until it is queued or trains. Return the file of the launcher's output."""
        operator = self.operators[user]
        (operator.cwd / "notes.py").write_text(NOTES)
        output = self.folder / f"{run_id}.txt"
        options = ["launch", "--config", str(self.config(user, hosts)), "--run-id", run_id, "--wait"]
        own = ["--", "python", "notes.py", run_id, *words]
        started = self.laptop.start([*options, *(["--detach"] if detach else []), *own], operator, output)
        if detach:
            assert started.wait(DEADLINE) == 0, output.read_text()
        else:
            await_true(lambda: "in line" in output.read_text(), run_id)
        return output

    def status(self, user: str, run_id: str) -> dict[str, Any]:
        return self.operators[user].status(run_id)

    def ended(self, user: str, run_id: str) -> dict[str, Any]:
        await_true(lambda: self.status(user, run_id)["state"] not in ("waiting", "running", "stopping"), run_id)
        return self.status(user, run_id)

    def ran(self, run_id: str, hosts: list[int]) -> dict[int, list[float]]:
        """Return when the ranks of a run began and ended, by host. Fails unless each was started once."""
        found = {}
        for rank, k in enumerate(hosts):
            lines = self.cluster.hosts[k].root_path(f"/tmp/ran-{run_id}-{rank}").read_text().splitlines()
            assert len(lines) == 1, f"{run_id} ran {len(lines)} times on host {k}"
            found[k] = json.loads(lines[0])
        return found

    def end(self, run_id: str, hosts: list[int]) -> None:
        for k in hosts:
            self.cluster.hosts[k].write(f"/tmp/end-{run_id}", "")


def await_true(true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE
    while not true():
        assert time.monotonic() < deadline, f"{what} has not come"
        time.sleep(0.3)


@pytest.fixture
def lab(cluster: NetCluster, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    laptop = Laptop(cluster)
    operators = {user: Operator(cluster, tmp_path / user) for user in USERS}
    for user, operator in operators.items():
        operator.env = {**operator.env, "LOGNAME": user, "USER": user}
    yield Lab(cluster, tmp_path, tmp_path_factory.mktemp("parts"), laptop, operators)
    laptop.remove()
    end_processes(cluster)


def test_runs_of_three_users_wait_and_all_run_once_in_order(lab: Lab) -> None:
    # Two runs hold all hosts. Of one, a host is powered off while another run waits for it.
    lab.launch("ann", "holds", [0, 1, 2], "until-told")
    lab.launch("bob", "holds3", [3], "until-told")
    cut = lab.launch("cat", "cut", [2, 3])
    assert "run cut is queued" in cut.read_text() and "1st in line" in cut.read_text()
    lab.cluster.hosts[3].power_cut()
    state = lab.ended("cat", "cut")
    lead = state["nodes"][0]
    assert lead["state"] == "failed" and "node1" in lead["why"] and "no sign of life" in lead["why"], state
    lab.cluster.hosts[3].power_on()
    lab.cluster.hosts[3].wait_until_up()
    lab.cluster.hosts[3].welcome()

    # Five runs of three users wait, and one whose supervisor is killed. The last launcher does not detach.
    wanted = {
        "first": ("bob", [0, 1]),
        "second": ("cat", [2]),
        "killed": ("bob", [0]),
        "third": ("ann", [0, 1, 2, 3]),
        "fourth": ("bob", [3]),
        "fifth": ("cat", [1, 2]),
    }
    for run_id, (user, hosts) in wanted.items():
        lab.launch(user, run_id, hosts, detach=run_id != "fifth")
    behind = lab.status("ann", "third")
    assert behind["state"] == "waiting" and "run holds of ann on node0, node1, node2" in behind["sentence"]
    assert "3rd in line" in behind["sentence"]
    shown = lab.operators["bob"].gnnfleet("queue", "--config", str(lab.config("bob", [0, 1, 2, 3])), "--json")
    lines = json.loads(shown.output[shown.output.index("[") :])
    by_host = [[(run["run_id"], run["user"], run.get("place")) for run in line["runs"]] for line in lines]
    assert by_host == [
        [("holds", "ann", None), ("first", "bob", 1), ("killed", "bob", 2), ("third", "ann", 3)],
        [("holds", "ann", None), ("first", "bob", 1), ("third", "ann", 2), ("fifth", "cat", 3)],
        [("holds", "ann", None), ("second", "cat", 1), ("third", "ann", 2), ("fifth", "cat", 3)],
        [("third", "ann", 1), ("fourth", "bob", 2)],
    ]
    host = lab.cluster.hosts[0]
    (supervisor,) = (one for one in host.processes() if "supervisor.py" in one.cmdline and "/killed/" in one.cmdline)
    host.kill(supervisor.pid)

    # The laptop is gone. All run, in their order on each host.
    lab.laptop.remove()
    lab.end("holds", [0, 1, 2])
    del wanted["killed"]
    for run_id, (user, _) in wanted.items():
        state = lab.ended(user, run_id)
        assert state["state"] == "done", state["sentence"]
    ran = {run_id: lab.ran(run_id, hosts) for run_id, (_, hosts) in wanted.items()}
    for k in range(4):
        times = [(run_id, *at[k]) for run_id, at in ran.items() if k in at]
        for (_, _, ended), (run_id, began, _) in zip(times, times[1:], strict=False):
            assert ended <= began, f"{run_id} began on host {k} before its turn: {times}"
    leases = [host.run(["ls", "/tmp/gnnfleet-leases"]).stdout for host in lab.cluster.hosts]
    assert [line for one in leases for line in one.split() if "ticket" in line and "killed" not in line] == []
