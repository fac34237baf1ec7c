"""Which of several graph servers to ask: the first while it lives, else the next one that does."""

from __future__ import annotations

import threading
import time

from trainer.core.errors import ServerGone
from trainer.service.client import HostClient


class ServerChoice:
    """Servers in the order in which they are asked, home first, and which of them are gone. Thread-safe."""

    def __init__(self, home: HostClient, *others: HostClient):
        self._clients = [home, *others]
        self._gone: dict[HostClient, ServerGone] = {}
        self._changed = threading.Condition()
        self._closed = False

    @property
    def all(self) -> tuple[HostClient, ...]:
        with self._changed:
            return tuple(self._clients)

    @property
    def gone(self) -> tuple[HostClient, ...]:
        """Those that are to be asked whether they are back."""
        with self._changed:
            return tuple(self._gone)

    def pick(self, until: float) -> HostClient | None:
        """The first living server; waits for one while ``time.monotonic()`` is below ``until``, then None.

        None at once after ``close()``.
        """
        with self._changed:
            while not self._closed:
                for client in self._clients:
                    if client not in self._gone:
                        return client
                if not self._changed.wait(max(0.0, until - time.monotonic())):
                    break
            return None

    def lost(self, client: HostClient, error: ServerGone) -> None:
        """Ask others from now on."""
        with self._changed:
            self._gone.setdefault(client, error)

    def back(self, client: HostClient) -> None:
        """It answers again."""
        with self._changed:
            if self._gone.pop(client, None):
                self._changed.notify_all()

    def join(self, client: HostClient) -> None:
        """One more, to be asked last."""
        with self._changed:
            self._clients.append(client)
            self._changed.notify_all()

    def close(self) -> None:
        """Wake those who wait."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def why(self, waited: float) -> str:
        """What is wrong with each server that is gone, one per line, after ``waited`` seconds."""
        with self._changed:
            return "\n".join(f"{error}; it was not back within {waited:g} s" for error in self._gone.values())
