"""Tests of ``DistLinkNeighborLoader`` against torch_geometric's loader, for any number of ranks."""

from __future__ import annotations

import math

import pytest
import torch
from torch_geometric.data import Data, HeteroData

from load_kit import opened
from partitions import typed_store
from pyg_reference import link_loader
from trainer import DistLinkNeighborLoader
from trainer.core.errors import SettingsError
from trainer.graph.seed_order import RankLayout

TO, REV = ("user", "buys", "item"), ("item", "rev_buys", "user")


def homo(num_nodes=20, num_edges=60):
    g = torch.Generator().manual_seed(1)
    return Data(
        x=torch.randn(num_nodes, 3, generator=g),
        edge_index=torch.randint(0, num_nodes, (2, num_edges), generator=g),
        edge_attr=torch.randn(num_edges, 2, generator=g),
        time=torch.arange(num_nodes),
    )


def hetero():
    g = torch.Generator().manual_seed(2)
    data = HeteroData()
    data["user"].x, data["item"].num_nodes = torch.randn(12, 3, generator=g), 7
    ends = torch.stack([torch.randint(0, 12, (30,), generator=g), torch.randint(0, 7, (30,), generator=g)])
    data[TO].edge_index, data[REV].edge_index = ends, ends.flip(0)
    return data


def shapes(batch):
    """Return (dtype, number of dimensions) of each tensor and the Python type of other values, by (type, attribute)."""
    stores = (
        [("", batch)] if isinstance(batch, Data) else [(of, batch[of]) for of in batch.node_types + batch.edge_types]
    )
    return {
        (of, name): (value.dtype, value.dim()) if isinstance(value, torch.Tensor) else type(value)
        for of, store in stores
        for name, value in store.to_dict().items()
        if name != "blocks"
    }


CASES = [
    {},
    {"neg_sampling": "binary"},
    {"neg_sampling": {"mode": "binary", "amount": 1.5}},
    {"neg_sampling": "triplet"},
    {"neg_sampling": {"mode": "triplet", "amount": 3}},
    {"neg_sampling": "binary", "disjoint": True},
    {"neg_sampling": {"mode": "triplet", "amount": 2}, "disjoint": True},
    {"neg_sampling": "binary", "subgraph_type": "bidirectional"},
]


@pytest.mark.parametrize("how", CASES, ids=str)
@pytest.mark.parametrize("kind", ["homo", "hetero"])
def test_batches_have_the_same_attributes_as_torch_geometrics(kind, how):
    data = homo() if kind == "homo" else hetero()
    links = data.edge_index[:, :10] if kind == "homo" else (TO, data[TO].edge_index[:, :10])
    theirs = list(link_loader(data, [-1, -1], links, batch_size=4, **how))
    ours = list(DistLinkNeighborLoader(data, [-1, -1], links, batch_size=4, **how))
    assert [shapes(batch) for batch in ours] == [shapes(batch) for batch in theirs]
    assert len(ours) == 3


@pytest.mark.parametrize("disjoint", [False, True])
def test_without_negatives_the_subgraph_equals_torch_geometrics(disjoint):
    data = homo()
    theirs = link_loader(data, [-1, -1], data.edge_index, batch_size=7, disjoint=disjoint)
    for own, other in zip(DistLinkNeighborLoader(data, [-1, -1], batch_size=7, disjoint=disjoint), theirs, strict=True):
        assert own.input_id.tolist() == other.input_id.tolist()
        assert own.edge_label_index.tolist() == other.edge_label_index.tolist()
        assert sorted(own.n_id.tolist()) == sorted(other.n_id.tolist())
        assert sorted(own.e_id.tolist()) == sorted(other.e_id.tolist())
        assert own.num_sampled_nodes == other.num_sampled_nodes
        assert torch.equal(own.n_id[own.edge_label_index], data.edge_index[:, own.input_id])
        if disjoint:
            trees = [sorted(zip(b.batch.tolist(), b.n_id.tolist(), strict=True)) for b in (own, other)]
            assert trees[0] == trees[1]


def links_of(batch):
    """Return (source, target, label) for the links of a binary batch, as original ids."""
    ends = batch.n_id[batch.edge_label_index].tolist()
    return list(zip(*ends, batch.edge_label.tolist(), strict=True))


def test_links_and_negatives_do_not_depend_on_ranks():
    data = homo()
    how = {"neg_sampling": {"mode": "binary", "amount": 1.5}, "shuffle": True, "seed": 3}
    whole = list(DistLinkNeighborLoader(data, [3, 2], batch_size=12, **how))
    layout = RankLayout.everywhere(3, 1)
    ranks = [DistLinkNeighborLoader(data, [3, 2], batch_size=4, rank=r, layout=layout, **how) for r in range(3)]
    for one, shares in zip(whole, zip(*ranks, strict=True), strict=True):
        assert sorted(links_of(one)) == sorted(link for share in shares for link in links_of(share))


@pytest.mark.parametrize("fanout", [-1, 4])
def test_excluded_links_and_their_reverses_are_not_sampled(fanout):
    data = homo()
    both = torch.cat([data.edge_index, data.edge_index.flip(0), data.edge_index[:, :20]], dim=1)  # with multi-edges
    data = Data(x=data.x, edge_index=both)
    loader = DistLinkNeighborLoader(data, [fanout, fanout], both[:, :60], batch_size=6, exclude="both")
    leaky = DistLinkNeighborLoader(data, [fanout, fanout], both[:, :60], batch_size=6)
    leaks = 0
    for batch, other in zip(loader, leaky, strict=True):
        seeds = set(map(tuple, batch.n_id[batch.edge_label_index].t().tolist()))
        seeds |= {(b, a) for a, b in seeds}
        assert not seeds & set(map(tuple, batch.n_id[batch.edge_index].t().tolist()))
        leaks += len(seeds & set(map(tuple, other.n_id[other.edge_index].t().tolist())))
    assert leaks > 0, "without exclude, seed links are among the edges, as in torch_geometric"


def test_excluded_links_do_not_reduce_the_fanout():
    # A target with enough other edges still gets its full fanout.
    hub = torch.stack([torch.arange(1, 30), torch.zeros(29, dtype=torch.int64)])
    data = Data(edge_index=hub, num_nodes=30)
    (batch,) = DistLinkNeighborLoader(data, [10], hub[:, :5], batch_size=5, exclude="self")
    assert batch.num_sampled_edges == [10]
    assert not set(batch.n_id[batch.edge_index[0]].tolist()) & {1, 2, 3, 4, 5}


def test_reverse_edges_of_a_heterogeneous_graph_are_excluded_too():
    data = hetero()
    for batch in DistLinkNeighborLoader(data, [-1, -1], TO, batch_size=5, exclude="both"):
        of = batch[TO].edge_label_index
        seeds = set(zip(batch["user"].n_id[of[0]].tolist(), batch["item"].n_id[of[1]].tolist(), strict=True))
        for edge_type, flip in ((TO, False), (REV, True)):
            src, dst = batch[edge_type].edge_index
            pairs = (batch[edge_type[0]].n_id[src].tolist(), batch[edge_type[2]].n_id[dst].tolist())
            assert not seeds & set(zip(*(reversed(pairs) if flip else pairs), strict=True))


def test_negatives_avoid_links_on_request():
    data = homo(num_nodes=9)
    known = set(map(tuple, data.edge_index.t().tolist()))
    loader = DistLinkNeighborLoader(
        data, [2], batch_size=20, neg_sampling={"mode": "binary", "amount": 2}, avoid_links=True
    )
    drawn = [(a, b) for batch in loader for a, b, label in links_of(batch) if label == 0]
    assert len(drawn) == 120
    assert not known & set(drawn)


def test_labels_leave_zero_to_the_negatives():
    data = homo()
    labels = torch.arange(60) % 3
    loader = DistLinkNeighborLoader(data, [2], edge_label=labels, batch_size=60, neg_sampling="binary")
    (batch,) = loader
    assert batch.edge_label.tolist() == [*(labels + 1).tolist(), *[0] * 60]
    assert batch.edge_label.dtype == torch.int64
    unknown = torch.tensor([math.nan, 0.0]).repeat(30)
    (batch,) = DistLinkNeighborLoader(data, [2], edge_label=unknown, batch_size=60, neg_sampling="binary")
    assert batch.edge_label.nan_to_num(9).tolist() == [9, 1] * 30 + [0] * 60


def test_no_neighbour_and_no_negative_is_later_than_its_link():
    data = homo()
    times = torch.randint(5, 20, (60,), generator=torch.Generator().manual_seed(0))
    times = torch.maximum(times, data.edge_index.max(0).values)
    loader = DistLinkNeighborLoader(
        data, [4, 4], edge_label_time=times, time_attr="time", neg_sampling="binary", batch_size=7
    )
    for batch in loader:
        of_link = times[batch.input_id]
        assert (data.time[batch.n_id] <= of_link[batch.batch]).all()
        assert batch.edge_label_time.tolist() == [*of_link.tolist(), *of_link.tolist()]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"edge_label_time": torch.zeros(60, dtype=torch.int64)}, "pass edge_label_time"),
        ({"time_attr": "time"}, "pass edge_label_time"),
        ({"neg_sampling": "triplet", "edge_label": torch.ones(60)}, "triplet"),
        ({"neg_sampling": {"mode": "binary", "amount": -1}}, "positive"),
        ({"neg_sampling": {"mode": "triplet", "amount": 1.5}}, "integer"),
        ({"neg_sampling": {"mode": "binary", "amount": math.nan}}, "is nan, no finite number"),
        ({"neg_sampling": {"mode": "triplet", "amount": math.inf}}, "neg_sampling: "),
        ({"neg_sampling_ratio": math.inf}, "is inf, no finite number"),
        ({"neg_sampling": "nothing"}, "nothing"),
        ({"avoid_links": True}, "pass neg_sampling"),
        ({"exclude": "all"}, "'self' or 'both'"),
        ({"reverse_type": TO}, "exclude='both'"),
        ({"edge_label_index": torch.tensor([[0], [20]])}, "from 0 to 19"),
        ({"edge_label_index": torch.zeros(3, 2, dtype=torch.int64)}, r"\[2, number of links\]"),
        ({"edge_label_index": (TO, None)}, "homogeneous"),
        ({"edge_label": torch.ones(3)}, "one row for each of 60"),
    ],
)
def test_invalid_arguments_are_refused(how, message):
    with pytest.raises(SettingsError, match=message):
        DistLinkNeighborLoader(homo(), [2], **how)


@pytest.mark.parametrize(
    ("given", "message"), [(None, "pass edge_label_index as"), (("user", "sells", "item"), "is not an edge type")]
)
def test_a_heterogeneous_graph_needs_an_edge_type(given, message):
    with pytest.raises(SettingsError, match=message):
        DistLinkNeighborLoader(hetero(), [2], given)


def without_edges(kind):
    links = torch.randint(0, 7, (2, 30), generator=torch.Generator().manual_seed(4))
    if kind == "homo":
        return Data(num_nodes=20), links, lambda batch: batch
    if kind == "one type":
        return HeteroData(user={"num_nodes": 20}), (("user", "user"), links), lambda batch: batch["user", "to", "user"]
    likes = ("user", "likes", "item")
    data = hetero() if kind == "hetero" else opened(
        typed_store({"user": 12, "item": 7}, {of: hetero()[of].edge_index.numpy() for of in (TO, REV)}, 2)
    )  # fmt: skip
    return data, (likes, links), lambda batch: batch[likes]


@pytest.mark.parametrize("kind", ["homo", "one type", "hetero", "2 parts"])
@pytest.mark.parametrize("negatives", [None, "binary"])
def test_links_of_a_type_without_edges_can_be_seeds(kind, negatives):
    data, links, links_store = without_edges(kind)
    hops = [] if kind in ("homo", "one type") else [3]
    avoid = {"avoid_links": True, "exclude": "self"} if negatives else {}
    loader = DistLinkNeighborLoader(data, hops, links, neg_sampling=negatives, batch_size=10, **avoid)
    given = links if kind == "homo" else links[1]
    for step, batch in enumerate(loader):
        store = links_store(batch)
        src, dst = (batch, batch) if kind == "homo" else (batch[store._key[0]], batch[store._key[2]])
        ends = torch.stack([src.n_id[store.edge_label_index[0]], dst.n_id[store.edge_label_index[1]]])
        assert torch.equal(ends[:, :10], given[:, 10 * step : 10 * step + 10])
        assert ends.shape[1] == (20 if negatives else 10) and store.input_id.tolist() == [
            *range(10 * step, 10 * step + 10)
        ]
        if not hops:
            assert src.num_nodes == store.edge_label_index.unique().numel()
    if kind != "homo":
        assert loader.inputs.edge_type not in loader.graph.manifest.edges


def test_a_misspelt_relation_causes_a_warning():
    links = torch.zeros(2, 3, dtype=torch.int64)
    with pytest.warns(UserWarning, match=r"no edges of \('user', 'buy', 'item'\).*did you mean 'buys'"):
        DistLinkNeighborLoader(hetero(), [2], (("user", "buy", "item"), links))
    with pytest.raises(ValueError, match=r"is not an edge type; the graph has"):
        DistLinkNeighborLoader(hetero(), [2], (("user", "likes", "item"), None))
    with pytest.raises(ValueError, match=r"is not an edge type; the graph has"):
        DistLinkNeighborLoader(hetero(), [2], (("user", "likes", "shop"), links))
