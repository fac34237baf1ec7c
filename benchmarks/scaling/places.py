"""Simulated hosts of a benchmark: network namespaces if this user may make them, else all on the loopback."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from netns import NetCluster, unavailable

_PORTS = range(20_000, 30_000)  # below the ports that the kernel chooses


@dataclass(frozen=True)
class Place:
    """How to start processes of a simulated host, and how to reach them."""

    address: str
    enter: tuple[str, ...] = ()  #: prefix of a command that runs it on the host
    interface: str = "lo"
    wire: str = ""  #: this machine's end of the host's virtual Ethernet pair; '' on loopback

    @property
    def received(self) -> int:
        """Bytes that the host has received from the network, including headers, or 0 on loopback."""
        path = Path("/sys/class/net") / self.wire / "statistics/tx_bytes"  # bytes sent at this machine's end
        return int(path.read_text()) if self.wire else 0


@contextlib.contextmanager
def places(count: int) -> Iterator[list[Place]]:
    if unavailable():
        yield [Place("127.0.0.1")] * count
        return
    with NetCluster(count) as cluster:
        yield [
            Place(host.address, ("ip", "netns", "exec", host.name), host.machine.interface, host.name)
            for host in cluster.hosts
        ]


def free_ports(count: int) -> list[int]:
    found: list[int] = []
    for port in _PORTS:
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(port)
        if len(found) == count:
            return found
    raise RuntimeError(f"no {count} free ports among {_PORTS}")
