"""Checks a host's key against the known_hosts files.

Unlike paramiko's ``HostKeys``, it supports wildcard patterns and revoked keys, and records file and line of each key.
"""

from __future__ import annotations

import base64
import binascii
import fcntl
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import paramiko
from paramiko.hostkeys import HostKeys

from launcher.errors import HostKeyError
from launcher.transport.ssh_config import SshHost, host_matches


@dataclass(frozen=True)
class _KnownKey:
    hosts: str  #: first field of the line: names and patterns, or a hashed name
    type: str
    blob: bytes
    revoked: bool
    where: str  #: file:line
    authority: bool = False  #: the key of a certificate authority that signs host keys

    def names(self, host: str) -> bool:
        """Whether the line applies to ``host``, by a plain, hashed or wildcard name."""
        if self.hosts.startswith("|1|"):
            with suppress(ValueError, AssertionError):  # a damaged line
                return HostKeys.hash_host(host, self.hosts) == self.hosts
            return False
        return host_matches(host, self.hosts.split(","))


def read_known_hosts(paths: Sequence[Path]) -> Iterator[_KnownKey]:
    """Yield the valid lines of the files that exist; skip invalid lines, as OpenSSH does."""
    for path in paths:
        if path.is_file():
            found = path.stat()
            yield from _lines_of(path, found.st_mtime_ns, found.st_size)


@lru_cache(maxsize=16)
def _lines_of(path: Path, mtime_ns: int, size: int) -> tuple[_KnownKey, ...]:
    # ``mtime_ns`` and ``size`` are keys of the cache.
    lines = enumerate(path.read_text(errors="replace").splitlines(), 1)
    return tuple(known for number, line in lines if (known := _parse(line, f"{path}:{number}")))


def _parse(line: str, where: str) -> _KnownKey | None:
    words = line.split()
    marker = words.pop(0) if words and words[0].startswith("@") else ""
    if len(words) < 3 or words[0].startswith("#"):
        return None
    try:
        blob = base64.b64decode(words[2], validate=True)
    except binascii.Error:
        return None
    return _KnownKey(words[0], words[1], blob, marker == "@revoked", where, marker == "@cert-authority")


def checking_mode(host_keys: str, host: SshHost) -> str:
    """Return how to handle unknown keys, by the config's ``host_keys`` and ssh_config's StrictHostKeyChecking.

    ``ask`` and ``yes`` refuse an unknown key, ``accept-new`` adds it, ``no`` accepts any key and adds an unknown one,
    ``insecure`` checks nothing.
    """
    return {"auto": host.checking, "strict": "yes"}.get(host_keys, host_keys)


class HostKeyCheck(paramiko.MissingHostKeyPolicy):
    """Accepts or refuses the key that a host presents.

    Errors name no node, since several nodes may share a jump host. ``known``: the known_hosts lines for ``name`` (host
    and port). If there are none, lines for the host without a port are used, as in OpenSSH.
    """

    def __init__(self, host: SshHost, host_keys: str):
        self.mode = checking_mode(host_keys, host)
        self._resolved = host
        self.host, self.port = (host.key_alias, 22) if host.key_alias else (host.host, host.port)
        self.name = self.host if self.port == 22 else f"[{self.host}]:{self.port}"
        self.files = host.known_hosts
        lines = list(read_known_hosts(self.files)) if self.mode != "insecure" else []
        self.distrust: HostKeyError | None = None  #: mode ``no`` only: why no password may be sent to this host
        self.known = [line for line in lines if line.names(self.name) and not line.authority]
        self._portless = [line for line in lines if line.names(self.host) and not line.authority]
        self._authorities = [line for line in lines if line.authority and line.names(self.name)]

    @property
    def needs_certificate(self) -> bool:
        """Whether known_hosts has only a certificate authority for this host, which paramiko cannot check."""
        return bool(self._authorities) and not self.known

    def key_types(self) -> list[str]:
        """Return the algorithms of the known keys; the host is asked for a key of these types first."""
        types: list[str] = []
        for line in self.known or self._portless:
            types += ["rsa-sha2-512", "rsa-sha2-256"] if line.type == "ssh-rsa" else [line.type]
        return list(dict.fromkeys(types))

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        """Check the key that paramiko got from the host. Raises HostKeyError unless it is accepted.

        With mode ``no`` a changed or revoked key only sets ``distrust``; login then continues without passwords, as in
        OpenSSH.
        """
        if self.mode == "insecure":
            return
        blob = key.asbytes()
        same = [line for line in (*self.known, *self._portless) if line.blob == blob]
        if revoked := [line for line in same if line.revoked]:
            what = f"{_shown(key)} is marked as revoked in {revoked[0].where}"
            return self._refuse(
                HostKeyError(what, remedy="do not connect; ask the administrator of the host", code="host-key-changed")
            )
        if same:
            return
        if others := [line for line in self.known if not line.revoked]:
            known = others[0]
            remove = f"remove the old key with `ssh-keygen -f {known.where.rpartition(':')[0]} -R '{self.name}'`"
            if self.mode in ("yes", "ask"):  # an unknown key is refused, so removing the old one is not enough
                steps = f"{remove} and store the new one with {self._store()}; "
                steps += "or remove it and set `host_keys: accept-new`"
            else:
                steps = f"{remove} and try again"
            return self._refuse(
                HostKeyError(
                    f"host key of {self.name} has CHANGED: the host presents {_shown(key)}, but {known.where} "
                    f"has another {known.type} key. The machine was reinstalled, or another machine answers in its "
                    "place",
                    remedy=f"if it was reinstalled, {_compare(key)}, then {steps}",
                    code="host-key-changed",
                )
            )
        if self.mode in ("yes", "ask"):
            raise HostKeyError(
                f"host key of {self.name} is not known: {_shown(key)}",
                remedy=f"{_compare(key)}, then store the key with {self._store()}; or set `host_keys: accept-new`",
                code="host-key-unknown",
            )
        try:
            # The file is locked, as other threads and processes may append, too.
            path = self.files[0]
            line = f"{self.name} {key.get_name()} {key.get_base64()}"
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with path.open("a+", errors="surrogateescape") as file:  # comments in other encodings stay
                fcntl.flock(file, fcntl.LOCK_EX)
                file.seek(0)
                text = file.read()
                if line not in text.splitlines():
                    file.write(("\n" if text and not text.endswith("\n") else "") + line + "\n")
        except OSError as error:
            if self.mode == "no":
                return
            raise HostKeyError(
                f"host key of {self.name} is new and cannot be saved to {self.files[0]}: {error.strerror}",
                remedy="make that file writable, or set UserKnownHostsFile in ~/.ssh/config",
            ) from error

    def _refuse(self, error: HostKeyError) -> None:
        if self.mode != "no":
            raise error
        self.distrust = HostKeyError(
            f"{error.message}; no password was sent to it", remedy=error.remedy, code=error.code
        )

    def _store(self) -> str:
        # Without jump host and HostKeyAlias, ``ssh-keyscan`` works, too.
        host, port = self._resolved, "" if self._resolved.port == 22 else f"-p {self._resolved.port} "
        login = f"`ssh -o StrictHostKeyChecking=ask {port}{host.name}`"
        if host.jumps or host.proxy_command or host.key_alias:
            return login
        return f"`ssh-keyscan {port}{host.host} >> {self.files[0]}` or {login}"


def _compare(key: paramiko.PKey) -> str:
    kind = next((kind for kind in ("ed25519", "ecdsa", "rsa") if kind in key.get_name()), "*")
    return f"compare the fingerprint with `ssh-keygen -lf /etc/ssh/ssh_host_{kind}_key.pub` on the host's console"


def _shown(key: paramiko.PKey) -> str:
    return f"{key.get_name()} {key.fingerprint}"
