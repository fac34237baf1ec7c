"""From numpy to what users see: tensors, blocks, and torch_geometric's sampler output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch_geometric.sampler import HeteroSamplerOutput, SamplerOutput

from trainer import slabs
from trainer.arrays import Array
from trainer.batch import Block
from trainer.partition.format import AttrSpec
from trainer.sample.multi_hop import cut_block
from trainer.sample.sampler import Sampled
from trainer.sample.subgraph import EdgeSet, NodeSet, SampledSubgraph
from trainer.schema import HOMO_EDGE, HOMO_NODE, EdgeType

Output: TypeAlias = "SamplerOutput | HeteroSamplerOutput"


def as_tensor(values: Array, spec: AttrSpec) -> Tensor:
    """Rows as stored in the dtype the dataset gave them; shares memory."""
    if spec.dtype == "bfloat16":
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)


def as_label(labels: Tensor) -> Tensor:
    """Integer labels as int64 (what cross entropy wants), others as they are."""
    whole = not (labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool)
    return labels.long() if whole else labels


def homo_blocks(subgraph: SampledSubgraph) -> tuple[Block, ...]:
    """Blocks of a homogeneous graph in layer order: the outermost hop first."""
    return tuple(_block(subgraph, HOMO_EDGE, hop) for hop in reversed(range(subgraph.num_hops)))


def hetero_blocks(subgraph: SampledSubgraph) -> tuple[dict[EdgeType, Block], ...]:
    """The same per edge type that has fanouts."""
    sampled = [of for of, edges in subgraph.edges.items() if edges.fanouts]
    return tuple({of: _block(subgraph, of, hop) for of in sampled} for hop in reversed(range(subgraph.num_hops)))


def _block(subgraph: SampledSubgraph, edge_type: EdgeType, hop: int) -> Block:
    indptr, indices, num_src = cut_block(subgraph, edge_type, hop)
    return Block(torch.from_numpy(indptr), torch.from_numpy(indices), num_src)


def sampler_output(sampled: Sampled, hetero: bool, induced: bool) -> Output:
    """torch_geometric's output of a sampler: original ids, edges in batch positions.

    As there, an induced subgraph has no numbers of nodes and edges per hop.
    """
    subgraph, rows = sampled.subgraph, sampled.rows
    node = {of: _original(rows[of]) for of in subgraph.nodes}
    edge = {of: _original(rows[of]) for of in subgraph.edges}
    row = {of: _wide(edges.src) for of, edges in subgraph.edges.items()}
    col = {of: _wide(edges.dst()) for of, edges in subgraph.edges.items()}
    batch = {of: _wide(n.tree) for of, n in subgraph.nodes.items() if n.tree is not None}
    num_nodes, num_edges = None, None
    if not induced:
        num_nodes, num_edges = _per_hop(subgraph.nodes), _per_hop(subgraph.edges)
    if hetero:
        return HeteroSamplerOutput(node, row, col, edge, batch or None, num_nodes, num_edges)
    return SamplerOutput(
        node[HOMO_NODE], row[HOMO_EDGE], col[HOMO_EDGE], edge[HOMO_EDGE], batch.get(HOMO_NODE),
        num_nodes and num_nodes[HOMO_NODE], num_edges and num_edges[HOMO_EDGE],
    )  # fmt: skip


def _original(rows: Mapping[str, Array]) -> Tensor:
    return _wide(rows["orig_id"])  # a copy: transforms may write to it


def _wide(array: Array) -> Tensor:
    return torch.from_numpy(slabs.cast(array, np.int64))


def _per_hop(sets: Mapping[Any, NodeSet] | Mapping[Any, EdgeSet]) -> dict[Any, list[int]]:
    return {of: list(members.per_hop) for of, members in sets.items()}
