"""CURVE keys: a key pair in a file of mode 0600, and whom a server admits.

A run's servers and trainers share one pair. A server also admits the public keys in ``clients/*.key`` beside its own
key file, one in z85 per line: those of runs and notebooks that are attached to a serving cluster.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from trainer.core.errors import ServiceError

_RAW_KEY_BYTES, _Z85_KEY_BYTES = 32, 40

_GUESTS = "clients"

_REREAD = 0.5  #: seconds

_MAX_GUEST_FILE = 1 << 20  #: bytes


@dataclass(frozen=True)
class CurveKeys:
    """A key pair in z85 (40 ASCII characters each), and what else its file says."""

    public: bytes
    secret: bytes = field(repr=False)
    server: bytes = b""  #: public key of the servers; empty: our own, as in a run of its own
    endpoints: tuple[str, ...] = ()  #: of the servers, in a key file for a notebook
    name: str = ""  #: of the serving cluster they belong to
    guests: Path | None = field(default=None, compare=False)  #: folder of further public keys that a server admits

    def secure_client(self, socket: zmq.Socket[bytes]) -> None:
        """Make a connecting socket prove these keys and accept only a server that has ``server``'s."""
        socket.curve_publickey, socket.curve_secretkey = self.public, self.secret
        socket.curve_serverkey = self.server or self.public

    def secure_server(self, socket: zmq.Socket[bytes]) -> None:
        """Make a binding socket speak only CURVE with these keys; who may enter is the authenticator's choice."""
        socket.curve_publickey, socket.curve_secretkey, socket.curve_server = self.public, self.secret, True


class Admission:
    """Whom a server lets in, as pyzmq's authenticator asks: its own key, and the keys in a folder as it is now."""

    def __init__(self, keys: CurveKeys):
        self._keys = keys
        self._guests: frozenset[bytes] = frozenset()
        self._read_at = -math.inf

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether the peer with public key ``key`` (z85) may enter. Called by the authenticator's thread only."""
        return key == self._keys.public or key in self._now()

    def _now(self) -> frozenset[bytes]:
        """The guests' keys, at most ``_REREAD`` seconds old, so that a flood of strangers costs little."""
        if time.monotonic() - self._read_at >= _REREAD:
            self._guests, self._read_at = _guest_keys(self._keys.guests), time.monotonic()
        return self._guests


def _guest_keys(folder: Path | None) -> frozenset[bytes]:
    """Keys of all readable files; a damaged line admits nobody."""
    found: set[bytes] = set()
    for path in sorted(folder.glob("*.key")) if folder is not None else ():
        try:
            lines = path.read_bytes()[:_MAX_GUEST_FILE].split()
        except OSError as error:  # removed just now, or not ours to read
            print(f"key file {path} of a client cannot be read: {error.strerror}", file=sys.stderr, flush=True)
            continue
        found.update(line for line in lines if len(line) == _Z85_KEY_BYTES)
    return frozenset(found)


def admit_guest(key_file: str | Path, name: str, public: bytes) -> Path:
    """Have the servers with this key file admit ``public`` from now on (within a second); delete the file to revoke."""
    path = Path(key_file).parent / _GUESTS / f"{name}.key"
    path.parent.mkdir(mode=0o700, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    temporary.write_bytes(public + b"\n")
    temporary.replace(path)
    return path


def start_authenticator(context: zmq.Context[zmq.Socket[bytes]], keys: CurveKeys) -> ThreadAuthenticator:
    """A running ZAP thread for all binding sockets of ``context``; ``stop()`` it before the context ends."""
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback("*", Admission(keys))
    return authenticator


def write_key_file(path: str | Path, keys: CurveKeys) -> None:
    """Write the keypair with mode 0600, whole or not at all."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(_fields(keys), file)
    temporary.replace(path)


def read_key_file(path: str | Path) -> CurveKeys:
    """Read a keypair.

    Raises ``ServiceError`` when the file is missing, readable by others, or no matching keypair.
    """
    path = Path(path)
    try:
        mode = path.stat().st_mode & 0o777
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ServiceError(
            f"service key {path} cannot be read: {why}; the launcher writes that of a run, and `gnnfleet serve key "
            "NAME -o FILE` one for a notebook"
        ) from None
    if mode & 0o077:
        raise ServiceError(f"service key {path} has mode {mode:04o}, others may read it; run: chmod 600 {path}")
    return _parse(path, text)


def _fields(keys: CurveKeys) -> dict[str, object]:
    """What a key file says; the optional fields only where they say something."""
    fields: dict[str, object] = {"public": keys.public.decode(), "secret": keys.secret.decode()}
    optional = {"server": keys.server.decode(), "endpoints": list(keys.endpoints), "name": keys.name}
    return fields | {name: value for name, value in optional.items() if value}


def _parse(path: Path, text: str) -> CurveKeys:
    try:
        value = json.loads(text)
        public, secret, server = (value.get(name, "").encode("ascii") for name in ("public", "secret", "server"))
        if {len(z85.decode(key)) for key in (public, secret, server or public)} != {_RAW_KEY_BYTES}:
            raise ValueError("keys of another length")
        matching = zmq.curve_public(secret) == public
        endpoints = tuple(map(str, value.get("endpoints", ())))
        keys = CurveKeys(public, secret, server, endpoints, str(value.get("name", "")), path.parent / _GUESTS)
    except (ValueError, KeyError, TypeError, AttributeError, zmq.ZMQError) as error:
        raise ServiceError(f"service key {path} is no key file: {type(error).__name__}") from None
    if not matching:
        raise ServiceError(f"service key {path}: public and secret key do not belong together")
    return keys
