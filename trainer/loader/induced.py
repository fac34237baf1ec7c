"""What the subgraph loaders share: induced subgraphs of given nodes, and the whole edge list by original ids."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from trainer.core.arrays import Array
from trainer.core.errors import SettingsError
from trainer.core.schema import HOMO_EDGE, HOMO_NODE
from trainer.loader.open import Graph
from trainer.sampler.subgraph import SampleSettings
from trainer.sampler.types import GraphSchema


def induced_settings(schema: GraphSchema) -> SampleSettings:
    """The seeds, after one hop to nobody, and all edges between them with their ids."""
    return SampleSettings(dict.fromkeys(schema.edges, (0,)), induced=True, edge_ids=True, ask_again=False)


def check_homogeneous(graph: Graph, what: str) -> None:
    """Raise ``SettingsError`` for a heterogeneous graph."""
    if graph.manifest.hetero:
        one_type = "HeteroData.to_homogeneous()" if graph.source is not None else "a partition of its to_homogeneous()"
        raise SettingsError(
            f"{what} takes homogeneous graphs only, as torch_geometric's does, and this one is heterogeneous;"
            f" take {one_type}, or use DistNeighborLoader or DistClusterLoader"
        )


@dataclass(frozen=True)
class Ends:
    """Both ends of every edge of a homogeneous graph, as original node ids, by original edge id."""

    src: Array  #: int32|int64 [E]
    dst: Array  #: int32|int64 [E]

    @classmethod
    def of(cls, graph: Graph) -> Ends:
        """Read all edges. Memory: 32 bytes an edge meanwhile, 8 of them kept. Raises ``ServiceError``."""
        edges = graph.access.edge_list(HOMO_EDGE)
        num_nodes = graph.manifest.nodes[HOMO_NODE].num_nodes
        node = np.empty(num_nodes, np.int32 if num_nodes < 2**31 else np.int64)
        node[graph.store.to_global(HOMO_NODE, np.arange(num_nodes))] = np.arange(num_nodes)
        src, dst = np.empty(len(edges.src), node.dtype), np.empty(len(edges.src), node.dtype)
        src[edges.orig_id], dst[edges.orig_id] = node[edges.src], node[edges.dst]
        return cls(src, dst)


def tensor_of(values: Array) -> torch.Tensor:
    """int64 tensor of ids or positions."""
    return torch.from_numpy(values.astype(np.int64, copy=False))
