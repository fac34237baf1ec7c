"""Hosts of a benchmark: network namespaces where root can make them, else names for loopback."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from netns import NetCluster, unavailable

_PORTS = range(20_000, 30_000)  # below those that the kernel hands out


@dataclass(frozen=True)
class Place:
    """Where a host's processes run."""

    address: str
    enter: tuple[str, ...] = ()  #: words before a command that is to run there
    interface: str = "lo"
    wire: str = ""  #: this machine's end of the host's line; none on loopback

    @property
    def received(self) -> int:
        """Bytes that came over the host's line, headers included; 0 on loopback."""
        path = Path("/sys/class/net") / self.wire / "statistics/tx_bytes"  # sent at this end
        return int(path.read_text()) if self.wire else 0


@contextlib.contextmanager
def places(count: int) -> Iterator[list[Place]]:
    """So many hosts of this machine."""
    if unavailable():
        yield [Place("127.0.0.1")] * count
        return
    with NetCluster(count) as cluster:
        yield [
            Place(host.address, ("ip", "netns", "exec", host.name), host.machine.interface, host.name)
            for host in cluster.hosts
        ]


def free_ports(count: int) -> list[int]:
    """Ports nobody here listens on, all different."""
    found: list[int] = []
    for port in _PORTS:
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(port)
        if len(found) == count:
            return found
    raise RuntimeError(f"no {count} free ports among {_PORTS}")
