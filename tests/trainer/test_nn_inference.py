"""Tests of ``gf.nn.inference``, which applies a torch_geometric model to all nodes, layer by layer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch_geometric.transforms as T
from torch_geometric.nn import GAT, GCN, GraphSAGE

import trainer
from load_kit import hetero_data, homo_data, parts_of
from partitions import write_store
from train_kit import run_forked
from trainer import DistNeighborLoader
from trainer.core.errors import SettingsError
from trainer.graph.seed_order import RankLayout
from trainer.nn.inference import inference


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


def test_graphs_stored_as_adj_t():
    data = T.ToUndirected()(homo_data())
    for kind in (GraphSAGE, GCN):
        model = model_of(kind)
        sparse = T.ToSparseTensor(attr=None)(data.clone())
        at_once = model(data.x, data.edge_index) if kind is GraphSAGE else None
        result = inference(model, DistNeighborLoader(sparse, [-1], batch_size=13))
        assert result.shape == (60, 5) and (at_once is None or torch.allclose(result, at_once, atol=1e-5))


def test_unsupported_models_and_loaders_are_refused():
    model, data = model_of(), homo_data()
    refused = {
        "training mode": (model_of().train(), DistNeighborLoader(data, [-1])),
        "jk None or 'last'": (model_of(jk="cat"), DistNeighborLoader(data, [-1])),
        "BasicGNN models": (torch.nn.Linear(4, 5), DistNeighborLoader(data, [-1])),
        "of a homogeneous graph": (model, DistNeighborLoader(hetero_data(), [-1], "paper")),
        r"num_neighbors=\[-1\]": (model, DistNeighborLoader(data, [-1, -1])),
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
