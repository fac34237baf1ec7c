"""Golden test of every message about an SSH connection (golden/messages_ssh.txt)."""

from __future__ import annotations

import re
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from golden_kit import check_messages
from launcher.config.schema import ClusterConfig, DataConfig, NodeConfig, RunConfig
from launcher.errors import FleetError
from launcher.transport import Transport, ask_password, connect_all, open_transport
from launcher.transport.auth import Credentials
from launcher.transport.ssh import SshTransport
from sshd_inprocess import Sshd, serving
from transport_kit import credentials_of, know, new_key, save_key, sh

Said = tuple[str, str]


class Scene:
    def __init__(self, home: Path, stack: ExitStack):
        self.home, self.stack, self.recorded = home, stack, list[Said]()
        (home / ".ssh").mkdir()
        self.good, self.host_key = new_key(), new_key()
        self.key = save_key(self.good, home / "keys/good")

    def host(self, *, known: bool = True, **how: object) -> Sshd:
        server = self.stack.enter_context(serving(Sshd(self.home, self.host_key, **how)))  # type: ignore[arg-type]
        if known:
            know(self.home, server.port, self.host_key)
        return server

    def config(self, text: str = "") -> None:
        (self.home / ".ssh/config").write_text(text)

    def record(self, how: str, work: Callable[[], object]) -> None:
        """Record the message of the error that ``work`` raises, under the description ``how``.

        Text that differs between executions, such as ports, is replaced.
        """
        with pytest.raises(FleetError) as caught:
            work()
        text = str(caught.value).replace(str(self.home), "HOME")
        text = re.sub(r"(SHA256:)[\w+/]+", r"\1…", text)
        saying = "cannot be used|log in as ann|this host's key|not connect|is not known(?=: No )"
        text = re.sub(rf"({saying}): .*?(?= – |$)", r"\1: (ssh's words)", text)
        self.recorded.append((how, re.sub(r"\b\d{5}\b", "PORT", text)))

    def connect(
        self, how: str, to: Sshd | str, *, key: Path | None = None, secret: str | None = None, timeout: float = 3
    ) -> None:
        host, port = ("127.0.0.1", to.port) if isinstance(to, Sshd) else (to, None)
        node = NodeConfig(host=host, port=port, user="ann", key=str(key) if key else None)
        credentials = credentials_of(node, secret)
        transport = SshTransport(node, "auto", credentials, 3)
        self.record(how, lambda: transport.connect(timeout))


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    with ExitStack() as stack:
        yield Scene(home, stack)


@pytest.mark.skipif(shutil.which("ssh") is None, reason="openssh-client is not installed")
def test_messages(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in (unreachable, refused, host_keys, configs, broken_connections, by_openssh):
        part(scene)
    monkeypatch.setattr("launcher.transport.auth._at_terminal", lambda: False)
    scene.record(
        "a password, and no terminal", lambda: ask_password("Password for ann on 16 nodes (gnn1, gnn2, gnn3, …)")
    )
    monkeypatch.setenv("PATH", "")
    scene.config("Host *\n  ProxyUseFdpass yes\n  ProxyCommand true\n")
    scene.record("ProxyUseFdpass without an OpenSSH client", lambda: over_ssh("gnn1"))
    check_messages("ssh", scene.recorded)


def unreachable(scene: Scene) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        closed = silent.getsockname()[1]
        scene.config(f"Host gnn*\n  HostName 127.0.0.1\n  Port {closed}\n")
        scene.connect("something else listens", "gnn1", timeout=0.5)
    scene.connect("nobody listens", "gnn1")
    scene.config()
    scene.connect("unknown name", "gnn1.invalid")
    scene.connect("always dropped before login", scene.host(hang_up=100, password="x"), timeout=0.5)
    scene.config("Host gnn*\n  ProxyCommand true\n")
    scene.connect("a ProxyCommand that ends", "gnn1", timeout=0.5)
    scene.config("Host gnn*\n  ProxyJump door\nHost door\n  HostName 127.0.0.1\n  Port 1\n  User me\n")
    scene.connect("jump host that does not listen", "gnn1")
    door = scene.host(authorized=scene.good)
    jump = f"Host door\n  HostName 127.0.0.1\n  Port {door.port}\n  User me\n"
    scene.config(f"Host gnn*\n  ProxyJump door\n{jump}")
    scene.connect("jump host that lets nobody in", "gnn1", key=scene.key)
    scene.config(f"Host gnn*\n  ProxyJump door\n{jump}  IdentityFile {scene.key}\n")
    scene.connect("jump host that forwards nothing", "gnn1", key=scene.key)
    scene.config()


def refused(scene: Scene) -> None:
    by_key, by_password = scene.host(authorized=scene.good), scene.host(password="right")
    other = save_key(new_key(), scene.home / "keys/other")
    locked = save_key(scene.good, scene.home / "keys/locked", "opensesame")
    scene.connect("no key", by_key)
    scene.connect("wrong key", by_key, key=other)
    scene.connect("missing key", by_key, key=scene.home / "keys/none")
    (scene.home / "keys/good.pub").write_text("ssh-ed25519 AAAA someone\n")
    scene.connect("public half of a key", by_key, key=scene.home / "keys/good.pub")
    scene.connect("locked key", by_key, key=locked)
    scene.connect("wrong passphrase", by_key, key=locked, secret="guess")
    scene.config(f"Host *\n  IdentityFile {locked}\n")
    scene.connect("locked key named by ssh_config", by_key)
    scene.config()
    scene.connect("a password where only keys count", by_key, secret="right")
    scene.connect("a key where only a password counts", by_password, key=scene.key)
    scene.connect("wrong password", by_password, secret="wrong")
    both = scene.host(authorized=scene.good, password="right", both=True)
    scene.connect("a password beside the key", both, key=locked, secret="opensesame")


def host_keys(scene: Scene) -> None:
    known = scene.home / ".ssh/known_hosts"
    known.write_text("")
    host = scene.host(known=False, authorized=scene.good)
    scene.connect("unknown host", host, key=scene.key)
    know(scene.home, host.port, new_key())
    scene.connect("changed host key", host, key=scene.key)
    known.write_text("")
    know(scene.home, host.port, scene.host_key)
    known.write_text(f"@revoked {known.read_text()}")
    scene.connect("revoked host key", host, key=scene.key)
    scene.config("Host *\n  StrictHostKeyChecking accept-new\n  UserKnownHostsFile ~/.ssh/config/known\n")
    scene.connect("a new key that cannot be kept", host, key=scene.key)
    scene.config()
    known.write_text("")


def configs(scene: Scene) -> None:
    scene.config("Host x\nnonsense\n")
    scene.connect("broken ssh config", "gnn1")
    scene.config("Host x\n  Nonsense yes\n")
    scene.connect("unknown keyword in ssh config", "gnn1")
    scene.config()


def broken_connections(scene: Scene) -> None:
    host = scene.host(authorized=scene.good)
    node = NodeConfig(host="127.0.0.1", port=host.port, user="ann", key=str(scene.key))
    transport = SshTransport(node, "auto", Credentials(node.key), 3)
    transport.connect(5)
    scene.record("a command that takes too long", lambda: transport.run(sh("sleep 60"), timeout=0.3))
    scene.record("a missing file", lambda: transport.download("~/nothere", scene.home / "copy"))
    threading.Timer(0.2, host.drop).start()
    scene.record("a line that breaks", lambda: transport.run(sh("sleep 60"), timeout=60))
    scene.record("a line that is down", lambda: transport.run(sh("true"), timeout=5))
    transport.close()


def by_openssh(scene: Scene) -> None:
    # this transport is used if the ssh config has a KnownHostsCommand
    host = scene.host(known=False, authorized=scene.good)
    block = f"Host gnn*\n  HostName 127.0.0.1\n  Port {host.port}\n  KnownHostsCommand /bin/cat {scene.home}/.ssh/all\n"
    scene.config(block)
    (scene.home / ".ssh/all").write_text("")
    scene.record("OpenSSH: unknown host", lambda: over_ssh("gnn1"))
    know(scene.home, host.port, scene.host_key)
    (scene.home / ".ssh/known_hosts").rename(scene.home / ".ssh/all")
    scene.record("OpenSSH: no key", lambda: over_ssh("gnn1"))
    scene.config(block.replace(f"Port {host.port}", "Port 1"))
    scene.record("OpenSSH: nobody listens", lambda: over_ssh("gnn1"))
    scene.config()


def over_ssh(host: str) -> Transport:
    nodes = (NodeConfig(host="first"), NodeConfig(host=host, user="ann"))
    return open_transport(
        ClusterConfig(nodes, DataConfig("synthetic"), run=RunConfig(connect_timeout=3)), 1, Credentials()
    )


def test_errors_of_all_nodes_are_reported(scene: Scene) -> None:
    nodes = tuple(NodeConfig(host="127.0.0.1", port=1, user=f"u{k}") for k in range(3))
    errors = [str(error) for error in connect_all(ClusterConfig(nodes, DataConfig("synthetic"))).values()]
    assert [error.split(":")[0] for error in errors] == [f"node{k} (u{k}@127.0.0.1" for k in range(3)]
