"""A raw connection to a graph server, on which tests send any bytes, valid or not."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

from trainer.core.errors import WireError
from trainer.service.service_keys import ServiceKeys
from trainer.service.stream import GREETING_BYTES, MessageReader, greeting


def framed(parts: Sequence[Any]) -> bytes:
    """Encode a message as bytes, without the trainer's encoder."""
    sizes = [len(part) for part in parts]
    return struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes) + b"".join(map(bytes, parts))


PING = framed([])


class RawPeer:
    """A context manager that connects and sends the greeting.

    Raises OSError or EOFError when the server closes the connection.
    """

    def __init__(self, endpoint: str, keys: ServiceKeys | None = None, *, greets: bool = True):
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        self.sock: socket.socket = socket.create_connection((host, int(port)), timeout=60)
        self._reader = MessageReader(1 << 32)
        if greets:
            self.sock.sendall(greeting(keys is not None))
            for _ in range(GREETING_BYTES):
                self.sock.recv(1)
        if keys is not None:
            self.sock = keys.client_context().wrap_socket(self.sock)

    def __enter__(self) -> RawPeer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.sock.close()

    def send(self, *parts: Any) -> None:
        self.sock.sendall(framed(parts))

    def receive(self, seconds: float) -> list[Any] | None:
        """Return the next non-empty message, or None on timeout or when the server has closed the connection."""
        until = time.monotonic() + seconds
        while True:
            while self._reader.messages:
                if frames := self._reader.messages.popleft().frames:
                    return frames
            self.sock.settimeout(max(1e-3, until - time.monotonic()))
            try:
                self._reader.read(self.sock.recv_into)
            except (OSError, EOFError, WireError):
                return None
            finally:
                self.sock.settimeout(60)

    def hung_up(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        self.sock.settimeout(0.1)
        while time.monotonic() < until:
            try:
                if not self.sock.recv(1 << 16):
                    return True
            except TimeoutError:
                continue
            except OSError:
                return True
        return False
