"""Tests of nodes behind one jump host, which refuses many simultaneous connections."""

from __future__ import annotations

import getpass
import time
from collections.abc import Iterator
from pathlib import Path

import paramiko
import pytest

from launcher.command import Command
from launcher.config.schema import ClusterConfig, DataConfig, NodeConfig
from launcher.errors import ConnectionLost
from launcher.transport import Transport, close_all, connect_all
from netns import Host, NetCluster, Process

BEHIND = 8


@pytest.fixture(scope="module")
def cluster() -> Iterator[NetCluster]:
    """Yield nine hosts. Host 0 is the jump host; its sshd has MaxStartups 3."""
    options = {"MaxStartups": "3:100:3", "LogLevel": "VERBOSE"}
    with NetCluster(1 + BEHIND, sshd_options=options) as made:
        yield made


@pytest.fixture
def config(cluster: NetCluster, monkeypatch: pytest.MonkeyPatch) -> ClusterConfig:
    for name, value in cluster.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    known = cluster.operator_ssh_config.read_text()
    names = " ".join(host.name for host in cluster.hosts[1:])
    cluster.ssh_config(cluster.operator_ssh_config)
    text = f"Host {names}\n  ProxyJump {cluster.hosts[0].name}\n" + known.removeprefix(f"Host {names}\n")
    cluster.operator_ssh_config.write_text(text)
    nodes = tuple(NodeConfig(host=host.name) for host in cluster.hosts[1:])
    return ClusterConfig(nodes, DataConfig("synthetic"))


def logins(host: Host) -> int:
    return Path(host.folder / "console.log").read_text(errors="replace").count("Accepted publickey")


def sessions(host: Host) -> list[Process]:
    return [process for process in host.processes(system=True) if process.cmdline.startswith("sshd: root")]


def opened(config: ClusterConfig) -> dict[int, Transport]:
    lines = connect_all(config)
    assert [str(line) for line in lines.values() if not isinstance(line, Transport)] == []
    return {rank: line for rank, line in lines.items() if isinstance(line, Transport)}


def names_of(lines: dict[int, Transport]) -> list[str]:
    return [line.run(Command(("hostname",)), timeout=10).stdout.decode().strip() for line in lines.values()]


def test_one_login_at_the_jump_host_serves_all_nodes(cluster: NetCluster, config: ClusterConfig) -> None:
    before = logins(cluster.hosts[0])
    lines = opened(config)
    assert names_of(lines) == [host.name for host in cluster.hosts[1:]]
    assert logins(cluster.hosts[0]) == before + 1
    lines[0].close()
    del lines[0]
    assert names_of(lines) == [host.name for host in cluster.hosts[2:]], (
        "closing one node's transport keeps the shared connection open"
    )
    close_all(dict(lines))


def test_a_broken_connection_to_the_jump_host_is_reopened_for_all_nodes(
    cluster: NetCluster, config: ClusterConfig
) -> None:
    lines = opened(config)
    jump = cluster.hosts[0]
    before = logins(jump)
    for process in sessions(jump):
        jump.kill(process.pid)
    for line in lines.values():
        with pytest.raises(ConnectionLost):
            line.run(Command(("true",)), timeout=10)
    again = {rank: line.connect(10) for rank, line in lines.items()}
    assert len(again) == BEHIND
    assert names_of(lines) == [host.name for host in cluster.hosts[1:]]
    assert logins(jump) == before + 1
    close_all(dict(lines))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # paramiko's threads close, too
def test_lines_close_although_the_jump_host_connection_breaks_meanwhile(
    cluster: NetCluster, config: ClusterConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = opened(config)

    def fail(channel: paramiko.Channel) -> None:
        raise EOFError  # as paramiko does if the connection ends while it sends the message that closes the channel

    with monkeypatch.context() as patched:
        patched.setattr(paramiko.Channel, "close", fail)
        close_all(dict(lines))
    with pytest.raises(ConnectionLost):
        lines[0].run(Command(("true",)), timeout=10)


def test_the_jump_host_connection_closes_with_the_last_node(cluster: NetCluster, config: ClusterConfig) -> None:
    close_all(dict(opened(config)))
    deadline = time.monotonic() + 10
    while sessions(cluster.hosts[0]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert sessions(cluster.hosts[0]) == []


def test_a_jump_host_that_is_down_is_named_by_every_node(cluster: NetCluster, config: ClusterConfig) -> None:
    cluster.operator_ssh_config.write_text(
        cluster.operator_ssh_config.read_text() + "\nHost gone\n  HostName 127.0.0.1\n  Port 1\n"
    )
    names = cluster.operator_ssh_config.read_text().replace(f"ProxyJump {cluster.hosts[0].name}", "ProxyJump gone")
    cluster.operator_ssh_config.write_text(names)
    errors = [str(error) for error in connect_all(config).values()]
    assert all(f"jump host {getpass.getuser()}@127.0.0.1:1: connection refused on port 1" in error for error in errors)
    assert [error.split()[0] for error in errors] == [f"node{rank}" for rank in range(BEHIND)]
