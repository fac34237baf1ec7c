"""Commands and files over an open SSH line, whoever keeps it open."""

from __future__ import annotations

import math
import threading
import time
import uuid
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import paramiko

from launcher.command import Command
from launcher.errors import CommandTimeout, RemoteFileError, TransportError
from launcher.files import appearing
from launcher.transport.base import Completed, OnBytes, OnLine, Talk, Transport
from launcher.transport.channel import Remote, ignore
from launcher.transport.line import LINE_ERRORS
from launcher.transport.lines import LineSplitter
from launcher.transport.ssherrors import line_error
from launcher.transport.talks import ChannelTalk

# sshd allows ten sessions on a connection (MaxSessions): six commands, one that ends another, two SFTP, one ping
_COMMAND_SLOTS = 6

_SFTP_SLOTS = 2

STALL = 60.0  # seconds without progress after which a transfer is given up

_STOP_TIMEOUT = 5.0

# bash, as dash knows no `kill --`. SIGTERM to the group (where the login shell led none: the process),
# SIGKILL a second later
_KILL = (
    'kill -TERM -- "-$0" 2>/dev/null || kill -TERM "$0"; '
    'for i in 1 2 3 4 5 6 7 8 9 10; do sleep 0.1; kill -0 -- "-$0" || exit 0; done 2>/dev/null; kill -KILL -- "-$0"'
)

_CHUNK = 32768  # the largest SFTP packet every server takes

_READ_AHEAD = 1 << 23  # bytes asked for at a time; paramiko's own limit on a prefetch sleeps between requests


class SessionTransport(Transport):
    """What both SSH transports do with their line; they say how a session on it is begun."""

    def __init__(self, target: str, node_rank: int | None):
        self.target, self.node_rank = target, node_rank
        self._command_slots = threading.BoundedSemaphore(_COMMAND_SLOTS)
        self._sftp_slots = threading.BoundedSemaphore(_SFTP_SLOTS)
        self._sftp_idle: list[paramiko.SFTPClient] = []

    @abstractmethod
    def _alive(self) -> bool: ...

    @abstractmethod
    def _begin(self, command: Command, deadline: float) -> Remote:
        """Start a command; raises one of ``LINE_ERRORS``."""

    @abstractmethod
    def _begin_sftp(self) -> paramiko.SFTPClient: ...

    @abstractmethod
    def _await_end(self) -> None:
        """A writer may learn of a lost line before the line knows itself; a connect just then would keep it."""

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
            remote = stack.enter_context(self._command(command, time.monotonic() + STALL))
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

    @contextmanager
    def _command(self, command: Command, deadline: float) -> Iterator[Remote]:
        """A started command, closed at the end of the block; errors of the line become ours."""
        wait = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
        if not self._command_slots.acquire(timeout=wait):
            raise self._timed_out(command, wait or 0.0)
        try:
            with self._line_errors():
                remote = self._begin(command, deadline)
                try:
                    yield remote
                finally:
                    remote.close()
        finally:
            self._command_slots.release()

    def _kill(self, remote: Remote) -> None:
        """End a running command; nothing to do where the line is gone or it has ended."""
        deadline = time.monotonic() + _STOP_TIMEOUT
        if remote.status is not None or not self._alive() or not remote.await_pid(deadline):
            return
        killer = self._begin(Command(("bash", "-c", _KILL, str(remote.pid))), deadline)
        try:
            killer.read(ignore, ignore, deadline)
        finally:
            killer.close()

    def _status(self, remote: Remote) -> int:
        """Exit status; -1 for a command that a signal ended, as it is not said which."""
        status = remote.status
        if status in (None, -1) and not self._alive():
            raise EOFError("the line is down")
        return -1 if status is None else status

    @contextmanager
    def _sftp(self, verb: str, path: str) -> Iterator[paramiko.SFTPClient]:
        """An SFTP session for this caller alone; sessions stay open for the next."""
        with self._sftp_slots, self._line_errors():
            if not self._alive():
                raise EOFError("the line is down")
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

    def _timed_out(self, command: Command, timeout: float) -> TransportError:
        return CommandTimeout(
            f"`{command.argv[0]}` did not end within {timeout:g} s", host=self.target, node_rank=self.node_rank
        )


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
