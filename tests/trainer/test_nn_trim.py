"""Tests of trimmed torch_geometric models: the seeds get the same rows, but fewer rows are computed."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData

from nn_kit import CITES, HAS, NUM_NODES, WRITES, WROTE, pyg_batch, typed_edges
from trainer.core.errors import SettingsError
from trainer.nn import trim

EDGE_TYPES = [WRITES, CITES, HAS, WROTE]
TYPES = ["paper", "author", "topic"]
METADATA = (TYPES, EDGE_TYPES)


def typed_data(fanouts: tuple[int, ...] = (2, 2, 1)) -> HeteroData:
    edges = {of: index for of, index in typed_edges().items() if of in EDGE_TYPES}
    return pyg_batch(edges, [4, 7, 11], fanouts, {of: NUM_NODES[of] for of in TYPES})


def plain_data(fanouts: tuple[int, ...] = (2, 2, 1)) -> Data:
    typed = pyg_batch({CITES: typed_edges()[CITES]}, [4, 7, 11], fanouts, {"paper": NUM_NODES["paper"]})
    data = typed.to_homogeneous(add_node_type=False, add_edge_type=False)
    data.num_sampled_nodes = typed["paper"].num_sampled_nodes
    data.num_sampled_edges = typed[CITES].num_sampled_edges
    return data


class LastRows:
    """Records the number of source rows in the latest call of a convolution."""

    def __init__(self, conv: nn.Module):
        self.rows = 0
        conv.register_forward_pre_hook(self.note, with_kwargs=True)

    def note(self, _: nn.Module, args: tuple[Any, ...], __: dict[str, Any]) -> None:
        x = args[0]
        ends = x.values() if isinstance(x, dict) else x[:1] if isinstance(x, tuple) else [x]
        self.rows = sum(map(len, ends))


def hop_rows(data: Data | HeteroData, hops: int, types: list[str] | None = None) -> int:
    if isinstance(data, Data):
        return sum(data.num_sampled_nodes[: hops + 1])
    return sum(sum(data[of].num_sampled_nodes[: hops + 1]) for of in types or TYPES)


HOMO: dict[str, Callable[[], nn.Module]] = {
    "sage": lambda: pyg.GraphSAGE(4, 8, 3, 5),
    "gat-norm": lambda: pyg.GAT(4, 8, 3, 5, heads=2, norm="layer_norm", norm_kwargs={"mode": "node"}),
    "jk-cat": lambda: pyg.GIN(4, 8, 3, 5, jk="cat"),
    "jk-max": lambda: pyg.GraphSAGE(4, 8, 3, 5, jk="max", dropout=0.5),
    "gcn-unnormalized": lambda: pyg.GCN(4, 8, 3, 5, normalize=False),
    "stack": lambda: trim.ConvStack([pyg.SAGEConv(4, 8), pyg.GATConv(8, 8), pyg.SAGEConv(8, 5)]),
}


@pytest.mark.parametrize("name", HOMO)
def test_homogeneous_models(name: str) -> None:
    data, model = plain_data(), HOMO[name]().eval()
    expected = copy.deepcopy(model)(data.x, data.edge_index)[:3]
    trimmed = trim.Trimmed(model).eval()
    last = LastRows(model.convs[-1])
    torch.testing.assert_close(trimmed(data)[:3], expected, atol=1e-5, rtol=1e-5)
    assert last.rows == hop_rows(data, 1) < hop_rows(data, 3)


@pytest.mark.parametrize("hops", [2, 4])
def test_numbers_of_hops_and_layers_may_differ(hops: int) -> None:
    data, model = plain_data((2, 2, 2, 2)[:hops]), pyg.GraphSAGE(4, 8, 3, 5)
    expected = copy.deepcopy(model)(data.x, data.edge_index)[:3]
    torch.testing.assert_close(trim.Trimmed(model)(data)[:3], expected, atol=1e-5, rtol=1e-5)


TO_HETERO: dict[str, Callable[[], Any]] = {
    "sage": lambda: pyg.GraphSAGE((4, 4), 8, 3, 5),
    "gat-jk": lambda: pyg.GAT((4, 4), 8, 3, 5, jk="cat", add_self_loops=False),
    "stack": lambda: trim.ConvStack([pyg.SAGEConv(4, 8), pyg.GATv2Conv(8, 5, add_self_loops=False)]),
    "lazy": lambda: pyg.GraphSAGE((-1, -1), 8, 3, 5),
}


@pytest.mark.parametrize("aggr", ["sum", "mean"])
@pytest.mark.parametrize("name", TO_HETERO)
def test_to_hetero(name: str, aggr: str) -> None:
    data, model = typed_data(), TO_HETERO[name]()
    theirs = pyg.to_hetero(copy.deepcopy(model), METADATA, aggr).eval()
    theirs(data.x_dict, data.edge_index_dict)  # initialises lazy shapes
    ours = trim.to_hetero(model, METADATA, aggr).eval()
    ours(data)
    ours.model.load_state_dict(theirs.state_dict())
    last = LastRows(ours.model.get_submodule(f"convs.{ours.num_layers - 1}.author__writes__paper"))
    expected = theirs(data.x_dict, data.edge_index_dict)["paper"][:3]
    torch.testing.assert_close(ours(data)["paper"][:3], expected, atol=1e-5, rtol=1e-5)
    assert last.rows == hop_rows(data, 1, ["author"]) < hop_rows(data, 3, ["author"])


def test_to_hetero_of_a_sequence_returns_other_widths() -> None:
    data = typed_data()
    model = trim.to_hetero([pyg.SAGEConv((-1, -1), 8), pyg.SAGEConv((-1, -1), 5)], METADATA)
    other = {of: torch.ones(len(x), 6) for of, x in data.x_dict.items()}
    assert model(data, other)["paper"].shape[1] == 5


def hetero_convs(**options: Any) -> list[nn.Module]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return [
            pyg.HeteroConv({of: pyg.GATConv(a, b, add_self_loops=False, **options) for of in EDGE_TYPES})
            for a, b in ((4, 8), (8, 8), (8, 5))
        ]


def untrimmed(convs: list[nn.Module], data: HeteroData, **attrs: Any) -> dict[str, Tensor]:
    rows = data.x_dict
    for conv in convs[:-1]:
        rows = {of: h.relu() for of, h in conv(rows, data.edge_index_dict, **attrs).items()}
    return convs[-1](rows, data.edge_index_dict, **attrs)


@pytest.mark.parametrize("target", [None, "paper"])
def test_stacks_of_hetero_conv(target: str | None) -> None:
    data, convs = typed_data(), hetero_convs()
    ours, last = trim.TrimmedHetero(convs, target), LastRows(convs[-1])
    expected = untrimmed(convs, data)["paper"][:3]
    torch.testing.assert_close(ours(data)["paper"][:3], expected, atol=1e-5, rtol=1e-5)
    assert last.rows == hop_rows(data, 1, ["paper", "author"] if target else None) < hop_rows(data, 3)


def test_edge_features_are_trimmed_along() -> None:
    data, convs = typed_data(), hetero_convs(edge_dim=3)
    expected = untrimmed(convs, data, edge_attr_dict=data.edge_attr_dict)["paper"][:3]
    trimmed = trim.TrimmedHetero(convs, "paper", edge_arg="edge_attr")
    torch.testing.assert_close(trimmed(data)["paper"][:3], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("target", [None, "paper"])
def test_stacks_of_hgt(target: str | None) -> None:
    data = typed_data()
    convs = [pyg.HGTConv(a, 8, METADATA, heads=2) for a in (4, 8, 8)]
    ours, last = trim.TrimmedHetero(convs, target), LastRows(convs[-1])
    expected = untrimmed(convs, data)["paper"][:3]
    torch.testing.assert_close(ours(data)["paper"][:3], expected, atol=1e-5, rtol=1e-5)
    assert last.rows < hop_rows(data, 3)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (pyg.GCN(4, 8, 2, 5), "GCNConv"),
        (trim.ConvStack([pyg.TAGConv(4, 5, normalize=False)]), "TAGConv"),
        (trim.ConvStack([pyg.GatedGraphConv(4, 2)]), "GatedGraphConv"),
        (trim.ConvStack([pyg.EGConv(4, 8)]), "EGConv"),
        (trim.ConvStack([pyg.SAGEConv(4, 5, flow="target_to_source")]), "SAGEConv with flow='target_to_source'"),
        (pyg.GraphSAGE(4, 8, 2, 5, norm="layer_norm"), "LayerNorm"),
        (pyg.GraphSAGE(4, 8, 2, 5, norm="instance_norm"), "InstanceNorm"),
        (pyg.GIN(4, 8, 2, 5, norm="graph_norm"), "GraphNorm"),
    ],
)  # fmt: skip
def test_layers_that_read_more_than_one_hop_are_refused(model: Any, name: str) -> None:
    with pytest.raises(SettingsError, match=f"{name} cannot be trimmed"):
        trim.Trimmed(model)


def test_a_batch_without_hops_is_refused() -> None:
    data, typed = plain_data(), typed_data()
    del data.num_sampled_edges
    for of in EDGE_TYPES:
        typed[of].num_sampled_edges = None
    with pytest.raises(SettingsError, match="subgraph_type='directional'"):
        trim.Trimmed(pyg.GraphSAGE(4, 8, 3, 5))(data)
    with pytest.raises(SettingsError, match="subgraph_type='directional'"):
        trim.to_hetero(pyg.GraphSAGE(4, 8, 3, 5), METADATA)(typed)
