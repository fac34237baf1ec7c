"""Nodes that only OpenSSH's own client can reach (GSSAPI, FIDO keys, host certificates, KnownHostsCommand …).

One ``ssh -M`` keeps the line; commands and SFTP sessions are ``ssh -S`` through its socket.
"""

from __future__ import annotations

import math
import os
import random
import select
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import paramiko

from launcher.command import Command
from launcher.config.schema import HostKeys, NodeConfig
from launcher.errors import AuthError, HostKeyError, PasswordRefused, TransportError, UnreachableError
from launcher.transport import askpass
from launcher.transport.channel import Remote
from launcher.transport.hop import Hop
from launcher.transport.hostkeys import checking_mode
from launcher.transport.line import turn_at
from launcher.transport.login import Credentials
from launcher.transport.process import RemoteProcess
from launcher.transport.sessions import STALL, SessionTransport
from launcher.transport.sshconfig import find_way, is_home_of_passwd, labelled, ssh_argv, ssh_program

_ATTEMPTS = 6  # of a connection that is dropped before login

_READY = b"gnnfleet-ready"

_CHECK_TIMEOUT = 5.0

_END_WAIT = 1.0

_AGAIN = 0.2

_QUIET = {
    "ClearAllForwardings": "yes",
    "ForwardAgent": "no",
    "ForwardX11": "no",
    "LogLevel": "ERROR",
    "PermitLocalCommand": "no",
    "RemoteCommand": "none",
    "RequestTTY": "no",
}

_KEPT = {"ControlMaster": "yes", "ControlPersist": "no", "ServerAliveInterval": "15", "ServerAliveCountMax": "3"}

# without a proxy that works, a client that is refused a session cannot open a line of its own
_THROUGH = {"ControlMaster": "no", "ProxyCommand": "false", "BatchMode": "yes", "LogLevel": "ERROR"}

_DROPPED = ("connection closed by", "connection reset by", "kex_exchange_identification")


class OpenSshTransport(SessionTransport):
    """As ``SshTransport``, by means of ``ssh``."""

    def __init__(self, node: NodeConfig, host_keys: HostKeys, credentials: Credentials, node_rank: int | None = None):
        super().__init__(node.login, node_rank)
        self.node, self.host_keys, self.credentials = node, host_keys, credentials
        self._opening = threading.Lock()
        self._master: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None  #: private; holds the socket
        self._words: list[str] = []  #: of a command through the line, up to the host's name

    def connect(self, timeout: float) -> None:
        """Open the line, anew when it broke; a line that the user keeps open himself is used as it is."""
        with self._opening:
            if self._alive():
                return
            self._let_go()
            with labelled(self.node_rank):
                way = find_way(self.node.host, self.node.user, self.node.port)
            self.target = way[-1].target
            if ssh_program() is None:
                raise self._error(
                    UnreachableError, "no OpenSSH client here", "install one: `apt install openssh-client`"
                )
            if way[-1].has_control_path and self._use_kept():
                return
            deadline = time.monotonic() + timeout
            for attempt in range(_ATTEMPTS):
                with turn_at(way[0]):
                    if self._open(way, timeout, deadline if attempt < _ATTEMPTS - 1 else 0.0):
                        return
                time.sleep(random.uniform(0.1, 0.3) * 2**attempt)

    def _login_words(self) -> list[str]:
        return ssh_argv(self.node.user, self.node.port)

    def _use_kept(self) -> bool:
        """Whether the user's own ControlMaster is there; it stays when we leave."""
        words = [*self._login_words(), *_options({"ControlMaster": "no", "BatchMode": "yes", "LogLevel": "ERROR"})]
        check = [*words, "-O", "check", "--", self.node.host]
        if subprocess.run(check, capture_output=True, stdin=subprocess.DEVNULL, timeout=_CHECK_TIMEOUT).returncode:
            return False
        self._words = [*words, "-T"]
        return True

    def _open(self, way: tuple[Hop, ...], timeout: float, deadline: float) -> bool:
        """One try; False when the host hung up before login and there is time for another."""
        folder = self._folder = Path(tempfile.mkdtemp(prefix="gnnfleet-ssh-", dir=_short_folder()))
        control = ["-S", str(folder / "line")]
        options = {**_QUIET, **_KEPT, **self._checking(way[-1]), "ConnectTimeout": str(math.ceil(timeout))}
        words = [*self._login_words(), *control, *_options(options | askpass.options(self.credentials))]
        words += ["-i", self.credentials.key] if self.credentials.key else []
        # a session of its own: it tells by its first line that the login is done, and ends when we do
        self._master = subprocess.Popen(
            [*words, "--", self.node.host, f"echo {_READY.decode()}; exec cat >/dev/null"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | askpass.prepare(folder, way[-1], self.credentials),
            start_new_session=True,  # Ctrl-C on our terminal is not for it
        )
        if _says_ready(self._master, time.monotonic() + timeout + 2 * len(way)):
            self._words = [ssh_program() or "ssh", "-F", "none", *control, *_options(_THROUGH), "-T"]
            return True
        said = _last_words(self._master)
        self._let_go()
        if said.lower().startswith(_DROPPED) and time.monotonic() < deadline:
            return False
        raise self._explained(said, way[-1], timeout)

    def _checking(self, hop: Hop) -> dict[str, str]:
        """StrictHostKeyChecking as the config has it; nobody is there to be asked."""
        mode = checking_mode(self.host_keys, hop)
        if mode == "insecure":
            return {"StrictHostKeyChecking": "no", "UserKnownHostsFile": os.devnull, "GlobalKnownHostsFile": os.devnull}
        known = " ".join(f'"{path}"' for path in hop.known_hosts[:-2] or hop.known_hosts)
        own_files = {"UserKnownHostsFile": known} if not is_home_of_passwd() else {}
        return {"StrictHostKeyChecking": {"ask": "yes"}.get(mode, mode), **own_files}

    def _explained(self, said: str, hop: Hop, timeout: float) -> TransportError:
        last = said.splitlines()[-1] if said else f"no answer within {timeout:g} s"
        by_hand = f"see what `ssh -v {self.node.login}` says"
        if "Permission denied" in said:
            kind = PasswordRefused if self.credentials.password is not None else AuthError
            return self._error(kind, f"ssh was not let in as {hop.user}: {last}", by_hand)
        if "ost key verification failed" in said or "IDENTIFICATION HAS CHANGED" in said or "No ED25519" in said:
            return self._error(HostKeyError, f"ssh does not trust this host's key: {said.splitlines()[0]}", by_hand)
        return self._error(UnreachableError, f"ssh could not connect: {last}", by_hand)

    def _error(self, kind: type[TransportError], message: str, remedy: str) -> TransportError:
        return kind(message, host=self.target, node_rank=self.node_rank, remedy=remedy)

    def close(self) -> None:
        with self._opening:
            self._let_go()

    def _let_go(self) -> None:
        master, self._master = self._master, None
        if master is not None:
            master.terminate()
            master.communicate()
        if self._folder is not None:
            askpass.forget(self._folder)
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder, self._words = None, []
        for sftp in self._sftp_idle:
            sftp.close()
        self._sftp_idle.clear()

    def _alive(self) -> bool:
        if self._master is not None:
            return self._master.poll() is None
        return bool(self._words) and self._use_kept()

    def _begin(self, command: Command, deadline: float) -> Remote:
        """Start a command; waits for its turn when the server allows fewer sessions than usual."""
        while self._words:
            remote = RemoteProcess([*self._words, "--", self.node.host], command)
            if remote.begun(min(deadline, time.monotonic() + STALL)):
                return remote
            remote.close()
            if not self._alive():
                break
            if time.monotonic() + _AGAIN > deadline:
                raise paramiko.SSHException(remote.words() or "it does not start")
            time.sleep(_AGAIN)
        raise EOFError("the line is down")

    def _begin_sftp(self) -> paramiko.SFTPClient:
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [*self._words, "-s", "--", self.node.host, "sftp"],
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
                return  # it was a session that ended, not the line


class _SftpPipe:
    """As much of a channel as paramiko's SFTP client needs, over the pipes of ``ssh -s … sftp``."""

    def __init__(self, sock: socket.socket, process: subprocess.Popen[bytes]):
        self._sock, self._process = sock, process
        self.send, self.recv = sock.send, sock.recv

    def recv_ready(self) -> bool:
        return bool(select.select([self._sock], [], [], 0)[0])

    def get_name(self) -> str:
        return "sftp"

    def close(self) -> None:
        self._sock.close()
        self._process.terminate()
        self._process.wait()


def _options(options: dict[str, str]) -> list[str]:
    return [word for name, value in options.items() for word in ("-o", f"{name}={value}")]


def _short_folder() -> str | None:
    """Where the socket goes: the path of one may not be longer than about 100 characters."""
    return "/tmp" if len(tempfile.gettempdir()) > 40 else None


def _says_ready(master: subprocess.Popen[bytes], deadline: float) -> bool:
    """Whether the line that tells of a login comes in time; lines before it are a talkative profile's."""
    assert master.stdout is not None
    timer = threading.Timer(max(0.0, deadline - time.monotonic()), master.kill)
    timer.start()
    try:
        return any(line.strip() == _READY for line in master.stdout)
    finally:
        timer.cancel()


def _last_words(master: subprocess.Popen[bytes]) -> str:
    _, stderr = master.communicate()
    return "\n".join(line.strip() for line in stderr.decode(errors="replace").splitlines() if line.strip())
