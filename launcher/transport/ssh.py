"""Nodes behind SSH by paramiko, through fabric's ``Connection``: one for each node, and one for each jump host."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field

import paramiko
from fabric import Config, Connection

from launcher.command import Command
from launcher.config.schema import HostKeys, NodeConfig
from launcher.errors import AuthError, HostKeyError, PasswordRefused, UnreachableError
from launcher.transport.auth import Credentials, Login, key_problem
from launcher.transport.errors import CONNECTION_ERRORS, HopFailed, connect_error, was_dropped
from launcher.transport.host_keys import HostKeyCheck
from launcher.transport.process import READ_SIZE, STALL, Process, with_pid
from launcher.transport.remote import Dropped, RemoteTransport, login_turn
from launcher.transport.ssh_config import Route, SshHost

# paramiko's tracebacks would go to the terminal; what they say is in our errors
logging.getLogger("paramiko").addHandler(logging.NullHandler())

# authenticated ciphers first: 145 against 75 MB/s up on loopback, as no separate MAC is computed in Python
_CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com")

_PING_EVERY = 15.0

_PING_TIMEOUT = 45.0

_JOIN_TIMEOUT = 5.0

_END_WAIT = 1.0

_AGAIN = 0.2  # seconds until a session is asked for again


class NeedsOpenSsh(UnreachableError):
    """paramiko cannot do what ssh_config or known_hosts ask for."""

    def __init__(self, what: str, host: SshHost):
        super().__init__(f"only OpenSSH's own client can follow {what}", host=host.target)


class SshTransport(RemoteTransport):
    """A node by paramiko. ``connect`` may raise ``NeedsOpenSsh``, too."""

    def __init__(self, node: NodeConfig, host_keys: HostKeys, credentials: Credentials, node_rank: int | None = None):
        super().__init__(node, host_keys, credentials, node_rank)
        self._link: _Link | None = None

    @property
    def connection(self) -> Connection | None:
        """The open fabric connection."""
        return self._link.connection if self._link is not None else None

    def _open(self, route: Route, timeout: float) -> None:
        for host in route:
            if host.only_openssh:
                raise NeedsOpenSsh(host.only_openssh, host)
        credentials = self.credentials
        if credentials.key and (problem := key_problem(credentials.key, credentials.passphrase, route[-1].agent)):
            kind = PasswordRefused if "passphrase for" in problem[0] else AuthError
            raise kind(problem[0], host=self.target, node_rank=self.node_rank, remedy=problem[1])
        try:
            self._link = _connect(route, self.host_keys, credentials, timeout)
        except HopFailed as failed:
            error = connect_error(failed, route, timeout, self.node_rank)
            if was_dropped(failed.error) and not failed.reached:
                raise Dropped(error) from failed.error
            raise error from failed.error
        except HostKeyError as error:
            raise HostKeyError(
                error.message, host=self.target, node_rank=self.node_rank, remedy=error.remedy
            ) from error

    def _let_go(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def _alive(self) -> bool:
        link = self._link
        return link is not None and link.is_alive

    def _ssh(self) -> paramiko.Transport:
        link = self._link
        if link is None or not link.is_alive:
            raise EOFError("it is down")
        return link.ssh

    def _begin(self, command: Command, deadline: float) -> Process:
        """Start a command; waits for its turn when the server allows fewer sessions than usual."""
        while True:
            try:
                session = self._ssh().open_session(timeout=min(STALL, max(0.1, deadline - time.monotonic())))
                return _ChannelProcess(session, command)
            except paramiko.ChannelException:
                if time.monotonic() + _AGAIN > deadline:
                    raise
                time.sleep(_AGAIN)

    def _begin_sftp(self) -> paramiko.SFTPClient:
        sftp = paramiko.SFTPClient.from_transport(self._ssh())
        assert sftp is not None
        channel = sftp.get_channel()
        assert channel is not None
        channel.settimeout(STALL)
        return sftp

    def _await_end(self) -> None:
        if self._link is not None:
            self._link.ssh.join(_END_WAIT)


# -- one connection --------------------------------------------------------


class _Link:
    """An open connection to one machine; ``close`` lets the jump host go as well, where there is one."""

    def __init__(self, connection: Connection, cleanup: ExitStack):
        self.connection, self.ssh = connection, connection.transport
        self.close = cleanup.close
        self._done = threading.Event()
        self._pinger = threading.Thread(target=self._ping, name="ssh-ping", daemon=True)
        self._pinger.start()
        cleanup.callback(self._stop)

    @property
    def is_alive(self) -> bool:
        return bool(self.ssh.is_active())

    def _ping(self) -> None:
        """Open and close a channel now and then, and end the connection when no answer comes: TCP alone notices only
        after many minutes that a host has vanished."""
        while not self._done.wait(_PING_EVERY) and self.is_alive:
            try:
                self.ssh.open_session(timeout=_PING_TIMEOUT).close()
            except paramiko.ChannelException:
                continue  # no session to spare, but an answer
            except CONNECTION_ERRORS:
                self.ssh.close()

    def _stop(self) -> None:
        self._done.set()
        self.ssh.close()  # ends a ping that waits for its answer
        self._pinger.join()


def _connect(route: Route, host_keys: str, credentials: Credentials, timeout: float) -> _Link:
    """Connect to the last host of the route and log in. Raises ``HopFailed``, ``HostKeyError``, ``NeedsOpenSsh``."""
    host, timeout = route[-1], max(timeout, route[-1].connect_timeout)
    check = HostKeyCheck(host, host_keys)
    if check.needs_certificate:
        raise NeedsOpenSsh("@cert-authority", host)
    options = {
        "auth_strategy": Login(host, credentials, lambda: check.doubt),
        "auth_timeout": timeout,
        "banner_timeout": 0.8 * timeout,  # shorter than the handshake's, so that it is the one that speaks
        "channel_timeout": timeout,
        "timeout": timeout,
        "transport_factory": lambda sock, **more: _transport(sock, check.key_types()),
    }
    with ExitStack() as cleanup:
        jump = cleanup.enter_context(_JUMP_HOSTS.shared(route[:-1], host_keys, timeout)) if len(route) > 1 else False
        # a config of its own: fabric's are not to be shared by threads; lazy: ssh_config.py reads ssh_config
        config = Config(lazy=True, overrides={"run": {"in_stream": False}})  # our stdin is for none of many hosts
        connection = Connection(host.host, host.user, host.port, config=config, gateway=jump, connect_kwargs=options)
        connection.client.set_missing_host_key_policy(check)
        cleanup.callback(_close, connection)
        try:
            with login_turn(route):
                if not jump:
                    connection.connect_kwargs["sock"] = cleanup.enter_context(_socket(route[-1], timeout))
                connection.open()
        except CONNECTION_ERRORS as error:
            ssh = connection.client.get_transport()
            reached = ssh is not None and ssh.is_active() and ssh.initial_kex_done
            raise HopFailed(host, error, reached) from error
        return _Link(connection, cleanup.pop_all())


def _transport(sock: socket.socket | paramiko.Channel, known_types: Sequence[str]) -> paramiko.Transport:
    """``known_types``: of host keys, which are asked for first."""
    ssh = paramiko.Transport(sock)
    options = ssh.get_security_options()
    options.ciphers = sorted(options.ciphers, key=lambda name: name not in _CIPHERS)
    usable = [name for name in known_types if name in options.key_types]
    options.key_types = [*usable, *(name for name in options.key_types if name not in usable)]
    return ssh


def _close(connection: Connection) -> None:
    ssh = connection.client.get_transport()
    connection.client.close()
    if ssh is not None and ssh.is_alive():
        ssh.join(_JOIN_TIMEOUT)  # paramiko leaves its thread to end by itself


@contextmanager
def _socket(host: SshHost, timeout: float) -> Iterator[socket.socket]:
    """A TCP connection, or the pipes of a ProxyCommand; paramiko's knows no shell, and dies of Ctrl-C."""
    if not host.proxy_command:
        source = (host.bind_address, 0) if host.bind_address else None
        name = host.host
        if host.family:
            name = str(socket.getaddrinfo(name, host.port, host.family, socket.SOCK_STREAM)[0][4][0])
        with socket.create_connection((name, host.port), timeout, source) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else each command waits 40 ms for an ACK
            yield sock
        return
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            process = subprocess.Popen(
                [os.environ.get("SHELL", "/bin/sh"), "-c", f"exec {host.proxy_command}"],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C on our terminal is not for it
            )
        try:
            yield ours
        finally:
            process.terminate()
            process.wait()


# -- jump hosts ------------------------------------------------------------


@dataclass
class _JumpHost:
    """The connection to one jump host, for all nodes behind it."""

    users: int = 0
    link: _Link | None = None
    failure: tuple[float, Exception] | None = None  #: when and why it could not be opened
    opening: threading.Lock = field(default_factory=threading.Lock)

    def connection(self, route: Route, host_keys: str, timeout: float) -> Connection:
        """Open it, anew when it broke. Those who waited for a try that failed share its outcome."""
        asked = time.monotonic()
        with self.opening:
            if self.link is None or not self.link.is_alive:
                if self.failure is not None and self.failure[0] >= asked:
                    raise self.failure[1]
                self.close()
                try:
                    self.link = _connect(route, host_keys, Credentials(), timeout)
                except Exception as error:
                    self.failure = time.monotonic(), error
                    raise
            return self.link.connection

    def close(self) -> None:
        link, self.link = self.link, None
        if link is not None:
            with suppress(*CONNECTION_ERRORS):
                link.close()


class _JumpHosts:
    """One connection to each jump host, however many nodes are behind it; opened by the first, closed by the last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hosts: dict[tuple[object, ...], _JumpHost] = {}

    @contextmanager
    def shared(self, route: Route, host_keys: str, timeout: float) -> Iterator[Connection]:
        """The open connection to the route's end. Raises as ``_connect`` does."""
        key = (host_keys, *route)
        with self._lock:
            jump = self._hosts.setdefault(key, _JumpHost())
            jump.users += 1
        try:
            yield jump.connection(route, host_keys, timeout)
        finally:
            with self._lock:
                jump.users -= 1
                if last := not jump.users:
                    del self._hosts[key]
            if last:
                jump.close()


_JUMP_HOSTS = _JumpHosts()

# -- one command -----------------------------------------------------------


class _News(threading.Event):
    """Set by both buffers of a channel. They also clear it when one runs empty, which
    would hide news of the other, so only the reader may."""

    def clear(self) -> None:
        pass

    def reset(self) -> None:
        super().clear()


class _ChannelProcess(Process):
    def __init__(self, channel: paramiko.Channel, command: Command):
        super().__init__()
        self.channel, self._news = channel, _News()
        channel.in_buffer.set_event(self._news)
        channel.in_stderr_buffer.set_event(self._news)
        channel.exec_command(with_pid(command))

    @property
    def status(self) -> int | None:
        return self.channel.exit_status if self.channel.exit_status_ready() else None

    def send(self, data: bytes) -> None:
        self.channel.sendall(data)

    def close_input(self) -> None:
        self.channel.shutdown_write()

    def read(self, seconds: float) -> bool:
        more = not (self.channel.eof_received or self.channel.closed)
        if more:
            self._news.wait(seconds)
            self._news.reset()
        while self.channel.recv_ready():
            self.stdout += self.channel.recv(READ_SIZE)
        while self.channel.recv_stderr_ready():
            self._add_stderr(self.channel.recv_stderr(READ_SIZE))
        return more

    def await_status(self, seconds: float | None) -> bool:
        return self.channel.status_event.wait(seconds)

    def close(self) -> None:
        self.channel.close()
        self.join_feeder()
