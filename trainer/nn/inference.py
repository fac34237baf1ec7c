"""torch_geometric's ``BasicGNN.inference`` with this package's loaders."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.nn.models.basic_gnn import BasicGNN

from trainer.core.errors import SettingsError
from trainer.core.schema import HOMO_EDGE, HOMO_NODE
from trainer.loader.neighbor_loader import DistNeighborLoader


@torch.no_grad()
def inference(
    model: BasicGNN, loader: DistNeighborLoader, device: Any = None, embedding_device: Any = "cpu", cache: bool = False
) -> Tensor:
    """What ``model`` gives for all nodes of a homogeneous graph, layer by layer: [num_nodes, out], by original id.

    ``model.inference`` itself insists on torch_geometric's ``NeighborLoader``, and on all features in memory.

    Args:
        model: GraphSAGE, GCN, GIN, …, in evaluation mode, with ``jk`` None or ``"last"``.
        loader: brings every node once as a seed, with ``num_neighbors=[-1]``. Each layer iterates it once. All its
            ranks must make this call; each computes its share of the nodes, and all get the whole result.
        device: where the layers compute; default: where their inputs are.
        embedding_device: where a layer's rows of all nodes are kept: num_nodes × width floats twice, on every rank.
            Where that is too much, see ``gnnfleet.WholeGraph``.
        cache: keep ids and edges of all batches in memory after the first layer, instead of sampling them again.

    Raises ``SettingsError`` for another model or loader, ``ServiceError`` when another host fails, ``PeerError`` when
    another rank does.
    """
    _check(model, loader)
    group = loader.group()
    if group.size != loader.layout.world_size:
        raise SettingsError(
            f"the loader is shared out over {loader.layout.world_size} ranks, which are no process group: call"
            " torch.distributed.init_process_group on each, or pass local=True to the loader"
        )
    kept: list[dict[str, Any]] | None = [] if cache else None
    rows: Tensor | None = None
    for layer in range(model.num_layers):
        found = group.agree(partial(_layer, model, layer, loader, rows, kept, device, embedding_device))
        rows = group.sum(found.cpu()).to(embedding_device)  # other ranks' rows are 0
    assert rows is not None
    return rows


def _layer(
    model: BasicGNN, layer: int, loader: DistNeighborLoader, rows: Tensor | None, kept: list[dict[str, Any]] | None,
    device: Any, embedding_device: Any,
) -> Tensor:  # fmt: skip
    """What one layer gives for this rank's nodes, and 0 for the others: [num_nodes, f]. Fills ``kept`` at layer 0."""
    found: Tensor | None = None
    for batch in kept if layer and kept is not None else loader:
        n_id, seeds = batch["n_id"].to(embedding_device), batch["batch_size"]
        x = batch["x"] if rows is None else rows[n_id]
        edges = batch["adj_t" if "adj_t" in batch else "edge_index"]
        if layer == 0 and kept is not None:
            kept.append({"n_id": n_id, "batch_size": seeds, "edge_index": edges})
        out = model.inference_per_layer(layer, x.to(device), edges.to(device), seeds).to(embedding_device)
        if found is None:
            found = out.new_zeros((loader.graph.manifest.nodes[HOMO_NODE].num_nodes, *out.shape[1:]))
        found[n_id[:seeds]] = out
    assert found is not None
    return found


def _check(model: BasicGNN, loader: DistNeighborLoader) -> None:
    if not isinstance(model, BasicGNN) or model.jk_mode not in (None, "last"):
        raise SettingsError(
            "inference takes torch_geometric's BasicGNN models (GraphSAGE, GCN, …) with jk None or 'last'"
        )
    if model.training:
        raise SettingsError("the model is in training mode; call model.eval() first")
    if not isinstance(loader, DistNeighborLoader) or loader.graph.manifest.hetero:
        raise SettingsError("inference takes a DistNeighborLoader of a homogeneous graph")
    s, num_nodes = loader.settings, loader.graph.manifest.nodes[HOMO_NODE].num_nodes
    if s.fanouts[HOMO_EDGE] != (-1,) or s.time is not None:
        raise SettingsError("each layer needs all neighbours: give the loader num_neighbors=[-1], and no time_attr")
    (inputs,) = loader.inputs.of.values()
    if not len(inputs.nodes) == len(np.unique(inputs.nodes)) == num_nodes or loader.options.drop_last:
        raise SettingsError("the loader must bring every node once: leave out input_nodes and drop_last")
