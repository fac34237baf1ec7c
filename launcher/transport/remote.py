"""Base of both SSH transports: connects with retries; commands and file transfers share one SSH connection."""

from __future__ import annotations

import math
import random
import threading
import time
import uuid
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import paramiko

from launcher.command import Command
from launcher.config.schema import HostKeys, NodeConfig
from launcher.errors import RemoteFileError, TransportError
from launcher.files import atomic_file
from launcher.transport.auth import Credentials
from launcher.transport.base import OnBytes
from launcher.transport.errors import CONNECTION_ERRORS, session_error
from launcher.transport.process import STALL, Process, ProcessTransport
from launcher.transport.ssh_config import Route, find_route

_ATTEMPTS = 6  # attempts if the host closes the connection before login

_PROXY_ATTEMPTS = 3  # fewer with a ProxyCommand, whose end may have other reasons

_LOGINS_AT_ONCE = 8  # logins in parallel at one address; sshd's default MaxStartups refuses some from the tenth on

# sshd allows ten sessions per connection (MaxSessions): six commands, one that kills another, two SFTP, one ping
_COMMAND_SLOTS = 6

_SFTP_SLOTS = 2

_SESSIONS = 4  # sessions that a launch needs at once: it follows the node, transfers files and runs a command

_SESSIONS_WAIT = 10.0  # seconds until a refusal of a session counts

_KILL_TIMEOUT = 5.0  # seconds

# Sends SIGTERM to the process group (or to the process if it leads none) and SIGKILL a second later. Needs bash, as
# dash does not support `kill --`.
_KILL = (
    'kill -TERM -- "-$0" 2>/dev/null || kill -TERM "$0"; '
    'for i in 1 2 3 4 5 6 7 8 9 10; do sleep 0.1; kill -0 -- "-$0" || exit 0; done 2>/dev/null; kill -KILL -- "-$0"'
)

_CHUNK = 32768  # bytes; the largest SFTP packet that every server accepts

_READ_AHEAD = 1 << 23  # bytes per prefetch; paramiko's own limit sleeps between requests


class Dropped(Exception):
    """The host closed the connection before login, as a busy sshd does; ``error`` is raised if retries fail."""

    def __init__(self, error: TransportError):
        super().__init__(str(error))
        self.error = error


class RemoteTransport(ProcessTransport):
    """A connection to one node by SSH. After ConnectionLost, ``connect`` opens it again."""

    def __init__(self, node: NodeConfig, host_keys: HostKeys, credentials: Credentials, node_rank: int | None = None):
        self.node, self.host_keys, self.credentials = node, host_keys, credentials
        self.target, self.node_rank = node.login, node_rank
        self._opening = threading.Lock()
        self._command_slots = threading.BoundedSemaphore(_COMMAND_SLOTS)
        self._sftp_slots = threading.BoundedSemaphore(_SFTP_SLOTS)
        self._sftp_idle: list[paramiko.SFTPClient] = []

    @abstractmethod
    def _open(self, route: Route, timeout: float) -> None:
        """Connect and log in. Raises Dropped if the caller should try again, else TransportError."""

    @abstractmethod
    def _alive(self) -> bool: ...

    @abstractmethod
    def _begin_sftp(self) -> paramiko.SFTPClient: ...

    @abstractmethod
    def _await_end(self) -> None:
        """Wait up to one second for ``_alive`` to become False.

        Called after a failed write, which may be the first sign of a lost connection.
        """

    @abstractmethod
    def _disconnect(self) -> None: ...

    def connect(self, timeout: float) -> None:
        """Open the connection. Retries if the host drops it before login, but not after a refused login."""
        with self._opening:
            if self._alive():
                return
            self._close()
            route = find_route(self.node.host, self.node.user, self.node.port, self.node_rank)
            self.target = route[-1].target
            deadline = time.monotonic() + timeout
            attempts = _PROXY_ATTEMPTS if any(host.proxy_command for host in route) else _ATTEMPTS
            for attempt in range(1, attempts + 1):
                try:
                    return self._open(route, timeout)
                except Dropped as dropped:
                    if attempt == attempts or time.monotonic() > deadline:
                        raise dropped.error from dropped.__cause__
                time.sleep(random.uniform(0.05, 0.15) * 2**attempt)

    def close(self) -> None:
        with self._opening:
            self._close()

    def _close(self) -> None:
        self._disconnect()
        for sftp in self._sftp_idle:
            sftp.close()
        self._sftp_idle.clear()

    # -- commands ----------------------------------------------------------

    def check_sessions(self) -> None:
        """Raise TransportError unless the host allows ``_SESSIONS`` sessions at once, of which the caller has one."""
        deadline = time.monotonic() + _SESSIONS_WAIT
        with self.translated(), ExitStack() as opened:
            for _ in range(_SESSIONS - 1):
                opened.callback(self._hold_session(deadline).close)

    def _hold_session(self, deadline: float) -> Process | paramiko.Channel:
        return self._begin(Command(("cat",)), deadline)

    @contextmanager
    def _started(self, command: Command, deadline: float) -> Iterator[Process]:
        wait = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
        if not self._command_slots.acquire(timeout=wait):
            raise self._timed_out(command, wait or 0.0)
        try:
            with self.translated(), super()._started(command, deadline) as process:
                yield process
        finally:
            self._command_slots.release()

    def _kill(self, process: Process) -> None:
        deadline = time.monotonic() + _KILL_TIMEOUT
        if process.status is not None or not self._alive() or not process.await_pid(deadline):
            return
        killer = self._begin(Command(("bash", "-c", _KILL, str(process.pid))), deadline)
        try:
            killer.finish(deadline)
        finally:
            killer.close()

    def status_of(self, process: Process) -> int:
        if process.status in (None, -1) and not self._alive():
            raise EOFError("SSH connection closed")
        return super().status_of(process)

    @contextmanager
    def translated(self) -> Iterator[None]:
        try:
            yield
        except CONNECTION_ERRORS as error:
            if isinstance(error, OSError) and self._alive():
                raise  # the caller's own callback raised it; the connection works
            if isinstance(error, EOFError):
                self._await_end()
            raise session_error(error, self._alive(), self.target, self.node_rank) from error

    # -- files -------------------------------------------------------------

    def upload(self, source: Path, dest: str, *, offset: int = 0, on_bytes: OnBytes | None = None) -> None:
        path = _relative_to_home(dest)
        with source.open("rb") as src, self._sftp("write", dest) as sftp:
            with _open_for_writing(sftp, path, "r+" if offset else "w") as out:
                src.seek(offset)
                out.seek(offset)
                out.set_pipelined(True)
                while data := src.read(_CHUNK):
                    out.write(data)
                    if on_bytes:
                        on_bytes(len(data))
            if (sftp.stat(path).st_size or 0) < src.tell():
                raise OSError(None, "the file is shorter than the data sent; check whether the disk is full")

    def write(self, data: bytes, dest: str, *, mode: int = 0o644) -> None:
        path = _relative_to_home(dest)
        folder, slash, name = path.rpartition("/")
        temporary = f"{folder}{slash}.{name}.{uuid.uuid4().hex[:8]}"
        with self._sftp("write", dest) as sftp:
            try:
                with _open_for_writing(sftp, temporary, "wx") as out:
                    out.chmod(mode)  # before the content, so that a secret is never readable by others
                    out.write(data)
                sftp.posix_rename(temporary, path)
            except OSError:
                with suppress(OSError):  # cleanup only; the first error is raised
                    sftp.remove(temporary)
                raise

    def download(self, source: str, dest: Path, *, most: int | None = None, on_bytes: OnBytes | None = None) -> None:
        with atomic_file(dest) as out:
            for data in self._read(source, most):
                out.write(data)
                if on_bytes:
                    on_bytes(len(data))

    def _read(self, source: str, most: int | None) -> Iterator[bytes]:
        with self._sftp("read", source) as sftp, sftp.open(_relative_to_home(source), "rb") as src:
            size = src.stat().st_size or 0
            size = size if most is None else min(size, most)
            for start in range(0, size, _READ_AHEAD):
                end = min(start + _READ_AHEAD, size)
                yield from src.readv([(at, min(_CHUNK, end - at)) for at in range(start, end, _CHUNK)])

    @contextmanager
    def _sftp(self, verb: str, path: str) -> Iterator[paramiko.SFTPClient]:
        """Yield an SFTP session for the caller's exclusive use; idle sessions are reused."""
        with self._sftp_slots, self.translated():
            if not self._alive():
                raise EOFError("SSH connection closed")
            sftp = self._sftp_idle.pop() if self._sftp_idle else self._begin_sftp()
            try:
                yield sftp
            except OSError as error:
                if not self._alive():
                    raise
                if isinstance(error, TimeoutError):
                    sftp.close()
                    raise EOFError(f"no progress for {STALL:g} s") from error
                self._sftp_idle.append(sftp)
                why = error.strerror or str(error)
                if why == "Failure":
                    why = "the host reports only `Failure`; check whether the disk is full"
                message = f"cannot {verb} {path}: {why}"
                raise RemoteFileError(message, errno=error.errno, host=self.target, node_rank=self.node_rank) from error
            except BaseException:
                sftp.close()
                raise
            self._sftp_idle.append(sftp)


# -- limits of parallel logins ---------------------------------------------

_turns_lock = threading.Lock()

_turns: dict[str, threading.BoundedSemaphore] = {}


@contextmanager
def login_turn(route: Route) -> Iterator[None]:
    """Wait until fewer than ``_LOGINS_AT_ONCE`` other logins use the address or ProxyCommand of ``route``."""
    last, through = route[-1], route[-2].target if len(route) > 1 else ""
    place = last.proxy_command.replace(last.host, "") or f"{through} {last.host}:{last.port}"
    with _turns_lock:
        turn = _turns.setdefault(place, threading.BoundedSemaphore(_LOGINS_AT_ONCE))
    with turn:
        yield


# -- SFTP ------------------------------------------------------------------


def _open_for_writing(sftp: paramiko.SFTPClient, path: str, mode: str) -> paramiko.SFTPFile:
    try:
        return sftp.open(path, mode)
    except FileNotFoundError:
        if mode == "r+":
            raise
        _make_folder(sftp, path.rpartition("/")[0])
        return sftp.open(path, mode)


def _make_folder(sftp: paramiko.SFTPClient, folder: str) -> None:
    if not folder:
        return
    try:
        sftp.stat(folder)
    except FileNotFoundError:
        _make_folder(sftp, folder.rpartition("/")[0])
        try:
            sftp.mkdir(folder)
        except OSError:
            sftp.stat(folder)  # another thread may have created it


def _relative_to_home(path: str) -> str:
    # SFTP starts in the home folder and does not expand ``~``.
    return "." if path == "~" else path.removeprefix("~/")
