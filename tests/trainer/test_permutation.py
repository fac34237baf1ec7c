"""Tests of pseudorandom permutations that are computed when they are read."""

from __future__ import annotations

import numpy as np
import pytest

from trainer.graph import seed_order
from trainer.graph.seed_order import InOrder, KeyedPermutation, SeedOrder


@pytest.mark.parametrize("n", [0, 1, 2, 3, 5, 8, 1000, 4095, 4096, 4097])
def test_each_number_occurs_once(n):
    for key in (0, 7, 2**64 - 1):
        whole = KeyedPermutation(n, key)[:]
        assert whole.dtype == np.int64 and np.array_equal(np.sort(whole), np.arange(n))


def test_slices_are_those_of_the_whole():
    order = KeyedPermutation(10_000, 11)
    whole = order[:]
    assert np.array_equal(np.concatenate([order[at : at + 333] for at in range(0, 10_000, 333)]), whole)
    assert len(order) == 10_000 and len(order[20_000:]) == 0
    assert np.array_equal(InOrder(10)[3:7], [3, 4, 5, 6]) and len(InOrder(10)) == 10


def test_large_ranges_take_no_memory_and_keys_differ():
    n = 10**12
    some = [KeyedPermutation(n, key)[5 * 10**11 : 5 * 10**11 + 1000] for key in (1, 2)]
    assert all(len(np.unique(found)) == 1000 and 0 <= found.min() <= found.max() < n for found in some)
    assert len(np.intersect1d(*some)) == 0


def test_positions_are_uniform_and_independent_of_neighbours():
    # Over 4000 keys, each of 16 ranges gets the first number, and the second after the first, equally often.
    n = 1 << 12
    ends = np.array([KeyedPermutation(n, key)[:2] for key in range(4000)]) * 16 // n
    for counts in (np.bincount(ends[:, 0], minlength=16), np.bincount((ends[:, 1] - ends[:, 0]) % 16, minlength=16)):
        assert float(((counts - 250) ** 2 / 250).sum()) < 37.7  # 16 classes, p < 0.001


def test_only_large_orders_of_edges_are_keyed(monkeypatch):
    plain, keyed = (SeedOrder(500, 64, 3, keyed=keyed) for keyed in (False, True))
    assert np.array_equal(plain.epoch(1), keyed.epoch(1))  # as before for few edges
    monkeypatch.setattr(seed_order, "KEYED_FROM", 500)
    order = keyed.order(1)
    assert isinstance(order, KeyedPermutation)
    assert not np.array_equal(plain.epoch(1), keyed.epoch(1))
    steps = [keyed.step(order, step) for step in range(keyed.num_steps)]
    assert sorted(np.concatenate(steps).tolist()) == list(range(500))
    assert np.array_equal(np.concatenate(steps), keyed.epoch(1)) and not np.array_equal(keyed.epoch(1), keyed.epoch(2))
