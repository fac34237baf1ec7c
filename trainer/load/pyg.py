"""The same batches as torch_geometric's ``NeighborLoader`` gives, from a partitioned graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch_geometric.data import Data

from trainer.load.loader import BatchLoader, BatchSampler, LoaderSettings, Sampled, Share, as_label, to_blocks
from trainer.load.open import Graph
from trainer.load.prefetch import ordered_ahead
from trainer.load.seeds import RankLayout
from trainer.sample.multi_hop import HopEdges


class DistNeighborLoader:
    """Yields ``torch_geometric.data.Data`` for this rank's share of each step.

    Args:
        graph: from ``trainer.load.open.open_graph``.
        num_neighbors: neighbours per hop, seeds outward; -1 takes all.
        input_nodes: name of a split, e.g. ``"train"``.
        batch_size: seeds per step and rank; the global batch is this times the world size.
        replace, shuffle: as in torch_geometric.
        seed: of order and samples.
        threads, prefetch: sampler threads, and batches under way.
        rank, layout: this process and the ranks beside each part; default: one process.

    A batch has x, y and every other node attribute of the dataset, edge_index int64 [2, e] in
    batch positions, n_id and e_id (original ids), batch_size, input_id, num_sampled_nodes,
    num_sampled_edges and ``blocks`` (one per layer, the outermost hop first). Each iteration is
    the next epoch; ``set_epoch`` chooses one.
    """

    def __init__(
        self, graph: Graph, num_neighbors: Sequence[int], input_nodes: str = "train", batch_size: int = 1, *,
        replace: bool = False, shuffle: bool = False, seed: int = 0, threads: int = 1, prefetch: int = 3,
        rank: int = 0, layout: RankLayout | None = None, deadline: float = 120.0,
    ):  # fmt: skip
        layout = layout or RankLayout.single(graph.manifest.num_parts)
        self._settings = LoaderSettings(
            input_nodes, tuple(num_neighbors), batch_size * layout.world_size, seed, replace, shuffle,
            threads, prefetch, deadline=deadline,
        )  # fmt: skip
        self._shares = BatchLoader(graph, self._settings, rank, layout)
        self._sampler = BatchSampler(graph, self._settings, edges=True, attrs=tuple(graph.manifest.attrs))
        self._epoch = 0

    def __len__(self) -> int:
        return len(self._shares)

    def set_epoch(self, epoch: int) -> None:
        """The next iteration gives this epoch's batches."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[Data]:
        epoch, self._epoch = self._epoch, self._epoch + 1
        s, shares = self._settings, self._shares.shares(epoch)
        return ordered_ahead(self._load, shares, threads=s.threads, ahead=s.prefetch, deadline=s.patience)

    def _load(self, share: Share) -> Data:
        return to_data(self._sampler.sample(share))


def to_data(sampled: Sampled) -> Data:
    """A sampled share as torch_geometric's ``Data``."""
    subgraph, rows = sampled.subgraph, dict(sampled.rows)
    n_id = torch.from_numpy(rows.pop("orig_id"))
    data = Data(edge_index=torch.cat([_edge_index(hop) for hop in subgraph.hops] or [_no_edges()], dim=1))
    for name, values in rows.items():
        data[name] = as_label(values) if name == "y" else torch.from_numpy(values)
    data.n_id, data.num_nodes = n_id, len(n_id)
    data.e_id = torch.from_numpy(np.concatenate([np.empty(0, np.int64), *(_edge_ids(hop) for hop in subgraph.hops)]))
    data.batch_size = subgraph.num_seeds
    data.input_id = torch.from_numpy(sampled.share.input_id)
    data.num_sampled_nodes = list(subgraph.num_sampled_nodes)
    data.num_sampled_edges = [len(hop.src) for hop in subgraph.hops]
    data.blocks = to_blocks(subgraph)
    return data


def _edge_index(hop: HopEdges) -> torch.Tensor:
    return torch.from_numpy(np.stack([hop.src, hop.dst]).astype(np.int64))


def _no_edges() -> torch.Tensor:
    return torch.empty((2, 0), dtype=torch.int64)


def _edge_ids(hop: HopEdges) -> np.ndarray:
    assert hop.edge_id is not None, "the sampler was asked to list edges"
    return hop.edge_id.astype(np.int64)
