"""Test kit for transports: SSH keys, known hosts, and transports to servers on this machine."""

from __future__ import annotations

import threading
from pathlib import Path

import paramiko

from launcher.command import Command, Secret
from launcher.config.schema import HostKeys, NodeConfig
from launcher.transport.auth import Credentials, is_locked
from launcher.transport.openssh import OpenSshTransport
from launcher.transport.ssh import SshTransport
from sshd_inprocess import Sshd


def sh(script: str) -> Command:
    return Command(("sh", "-c", script))


def new_key() -> paramiko.PKey:
    return paramiko.ECDSAKey.generate()


def save_key(key: paramiko.PKey, path: Path, passphrase: str | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    key.write_private_key_file(str(path), passphrase)
    return path


def know(home: Path, port: int, key: paramiko.PKey) -> None:
    line = f"[127.0.0.1]:{port} {key.get_name()} {key.get_base64()}\n"
    (home / ".ssh").mkdir(exist_ok=True)
    with (home / ".ssh/known_hosts").open("a") as file:
        file.write(line)


def ssh_to(
    sshd: Sshd | int,
    *,
    key: Path | None = None,
    password: str | None = None,
    host_keys: HostKeys = "strict",
    node_rank: int = 3,
) -> SshTransport:
    port = sshd if isinstance(sshd, int) else sshd.port
    node = NodeConfig(host="127.0.0.1", port=port, user="ann", key=str(key) if key else None)
    return SshTransport(node, host_keys, credentials_of(node, password), node_rank)


def credentials_of(node: NodeConfig, secret: str | None) -> Credentials:
    """Return the credentials of a node.

    secret: the passphrase of its encrypted key, or else the password.
    """
    given = Secret(secret) if secret is not None else None
    if node.key and given is not None and is_locked(node.key):
        return Credentials(node.key, passphrase=given)
    return Credentials(node.key, password=given)


def openssh_to(
    sshd: Sshd, *, key: Path | None = None, password: str | None = None, host_keys: HostKeys = "strict"
) -> OpenSshTransport:
    node = NodeConfig(host="127.0.0.1", port=sshd.port, user="ann", key=str(key) if key else None)
    secret = Secret(password) if password is not None else None
    return OpenSshTransport(node, host_keys, Credentials(node.key, password=secret), 3)


def ssh_threads() -> list[str]:
    kinds = (paramiko.Transport,)
    return [
        thread.name
        for thread in threading.enumerate()
        if thread.name.startswith("ssh-") or (isinstance(thread, kinds) and not thread.server_mode)
    ]
