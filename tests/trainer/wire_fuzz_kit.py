"""Fuzzer for messages between graph servers and clients, and for byte streams.

Run ``requests``, ``replies`` and ``streams`` in separate processes, because compiled code could crash a process.
Each of them prints ``done TRIED REFUSED``: the number of cases and the number of refused cases.
"""

from __future__ import annotations

import io
import random
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from hostile_kit import Forge, Frames, valid_requests
from raw_peer import PING, framed
from trainer.core.errors import TrainerError, WireError
from trainer.sampler.dist_graph import DistGraph
from trainer.sampler.local_graph import LocalGraph
from trainer.service import messages
from trainer.service.handlers import REQUESTS, Handlers, is_long
from trainer.service.messages import BatchRequest
from trainer.service.stream import MessageReader
from trainer.store.part_store import open_parts
from trainer.wire.frames import Kind, Message, Status, decode, encode

LIMIT = 1 << 24  #: bytes of an answer, and of a message that a reader buffers
SLOWEST = 30.0  #: longest time of one case, seconds


def make_handlers(folder: Path) -> tuple[Handlers, int]:
    """Return the handlers of a server with all parts, and the number of nodes."""
    graph = LocalGraph(open_parts(folder))
    manifest = graph.store.manifest
    info = messages.HelloInfo(0, "host", (0, 1), "digest")
    stats = messages.ServerStats(0, 0, 0, 0, 0, 0, {})
    handlers = Handlers(graph, info, lambda: stats, lambda: (1, ()), LIMIT, DistGraph(graph, {}))
    return handlers, next(iter(manifest.nodes.values())).num_nodes


def answer(handlers: Handlers, request: Message) -> Message:
    if request.status != Status.REQUEST or request.kind in (Kind.ALIVE, Kind.ACK):
        raise WireError("the message is not a request")
    if request.kind == Kind.BATCH:
        return handlers.batch(request, BatchRequest.read(request))
    return handlers.routed_answer(request) if is_long(request) else handlers.short(request)


def cases(seed: int, seconds: float) -> Iterator[tuple[str, random.Random]]:
    """Yield (name, random generator) of new cases until ``seconds`` have passed.

    Raises AssertionError if a case takes longer than ``SLOWEST`` seconds.
    """
    until, number = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        number += 1
        began = time.monotonic()
        yield f"case {number} of seed {seed}", random.Random(f"{seed} {number}")
        assert time.monotonic() - began < SLOWEST, f"case {number} of seed {seed} took too long"


def requests(folder: Path, seed: int, seconds: float) -> None:
    """Send damaged requests to a server: each gives a reply, or an error with a message."""
    handlers, num_nodes = make_handlers(folder)
    forge, tried, refused = Forge(seed, num_nodes), 0, 0
    for case, _ in cases(seed, seconds):
        frames = forge.message()
        tried += 1
        try:
            reply = answer(handlers, decode(frames, LIMIT, LIMIT))
            encode(reply, LIMIT)
        except TrainerError as error:
            assert str(error).strip(), f"{case}: no message"
            refused += 1
        except Exception as error:
            raise AssertionError(f"{case}: {error!r} for {shown(frames)}") from error
    print("done", tried, refused)


def replies(folder: Path, seed: int, seconds: float) -> None:
    """Give damaged replies to a client: each gives a value, or an error with a message."""
    handlers, num_nodes = make_handlers(folder)
    answered = []
    for request in valid_requests(num_nodes):
        with suppress(TrainerError):  # some are well-formed and refused
            frames = [bytes(frame) for frame in encode(answer(handlers, request), LIMIT)]
            answered.append((REQUESTS[request.kind].read(request).read_reply, frames))
    assert len(answered) > 10
    tried = refused = 0
    for case, draw in cases(seed, seconds):
        read, whole = draw.choice(answered)
        frames = damaged(draw, whole, draw.choice(answered)[1])
        tried += 1
        try:
            message = decode(frames, LIMIT, LIMIT)
            if message.status == Status.OK:
                read(message)
        except TrainerError as error:
            assert str(error).strip(), f"{case}: no message"
            refused += 1
        except Exception as error:
            raise AssertionError(f"{case}: {error!r} for {shown(frames)}") from error
    print("done", tried, refused)


def damaged(draw: random.Random, frames: Frames, other: Frames) -> Frames:
    frames = list(frames)
    for _ in range(draw.choice((1, 1, 2, 4))):
        place = draw.randrange(len(frames))
        frame, kind = bytearray(frames[place]), draw.randrange(6)
        if kind == 0:
            frames[place] = bytes(frame[: draw.randrange(len(frame) + 1)])
        elif kind == 1 and frame:
            frame[draw.randrange(len(frame))] ^= 1 << draw.randrange(8)
            frames[place] = bytes(frame)
        elif kind == 2 and len(frame) >= 8:
            size = draw.choice((1, 2, 4, 8))
            at = draw.randrange(len(frame) - size + 1)
            value = draw.choice((0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1, draw.getrandbits(64)))
            frame[at : at + size] = (value % 2 ** (8 * size)).to_bytes(size, "little")
            frames[place] = bytes(frame)
        elif kind == 3:
            frames[place] = draw.choice(other)
        elif kind == 4:
            frames.insert(place, draw.choice((b"", draw.randbytes(40), frames[place])))
        elif len(frames) > 1:
            frames.pop(place)
    return frames


class Pieces:
    """Returns ``data`` in pieces of random sizes, as a socket does."""

    def __init__(self, data: bytes, draw: random.Random):
        self._data, self._draw = io.BytesIO(data), draw

    def receive(self, target: memoryview) -> int:
        return self._data.readinto(target[: self._draw.choice((1, 7, 1000, 1 << 20))])


def streams(folder: Path, seed: int, seconds: float) -> None:
    """Feed damaged byte streams in pieces: each gives messages or ``WireError``."""
    forge, tried, refused = Forge(seed, 100), 0, 0
    for case, draw in cases(seed, seconds):
        sent = [forge.as_it_is() for _ in range(draw.randint(1, 4))]
        data = b"".join(framed(frames) + PING * draw.randrange(3) for frames in sent)
        if draw.random() < 0.8:
            data = b"".join(damaged(draw, [data], [framed(forge.message())]))
        reader, source = MessageReader(draw.choice((0, 100, LIMIT))), Pieces(data, draw)
        tried += 1
        try:
            while True:
                reader.read(source.receive)
                assert reader.partial <= 2 * LIMIT, f"{case}: {reader.partial} bytes are kept"
                reader.messages.clear()
        except EOFError:
            pass
        except WireError as error:
            assert str(error).strip(), f"{case}: no message"
            refused += 1
        except Exception as error:
            raise AssertionError(f"{case}: {error!r} for {data[:300]!r}") from error
    print("done", tried, refused)


def shown(frames: Frames) -> str:
    return str([frame[:200].hex() for frame in frames[:5]])
