"""Tests of heterogeneous layers and models on blocks: equal to torch_geometric's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch.nn import functional

from nn_kit import (
    CITES,
    DIMS,
    HAS,
    NUM_NODES,
    ON,
    WRITES,
    WROTE,
    Config,
    homogeneous,
    node_rows,
    typed_batch,
    typed_edges,
    whole_graph_block,
)  # fmt: skip
from trainer.core.batch import Batch, Block, HeteroBatch
from trainer.core.errors import DataError, SettingsError
from trainer.core.schema import HOMO_EDGE, HOMO_NODE, node_salt
from trainer.nn import hetero_layers as layers
from trainer.nn.graph_facts import GraphFacts, LayerNeed, layer_needs
from trainer.nn.models import build_model

EDGE_TYPES = (WRITES, CITES, HAS, WROTE, ON)
FACTS = GraphFacts(True, "paper", tuple(NUM_NODES), EDGE_TYPES, DIMS, 4)
WHOLE = LayerNeed(tuple(NUM_NODES), ("paper", "author", "topic"), EDGE_TYPES)  #: no edge ends at a board
HETERO = ["rgcn", "hgt", "rsage"]


def whole_graph(dim: int) -> tuple[dict, dict, dict]:  # type: ignore[type-arg]
    """Return rows of every node, edges, and one block per edge type with all its edges."""
    edges = {of: torch.from_numpy(index) for of, index in typed_edges().items()}
    blocks = {}
    for of, index in edges.items():
        block = whole_graph_block(NUM_NODES[of[2]], index)
        blocks[of] = replace(block, num_src=NUM_NODES[of[0]])
    return {of: node_rows(of, n, dim) for of, n in NUM_NODES.items()}, edges, blocks


def as_one_type(x: dict[str, Tensor], edges: dict) -> tuple[Tensor, Tensor, Tensor, dict[str, int]]:  # type: ignore[type-arg]
    """Join all types for ``RGCNConv``.

    Return the rows, the edges, the number of each edge's type, and the index of the first row of each node type.
    """
    first = dict(zip(x, np.cumsum([0, *map(len, x.values())]).tolist(), strict=False))
    index = [edges[of] + torch.tensor([[first[of[0]]], [first[of[2]]]]) for of in EDGE_TYPES]
    number = [torch.full((edges[of].shape[1],), place) for place, of in enumerate(EDGE_TYPES)]
    return torch.cat(list(x.values())), torch.cat(index, 1), torch.cat(number), first


@pytest.mark.parametrize("in_dim,out_dim", [(6, 20), (20, 6)])
@pytest.mark.parametrize("num_bases", [None, 3])
def test_rgcn_equals_torch_geometric(in_dim: int, out_dim: int, num_bases: int | None) -> None:
    x, edges, blocks = whole_graph(in_dim)
    ours = layers.RGCNConv(WHOLE, in_dim, out_dim, num_bases)
    theirs = pyg.RGCNConv(in_dim, out_dim, len(EDGE_TYPES), num_bases)
    ours.load_state_dict(theirs.state_dict())
    out, (rows, index, number, first) = ours(blocks, x, NUM_NODES), as_one_type(x, edges)
    whole = theirs(rows, index, number)
    assert set(out) == set(WHOLE.targets)
    for of, h in out.items():
        torch.testing.assert_close(h, whole[first[of] : first[of] + len(h)], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("aggr", ["sum", "mean"])
def test_hetero_sage_equals_torch_geometric(aggr: str) -> None:
    x, edges, blocks = whole_graph(9)
    ours = layers.HeteroSAGEConv(WHOLE, 9, 14, aggr)
    with pytest.warns(UserWarning, match="do not get updated"):
        theirs = pyg.HeteroConv({of: pyg.SAGEConv(9, 14) for of in EDGE_TYPES}, aggr)
    ours.load_state_dict(theirs.state_dict())
    out, expected = ours(blocks, x, NUM_NODES), theirs(x, edges)
    assert set(out) == set(expected)
    for of, h in out.items():
        torch.testing.assert_close(h, expected[of], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("in_dim", [12, 5])
def test_hgt_equals_torch_geometric(in_dim: int) -> None:
    # The skip connection is active at input width 12 and inactive at width 5.
    torch.manual_seed(0)
    x, edges, blocks = whole_graph(in_dim)
    theirs = pyg.HGTConv(in_dim, 12, (list(NUM_NODES), list(EDGE_TYPES)), heads=3)
    for name, parameter in theirs.named_parameters():
        if name.startswith(("skip", "p_rel")):
            nn.init.normal_(parameter)  # by default all are 1
    ours = layers.HGTConv(WHOLE, dict.fromkeys(NUM_NODES, in_dim), 12, 3)
    assert ours.load_state_dict(theirs.state_dict(), strict=False).missing_keys == []
    out, expected = ours(blocks, x, NUM_NODES), theirs(x, edges)
    assert set(out) == set(expected)
    for of, h in out.items():
        torch.testing.assert_close(h, expected[of], atol=1e-5, rtol=1e-5)


def test_scores_of_neighbours_weight_the_attention_of_hgt() -> None:
    torch.manual_seed(0)
    need = LayerNeed(("paper",), ("paper",), (CITES,))
    layer, x = layers.HGTConv(need, {"paper": 8}, 8, heads=2), {"paper": torch.randn(5, 8)}
    twice = Block(torch.tensor([0, 3, 4]).int(), torch.tensor([3, 3, 2, 4]).int(), 5)
    scored = Block(
        torch.tensor([0, 2, 3]).int(), torch.tensor([3, 2, 4]).int(), 5, edge_weight=torch.tensor([4, 2, 9.0])
    )
    rows = [layer({CITES: block}, x, {"paper": 2})["paper"] for block in (twice, scored)]
    assert torch.allclose(*rows, atol=1e-6)


def test_layers_compute_only_types_that_reach_the_target() -> None:
    last, first = reversed(layer_needs(tuple(NUM_NODES), EDGE_TYPES, "paper", 2))
    assert last == LayerNeed(("paper", "author"), ("paper",), (WRITES, CITES))
    assert first == LayerNeed(("paper", "author"), ("paper", "author"), (WRITES, CITES, WROTE))
    (board,) = layer_needs(tuple(NUM_NODES), EDGE_TYPES, "board", 1)
    assert board == LayerNeed(("board",), ("board",), ())


def facts_for(target: str) -> GraphFacts:
    return replace(FACTS, target=target)


@pytest.mark.parametrize("target", ["paper", "topic", "board"])
@pytest.mark.parametrize("model", HETERO)
def test_every_parameter_gets_a_gradient(model: str, target: str) -> None:
    net = build_model(Config(model, fanouts=(3, 2)), facts_for(target))
    logits = net(typed_batch(typed_edges(), [2, 0, 1], (3, 2), target=target))
    assert logits.shape == (3, 4)
    functional.cross_entropy(logits, torch.tensor([1, 0, 3])).backward()
    missing = [name for name, parameter in net.named_parameters() if parameter.grad is None]
    assert missing == []


@pytest.mark.parametrize("model", HETERO)
def test_a_batch_without_seeds_gives_zero_gradients(model: str) -> None:
    net = build_model(Config(model, fanouts=(3, 2)), FACTS)
    logits = net(typed_batch(typed_edges(), [], (3, 2)))
    assert logits.shape == (0, 4)
    functional.cross_entropy(logits, torch.empty(0, dtype=torch.int64), reduction="sum").backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name


@pytest.mark.parametrize("model", HETERO)
def test_rows_of_a_seed_do_not_depend_on_the_other_seeds(model: str) -> None:
    # With dropout on, two halves of the seeds give the same logits as the whole batch.
    torch.manual_seed(0)
    net = build_model(Config(model, fanouts=(-1, -1), dropout=0.4, input_dropout=0.3), FACTS)
    whole = net(typed_batch(typed_edges(), [5, 9, 1, 28], (-1, -1)))
    halves = [net(typed_batch(typed_edges(), seeds, (-1, -1))) for seeds in ([5, 9], [1, 28])]
    torch.testing.assert_close(torch.cat(halves), whole, atol=1e-5, rtol=1e-5)


def test_types_with_equal_ids_do_not_share_dropout_masks() -> None:
    assert node_salt(HOMO_NODE) == 0
    assert len({node_salt(of) for of in NUM_NODES}) == len(NUM_NODES)
    net = build_model(Config("rsage", hidden=400, fanouts=(-1,), dropout=0.5), FACTS)
    batch = replace(typed_batch(typed_edges(), [0, 1], (-1,)), n_id={of: torch.zeros(40).long() for of in NUM_NODES})
    rows = net._dropped({of: torch.ones(1, 400) for of in ("paper", "author")}, batch, 1, 0.5)
    assert 0.3 < (rows["paper"] == rows["author"]).float().mean() < 0.7


class CountRows:
    """Records the number of output rows of each layer, by type."""

    def __init__(self, net: nn.Module):
        self.rows: list[dict[str, int]] = []
        for layer in net.layers:
            layer.register_forward_hook(lambda _, __, out: self.rows.append({of: len(h) for of, h in out.items()}))


@pytest.mark.parametrize("model", HETERO)
def test_layers_compute_rows_of_their_targets_only(model: str) -> None:
    net = build_model(Config(model, fanouts=(2, 2)), FACTS)
    counted, batch = CountRows(net), typed_batch(typed_edges(), [3, 4], (2, 2))
    net(batch)
    before = {of: counts[1] for of, counts in batch.num_nodes.items()}
    assert counted.rows == [{"paper": before["paper"], "author": before["author"]}, {"paper": 2}]
    assert before["paper"] < batch.num_nodes["paper"][2]


def test_featureless_types_without_embeddings_have_one_vector() -> None:
    batch = typed_batch(typed_edges(), [3, 4], (-1, -1))
    plain = build_model(Config("rgcn", fanouts=(-1, -1)), FACTS)
    rows = plain.inputs(batch)["author"]
    assert rows.shape == (len(batch.n_id["author"]), 16) and torch.equal(rows, rows[:1].expand_as(rows))


class ExternalEmbeddings:
    dim, num_nodes = 16, {"author": 20, "board": 3}

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    def lookup(self, n_id: dict[str, Tensor]) -> dict[str, Tensor]:
        self.asked.append(list(n_id))
        return {of: torch.ones(len(ids), 16) for of, ids in n_id.items()}


def test_external_embeddings_are_looked_up_once_per_batch() -> None:
    rows = ExternalEmbeddings()
    net = build_model(Config("hgt", fanouts=(2, 2)), FACTS, rows)
    for seeds in ([1, 2], []):
        net(typed_batch(typed_edges(), seeds, (2, 2)))
    assert rows.asked == [["author"], ["author"]]
    assert not [name for name in net.state_dict() if "embed" in name]
    rows.dim = 8
    with pytest.raises(SettingsError, match="embeddings are 8 wide, hidden rows 16"):
        build_model(Config("rgcn", fanouts=(-1, -1)), FACTS, rows)


def test_models_fit_the_kind_of_graph() -> None:
    with pytest.raises(SettingsError, match="model 'sage' is for homogeneous graphs, .*; use rgcn, hgt, rsage"):
        build_model(Config("sage"), FACTS)
    with pytest.raises(DataError, match="nodes have no x"):
        build_model(Config("gat"), replace(homogeneous(), in_dims={}))


@pytest.mark.parametrize("model", HETERO)
def test_a_homogeneous_batch_is_one_with_a_single_type(model: str) -> None:
    net = build_model(Config(model, fanouts=(2, 2)), homogeneous()).eval()
    edges = {HOMO_EDGE: typed_edges()[CITES]}
    typed = typed_batch(edges, [3, 4], (2, 2), {HOMO_NODE: 30}, target=HOMO_NODE, dims={HOMO_NODE: 5})
    blocks = tuple(layer[HOMO_EDGE] for layer in typed.blocks)
    plain = Batch(0, typed.key, 2, 2, typed.n_id[HOMO_NODE], typed.x[HOMO_NODE], typed.y, typed.input_id, blocks)
    assert torch.equal(net(plain), net(typed))


def planted(seeds: list[int]) -> tuple[HeteroBatch, Tensor]:
    """Return a batch of papers and their classes."""
    # a paper's class follows from the features of the only other paper of its author, two hops away
    papers, authors = np.arange(60), np.arange(60) // 2
    edges = {WRITES: np.stack([authors, papers]), WROTE: np.stack([papers, authors])}
    counts = {"paper": 60, "author": 30}
    batch = typed_batch(edges, seeds, (-1, -1), counts, dims={"paper": 3})
    x = node_rows("paper", 60, 3)
    return batch, (x[torch.tensor(seeds) ^ 1].argmax(1))


@pytest.mark.parametrize("model", HETERO)
def test_models_learn_from_two_hops_away(model: str) -> None:
    facts = GraphFacts(True, "paper", ("paper", "author"), (WRITES, WROTE), {"paper": 3}, 3)
    net = build_model(Config(model, hidden=32, fanouts=(-1, -1), dropout=0.0), facts)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    batch, y = planted(list(range(60)))
    for _ in range(80):
        loss = functional.cross_entropy(net(batch), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert (net(batch).argmax(1) == y).float().mean() > 0.9
