"""Nodes behind SSH: one connection each by paramiko, for commands and files alike."""

from __future__ import annotations

import os
import random
import threading
import time

import paramiko

from launcher.command import Command, Secret
from launcher.config.schema import HostKeys, NodeConfig
from launcher.errors import AuthError, HostKeyError, PasswordRefused
from launcher.transport.channel import Remote, RemoteCommand
from launcher.transport.hop import Hop
from launcher.transport.keys import is_locked, key_problem
from launcher.transport.line import HopFailed, Line, NeedsOpenSsh, Route, open_line
from launcher.transport.login import Credentials
from launcher.transport.sessions import STALL, SessionTransport
from launcher.transport.sshconfig import find_way, labelled
from launcher.transport.ssherrors import connect_error, relabelled, was_dropped

_ATTEMPTS = 6  # of a connection that is dropped before login

_PROXY_ATTEMPTS = 3  # a ProxyCommand that ends says nothing of why

_END_WAIT = 1.0


def credentials_of(node: NodeConfig, secret: Secret | None) -> Credentials:
    """What unlocks a key is a passphrase, which must not be shown to the server as a password."""
    key = os.path.expanduser(node.key) if node.key else None
    if key and secret is not None and is_locked(key):
        return Credentials(key, passphrase=secret)
    return Credentials(key, password=secret)


class SshTransport(SessionTransport):
    """A node behind SSH. ``connect`` opens the line again after ``ConnectionLost``."""

    def __init__(
        self,
        node: NodeConfig,
        host_keys: HostKeys,
        secret: Secret | Credentials | None = None,
        node_rank: int | None = None,
    ):
        super().__init__(node.login, node_rank)
        self.node, self.host_keys = node, host_keys
        self.credentials = secret if isinstance(secret, Credentials) else credentials_of(node, secret)
        self._opening = threading.Lock()
        self._line: Line | None = None

    @property
    def paramiko_transport(self) -> paramiko.Transport | None:
        """The open connection itself; None while there is none."""
        return self._line.ssh if self._line is not None else None

    def connect(self, timeout: float) -> None:
        """Open the line, anew when it broke. A line dropped before login is tried again, a wrong key is not.

        Raises ``NeedsOpenSsh`` when paramiko cannot do what ssh_config asks for.
        """
        with self._opening:
            if self._alive():
                return
            self._let_go()
            way = self._way()
            deadline = time.monotonic() + timeout
            attempts = _PROXY_ATTEMPTS if any(hop.proxy_command for hop in way) else _ATTEMPTS
            for attempt in range(attempts):
                if self._open(way, timeout, deadline if attempt < attempts - 1 else 0.0):
                    return
                time.sleep(random.uniform(0.1, 0.3) * 2**attempt)

    def _way(self) -> tuple[Hop, ...]:
        """The hops; raises ``AuthError`` for a key file that cannot be used."""
        with labelled(self.node_rank):
            way = find_way(self.node.host, self.node.user, self.node.port)
        self.target = way[-1].target
        if keyword := next((hop.only_openssh for hop in way if hop.only_openssh), ""):
            raise NeedsOpenSsh(keyword)
        credentials = self.credentials
        if credentials.key and (problem := key_problem(credentials.key, credentials.passphrase, way[-1].agent)):
            kind = PasswordRefused if "passphrase for" in problem[0] else AuthError
            raise kind(problem[0], host=self.target, node_rank=self.node_rank, remedy=problem[1])
        return way

    def _open(self, way: tuple[Hop, ...], timeout: float, deadline: float) -> bool:
        """One try; False when a host hung up before login and there is time for another."""
        try:
            self._line = open_line(Route(way, self.host_keys, self.credentials, timeout))
        except HopFailed as failed:
            if was_dropped(failed.error) and not failed.reached and time.monotonic() < deadline:
                return False
            raise connect_error(failed, way, timeout, self.node_rank) from failed.error
        except HostKeyError as error:
            raise relabelled(error, self.target, self.node_rank) from error
        return True

    def close(self) -> None:
        with self._opening:
            self._let_go()

    def _let_go(self) -> None:
        line, self._line = self._line, None
        if line is not None:
            line.close()
        self._sftp_idle.clear()

    def _alive(self) -> bool:
        line = self._line
        return line is not None and line.is_alive

    def _ssh(self) -> paramiko.Transport:
        line = self._line
        if line is None or not line.is_alive:
            raise EOFError("the line is down")
        return line.ssh

    def _begin(self, command: Command, deadline: float) -> Remote:
        return RemoteCommand(self._session(deadline), command)

    def _session(self, deadline: float) -> paramiko.Channel:
        """A new channel; waits for its turn when the server allows fewer than usual."""
        while True:
            try:
                return self._ssh().open_session(timeout=min(STALL, max(0.1, deadline - time.monotonic())))
            except paramiko.ChannelException:
                if time.monotonic() + 0.2 > deadline:
                    raise
                time.sleep(0.2)

    def _begin_sftp(self) -> paramiko.SFTPClient:
        sftp = paramiko.SFTPClient.from_transport(self._ssh())
        assert sftp is not None
        channel = sftp.get_channel()
        assert channel is not None
        channel.settimeout(STALL)
        return sftp

    def _await_end(self) -> None:
        if self._line is not None:
            self._line.ssh.join(_END_WAIT)
