"""Tests of messages on the wire: they arrive unchanged, and malformed messages are refused."""

from __future__ import annotations

import dataclasses
import random

import msgspec
import numpy as np
import pytest

from requests_kit import PLAIN, hops_of_every_kind
from trainer.core.errors import ServiceError, WireError
from trainer.sampler.requests import SampleHops
from trainer.service.messages import Hello
from trainer.wire import frames as wire
from trainer.wire.frames import Kind, Message, Status, decode, encode

ARRAYS = (
    np.arange(12, dtype=np.int64).reshape(3, 4),
    np.array([True, False]),
    np.array(7.5, np.float32),
    np.empty((0, 5), np.float16),
    np.arange(24, dtype=">i4").reshape(2, 3, 4)[:, ::2],
    np.arange(3, dtype=np.uint8),
    np.arange(9000, dtype=np.uint16).reshape(3, -1),
    np.array([1 + 2j, -3j], np.complex64),
    np.ones((2, 1, 3, 1, 2, 1, 1, 2), np.complex128) * 1j,
    np.arange(2000, dtype=np.float64),
    np.empty((7, 0)),
)
LARGE = np.arange(2000)  #: large enough for its own frame


def sent(message: Message, **limits: int) -> list[bytes]:
    return [bytes(frame) for frame in encode(message, **limits)]


def message(*arrays: np.ndarray, body: bytes = b"") -> Message:
    return Message(Kind.GATHER, Status.REQUEST, 2**64 - 1, arrays, body)


def test_round_trip_of_every_field() -> None:
    frames = sent(message(*ARRAYS, body=b"12345"))
    assert len(frames) == 3  # the head and the two arrays over 4096 bytes
    back = decode(frames)
    assert (back.kind, back.status, back.request_id, back.body) == (Kind.GATHER, Status.REQUEST, 2**64 - 1, b"12345")
    for there, here in zip(back.arrays, ARRAYS, strict=True):
        assert there.dtype == here.dtype.newbyteorder("<") and there.shape == here.shape
        assert there.flags.aligned
        np.testing.assert_array_equal(there, here)


@pytest.mark.parametrize("seed", range(8))
def test_round_trip_of_random_messages(seed: int) -> None:
    rng = np.random.default_rng(seed)
    arrays = []
    for _ in range(rng.integers(0, 300)):
        shape = rng.integers(0, 5, rng.integers(0, 9))
        dtype = wire._DTYPE_OF_CODE[rng.integers(len(wire._DTYPE_OF_CODE))]
        arrays.append(rng.integers(0, 2, shape).astype(dtype))
    frames = sent(message(*arrays, body=rng.bytes(rng.integers(9))))
    for there, here in zip(decode(frames).arrays, arrays, strict=True):
        assert there.dtype == here.dtype
        np.testing.assert_array_equal(there, here)


def test_as_many_arrays_as_allowed_and_no_more() -> None:
    most = [np.array([k]) for k in range(wire.MAX_ARRAYS)]
    frames = sent(message(*most))
    assert len(frames) == 1 and len(frames[0]) <= wire.MAX_HEAD
    assert [int(array[0]) for array in decode(frames).arrays] == list(range(wire.MAX_ARRAYS))
    with pytest.raises(WireError, match="4097 arrays.*too many for one message"):
        encode(message(*most, most[0]))
    with pytest.raises(WireError, match="too many for one message"):
        encode(message(body=bytes(wire.MAX_BODY + 1)))


def test_large_arrays_are_not_copied_to_be_sent_or_received() -> None:
    frames = encode(message(LARGE))
    assert np.shares_memory(frames[1], LARGE)
    assert np.shares_memory(decode(frames).arrays[0], LARGE)


def test_received_small_arrays_may_be_written_to() -> None:
    assert decode(sent(message(np.arange(3)))).arrays[0].flags.writeable


def test_unaligned_frames_give_aligned_arrays() -> None:
    head, body = sent(message(LARGE))
    back = decode([head, memoryview(b"x" + body)[1:]]).arrays[0]
    assert back.flags.aligned
    np.testing.assert_array_equal(back, LARGE)


@pytest.mark.parametrize(
    "array",
    [
        np.array(["a"]),
        np.array([object()]),
        np.zeros((1,) * 9),
        np.array(["2020"], "M8[D]"),
        np.array([1], np.longdouble),
    ],
)
def test_unsupported_arrays_are_refused_when_sent(array: np.ndarray) -> None:
    with pytest.raises(WireError, match="cannot be sent"):
        encode(message(array))


def test_messages_over_the_limit_are_refused_when_sent() -> None:
    with pytest.raises(WireError, match="fewer nodes"):
        encode(message(np.zeros(101, np.uint8)), max_array=100)


def damaged() -> dict[str, list[bytes]]:
    head, body = sent(message(LARGE, np.arange(4), body=b"x"))
    header, descriptor = wire._HEADER.size, wire._DESCRIPTOR.size

    def patched(offset: int, new: bytes) -> list[bytes]:
        return [head[:offset] + new + head[offset + len(new) :], body]

    def of_array(number: int, offset: int, new: bytes) -> list[bytes]:
        return patched(header + number * descriptor + offset, new)

    return {
        "no frames": [],
        "empty": [b""],
        "short head": [head[:20], body],
        "cut in the descriptors": [head[: header + descriptor], body],
        "cut in the small arrays": [head[:-1], body],
        "long head": [head + b"!", body],
        "huge head": [head + bytes(wire.MAX_HEAD), body],
        "frame missing": [head],
        "frame too many": [head, body, body],
        "body short": [head, body[:-1]],
        "body long": [head, body + b"\0"],
        "magic": patched(0, b"GNFX"),
        "version 1": patched(4, b"\x01\0"),
        "kind": patched(6, b"\x63"),
        "status": patched(7, b"\x63"),
        "array count": patched(16, b"\xff\xff\xff\xff"),
        "fewer arrays": patched(16, b"\x01"),
        "body length": patched(20, b"\xff\xff\xff\xff"),
        "unknown flag": patched(24, b"\x08"),
        "dtype code": of_array(0, 0, b"\x7f"),
        "ndim": of_array(0, 1, b"\x09"),
        "padding": of_array(0, 2, b"\x01"),
        "last byte of padding": of_array(1, 7, b"\x01"),
        "shape": of_array(0, 8, b"\x05"),
        "small shape": of_array(1, 8, b"\x05"),
        "huge shape": of_array(0, 8, b"\xff" * 8),
        "shape beyond ndim": of_array(0, 16, b"\x01"),
        "empty of huge shape": [head[: header + descriptor] + b"\x04\x02" + bytes(6) + bytes(8) + b"\xff" * 8
                                + bytes(48) + head[header + 2 * descriptor : header + 2 * descriptor + 1], body],
    }  # fmt: skip


@pytest.mark.parametrize("name", damaged())
def test_damaged_messages_raise_wire_error(name: str) -> None:
    with pytest.raises(WireError):
        decode(damaged()[name])
    assert issubclass(WireError, ServiceError)


def test_messages_over_the_limit_are_refused_on_receipt() -> None:
    frames = sent(message(np.zeros(1000, np.uint8)))
    assert len(decode(frames, max_array=1000).arrays[0]) == 1000
    with pytest.raises(WireError):
        decode(frames, max_array=999)


def test_random_damage_never_raises_anything_else() -> None:
    rng = random.Random(0)
    asked = [*hops_of_every_kind()[::7], dataclasses.replace(PLAIN, nodes=LARGE)]
    frames = sent(SampleHops(asked).message())
    refused = 0
    for _ in range(1500):
        mutant = [bytearray(frame) for frame in frames]
        for _ in range(rng.randint(1, 6)):
            target = rng.choice(mutant[:1] if rng.random() < 0.8 else mutant)
            target[rng.randrange(len(target))] = rng.randrange(256)
        if rng.random() < 0.2:
            mutant[rng.randrange(len(mutant))] = bytearray(rng.randbytes(rng.randrange(300)))
        try:
            SampleHops.read(decode([bytes(frame) for frame in mutant]))
        except WireError:
            refused += 1
    assert refused > 750


def test_a_long_error_is_truncated_and_readable() -> None:
    error = decode(sent(message().error("ü" * 100_000)))
    assert error.status == Status.ERROR
    assert error.failure.cause.startswith("üüü") and len(error.failure.cause) < 100_000


@pytest.mark.parametrize("value", [None, [], {}, {"node_rank": "x"}, "nonsense", 3.5])
def test_an_invalid_hello_is_refused(value: object) -> None:
    for body in (msgspec.msgpack.encode(value), b"", b"\xc1", b"\x91" * 100_000):
        with pytest.raises(WireError):
            Hello().read_reply(Message(Kind.HELLO, Status.OK, 1, (), body))
