"""Large arrays in pieces and compressed: as sent, or refused before memory is taken."""

from __future__ import annotations

import tracemalloc
import zlib

import numpy as np
import pytest

from trainer.errors import WireError
from trainer.service import wire
from trainer.service.wire import CHUNK, Flag, Kind, Message, Status, decode, encode

SMOOTH = np.cumsum(np.random.default_rng(0).integers(0, 9, 400_000)).astype(np.int32)  #: 1.6 MB, two frames
NOISE = np.random.default_rng(1).integers(0, 255, 10_000).astype(np.uint8)


def answer(*arrays: np.ndarray) -> Message:
    return Message(Kind.GATHER, Status.OK, 5, arrays)


def sent(message: Message, **options) -> list[bytes]:
    return [bytes(frame) for frame in encode(message, **options)]


@pytest.mark.parametrize("size", [CHUNK, CHUNK + 1, 3 * CHUNK, 3 * CHUNK - 8])
def test_no_frame_is_larger_than_a_chunk(size: int) -> None:
    whole = np.random.default_rng(size).integers(0, 255, size).astype(np.uint8)
    head, *frames = encode(answer(whole, NOISE))
    assert len(frames) == -(-size // CHUNK) + 1 and max(map(len, frames)) == CHUNK
    assert all(np.shares_memory(frame, whole) for frame in frames[:-1])  # nothing is copied to be sent
    back = decode([head, *map(bytes, frames)])
    np.testing.assert_array_equal(back.arrays[0], whole)
    assert back.size == size + len(NOISE) + len(head)


def test_pieces_that_do_not_fit_are_refused() -> None:
    head, first, last = sent(answer(SMOOTH))
    for wrong in ([head, last, first], [head, first], [head, first, last, b""], [head, first + last],
                  [head, first[:-1], last + b"x"], [head, first, last[:-1]]):  # fmt: skip
        with pytest.raises(WireError):
            decode(wrong)
    np.testing.assert_array_equal(decode([head, first, last]).arrays[0], SMOOTH)


@pytest.mark.parametrize(
    "array",
    [
        SMOOTH, SMOOTH.astype(np.float64).reshape(4, -1), np.arange(20_000) % 2 == 0, np.zeros((700, 3), np.complex128),
        np.arange(5000).astype(np.float16), np.arange(40_000, dtype=np.uint16)[::2],
    ],
)  # fmt: skip
def test_compressed_answers_are_smaller_and_come_back_bit_for_bit(array: np.ndarray) -> None:
    message = answer(array, NOISE, np.arange(3))
    frames = sent(message, compress=True)
    back = decode(frames)
    assert back.size == sum(map(len, frames)) < sum(map(len, sent(message)))
    for there, here in zip(back.arrays, message.arrays, strict=True):
        assert there.dtype == here.dtype
        np.testing.assert_array_equal(there, here)


def test_what_would_not_shrink_is_sent_as_it_is() -> None:
    noise = np.random.default_rng(2).integers(0, 2**64, 5000, np.uint64)
    assert sent(answer(noise), compress=True) == sent(answer(noise))


def test_flags_of_a_request_arrive() -> None:
    for flags in (Flag.NONE, Flag.ROUTE, Flag.COMPRESS, Flag.ROUTE | Flag.COMPRESS):
        asked = Message(Kind.BATCH, Status.REQUEST, 1, flags=flags)
        assert decode(sent(asked)) == asked


def bombs() -> dict[str, list[bytes]]:
    """An answer that announces 1.6 MB, with other things in its frames than these compressed."""
    head, body = sent(answer(SMOOTH), compress=True)
    size = wire._HEADER.size + 3

    def packed(blob: bytes) -> list[bytes]:
        patched = head[:size] + len(blob).to_bytes(5, "little") + head[size + 5 :]
        return [patched, *(blob[at : at + CHUNK] for at in range(0, len(blob), CHUNK))]

    return {
        "a bomb": packed(zlib.compress(bytes(20 << 20))),
        "one byte more": packed(zlib.compress(bytes(SMOOTH.nbytes + 1))),
        "one byte less": packed(zlib.compress(bytes(SMOOTH.nbytes - 1))),
        "cut": packed(body[:-20]),
        "followed by more": packed(body + b"more"),
        "no zlib": packed(b"x" * 1000),
        "larger than plain": packed(bytes(SMOOTH.nbytes)),
        "nothing": packed(b""),
    }


@pytest.mark.parametrize("name", bombs())
def test_what_does_not_decompress_to_the_announced_size_is_refused(name: str) -> None:
    frames = bombs()[name]
    tracemalloc.start()
    try:
        with pytest.raises(WireError):
            decode(frames)
        assert tracemalloc.get_traced_memory()[1] < 4 * SMOOTH.nbytes
    finally:
        tracemalloc.stop()


def test_a_message_that_is_too_large_altogether_is_refused() -> None:
    frames = sent(answer(SMOOTH, SMOOTH), compress=True)
    assert len(decode(frames, max_message=2 * SMOOTH.nbytes).arrays) == 2
    with pytest.raises(WireError, match=f"arrays of {2 * SMOOTH.nbytes} bytes"):
        decode(frames, max_message=2 * SMOOTH.nbytes - 1)
