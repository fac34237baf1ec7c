"""GraphSAINT's normalisation: how often nodes and edges come up, estimated from subgraphs drawn for it alone."""

from __future__ import annotations

import hashlib
import io
import os
import sys
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.core.arrays import Ids
from trainer.core.errors import SettingsError
from trainer.core.ranks import RankGroup, Ranks
from trainer.core.schema import HOMO_EDGE, HOMO_NODE
from trainer.loader.induced import Ends
from trainer.loader.prefetch import ordered_ahead
from trainer.sampler.subgraph import SeedSet

if TYPE_CHECKING:
    from trainer.loader.graph_saint import GraphSAINTSampler

_NORM_EPOCH = -1  #: the "epoch" of the subgraphs that statistics are made from

_FORMAT = "gnnfleet-saint-norm 1"


@dataclass(frozen=True)
class Norm:
    """Coefficients by original id."""

    node: Tensor  #: float32 [N] weight of a node's loss
    edge: Tensor  #: float32 [E] weight of an edge's message


def saint_norm(
    loader: GraphSAINTSampler, ends: Ends, coverage: int, save_dir: str | Path | None, log: bool
) -> Norm:  # fmt: skip
    """The normalisation of a loader's subgraphs; from ``save_dir`` if it was made for the same.

    Numbers and formulas are torch_geometric's. A collective call where the loader's ranks are a process group.
    Raises ``ServiceError``, and ``SettingsError`` for a file or folder that cannot be read or written.
    """
    group = _sharing(loader)
    key = _identity(loader, ends, coverage)
    path = None if save_dir is None else Path(save_dir) / f"{type(loader).__name__.lower()}_{coverage}_{key[:16]}.pt"
    kept = None if path is None else _read(path, key)
    if all(group.gather(kept is not None)):
        assert kept is not None
        return kept
    norm, num_subgraphs = _estimated(loader, ends, coverage, group)
    if path is not None:
        _write(path, key, norm)
    if log:
        print(f"GraphSAINT normalisation: {num_subgraphs} subgraphs, {coverage} samples a node", file=sys.stderr)
    return norm


def _estimated(loader: GraphSAINTSampler, ends: Ends, coverage: int, group: RankGroup) -> tuple[Norm, int]:
    """Subgraphs are drawn in rounds of one epoch's over all ranks, until they have enough nodes."""
    num_nodes = loader.graph.manifest.nodes[HOMO_NODE].num_nodes
    nodes, edges = torch.zeros(num_nodes, dtype=torch.int32), torch.zeros(len(ends.src), dtype=torch.int32)
    sampler = loader.graph.sampler(loader.settings, {})

    def found(number: int) -> tuple[Ids, Ids]:
        key = loader.key(_NORM_EPOCH, number)
        rows = sampler.sample(SeedSet({HOMO_NODE: loader.draw_nodes(key)}), key).rows
        return rows[HOMO_NODE]["orig_id"], rows[HOMO_EDGE]["orig_id"]

    o, graph, num_subgraphs, total = loader.options, loader.graph, 0, 0
    work = ordered_ahead(
        found, count(group.rank, group.size), threads=graph.threads(o.threads, o.prefetch), ahead=o.prefetch,
        deadline=graph.patience(o.deadline, loader.num_requests),
    )  # fmt: skip
    while total < num_nodes * coverage:
        own = 0
        for _ in range(len(loader) * loader.layout.world_size // group.size):
            node_ids, edge_ids = next(work)
            nodes.numpy()[node_ids] += 1
            edges.numpy()[edge_ids] += 1
            own += len(node_ids)
        total += int(group.sum(torch.tensor([own])))
        num_subgraphs += len(loader) * loader.layout.world_size
    return _norm_of(group.sum(nodes), group.sum(edges), ends, num_subgraphs), num_subgraphs


def _norm_of(nodes: Tensor, edges: Tensor, ends: Ends, num_subgraphs: int) -> Norm:
    """From how many of the subgraphs each node and edge was in."""
    node, edge = nodes.float(), edges.float()
    ratio = (node[torch.from_numpy(ends.src)] / edge).clamp(0, 1e4)
    ratio[ratio.isnan()] = 0.1
    node[node == 0] = 0.1
    return Norm(num_subgraphs / node / len(node), ratio)


def _sharing(loader: GraphSAINTSampler) -> RankGroup:
    """The ranks that share the work: those of the process group if they are the loader's, else this one alone."""
    world_size = loader.layout.world_size
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() == world_size:
        return RankGroup.of_process(Ranks(loader.rank, world_size))
    return RankGroup(Ranks())


def _identity(loader: GraphSAINTSampler, ends: Ends, coverage: int) -> str:
    """Equal for equal graphs, settings and coverage: hex."""
    num_nodes = loader.graph.manifest.nodes[HOMO_NODE].num_nodes
    digest = hashlib.sha256(
        f"{loader.draws} {loader.options.seed} {loader.order.num_seeds} {coverage} {num_nodes}".encode()
    )
    digest.update(ends.src.data)
    digest.update(ends.dst.data)
    return digest.hexdigest()


def _read(path: Path, key: str) -> Norm | None:
    if not path.exists():
        return None
    try:
        kept = torch.load(io.BytesIO(path.read_bytes()), weights_only=True)
    except Exception as error:  # torch.load raises whatever its zip reader or unpickler meets
        raise SettingsError(f"save_dir: {path} cannot be read ({type(error).__name__}); delete it") from error
    if not isinstance(kept, dict) or kept.get("format") != _FORMAT or kept.get("made_for") != key:
        raise SettingsError(f"save_dir: {path} is not the normalisation its name says; delete it")
    return Norm(kept["node_norm"], kept["edge_norm"])


def _write(path: Path, key: str, norm: Norm) -> None:
    """Beside the final name, then renamed: other ranks may write the same."""
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    kept = {"format": _FORMAT, "made_for": key, "node_norm": norm.node, "edge_norm": norm.edge}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(kept, beside)
        beside.replace(path)
    except OSError as error:
        raise SettingsError(f"save_dir: {path} cannot be written: {error.strerror or error}") from error
