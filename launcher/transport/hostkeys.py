"""Is this the machine it was last time? Host keys against the known_hosts files.

paramiko's own lookup knows neither wildcard patterns, ``HostKeyAlias`` nor revoked keys,
so the files are read here and paramiko is only told yes or no.
"""

from __future__ import annotations

import base64
import binascii
import fcntl
import fnmatch
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import paramiko
from paramiko.hostkeys import HostKeys

from launcher.config import HostKeys as Mode
from launcher.errors import HostKeyError


@dataclass(frozen=True)
class KnownKey:
    """One line of a known_hosts file."""

    hosts: str
    type: str
    blob: bytes
    revoked: bool
    where: str  #: file:line

    def names(self, host: str) -> bool:
        """Whether the line is about ``host`` (a plain, hashed or wildcard name)."""
        if self.hosts.startswith("|1|"):
            return HostKeys.hash_host(host, self.hosts) == self.hosts
        patterns = self.hosts.lower().split(",")
        if any(p[0] == "!" and _matches(host, p[1:]) for p in patterns if p):
            return False
        return any(_matches(host, p) for p in patterns)


def _matches(host: str, pattern: str) -> bool:
    # only * and ? are wildcards in known_hosts; [ ] belong to "[host]:port"
    return fnmatch.fnmatchcase(host.lower(), pattern.replace("[", "[[]"))


def read_known_hosts(paths: Sequence[Path]) -> Iterator[KnownKey]:
    """All usable lines of the files that exist; other lines are passed over, as ssh does."""
    for path in paths:
        if path.is_file():
            for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
                if known := _parse(line, f"{path}:{number}"):
                    yield known


def _parse(line: str, where: str) -> KnownKey | None:
    words = line.split()
    marker = words.pop(0) if words and words[0].startswith("@") else ""
    if len(words) < 3 or words[0].startswith("#") or marker == "@cert-authority":
        return None
    try:
        return KnownKey(words[0], words[1], base64.b64decode(words[2], validate=True), marker == "@revoked", where)
    except binascii.Error:
        return None


def host_name(host: str, port: int) -> str:
    """The name under which known_hosts files keep a host."""
    return host if port == 22 else f"[{host}]:{port}"


class HostKeyCheck(paramiko.MissingHostKeyPolicy):
    """Decides on the key a host shows. Raises ``HostKeyError``.

    ``known`` holds the lines about this host under ``name``; a line without the port
    is good enough to accept a key, as with ``ssh``.
    """

    def __init__(self, mode: Mode, host: str, port: int, files: Sequence[Path], target: str, node_rank: int | None):
        self.mode, self.host, self.port = mode, host, port
        self.name, self.files = host_name(host, port), tuple(files)
        self.target, self.node_rank = target, node_rank
        lines = list(read_known_hosts(self.files)) if mode != "insecure" else []
        self.known = [line for line in lines if line.names(self.name)]
        self._portless = [line for line in lines if line.names(host)]

    def key_types(self) -> list[str]:
        """Types of the known keys, so that the host is asked for one that can be compared."""
        types: list[str] = []
        for line in self.known or self._portless:
            types += ["rsa-sha2-512", "rsa-sha2-256"] if line.type == "ssh-rsa" else [line.type]
        return list(dict.fromkeys(types))

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        """Called by paramiko for each key, as it is told of no known ones itself."""
        if self.mode == "insecure":
            return
        blob = key.asbytes()
        same = [line for line in (*self.known, *self._portless) if line.blob == blob]
        if any(line.revoked for line in same):
            raise self._error(f"{_shown(key)} is marked as revoked in {same[0].where}", "do not use this host")
        if same:
            return
        if others := [line for line in self.known if not line.revoked]:
            raise self._changed(key, others[0])
        if self.mode == "strict":
            raise self._unknown(key)
        try:
            learn(self.files[0], self.name, key)
        except OSError as error:
            raise self._error(
                f"host key of {self.name} is new and cannot be written down: {self.files[0]}: {error.strerror}",
                "make that file writable, or set UserKnownHostsFile in ~/.ssh/config",
            ) from error

    def _unknown(self, key: paramiko.PKey) -> HostKeyError:
        port = "" if self.port == 22 else f"-p {self.port} "
        return self._error(
            f"host key of {self.name} is not known: {_shown(key)}",
            f"compare the fingerprint, then `ssh-keyscan {port}{self.host} >> {self.files[0]}` "
            f"or log in once with `ssh {port}{self.host}`; or set `host_keys: accept-new`",
        )

    def _changed(self, key: paramiko.PKey, known: KnownKey) -> HostKeyError:
        return self._error(
            f"host key of {self.name} has CHANGED: it shows {_shown(key)}, but {known.where} "
            f"has another {known.type} key. Somebody may be in between, or the machine was set up anew",
            f"if you know that it was, `ssh-keygen -f {known.where.rpartition(':')[0]} -R '{self.name}'` and try again",
        )

    def _error(self, message: str, remedy: str) -> HostKeyError:
        return HostKeyError(message, host=self.target, node_rank=self.node_rank, remedy=remedy)


def _shown(key: paramiko.PKey) -> str:
    return f"{key.get_name()} {key.fingerprint}"


def learn(path: Path, name: str, key: paramiko.PKey) -> None:
    """Append the key to ``path``; the nodes are reached in parallel, hence the lock."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with path.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        text = file.read()
        line = f"{name} {key.get_name()} {key.get_base64()}"
        if line not in text.splitlines():
            file.write(("\n" if text and not text.endswith("\n") else "") + line + "\n")
