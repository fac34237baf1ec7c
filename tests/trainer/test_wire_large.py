"""Tests of large arrays, each sent in a separate frame, and of wrong frame sizes."""

from __future__ import annotations

import numpy as np
import pytest

from trainer.core.errors import WireError
from trainer.wire.frames import SMALL, Flag, Kind, Message, Status, decode, encode

SMOOTH = np.cumsum(np.random.default_rng(0).integers(0, 9, 400_000)).astype(np.int32)  #: 1.6 MB
NOISE = np.random.default_rng(1).integers(0, 255, 10_000).astype(np.uint8)


def answer(*arrays: np.ndarray) -> Message:
    return Message(Kind.GATHER, Status.OK, 5, arrays)


def sent(message: Message) -> list[bytes]:
    return [bytes(frame) for frame in encode(message)]


@pytest.mark.parametrize("size", [SMALL + 1, 3 << 20])
def test_a_large_array_is_sent_as_its_own_frame(size: int) -> None:
    whole = np.random.default_rng(size).integers(0, 255, size).astype(np.uint8)
    head, *parts = encode(answer(whole, NOISE[:SMALL], NOISE))
    assert list(map(len, parts)) == [size, len(NOISE)]
    assert np.shares_memory(parts[0], whole)  # sending does not copy
    back = decode([head, *map(bytes, parts)])
    np.testing.assert_array_equal(back.arrays[0], whole)
    assert back.size == size + len(NOISE) + len(head)


def test_frames_of_wrong_size_are_refused() -> None:
    head, first, last = sent(answer(SMOOTH, NOISE))
    for wrong in ([head, last, first], [head, first], [head, first, last, b""], [head, first + last],
                  [head, first[:-1], last + b"x"], [head, first, last[:-1]]):  # fmt: skip
        with pytest.raises(WireError):
            decode(wrong)
    np.testing.assert_array_equal(decode([head, first, last]).arrays[0], SMOOTH)


def test_flags_of_a_request_arrive() -> None:
    for flags in (Flag.NONE, Flag.ROUTE, Flag.FLOAT16, Flag.ROUTE | Flag.INT8):
        asked = Message(Kind.BATCH, Status.REQUEST, 1, flags=flags)
        assert decode(sent(asked)) == asked


def test_a_message_over_the_total_limit_is_refused() -> None:
    frames = sent(answer(SMOOTH, SMOOTH))
    assert len(decode(frames, max_message=2 * SMOOTH.nbytes).arrays) == 2
    with pytest.raises(WireError, match=f"arrays of {2 * SMOOTH.nbytes} bytes"):
        decode(frames, max_message=2 * SMOOTH.nbytes - 1)
