"""Opens an SSH connection with paramiko, or with the OpenSSH client where paramiko cannot log in."""

from __future__ import annotations

import os
import threading

from launcher.config.schema import ClusterConfig
from launcher.errors import AuthError, HostKeyError, KeyFileUnusable, PasswordRefused, SshFailed, TransportError
from launcher.transport.auth import Credentials
from launcher.transport.openssh import OpenSshTransport
from launcher.transport.remote import RemoteTransport
from launcher.transport.ssh import NeedsOpenSsh, SshTransport
from launcher.transport.ssh_config import ssh_program

_SECOND_TRIES = threading.BoundedSemaphore(8)  # limits the ssh processes started after paramiko has failed


def open_over_ssh(config: ClusterConfig, node_rank: int, credentials: Credentials | None = None) -> RemoteTransport:
    """Connect to a node and return its transport.

    Raises TransportError. If both clients fail, the error is that of paramiko, which is more precise.
    """
    node, timeout = config.nodes[node_rank], config.run.connect_timeout
    credentials = credentials or Credentials(os.path.expanduser(node.key) if node.key else None)
    by_paramiko = SshTransport(node, config.host_keys, credentials, node_rank)
    by_openssh = OpenSshTransport(node, config.host_keys, credentials, node_rank)
    try:
        by_paramiko.connect(timeout)
        return by_paramiko
    except NeedsOpenSsh:
        by_openssh.connect(timeout)
    except TransportError as error:
        if not _openssh_may_succeed(error) or not _connects(by_openssh, timeout):
            raise
    return by_openssh


def _openssh_may_succeed(error: TransportError) -> bool:
    if isinstance(error, PasswordRefused | KeyFileUnusable) or ssh_program() is None:
        return False
    if isinstance(error, HostKeyError):
        return error.code != "host-key-changed"
    return isinstance(error, AuthError | SshFailed)


def _connects(transport: OpenSshTransport, timeout: float) -> bool:
    with _SECOND_TRIES:
        try:
            transport.connect(timeout)
        except TransportError:
            return False
    return True
