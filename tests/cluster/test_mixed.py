"""Tests of a run on hosts with different logins, interpreters, network interfaces and jump hosts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from launching import write_config
from netns import PASSWORD, PASSWORD_USER, Machine, NetCluster
from netns_python import own_python
from netns_tools import keygen
from terminal import Terminal

SUM = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([float(os.environ["RANK"])])
dist.all_reduce(total)
print("sum", int(total), "prefix", sys.prefix, "over", os.environ["GLOO_SOCKET_IFNAME"], flush=True)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    keygen(folder / "agent_key", "agent")
    return folder / "agent_key"


@pytest.fixture(scope="module")
def mixed(keys: Path) -> Iterator[NetCluster]:
    """Yield three hosts.

    Host 0 accepts the operator's key, host 1 only a password. Host 2 is reached through host 0 and accepts a key of the
    ssh-agent.
    """
    machines = {
        0: Machine(interface="ens7"),
        1: Machine(password=True, sshd={"PubkeyAuthentication": "no"}),
        2: Machine(authorized=keys.with_suffix(".pub"), behind=0),
    }
    with NetCluster(3, machines=machines) as cluster:
        yield cluster


@pytest.fixture
def agent(keys: Path, tmp_path: Path) -> Iterator[str]:
    socket = str(tmp_path / "agent.sock")
    process = subprocess.Popen(["ssh-agent", "-D", "-a", socket], stdout=subprocess.DEVNULL)
    try:
        while not os.path.exists(socket):
            assert process.poll() is None
        subprocess.run(["ssh-add", "-q", str(keys)], env={**os.environ, "SSH_AUTH_SOCK": socket}, check=True)
        yield socket
    finally:
        process.terminate()
        process.wait()


def operator_home(cluster: NetCluster, folder: Path) -> Path:
    home = folder / "home"
    (home / ".ssh").mkdir(parents=True)
    shutil.copy(cluster.operator_ssh_config.with_name("known_hosts"), home / ".ssh/known_hosts")
    bastion, inner = cluster.hosts[0], cluster.hosts[2]
    (home / ".ssh/config").write_text(
        f"Host far\n  HostName {inner.address}\n  User root\n  ProxyJump root@{bastion.address}\n"
        f"Host {bastion.address}\n  IdentityFile {cluster.identity}\n  IdentitiesOnly yes\n"
    )
    return home


def nodes_of(cluster: NetCluster) -> list[dict]:
    venv, conda = own_python(cluster.hosts[0], "envs/gnn"), own_python(cluster.hosts[1], "conda/gnn", conda=True)
    return [
        {"host": cluster.hosts[0].address, "user": "root", "venv": venv.removesuffix("/bin/python"), "procs": 1},
        {
            "host": cluster.hosts[1].address,
            "user": PASSWORD_USER,
            "password": True,
            "conda": conda.removesuffix("/bin/python"),
            "procs": 2,
        },
        {"host": "far", "python": own_python(cluster.hosts[2]), "procs": 3},
        {"host": cluster.hosts[0].address, "user": "root", "venv": venv.removesuffix("/bin/python"), "procs": 1},
    ]


@pytest.mark.slow
def test_unlike_machines_work_together_in_one_run(mixed: NetCluster, agent: str, tmp_path: Path) -> None:
    # The four nodes have 1, 2, 3 and 1 processes; two of them are on one host, and one is behind a jump host. Their
    # hosts accept a password, a key file or a key of the agent, and use a conda prefix or a venv.
    home = operator_home(mixed, tmp_path)
    (tmp_path / "sum.py").write_text(SUM)
    data = {"options": {"num_nodes": 500, "num_features": 4}}
    config = write_config(tmp_path, nodes_of(mixed), data=data)
    env = mixed.environment(HOME=str(home), SSH_AUTH_SOCK=agent)
    words = ("--config", str(config), "--run-id", "mixed", "--", "python", "sum.py")
    with Terminal(*words, cwd=tmp_path, env=env) as terminal:
        terminal.await_text("Password for").type(f"{PASSWORD}\n")
        status = terminal.end()
        shown = terminal.shown
    assert status == 0, shown
    assert shown.count("Password for") == 1 and PASSWORD not in shown
    run = tmp_path / "runs/mixed"
    rank_logs = {log.name: (log.parent.name, log.read_text().split()) for log in run.glob("logs/node*/rank*.log")}
    assert [rank_logs[f"rank{rank}.log"][0] for rank in range(7)] == [
        "node0",
        "node1",
        "node1",
        *["node2"] * 3,
        "node3",
    ]
    for node, words in rank_logs.values():
        assert words[words.index("sum") + 1] == "21"
        assert words[words.index("over") + 1] == ("ens7" if node in ("node0", "node3") else "eth0")
        folder = {"node0": "envs/gnn", "node1": "conda/gnn", "node2": "venv", "node3": "envs/gnn"}[node]
        assert words[words.index("prefix") + 1] == f"{mixed.hosts[0].home}/{folder}"
    assert [process for host in mixed.hosts for process in host.processes()] == []
    assert not any(PASSWORD in path.read_text(errors="replace") for path in run.rglob("*") if path.is_file())


@pytest.mark.slow
def test_the_bundled_trainer_trains_on_unlike_machines(mixed: NetCluster, agent: str, tmp_path: Path) -> None:
    home = operator_home(mixed, tmp_path)
    config = write_config(tmp_path, [nodes_of(mixed)[k] for k in (0, 2, 3)], train={"epochs": 2})
    env = mixed.environment(HOME=str(home), SSH_AUTH_SOCK=agent)
    with Terminal("--config", str(config), "--run-id", "trained", cwd=tmp_path, env=env) as terminal:
        status = terminal.end()
        shown = terminal.shown
    assert status == 0, shown
    result = json.loads((tmp_path / "runs/trained/result.json").read_text())
    assert result["metrics"]["epochs"] == 2 and result["metrics"]["test_accuracy"] > 0.3
    assert set(result["metrics"]["seeds_per_s"]) == {"0", "1", "2", "3", "4"}
