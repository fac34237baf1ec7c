"""Opening SSH connections hop by hop: sockets, key exchange, host key, login; jump hosts shared by all nodes."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import paramiko
from paramiko.ssh_exception import NoValidConnectionsError

from launcher.transport.hop import Hop
from launcher.transport.hostkeys import HostKeyCheck
from launcher.transport.login import Credentials, log_in

# paramiko's tracebacks would go to the terminal; what they say is in our errors
logging.getLogger("paramiko").addHandler(logging.NullHandler())

# authenticated ciphers first: 145 against 75 MB/s up on loopback, as no separate MAC is computed in Python
_CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com")

_AT_ONCE = 8  # logins begun at one address at a time; sshd's default MaxStartups drops some from the tenth on

_PING_EVERY = 15.0

_PING_TIMEOUT = 45.0

_JOIN_TIMEOUT = 5.0

_Proxy = subprocess.Popen[bytes]  # of a ProxyCommand

LINE_ERRORS = (paramiko.SSHException, EOFError, OSError)


class HopFailed(Exception):
    """``error`` came up while ``hop`` was connected to; ``line`` as far as it had got."""

    def __init__(self, hop: Hop, error: Exception, reached: bool):
        self.hop, self.error, self.reached = hop, error, reached
        super().__init__(str(error))


class NeedsOpenSsh(Exception):
    """Only OpenSSH's client can check this host."""


@dataclass(frozen=True)
class Route:
    """How to get to the last of ``hops``."""

    hops: tuple[Hop, ...]
    host_keys: str  #: the config's
    credentials: Credentials  #: for the last hop; jump hosts are entered as ssh_config says
    timeout: float  #: seconds for each step

    @property
    def last(self) -> Hop:
        return self.hops[-1]

    def to_jump_host(self) -> Route:
        """The way to the hop before the last."""
        return Route(self.hops[:-1], self.host_keys, Credentials(), self.timeout)


class Line:
    """An SSH connection to one machine, on a socket or through the line of a jump host."""

    def __init__(self, hop: Hop, ssh: paramiko.Transport, base: SharedLine | None, process: _Proxy | None):
        self.hop, self.ssh, self._base, self._process = hop, ssh, base, process
        self._pinger = _Pinger(ssh)

    @property
    def is_alive(self) -> bool:
        return self.ssh.is_active()

    def close(self) -> None:
        """Close it, and let the jump host's go, which closes with the last line through it."""
        self._pinger.stop()
        _close(self.ssh, self._process)
        if self._base is not None:
            self._base.give_back()


def open_line(route: Route) -> Line:
    """Connect and log in. Raises ``HopFailed``, ``HostKeyError``, ``NeedsOpenSsh``."""
    base = JUMP_HOSTS.borrow(route.to_jump_host()) if len(route.hops) > 1 else None
    try:
        return _open(route, base)
    except BaseException:
        if base is not None:
            base.give_back()
        raise


def _open(route: Route, base: SharedLine | None) -> Line:
    hop, process, ssh = route.last, None, None
    timeout = max(route.timeout, hop.connect_timeout)
    check = HostKeyCheck(hop, route.host_keys)
    if check.needs_certificate:
        raise NeedsOpenSsh(f"@cert-authority for {check.name}")
    try:
        with turn_at(hop, base.hop.target if base else ""):
            sock, process = _socket(hop, base, timeout)
            ssh = _transport(sock, check.key_types(), timeout)
            ssh.start_client(timeout=timeout)
            check.check(ssh.get_remote_server_key())
            log_in(ssh, hop, route.credentials)
        return Line(hop, ssh, base, process)
    except LINE_ERRORS as error:
        reached = ssh is not None and ssh.is_active() and ssh.initial_kex_done
        _close(ssh, process)
        raise HopFailed(hop, error, reached) from error
    except BaseException:
        _close(ssh, process)
        raise


def _close(ssh: paramiko.Transport | None, process: _Proxy | None) -> None:
    if ssh is not None:
        ssh.close()
        if ssh.is_alive():
            ssh.join(_JOIN_TIMEOUT)  # paramiko leaves its thread to end by itself
    if process is not None:
        process.terminate()
        process.wait()


# -- the bytes below -------------------------------------------------------


def _socket(
    hop: Hop, base: SharedLine | None, timeout: float
) -> tuple[socket.socket | paramiko.Channel, _Proxy | None]:
    if base is not None:
        return base.channel_to(hop, timeout), None
    if hop.proxy_command:
        return _piped(hop.proxy_command)
    return _connected(hop, timeout), None


def _connected(hop: Hop, timeout: float) -> socket.socket:
    """A TCP connection to the first address that answers."""
    errors: dict[tuple[str, int] | tuple[str, int, int, int], Exception] = {}
    for family, kind, protocol, _, address in socket.getaddrinfo(hop.host, hop.port, hop.family, socket.SOCK_STREAM):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(timeout)
            if hop.bind_address:
                sock.bind((hop.bind_address, 0))
            sock.connect(address)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else each command waits 40 ms for an ACK
            return sock
        except OSError as error:
            sock.close()
            errors[str(address[0]), hop.port] = error
    if all(isinstance(error, TimeoutError) for error in errors.values()):
        raise TimeoutError
    raise NoValidConnectionsError(errors)


def _piped(command: str) -> tuple[socket.socket, _Proxy]:
    """A socket whose other end is the stdin and stdout of a ProxyCommand."""
    ours, theirs = socket.socketpair()
    with theirs:
        shell = os.environ.get("SHELL", "/bin/sh")
        process = subprocess.Popen(
            [shell, "-c", f"exec {command}"],
            stdin=theirs.fileno(),
            stdout=theirs.fileno(),
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C on our terminal is not for it
        )
    return ours, process


def _transport(sock: socket.socket | paramiko.Channel, known_types: list[str], timeout: float) -> paramiko.Transport:
    ssh = paramiko.Transport(sock)
    # the banner's is shorter than the handshake's, so that it is the one that speaks
    ssh.banner_timeout, ssh.auth_timeout, ssh.channel_timeout = 0.8 * timeout, timeout, timeout
    options = ssh.get_security_options()
    options.ciphers = sorted(options.ciphers, key=lambda name: name not in _CIPHERS)
    usable = [name for name in known_types if name in options.key_types]
    options.key_types = [*usable, *(name for name in options.key_types if name not in usable)]
    return ssh


_turns_lock = threading.Lock()

_turns: dict[str, threading.BoundedSemaphore] = {}


@contextmanager
def turn_at(hop: Hop, through: str = "") -> Iterator[None]:
    """Wait until few enough others are logging in at the same place; ``through``: the jump host."""
    place = hop.proxy_command.replace(hop.host, "") or f"{through} {hop.host}:{hop.port}"
    with _turns_lock:
        turn = _turns.setdefault(place, threading.BoundedSemaphore(_AT_ONCE))
    with turn:
        yield


# -- jump hosts ------------------------------------------------------------


@dataclass
class SharedLine:
    """The line to one jump host, for all who go through it; opened by the first, closed with the last."""

    pool: JumpHosts
    key: tuple[object, ...]
    hop: Hop
    users: int = 0
    line: Line | None = None
    failure: tuple[float, Exception] | None = None  #: when and why it could not be opened
    opening: threading.Lock = field(default_factory=threading.Lock)

    def ensure(self, route: Route) -> None:
        """Open it, anew when it broke. Those who waited for a try that failed share its outcome."""
        asked = time.monotonic()
        with self.opening:
            if self.line is not None and self.line.is_alive:
                return
            if self.failure is not None and self.failure[0] >= asked:
                raise self.failure[1]
            self.drop()
            try:
                self.line = open_line(route)
            except Exception as error:
                self.failure = time.monotonic(), error
                raise

    def channel_to(self, hop: Hop, timeout: float) -> paramiko.Channel:
        if self.line is None:
            raise EOFError("the jump host's line is down")
        return self.line.ssh.open_channel("direct-tcpip", (hop.host, hop.port), ("127.0.0.1", 0), timeout=timeout)

    def drop(self) -> None:
        line, self.line = self.line, None
        if line is not None:
            line.close()

    def give_back(self) -> None:
        self.pool.give_back(self)


class JumpHosts:
    """One line to each jump host, however many nodes are behind it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lines: dict[tuple[object, ...], SharedLine] = {}

    def borrow(self, route: Route) -> SharedLine:
        """The open line to the route's end; ``give_back`` must follow. Raises as ``open_line`` does."""
        key = (route.host_keys, *route.hops)
        with self._lock:
            shared = self._lines.setdefault(key, SharedLine(self, key, route.last))
            shared.users += 1
        try:
            shared.ensure(route)
        except BaseException:
            shared.give_back()
            raise
        return shared

    def give_back(self, shared: SharedLine) -> None:
        with self._lock:
            shared.users -= 1
            if shared.users:
                return
            self._lines.pop(shared.key, None)
        with suppress(*LINE_ERRORS):
            shared.drop()


JUMP_HOSTS = JumpHosts()


class _Pinger:
    """Notices that a host has vanished, which TCP alone tells after many minutes: opens and
    closes a channel now and then, and ends the line when no answer comes."""

    def __init__(self, line: paramiko.Transport):
        self._line, self._done = line, threading.Event()
        self._thread = threading.Thread(target=self._run, name="ssh-ping", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._done.wait(_PING_EVERY) and self._line.is_active():
            try:
                self._line.open_session(timeout=_PING_TIMEOUT).close()
            except paramiko.ChannelException:
                continue  # no session to spare, but an answer
            except LINE_ERRORS:
                self._line.close()

    def stop(self) -> None:
        self._done.set()
        self._line.close()  # ends a ping that waits for its answer
        self._thread.join()
