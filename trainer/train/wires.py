"""The connections of a process group, so that a collective that waits for a vanished host can be made to fail.

gloo's ``ProcessGroup.abort()`` leaves collectives that are under way alone (torch 2.13), and they wait for the
group's timeout. A connection that is shut down fails them at once, here and at the other end.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Wires:
    """TCP connections of this process: (descriptor, inode), so that a descriptor used anew is told from them."""

    sockets: frozenset[tuple[int, int]] = frozenset()

    def cut(self) -> None:
        """Shut down those that are still open; may be done twice, and from any thread."""
        for descriptor, inode in self.sockets:
            with suppress(OSError), _held(descriptor) as held:  # closed since, or by the other end
                if os.fstat(held.fileno()).st_ino == inode:
                    held.shutdown(socket.SHUT_RDWR)


def wires_made_by(connect: Callable[[], T], store_port: int) -> tuple[T, Wires]:
    """What ``connect`` returns, and the connections that are new after it; those of a store at ``store_port`` left out.

    A connection that another thread makes meanwhile counts as well. Those of the graph service are
    made anew when they break.
    """
    before = set(_connections(store_port))
    made = connect()
    return made, Wires(frozenset(_connections(store_port)) - before)


def _connections(but_port: int) -> Iterator[tuple[int, int]]:
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), _held(int(name)) as held:  # no socket, or not connected
            if held.family in (socket.AF_INET, socket.AF_INET6) and held.type == socket.SOCK_STREAM:
                if but_port not in (held.getsockname()[1], held.getpeername()[1]):
                    yield int(name), os.fstat(held.fileno()).st_ino


@contextmanager
def _held(descriptor: int) -> Iterator[socket.socket]:
    """A descriptor's socket, which stays the same meanwhile whatever is closed. Raises ``OSError`` if it is none."""
    copy = os.dup(descriptor)
    try:
        held = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    with held:
        yield held
