"""Measures the connections between supervisors for growing runs: work and traffic of the hub, in one second.

One process is the hub of the run; another one has all members, which report their state once a second over real
connections on loopback, as supervisors do. No rank and no supervisor runs.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import click

HERE = Path(__file__).resolve().parent
if __name__ == "__main__":
    sys.path[:0] = [str(HERE), str(HERE.parent)]

from launcher.node.child_process import Loop  # noqa: E402
from launcher.node.peers.hub import Hub  # noqa: E402
from launcher.node.peers.member import Member  # noqa: E402
from launcher.node.spec import NodeSpec, RunNode  # noqa: E402
from table import Row, show  # noqa: E402

BEAT = 1.0  # seconds between two reports, as in launcher.node.supervisor.supervisor
TURN = 0.2
MEASURED = 20.0  # seconds; with 1,000 nodes each gets the table of all nodes every 16 s
VITALS = {"step": 12345, "epoch": 3, "loss": 1.2345678, "steps_per_s": 8.1234, "t": 1700000000.123}


class Load(NamedTuple):
    """Load of the hub while all members are connected; rates per second."""

    cpu: float  #: share of a core
    sent: float  #: bytes
    received: float  #: bytes
    up: float  #: seconds until all members were connected
    latest: float  #: largest seconds since a member was heard


def run(small: bool) -> list[Row]:
    return [row for nodes in ((8,) if small else (64, 200, 1000)) for row in rows(nodes)]


def rows(nodes: int) -> Iterator[Row]:
    for roles in ("worker", "server"):
        load = measure(nodes, roles)
        name = f"{nodes} {roles}s"
        yield Row(f"{name}: CPU of the hub", 100 * load.cpu, "% of a core")
        yield Row(f"{name}: sent by the hub", load.sent / 1e3, "kB/s")
        yield Row(f"{name}: received by the hub", load.received / 1e3, "kB/s")
        yield Row(f"{name}: until all are connected", load.up, "s")
        yield Row(f"{name}: longest silence of a member", load.latest, "s")


def measure(nodes: int, roles: str) -> Load:
    """Return the load of the hub of a run of ``nodes``: half of them servers with ``roles`` "server", else workers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    everyone = tuple(
        RunNode(
            f"node{k} (alice@gpu{k:04}.lab)",
            "server" if roles == "server" and k % 2 else "worker",
            parts=(k, (k + 1) % nodes),
            address="127.0.0.1",
            bind="127.0.0.1",
            control_port=port,
        )
        for k in range(nodes)
    )
    specs = [NodeSpec("r1", "5ecret", k, "", everyone, None, None, 600.0, 1.0, peer_timeout=60.0) for k in range(nodes)]
    context = get_context("fork")
    process = context.Process(target=be_members, args=(specs[1:],), daemon=True)
    process.start()
    try:
        return be_hub(specs[0])
    finally:
        process.kill()
        process.join()


def be_hub(spec: NodeSpec) -> Load:
    loop = Loop()
    hub = Hub(spec, loop)
    begun = time.monotonic()
    hub.open()
    beat, traffic = Beat([hub]), Traffic(hub)

    def turn() -> None:
        loop.poll(TURN)
        hub.look()
        beat.look()

    while any(member.heard is None for member in hub.members.values()):
        turn()
    up = time.monotonic() - begun
    settled = time.monotonic() + 2.0
    while time.monotonic() < settled:
        turn()
    cpu, (sent, received), since = time.process_time(), traffic.look(), time.monotonic()
    latest = latest_at = 0.0
    while (seconds := time.monotonic() - since) < MEASURED:
        turn()
        if seconds > latest_at + BEAT:
            latest_at = seconds
            traffic.look()
            latest = max(latest, max(time.monotonic() - (member.heard or 0) for member in hub.members.values()))
    cpu, (now_sent, now_received) = time.process_time() - cpu, traffic.look()
    hub.close()
    return Load(cpu / seconds, (now_sent - sent) / seconds, (now_received - received) / seconds, up, latest)


def be_members(specs: Sequence[NodeSpec]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    loop = Loop()
    members = [Member(spec, loop) for spec in specs]
    for member in members:
        member.open()
    beat = Beat(members)
    looked = 0.0
    while True:
        loop.poll(TURN / 4)
        if time.monotonic() - looked > TURN:
            looked = time.monotonic()
            for member in members:
                member.look()
        beat.look()


class Beat:
    """Lets hub or members report their state once per second, members one after another within the second."""

    def __init__(self, peers: Sequence[Any]):
        self.peers, begun = peers, time.monotonic()
        self.next = [begun + BEAT * k / len(peers) for k in range(len(peers))]
        self.place = 0

    def look(self) -> None:
        now = time.monotonic()
        while self.next[self.place] <= now:
            self.next[self.place] = max(now, self.next[self.place] + BEAT)
            peer = self.peers[self.place]
            if isinstance(peer, Hub):
                _ = peer.table, peer.spare, peer.gone  # written to state.json
            peer.report(report_of(peer.spec.node_rank))
            self.place = (self.place + 1) % len(self.peers)


def report_of(k: int) -> dict[str, Any]:
    ranks = {str(4 * k + local): VITALS for local in range(4)}
    own = {"state": "training", "trained": False, "final": None, "cause": None, "ranks": ranks, "findings": []}
    return {**own, "stacks": None, "waits": {}, "own_ranks": [4 * k + local for local in range(4)]}


class Traffic:
    """Bytes sent and received by the hub's connections, from TCP_INFO of Linux; also by those that were replaced."""

    def __init__(self, hub: Hub):
        self.hub, self.links = hub, {}  # type: Hub, dict[Any, tuple[int, int]]

    def look(self) -> tuple[int, int]:
        """Return all bytes sent and received until now."""
        for link in [member.link for member in self.hub.members.values() if member.link is not None]:
            info = link._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            acked, received = info[120:128], info[128:136]  # tcpi_bytes_acked, tcpi_bytes_received
            self.links[link] = int.from_bytes(acked, sys.byteorder), int.from_bytes(received, sys.byteorder)
        return sum(sent for sent, _ in self.links.values()), sum(received for _, received in self.links.values())


@click.command(help=__doc__)
@click.option("--nodes", multiple=True, type=int, help="Number of nodes, repeatable; default: 64, 200 and 1000.")
def main(nodes: tuple[int, ...]) -> None:
    found = [row for number in nodes or (64, 200, 1000) for row in rows(number)]
    show(f"heartbeats, load {os.getloadavg()[0]:.1f}", found)


if __name__ == "__main__":
    main()
