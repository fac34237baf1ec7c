"""SSH connections by the OpenSSH client, for what paramiko lacks (GSSAPI, FIDO keys, host certificates …).

One ``ssh -M`` holds the connection; commands and SFTP sessions are ``ssh -S`` processes on its control socket.
"""

from __future__ import annotations

import math
import os
import select
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import paramiko

from launcher.command import Command
from launcher.config.schema import HostKeys, NodeConfig
from launcher.errors import AuthError, HostKeyError, PasswordRefused, TransportError, UnreachableError
from launcher.transport.auth import Credentials
from launcher.transport.host_keys import checking_mode
from launcher.transport.process import STALL, PipeProcess, Process, with_pid
from launcher.transport.remote import Dropped, RemoteTransport, login_turn
from launcher.transport.ssh_config import Route, SshHost, is_home_of_passwd, ssh_argv, ssh_program

_READY = b"gnnfleet-ready"

_CHECK_TIMEOUT = 5.0  # seconds

_END_WAIT = 1.0  # seconds

_RETRY_INTERVAL = 0.2  # seconds between requests for a session

_SSH_FAILED = 255  # exit status of ssh for its own errors, and for a command that was ended by a signal

_MASTER = {
    "ClearAllForwardings": "yes",
    "ControlMaster": "yes",
    "ControlPersist": "no",
    "ForwardAgent": "no",
    "ForwardX11": "no",
    "LogLevel": "ERROR",
    "PermitLocalCommand": "no",
    "RemoteCommand": "none",
    "RequestTTY": "no",
    "ServerAliveCountMax": "3",
    "ServerAliveInterval": "15",
}

_BATCH = {"ControlMaster": "no", "BatchMode": "yes", "LogLevel": "ERROR"}

# ProxyCommand false: a client that cannot use the control socket must not open a connection of its own
_THROUGH = {**_BATCH, "ProxyCommand": "false"}

_UNTRUSTED = ("ost key verification failed", "IDENTIFICATION HAS CHANGED", "REVOKED HOST KEY", "No ED25519")

_STORE_KEY = (
    "log in once with `ssh -o StrictHostKeyChecking=ask {login}`, which shows the fingerprint to compare; "
    "or set `host_keys: accept-new`"
)

_DROPPED = ("connection closed by", "connection reset by", "kex_exchange_identification")

# A password reaches ssh through a named pipe in a private folder, never by arguments or environment. The launcher keeps
# the pipe open, with the answer followed by empty lines in it, so that a reader never blocks. Only prompts about the
# node's own login (or key) are answered; prompts of a jump host fail.
_ASKPASS = """#!/bin/sh
case "$1" in *{about}*) read -r answer < {pipe}; printf '%s\\n' "$answer";; *) exit 1;; esac
"""

_EMPTY_ANSWERS = 8


class OpenSshTransport(RemoteTransport):
    """A connection to one node by the ``ssh`` command. An open ControlMaster of the user is used if there is one."""

    def __init__(self, node: NodeConfig, host_keys: HostKeys, credentials: Credentials, node_rank: int | None = None):
        super().__init__(node, host_keys, credentials, node_rank)
        self._master: subprocess.Popen[bytes] | None = None
        self._cleanup = ExitStack()
        self._ssh_argv: list[str] = []  #: argv of ssh through the connection, up to the host name; empty when closed

    def _open(self, route: Route, timeout: float) -> None:
        if ssh_program() is None:
            message = "no OpenSSH client on the launching machine"
            raise self._error(UnreachableError, message, "install it: `apt install openssh-client`")
        if route[-1].has_control_path and self._use_control_master():
            return
        with login_turn(route):
            self._open_master(route, timeout)

    def _login_argv(self) -> list[str]:
        return ssh_argv(self.node.user, self.node.port)

    def _use_control_master(self) -> bool:
        """Use the user's own ControlMaster, which outlives the launcher; False if none is open."""
        argv = [*self._login_argv(), *_options(_BATCH)]
        check = [*argv, "-O", "check", "--", self.node.host]
        try:
            if subprocess.run(check, capture_output=True, stdin=subprocess.DEVNULL, timeout=_CHECK_TIMEOUT).returncode:
                return False
        except subprocess.TimeoutExpired:  # it hangs, as after a network cut
            return False
        self._ssh_argv = [*argv, "-T"]
        return True

    def _open_master(self, route: Route, timeout: float) -> None:
        # in /tmp if TMPDIR is long: the path of a socket is limited to about 100 characters
        short = "/tmp" if len(tempfile.gettempdir()) > 40 else None
        folder = Path(tempfile.mkdtemp(prefix="gnnfleet-ssh-", dir=short))
        self._cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
        control = ["-S", str(folder / "control")]
        asked, environment = self._askpass(folder, route[-1])
        # ``ask`` becomes ``yes`` (refuse unknown keys), as this ssh process cannot ask the user.
        mode, files = checking_mode(self.host_keys, route[-1]), route[-1].known_hosts
        checking = {"StrictHostKeyChecking": {"ask": "yes", "insecure": "no"}.get(mode, mode)}
        if mode == "insecure":
            checking |= {"UserKnownHostsFile": os.devnull, "GlobalKnownHostsFile": os.devnull}
        elif not is_home_of_passwd():
            checking["UserKnownHostsFile"] = " ".join(f'"{path}"' for path in files[:-2] or files)
        options = {**_MASTER, **asked, **checking, "ConnectTimeout": str(math.ceil(timeout))}
        key = ["-i", self.credentials.key] if self.credentials.key else []
        # The session's first line shows that the login is complete; it ends when the launcher closes its stdin.
        self._master = subprocess.Popen(
            [*self._login_argv(), *control, *_options(options), *key]
            + ["--", self.node.host, f"echo {_READY.decode()}; exec cat >/dev/null"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | environment,
            start_new_session=True,  # Ctrl-C on the launcher's terminal must not end it
        )
        if _is_ready(self._master, timeout + 2 * len(route)):
            self._ssh_argv = [ssh_program() or "ssh", "-F", "none", *control, *_options(_THROUGH), "-T"]
            return
        stderr = _ended(self._master)
        output = "\n".join(line.strip() for line in stderr.decode(errors="replace").splitlines() if line.strip())
        self._disconnect()
        error = self._login_error(output, route[-1], timeout)
        raise Dropped(error) if output.lower().startswith(_DROPPED) else error

    def _askpass(self, folder: Path, host: SshHost) -> tuple[Mapping[str, str], Mapping[str, str]]:
        """Return the ssh options and the environment variables by which ssh gets the password or passphrase.

        If the credentials have neither, the options keep ssh from prompting. Otherwise this method writes a script to
        ``folder`` (mode 0700), which ssh runs to get the secret.
        """
        given = self.credentials
        secret, about = (given.passphrase, given.key) if given.passphrase is not None else (given.password, None)
        if secret is None:
            return {"BatchMode": "yes"}, {}
        pipe, program = folder / "answer", folder / "askpass"
        os.mkfifo(pipe, 0o600)
        write_end = os.open(pipe, os.O_RDWR)
        self._cleanup.callback(os.close, write_end)
        os.write(write_end, secret.reveal().encode() + b"\n" * (1 + _EMPTY_ANSWERS))
        about = shlex.quote(about or f"{host.user}@{host.host.lower()}")
        program.write_text(_ASKPASS.format(about=about, pipe=shlex.quote(str(pipe))))
        program.chmod(0o700)
        display = os.environ.get("DISPLAY", ":0")  # older clients ignore SSH_ASKPASS without DISPLAY
        environment = {"SSH_ASKPASS": str(program), "SSH_ASKPASS_REQUIRE": "force", "DISPLAY": display}
        return {"BatchMode": "no", "NumberOfPasswordPrompts": "1"}, environment

    def _login_error(self, output: str, host: SshHost, timeout: float) -> TransportError:
        last = output.splitlines()[-1] if output else f"no answer within {timeout:g} s"
        login = " ".join(self._login_argv()[1:] + [self.node.host])
        by_hand = f"for details run `ssh -v {login}`"
        if any(words in output for words in _UNTRUSTED):
            words = next(line for line in (each.strip("@ ") for each in output.splitlines()) if line)
            if "host key is known for" in words:
                remedy = _STORE_KEY.format(login=login)
                return self._error(
                    HostKeyError, f"host key of {host.host} is not known: {words}", remedy, "host-key-unknown"
                )
            return self._error(
                HostKeyError, f"ssh does not trust this host's key: {words}", by_hand, "host-key-changed"
            )
        if "Permission denied" in output:
            kind = PasswordRefused if self.credentials.password is not None else AuthError
            return self._error(kind, f"ssh could not log in as {host.user}: {last}", by_hand)
        return self._error(UnreachableError, f"ssh could not connect: {last}", by_hand)

    def _error(self, kind: type[TransportError], message: str, remedy: str, code: str = "") -> TransportError:
        return kind(message, host=self.target, node_rank=self.node_rank, remedy=remedy, code=code)

    def _disconnect(self) -> None:
        master, self._master = self._master, None
        if master is not None:
            master.terminate()
            _ended(master)
        self._cleanup.close()
        self._ssh_argv = []

    def _alive(self) -> bool:
        if self._master is not None:
            return self._master.poll() is None
        return bool(self._ssh_argv) and self._use_control_master()

    def _begin(self, command: Command, deadline: float) -> Process:
        # While the server refuses another session (``MaxSessions``), retries until ``deadline``.
        while self._ssh_argv:
            process = _SshProcess([*self._ssh_argv, "--", self.node.host, with_pid(command)])
            if process.await_pid(min(deadline, time.monotonic() + STALL)):
                return process
            process.close()
            if not self._alive():
                break
            if time.monotonic() + _RETRY_INTERVAL > deadline:
                raise paramiko.SSHException(process.stderr.decode(errors="replace").strip() or "it does not start")
            time.sleep(_RETRY_INTERVAL)
        raise EOFError("SSH connection closed")

    def _begin_sftp(self) -> paramiko.SFTPClient:
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [*self._ssh_argv, "-s", "--", self.node.host, "sftp"],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        ours.settimeout(STALL)
        return paramiko.SFTPClient(_SftpPipe(ours, process))  # type: ignore[arg-type]

    def _await_end(self) -> None:
        if self._master is not None:
            try:
                self._master.wait(_END_WAIT)
            except subprocess.TimeoutExpired:
                return  # a session ended, not the connection


class _SshProcess(PipeProcess):
    @property
    def status(self) -> int | None:
        status = super().status
        return -1 if status is not None and (status == _SSH_FAILED or status < 0) else status


class _SftpPipe:
    """The socket to ``ssh -s … sftp``. It has the methods of a paramiko channel that paramiko's SFTP client calls."""

    def __init__(self, sock: socket.socket, process: subprocess.Popen[bytes]):
        self._sock, self._process = sock, process
        self.send, self.recv = sock.send, sock.recv

    def recv_ready(self) -> bool:
        poll = select.poll()  # select() does not accept descriptors above 1023
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(0))

    def get_name(self) -> str:
        return "sftp"

    def close(self) -> None:
        self._sock.close()
        self._process.terminate()
        self._process.wait()


def _options(options: Mapping[str, str]) -> Sequence[str]:
    return [word for name, value in options.items() for word in ("-o", f"{name}={value}")]


def _is_ready(master: subprocess.Popen[bytes], seconds: float) -> bool:
    """Wait for the line that marks the end of the login; False if it does not come in time."""
    assert master.stdout is not None
    timer = threading.Timer(seconds, _kill, [master])
    timer.start()
    try:
        return any(line.strip() == _READY for line in master.stdout)
    finally:
        timer.cancel()


def _ended(master: subprocess.Popen[bytes]) -> bytes:
    """Wait for the end of ssh; return its stderr.

    Its ProxyCommand may live on, with the other end of that pipe: it is killed after a second.
    """
    stderr = b""
    for _ in range(2):
        try:
            return master.communicate(timeout=_END_WAIT)[1]
        except subprocess.TimeoutExpired as error:
            stderr = error.stderr or b""
            _kill(master)
    return stderr


def _kill(master: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(master.pid, signal.SIGKILL)
