"""Which way a node behind SSH is reached: by paramiko, or by OpenSSH's own client where only that gets in."""

from __future__ import annotations

import threading
from pathlib import Path

import paramiko

from launcher.command import Command
from launcher.config.schema import ClusterConfig
from launcher.errors import AuthError, HostKeyError, PasswordRefused, TransportError, UnreachableError
from launcher.transport.base import Completed, OnBytes, OnLine, Talk, Transport
from launcher.transport.line import NeedsOpenSsh
from launcher.transport.login import Credentials
from launcher.transport.openssh import OpenSshTransport
from launcher.transport.sessions import SessionTransport
from launcher.transport.ssh import SshTransport
from launcher.transport.sshconfig import ssh_program

_SECOND_TRIES = threading.BoundedSemaphore(8)  # of ssh processes that look whether they get in


class NodeOverSsh(Transport):
    """``connect`` finds out which way it is; everything then goes that way."""

    def __init__(self, config: ClusterConfig, node_rank: int, credentials: Credentials | None = None):
        node = config.nodes[node_rank]
        self._paramiko = SshTransport(node, config.host_keys, credentials, node_rank)
        self._openssh = OpenSshTransport(node, config.host_keys, self._paramiko.credentials, node_rank)
        self._way: SessionTransport = self._paramiko
        self.node_rank = node_rank

    @property
    def target(self) -> str:  # type: ignore[override]
        return self._way.target

    @property
    def program(self) -> str:
        """What keeps the line: ``paramiko`` or ``ssh``."""
        return "ssh" if self._way is self._openssh else "paramiko"

    @property
    def paramiko_transport(self) -> paramiko.Transport | None:
        """The open connection itself; None where OpenSSH keeps it."""
        return None if self._way is self._openssh else self._paramiko.paramiko_transport

    def connect(self, timeout: float) -> None:
        if self._way is self._openssh:
            return self._openssh.connect(timeout)
        try:
            self._paramiko.connect(timeout)
        except NeedsOpenSsh:
            self._openssh.connect(timeout)
            self._way = self._openssh
        except TransportError as error:
            if not _may_differ(error) or not _connects(self._openssh, timeout):
                raise
            self._way = self._openssh

    def run(self, command: Command, *, stdin: bytes = b"", timeout: float) -> Completed:
        return self._way.run(command, stdin=stdin, timeout=timeout)

    def stream(self, command: Command, on_line: OnLine, stop: threading.Event) -> int:
        return self._way.stream(command, on_line, stop)

    def talk(self, command: Command) -> Talk:
        return self._way.talk(command)

    def upload(self, source: Path, dest: str, *, offset: int = 0, on_bytes: OnBytes | None = None) -> None:
        self._way.upload(source, dest, offset=offset, on_bytes=on_bytes)

    def write(self, data: bytes, dest: str, *, mode: int = 0o644) -> None:
        self._way.write(data, dest, mode=mode)

    def download(self, source: str, dest: Path, *, on_bytes: OnBytes | None = None) -> None:
        self._way.download(source, dest, on_bytes=on_bytes)

    def close(self) -> None:
        self._way.close()


def _may_differ(error: TransportError) -> bool:
    """Whether ``ssh`` could get in where paramiko did not."""
    if isinstance(error, PasswordRefused) or ssh_program() is None:
        return False
    if isinstance(error, HostKeyError):
        return "CHANGED" not in error.message and "revoked" not in error.message
    if isinstance(error, AuthError):
        return "key file" not in error.message or "is encrypted" in error.message
    return isinstance(error, UnreachableError) and error.message.startswith("SSH failed")


def _connects(transport: OpenSshTransport, timeout: float) -> bool:
    """What ssh says where it fails as well is not shown: the first error explains better."""
    with _SECOND_TRIES:
        try:
            transport.connect(timeout)
        except TransportError:
            return False
    return True
