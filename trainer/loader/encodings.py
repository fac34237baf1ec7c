"""Transforms that add structural encodings of nodes to batches, also with types: return probabilities and distances."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.transforms import BaseTransform

from trainer.core.compiled import njit
from trainer.core.errors import SettingsError


class AddRandomWalkPE(BaseTransform):
    """Add to each node the probabilities that a random walk in the batch returns to it after 1, 2, … steps.

    Dwivedi et al., "Graph Neural Networks with Learnable Structural and Positional Representations" (2022). The walk
    goes over the edges of all types, in both directions; several edges between two nodes count once, self loops not.
    On an undirected graph without types this is torch_geometric's transform of this name, which takes no types and
    multiplies matrices of nodes × nodes. Here each node costs the edges that a walk of half the length can reach, and
    memory for the nodes of the batch once.

    Args:
        walk_length: Number of steps.
        attr_name: Name of the attribute. Default: the numbers are appended to ``x``, of all types.

    Shapes:
        - the attribute: float32 ``[n, walk_length]``, for each node type

    Raises:
        SettingsError: ``walk_length`` is no whole number of at least 1, or a batch has ``adj_t`` in place of edges.

    Example:
        ```python
        import gnnfleet as gf

        graph = gf.open("parts")
        encoding = gf.AddRandomWalkPE(walk_length=4)
        loader = gf.DistNeighborLoader(graph, [10, 5], "train", batch_size=64, transform=encoding)
        batch = next(iter(loader))
        walks = batch.random_walk_pe  # [n, 4]
        ```
    """

    def __init__(self, walk_length: int, attr_name: str | None = "random_walk_pe"):
        if isinstance(walk_length, bool) or not isinstance(walk_length, int) or walk_length < 1:
            raise SettingsError(f"walk_length must be a whole number of at least 1, not {walk_length!r}")
        self.walk_length, self.attr_name = walk_length, attr_name

    def forward(self, data: Data | HeteroData) -> Data | HeteroData:
        """Return the batch with the attribute."""
        sizes = [int(store.num_nodes or 0) for store in data.node_stores]
        first = dict(zip((store._key for store in data.node_stores), np.cumsum([0, *sizes]).tolist(), strict=False))
        total, pairs = sum(sizes), [np.empty(0, np.int64)]
        for store in data.edge_stores:
            if "edge_index" not in store:
                raise SettingsError("AddRandomWalkPE reads edge_index, and the batch has none; leave out adj_t")
            src, dst = store.edge_index.cpu().numpy()
            if store._key is not None:
                src, dst = src + first[store._key[0]], dst + first[store._key[2]]
            other = src != dst
            pairs += [src[other] * total + dst[other], dst[other] * total + src[other]]
        target, source = np.divmod(np.unique(np.concatenate(pairs)), max(1, total))
        indptr = np.searchsorted(target, np.arange(total + 1))
        found = np.zeros((total, self.walk_length))
        _return_probabilities(indptr, source, found)
        split = torch.from_numpy(found.astype(np.float32)).split(sizes)
        for store, rows in zip(data.node_stores, split, strict=True):
            _add(store, self.attr_name, rows)
        return data


class AddHopDistance(BaseTransform):
    """Add to each node its distance from the seed around which it was sampled: the hop that found it.

    In a batch that is not disjoint this is the nearest seed.

    Args:
        attr_name: Name of the attribute. Default: the number is appended to ``x``, of all types.

    Shapes:
        - the attribute: int64 ``[n]``, for each node type; 0 for seeds

    Raises:
        SettingsError: A batch does not say how many nodes each hop found, as those of induced subgraphs.

    Example:
        ```python
        import gnnfleet as gf

        graph = gf.open("parts")
        loader = gf.DistNeighborLoader(graph, [10, 5], "train", batch_size=64, transform=gf.AddHopDistance())
        far = next(iter(loader)).hop_distance  # [n]: 64 times 0, then 1, then 2
        ```
    """

    def __init__(self, attr_name: str | None = "hop_distance"):
        self.attr_name = attr_name

    def forward(self, data: Data | HeteroData) -> Data | HeteroData:
        """Return the batch with the attribute."""
        for store in data.node_stores:
            counts = store.get("num_sampled_nodes")
            if counts is None:
                raise SettingsError(
                    "AddHopDistance reads num_sampled_nodes, which batches of DistNeighborLoader and"
                    " DistLinkNeighborLoader have if their subgraphs are not induced"
                )
            counts = torch.as_tensor(counts)
            far = torch.arange(len(counts)).repeat_interleave(counts)
            _add(store, self.attr_name, far if self.attr_name else far[:, None].float())
        return data


def _add(store: Any, name: str | None, values: Tensor) -> None:
    x = store.get("x")
    if name is not None:
        store[name] = values if x is None else values.to(x.device)
    else:
        store.x = values if x is None else torch.cat([x if x.dim() > 1 else x[:, None], values.to(x)], 1)


@njit(boundscheck=False)
def _return_probabilities(indptr: Any, indices: Any, found: Any) -> None:
    """Fill ``found`` float64 [n, k] with the probabilities that a walk from a node is there after 1 to k steps.

    ``indptr``, ``indices``: CSR of an undirected simple graph. For its transition matrix P and degrees d,
    d_i P^t[i, j] = d_j P^t[j, i], so P^(s+t)[i, i] = sum over j of P^s[i, j] P^t[i, j] d_i / d_j: walks of half the
    length from each node suffice.
    """
    num_nodes, length = found.shape
    rows = np.zeros((2, num_nodes))  # P^t[i, :] for the last two t; all zeros between nodes
    reached = np.empty((2, num_nodes), np.int64)
    for i in range(num_nodes):
        degree = indptr[i + 1] - indptr[i]
        rows[0, i], reached[0, 0], count = 1.0, i, 1
        for step in range((length + 1) // 2):
            here, there = step % 2, 1 - step % 2
            more = 0
            for k in range(count):
                node = reached[here, k]
                share = rows[here, node] / (indptr[node + 1] - indptr[node]) if indptr[node + 1] > indptr[node] else 0.0
                for slot in range(indptr[node], indptr[node + 1]):
                    if rows[there, indices[slot]] == 0.0:
                        reached[there, more] = indices[slot]
                        more += 1
                    rows[there, indices[slot]] += share
            odd, even = 0.0, 0.0
            for k in range(more):
                node = reached[there, k]
                weight = degree / (indptr[node + 1] - indptr[node])
                odd += rows[here, node] * rows[there, node] * weight
                even += rows[there, node] * rows[there, node] * weight
            found[i, 2 * step] = odd
            if 2 * step + 1 < length:
                found[i, 2 * step + 1] = even
            for k in range(count):
                rows[here, reached[here, k]] = 0.0
            count = more
        for k in range(count):
            rows[((length + 1) // 2) % 2, reached[((length + 1) // 2) % 2, k]] = 0.0
