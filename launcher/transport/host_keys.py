"""Checks a host's key against the known_hosts files.

paramiko's own ``HostKeys`` knows neither wildcard patterns nor revoked keys, and not the line a key stands in, so the
files are read here, and paramiko asks ``HostKeyCheck``.
"""

from __future__ import annotations

import base64
import binascii
import fcntl
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import paramiko
from paramiko.hostkeys import HostKeys

from launcher.errors import HostKeyError
from launcher.transport.ssh_config import SshHost, is_about


@dataclass(frozen=True)
class KnownKey:
    """One line of a known_hosts file."""

    hosts: str
    type: str
    blob: bytes
    revoked: bool
    where: str  #: file:line
    authority: bool = False  #: the key of one who signs host keys, not of a host

    def names(self, host: str) -> bool:
        """Whether the line is about ``host`` (a plain, hashed or wildcard name)."""
        if self.hosts.startswith("|1|"):
            return HostKeys.hash_host(host, self.hosts) == self.hosts
        return is_about(host, self.hosts.split(","))


def read_known_hosts(paths: Sequence[Path]) -> Iterator[KnownKey]:
    """All usable lines of the files that exist; other lines are passed over, as ssh does."""
    for path in paths:
        if path.is_file():
            found = path.stat()
            yield from _lines_of(path, found.st_mtime_ns, found.st_size)


@lru_cache(maxsize=16)
def _lines_of(path: Path, mtime_ns: int, size: int) -> tuple[KnownKey, ...]:
    """Read once for all nodes, as long as the file stays the same."""
    lines = enumerate(path.read_text(errors="replace").splitlines(), 1)
    return tuple(known for number, line in lines if (known := _parse(line, f"{path}:{number}")))


def _parse(line: str, where: str) -> KnownKey | None:
    words = line.split()
    marker = words.pop(0) if words and words[0].startswith("@") else ""
    if len(words) < 3 or words[0].startswith("#"):
        return None
    try:
        blob = base64.b64decode(words[2], validate=True)
    except binascii.Error:
        return None
    return KnownKey(words[0], words[1], blob, marker == "@revoked", where, marker == "@cert-authority")


def checking_mode(host_keys: str, host: SshHost) -> str:
    """``ask`` and ``yes`` refuse an unknown key, ``accept-new`` adds it, ``no`` takes any key and adds it,
    ``insecure`` checks nothing."""
    return {"auto": host.checking, "strict": "yes"}.get(host_keys, host_keys)


class HostKeyCheck(paramiko.MissingHostKeyPolicy):
    """Decides on the key a host shows. Its errors name no node: a jump host is many nodes'.

    ``known`` holds the lines about this host under ``name``; as with ``ssh``, a line without the port is good enough
    to accept a key.
    """

    def __init__(self, host: SshHost, host_keys: str):
        self.mode = checking_mode(host_keys, host)
        self.host, self.port = (host.key_alias, 22) if host.key_alias else (host.host, host.port)
        self.name = self.host if self.port == 22 else f"[{self.host}]:{self.port}"
        self.files = host.known_hosts
        lines = list(read_known_hosts(self.files)) if self.mode != "insecure" else []
        self.doubt: HostKeyError | None = None  #: why no password is to be sent
        self.known = [line for line in lines if line.names(self.name) and not line.authority]
        self._portless = [line for line in lines if line.names(self.host) and not line.authority]
        self._authorities = [line for line in lines if line.authority and line.names(self.name)]

    @property
    def needs_certificate(self) -> bool:
        """Whether the host is known only by who signs its key, which paramiko cannot check."""
        return bool(self._authorities) and not self.known

    def key_types(self) -> list[str]:
        """Types of the known keys, so that the host is asked for one that can be compared."""
        types: list[str] = []
        for line in self.known or self._portless:
            types += ["rsa-sha2-512", "rsa-sha2-256"] if line.type == "ssh-rsa" else [line.type]
        return list(dict.fromkeys(types))

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        """Raises ``HostKeyError`` for a key that is not to be trusted; with mode ``no`` it is kept in ``doubt``, as
        ssh goes on then, without passwords: who is in between could not use a signature, but a password."""
        if self.mode == "insecure":
            return
        blob = key.asbytes()
        same = [line for line in (*self.known, *self._portless) if line.blob == blob]
        if revoked := [line for line in same if line.revoked]:
            what = f"{_shown(key)} is marked as revoked in {revoked[0].where}"
            return self._refuse(HostKeyError(what, remedy="do not use this host"))
        if same:
            return
        if others := [line for line in self.known if not line.revoked]:
            return self._refuse(self._changed(key, others[0]))
        if self.mode in ("yes", "ask"):
            raise self._unknown(key)
        self._learn(key)

    def _refuse(self, error: HostKeyError) -> None:
        if self.mode != "no":
            raise error
        self.doubt = HostKeyError(f"{error.message}; no password was sent to it", remedy=error.remedy)

    def _learn(self, key: paramiko.PKey) -> None:
        try:
            _append(self.files[0], f"{self.name} {key.get_name()} {key.get_base64()}")
        except OSError as error:
            if self.mode == "no":
                return
            raise HostKeyError(
                f"host key of {self.name} is new and cannot be written down: {self.files[0]}: {error.strerror}",
                remedy="make that file writable, or set UserKnownHostsFile in ~/.ssh/config",
            ) from error

    def _unknown(self, key: paramiko.PKey) -> HostKeyError:
        port = "" if self.port == 22 else f"-p {self.port} "
        return HostKeyError(
            f"host key of {self.name} is not known: {_shown(key)}",
            remedy=f"compare the fingerprint, then `ssh-keyscan {port}{self.host} >> {self.files[0]}` "
            f"or log in once with `ssh {port}{self.host}`; or set `host_keys: accept-new`",
        )

    def _changed(self, key: paramiko.PKey, known: KnownKey) -> HostKeyError:
        file = known.where.rpartition(":")[0]
        return HostKeyError(
            f"host key of {self.name} has CHANGED: it shows {_shown(key)}, but {known.where} "
            f"has another {known.type} key. Somebody may be in between, or the machine was set up anew",
            remedy=f"if you know that it was, `ssh-keygen -f {file} -R '{self.name}'` and try again",
        )


def _shown(key: paramiko.PKey) -> str:
    return f"{key.get_name()} {key.fingerprint}"


def _append(path: Path, line: str) -> None:
    """Add a line to a file, once; the nodes are reached in parallel, hence the lock."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with path.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        text = file.read()
        if line not in text.splitlines():
            file.write(("\n" if text and not text.endswith("\n") else "") + line + "\n")
