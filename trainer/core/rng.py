"""Counter-based random numbers without state: every random number is a hash of a key and an index.

The hash function is the finalizer of SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number
Generators", OOPSLA 2014).
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

#: Version of the random draws; increases when a change of the code draws other seeds, neighbours or masks. 2: another
#: order of links that are all edges of a graph, from 2^20 edges on (``SeedOrder.keyed``).
DRAWS = 2

GOLDEN = np.uint64(0x9E3779B97F4A7C15)

_MUL1 = np.uint64(0xBF58476D1CE4E5B9)

_MUL2 = np.uint64(0x94D049BB133111EB)

_S11, _S30, _S27, _S31, _S32 = np.uint64(11), np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(32)

_MASK = (1 << 64) - 1


@numba.njit(inline="always")
def mix(z: Any) -> Any:
    """Apply SplitMix64's finalizer to a uint64."""
    z = (z ^ (z >> _S30)) * _MUL1
    z = (z ^ (z >> _S27)) * _MUL2
    return z ^ (z >> _S31)


@numba.njit(inline="always")
def node_key(batch: Any, orig_id: Any) -> Any:
    """Combine a batch's key and a node's original id into the uint64 key of the node's random numbers in the batch."""
    return mix(batch ^ mix(np.uint64(orig_id) + GOLDEN))


@numba.njit(inline="always")
def tree_key(node: Any, tree: Any) -> Any:
    """Combine a node's ``node_key`` and a tree number into the uint64 key of the node's random numbers in the tree."""
    return mix(node ^ mix(np.uint64(tree) + GOLDEN))


@numba.njit(inline="always")
def draw(key: Any, i: Any, bound: Any) -> Any:
    """Return random number ``i`` of ``key``: int64, uniform in [0, bound), where bound < 2**31.

    The bias is below 2**-32 * bound.
    """
    high = mix(key + np.uint64(i) * GOLDEN) >> _S32
    return np.int64((high * np.uint64(bound)) >> _S32)


@numba.njit(inline="always")
def fraction(z: Any) -> Any:
    """Map a uint64 to a float64 in [0, 1) by its upper 53 bits."""
    return float(z >> _S11) / 9007199254740992.0


@numba.njit(inline="always")
def draw_fraction(key: Any, i: Any) -> Any:
    """Return random number ``i`` for ``key``: float64, uniform in [0, 1)."""
    return fraction(mix(key + np.uint64(i) * GOLDEN))


#: Constants of ``column_bits``.
STRIDE, LOW_A, LOW_B = 0x9E3779B9, 0x7FEB352D, 0x846CA68B

_STRIDE, _LOW_A, _LOW_B = np.uint32(STRIDE), np.uint32(LOW_A), np.uint32(LOW_B)

_S15, _S16 = np.uint32(15), np.uint32(16)


@numba.njit(inline="always")
def column_bits(state: Any, column: Any) -> Any:
    """Return a random uint32 for one column of a row: a hash of ``state + column * _STRIDE``.

    ``state``: random uint32 of the row. The hash is "lowbias32" (Chris Wellons, "Prospecting for Hash Functions").
    """
    bits = np.uint32(state + np.uint32(np.uint32(column) * _STRIDE))
    bits = np.uint32(np.uint32(bits ^ (bits >> _S16)) * _LOW_A)
    bits = np.uint32(np.uint32(bits ^ (bits >> _S15)) * _LOW_B)
    return np.uint32(bits ^ (bits >> _S16))


def fractions(z: Any) -> npt.NDArray[np.float64]:
    return np.asarray(z >> _S11, np.float64) / 9007199254740992.0


def hashed(z: Any) -> Any:
    with np.errstate(over="ignore"):
        return mix.py_func(z)


def batch_key(seed: int, stream: int, epoch: int, step: int) -> int:
    """Return the uint64 key of one global batch. Training and each evaluation split have their own ``stream``."""
    key = 0
    for word in (seed, stream, epoch, step):
        key = int(hashed(np.uint64(((key ^ (word & _MASK)) + int(GOLDEN)) & _MASK)))
    return key


def shuffled(n: int, key: int) -> npt.NDArray[np.int64]:
    """Return a permutation of range(n), int64 [n], which depends only on n and the uint64 ``key``."""
    return np.argsort(hashed(np.arange(1, n + 1, dtype=np.uint64) * GOLDEN + np.uint64(key)), kind="stable")
