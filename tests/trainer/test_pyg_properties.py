"""Property tests of batches over random typed graphs."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_geometric.data import HeteroData

from load_kit import parts_of
from trainer import DistLinkNeighborLoader, DistNeighborLoader

CITES, WRITES = ("paper", "cites", "paper"), ("author", "writes", "paper")
CITED, WROTE = ("paper", "rev_cites", "paper"), ("paper", "rev_writes", "author")
FINITE = settings(max_examples=15, deadline=None)
cases = st.integers(0, 10_000)
fanout_lists = st.lists(st.sampled_from([-1, 1, 2, 5]), min_size=1, max_size=3)


def random_data(seed):
    rng = np.random.default_rng(seed)
    counts = {"paper": int(rng.integers(2, 25)), "author": int(rng.integers(1, 12))}
    data = HeteroData()
    for of, count in counts.items():
        data[of].num_nodes = count
        data[of].time = torch.from_numpy(rng.integers(-5, 20, count))
    data["paper"].train_mask = torch.from_numpy(rng.random(counts["paper"]) < 0.7)
    for of, back in ((CITES, CITED), (WRITES, WROTE)):
        ends = [rng.integers(0, counts[end], int(rng.integers(1, 90))) for end in (of[0], of[2])]
        size = min(map(len, ends))
        index = torch.from_numpy(np.stack([end[:size] for end in ends]))
        for edge_type, edges in ((of, index), (back, index.flip(0))):
            data[edge_type].edge_index = edges
            data[edge_type].when = torch.from_numpy(rng.integers(-5, 20, size))
            data[edge_type].weight = torch.from_numpy(np.where(rng.random(size) < 0.4, 0, rng.random(size)))
    return data


def source_of(data, case):
    """Return ``data`` if ``case % 4`` is 0, else the same graph in ``case % 4`` parts."""
    return data if case % 4 == 0 else parts_of(data, case % 4)


def edges_of(data, batch):
    """Yield (type, edge ids, sources, targets, tree) for each edge type of a batch. Nodes are original ids."""
    for of in data.edge_types:
        store = batch[of]
        src, dst = batch[of[0]].n_id[store.edge_index[0]], batch[of[2]].n_id[store.edge_index[1]]
        tree = batch[of[2]].get("batch")
        yield of, store.e_id, src, dst, None if tree is None else tree[store.edge_index[1]]


@FINITE
@given(case=cases, fanouts=fanout_lists, last=st.booleans(), attr=st.sampled_from(["time", "when"]))
def test_no_edge_is_later_than_its_seed_and_last_takes_the_latest(case, fanouts, last, attr):
    data = random_data(case)
    times = torch.from_numpy(np.random.default_rng(case).integers(-5, 20, data["paper"].num_nodes))
    how = {"time_attr": attr, "temporal_strategy": "last" if last else "uniform", "input_time": times}
    for batch in DistNeighborLoader(source_of(data, case), fanouts, "paper", batch_size=7, seed=case, **how):
        until = times[batch["paper"].input_id]
        for of, edges, _, dst, tree in edges_of(data, batch):
            stamps = data[of].when if attr == "when" else data[of[0]].time[data[of].edge_index[0]]
            assert (stamps[edges] <= until[tree]).all()
            if last:
                _assert_latest(data[of].edge_index[1], stamps, edges, dst, tree, until)


def _assert_latest(targets, stamps, edges, dst, tree, until):
    """Assert that each target got its latest in-edges: no edge left out is later than a sampled one.

    until: by tree, the latest time that an edge may have.
    """
    for node, number in set(zip(dst.tolist(), tree.tolist(), strict=True)):
        taken = edges[(dst == node) & (tree == number)]
        candidates = ((targets == node) & (stamps <= until[number])).nonzero().view(-1)
        left = candidates[~torch.isin(candidates, taken)]
        assert len(left) == 0 or stamps[left].max() <= stamps[taken].min()


@FINITE
@given(case=cases, fanouts=fanout_lists, replace=st.booleans(), disjoint=st.booleans())
def test_edges_of_weight_zero_are_never_taken(case, fanouts, replace, disjoint):
    data = random_data(case)
    how = {"weight_attr": "weight", "replace": replace, "disjoint": disjoint, "batch_size": 9, "seed": case}
    for batch in DistNeighborLoader(source_of(data, case), fanouts, "paper", **how):
        for of, edges, _, _, _ in edges_of(data, batch):
            assert (data[of].weight[edges] > 0).all() and (batch[of].weight > 0).all()
            if not replace:
                wanted = [_positive(data[of], node, fanouts[0]) for node in _seeds(batch[of[2]])]
                assert int((batch[of].edge_index[1] < len(wanted)).sum()) == sum(wanted)


def _seeds(store):
    return store.n_id[: store.num_sampled_nodes[0]].tolist()


def _positive(store, node, fanout):
    """Return how many edges of positive weight can be drawn, at most ``fanout``."""
    count = int((store.weight[store.edge_index[1] == node] > 0).sum())
    return count if fanout < 0 else min(count, fanout)


@FINITE
@given(case=cases, fanouts=fanout_lists, more=st.sampled_from(["", "disjoint", "replace", "weight", "time", "induced"]))
def test_excluded_links_are_not_sampled_and_do_not_use_up_the_fanout(case, fanouts, more):
    data = random_data(case)
    how = {
        "": {}, "disjoint": {"disjoint": True}, "replace": {"replace": True}, "weight": {"weight_attr": "weight"},
        "time": {"time_attr": "when", "edge_label_time": torch.full((data[CITES].num_edges,), 10)},
        "induced": {"subgraph_type": "induced"},
    }[more]  # fmt: skip
    how = {**how, "exclude": "both", "batch_size": 5, "shuffle": True, "seed": case}
    for batch in DistLinkNeighborLoader(source_of(data, case), fanouts, CITES, **how):
        hidden = set(map(tuple, data[CITES].edge_index[:, batch[CITES].input_id].t().tolist()))
        barred = {CITES: hidden, CITED: {(b, a) for a, b in hidden}}
        for of, edges, src, dst, _ in edges_of(data, batch):
            pairs = set(zip(src.tolist(), dst.tolist(), strict=True))
            assert not pairs & barred.get(of, set())
            if more == "":
                _assert_filled(data, batch, of, fanouts[0], barred.get(of, set()), edges)


def _assert_filled(data, batch, of, fanout, barred, edges):
    """Assert that each seed has ``fanout`` edges of type ``of``, or all candidates if it has fewer.

    barred: (source, target) pairs that are not candidates.
    """
    store, num_seeds = batch[of[2]], batch[of[2]].num_sampled_nodes[0]
    found = torch.bincount(batch[of].edge_index[1], minlength=len(store.n_id))[:num_seeds]
    pairs = data[of].edge_index.t().tolist()
    for place, node in enumerate(store.n_id[:num_seeds].tolist()):
        left = sum(dst == node and (src, dst) not in barred for src, dst in pairs)
        assert found[place] == (left if fanout < 0 else min(left, fanout))


@FINITE
@given(case=cases, mode=st.sampled_from(["binary", "triplet"]), avoid=st.booleans(), timed=st.booleans())
def test_negatives_avoid_links_and_are_not_later_than_their_link(case, mode, avoid, timed):
    data = random_data(case)
    data["paper"].time[0] = data["author"].time[0] = -9  # so that every link has a candidate
    known = set(map(tuple, data[WRITES].edge_index.t().tolist()))
    if avoid and len(known) * 2 > data["author"].num_nodes * data["paper"].num_nodes or timed and avoid:
        avoid = False  # this combination may be too dense and is then refused
    if avoid and mode == "triplet":
        busiest = torch.bincount(data[WRITES].edge_index.unique(dim=1)[0]).max()
        avoid = bool(busiest * 2 <= data["paper"].num_nodes)
    times = torch.from_numpy(np.random.default_rng(case).integers(-5, 20, data[WRITES].num_edges))
    how = {"time_attr": "time", "edge_label_time": times} if timed else {}
    rule = {"mode": mode, "amount": 2}
    loader = DistLinkNeighborLoader(
        source_of(data, case), [2], WRITES, neg_sampling=rule, avoid_links=avoid, batch_size=6, seed=case, **how
    )
    for batch in loader:
        author, paper, link = batch["author"], batch["paper"], batch[WRITES]
        n = len(link.input_id)
        if mode == "triplet":
            src, dst = author.n_id[author.src_index].repeat_interleave(2), paper.n_id[paper.dst_neg_index].view(-1)
            until = times[link.input_id].repeat_interleave(2)
        else:
            index = link.edge_label_index[:, n:]
            src, dst, until = author.n_id[index[0]], paper.n_id[index[1]], times[link.input_id].repeat(2)
            assert link.edge_label.tolist() == [1] * n + [0] * (2 * n)
        assert len(src) == len(dst) == 2 * n
        if avoid:
            assert not known & set(zip(src.tolist(), dst.tolist(), strict=True))
        if timed:
            assert (data["paper"].time[dst] <= until).all()
            assert mode == "triplet" or (data["author"].time[src] <= until).all()
