"""Unrolls a batch by depth, for model classes that see one graph in all layers.

A node that was found at two depths has other neighbours at each, as the hops have other fanouts. In one graph it could
have only one of both sets, which then depended on the other seeds of the rank. Unrolled, it is a node at each depth, as
in a computation tree in which equal nodes of equal depth are one: the rows of a seed depend on the seed only, and
``trim_to_layer`` leaves out nothing that a later layer reads.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from trainer.core.batch import Block, HeteroBatch
from trainer.core.schema import EdgeType, NodeType


def differ_by_depth(batch: HeteroBatch, edge_types: Collection[EdgeType]) -> bool:
    """Return whether a node of the batch has other edges at another depth. Reads the blocks on their device."""
    for of in edge_types:
        layers = [blocks[of].indptr for blocks in batch.blocks if of in blocks]
        if len(layers) < len(batch.blocks) and layers:
            return True
        if any(not torch.equal(layer, layers[0][: len(layer)]) for layer in layers[1:]):
            return True
    return False


def unrolled(
    batch: HeteroBatch, rows: Mapping[NodeType, Tensor], edge_types: Collection[EdgeType]
) -> tuple[HeteroBatch, dict[NodeType, Tensor]]:
    """Return the batch with its nodes by depth, and with one layer of blocks, ``blocks[0]``, that has all edges.

    The seeds remain the first nodes. ``num_nodes`` counts the nodes up to each depth; the edges of a block are in order
    of their targets, and so of the hop. Waits for the device once per hop and node type.

    Args:
        batch: Blocks of all hops.
        rows: Input rows of the nodes of each type, float [n, f].
        edge_types: Edge types that the model reads.
    """
    at = {kind: torch.arange(counts[0], device=batch.n_id[kind].device) for kind, counts in batch.num_nodes.items()}
    nodes = {kind: [ids] for kind, ids in at.items()}  # of each depth, as positions in ``batch``
    totals = {kind: [len(ids)] for kind, ids in at.items()}
    degrees: dict[EdgeType, list[Tensor]] = {of: [] for of in edge_types}
    sources: dict[EdgeType, list[Tensor]] = {of: [] for of in edge_types}
    attrs: dict[EdgeType, list[Tensor]] = {of: [] for of in edge_types}
    for blocks in reversed(batch.blocks):
        # The edges into the nodes of this depth: their places in the block of this hop.
        found: dict[EdgeType, Tensor] = {}
        reached = {kind: torch.zeros(len(ids), dtype=torch.bool, device=ids.device) for kind, ids in batch.n_id.items()}
        for of in edge_types:
            block, targets = blocks.get(of), at[of[2]]
            if block is None:
                degrees[of].append(torch.zeros_like(targets))
                continue
            first, last = (block.indptr[i].long() for i in (targets, targets + 1))
            degrees[of].append(last - first)
            ends = degrees[of][-1].cumsum(0)
            total = int(ends[-1]) if len(ends) else 0
            shift = (first - ends + degrees[of][-1]).repeat_interleave(degrees[of][-1], output_size=total)
            places = shift + torch.arange(total, device=shift.device)
            found[of] = block.indices[places].long()
            reached[of[0]][found[of]] = True
            if block.edge_attr is not None:
                attrs[of].append(block.edge_attr[places])
        # Their sources are the nodes of the next depth.
        at = {kind: mask.nonzero().flatten() for kind, mask in reached.items()}
        place = {kind: torch.empty_like(ids) for kind, ids in batch.n_id.items()}
        for kind, ids in at.items():
            place[kind][ids] = torch.arange(len(ids), device=ids.device) + totals[kind][-1]
            nodes[kind].append(ids)
            totals[kind].append(totals[kind][-1] + len(ids))
        for of, ids in found.items():
            sources[of].append(place[of[0]][ids])
    every = {kind: torch.cat(ids) for kind, ids in nodes.items()}
    made = {}
    for of in edge_types:
        counts = torch.cat(degrees[of])
        indptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
        indices = torch.cat(sources[of]).int() if sources[of] else counts.new_zeros(0).int()
        made[of] = Block(indptr, indices, totals[of[0]][-1], torch.cat(attrs[of]) if attrs[of] else None)
    n_id = {kind: ids[every[kind]] for kind, ids in batch.n_id.items()}
    counted = {kind: tuple(total) for kind, total in totals.items()}
    moved = {kind: values[every[kind]] for kind, values in rows.items()}
    return replace(batch, n_id=n_id, blocks=(made,), num_nodes=counted), moved
