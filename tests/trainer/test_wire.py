"""Messages survive the wire unchanged, and nothing else is accepted."""

from __future__ import annotations

import random

import numpy as np
import pytest

from trainer.errors import ServiceError, WireError
from trainer.sample.types import HopRequest, HopSample
from trainer.service import protocol, wire
from trainer.service.wire import Kind, Message, Status, decode, encode

ARRAYS = (
    np.arange(12, dtype=np.int64).reshape(3, 4),
    np.array([True, False]),
    np.array(7.5, np.float32),
    np.empty((0, 5), np.float16),
    np.arange(24, dtype=">i4").reshape(2, 3, 4)[:, ::2],
    np.arange(3, dtype=np.uint8),
)


def sent(message: Message, **limits: int) -> list[bytes]:
    return [bytes(frame) for frame in encode(message, **limits)]


def message(*arrays: np.ndarray, text: str = "") -> Message:
    return Message(Kind.GATHER, Status.REQUEST, 2**64 - 1, arrays, text, fanout=-1, shuffle=5, key=2**64 - 2, flags=3)


def test_round_trip_of_every_field() -> None:
    back = decode(sent(message(*ARRAYS, text="größe\ny")))
    assert (back.kind, back.status, back.request_id, back.text) == (Kind.GATHER, Status.REQUEST, 2**64 - 1, "größe\ny")
    assert (back.fanout, back.shuffle, back.key, back.flags) == (-1, 5, 2**64 - 2, 3)
    for there, here in zip(back.arrays, ARRAYS, strict=True):
        assert there.dtype == here.dtype.newbyteorder("<") and there.shape == here.shape
        np.testing.assert_array_equal(there, here)


def test_arrays_are_not_copied_to_be_sent_or_received() -> None:
    array = np.arange(1000)
    frames = encode(message(array))
    assert np.shares_memory(frames[1], array)
    assert np.shares_memory(decode(frames).arrays[0], array)


def test_unaligned_frames_give_aligned_arrays() -> None:
    head, body = sent(message(np.arange(9)))
    back = decode([head, memoryview(b"x" + body)[1:]]).arrays[0]
    assert back.flags.aligned
    np.testing.assert_array_equal(back, np.arange(9))


@pytest.mark.parametrize(
    "array", [np.array(["a"]), np.array([object()]), np.array([1j]), np.zeros((1,) * 5), np.array(["2020"], "M8[D]")]
)
def test_refuses_to_send_other_arrays(array: np.ndarray) -> None:
    with pytest.raises(WireError, match="cannot be sent"):
        encode(message(array))


def test_refuses_to_send_beyond_the_limit() -> None:
    with pytest.raises(WireError, match="fewer nodes"):
        encode(message(np.zeros(101, np.uint8)), max_frame=100)


def damaged() -> dict[str, list[bytes]]:
    head, body = sent(message(np.arange(4), text="x"))
    descriptor = wire._HEADER.size

    def patched(offset: int, new: bytes) -> list[bytes]:
        return [head[:offset] + new + head[offset + len(new) :], body]

    return {
        "no frames": [],
        "empty": [b""],
        "short head": [head[:20], body],
        "long head": [head + b"!", body],
        "huge head": [head + bytes(wire.MAX_HEAD), body],
        "frame missing": [head],
        "frame too many": [head, body, body],
        "body short": [head, body[:-1]],
        "body long": [head, body + b"\0"],
        "magic": patched(0, b"GNFX"),
        "version": patched(4, b"\x09\0"),
        "kind": patched(6, b"\x63"),
        "status": patched(7, b"\x63"),
        "array count": patched(16, b"\xff\xff"),
        "text length": patched(20, b"\xff\xff\xff\xff"),
        "text not UTF-8": patched(len(head) - 1, b"\xff"),
        "dtype code": patched(descriptor, b"\x7f"),
        "ndim": patched(descriptor + 1, b"\x05"),
        "padding": patched(descriptor + 2, b"\x01"),
        "shape": patched(descriptor + 8, b"\x05"),
        "huge shape": patched(descriptor + 8, b"\xff" * 8),
        "shape beyond ndim": patched(descriptor + 16, b"\x01"),
        "empty of huge shape": [head[: descriptor + 1] + b"\x02" + head[descriptor + 2 : descriptor + 8] + bytes(8)
                                + b"\xff" * 8 + head[descriptor + 24 :], b""],
    }  # fmt: skip


@pytest.mark.parametrize("name", damaged())
def test_damaged_messages_raise_wire_error(name: str) -> None:
    with pytest.raises(WireError):
        decode(damaged()[name])
    assert issubclass(WireError, ServiceError)


def test_larger_than_allowed_is_refused() -> None:
    frames = sent(message(np.zeros(1000, np.uint8)))
    assert len(decode(frames, max_frame=1000).arrays[0]) == 1000
    with pytest.raises(WireError):
        decode(frames, max_frame=999)


def test_random_damage_never_raises_anything_else() -> None:
    rng = random.Random(0)
    frames = sent(message(np.arange(50), np.ones((4, 3), np.float32), text="x\ny"))
    refused = 0
    for _ in range(5000):
        mutant = [bytearray(frame) for frame in frames]
        for _ in range(rng.randint(1, 6)):
            target = rng.choice(mutant[:1] if rng.random() < 0.8 else mutant)
            target[rng.randrange(len(target))] = rng.randrange(256)
        if rng.random() < 0.2:
            mutant[rng.randrange(len(mutant))] = bytearray(rng.randbytes(rng.randrange(300)))
        try:
            decode([bytes(frame) for frame in mutant])
        except WireError:
            refused += 1
    assert refused > 2000


@pytest.mark.parametrize("top", [5, 2**31 - 1, 2**31, 2**62])
def test_requests_and_samples_round_trip_at_any_id_width(top: int) -> None:
    nodes = np.array([top, 0, 3], np.int64)
    request = HopRequest(nodes, 7, 3, key=2**64 - 1, replace=True, with_edge_id=True)
    frames = sent(protocol.sample_request(request))
    assert len(frames[1]) == (12 if top < 2**31 else 24)
    back = protocol.read_sample_request(decode(frames))
    assert back.nodes.dtype == np.int64 and back.nodes.flags.writeable
    assert (back.nodes.tolist(), back.fanout, back.shuffle, back.key) == (nodes.tolist(), 7, 3, 2**64 - 1)
    assert back.replace and back.with_edge_id
    sample = HopSample(np.array([2, 0, 1], np.int32), nodes, np.array([1, 2, top]))
    reply = decode(sent(decode(frames).reply(protocol.sample_arrays(sample))))
    answer = protocol.read_sample(reply, 3, True)
    assert answer.edge_id is not None and answer.edge_id.tolist() == [1, 2, top]
    assert (answer.counts.tolist(), answer.src.tolist()) == ([2, 0, 1], nodes.tolist())


@pytest.mark.parametrize("fields", [{"fanout": -2}, {"fanout": 2**31}, {"shuffle": -1}, {"flags": 4}])
def test_requests_out_of_range_are_refused(fields: dict[str, int]) -> None:
    request = Message(Kind.SAMPLE_HOP, Status.REQUEST, 1, (np.arange(3),), **fields)
    with pytest.raises(WireError):
        protocol.read_sample_request(request)


def test_answers_that_do_not_fit_the_request_are_refused() -> None:
    def reply(*arrays: np.ndarray) -> Message:
        return Message(Kind.SAMPLE_HOP, Status.OK, 1, arrays)

    counts, src = np.array([1, 2], np.int32), np.arange(3)
    protocol.read_sample(reply(counts, src), 2, False)
    for arrays in [(counts,), (counts, src[:2]), (counts[:1], src), (counts, src, src), (counts, src * 1.0)]:
        with pytest.raises(WireError):
            protocol.read_sample(reply(*arrays), 2, False)
    with pytest.raises(WireError):
        protocol.read_rows(reply(np.ones((2, 4))), 3, ["x"])


def test_a_long_error_is_cut_and_still_readable() -> None:
    error = decode(sent(message().error("ü" * 100_000)))
    assert error.status == Status.ERROR and error.text.startswith("üüü") and len(error.text) < 100_000


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"node_rank": "x"}', "nonsense"])
def test_hello_that_is_none(text: str) -> None:
    with pytest.raises(WireError):
        protocol.read_hello(Message(Kind.HELLO, Status.OK, 1, (), text))
