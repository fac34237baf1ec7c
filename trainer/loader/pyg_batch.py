"""From numpy to what users see: tensors, blocks, and torch_geometric's sampler output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from trainer.core import slabs
from trainer.core.arrays import Array
from trainer.core.batch import Block
from trainer.core.schema import HOMO_EDGE, HOMO_NODE, EdgeType
from trainer.sampler.multi_hop import cut_block
from trainer.sampler.subgraph import EdgeSet, NodeSet, SampledSubgraph
from trainer.sampler.subgraph_sampler import Sampled
from trainer.store.manifest import AttrSpec

if TYPE_CHECKING:
    from torch_geometric.sampler import HeteroSamplerOutput, SamplerOutput

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


def sampler_output(sampled: Sampled, hetero: bool, induced: bool, apart: bool) -> Output:
    """torch_geometric's output of a sampler: original ids, edges in batch positions.

    As there, an induced subgraph has no numbers of nodes and edges per hop. ``apart``: ids are copies, for a transform
    that may write to them. Rows and columns of an edge type are the rows of one tensor.
    """
    from torch_geometric.sampler import HeteroSamplerOutput, SamplerOutput  # takes seconds; blocks do without

    subgraph, rows = sampled.subgraph, sampled.rows
    node = {of: _original(rows[of], apart) for of in subgraph.nodes}
    edge = {of: _original(rows[of], apart) for of in subgraph.edges}
    ends = {of: torch.from_numpy(edges.ends()) for of, edges in subgraph.edges.items()}
    row, col = ({of: both[end] for of, both in ends.items()} for end in (0, 1))
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


def edge_index(row: Tensor, col: Tensor) -> Tensor:
    """[2, e]: the tensor whose rows ``row`` and ``col`` are, else a new one."""
    whole = row._base
    if whole is None or whole is not col._base or whole.shape != (2, len(row)) or len(col) != len(row):
        return torch.stack([row, col])
    alike = all(part.data_ptr() == of.data_ptr() for part, of in zip((row, col), whole, strict=True))
    return whole if alike and whole.is_contiguous() else torch.stack([row, col])


def _original(rows: Mapping[str, Array], apart: bool) -> Tensor:
    ids = rows["orig_id"]
    return _wide(ids) if apart or ids.dtype != np.int64 or not ids.flags.writeable else torch.from_numpy(ids)


def _wide(array: Array) -> Tensor:
    return torch.from_numpy(slabs.cast(array, np.int64))


def _per_hop(sets: Mapping[Any, NodeSet] | Mapping[Any, EdgeSet]) -> dict[Any, list[int]]:
    return {of: list(members.per_hop) for of, members in sets.items()}
