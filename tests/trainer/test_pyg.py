"""Tests that batches with all neighbours equal those of torch_geometric's own loaders."""

from __future__ import annotations

import pytest
import torch
from torch_geometric.loader import LinkNeighborLoader, NeighborLoader
from torch_geometric.sampler import neighbor_sampler

from fast_cases import fast_grid
from load_kit import CITES, WRITES, assert_same, hetero_data, homo_data, parts_of
from pyg_reference import link_loader
from trainer import DistLinkNeighborLoader, DistNeighborLoader

WHOLE = [-1, -1]
HOW = {
    "plain": {},
    "disjoint": {"disjoint": True},
    "weighted": {"weight_attr": "edge_weight"},
    "node times": {"time_attr": "time"},
    "edge times": {"time_attr": "edge_time"},
    "last edge times": {"time_attr": "edge_time", "temporal_strategy": "last"},
    "bidirectional": {"subgraph_type": "bidirectional"},
}
NEGATIVES = {
    "none": None,
    "binary": {"mode": "binary", "amount": 1},
    "two": {"mode": "binary", "amount": 2},
    "triplet": {"mode": "triplet", "amount": 1},
    "three": {"mode": "triplet", "amount": 3},
}
LINKS = {"homo": None, "one type": CITES, "two types": WRITES}


def data_of(links):
    return homo_data() if LINKS[links] is None else hetero_data()


@pytest.mark.parametrize(("how", "negatives", "links"), fast_grid(HOW, NEGATIVES, LINKS, share=2))
def test_link_batches_equal_torch_geometrics_in_every_attribute(monkeypatch, how, negatives, links):
    # torch_geometric gets gnnfleet's negatives in place of its own; everything else is torch_geometric's.
    data, edge_type = data_of(links), LINKS[links]
    edges = (data if edge_type is None else data[edge_type]).edge_index[:, 3:22]
    given = edges if edge_type is None else (edge_type, edges)
    arguments = {"batch_size": 8, "neg_sampling": NEGATIVES[negatives], **HOW[how]}
    if "time_attr" in arguments:
        arguments["edge_label_time"] = torch.arange(19) + 25
    if negatives in ("none", "binary", "two"):
        arguments["edge_label"] = torch.arange(19) % 4
    drawn = _GivenNegatives(edge_type)
    monkeypatch.setattr(neighbor_sampler, "neg_sample", drawn)
    theirs = iter(link_loader(data, WHOLE, given, **arguments))
    for ours in DistLinkNeighborLoader(parts_of(data, 2), WHOLE, given, **arguments):
        drawn.take_from(ours)
        assert_same(ours, next(theirs), ignore=("num_nodes",))
    assert next(theirs, None) is None


class _GivenNegatives:
    """Replaces torch_geometric's ``neg_sample`` with gnnfleet's negatives of the same batch."""

    def __init__(self, edge_type):
        self._type = edge_type
        self._ends = {}

    def take_from(self, batch):
        src, dst, link = (batch, batch, batch) if self._type is None else (
            batch[self._type[0]], batch[self._type[2]], batch[self._type],
        )  # fmt: skip
        if "dst_neg_index" in dst:
            negatives = dst.n_id[dst.dst_neg_index]
            apart = dst.get("batch") is not None
            self._ends = {"dst": (negatives.t() if apart else negatives).reshape(-1)}
        elif "edge_label_index" in link:
            positives = len(link.input_id)
            self._ends = {
                name: end.n_id[row[positives:]]
                for name, end, row in zip(("src", "dst"), (src, dst), link.edge_label_index, strict=True)
            }

    def __call__(self, seed, rule, num_nodes, seed_time=None, node_time=None, endpoint=None):
        found = self._ends[endpoint]
        assert len(found) == len(seed) * rule.amount and found.min() >= 0 and found.max() < num_nodes
        if node_time is not None and seed_time is not None:
            assert (node_time[found] <= seed_time.repeat(int(rule.amount))[: len(found)]).all() or rule.is_triplet()
        return found


def as_sets(batch, edge_ids=True):
    """Return nodes (with their tree) and edges (tree, id, source, target) of every type, as original ids."""
    hetero = hasattr(batch, "node_types")
    nodes = {of: batch[of] for of in batch.node_types} if hetero else {"": batch}
    edges = {of: batch[of] for of in batch.edge_types} if hetero else {("", "", ""): batch}
    trees = {of: [0] * len(s.n_id) if s.get("batch") is None else s.batch.tolist() for of, s in nodes.items()}
    found = {of: sorted(zip(trees[of], store.n_id.tolist(), strict=True)) for of, store in nodes.items()}
    for of, store in edges.items():
        ends = [nodes[end].n_id[row].tolist() for end, row in zip((of[0], of[2]), store.edge_index, strict=True)]
        at = [trees[of[2]][col] for col in store.edge_index[1].tolist()]
        found[of] = sorted(zip(at, *([store.e_id.tolist()] if edge_ids else []), *ends, strict=True))
    return found


@pytest.mark.parametrize("fanouts", [WHOLE, [3, 2]])
@pytest.mark.parametrize("more", [{}, {"subgraph_type": "induced"}, {"disjoint": True}, {"replace": True}], ids=str)
@pytest.mark.parametrize("make", [homo_data, hetero_data])
def test_edges_and_rows_of_a_batch_match_the_graph(make, more, fanouts):
    data = make()
    hetero = hasattr(data, "node_types")
    for batch in DistNeighborLoader(parts_of(data, 2), fanouts, "paper" if hetero else None, batch_size=16, **more):
        found = as_sets(batch)
        for of in data.edge_types if hetero else [("", "", "")]:
            store, sampled = (data[of], batch[of]) if hetero else (data, batch)
            ids = torch.tensor([item[1:] for item in found[of]], dtype=torch.int64).view(-1, 3)
            assert torch.equal(store.edge_index[:, ids[:, 0]].t(), ids[:, 1:])
            assert torch.equal(sampled.edge_time, store.edge_time[sampled.e_id])
            if more.get("subgraph_type") == "induced":
                ends = [batch[end].n_id if hetero else batch.n_id for end in (of[0], of[2])]
                inside = torch.isin(store.edge_index[0], ends[0]) & torch.isin(store.edge_index[1], ends[1])
                assert sorted(ids[:, 0].tolist()) == inside.nonzero().view(-1).tolist()


# torch_geometric's own loaders, if torch_sparse is installed -----------------------------------------------------

GENUINE = [
    {},
    {"subgraph_type": "induced"},
    {"subgraph_type": "bidirectional"},
]


@pytest.mark.filterwarnings("ignore:Using 'NeighborSampler' without")
@pytest.mark.parametrize("fanouts", [WHOLE, [-1], [-1, -1, -1]], ids=str)
@pytest.mark.parametrize("more", GENUINE, ids=str)
@pytest.mark.parametrize("make", [homo_data, hetero_data])
def test_genuine_neighbor_loader(make, more, fanouts):
    pytest.importorskip("torch_sparse")
    data = make()
    seeds = data.train_mask if make is homo_data else ("paper", data["paper"].train_mask)
    theirs = list(NeighborLoader(data, fanouts, seeds, batch_size=9, **more))
    _assert_like(DistNeighborLoader(parts_of(data, 2), fanouts, seeds, batch_size=9, **more), theirs, **more)


@pytest.mark.filterwarnings("ignore:Using 'NeighborSampler' without")
@pytest.mark.parametrize("make", [homo_data, hetero_data])
def test_genuine_neighbor_loader_with_repeated_seeds(make):
    # Every copy of a seed has its edges; as a source, the first copy represents the node.
    pytest.importorskip("torch_sparse")
    ids = torch.tensor([3, 7, 3, 9, 3, 7])
    seeds = ids if make is homo_data else ("paper", ids)
    (theirs,) = NeighborLoader(make(), WHOLE, seeds, batch_size=9)
    (ours,) = DistNeighborLoader(parts_of(make(), 2), WHOLE, seeds, batch_size=9)
    _assert_like([ours], [theirs])
    for of in theirs.edge_types if make is hetero_data else [None]:
        if of is None or of[2] == "paper":
            assert _edges_of_seeds(ours, of, len(ids)) == _edges_of_seeds(theirs, of, len(ids))


def _edges_of_seeds(batch, of, num_seeds):
    """Return (seed's position, edge id) of the edges that end at the first ``num_seeds`` nodes."""
    store = batch if of is None else batch[of]
    pairs = zip(store.edge_index[1].tolist(), store.e_id.tolist(), strict=True)
    return sorted(pair for pair in pairs if pair[0] < num_seeds)


@pytest.mark.filterwarnings("ignore:Using 'NeighborSampler' without")
@pytest.mark.parametrize("more", GENUINE, ids=str)
@pytest.mark.parametrize("links", LINKS)
def test_genuine_link_neighbor_loader(links, more):
    pytest.importorskip("torch_sparse")
    data, edge_type = data_of(links), LINKS[links]
    edges = (data if edge_type is None else data[edge_type]).edge_index[:, 3:22]
    given = edges if edge_type is None else (edge_type, edges)
    theirs = list(LinkNeighborLoader(data, WHOLE, given, batch_size=8, **more))
    ours = DistLinkNeighborLoader(parts_of(data, 2), WHOLE, given, batch_size=8, **more)
    _assert_like(ours, theirs, **more)
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(ends_of(mine, edge_type), ends_of(other, edge_type))


def ends_of(batch, edge_type):
    """Return the original ids of the ends of a batch's links."""
    if edge_type is None:
        return batch.n_id[batch.edge_label_index]
    index = batch[edge_type].edge_label_index
    return torch.stack([batch[edge_type[0]].n_id[index[0]], batch[edge_type[2]].n_id[index[1]]])


def _assert_like(ours, theirs, subgraph_type=None):
    """Assert equal nodes, edges, attribute names, dtypes and numbers of columns. The order of edges is ignored."""
    # torch_geometric gives the added reverse edges of bidirectional subgraphs arbitrary ids or none
    edge_ids = subgraph_type != "bidirectional"
    for mine, other in zip(ours, theirs, strict=True):
        assert as_sets(mine, edge_ids) == as_sets(other, edge_ids)
        shapes = [_shapes(batch) for batch in (mine, other)]
        for key in shapes[1]:
            assert shapes[0][key] == shapes[1][key], key
        assert {key[1] for key in shapes[0].keys() - shapes[1].keys()} <= {
            "num_nodes", "num_sampled_nodes", "num_sampled_edges",
        }  # fmt: skip


def _shapes(batch):
    return {
        (store._key, name): (value.dtype, value.shape) if isinstance(value, torch.Tensor) else type(value)
        for store in batch.stores
        for name, value in store.items()
        if name != "blocks" and value is not None
    }
