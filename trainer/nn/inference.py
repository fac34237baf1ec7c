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
from trainer.nn.trim import by_degrees


@torch.no_grad()
def inference(
    model: BasicGNN, loader: DistNeighborLoader, device: Any = None, embedding_device: Any = "cpu", cache: bool = False
) -> Tensor:
    """Compute the output of ``model`` for all nodes of a homogeneous graph, layer by layer. All ranks must call this.

    Replaces ``model.inference``. Each rank computes its share of the nodes, and every rank gets the whole result.

    Args:
        model: A ``BasicGNN`` (GraphSAGE, GCN, GIN, …) in evaluation mode, with ``jk`` None or ``"last"``.
        loader: Loader with ``num_neighbors=[-1]`` that yields every node once as a seed, with features ``x``. A model
            that normalises by degrees, such as GCN, needs ``[-1, -1]``, for the degrees of the seeds' neighbours. Each
            layer iterates over the loader once.
        device: Device on which the layers compute; default: the device of their inputs.
        embedding_device: Device that stores the rows of all nodes between layers: two float tensors [num_nodes, width]
            on every rank. ``gnnfleet.WholeGraph`` stores them in files instead.
        cache: Keep ids and edges of all batches in memory after the first layer, instead of sampling them again.

    Shapes:
        - **output:** float [num_nodes, out], by original id, on ``embedding_device``.

    Returns:
        The rows of all nodes.

    Raises:
        SettingsError: If ``model`` or ``loader`` does not meet the conditions above.
        ServiceError: If another host fails.
        PeerError: If another rank fails.

    Example:
        ```python
        import gnnfleet as gf
        from torch_geometric.nn import GraphSAGE

        graph = gf.open("parts")
        model = GraphSAGE(graph.num_features, 32, num_layers=2, out_channels=graph.num_classes).eval()
        logits = gf.nn.inference(model, gf.DistNeighborLoader(graph, [-1], batch_size=4096))  # [num_nodes, num_classes]
        ```
    """
    if not isinstance(model, BasicGNN) or model.jk_mode not in (None, "last"):
        raise SettingsError(
            "inference takes torch_geometric's BasicGNN models (GraphSAGE, GCN, …) with jk None or 'last'"
        )
    if model.training:
        raise SettingsError("the model is in training mode; call model.eval() first")
    if not isinstance(loader, DistNeighborLoader) or loader.graph.manifest.hetero:
        raise SettingsError("inference takes a DistNeighborLoader of a homogeneous graph")
    s, num_nodes = loader.settings, loader.graph.manifest.nodes[HOMO_NODE].num_nodes
    normalised = by_degrees(model, "computed by inference, layer by layer")
    if any(getattr(layer, "cached", False) for layer in model.modules()):
        raise SettingsError("inference needs a model without cached=True, which keeps the degrees of the first batch")
    wanted = [-1, -1] if normalised else [-1]
    # By weight, edges of weight 0 are left out; bidirectional batches have edges that the graph does not have.
    added = loader.output_options.subgraph_type == "bidirectional"
    if list(s.fanouts[HOMO_EDGE]) != wanted or s.time is not None or s.weight is not None or added:
        why = f", two hops because {normalised[0]} reads the degrees of neighbours" if normalised else ""
        raise SettingsError(
            f"inference needs all neighbours, and no others{why}: give the loader num_neighbors={wanted}, and no"
            " time_attr, weight_attr or subgraph_type='bidirectional'"
        )
    (inputs,) = loader.inputs.of.values()
    if not len(inputs.nodes) == len(np.unique(inputs.nodes)) == num_nodes or loader.options.drop_last:
        raise SettingsError("inference needs every node once as a seed: leave out input_nodes and drop_last")
    group = loader.group()
    if group.size != loader.layout.world_size:
        raise SettingsError(
            f"the loader divides its nodes among {loader.layout.world_size} ranks, but the process group has"
            f" {group.size}: call torch.distributed.init_process_group on each rank, or pass local=True to the loader"
        )
    cached: list[dict[str, Any]] | None = [] if cache else None
    rows: Tensor | None = None
    for layer in range(model.num_layers):
        found = group.agree(partial(_layer, model, layer, loader, rows, cached, device, embedding_device))
        rows = group.sum(found.cpu()).to(embedding_device)  # a rank's rows are 0 for nodes of other ranks
    assert rows is not None
    return rows


def _layer(
    model: BasicGNN, layer: int, loader: DistNeighborLoader, rows: Tensor | None, cached: list[dict[str, Any]] | None,
    device: Any, embedding_device: Any,
) -> Tensor:  # fmt: skip
    """Compute one layer's output [num_nodes, f]: rows of this rank's seeds, 0 for all other nodes.

    ``rows``: output of the previous layer; None for layer 0, whose input is ``x`` of the batches. ``cached``: ids and
    edges of all batches. Layer 0 appends them; later layers read them instead of iterating over ``loader``. If
    ``cached`` is None, every layer iterates over ``loader``.
    """
    found: Tensor | None = None
    for batch in cached if layer and cached is not None else loader:
        n_id, seeds = batch["n_id"].to(embedding_device), batch["batch_size"]
        if "x" not in batch and rows is None:
            raise SettingsError("inference: the batches have no x, the features of nodes; give the nodes some")
        x = batch["x"] if rows is None else rows[n_id]
        edges = batch["adj_t" if "adj_t" in batch else "edge_index"]
        if layer == 0 and cached is not None:
            cached.append({"n_id": n_id, "batch_size": seeds, "edge_index": edges})
        out = model.inference_per_layer(layer, x.to(device), edges.to(device), seeds).to(embedding_device)
        if found is None:
            found = out.new_zeros((loader.graph.manifest.nodes[HOMO_NODE].num_nodes, *out.shape[1:]))
        found[n_id[:seeds]] = out
    assert found is not None
    return found
