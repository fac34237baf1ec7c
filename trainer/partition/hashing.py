"""Parts by hash: no pass over edges, and nothing but (seed, type, original id) decides."""

from __future__ import annotations

import hashlib

import numpy as np

from trainer.core.arrays import Array
from trainer.core.rng import GOLDEN, hashed
from trainer.core.schema import NodeType
from trainer.partition.joined import JoinedNodes, Part

_AT_ONCE = 1 << 20


def hash_part(node_type: NodeType, orig_ids: Array, num_parts: int, seed: int) -> Part:
    """The part of each node, int32 [n]; the same whatever else is in the graph. Parts are about equal, not exactly."""
    part = np.empty(len(orig_ids), np.int32)
    for start in range(0, len(orig_ids), _AT_ONCE):
        keys = _keys(node_type, orig_ids[start : start + _AT_ONCE], seed)
        part[start : start + _AT_ONCE] = ((keys >> np.uint64(32)) * np.uint64(num_parts)) >> np.uint64(32)
    return part


def random_parts(joined: JoinedNodes, num_parts: int, seed: int) -> Part:
    """Nodes dealt out in random order, type after type: parts differ by one node at most, in all and of each type."""
    part = np.empty(joined.total, np.int32)
    for (node_type, start), own in zip(joined.starts.items(), joined.split(part).values(), strict=True):
        order = np.argsort(_keys(node_type, np.arange(len(own)), seed), kind="stable")
        own[order] = (start + np.arange(len(own))) % num_parts
    return part


def _keys(node_type: NodeType, ids: Array, seed: int) -> Array:
    salt = int.from_bytes(hashlib.sha256(node_type.encode()).digest()[:8], "little")
    start = np.uint64((salt ^ ((seed + 1) * int(GOLDEN))) % 2**64)
    return hashed(ids.astype(np.uint64) * GOLDEN + hashed(start))
