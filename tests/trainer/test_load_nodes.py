"""Tests of ``DistNeighborLoader`` against torch_geometric's loader, and of equal batches for any number of parts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from load_kit import CITES, WRITES, assert_same, hetero_data, homo_data, opened, parts_of
from pyg_reference import node_loader
from trainer import DistNeighborLoader
from trainer.core.errors import SettingsError
from trainer.graph.seed_order import RankLayout
from trainer.store.manifest import AttrSpec

WHOLE = [-1, -1]
HOW = {
    "plain": {},
    "replace": {"replace": True},
    "disjoint": {"disjoint": True},
    "weighted": {"weight_attr": "edge_weight"},
    "node times": {"time_attr": "time"},
    "last node times": {"time_attr": "time", "temporal_strategy": "last"},
    "edge times": {"time_attr": "edge_time", "input_time": 30},
    "input times": {"time_attr": "time", "input_time": 30},
    "bidirectional": {"subgraph_type": "bidirectional"},
    "induced": {"subgraph_type": "induced"},
}


def with_times(how, count):
    return how | ({"input_time": torch.full((count,), how["input_time"])} if "input_time" in how else {})


def seeds_of(data):
    if hasattr(data, "node_types"):
        return ("paper", data["paper"].train_mask), int(data["paper"].train_mask.sum())
    return data.train_mask, int(data.train_mask.sum())


@pytest.mark.parametrize("how", [name for name in HOW if name != "induced"])
@pytest.mark.parametrize("make", [homo_data, hetero_data])
@pytest.mark.parametrize("source", ["memory", "2 parts"])
def test_whole_neighbourhoods_equal_torch_geometrics_batches(make, how, source):
    data = make()
    seeds, count = seeds_of(data)
    arguments = with_times(HOW[how], count)
    theirs = node_loader(data, WHOLE, seeds, batch_size=7, **arguments)
    ours = DistNeighborLoader(
        data if source == "memory" else parts_of(data, 2), WHOLE, seeds, batch_size=7, **arguments
    )
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert_same(mine, other, ignore=("num_nodes",))


def three_ranks():
    return RankLayout(3, ((0, 1), (2,)))


@pytest.mark.parametrize("num_seeds", [1, 6, 9, 10, 11, 13, 24, 25])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.filterwarnings("ignore:.* seeds for 3 ranks")
def test_ranks_get_equally_many_batches_and_every_seed_once(num_seeds, drop_last):
    graph = parts_of(homo_data(), 2)
    layout = three_ranks()
    loaders = [
        DistNeighborLoader(
            graph, [2], torch.arange(num_seeds), batch_size=4, drop_last=drop_last, rank=rank, layout=layout
        )
        for rank in range(3)
    ]
    shares = [[batch.input_id.tolist() for batch in loader] for loader in loaders]
    assert {len(share) for share in shares} == {len(loaders[0])}
    seen = sorted(seed for share in shares for ids in share for seed in ids)
    assert seen == list(range(num_seeds if not drop_last else num_seeds // 12 * 12))
    if num_seeds >= 3:
        assert all(ids for share in shares for ids in share), "a batch without seeds makes a mean loss NaN"


def test_fewer_seeds_than_ranks_cause_a_warning():
    with pytest.warns(UserWarning, match="2 seeds for 3 ranks: some batches have no seed"):
        DistNeighborLoader(homo_data(), [2], torch.arange(2), layout=RankLayout.everywhere(3, 1))


def test_seeds_of_several_types_form_one_sequence():
    data = hetero_data()
    inputs = {"paper": torch.tensor([5, 6, 7, 8, 9]), "author": data["author"].time > 20}
    loader = DistNeighborLoader(parts_of(data, 2), [2, 2], inputs, batch_size=4, shuffle=True, disjoint=True)
    authors = inputs["author"].nonzero().view(-1)
    assert len(loader) == -(-(5 + len(authors)) // 4)
    seen = {"paper": [], "author": []}
    for batch in loader:
        for of, ids in (("paper", inputs["paper"]), ("author", None)):
            store = batch[of]
            nodes = store.input_id if ids is None else ids[store.input_id]
            assert torch.equal(store.n_id[: store.batch_size], nodes) and "seed_time" not in store
            seen[of] += store.input_id.tolist()
        assert batch["paper"].batch_size + batch["author"].batch_size in (4, len(loader.dataset) % 4)
        trees = [batch[of].batch[: batch[of].batch_size].tolist() for of in ("paper", "author")]
        assert trees[0] + trees[1] == list(range(len(trees[0]) + len(trees[1])))
    assert sorted(seen["paper"]) == list(range(5)) and sorted(seen["author"]) == authors.tolist()


def test_iterating_again_is_the_next_epoch_and_set_epoch_goes_back():
    loader = DistNeighborLoader(homo_data(), [3, 2], batch_size=16, shuffle=True, prefetch_factor=2, num_workers=2)
    epochs = [[batch.n_id for batch in loader] for _ in range(2)]
    assert not all(torch.equal(a, b) for a, b in zip(*epochs, strict=True))
    loader.set_epoch(0)
    again = DistNeighborLoader(homo_data(), [3, 2], batch_size=16, shuffle=True)
    for a, b, first in zip(loader, again, epochs[0], strict=True):
        assert torch.equal(a.n_id, first) and torch.equal(b.n_id, first)


def test_calling_the_loader_samples_the_inputs_at_those_positions():
    data = hetero_data()
    loader = DistNeighborLoader(parts_of(data, 2), [-1], ("paper", torch.arange(50, 60)), time_attr="time")
    batch, again = loader([3, 1, 1]), loader(torch.tensor([3, 1, 1]))
    assert batch["paper"].n_id[:3].tolist() == [53, 51, 51] and batch["paper"].input_id.tolist() == [3, 1, 1]
    assert_same(batch, again)
    for wrong in ([10], [-1], 3, [0.5]):
        with pytest.raises(SettingsError, match="index: expected positions of inputs"):
            loader(wrong)


def test_temporal_batches_hold_nothing_later_than_their_seed():
    data = hetero_data()
    for batch in DistNeighborLoader(data, [3, 3], "paper", batch_size=10, time_attr="time", shuffle=True):
        bound = batch["paper"].time[: batch["paper"].batch_size]
        for of in ("paper", "author"):
            assert (batch[of].time <= bound[batch[of].batch]).all()


def test_one_gather_per_batch(monkeypatch):
    graph, calls = parts_of(hetero_data(), 2), []
    gather = graph.access.gather
    monkeypatch.setattr(graph.access, "gather", lambda requests: calls.append(len(requests)) or gather(requests))
    loader = DistNeighborLoader(graph, [3, 3], ("paper", "train"), batch_size=10)
    list(loader)
    assert calls == [6] * len(loader)


def test_blocks_contain_the_same_edges_as_edge_index():
    # The last block has the edges of `edge_index` whose targets are seeds.
    data = hetero_data()
    for batch in DistNeighborLoader(parts_of(data, 2), [3, 2], ("paper", "train"), batch_size=10):
        block, edges = batch.blocks[-1][CITES], batch[CITES].edge_index
        n = batch["paper"].batch_size
        assert set(batch.blocks[0]) == set(batch.edge_types) and block.num_dst == n
        rows = torch.repeat_interleave(torch.arange(n), block.indptr.diff())
        first = edges[:, edges[1] < n]
        assert torch.equal(torch.stack([block.indices.long(), rows]), first)


@pytest.mark.parametrize("how", ["bidirectional", "induced"])
def test_subgraphs_with_other_edges_have_no_blocks_nor_numbers_per_hop(how):
    batch = next(iter(DistNeighborLoader(homo_data(), [3, 2], batch_size=5, subgraph_type=how)))
    assert "blocks" not in batch and "num_sampled_edges" not in batch
    inside = torch.isin(homo_data().edge_index, batch.n_id).all(0)
    assert how == "bidirectional" or sorted(batch.e_id.tolist()) == inside.nonzero().view(-1).tolist()


def test_attributes_keep_dtype_and_shape_over_parts_and_can_be_limited():
    data = homo_data()
    (batch,) = DistNeighborLoader(parts_of(data, 2), [2], batch_size=60, attrs=["x", "edge_attr"])
    assert torch.equal(batch.x, data.x[batch.n_id]) and torch.equal(batch.edge_attr, data.edge_attr[batch.e_id])
    assert "y" not in batch and "edge_weight" not in batch
    hetero = parts_of(hetero_data(), 2)
    (batch,) = DistNeighborLoader(hetero, [2], "paper", batch_size=70, attrs={"paper": ["y"], WRITES: ["edge_time"]})
    assert "x" not in batch["paper"] and "x" not in batch["venue"] and "y" in batch["paper"]
    assert "edge_time" in batch[WRITES] and "edge_time" not in batch[CITES]


def test_bfloat16_small_labels_and_graph_attributes_of_a_partition():
    x = torch.randn(60, 3).bfloat16()
    graph = parts_of(homo_data(), 2)
    node = graph.manifest.nodes["node"]
    attrs = {**node.attrs, "x": AttrSpec("bfloat16", (60, 3)), "y": AttrSpec("int8", (60,))}
    manifest = replace(
        graph.manifest, nodes={"node": replace(node, attrs=attrs)}, graph_attrs={"scale": AttrSpec("float32", (2,))}
    )
    parts = {}
    for part_id, part in graph.store.parts.items():
        ids = part.nodes["node"].orig_id
        own = {**part.nodes["node"].attrs, "x": x[ids].view(torch.int16).numpy().view(np.uint16)}
        own["y"] = (ids % 5).astype(np.int8)
        parts[part_id] = replace(part, nodes={"node": replace(part.nodes["node"], attrs=own)})
    store = replace(graph.store, manifest=manifest, parts=parts, graph_attrs={"scale": np.float32([1, 2])})
    for batch in DistNeighborLoader(opened(store), [3], batch_size=20):
        assert batch.x.dtype == torch.bfloat16 and torch.equal(batch.x, x[batch.n_id])
        assert batch.y.dtype == torch.int64 and torch.equal(batch.y, batch.n_id % 5)
        assert batch.scale.tolist() == [1, 2]
