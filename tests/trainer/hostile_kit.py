"""Hostile messages for a graph server, and a process that sends them: ``python hostile_kit.py ATTACK``, as JSON."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import zmq

from trainer.core.schema import HOMO_EDGE, HOMO_NODE
from trainer.sampler.subgraph_sampler import BatchWork
from trainer.sampler.types import HopRequest, RowRequest, SampleSettings, SeedSet
from trainer.service.curve_keys import CurveKeys, read_key_file
from trainer.service.wire import batch_messages, hop_messages, messages
from trainer.service.wire import frames as wire
from trainer.service.wire.frames import Flag, Kind, Message, Status, encode

Frames = list[bytes]

HEADER = struct.Struct("<4sHBBQIIII")  #: as ``wire`` draws it, written anew here
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
    """What one process sends."""

    endpoint: str
    seed: int
    count: int  #: messages
    key_file: str | None = None  #: of the run: messages get in; None: a stranger
    server_key: str = ""  #: the server's public key, which a stranger may know
    reads: bool = True  #: takes the answers off the line
    glutton: bool = False  #: asks for large answers and takes none, till it is ended


def valid_requests(num_nodes: int) -> list[Message]:
    """Requests of every kind that a server answers, small ones and some with frames of their own."""
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
        Message(Kind.HELLO, Status.REQUEST, 0),
        Message(Kind.STATS, Status.REQUEST, 0),
        hop_messages.sample_request(
            [hop, replace(hop, nodes=many, with_edge=True), replace(hop, fanout=-1, replace=True)]
        ),
        hop_messages.sample_request([replace(hop, exclude=(nodes, nodes), sources=np.sort(nodes), trees=nodes)]),
        messages.gather_request([RowRequest(HOMO_NODE, nodes, ("x", "y")), RowRequest(HOMO_EDGE, nodes, ("orig_id",))]),
        messages.gather_request([RowRequest(HOMO_NODE, many, ("x",))]),
        messages.has_edges_request(HOMO_EDGE, nodes, nodes[::-1]),
        messages.edges_request(0, HOMO_EDGE, 0, 50),
        Message(Kind.MANIFEST, Status.REQUEST, 0),
        messages.shared_request(messages.SharedSlice(HOMO_NODE, "train", 0, 10)),
        messages.to_global_request(HOMO_NODE, nodes),
        messages.taken(5),
        batch_messages.batch_request(work, name),
        batch_messages.batch_request(replace(work, seeds=SeedSet({HOMO_NODE: many})), name),
        batch_messages.batch_request(induced, name),
    ]  # fmt: skip
    routed = [replace(message, flags=Flag.ROUTE) for message in found]
    return found + routed + [replace(message, flags=Flag.ROUTE | Flag.INT8) for message in found]


class Forge:
    """Hostile messages without end, from a seed."""

    def __init__(self, seed: int, num_nodes: int):
        self._random = random.Random(seed)
        self._valid = [[bytes(frame) for frame in encode(message)] for message in valid_requests(num_nodes)]
        ids = tuple(np.array([place]) for place in range(wire.MAX_ARRAYS))
        kinds = (Kind.GATHER, Kind.SAMPLE, Kind.BATCH, Kind.TO_GLOBAL)
        crowds = [encode(Message(kind, Status.REQUEST, 1, ids, "x", bytes(24))) for kind in kinds]
        self._crowds = [[bytes(frame) for frame in frames] for frames in crowds]
        self._kinds: list[Callable[[], Frames]] = [
            self.noise, self.cut, self.flipped, self.wrong_header, self.wrong_descriptor, self.wrong_records,
            self.shuffled, self.bomb, self.reply, self.crowd, self.one_way, self.as_it_is,
        ]  # fmt: skip

    def message(self) -> Frames:
        return self._random.choice(self._kinds)()

    def noise(self) -> Frames:
        """Random bytes, some behind our magic."""
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
        """Other kinds, statuses and versions, giant counts."""
        frames, _ = self._some()
        fields = list(HEADER.unpack_from(frames[0]))
        for place in self._random.sample(range(1, 9), self._random.randint(1, 2)):
            bits = (16, 8, 8, 64, 32, 32, 32, 32)[place - 1]
            fields[place] = self._random.choice((*range(16), *EXTREMES)) % 2**bits
        frames[0] = HEADER.pack(*fields) + frames[0][HEADER.size :]
        return frames

    def wrong_descriptor(self) -> Frames:
        """Giant and negative shapes, unknown dtypes, arrays that are elsewhere than announced."""
        frames = next(frames for frames in self._shuffled_valid() if HEADER.unpack_from(frames[0])[5])
        head = bytearray(frames[0])
        begin = HEADER.size + DESCRIPTOR_BYTES * self._random.randrange(HEADER.unpack_from(head)[5])
        if self._random.random() < 0.5:
            head[begin + self._random.randrange(8)] = self._random.randrange(256)
        else:
            dim = begin + 8 + 8 * self._random.randrange(8)
            head[dim : dim + 8] = (self._random.choice(EXTREMES) % 2**64).to_bytes(8, "little")
        return [bytes(head), *frames[1:]]

    def wrong_records(self) -> Frames:
        """Places, fanouts, counts and ids that are not there."""
        frames = next(frames for frames in self._shuffled_valid() if HEADER.unpack_from(frames[0])[6])
        head = bytearray(frames[0])
        fields = HEADER.unpack_from(head)
        begin = HEADER.size + DESCRIPTOR_BYTES * fields[5]
        for _ in range(self._random.randint(1, 3)):
            at = begin + 4 * self._random.randrange(fields[6] // 4)
            size = self._random.choice((4, 8))
            head[at : at + size] = (self._random.choice(EXTREMES) % 2 ** (8 * size)).to_bytes(size, "little")
        return [bytes(head), *frames[1:]]

    def shuffled(self) -> Frames:
        """Frames too many, too few, twice, or in another order."""
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
        """An array that is announced far larger than what is sent."""
        announced = self._random.choice((5000, 2**20, 2**28, 2**30, 2**32))
        kind = self._random.choice((Kind.GATHER, Kind.BATCH, Kind.SAMPLE))
        head = HEADER.pack(b"GNFS", wire.VERSION, kind, 0, 1, 1, 0, 0, int(Flag.ROUTE))
        described = struct.pack("<BB6x8Q", 5, 1, announced, *[0] * 7)
        return [head + described, *[bytes(wire.CHUNK)] * self._random.randint(0, 3)]

    def reply(self) -> Frames:
        """An answer, sent to a server."""
        frames, _ = self._some()
        fields = list(HEADER.unpack_from(frames[0]))
        fields[3] = self._random.choice((1, 2))
        return [HEADER.pack(*fields) + frames[0][HEADER.size :], *frames[1:]]

    def crowd(self) -> Frames:
        """As many arrays as there may be, or a lot of empty frames."""
        if self._random.random() < 0.95:
            return [b""] * self._random.choice((2, 64, 1000))
        return self._random.choice(self._crowds)

    def one_way(self) -> Frames:
        """TAKEN of batches of others, and what only servers say."""
        kind = self._random.choice((Kind.TAKEN, Kind.ALIVE))
        number = self._random.choice((*range(9), 2**64 - 1, self._random.getrandbits(64)))
        return [HEADER.pack(b"GNFS", wire.VERSION, kind, self._random.randrange(3), number, 0, 0, 0, 0)]

    def as_it_is(self) -> Frames:
        """Nothing is wrong with it, but nobody may want the answer."""
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
    """A process that attacks; it prints one JSON line when it is done: messages, connections, seconds."""
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
    """From sockets that have the run's key, at speed. The number of connections."""
    forge, context, sent, rounds = Forge(attack.seed, num_nodes), zmq.Context(), 0, 0
    keys = read_key_file(attack.key_file) if attack.key_file else None
    while sent < attack.count:
        rounds += 1
        pool = [forge.message() for _ in range(min(POOL, attack.count))]
        with _dealer(context, attack.endpoint, keys, 30_000) as line:
            for number in range(min(10 * POOL, attack.count - sent)):
                line.send_multipart(pool[number % len(pool)])
                sent += 1
                while attack.reads and line.poll(0):
                    line.recv_multipart(copy=False)
    context.term()  # once all of it is on the wire
    return rounds


def send_as_glutton(attack: Attack, num_nodes: int) -> None:
    """Large answers are asked for and left on the line, which stays open. Never returns."""
    ids = np.arange(20_000) % num_nodes
    gather = messages.gather_request([RowRequest(HOMO_NODE, ids, ("x",))])
    greed = [gather, replace(gather, flags=Flag.ROUTE), messages.edges_request(0, HOMO_EDGE, 0, 4000)]
    context = zmq.Context()
    with _dealer(context, attack.endpoint, read_key_file(str(attack.key_file)), rcvhwm=1) as line:
        for number in range(attack.count):
            line.send_multipart(encode(greed[number % len(greed)], request_id=number))
        time.sleep(600)


def send_as_stranger(attack: Attack) -> int:
    """From sockets that have no key, a wrong one, or do not even speak ZMTP. The number of connections."""
    chance, sent, connections = random.Random(attack.seed), 0, 0
    host, port = attack.endpoint.removeprefix("tcp://").split(":")
    context, open_ones = zmq.Context(), []
    while sent < attack.count:
        connections += 1
        if chance.random() < 0.2:
            sent += _wrong_keys(context, attack, chance)
            continue
        line = socket.create_connection((host, int(port)), timeout=5)
        payload, number = _payload(chance)
        with contextlib.suppress(OSError):  # the server hangs up while we still talk
            line.sendall(payload)
        sent += number
        open_ones.append(line)  # half of them are left open for a while
        if chance.random() < 0.5 or len(open_ones) > 200:
            open_ones.pop(chance.randrange(len(open_ones))).close()
    context.destroy(linger=0)
    return connections


def _payload(chance: random.Random) -> tuple[bytes, int]:
    """What a stranger's TCP connection says, and how many messages that is."""
    greeting = (
        b"\xff"
        + bytes(8)
        + b"\x7f\x03\x01"
        + chance.choice((b"NULL", b"CURVE", b"PLAIN", b"HUGE")).ljust(20, b"\0")
        + bytes(32)
    )
    hello = b"\x04\xc8\x05HELLO\x01\x00" + chance.randbytes(192)
    frames = [
        bytes([chance.randrange(2), len(body)]) + body
        for body in (chance.randbytes(chance.randrange(250)) for _ in range(20))
    ]
    giant = b"\x02" + (2**62).to_bytes(8, "big") + chance.randbytes(100)
    return chance.choice(
        (
            (chance.randbytes(chance.randrange(2000)), 1),
            (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", 1),
            (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + chance.randbytes(500), 1),
            (greeting[: chance.randrange(64)], 1),
            (b"", 1),
            (greeting + hello, 1),
            (greeting + b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER" + b"".join(frames), len(frames)),
            (greeting + giant, 1),
        )
    )


def _wrong_keys(context: zmq.Context[zmq.Socket[bytes]], attack: Attack, chance: random.Random) -> int:
    """A socket without keys, with those of nobody, or of nobody but knowing the server's: its number of messages."""
    server = chance.choice((b"", attack.server_key.encode()))
    keys = CurveKeys(*zmq.curve_keypair(), server=server) if chance.random() < 0.8 else None
    with _dealer(context, attack.endpoint, keys) as line:
        with contextlib.suppress(zmq.Again):  # refused so soon that there is no line any more
            for _ in range(20):
                line.send_multipart([chance.randbytes(40)], zmq.NOBLOCK)
        time.sleep(0.01)
    return 20


@contextlib.contextmanager
def _dealer(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str, keys: CurveKeys | None, linger: int = 0, rcvhwm: int = 1000
) -> Iterator[zmq.Socket[bytes]]:
    line = context.socket(zmq.DEALER)
    line.linger, line.rcvhwm = linger, rcvhwm
    if keys is not None:
        keys.secure_client(line)
    line.connect(endpoint)
    try:
        yield line
    finally:
        line.close()


def main(text: str) -> None:
    attack = Attack(**json.loads(text))
    begun = time.monotonic()
    if attack.glutton:
        send_as_glutton(attack, 2000)
    stranger = attack.key_file is None
    connections = send_as_stranger(attack) if stranger else send_as_insider(attack, 2000)
    print(json.dumps({"messages": attack.count, "connections": connections, "seconds": time.monotonic() - begun}))


if __name__ == "__main__":
    main(sys.argv[1])
