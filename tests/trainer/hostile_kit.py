"""Hostile messages for a graph server, and a program that sends them.

Run as ``python hostile_kit.py ATTACK``, with an ``Attack`` as JSON.
"""

from __future__ import annotations

import contextlib
import functools
import json
import random
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from launcher.plan.service_key import new_key_pair
from raw_peer import RawPeer, framed
from trainer.core.schema import HOMO_EDGE, HOMO_NODE
from trainer.sampler.requests import Endpoints, Gather, HasEdges, SampleHops
from trainer.sampler.subgraph_sampler import BatchWork
from trainer.sampler.types import HopRequest, RowRequest, SampleSettings, SeedSet
from trainer.service import messages
from trainer.service.messages import BatchRequest
from trainer.service.service_keys import ServiceKeys, read_key_file
from trainer.service.stream import greeting
from trainer.wire import frames as wire
from trainer.wire.frames import Flag, Kind, Message, Status, encode

Frames = list[bytes]

HEADER = struct.Struct("<4sHBBQIII")  #: written independently of the header in ``trainer.wire``
DESCRIPTOR_BYTES = 8 + 8 * 8
POOL = 3000  #: messages made at a time; each is sent several times
EXTREMES = (
    -(2**63),
    -(2**31),
    -2,
    -1,
    0,
    1,
    2,
    7,
    64,
    1025,
    4097,
    2**20 + 1,
    2**31 - 1,
    2**31,
    2**40,
    2**62,
    2**63 - 1,
)


@dataclass(frozen=True)
class Attack:
    endpoint: str
    seed: int
    count: int  #: number of messages
    key_file: str | None = None  #: key file of the run; None without encryption, or for a stranger
    stranger: bool = False  #: whether the process has no key, or does not follow the protocol of clients
    server_key: str = ""  #: the server's public key, which a stranger may know
    reads: bool = True  #: whether the process reads the replies
    glutton: bool = False  #: whether the process requests large replies and reads none, until it is killed


def valid_requests(num_nodes: int) -> list[Message]:
    nodes, many = np.array([3, 0, num_nodes - 1]), np.arange(1500) % num_nodes
    hop = HopRequest(HOMO_EDGE, nodes, 3, 1, 2**64 - 1)
    settings = SampleSettings({HOMO_EDGE: (3, 2)}, edge_ids=True)
    work = BatchWork(
        settings, SeedSet({HOMO_NODE: nodes}, {HOMO_NODE: nodes}), 7, {HOMO_NODE: ("x",)}, (HOMO_NODE, ("y",))
    )
    induced = replace(
        work, settings=replace(settings, induced=True, disjoint=True), seeds=SeedSet({HOMO_NODE: many[:40]})
    )
    name = messages.ClientName(2**63 + 1, "stranger")
    found = [
        messages.Hello(),
        messages.Stats(),
        SampleHops([hop, replace(hop, nodes=many, with_edge=True), replace(hop, fanout=-1, replace=True)]),
        SampleHops([replace(hop, exclude=(nodes, nodes), sources=np.sort(nodes), trees=nodes)]),
        Gather([RowRequest(HOMO_NODE, nodes, ("x", "y")), RowRequest(HOMO_EDGE, nodes, ("orig_id",))]),
        Gather([RowRequest(HOMO_NODE, many, ("x",))]),
        HasEdges(HOMO_EDGE, nodes, nodes[::-1]),
        Endpoints(HOMO_EDGE, nodes),
        Endpoints(HOMO_EDGE, nodes - 2**40),
        messages.ManifestText(),
        messages.SharedSlice(HOMO_NODE, "train", 0, 10),
        messages.ToGlobal(HOMO_NODE, nodes),
        BatchRequest(work, name),
        BatchRequest(replace(work, seeds=SeedSet({HOMO_NODE: many})), name),
        BatchRequest(induced, name),
    ]
    found = [messages.acknowledgement(5), *(request.message() for request in found)]
    routed = [replace(message, flags=Flag.ROUTE) for message in found]
    return found + routed + [replace(message, flags=Flag.ROUTE | Flag.INT8) for message in found]


class Forge:
    def __init__(self, seed: int, num_nodes: int):
        self._random = random.Random(seed)
        self._valid = [[bytes(frame) for frame in encode(message)] for message in valid_requests(num_nodes)]
        ids = tuple(np.array([place]) for place in range(wire.MAX_ARRAYS))
        kinds = (Kind.GATHER, Kind.SAMPLE, Kind.BATCH, Kind.TO_GLOBAL)
        crowds = [encode(Message(kind, Status.REQUEST, 1, ids, bytes(24))) for kind in kinds]
        self._crowds = [[bytes(frame) for frame in frames] for frames in crowds]
        self._kinds: list[Callable[[], Frames]] = [
            self.noise, self.cut, self.flipped, self.wrong_header, self.wrong_descriptor, self.wrong_body,
            self.shuffled, self.bomb, self.reply, self.crowd, self.one_way, self.as_it_is,
        ]  # fmt: skip

    def message(self) -> Frames:
        return self._random.choice(self._kinds)()

    def bytes_sent(self) -> bytes:
        """Return a message as sent over a connection, sometimes with wrong frame sizes."""
        parts = self.message()
        data = framed(parts)
        if self._random.random() < 0.1:
            sizes = [self._random.choice((len(part), *EXTREMES)) % 2**64 for part in parts[:50]]
            data = struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes) + b"".join(parts[:50])
        return data

    def polite(self) -> bytes:
        """Return a message that the server answers, possibly with an error."""
        make = self._random.choice((self.as_it_is, self.as_it_is, self.wrong_body))
        return framed(make())

    def noise(self) -> Frames:
        """Return random bytes, sometimes after the protocol's magic number."""
        frames = [
            self._random.randbytes(self._random.choice((0, 1, 7, 36, 500))) for _ in range(self._random.randint(1, 4))
        ]
        return [b"GNFS" + frames[0], *frames[1:]] if self._random.random() < 0.3 else frames

    def cut(self) -> Frames:
        frames, place = self._some()
        frames[place] = frames[place][: self._random.randrange(len(frames[place]) + 1)]
        return frames

    def flipped(self) -> Frames:
        frames, place = self._some()
        changed = bytearray(frames[place])
        for _ in range(self._random.randint(1, 8)):
            changed[self._random.randrange(len(changed))] ^= 1 << self._random.randrange(8)
        frames[place] = bytes(changed)
        return frames

    def wrong_header(self) -> Frames:
        frames, _ = self._some()
        fields = list(HEADER.unpack_from(frames[0]))
        for place in self._random.sample(range(1, 8), self._random.randint(1, 2)):
            bits = (16, 8, 8, 64, 32, 32, 32)[place - 1]
            fields[place] = self._random.choice((*range(16), *EXTREMES)) % 2**bits
        frames[0] = HEADER.pack(*fields) + frames[0][HEADER.size :]
        return frames

    def wrong_descriptor(self) -> Frames:
        frames = next(frames for frames in self._shuffled_valid() if HEADER.unpack_from(frames[0])[5])
        head = bytearray(frames[0])
        begin = HEADER.size + DESCRIPTOR_BYTES * self._random.randrange(HEADER.unpack_from(head)[5])
        if self._random.random() < 0.5:
            head[begin + self._random.randrange(8)] = self._random.randrange(256)
        else:
            dim = begin + 8 + 8 * self._random.randrange(8)
            head[dim : dim + 8] = (self._random.choice(EXTREMES) % 2**64).to_bytes(8, "little")
        return [bytes(head), *frames[1:]]

    def wrong_body(self) -> Frames:
        frames = next(frames for frames in self._shuffled_valid() if HEADER.unpack_from(frames[0])[6])
        head = bytearray(frames[0])
        fields = HEADER.unpack_from(head)
        begin = HEADER.size + DESCRIPTOR_BYTES * fields[5]
        for _ in range(self._random.randint(1, 3)):
            at = begin + self._random.randrange(fields[6])
            size = min(self._random.choice((1, 1, 4, 8)), begin + fields[6] - at)
            head[at : at + size] = (self._random.choice(EXTREMES) % 2 ** (8 * size)).to_bytes(size, "big")
        return [bytes(head), *frames[1:]]

    def shuffled(self) -> Frames:
        frames, place = self._some()
        choice = self._random.randrange(4)
        if choice == 0:
            frames.insert(place, self._random.randbytes(self._random.choice((0, 1, 5000))))
        elif choice == 1:
            frames.insert(place, frames[place])
        elif choice == 2 and len(frames) > 1:
            frames.pop(place)
        else:
            self._random.shuffle(frames)
            frames.append(b"")
        return frames

    def bomb(self) -> Frames:
        """Return a request whose header describes an array that is usually far larger than the bytes sent after it."""
        announced = self._random.choice((5000, 2**20, 2**28, 2**30, 2**32))
        kind = self._random.choice((Kind.GATHER, Kind.BATCH, Kind.SAMPLE))
        head = HEADER.pack(b"GNFS", wire.VERSION, kind, 0, 1, 1, 0, int(Flag.ROUTE))
        described = struct.pack("<BB6x8Q", 5, 1, announced, *[0] * 7)
        return [head + described, *[bytes(1 << 20)] * self._random.randint(0, 3)]

    def reply(self) -> Frames:
        """Return a request whose header says that it is a reply."""
        frames, _ = self._some()
        fields = list(HEADER.unpack_from(frames[0]))
        fields[3] = self._random.choice((1, 2))
        return [HEADER.pack(*fields) + frames[0][HEADER.size :], *frames[1:]]

    def crowd(self) -> Frames:
        """Return a message of many empty frames or, rarely, with as many arrays as a message may have."""
        if self._random.random() < 0.95:
            return [b""] * self._random.choice((2, 64, 1000))
        return self._random.choice(self._crowds)

    def one_way(self) -> Frames:
        """Return a message that is no request: ACK, or ALIVE, which only servers send."""
        kind = self._random.choice((Kind.ACK, Kind.ALIVE))
        number = self._random.choice((*range(9), 2**64 - 1, self._random.getrandbits(64)))
        return [HEADER.pack(b"GNFS", wire.VERSION, kind, self._random.randrange(3), number, 0, 0, 0)]

    def as_it_is(self) -> Frames:
        return self._some()[0]

    def _some(self) -> tuple[Frames, int]:
        frames = list(self._random.choice(self._valid))
        return frames, self._random.randrange(len(frames))

    def _shuffled_valid(self) -> Iterator[Frames]:
        while True:
            yield self._some()[0]


# -- the sending process ---------------------------------------------------


@contextlib.contextmanager
def attacking(attack: Attack) -> Iterator[subprocess.Popen[str]]:
    """Start an attacking process, and kill it at the end of the context.

    When done, it prints one JSON line with the number of messages, connections and seconds.
    """
    argv = [sys.executable, __file__, json.dumps(asdict(attack))]
    path = ":".join((str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)))
    process = subprocess.Popen(
        argv, stdout=subprocess.PIPE, text=True, env={"PYTHONPATH": path, "PATH": "/usr/bin:/bin"}
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=10)


def send_as_insider(attack: Attack, num_nodes: int) -> int:
    """Attack over connections that the server admits. Return the number of connections."""
    # each connection sends up to 59 well-framed messages, and one whose frame sizes may be wrong
    forge, chance, sent, connections = Forge(attack.seed, num_nodes), random.Random(attack.seed), 0, 0
    keys = read_key_file(attack.key_file) if attack.key_file else None
    while sent < attack.count:
        if connections % 1000 == 0:
            polite, rude = ([make() for _ in range(POOL // 4)] for make in (forge.polite, forge.bytes_sent))
        connections += 1
        with contextlib.suppress(OSError, EOFError), RawPeer(attack.endpoint, keys) as peer:
            for number in range(chance.randrange(60)):
                sent += 1
                peer.sock.sendall(polite[chance.randrange(len(polite))])
                if attack.reads and number % 8 == 0:
                    peer.receive(0.001)
            sent += 1
            peer.sock.sendall(rude[chance.randrange(len(rude))])
            peer.receive(0.02)
    return connections


def send_as_glutton(attack: Attack, num_nodes: int) -> None:
    """Request large replies over connections that stay open, and read none. Never returns."""
    ids = np.arange(20_000) % num_nodes
    gather = Gather([RowRequest(HOMO_NODE, ids, ("x",))]).message()
    greed = [gather, replace(gather, flags=Flag.ROUTE), Endpoints(HOMO_EDGE, np.arange(4000)).message()]
    keys = read_key_file(attack.key_file) if attack.key_file else None
    while True:
        with contextlib.suppress(OSError, EOFError), contextlib.ExitStack() as lines:
            peers = [lines.enter_context(RawPeer(attack.endpoint, keys)) for _ in range(10)]
            for number in range(attack.count):
                peers[number % len(peers)].send(*encode(greed[number % len(greed)], request_id=number))
            time.sleep(600)


def send_as_stranger(attack: Attack) -> int:
    """Attack without a key, with a wrong one, or in another protocol. Returns the number of connections."""
    chance, sent, connections = random.Random(attack.seed), 0, 0
    open_peers: list[RawPeer] = []
    while sent < attack.count:
        connections += 1
        payload, number = _payload(chance)
        sent += number
        with contextlib.suppress(OSError, EOFError):  # the server closes the connection while this side still sends
            if chance.random() < 0.2:
                with RawPeer(attack.endpoint, _wrong_keys(attack, chance)) as peer:
                    peer.send(payload)
                    peer.receive(0.01)
                continue
            peer = RawPeer(attack.endpoint, greets=False)
            open_peers.append(peer)  # half of them are left open for a while
            peer.sock.sendall(payload)
        if open_peers and (chance.random() < 0.5 or len(open_peers) > 200):
            open_peers.pop(chance.randrange(len(open_peers))).close()
    return connections


def _payload(chance: random.Random) -> tuple[bytes, int]:
    plain, encrypted = greeting(False), greeting(True)
    some = [framed([chance.randbytes(chance.randrange(250))]) for _ in range(20)]
    hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + chance.randbytes(500)
    giant = struct.pack("<IQ", 1, 2**62) + chance.randbytes(100)
    return chance.choice(
        (
            (chance.randbytes(chance.randrange(2000)), 1),
            (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", 1),
            (plain[: chance.randrange(8)], 1),
            (b"", 1),
            (hello, 1),
            (encrypted + hello, 1),
            (encrypted + hello[: chance.randrange(300)], 1),
            (chance.choice((plain, encrypted)) + b"".join(some), len(some)),
            (chance.choice((plain, encrypted)) + giant, 1),
            (plain + struct.pack("<I", 0) * 5000, 5000),
        )
    )


def _wrong_keys(attack: Attack, chance: random.Random) -> ServiceKeys:
    own = chance.choice(_strangers_keys())
    return replace(own, server=chance.choice((own.public, attack.server_key or own.public)))


@functools.cache
def _strangers_keys() -> list[ServiceKeys]:
    return [ServiceKeys(**new_key_pair()) for _ in range(5)]


def main(text: str) -> None:
    attack = Attack(**json.loads(text))
    begun = time.monotonic()
    if attack.glutton:
        send_as_glutton(attack, 2000)
    stranger = attack.stranger
    connections = send_as_stranger(attack) if stranger else send_as_insider(attack, 2000)
    print(json.dumps({"messages": attack.count, "connections": connections, "seconds": time.monotonic() - begun}))


if __name__ == "__main__":
    main(sys.argv[1])
