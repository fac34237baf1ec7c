"""Tests of ``gf.nn.inference``, which applies a torch_geometric model to all nodes, layer by layer."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch_geometric.nn as pyg
import torch_geometric.transforms as T
from torch import nn
from torch_geometric.data import Data
from torch_geometric.nn import GAT, GCN, GraphSAGE
from torch_geometric.nn.models.basic_gnn import BasicGNN

import trainer
from load_kit import hetero_data, homo_data, parts_of
from partitions import write_store
from train_kit import run_forked
from trainer import DistNeighborLoader
from trainer.core.errors import SettingsError
from trainer.core.ranks import RankGroup, Ranks
from trainer.graph.seed_order import RankLayout
from trainer.loader.block_loader import BatchLoader, LoaderSettings
from trainer.nn import trim
from trainer.nn.graph_facts import facts_of
from trainer.nn.inference import inference
from trainer.nn.layerwise_inference import WholeGraph, stack_of
from trainer.nn.models import build_model
from trainer.nn.trim import by_degrees
from trainer.sampler.types import TimeRule
from trainer.train.settings import TrainSettings


def model_of(kind=GraphSAGE, **how):
    torch.manual_seed(3)
    return kind(4, hidden_channels=8, num_layers=3, out_channels=5, **how).eval()


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize(("kind", "jk"), [(GraphSAGE, None), (GraphSAGE, "last"), (GAT, None)])
def test_layer_by_layer_equals_the_whole_graph_at_once(kind, jk, cache):
    data, model = homo_data(), model_of(kind, jk=jk)
    whole = model(data.x, data.edge_index).detach()
    for source in (data, parts_of(data, 2)):
        loader = DistNeighborLoader(source, [-1], batch_size=13, shuffle=True)
        assert torch.allclose(inference(model, loader, cache=cache), whole, atol=1e-5)


def test_the_latest_neighbours_of_each_hop_are_those_that_are_sampled(tmp_path):
    data = homo_data()
    data.time = torch.full((60,), 1000)
    graph, model = (
        parts_of(data, 2),
        build_model(TrainSettings(fanouts=(4, 2), hidden=8), facts_of(parts_of(data).manifest)),
    )
    group = RankGroup(Ranks(), torch.device("cpu"))
    latest = WholeGraph(graph, graph.layout, group, tmp_path, 9, top=(4, 2), latest=TimeRule("edge_time", "edge", True))
    rows = latest.run(stack_of(model.eval()))["node"]
    sampled = LoaderSettings("train", (4, 2), 10, time_attr="edge_time", top=True)
    with torch.no_grad():
        for batch in BatchLoader(graph, sampled, 0, graph.layout).epoch(0):
            ids = graph.store.to_global("node", batch.n_id[: batch.num_seeds].numpy())
            assert torch.allclose(torch.from_numpy(rows.values[rows.shares.rows(ids)]), model(batch), atol=1e-5)


def test_graphs_stored_as_adj_t():
    data = T.ToUndirected()(homo_data())
    for kind, hops in ((GraphSAGE, 1), (GCN, 2)):
        model = model_of(kind)
        sparse = T.ToSparseTensor(attr=None)(data.clone())
        loader = DistNeighborLoader(sparse, [-1] * hops, batch_size=13)
        assert torch.allclose(inference(model, loader), model(data.x, sparse.adj_t), atol=1e-5)


def looped(seed):
    """Return data of a directed graph with self loops, duplicate edges and isolated nodes."""
    draw = torch.Generator().manual_seed(seed)
    edges = torch.randint(25, (2, 70), generator=draw)
    edges = torch.cat([edges, edges[:, :10], torch.tensor([[0, 1, 1, 28], [0, 1, 1, 28]])], 1)
    return Data(torch.randn(30, 4, generator=draw), edges)


DEGREES = torch.tensor([3, 5, 7, 8, 4, 2, 1])
PLAIN = {"GraphSAGE": {}, "GAT": {"heads": 2}, "GIN": {"norm": "batch_norm"}, "EdgeCNN": {}, "GCN": {},
         "PNA": {"aggregators": ["mean", "max"], "scalers": ["identity", "amplification"], "deg": DEGREES}}  # fmt: skip


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("name", PLAIN)
def test_all_models_equal_the_whole_graph_with_loops_duplicates_and_isolated_nodes(name, cache):
    model = model_of(getattr(pyg, name), **PLAIN[name])
    for seed in range(3):
        data = looped(seed)
        loader = DistNeighborLoader(data, [-1, -1] if name == "GCN" else [-1], batch_size=7)
        assert torch.allclose(inference(model, loader, cache=cache), model(data.x, data.edge_index), atol=1e-4)


def gcn_like(layer, jk=None):
    class Model(BasicGNN):
        supports_edge_weight, supports_edge_attr, supports_norm_batch = True, False, False

        def init_conv(self, in_channels, out_channels, **kwargs):
            return layer(in_channels, out_channels, **kwargs)

    return model_of(Model, jk=jk)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: model_of(GCN), r"two hops because GCNConv reads the degrees of neighbours.*num_neighbors=\[-1, -1\]"),
        (lambda: model_of(GCN, cached=True), "without cached=True"),
        (lambda: gcn_like(pyg.TAGConv), "TAGConv cannot be computed by inference, layer by layer: .* further hops"),
        (lambda: model_of(GraphSAGE, norm="layer_norm"), "LayerNorm cannot .* the rows of all nodes"),
        (lambda: model_of(GraphSAGE, norm="pair_norm"), "PairNorm cannot .* the rows of all nodes"),
        (lambda: model_of(GraphSAGE, flow="target_to_source"), "SAGEConv with flow='target_to_source' cannot .* out"),
    ],
)  # fmt: skip
def test_models_whose_rows_would_be_wrong_are_refused(model, message):
    with pytest.raises(SettingsError, match=message):
        inference(model(), DistNeighborLoader(looped(0), [-1], batch_size=7))


#: Arguments of convolutions that are not made by ``(6, 5)``.
MADE = {
    "SimpleConv": lambda conv: conv(), "ChebConv": lambda conv: conv(6, 5, K=2), "AGNNConv": lambda conv: conv(),
    "GatedGraphConv": lambda conv: conv(6, 2), "GINConv": lambda conv: conv(nn.Linear(6, 5)),
    "GINEConv": lambda conv: conv(nn.Linear(6, 5), edge_dim=3), "SSGConv": lambda conv: conv(6, 5, 0.1),
    "APPNP": lambda conv: conv(2, 0.1), "RGCNConv": lambda conv: conv(6, 5, 3), "RGATConv": lambda conv: conv(6, 5, 3),
    "FastRGCNConv": lambda conv: conv(6, 5, 3),
    "GMMConv": lambda conv: conv(6, 5, dim=3, kernel_size=2), "NNConv": lambda conv: conv(6, 5, nn.Linear(3, 30)),
    "CGConv": lambda conv: conv(6, dim=3), "EdgeConv": lambda conv: conv(nn.Linear(12, 5)),
    "PNAConv": lambda conv: conv(6, 5, ["mean", "std"], ["identity", "attenuation"], DEGREES),
    "GCN2Conv": lambda conv: conv(6, 0.1), "PANConv": lambda conv: conv(6, 5, 2), "FAConv": lambda conv: conv(6),
    "WLConvContinuous": lambda conv: conv(), "EGConv": lambda conv: conv(6, 8, ["symnorm", "max"], 2, 2),
    "PDNConv": lambda conv: conv(6, 5, 3, 4), "LGConv": lambda conv: conv(), "GPSConv": lambda conv: conv(6, None),
    "AntiSymmetricConv": lambda conv: conv(6), "DirGNNConv": lambda conv: conv(pyg.SAGEConv(6, 5)),
    "HANConv": lambda conv: conv(6, 5, (["node"], [("node", "to", "node")])),
}  # fmt: skip

WITH_EDGE_ATTR = ("GINEConv", "GMMConv", "NNConv", "CGConv", "PDNConv")

#: Convolutions on other data: on positions, on several kinds of nodes or edges, on text labels, or with other packages.
ELSEWHERE = {
    "MessagePassing",
    "CuGraphSAGEConv", "GravNetConv", "CuGraphGATConv", "FusedGATConv", "CuGraphRGCNConv", "SignedConv", "PointNetConv",
    "SplineConv", "DynamicEdgeConv", "XConv", "PPFConv", "PointTransformerConv", "HypergraphConv", "WLConv", "HGTConv",
    "HEATConv", "HeteroConv", "PointGNNConv", "MeshCNNConv", "DNAConv",
}  # fmt: skip


def within(edges, seeds, hops):
    """Return the nodes of a sampled batch, seeds first, and the positions of its edges in ``edges``."""
    nodes, kept = seeds, torch.empty(0, dtype=torch.int64)
    for _ in range(hops):
        kept = torch.isin(edges[1], nodes).nonzero().flatten()
        more = edges[0, kept].unique()
        nodes = torch.cat([nodes, more[~torch.isin(more, nodes)]])
    return nodes, kept


@pytest.mark.parametrize("name", sorted(set(pyg.conv.classes) - ELSEWHERE))
def test_every_convolution_is_right_on_the_hops_it_needs_or_refused(name):
    torch.manual_seed(1)
    conv = MADE.get(name, lambda conv: conv(6, 5))(getattr(pyg, name)).eval()
    try:
        hops = 2 if by_degrees(conv, "used") else 1
    except SettingsError:
        assert isinstance(conv, trim.FURTHER + trim.ALL_NODES)
        return
    edges, x = looped(2).edge_index, torch.randn(30, 6)
    count, known = edges.shape[1], inspect.signature(conv.forward).parameters
    of_edges = {"edge_attr": torch.rand(count, 3), "edge_type": torch.arange(count) % 3}
    left_out = () if name in WITH_EDGE_ATTR else ("edge_attr",)
    of_edges = {key: value for key, value in of_edges.items() if key in known and key not in left_out}

    def rows(nodes, edge_index, kept):
        first = {"x_0": x[nodes]} if "x_0" in known else {}
        return conv(x[nodes], edge_index=edge_index, **first, **{key: of[kept] for key, of in of_edges.items()})

    whole = rows(torch.arange(30), edges, torch.arange(count))
    for seeds in torch.arange(30).split(4):
        nodes, kept = within(edges, seeds, hops)
        place = torch.zeros(30, dtype=torch.int64).index_copy_(0, nodes, torch.arange(len(nodes)))
        torch.testing.assert_close(rows(nodes, place[edges[:, kept]], kept)[: len(seeds)], whole[seeds])


def test_unsupported_models_and_loaders_are_refused():
    model, data = model_of(), homo_data()
    refused = {
        "training mode": (model_of().train(), DistNeighborLoader(data, [-1])),
        "jk None or 'last'": (model_of(jk="cat"), DistNeighborLoader(data, [-1])),
        "BasicGNN models": (torch.nn.Linear(4, 5), DistNeighborLoader(data, [-1])),
        "of a homogeneous graph": (model, DistNeighborLoader(hetero_data(), [-1], "paper")),
        r"num_neighbors=\[-1\]": (model, DistNeighborLoader(data, [-1, -1])),
        "no others": (model, DistNeighborLoader(data, [-1], subgraph_type="bidirectional")),
        "or subgraph_type": (model, DistNeighborLoader(data, [-1], weight_attr="edge_weight")),
        "have no x": (model, DistNeighborLoader(parts_of(data), [-1], attrs=["y"])),
        "every node once": (model, DistNeighborLoader(data, [-1], [1, 2])),
        "divides its nodes among 2 ranks, but the process group has 1": (
            model, DistNeighborLoader(data, [-1], rank=1, layout=RankLayout.everywhere(2, 1)),
        ),
    }  # fmt: skip
    for message, (given, loader) in refused.items():
        with pytest.raises(SettingsError, match=message):
            inference(given, loader)


def rank_of_two(folder: Path) -> None:
    dist.init_process_group("gloo")
    loader = DistNeighborLoader(trainer.open(folder / "parts"), [-1], batch_size=7)
    result = inference(model_of(), loader)
    assert len(loader) * 2 * 7 >= 60 > (len(loader) - 1) * 2 * 7
    torch.save(result, folder / f"rank{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


def test_two_ranks_share_the_nodes_and_both_get_all(tmp_path):
    data = homo_data()
    write_store(tmp_path / "parts", parts_of(data, 2).store)
    for ended in run_forked(rank_of_two, (tmp_path,), 2):
        assert ended.returncode == 0, ended.output
    whole = model_of()(data.x, data.edge_index)
    for rank in (0, 1):
        assert torch.allclose(torch.load(tmp_path / f"rank{rank}.pt"), whole, atol=1e-5)


def test_complex_features_are_refused():
    data = homo_data()
    data.x = data.x * 1j
    with pytest.raises(SettingsError, match="x of node type 'node' is complex64; models need real numbers"):
        facts_of(parts_of(data).manifest)
