"""Maps global ids to batch positions on the device, in the order in which sampling first meets them, as on the CPU.

Each batch has a hash table per node type, with open addressing and linear probing, at most half full. A thread claims
the slot of an id by compare-and-swap. The slot then gets, by atomic minimum, the smallest index at which the id occurs,
and new ids are numbered in the order of these indices. The result does not depend on the order in which threads run.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.core import rng
from trainer.core.errors import SettingsError
from trainer.core.schema import NodeType
from trainer.cuda.array_ops import TorchOps
from trainer.cuda.launch import cuda, device_function, kernel
from trainer.sampler.array_ops import ArrayOps
from trainer.sampler.relabel import NodeGrowth
from trainer.sampler.types import GraphSchema, NodeSet

_FREE = np.int64(-1)  #: key of a free slot

_LAST = 2**62  #: position of an id that has none yet

_FIRST_BITS = 10  #: log2 of the number of slots of an empty table

_mix = device_function(rng.mix)


class DeviceTables:
    """Makes the hash tables of one batch. Each batch has new tables, so that threads never use the same table."""

    def __init__(self, schema: GraphSchema, ops: TorchOps):
        self.ops: ArrayOps = ops
        self._torch = ops
        self._sizes = {of: spec.num_nodes for of, spec in schema.nodes.items()}

    def growth(self, of: NodeType, disjoint: bool) -> NodeGrowth:
        """Return an empty set of sampled nodes of one type. ``disjoint``: the set may contain a node once per tree."""
        found: Any = _DeviceGrowth(self._sizes[of], disjoint, self._torch)  # implements NodeGrowth, with tensors
        return found  # type: ignore[no-any-return]


class _DeviceGrowth:
    """The nodes of one type in a subgraph that grows hop by hop: ``NodeGrowth`` and ``TreeGrowth`` on a device.

    A node's key in the hash table is its global id, or ``tree * num_nodes + id`` in disjoint sampling.
    """

    def __init__(self, num_nodes: int, disjoint: bool, ops: TorchOps):
        self._num_nodes, self._disjoint, self._ops = num_nodes, disjoint, ops
        self._ids = ops.zeros(0, np.int64)  #: int64 [n] global ids
        self._trees = ops.zeros(0, np.int32)  #: int32 [n], if disjoint
        self._keys = _empty_keys(_FIRST_BITS, ops.device)
        self._positions = torch.full_like(self._keys, _LAST)
        self.level_starts = [0]

    def enter(self, seeds: Tensor, first_tree: int) -> None:
        """Add the seeds. A repeated seed has the position of its first occurrence, except in disjoint sampling."""
        trees = torch.arange(first_tree, first_tree + len(seeds), dtype=torch.int32, device=self._ops.device)
        if self._disjoint and self._num_nodes * max(1, first_tree + len(seeds)) >= _LAST:
            raise SettingsError(
                f"{len(seeds)} disjoint trees in a graph of {self._num_nodes} nodes are too many for the GPU, "
                "whose ids have 62 bits; sample on the CPU (sampling: cpu)"
            )
        self._enter(self._keys_of(seeds, trees))
        self._append(seeds, trees)

    def meet(self, src: Tensor, counts: Tensor, trees: Tensor | None) -> Tensor:
        """Return the batch position of each node in ``src``, int32. New nodes are appended to the subgraph.

        ``src`` contains ``counts[0]`` nodes of tree ``trees[0]``, then ``counts[1]`` nodes of ``trees[1]`` and so on.
        Waits for the device, to read how many nodes are new.
        """
        size, known = len(src), len(self._ids)
        device = self._ops.device
        src_trees = self._trees[:0]
        if trees is not None:
            src_trees = torch.repeat_interleave(trees, counts.long(), output_size=size)
        wanted = 2 * (known + size)
        if len(self._keys) < wanted:  # a larger table, with the nodes that the subgraph has
            self._keys = _empty_keys((wanted - 1).bit_length(), device)
            self._positions = torch.full_like(self._keys, _LAST)
            self._enter(self._keys_of(self._ids, self._trees))
        keys = self._keys_of(src, src_trees)
        slots = torch.empty(size, dtype=torch.int64, device=device)
        insert(size, keys, known, self._keys, self._positions, slots)
        new = torch.empty(size, dtype=torch.int32, device=device)
        mark_new(size, slots, known, self._positions, new)
        at = torch.nonzero(new).flatten()  # waits for the device: its size is needed here
        number(len(at), at, slots, known, self._positions)
        local = torch.empty(size, dtype=torch.int32, device=device)
        look_up(size, slots, self._positions, local)
        self._append(src[at].long(), src_trees[at] if self._disjoint else src_trees)
        return local

    def close_level(self) -> None:
        """End the current hop (or the seeds). Nodes added from now on belong to the next hop."""
        self.level_starts.append(len(self._ids))

    def since(self, first: int) -> Tensor:
        """Return the global ids of the nodes from position ``first`` on."""
        return self._ids[first:]

    def trees_since(self, first: int) -> Tensor | None:
        """Return the trees of the nodes from position ``first`` on, or None if sampling is not disjoint."""
        return self._trees[first:] if self._disjoint else None

    def clean(self) -> None:
        """Do nothing: the tables are not reused."""

    def finish(self) -> NodeSet:
        """Return the nodes, as tensors."""
        per_hop = tuple(int(count) for count in np.diff(self.level_starts))
        ids: Any = self._ids
        trees: Any = self.trees_since(0)
        return NodeSet(ids, per_hop, trees)

    def _append(self, ids: Tensor, trees: Tensor) -> None:
        self._ids = torch.cat([self._ids, ids])
        if self._disjoint:
            self._trees = torch.cat([self._trees, trees])

    def _keys_of(self, ids: Tensor, trees: Tensor) -> Tensor:
        return trees.long() * self._num_nodes + ids if self._disjoint else ids

    def _enter(self, keys: Tensor) -> None:
        """Enter keys into the empty table. A key's position is the smallest index at which ``keys`` contains it."""
        if 2 * len(keys) > len(self._keys):
            self._keys = _empty_keys((2 * len(keys) - 1).bit_length(), self._ops.device)
            self._positions = torch.full_like(self._keys, _LAST)
        insert(len(keys), keys, 0, self._keys, self._positions, torch.empty_like(keys))


def _empty_keys(bits: int, device: torch.device) -> Tensor:
    return torch.full((1 << bits,), int(_FREE), dtype=torch.int64, device=device)


@kernel
def insert(keys: Any, first: Any, table: Any, positions: Any, slots: Any) -> None:
    """Enter keys into the table. Key i gets the position ``first + i``, unless it already has a smaller position.

    Fills ``slots`` with the slot of each key.
    """
    mask = np.uint64(len(table) - 1)
    for i in range(cuda.grid(1), len(keys), cuda.gridsize(1)):
        key = np.int64(keys[i])
        slot = np.int64(_mix(np.uint64(key)) & mask)
        seen = cuda.atomic.cas(table, slot, _FREE, key)
        while seen != _FREE and seen != key:  # noqa: PLR1714 (not in a kernel)
            slot = (slot + 1) & np.int64(mask)
            seen = cuda.atomic.cas(table, slot, _FREE, key)
        slots[i] = slot
        cuda.atomic.min(positions, slot, first + i)


@kernel
def mark_new(slots: Any, first: Any, positions: Any, new: Any) -> None:
    """Set ``new[i]`` to 1 if key i occurs for the first time in this batch, else to 0.

    ``first``: the number of nodes found before. ``positions``: as ``insert`` filled it.
    """
    for i in range(cuda.grid(1), len(slots), cuda.gridsize(1)):
        new[i] = 1 if positions[slots[i]] == first + i else 0


@kernel
def number(at: Any, slots: Any, first: Any, positions: Any) -> None:
    """Give new keys their final positions: key ``at[k]`` gets ``first + k``. ``at``: ascending indices of new keys."""
    for k in range(cuda.grid(1), len(at), cuda.gridsize(1)):
        positions[slots[at[k]]] = first + k


@kernel
def look_up(slots: Any, positions: Any, local: Any) -> None:
    """Fill ``local`` with the position of each key."""
    for i in range(cuda.grid(1), len(slots), cuda.gridsize(1)):
        local[i] = positions[slots[i]]
