"""CURVE keys of a run: one keypair, shared by its servers and clients, in a file of mode 0600."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from trainer.errors import ServiceError

_RAW_KEY_BYTES = 32


@dataclass(frozen=True)
class CurveKeys:
    """A run's keypair in z85 (40 ASCII characters each)."""

    public: bytes
    secret: bytes = field(repr=False)

    def secure_client(self, socket: zmq.Socket[bytes]) -> None:
        """Make a connecting socket prove these keys and accept only a server that has them."""
        socket.curve_publickey, socket.curve_secretkey, socket.curve_serverkey = self.public, self.secret, self.public

    def secure_server(self, socket: zmq.Socket[bytes]) -> None:
        """Make a binding socket speak only CURVE with these keys; who may enter is the authenticator's choice."""
        socket.curve_publickey, socket.curve_secretkey, socket.curve_server = self.public, self.secret, True


class _OnlyThisKey:
    """Credentials provider for pyzmq's authenticator: admits one public key."""

    def __init__(self, public: bytes):
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        """``key`` is the peer's public key in z85."""
        return key == self._public


def start_authenticator(context: zmq.Context[zmq.Socket[bytes]], keys: CurveKeys) -> ThreadAuthenticator:
    """A running ZAP thread for all binding sockets of ``context``; ``stop()`` it before the context ends."""
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback("*", _OnlyThisKey(keys.public))
    return authenticator


def write_key_file(path: str | Path, keys: CurveKeys) -> None:
    """Write the keypair with mode 0600, whole or not at all."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump({"public": keys.public.decode(), "secret": keys.secret.decode()}, file)
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
        raise ServiceError(f"service key {path} cannot be read: {error}; the launcher writes it per run") from None
    if mode & 0o077:
        raise ServiceError(f"service key {path} has mode {mode:04o}, others may read it; run: chmod 600 {path}")
    return _parse(path, text)


def _parse(path: Path, text: str) -> CurveKeys:
    try:
        value = json.loads(text)
        keys = CurveKeys(value["public"].encode("ascii"), value["secret"].encode("ascii"))
        if [len(z85.decode(key)) for key in (keys.public, keys.secret)] != [_RAW_KEY_BYTES] * 2:
            raise ValueError("keys of another length")
        matching = zmq.curve_public(keys.secret) == keys.public
    except (ValueError, KeyError, TypeError, AttributeError, zmq.ZMQError) as error:
        raise ServiceError(f"service key {path} is no key file: {type(error).__name__}") from None
    if not matching:
        raise ServiceError(f"service key {path}: public and secret key do not belong together")
    return keys
