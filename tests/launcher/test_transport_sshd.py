"""Tests of the SSH transport against a real OpenSSH server on loopback."""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paramiko
import pytest

from launcher.config.resolve import resolve
from launcher.config.schema import ClusterConfig, DataConfig, NodeConfig
from launcher.errors import CommandTimeout, ConnectionLost
from launcher.preflight.preflight import run_preflight
from launcher.transport import Transport, close_all, connect_all, remote
from launcher.transport.auth import Credentials
from launcher.transport.ssh import SshTransport
from transport_kit import sh, ssh_threads
from waiting import runs, stretched, wait_until

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(not os.path.exists(SSHD), reason="openssh-server is not installed"),
    pytest.mark.skipif(os.geteuid() != 0, reason="an sshd that lets this user in needs root"),
]


@dataclass(frozen=True)
class RealSshd:
    port: int
    log: Path

    def logins(self) -> int:
        return self.log.read_text().count("Accepted publickey")


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealSshd]:
    """Yield an OpenSSH server. A temporary ~/.ssh has a key and aliases for the server."""
    folder = tmp_path_factory.mktemp("sshd")
    home = folder / "home"
    (home / ".ssh").mkdir(parents=True)
    Path("/run/sshd").mkdir(exist_ok=True)
    for path, kind in (
        (folder / "host_key", "ed25519"),
        (folder / "ecdsa", "ecdsa"),
        (home / ".ssh/id_ed25519", "ed25519"),
    ):
        subprocess.run(["ssh-keygen", "-q", "-t", kind, "-N", "", "-f", path], check=True)
    with socket.create_server(("127.0.0.1", 0)) as free, socket.create_server(("127.0.0.1", 0)) as another:
        port, few = free.getsockname()[1], another.getsockname()[1]
    log = folder / "log"
    (folder / "config").write_text(
        f"ListenAddress 127.0.0.1\nPort {port}\nPort {few}\nHostKey {folder}/host_key\nHostKey {folder}/ecdsa\n"
        f"PidFile none\nStrictModes no\nUsePAM no\n"
        f"AuthorizedKeysFile {home}/.ssh/id_ed25519.pub\nPermitRootLogin prohibit-password\n"
        f"Subsystem sftp internal-sftp\nLogLevel VERBOSE\nSetEnv HOME={home}\n"
        f"Match LocalPort {few}\n  MaxSessions 1\n"
    )
    (home / ".ssh/config").write_text(
        "Host known-jump known-behind\n  UserKnownHostsFile ~/.ssh/known_ecdsa\n"
        f"Host direct jump known-jump\n  HostName 127.0.0.1\n  Port {port}\n  User {getpass.getuser()}\n"
        f"Host behind\n  HostName localhost\n  Port {port}\n  ProxyJump jump\n"
        f"Host known-behind\n  HostName localhost\n  Port {port}\n  ProxyJump known-jump\n"
        f"Host few\n  HostName 127.0.0.1\n  Port {few}\n  User {getpass.getuser()}\n"
        "Host *\n  UserKnownHostsFile ~/.ssh/known\n"
    )
    ecdsa = (folder / "ecdsa.pub").read_text()
    (home / ".ssh/known_ecdsa").write_text(f"[127.0.0.1]:{port} {ecdsa}[localhost]:{port} {ecdsa}")
    server = subprocess.Popen([SSHD, "-D", "-e", "-f", folder / "config"], stderr=log.open("w"))
    wait_for_port(port)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        patch.delenv("SSH_AUTH_SOCK", raising=False)
        yield RealSshd(port, log)
    server.terminate()
    server.wait(10)


def wait_for_port(port: int) -> None:
    deadline = time.monotonic() + 10
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            assert time.monotonic() < deadline, "sshd did not start"
            time.sleep(0.05)


@pytest.fixture
def node(sshd: RealSshd) -> Iterator[SshTransport]:
    transport = SshTransport(NodeConfig(host="direct"), "accept-new", Credentials(), 0)
    transport.connect(10)
    yield transport
    transport.close()
    assert ssh_threads() == []


def test_an_alias_through_a_jump_host(sshd: RealSshd) -> None:
    before = sshd.logins()
    transport = SshTransport(NodeConfig(host="behind"), "accept-new", Credentials(), 1)
    transport.connect(10)
    assert transport.run(sh("cat"), stdin=b"x" * 3_000_000, timeout=30).stdout == b"x" * 3_000_000
    transport.close()
    assert sshd.logins() - before == 2
    assert ssh_threads() == []


def test_the_known_type_of_host_key_is_requested_of_each_hop(sshd: RealSshd) -> None:
    # The hosts would send an ed25519 key, but known_hosts has only their ecdsa keys; the client must ask the jump host
    # and the target for those.
    transport = SshTransport(NodeConfig(host="known-behind"), "strict", Credentials(), 1)
    transport.connect(10)
    assert transport.run(sh("echo x"), timeout=10).stdout == b"x\n"
    transport.close()


def test_more_simultaneous_commands_than_sshd_allows_sessions(
    node: SshTransport, sshd: RealSshd, tmp_path: Path
) -> None:
    # MaxSessions of sshd is 10; the test runs 32 commands, a stream and four uploads at once.
    before, stop, follows = sshd.logins(), threading.Event(), threading.Event()
    source = tmp_path / "source"
    source.write_bytes(os.urandom(1_000_000))
    with ThreadPoolExecutor(40) as pool:
        stream = pool.submit(node.stream, sh("echo; exec sleep 60"), lambda line: follows.set(), stop)
        assert follows.wait(10)
        uploads = [pool.submit(node.upload, source, f"{tmp_path}/copy{k}") for k in range(4)]
        numbers = list(pool.map(lambda k: int(node.run(sh(f"sleep 0.1; echo {k}"), timeout=60).stdout), range(32)))
        assert [upload.result(60) for upload in uploads] == [None] * 4
        stop.set()
        assert stream.result(5) == -1
    assert numbers == list(range(32))
    assert (tmp_path / "copy3").read_bytes() == source.read_bytes()
    assert sshd.logins() == before


def test_preflight_finds_a_host_that_allows_one_session(sshd: RealSshd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_SESSIONS_WAIT", 2.0)
    node = NodeConfig(host="few", python=sys.executable)
    transport = SshTransport(node, "accept-new", Credentials(), 0)
    transport.connect(30)
    try:
        config = resolve(ClusterConfig(nodes=(node,), data=DataConfig("synthetic")))
        (finding,) = [one for one in run_preflight(config, {0: transport}).findings if one.severity == "block"]
    finally:
        transport.close()
    assert finding.message.startswith("the host refused a command or SFTP session")
    assert "MaxSessions 4 or more" in finding.remedy


def test_sessions_are_counted_without_a_command_on_the_host(
    node: SshTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Three shells per host had made preflight a third slower.
    monkeypatch.setattr(SshTransport, "_begin", None)
    node.check_sessions()


def test_a_refused_session_is_requested_again(
    node: SshTransport, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Paramiko keeps one error per connection, so that of two refused sessions one gets no ChannelException.
    refusals = [paramiko.SSHException("Unable to open channel."), paramiko.ChannelException(4, "Connect failed")] * 2
    real = paramiko.Transport.open_session

    def open_session(self: paramiko.Transport, **options: Any) -> paramiko.Channel:
        if refusals:
            raise refusals.pop()
        return real(self, **options)

    monkeypatch.setattr(paramiko.Transport, "open_session", open_session)
    assert node.run(sh("echo x"), timeout=20).stdout == b"x\n" and not refusals
    refusals += [paramiko.SSHException("Unable to open channel.")]
    (tmp_path / "source").write_text("y")
    node.upload(tmp_path / "source", f"{tmp_path}/copy")
    assert (tmp_path / "copy").read_text() == "y" and not refusals


def test_stop_ends_a_remote_command_that_is_silent(node: SshTransport, tmp_path: Path) -> None:
    stop, started = threading.Event(), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        stream = pool.submit(
            node.stream, sh(f"echo $$ > {tmp_path}/pid; echo; exec sleep 60"), lambda line: started.set(), stop
        )
        assert started.wait(10)
        asked = time.monotonic()
        stop.set()
        assert stream.result(5) == -1
        assert time.monotonic() - asked < stretched(2)
    wait_until(lambda: not runs(int((tmp_path / "pid").read_text())), 2)


def test_a_timeout_ends_the_remote_command(node: SshTransport, tmp_path: Path) -> None:
    with pytest.raises(CommandTimeout):
        node.run(sh(f"echo $$ > {tmp_path}/pid; exec sleep 60"), timeout=0.5)
    wait_until(lambda: not runs(int((tmp_path / "pid").read_text())), 2)


def test_preflight_over_ssh_detects_one_machine_under_two_names(sshd: RealSshd, tmp_path: Path) -> None:
    nodes = tuple(NodeConfig(host=host, workdir=f"{tmp_path}/work") for host in ("direct", "behind"))
    config = ClusterConfig(nodes=nodes, data=DataConfig(dataset="synthetic"), host_keys="accept-new")
    lines = connect_all(config)
    report = run_preflight(config, lines)
    close_all(lines)
    assert [f.node_rank for f in report.findings if f.check == "same machine"] == [1]
    assert report.facts[0].address == "127.0.0.1"
    assert [f.severity for f in report.findings if f.check == "network"] == ["ok", "ok"]


def test_connecting_many_nodes_through_an_sshd_that_drops_bursts(sshd: RealSshd) -> None:
    # With MaxStartups 10:30:100, sshd drops some of 24 simultaneous connections; the launcher tries these again.
    config = ClusterConfig(
        nodes=(NodeConfig(host="direct"),) * 24, data=DataConfig(dataset="synthetic"), host_keys="accept-new"
    )
    lines = connect_all(config)
    failed = [str(line) for line in lines.values() if not isinstance(line, Transport)]
    close_all(lines)
    assert failed == []
    assert ssh_threads() == []


def test_a_silent_host_is_detected(node: SshTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    # A host stops answering without closing the connection; the launcher notices this and reports a lost connection.
    monkeypatch.setattr("launcher.transport.ssh._PING_EVERY", 0.5)
    monkeypatch.setattr("launcher.transport.ssh._PING_TIMEOUT", 1.0)
    node.close()
    node.connect(10)
    session = int(node.run(sh("echo $PPID"), timeout=10).stdout)
    os.kill(session, signal.SIGSTOP)
    try:
        started = time.monotonic()
        with pytest.raises(ConnectionLost, match=r"node0 \(.*\): connection lost"):
            node.stream(sh("sleep 60"), lambda line: None, threading.Event())
        assert time.monotonic() - started < stretched(10)
    finally:
        os.kill(session, signal.SIGCONT)
    node.connect(10)
    assert node.run(sh("echo back"), timeout=10).stdout == b"back\n"
