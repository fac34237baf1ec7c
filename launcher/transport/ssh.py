"""Nodes behind SSH: one connection each, for commands and files alike."""

from __future__ import annotations

import math
import random
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import paramiko
from fabric import Connection

from launcher.config import HostKeys, NodeConfig
from launcher.errors import CommandTimeout, RemoteFileError, TransportError
from launcher.script import Command, Secret
from launcher.transport.base import Completed, OnBytes, OnLine, Talk, Transport
from launcher.transport.channel import RemoteCommand, ignore
from launcher.transport.lines import LineSplitter
from launcher.transport.sshconfig import connection_target, hops, make_connection
from launcher.transport.ssherrors import LINE_ERRORS, connect_error, line_error, was_dropped
from launcher.transport.talks import ChannelTalk
from launcher.wholefile import appearing

# sshd allows ten sessions on a connection (MaxSessions): six commands, one that ends another, two SFTP, one ping
_COMMAND_SLOTS = 6
_SFTP_SLOTS = 2
_ATTEMPTS = 6  # of a connection that is dropped before login
_PING_EVERY = 15.0
_PING_TIMEOUT = 45.0
_STALL = 60.0  # seconds without progress after which a transfer is given up
_STOP_TIMEOUT = 5.0
_END_WAIT = 1.0
# bash, as dash knows no `kill --`. SIGTERM to the group (where the login shell led none: the process),
# SIGKILL a second later
_KILL = (
    'kill -TERM -- "-$0" 2>/dev/null || kill -TERM "$0"; '
    'for i in 1 2 3 4 5 6 7 8 9 10; do sleep 0.1; kill -0 -- "-$0" || exit 0; done 2>/dev/null; kill -KILL -- "-$0"'
)
_CHUNK = 32768  # the largest SFTP packet every server takes
_READ_AHEAD = 1 << 23  # bytes asked for at a time; paramiko's own limit on a prefetch sleeps between requests


class SshTransport(Transport):
    """A node behind SSH. ``connect`` opens the line again after ``ConnectionLost``."""

    def __init__(self, node: NodeConfig, host_keys: HostKeys, password: Secret | None, node_rank: int | None = None):
        self.node, self.host_keys, self.password, self.node_rank = node, host_keys, password, node_rank
        self.target = node.login
        self._opening = threading.Lock()
        self._connection: Connection | None = None
        self._pinger: _Pinger | None = None
        self._command_slots = threading.BoundedSemaphore(_COMMAND_SLOTS)
        self._sftp_slots = threading.BoundedSemaphore(_SFTP_SLOTS)
        self._sftp_idle: list[paramiko.SFTPClient] = []

    def connect(self, timeout: float) -> None:
        """Open the line, anew when it broke. A line dropped before login is tried again, a wrong key is not."""
        with self._opening:
            if self._alive():
                return
            self._let_go()
            deadline = time.monotonic() + timeout
            for attempt in range(_ATTEMPTS):
                if self._open(timeout, deadline if attempt < _ATTEMPTS - 1 else 0.0):
                    return
                time.sleep(random.uniform(0.1, 0.3) * 2**attempt)

    def _open(self, timeout: float, deadline: float) -> bool:
        """One try; False when the host hung up before login and there is time for another."""
        connection = make_connection(
            self.node, self.host_keys, self.password, node_rank=self.node_rank, timeout=timeout
        )
        self.target = connection_target(connection)
        try:
            connection.open()
        except LINE_ERRORS as error:
            described = connect_error(error, connection, timeout, self.node_rank)
            _close_hops(connection)
            if was_dropped(error) and time.monotonic() < deadline:
                return False
            raise described from error
        except BaseException:
            _close_hops(connection)
            raise
        self._connection = connection
        self._pinger = _Pinger(connection.transport)
        return True

    def run(self, command: Command, *, stdin: bytes = b"", timeout: float) -> Completed:
        deadline = time.monotonic() + timeout
        stdout, stderr = bytearray(), bytearray()
        with self._command(command, deadline) as remote:
            remote.feed(stdin)
            if not remote.read(stdout.extend, stderr.extend, deadline):
                self._kill(remote)
                raise self._timed_out(command, timeout)
            return Completed(self._status(remote), bytes(stdout), bytes(stderr))

    def stream(self, command: Command, on_line: OnLine, stop: threading.Event) -> int:
        lines = LineSplitter(on_line)
        with self._command(command, math.inf) as remote:
            try:
                ended = remote.read(lines.feed, ignore, math.inf, stop)
            except BaseException:
                self._kill(remote)
                raise
            lines.finish()
            if not ended:
                self._kill(remote)
            return self._status(remote) if ended else -1

    def talk(self, command: Command) -> Talk:
        with ExitStack() as stack:
            remote = stack.enter_context(self._command(command, time.monotonic() + _STALL))
            stack.callback(self._kill, remote)
            end, where = stack.pop_all().close, (command.argv[0], self.target, self.node_rank)
        return ChannelTalk(remote, self._line_errors, self._status, end, *where)

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
                raise OSError(None, "it is shorter than what was sent; is the disk full?")

    def write(self, data: bytes, dest: str, *, mode: int = 0o644) -> None:
        path = _relative_to_home(dest)
        folder, _, name = path.rpartition("/")
        beside = f"{folder}/" * bool(folder) + f".{name}.{uuid.uuid4().hex[:8]}"
        with self._sftp("write", dest) as sftp:
            try:
                with _open_for_writing(sftp, beside, "wx") as out:
                    out.chmod(mode)  # before the content, so that a secret is never readable by others
                    out.write(data)
                sftp.posix_rename(beside, path)
            except OSError:
                with suppress(OSError):  # the first error says why; this one only tidies up
                    sftp.remove(beside)
                raise

    def download(self, source: str, dest: Path, *, on_bytes: OnBytes | None = None) -> None:
        with appearing(dest) as out:
            for data in self._read(source):
                out.write(data)
                if on_bytes:
                    on_bytes(len(data))

    def _read(self, source: str) -> Iterator[bytes]:
        with self._sftp("read", source) as sftp, sftp.open(_relative_to_home(source), "rb") as src:
            size = src.stat().st_size or 0
            for start in range(0, size, _READ_AHEAD):
                end = min(start + _READ_AHEAD, size)
                yield from src.readv([(at, min(_CHUNK, end - at)) for at in range(start, end, _CHUNK)])

    def close(self) -> None:
        with self._opening:
            self._let_go()

    def _let_go(self) -> None:
        if self._pinger is not None:
            self._pinger.stop()
        if self._connection is not None:
            _close_hops(self._connection)
        self._connection, self._pinger = None, None
        self._sftp_idle.clear()

    def _alive(self) -> bool:
        connection = self._connection
        return connection is not None and connection.is_connected

    def _line(self) -> paramiko.Transport:
        connection = self._connection
        if connection is None or not connection.is_connected:
            raise EOFError("the line is down")
        line: paramiko.Transport = connection.transport
        return line

    @contextmanager
    def _command(self, command: Command, deadline: float) -> Iterator[RemoteCommand]:
        """A started command, closed at the end of the block; errors of the line become ours."""
        wait = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
        if not self._command_slots.acquire(timeout=wait):
            raise self._timed_out(command, wait or 0.0)
        try:
            with self._line_errors():
                remote = RemoteCommand(self._session(deadline), command)
                try:
                    yield remote
                finally:
                    remote.close()
        finally:
            self._command_slots.release()

    def _kill(self, remote: RemoteCommand) -> None:
        """End a running command; nothing to do where the line is gone or it has ended."""
        deadline = time.monotonic() + _STOP_TIMEOUT
        if remote.channel.exit_status_ready() or not self._alive() or not remote.await_pid(deadline):
            return
        killer = RemoteCommand(self._session(deadline), Command(("bash", "-c", _KILL, str(remote.pid))))
        try:
            killer.read(ignore, ignore, deadline)
        finally:
            killer.close()

    def _session(self, deadline: float) -> paramiko.Channel:
        """A new channel; waits for its turn when the server allows fewer than usual."""
        while True:
            try:
                return self._line().open_session(timeout=min(_STALL, max(0.1, deadline - time.monotonic())))
            except paramiko.ChannelException:
                if time.monotonic() + 0.2 > deadline:
                    raise
                time.sleep(0.2)

    def _status(self, remote: RemoteCommand) -> int:
        """Exit status; -1 for a command that a signal ended, as paramiko does not say which."""
        status = remote.channel.exit_status
        if status == -1:
            self._line()
        return status

    @contextmanager
    def _sftp(self, verb: str, path: str) -> Iterator[paramiko.SFTPClient]:
        """An SFTP session for this caller alone; sessions stay open for the next."""
        with self._sftp_slots, self._line_errors():
            line = self._line()
            sftp = self._sftp_idle.pop() if self._sftp_idle else _open_sftp(line)
            try:
                yield sftp
            except OSError as error:
                if not line.is_active():
                    raise
                if isinstance(error, TimeoutError):
                    sftp.close()
                    raise EOFError(f"no progress for {_STALL:g} s") from error
                self._sftp_idle.append(sftp)
                raise self._file_error(verb, path, error) from error
            except BaseException:
                sftp.close()
                raise
            self._sftp_idle.append(sftp)

    def _file_error(self, verb: str, path: str, error: OSError) -> RemoteFileError:
        why = error.strerror or str(error)
        if why == "Failure":
            why = "the host says only `Failure`; often the disk is full"
        return RemoteFileError(
            f"cannot {verb} {path}: {why}", errno=error.errno, host=self.target, node_rank=self.node_rank
        )

    @contextmanager
    def _line_errors(self) -> Iterator[None]:
        try:
            yield
        except LINE_ERRORS as error:
            if isinstance(error, OSError) and self._alive():
                raise  # from the caller's own callback; the line is sound
            if isinstance(error, EOFError):
                self._await_end()
            raise line_error(error, self._alive(), self.target, self.node_rank) from error

    def _await_end(self) -> None:
        """A writer learns of a lost line a moment before the line knows itself; a connect just then would keep it."""
        connection = self._connection
        if connection is not None and connection.transport is not None:
            connection.transport.join(_END_WAIT)

    def _timed_out(self, command: Command, timeout: float) -> TransportError:
        return CommandTimeout(
            f"`{command.argv[0]}` did not end within {timeout:g} s", host=self.target, node_rank=self.node_rank
        )


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


def _close_hops(connection: Connection) -> None:
    """Close the connection and its jump hosts. Not ``Connection.close``: it passes over half-open ones."""
    for hop in hops(connection):
        line = hop.client.get_transport()
        hop.client.close()
        if line is not None and line.is_alive():
            line.join(_STOP_TIMEOUT)  # paramiko leaves its thread to end by itself


def _open_sftp(line: paramiko.Transport) -> paramiko.SFTPClient:
    sftp = paramiko.SFTPClient.from_transport(line)
    assert sftp is not None
    channel = sftp.get_channel()
    assert channel is not None
    channel.settimeout(_STALL)
    return sftp


def _open_for_writing(sftp: paramiko.SFTPClient, path: str, mode: str) -> paramiko.SFTPFile:
    """Open; where the folder is missing, make it first."""
    try:
        return sftp.open(path, mode)
    except FileNotFoundError:
        if mode == "r+":
            raise
        _make_parents(sftp, path)
        return sftp.open(path, mode)


def _make_parents(sftp: paramiko.SFTPClient, path: str) -> None:
    folder = path.rpartition("/")[0]
    if not folder:
        return
    try:
        sftp.stat(folder)
    except FileNotFoundError:
        _make_parents(sftp, folder)
        try:
            sftp.mkdir(folder)
        except OSError:
            sftp.stat(folder)  # another thread may have made it


def _relative_to_home(path: str) -> str:
    """SFTP begins in the login folder and knows no ``~``."""
    return "." if path == "~" else path.removeprefix("~/")
