"""Tests of prompts for passwords and passphrases: once per user, and once more after a refusal."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import paramiko
import pytest

from launcher.command import Command, Secret
from launcher.config.schema import ClusterConfig, DataConfig, NodeConfig
from launcher.errors import PasswordRefused, UsageError
from launcher.transport import Transport, ask_password, close_all, connect_all
from launcher.transport.auth import Passwords
from sshd_inprocess import Sshd, serving
from transport_kit import know, new_key, openssh_to, save_key, ssh_to


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    return folder


@pytest.fixture
def servers(home: Path) -> Iterator[list[Sshd]]:
    with ExitStack() as stack:
        made = [stack.enter_context(serving(Sshd(home, new_key(), password="right"))) for _ in range(3)]
        for server in made:
            know(home, server.port, server.host_key)
        yield made


def cluster(*servers: Sshd, key: Path | None = None) -> ClusterConfig:
    nodes = tuple(
        NodeConfig(host="127.0.0.1", port=one.port, user="ann", password=True, key=str(key) if key else None)
        for one in servers
    )
    return ClusterConfig(nodes, DataConfig("synthetic"))


class Asker:
    def __init__(self, *answers: str):
        self.answers, self.prompts = list(answers), list[str]()

    def __call__(self, prompt: str) -> Secret:
        self.prompts.append(prompt)
        return Secret(self.answers.pop(0))


def states(results: dict[int, object]) -> list[str]:
    return [type(result).__name__ if isinstance(result, Exception) else "open" for result in results.values()]


def test_one_question_for_all_nodes_of_a_user(servers: list[Sshd]) -> None:
    ask = Asker("right")
    results = connect_all(cluster(*servers), ask)
    close_all(results)
    assert states(dict(results)) == ["open"] * 3
    assert ask.prompts == ["Password for ann on 127.0.0.1"]  # three ports of one host


def test_prompts_name_user_and_hosts(home: Path) -> None:
    (home / ".ssh").mkdir()
    (home / ".ssh/config").write_text("Host gnn*\n  User alice\nHost *\n  User bob\n")
    hosts = [f"gnn{k}" for k in range(1, 17)] + ["other"]
    config = ClusterConfig(tuple(NodeConfig(host=host, password=True) for host in hosts), DataConfig("synthetic"))
    ask = Asker("a", "b")
    passwords = Passwords(config, ask)
    assert ask.prompts == ["Password for alice on 16 nodes (gnn1, gnn2, gnn3, …)", "Password for bob on other"]
    secrets = [passwords.credentials(rank).password for rank in range(17)]
    assert [secret.reveal() for secret in secrets if secret is not None] == ["a"] * 16 + ["b"]


def test_only_hosts_that_refused_the_password_get_another(servers: list[Sshd]) -> None:
    servers[1].password = "another"
    ask = Asker("right", "another")
    results = connect_all(cluster(*servers), ask)
    close_all(results)
    assert states(dict(results)) == ["open"] * 3
    assert ask.prompts[1] == "Not accepted. Password for ann on 127.0.0.1"
    assert [server.connections for server in servers] == [1, 2, 1]


def test_a_user_is_asked_for_a_password_at_most_twice(servers: list[Sshd]) -> None:
    results = connect_all(cluster(servers[0]), Asker("wrong", "wrong again"))
    assert states(dict(results)) == ["PasswordRefused"]
    assert servers[0].logins == ["password refused"] * 2
    assert "wrong" not in str(results[0])


def test_keyboard_interactive_accepts_the_password(servers: list[Sshd]) -> None:
    servers[0].interactive = True
    results = connect_all(cluster(servers[0]), Asker("right"))
    close_all(results)
    assert (states(dict(results)), servers[0].logins) == (["open"], ["interactive ok"])


@pytest.mark.parametrize("interactive", [False, True])
def test_key_and_password(servers: list[Sshd], tmp_path: Path, interactive: bool) -> None:
    key = new_key()
    server = servers[0]
    server.authorized, server.both, server.interactive = key, True, interactive
    results = connect_all(cluster(server, key=save_key(key, tmp_path / "id")), Asker("right"))
    close_all(results)
    assert server.logins == ["key ok", "interactive ok" if interactive else "password ok"]


def test_a_default_key_is_offered_if_a_password_is_not_enough(servers: list[Sshd], home: Path) -> None:
    key, server = new_key(), servers[0]
    server.authorized, server.both = key, True
    save_key(key, home / ".ssh/id_ecdsa")
    results = connect_all(cluster(server), Asker("right"))
    close_all(results)
    assert (states(dict(results)), server.logins) == (["open"], ["key ok", "password ok"])


def test_a_passphrase_is_asked_for_once_for_each_key_file(servers: list[Sshd], tmp_path: Path) -> None:
    key = new_key()
    path = save_key(key, tmp_path / "locked", "opensesame")
    for server in servers:
        server.authorized = key
    ask = Asker("wrong", "opensesame")
    results = connect_all(cluster(*servers, key=path), ask)
    close_all(results)
    assert states(dict(results)) == ["open"] * 3
    prompt = f"Passphrase for key {path}, for 127.0.0.1"
    assert ask.prompts == [prompt, f"Not accepted. {prompt}"]
    assert all(server.logins == ["key ok"] for server in servers)


def test_a_locked_key_and_a_password_are_two_questions(servers: list[Sshd], tmp_path: Path) -> None:
    key, server = new_key(), servers[0]
    server.authorized, server.both = key, True
    ask = Asker("opensesame", "right")
    results = connect_all(cluster(server, key=save_key(key, tmp_path / "locked", "opensesame")), ask)
    close_all(results)
    assert states(dict(results)) == ["open"]
    assert [prompt.split()[0] for prompt in ask.prompts] == ["Passphrase", "Password"]


def test_without_a_terminal_the_missing_secret_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.transport.auth._at_terminal", lambda: False)
    with pytest.raises(UsageError, match="no terminal to ask on: Password for ann on gnn1; start from a terminal"):
        ask_password("Password for ann on gnn1")


@pytest.mark.skipif(shutil.which("ssh") is None, reason="openssh-client is not installed")
def test_openssh_gets_the_password_in_no_argument_and_no_variable(servers: list[Sshd]) -> None:
    transport = openssh_to(servers[0], password="right")
    transport.connect(10)
    try:
        assert transport.run(Command(("echo", "hello")), timeout=10).stdout == b"hello\n"
        assert not any("right" in text for text in visible_in_children())
    finally:
        transport.close()
    assert servers[0].logins == ["password ok"]


@pytest.mark.skipif(shutil.which("ssh") is None, reason="openssh-client is not installed")
def test_openssh_and_a_wrong_password(servers: list[Sshd]) -> None:
    with pytest.raises(PasswordRefused, match="ssh could not log in as ann") as caught:
        openssh_to(servers[0], password="wrong").connect(10)
    assert servers[0].logins == ["password refused"]
    assert "wrong" not in str(caught.value)


def visible_in_children() -> list[str]:
    """Return the command lines and environments of all child processes of this process."""
    children = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    pids = [pid for file in children for pid in file.read_text().split()]
    assert pids
    return [Path(f"/proc/{pid}/{name}").read_text() for pid in pids for name in ("cmdline", "environ")]


def test_secrets_are_not_printed() -> None:
    config = ClusterConfig((NodeConfig(host="a", password=True),), DataConfig("synthetic"))
    passwords = Passwords(config, Asker("opensesame"))
    assert "opensesame" not in repr(passwords.credentials(0)) + str(vars(passwords))


def test_a_key_is_unlocked_once_for_all_nodes(
    servers: list[Sshd], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = new_key()
    path = save_key(key, tmp_path / "id", "opensesame")
    reads: list[str] = []
    read = paramiko.ECDSAKey.from_private_key_file

    def counted(name: str, passphrase: str | None = None) -> paramiko.PKey:
        reads.extend([name] if passphrase else [])  # an unencrypted key is quick to read
        return read(name, passphrase)

    monkeypatch.setattr(paramiko.ECDSAKey, "from_private_key_file", counted)
    for server in servers:
        server.authorized = key
        transport = ssh_to(server, key=path, password="opensesame")
        transport.connect(10)
        transport.close()
        assert isinstance(transport, Transport)
    assert len(reads) == 1
