"""Permutations of large ranges of numbers. Slices are computed on demand, without an array of the whole range.

A Feistel network (Luby and Rackoff, "How to Construct Pseudorandom Permutations from Pseudorandom Functions", SIAM J.
Comput. 17(2), 1988) with cycle walking (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from trainer.core.arrays import Ids
from trainer.core.compiled import njit
from trainer.core.rng import GOLDEN, mix

_ROUNDS = 8  #: an even number; four make a random permutation of a large range


@dataclass(frozen=True)
class InOrder:
    """The numbers from 0 to ``n - 1`` in order, without an array of all of them."""

    n: int

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, at: slice) -> Ids:
        return np.arange(*at.indices(self.n))


@dataclass(frozen=True)
class KeyedPermutation:
    """A permutation of the numbers from 0 to ``n - 1`` that depends only on ``n`` and the uint64 ``key``.

    Not for small ``n``, for which some permutations are more likely than others.
    """

    n: int
    key: int

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, at: slice) -> Ids:
        found = np.arange(*at.indices(self.n))
        bits = max(2, (self.n - 1).bit_length())  # fewer than 2n numbers, so that few are permuted again
        _permute(found, np.int64(self.n), np.uint64(bits // 2), np.uint64(bits - bits // 2), np.uint64(self.key))
        return found


@njit()
def _permute(values: Any, n: Any, left_bits: Any, right_bits: Any, key: Any) -> None:
    one = np.uint64(1)
    left_mask, right_mask = (one << left_bits) - one, (one << right_bits) - one
    for i in range(len(values)):
        value = np.uint64(values[i])
        while True:
            left, right = value >> right_bits, value & right_mask
            for step in range(0, _ROUNDS, 2):
                left ^= mix(right ^ mix(key + np.uint64(step + 1) * GOLDEN)) & left_mask
                right ^= mix(left ^ mix(key + np.uint64(step + 2) * GOLDEN)) & right_mask
            value = (left << right_bits) | right
            if np.int64(value) < n:
                break
        values[i] = np.int64(value)
