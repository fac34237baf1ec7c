"""Tests of layers on blocks, compared with torch_geometric's: values, gradients, dropout and weights."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch_geometric.utils import degree as in_degree

from nn_kit import Config, homogeneous, whole_graph_block
from trainer.core.batch import Batch, Block
from trainer.core.errors import SettingsError
from trainer.nn import layers
from trainer.nn.kernels import dropout, spmm
from trainer.nn.models import build_model


def random_block(num_dst: int, num_src: int, most: int, seed: int = 0) -> Block:
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, most + 1, num_dst)
    indptr = np.concatenate([[0], counts.cumsum()]).astype(np.int32)
    indices = rng.integers(0, max(num_src, 1), indptr[-1]).astype(np.int32)
    return Block(torch.from_numpy(indptr), torch.from_numpy(indices), num_src)


def directed_graph(num_nodes: int = 60, num_edges: int = 300) -> Tensor:
    """Return random directed edges without self loops or duplicates. Some nodes have no in-edge."""
    rng = np.random.default_rng(3)
    pairs = rng.integers(0, num_nodes, (2, num_edges))
    pairs[1] = np.minimum(pairs[1], num_nodes - 6)
    pairs = np.unique(pairs[:, pairs[0] != pairs[1]], axis=1)
    return torch.from_numpy(pairs)


def dense(block: Block) -> Tensor:
    matrix = torch.zeros(block.num_dst, block.num_src, dtype=torch.float64)
    matrix.index_put_((spmm.edge_targets(block), block.indices.long()), torch.ones(1).double(), accumulate=True)
    return matrix


@pytest.mark.parametrize("in_dim,out_dim", [(8, 24), (24, 3)])
def test_sage_equals_torch_geometric(in_dim: int, out_dim: int) -> None:
    edge_index, x = directed_graph(), torch.randn(60, in_dim)
    ours, theirs = layers.SAGEConv(in_dim, out_dim), pyg.SAGEConv(in_dim, out_dim)
    ours.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(ours(whole_graph_block(60, edge_index), x), theirs(x, edge_index), atol=1e-5, rtol=1e-5)


def graph_of(kind: str) -> Tensor:
    """Return edges of 60 nodes, some of them without in-edges. Kind ``loops`` has self loops and duplicates of both."""
    edge_index = directed_graph()
    if kind == "undirected":
        return torch.unique(torch.cat([edge_index, edge_index.flip(0)], 1), dim=1)
    loops = torch.tensor([0, 3, 3, 3, 7, 58, 59, 59]).expand(2, -1)  # 58 and 59 have no other in-edge
    return torch.cat([edge_index, edge_index[:, :40], loops], 1) if kind == "loops" else edge_index


@pytest.mark.parametrize("in_dim,out_dim", [(8, 24), (24, 3)])
@pytest.mark.parametrize("kind", ["undirected", "directed", "loops"])
def test_gcn_equals_torch_geometric(in_dim: int, out_dim: int, kind: str) -> None:
    edge_index, x = graph_of(kind), torch.randn(60, in_dim)
    ours, theirs = layers.GCNConv(in_dim, out_dim), pyg.GCNConv(in_dim, out_dim)
    ours.load_state_dict({"bias": theirs.bias, "lin.weight": theirs.lin.weight})
    degree = in_degree(edge_index[1, edge_index[0] != edge_index[1]], 60).long()
    out = ours(whole_graph_block(60, edge_index), x, degree)
    torch.testing.assert_close(out, theirs(x, edge_index), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["directed", "loops"])
@pytest.mark.parametrize("concat", [True, False])
def test_gat_equals_torch_geometric(concat: bool, kind: str) -> None:
    edge_index, x = graph_of(kind), torch.randn(60, 8)
    ours, theirs = layers.GATConv(8, 5, 3, concat), pyg.GATConv(8, 5, 3, concat)
    ours.load_state_dict(theirs.state_dict())
    out, expected = ours(whole_graph_block(60, edge_index), x), theirs(x, edge_index)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    out.square().sum().backward()
    expected.square().sum().backward()
    for name, weight in ours.named_parameters():
        torch.testing.assert_close(weight.grad, theirs.get_parameter(name).grad, atol=1e-3, rtol=1e-4)


def test_scores_of_neighbours_weight_means_and_attention() -> None:
    torch.manual_seed(0)
    block = Block(torch.tensor([0, 3, 5, 5]).int(), torch.tensor([3, 4, 0, 2, 5]).int(), 6)
    scores = torch.tensor([6.0, 2, 1, 0.03, 0.01])
    weighted, x = replace(block, edge_weight=scores), torch.randn(6, 4)
    share = torch.zeros(3, 6).index_put_((torch.tensor([0, 0, 0, 1, 1]), block.indices.long()), scores)
    share = share / share.sum(1, keepdim=True).clamp(min=1e-9)
    count = torch.tensor([[3.0], [2], [0]])
    gcn, gat = layers.GCNConv(4, 5), layers.GATConv(4, 3, 2, concat=True)
    assert torch.allclose(gcn(weighted, x), gcn.lin((x[:3] + count * share @ x) / (count + 1)) + gcn.bias, atol=1e-6)
    # the attention of plain edges, times the share of the score, as a multiple of that of plain edges
    looped = layers.with_self_loops(block)
    h = gat.lin(x).view(6, 2, 3)
    before, targets = gat._attention(looped, h), spmm.edge_targets(looped)
    multiple = (share * count)[targets, looped.indices.long()]
    multiple[looped.indptr[1:].long() - 1] = 1
    after = before * multiple[:, None]
    after = after / torch.zeros(3, 2).index_add_(0, targets, after)[targets]
    expected = torch.zeros(3, 2, 3).index_add_(0, targets, after[..., None] * h[looped.indices.long()])
    assert torch.allclose(gat(weighted, x), expected.flatten(1) + gat.bias, atol=1e-6)
    equal = replace(block, edge_weight=torch.full((5,), 0.2))
    assert torch.allclose(gat(equal, x), gat(block, x), atol=1e-6)


def test_attention_dropout_depends_on_the_edge_and_not_on_the_batch() -> None:
    layer, x, n_id = layers.GATConv(8, 5, 3, True, dropout=0.5), torch.randn(60, 8), torch.randperm(900)[:60]
    whole = whole_graph_block(60, graph_of("loops"))
    first = Block(whole.indptr[:21], whole.indices[: whole.indptr[20]], 60)  # the first 20 targets alone
    draw = layers.EdgeDraw(n_id, 7, 1)
    out = layer.without_bias(whole, x, draw=draw)
    torch.testing.assert_close(layer.without_bias(first, x, draw=draw), out[:20])
    other, layer.dropout = layer.without_bias(whole, x, draw=replace(draw, key=8)), 0.0
    certain = layer.without_bias(whole, x)
    assert not torch.allclose(out, other) and not torch.allclose(out, certain)
    torch.testing.assert_close(layer.eval().without_bias(whole, x, draw=draw), certain)
    kept = draw.dropped(torch.ones(len(whole.indices), 3), whole, 0.5, True)
    assert 0.4 < (kept == 2).float().mean() < 0.6 and set(kept.unique().tolist()) == {0, 2}


@pytest.mark.parametrize("name", ["sage", "gcn"])
def test_both_orders_of_linear_and_aggregation_agree(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = {"sage": layers.SAGEConv, "gcn": layers.GCNConv}[name](12, 7)
    block, x, degree = random_block(20, 50, 6), torch.randn(50, 12), torch.randint(6, 30, (50,))
    outs = []
    for first in (True, False):
        monkeypatch.setattr(layers, "linear_first", lambda *_, first=first: first)
        outs.append(layer(block, x, degree))
    torch.testing.assert_close(outs[0], outs[1], atol=1e-5, rtol=1e-5)


def test_gcn_estimate_is_unbiased_over_samples() -> None:
    # The mean over many samples of two of five neighbours equals the layer's output with all five.
    torch.manual_seed(0)
    layer, x, degree = layers.GCNConv(4, 3), torch.randn(6, 4), torch.tensor([5, 9, 3, 1, 7, 2])
    whole = layer(Block(torch.tensor([0, 5]).int(), torch.arange(1, 6).int(), 6), x, degree)
    pairs = [(a, b) for a in range(1, 6) for b in range(a + 1, 6)]
    samples = [layer(Block(torch.tensor([0, 2]).int(), torch.tensor(p).int(), 6), x, degree) for p in pairs]
    torch.testing.assert_close(torch.stack(samples).mean(0), whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("scaled", [True, False])
def test_aggregate_is_the_dense_product(reduce: spmm.Reduce, scaled: bool) -> None:
    block = random_block(30, 40, 7)
    x = torch.randn(40, 9, dtype=torch.float64, requires_grad=True)
    dst, src = (torch.rand(30).double(), torch.rand(40).double()) if scaled else (torch.ones(30), torch.ones(40))
    matrix = dense(block) * src
    if reduce == "mean":
        matrix = matrix / dense(block).sum(1, keepdim=True).clamp(min=1)
    out = spmm.aggregate(block, x, reduce, dst if scaled else None, src if scaled else None)
    torch.testing.assert_close(out, dst[:, None] * (matrix @ x))
    assert torch.autograd.gradcheck(lambda t: spmm.aggregate(block, t, reduce, dst, src), x)


def test_attend_has_right_values_and_gradients() -> None:
    block = random_block(12, 15, 4)
    x = torch.randn(15, 2, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(len(block.indices), 2, dtype=torch.float64, requires_grad=True)
    per_edge = weight[:, :, None] * x[block.indices.long()]
    expected = torch.zeros(12, 2, 3).double().index_add(0, spmm.edge_targets(block), per_edge)
    torch.testing.assert_close(spmm.attend(block, x, weight), expected)
    assert torch.autograd.gradcheck(lambda a, w: spmm.attend(block, a, w), (x, weight))


@pytest.mark.parametrize("sizes", [(5000, 9000, 8), (3, 10, 4), (0, 0, 3), (0, 5, 3), (4, 4, 0)])
def test_kernels_and_torch_operations_agree(sizes: tuple[int, int, int]) -> None:
    block = random_block(*sizes)
    x, grad = torch.randn(block.num_src, 2, 6), torch.randn(block.num_dst, 2, 6)
    weight = torch.randn(len(block.indices), 2)
    dst, src = torch.rand(block.num_dst), torch.rand(block.num_src)
    csr = (block.indptr, block.indices)
    for ours, theirs in zip(spmm.transpose(block), spmm.transpose_torch(block), strict=True):
        assert torch.equal(ours, theirs)
    pairs = [
        (spmm.sum_rows_cpu(*csr, x[:, 0], dst, src), spmm.sum_rows_torch(*csr, x[:, 0], dst, src)),
        (spmm.weighted_rows_cpu(*csr, None, weight, x), spmm.weighted_rows_torch(*csr, None, weight, x)),
        (spmm.edge_dots_cpu(block, grad, x), spmm.edge_dots_torch(block, grad, x)),
    ]
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_sums_do_not_depend_on_the_number_of_threads() -> None:
    block, x = random_block(6000, 8000, 9), torch.randn(8000, 5)
    threads, outs = torch.get_num_threads(), []
    for number in (1, 3):
        torch.set_num_threads(number)
        outs.append(spmm.aggregate(block, x, "mean"))
    torch.set_num_threads(threads)
    assert torch.equal(outs[0], outs[1])


@pytest.mark.parametrize("p", [0.0, 0.3, 0.5, 1 / 3])
@pytest.mark.parametrize("key", [0, 1, 2**64 - 5])
def test_dropout_masks_of_kernel_and_torch_are_bit_identical(p: float, key: int) -> None:
    h, n_id = torch.randn(300, 37), torch.randint(0, 2**40, (300,))
    stream = dropout.stream(key, 2)
    assert torch.equal(dropout.mask_rows(h, n_id, p, stream), dropout.mask_rows_torch(h, n_id, p, stream))


def test_dropout_depends_on_the_node_not_on_its_position() -> None:
    h, n_id, order = torch.randn(5000, 8), torch.arange(5000) * 7, torch.randperm(5000)
    whole = dropout.hash_dropout(h, n_id, 0.4, 11, 1, True)
    assert torch.equal(dropout.hash_dropout(h[order], n_id[order], 0.4, 11, 1, True), whole[order])
    assert not torch.equal(dropout.hash_dropout(h, n_id, 0.4, 12, 1, True), whole)
    assert not torch.equal(dropout.hash_dropout(h, n_id, 0.4, 11, 2, True), whole)


def test_dropout_rate_holds_per_row_and_column_and_for_gradients() -> None:
    h = torch.ones(4000, 256, requires_grad=True)
    out = dropout.hash_dropout(h, torch.arange(4000), 0.3, 5, 1, True)
    kept = (out > 0).float()
    assert kept.mean() == pytest.approx(0.7, abs=2e-3)
    assert (kept.mean(0) - 0.7).abs().max() < 5 * (0.21 / 4000) ** 0.5
    assert (kept.mean(1) - 0.7).abs().max() < 5.5 * (0.21 / 256) ** 0.5
    torch.testing.assert_close(out, kept / 0.7)
    out.sum().backward()
    torch.testing.assert_close(h.grad, kept / 0.7)
    assert dropout.hash_dropout(h, torch.arange(4000), 0.3, 5, 1, False) is h


def empty_batch(in_dim: int) -> Batch:
    block = Block(torch.zeros(1).int(), torch.empty(0).int(), 0)
    none = torch.empty(0, dtype=torch.int64)
    return Batch(0, 9, 0, 7, none, torch.empty(0, in_dim), none, none, (block,) * 3, none)


@pytest.mark.parametrize("model", ["sage", "gcn", "gat", "rgcn", "hgt", "rsage"])
def test_a_batch_without_seeds_gives_zero_gradients(model: str) -> None:
    net = build_model(Config(model), homogeneous())
    logits = net(empty_batch(5))
    assert logits.shape == (0, 4)
    torch.nn.functional.cross_entropy(logits, torch.empty(0, dtype=torch.int64), reduction="sum").backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name


@pytest.mark.parametrize("model", ["sage", "gcn", "gat", "rgcn", "hgt", "rsage"])
def test_initial_weights_depend_only_on_the_seed(model: str) -> None:
    first = build_model(Config(model), homogeneous()).state_dict()
    torch.randn(3)
    again = build_model(Config(model), homogeneous()).state_dict()
    other = build_model(Config(model, seed=1), homogeneous()).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_invalid_model_settings_are_refused() -> None:
    known = "the models are sage, gcn, gat, and for heterogeneous graphs rgcn, hgt, rsage"
    with pytest.raises(SettingsError, match=f"unknown model 'gin'; {known}"):
        build_model(Config("gin"), homogeneous())
    with pytest.raises(SettingsError, match="hidden 16 is no multiple of heads 3"):
        build_model(Config("gat", heads=3), homogeneous())
