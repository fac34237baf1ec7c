"""An SSH server inside the test process. It accepts keys and passwords, runs commands, serves SFTP and can simulate
failures."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import paramiko
from paramiko.common import MSG_CHANNEL_SUCCESS


@dataclass
class Sshd:
    """An SSH server on 127.0.0.1:``port``; relative SFTP paths and commands start in the folder ``home``."""

    home: Path
    host_key: paramiko.PKey
    authorized: paramiko.PKey | None = None
    password: str | None = None
    interactive: bool = False  #: whether the password is accepted by keyboard-interactive only
    both: bool = False  #: whether a login needs a key and then the password
    hang_up: int = 0  #: number of first connections that the server closes before login, as with MaxStartups
    drop_after: int | None = None  #: number of bytes written over SFTP after which the server cuts all connections
    logins: list[str] = field(default_factory=list)  #: every attempted login, with its outcome
    connections: int = 0
    port: int = 0

    def __post_init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self._transports: list[paramiko.Transport] = []
        self._thread = threading.Thread(target=self._accept, name="sshd", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._socket.accept()
            except OSError:
                return
            self.connections += 1
            if self.connections <= self.hang_up:
                sock.close()
                continue
            transport = _Transport(sock)
            transport.add_server_key(self.host_key)
            transport.set_subsystem_handler("sftp", paramiko.SFTPServer, _Files, self)
            self._transports.append(transport)
            with suppress(paramiko.SSHException, EOFError):
                transport.start_server(threading.Event(), _Server(self))

    def drop(self) -> None:
        """Close the sockets of all connections, without sending an SSH disconnect message."""
        for transport in self._transports:
            with suppress(OSError):
                transport.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(5)
        for transport in self._transports:
            transport.close()


@contextmanager
def serving(sshd: Sshd) -> Iterator[Sshd]:
    try:
        yield sshd
    finally:
        sshd.close()


class _Transport(paramiko.Transport):
    """Starts a command after the reply to its request, as sshd does."""

    def __init__(self, sock: socket.socket):
        super().__init__(sock)
        self.commands: deque[threading.Thread] = deque()

    def _send_user_message(self, data: paramiko.Message) -> None:
        super()._send_user_message(data)
        if data.asbytes()[0] == MSG_CHANNEL_SUCCESS and self.commands:
            self.commands.popleft().start()


class _Server(paramiko.ServerInterface):
    def __init__(self, sshd: Sshd):
        self.sshd, self.key_is_good = sshd, False

    def get_allowed_auths(self, username: str) -> str:
        by_password = "keyboard-interactive" if self.sshd.interactive else "password"
        if self.sshd.both:
            return by_password if self.key_is_good else "publickey"
        kinds = [("publickey", self.sshd.authorized), (by_password, self.sshd.password)]
        return ",".join(kind for kind, wanted in kinds if wanted is not None)

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        self.key_is_good = self.sshd.authorized is not None and key == self.sshd.authorized
        return self._outcome("key", self.key_is_good, enough=not self.sshd.both)

    def check_auth_password(self, username: str, password: str) -> int:
        if "password" not in self.get_allowed_auths(username).split(","):
            return paramiko.AUTH_FAILED
        return self._outcome("password", password == self.sshd.password)

    def check_auth_interactive(self, username: str, submethods: str) -> int | paramiko.InteractiveQuery:
        return paramiko.InteractiveQuery("", "", ("Password: ", False))

    def check_auth_interactive_response(self, responses: list[str]) -> int:
        return self._outcome("interactive", responses == [self.sshd.password])

    def _outcome(self, kind: str, good: bool, enough: bool = True) -> int:
        self.sshd.logins.append(f"{kind} {'ok' if good else 'refused'}")
        if good and not enough:
            return paramiko.AUTH_PARTIALLY_SUCCESSFUL
        return paramiko.AUTH_SUCCESSFUL if good else paramiko.AUTH_FAILED

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return paramiko.OPEN_SUCCEEDED if kind == "session" else paramiko.OPEN_FAILED_ADMINISTRATIVELY_PROHIBITED

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        transport = channel.get_transport()
        assert isinstance(transport, _Transport)
        words = (self.sshd, channel, command.decode())
        transport.commands.append(threading.Thread(target=_execute, args=words, daemon=True))
        return True


def _execute(sshd: Sshd, channel: paramiko.Channel, command: str) -> None:
    process = subprocess.Popen(
        ["/bin/sh", "-c", command],
        cwd=sshd.home,
        env={**os.environ, "HOME": str(sshd.home)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    threads = [
        threading.Thread(target=_pump, args=(process.stdout, channel.sendall), daemon=True),
        threading.Thread(target=_pump, args=(process.stderr, channel.sendall_stderr), daemon=True),
    ]
    for thread in (*threads, threading.Thread(target=_feed, args=(channel, process), daemon=True)):
        thread.start()
    for thread in threads:
        thread.join()
    status = process.wait()
    with suppress(OSError, EOFError, paramiko.SSHException):
        if status >= 0:
            channel.send_exit_status(status)
        channel.close()


def _pump(pipe: object, send: object) -> None:
    with suppress(OSError, EOFError, paramiko.SSHException):
        while data := os.read(pipe.fileno(), 32768):  # type: ignore[attr-defined]
            send(data)  # type: ignore[operator]


def _feed(channel: paramiko.Channel, process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    with suppress(OSError):
        while data := channel.recv(32768):
            process.stdin.write(data)
            process.stdin.flush()
    with suppress(OSError):
        process.stdin.close()
    while process.poll() is None:
        if channel.closed:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            return
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.05)


class _Handle(paramiko.SFTPHandle):
    def __init__(self, flags: int, sshd: Sshd):
        super().__init__(flags)
        self.sshd = sshd

    def stat(self) -> paramiko.SFTPAttributes:
        return paramiko.SFTPAttributes.from_stat(os.fstat(self.readfile.fileno()))

    def chattr(self, attr: paramiko.SFTPAttributes) -> int:
        os.fchmod(self.readfile.fileno(), attr.st_mode or 0)
        return paramiko.SFTP_OK

    def write(self, offset: int, data: bytes) -> int:
        if self.sshd.drop_after is not None:
            self.sshd.drop_after -= len(data)
            if self.sshd.drop_after < 0:
                self.sshd.drop()
                return paramiko.SFTP_FAILURE
        return super().write(offset, data)


class _Files(paramiko.SFTPServerInterface):
    """SFTP access to real files. Relative paths start in the folder ``home`` of the ``Sshd``."""

    def __init__(self, server: paramiko.ServerInterface, sshd: Sshd):
        super().__init__(server)
        self.sshd = sshd

    def _path(self, path: str) -> str:
        return os.path.join(self.sshd.home, path)

    def canonicalize(self, path: str) -> str:
        return os.path.normpath(self._path(path))

    def open(self, path: str, flags: int, attr: paramiko.SFTPAttributes) -> paramiko.SFTPHandle | int:
        try:
            fd = os.open(self._path(path), flags, 0o644)
        except OSError as error:
            return paramiko.SFTPServer.convert_errno(error.errno or 0)
        mode = "wb" if flags & os.O_WRONLY else "r+b" if flags & os.O_RDWR else "rb"
        handle = _Handle(flags, self.sshd)
        handle.readfile = handle.writefile = os.fdopen(fd, mode, buffering=0)
        return handle

    def stat(self, path: str) -> paramiko.SFTPAttributes | int:
        try:
            return paramiko.SFTPAttributes.from_stat(os.stat(self._path(path)))
        except OSError as error:
            return paramiko.SFTPServer.convert_errno(error.errno or 0)

    lstat = stat

    def mkdir(self, path: str, attr: paramiko.SFTPAttributes) -> int:
        return self._do(os.mkdir, path)

    def remove(self, path: str) -> int:
        return self._do(os.remove, path)

    def posix_rename(self, oldpath: str, newpath: str) -> int:
        return self._do(os.replace, oldpath, newpath)

    def _do(self, action: object, *paths: str) -> int:
        try:
            action(*map(self._path, paths))  # type: ignore[operator]
        except OSError as error:
            return paramiko.SFTPServer.convert_errno(error.errno or 0)
        return paramiko.SFTP_OK
