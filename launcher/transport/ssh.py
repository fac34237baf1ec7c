"""SSH connections with paramiko and fabric: one fabric ``Connection`` per node and one per jump host."""

from __future__ import annotations

import logging
import os
import signal
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
from launcher.errors import HostKeyError, UnreachableError
from launcher.transport.auth import Credentials, SshLogin, key_problem
from launcher.transport.errors import CONNECTION_ERRORS, HopFailed, connect_error, was_dropped
from launcher.transport.host_keys import HostKeyCheck
from launcher.transport.process import READ_SIZE, STALL, Process, with_pid
from launcher.transport.remote import Dropped, RemoteTransport, login_turn
from launcher.transport.ssh_config import Route, SshHost

# keeps paramiko's tracebacks off the terminal; TransportErrors have the same information
logging.getLogger("paramiko").addHandler(logging.NullHandler())

# authenticated ciphers are preferred: uploads reach 145 MB/s instead of 75 on loopback, without a MAC in Python
_CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com")

_PING_EVERY = 15.0  # seconds

_PING_TIMEOUT = 45.0  # seconds

_JOIN_TIMEOUT = 5.0  # seconds

_END_WAIT = 1.0  # seconds

_RETRY_INTERVAL = 0.2  # seconds between requests for a session

_SFTP_WAIT = 15.0  # seconds; a busy sshd counts a session for a while after it has ended

_REFUSED = "Unable to open channel."  # paramiko's text if another thread got the error of the refusal

_RESOURCE_SHORTAGE = 4  # SSH_OPEN_RESOURCE_SHORTAGE of RFC 4254


class NeedsOpenSsh(UnreachableError):
    """ssh_config or known_hosts use a keyword that paramiko does not support."""

    def __init__(self, keyword: str, host: SshHost):
        super().__init__(f"only the OpenSSH client supports {keyword}", host=host.target)


class SshTransport(RemoteTransport):
    """A connection to one node by paramiko. ``connect`` may also raise NeedsOpenSsh."""

    def __init__(self, node: NodeConfig, host_keys: HostKeys, credentials: Credentials, node_rank: int | None = None):
        super().__init__(node, host_keys, credentials, node_rank)
        self._link: _Link | None = None

    @property
    def connection(self) -> Connection | None:
        """The open fabric connection; None before ``connect``."""
        return self._link.connection if self._link is not None else None

    def _open(self, route: Route, timeout: float) -> None:
        for host in route:
            if host.only_openssh:
                raise NeedsOpenSsh(host.only_openssh, host)
        credentials = self.credentials
        if credentials.key and (problem := key_problem(credentials.key, credentials.passphrase, route[-1].agent)):
            kind, what, remedy = problem
            raise kind(what, host=self.target, node_rank=self.node_rank, remedy=remedy)
        try:
            self._link = _connect(route, self.host_keys, credentials, timeout)
        except HopFailed as failed:
            error = connect_error(failed, route, timeout, self.node_rank)
            if was_dropped(failed.error) and not failed.reached:
                raise Dropped(error) from failed.error
            raise error from failed.error
        except HostKeyError as error:
            raise HostKeyError(
                error.message, host=self.target, node_rank=self.node_rank, remedy=error.remedy, code=error.code
            ) from error

    def _disconnect(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def _alive(self) -> bool:
        link = self._link
        return link is not None and link.is_alive

    def _begin(self, command: Command, deadline: float) -> Process:
        # While the server refuses another session (``MaxSessions``), retries until ``deadline``.
        return _ChannelProcess(self._open_session(deadline), command)

    def _hold_session(self, deadline: float) -> paramiko.Channel:
        return self._open_session(deadline)  # without a command, which would start a shell on the host

    def _begin_sftp(self) -> paramiko.SFTPClient:
        session = self._open_session(time.monotonic() + _SFTP_WAIT)
        session.invoke_subsystem("sftp")
        session.settimeout(STALL)
        return paramiko.SFTPClient(session)

    def _open_session(self, deadline: float) -> paramiko.Channel:
        while True:
            try:
                link = self._link
                if link is None or not link.is_alive:
                    raise EOFError("SSH connection closed")
                return open_session(link.ssh, min(STALL, max(0.1, deadline - time.monotonic())))
            except paramiko.ChannelException:
                if time.monotonic() + _RETRY_INTERVAL > deadline:
                    raise
                time.sleep(_RETRY_INTERVAL)

    def _await_end(self) -> None:
        if self._link is not None:
            self._link.ssh.join(_END_WAIT)


def open_session(ssh: paramiko.Transport, timeout: float) -> paramiko.Channel:
    """Open a session. Raises ChannelException if the host refuses it, as sshd does beyond ``MaxSessions``."""
    try:
        return ssh.open_session(timeout=timeout)
    except paramiko.SSHException as error:
        # paramiko keeps one error per connection: of two sessions that are refused at once, only one gets it
        if str(error) == _REFUSED and ssh.is_active():
            raise paramiko.ChannelException(_RESOURCE_SHORTAGE, _REFUSED) from error
        raise


# -- one connection --------------------------------------------------------


class _Link:
    """An open SSH connection to one machine, with a ping thread. ``close`` also releases the jump host, if any."""

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
        # TCP alone takes many minutes to detect that a host is gone.
        while not self._done.wait(_PING_EVERY) and self.is_alive:
            try:
                open_session(self.ssh, _PING_TIMEOUT).close()
            except paramiko.ChannelException:
                continue  # the host refused a session, so it is alive
            except Exception:  # after any error, as without this thread nobody would notice that the host is gone
                _close_transport(self.ssh)

    def _stop(self) -> None:
        self._done.set()
        _close_transport(self.ssh)  # ends a ping that is waiting for its answer
        self._pinger.join()


def _connect(route: Route, host_keys: str, credentials: Credentials, timeout: float) -> _Link:
    """Connect to the last host of the route and log in. Raises HopFailed, HostKeyError, NeedsOpenSsh."""
    host, timeout = route[-1], max(timeout, route[-1].connect_timeout)
    check = HostKeyCheck(host, host_keys)
    if check.needs_certificate:
        raise NeedsOpenSsh("@cert-authority", host)
    options = {
        "auth_strategy": SshLogin(host, credentials, lambda: check.distrust),
        "auth_timeout": timeout,
        "banner_timeout": 0.8 * timeout,  # below the handshake's timeout, to report a missing banner
        "channel_timeout": timeout,
        "timeout": timeout,
        "transport_factory": lambda sock, **more: _transport(sock, check.key_types()),
    }
    with ExitStack() as cleanup:
        jump = cleanup.enter_context(_JUMP_HOSTS.shared(route[:-1], host_keys, timeout)) if len(route) > 1 else False
        # one Config per connection, as threads must not share one; lazy: fabric does not read ssh_config itself;
        # in_stream: commands do not read the launcher's stdin
        config = Config(lazy=True, overrides={"run": {"in_stream": False}})
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
    ssh = paramiko.Transport(sock)
    options = ssh.get_security_options()
    options.ciphers = sorted(options.ciphers, key=lambda name: name not in _CIPHERS)
    usable = [name for name in known_types if name in options.key_types]
    options.key_types = [*usable, *(name for name in options.key_types if name not in usable)]
    return ssh


def _close(connection: Connection) -> None:
    ssh = connection.client.get_transport()
    if ssh is not None:
        _close_transport(ssh)
    connection.client.close()
    if ssh is not None and ssh.is_alive():
        ssh.join(_JOIN_TIMEOUT)  # paramiko's close does not wait for its thread


def _close_transport(ssh: paramiko.Transport) -> None:
    with suppress(*CONNECTION_ERRORS):  # the connection to the jump host, which carries this one, may be broken
        ssh.close()


@contextmanager
def _socket(host: SshHost, timeout: float) -> Iterator[socket.socket]:
    """Yield a TCP connection to the host, or a socket to its ProxyCommand.

    The command runs in the user's shell, and Ctrl-C does not end it. Neither is true of paramiko's ``ProxyCommand``.
    """
    if not host.proxy_command:
        source = (host.bind_address, 0) if host.bind_address else None
        name = host.host
        try:
            if host.family:
                name = str(socket.getaddrinfo(name, host.port, host.family, socket.SOCK_STREAM)[0][4][0])
            connected = socket.create_connection((name, host.port), timeout, source)
        except UnicodeError:  # ``a..b`` is no name of a host
            raise socket.gaierror(socket.EAI_NONAME, "no host has such a name") from None
        with connected as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # saves 40 ms (delayed ACK) per command
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
                start_new_session=True,  # Ctrl-C on the launcher's terminal must not end it
            )
        try:
            yield ours
        finally:
            process.terminate()
            try:
                process.wait(_END_WAIT)
            except subprocess.TimeoutExpired:  # as a script that has trapped the signal
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


# -- jump hosts ------------------------------------------------------------


@dataclass
class _JumpHost:
    """The connection to one jump host, shared by all nodes behind it."""

    users: int = 0  #: number of open or opening connections through it
    link: _Link | None = None
    failure: tuple[float, Exception] | None = None  #: monotonic time and error of the last failed attempt
    opening: threading.Lock = field(default_factory=threading.Lock)

    def connection(self, route: Route, host_keys: str, timeout: float) -> Connection:
        """Return the open connection to the jump host; open it first if necessary.

        If opening fails, all callers that wait at that time get the same error.
        """
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
            link.close()


class _JumpHosts:
    """One connection per jump host, shared by the nodes behind it. The first node opens it, the last one closes it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hosts: dict[tuple[object, ...], _JumpHost] = {}

    @contextmanager
    def shared(self, route: Route, host_keys: str, timeout: float) -> Iterator[Connection]:
        """Yield the open connection to the last host of ``route``, a jump host. Raises as ``_connect`` does."""
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


class _DataArrived(threading.Event):
    """Set when data arrives on stdout or stderr of a channel. Only ``reset`` clears it.

    ``clear`` does nothing: paramiko calls it as soon as one of the two buffers is empty, even if the other has data.
    """

    def clear(self) -> None:
        pass

    def reset(self) -> None:
        super().clear()


class _ChannelProcess(Process):
    def __init__(self, channel: paramiko.Channel, command: Command):
        super().__init__()
        self.channel, self._data_arrived = channel, _DataArrived()
        channel.in_buffer.set_event(self._data_arrived)
        channel.in_stderr_buffer.set_event(self._data_arrived)
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
            self._data_arrived.wait(seconds)
            self._data_arrived.reset()
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
