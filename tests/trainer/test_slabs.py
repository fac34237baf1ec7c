"""Tests that the memory of large arrays is reused, but only after nothing refers to it."""

from __future__ import annotations

import gc
import threading

import numpy as np
import torch

from trainer.core.slabs import IDLE, LARGE, Slabs, cast


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def test_memory_is_reused_once_nothing_refers_to_it() -> None:
    slabs = Slabs()
    array = slabs.empty((LARGE, 3), np.float32)
    assert (
        array.shape == (LARGE, 3) and array.dtype == np.float32 and array.flags.writeable and array.flags.c_contiguous
    )
    array[:] = 7
    where, tensor = address(array), torch.from_numpy(array[5:9])
    del array
    other = slabs.empty((LARGE, 3), np.float32)
    other[:] = 1
    assert address(other) != where and tensor.eq(7).all()
    del tensor
    gc.collect()
    assert address(slabs.empty((LARGE * 6,), np.int16)) == where


def test_small_arrays_and_other_sizes_have_their_own_memory() -> None:
    slabs = Slabs()
    assert slabs.empty((0, 5), np.float64).shape == (0, 5)
    first = slabs.empty((LARGE + 5,), np.uint8)
    where = address(first)
    del first
    assert address(slabs.empty((LARGE * 4,), np.uint8)) != where
    assert address(slabs.empty((LARGE // 2,), np.uint8)) != where
    assert address(slabs.empty((LARGE + LARGE // 100,), np.uint8)) == where


def test_cast_copies() -> None:
    array = np.arange(LARGE, dtype=np.int32).reshape(-1, 8)
    there = cast(array, np.int64)
    assert there.dtype == np.int64 and not np.shares_memory(there, cast(array, np.int32))
    np.testing.assert_array_equal(there, array)
    assert cast(np.float32(2.5).reshape(()), np.int64) == 2


def test_free_memory_is_bounded() -> None:
    slabs = Slabs(keep=3 * LARGE)
    arrays = [slabs.empty((LARGE,), np.uint8) for _ in range(9)]
    del arrays
    assert slabs.free_bytes <= 3 * LARGE


def test_the_number_of_slabs_follows_the_number_of_live_arrays() -> None:
    made: list[int] = []

    def make(size: int) -> np.ndarray:
        made.append(size)
        return np.empty(size, np.uint8)

    slabs, sizes, older = Slabs(make=make), np.random.default_rng(0), None
    for _ in range(200):
        array = slabs.empty((LARGE * 3 + int(sizes.integers(LARGE)),), np.uint8)
        older = array  # keeps two arrays alive at once: the new one and the previous one
        del array
        assert slabs.free_bytes + len(older) <= 2 * 4.2 * LARGE
    assert older is not None and len(made) < 20


def test_the_smallest_slab_that_fits_is_reused() -> None:
    slabs = Slabs()
    arrays = [slabs.empty((LARGE * size,), np.uint8) for size in (7, 5, 6)]
    where = [address(array) for array in arrays]
    del arrays
    again = [slabs.empty((LARGE * size,), np.uint8) for size in (5, 6, 7)]
    assert [address(array) for array in again] == [where[1], where[2], where[0]]


def test_slabs_unused_for_long_are_freed() -> None:
    slabs = Slabs()
    slabs.empty((LARGE * 20,), np.uint8)
    assert slabs.free_bytes >= LARGE * 20
    for _ in range(IDLE + 2):
        slabs.empty((LARGE,), np.uint8)
    assert slabs.free_bytes < 2 * LARGE


def test_threads_never_share_memory() -> None:
    slabs, wrong = Slabs(), []

    def work(number: int) -> None:
        for _ in range(60):
            array = slabs.empty((LARGE // 8 + number,), np.int64)
            array[:] = number
            if not (array == number).all():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
