"""Tests that neither the sample of a seed nor the negatives of a link depend on the number of ranks."""

from __future__ import annotations

import contextlib

import pytest
import torch

from fast_cases import fast_grid
from load_kit import CITES, hetero_data, homo_data, parts_of
from oracle import facts, hosts_of, layout_of, loader_of, trees
from trainer.graph.seed_order import RankLayout
from trainer.loader.block_loader import BatchLoader, LoaderSettings

HOW = {
    "uniform": {},
    "replace": {"replace": True},
    "weighted": {"weight_attr": "edge_weight"},
    "weighted replace": {"weight_attr": "edge_weight", "replace": True},
    "node times": {"time_attr": "time"},
    "node times, last": {"time_attr": "time", "temporal_strategy": "last"},
    "edge times": {"time_attr": "edge_time"},
    "edge times, last": {"time_attr": "edge_time", "temporal_strategy": "last"},
    "disjoint": {"disjoint": True},
    "disjoint replace": {"disjoint": True, "replace": True},
    "disjoint, growing": {"disjoint": True, "num_neighbors": [2, 4]},
    "hidden links": {"exclude": "both"},
    "no false negatives": {"avoid_links": True},
}
LINKS_ONLY = ("hidden links", "no false negatives")
LOADS = ("nodes", "binary", "triplet")
TYPES = {"homo": (None, None), "hetero": ("paper", CITES)}
GLOBAL, SEEDS = 12, 31


@pytest.fixture(scope="module")
def hosts():
    """Yield {"homo": graphs, "hetero": graphs}: a homogeneous and a heterogeneous graph, each opened on two hosts."""
    with contextlib.ExitStack() as stack:
        yield {kind: stack.enter_context(hosts_of(make(), 2)) for kind, make in (("homo", homo_data),
               ("hetero", hetero_data))}  # fmt: skip


def arguments_of(kind, how, load):
    times = torch.arange(SEEDS) % 20 + 30
    ids = torch.cat([torch.arange(SEEDS - 3), torch.tensor([7, 7, 2])])  # repeats
    if kind == "homo":
        nodes, links = ids, homo_data().edge_index[:, :SEEDS]
    else:
        nodes, links = ("paper", ids), (CITES, hetero_data()[CITES].edge_index[:, :SEEDS])
    given = {"input_nodes": nodes, "edge_label_index": links, "edge_label_time": times, "num_neighbors": [4, 3], **how}
    if how.get("exclude"):
        given |= {"reverse_type": CITES} if kind == "hetero" else {}
    if how.get("time_attr") == "edge_time" and load == "nodes":
        given["input_time"] = times
    return {**given, "shuffle": True, "seed": 6}


CASES = [(how, load) for how in HOW for load in LOADS if load != "nodes" or how not in LINKS_ONLY]


@pytest.mark.parametrize(("kind", "case"), fast_grid(TYPES, CASES, share=2))
def test_samples_are_equal_on_one_two_and_three_ranks(hosts, kind, case):
    how, load = case
    arguments, of = arguments_of(kind, HOW[how], load), dict(zip(("target", "link"), TYPES[kind], strict=True))
    if load == "nodes":
        of["link"] = None
    whole = loader_of(hosts[kind][0], load, {**arguments, "batch_size": GLOBAL})
    expected = [facts([batch], load, **of) for batch in whole]
    assert len(expected) == 3 and all(expected)
    for ranks in (3,) if how != "uniform" else (2, 3):
        split = {"batch_size": GLOBAL // ranks, "layout": layout_of(ranks, 2)}
        loaders = [
            loader_of(hosts[kind][rank % 2], load, {**arguments, **split, "rank": rank}) for rank in range(ranks)
        ]
        shares = list(zip(*loaders, strict=True))
        assert [facts(share, load, **of) for share in shares] == expected
        assert all(_num_inputs(batch, of, load) in (n // ranks, n // ranks + 1)
                   for n, share in zip((12, 12, 7), shares, strict=True) for batch in share)  # fmt: skip


def _num_inputs(batch, of, load):
    of = of["target"] if load == "nodes" else of["link"]
    return len((batch if of is None else batch[of]).input_id)


BUNDLED = {
    "uniform": {},
    "growing": {"fanouts": (2, 5, 3)},
    "replace": {"replace": True, "fanouts": (2, 5)},
    "weighted": {"weight": "edge_weight"},
    "disjoint": {"disjoint": True},
    "times": {"time_attr": "time"},
    "last": {"time_attr": "time", "last": True},
}


@pytest.mark.parametrize("how", BUNDLED)
@pytest.mark.parametrize("kind", TYPES)
def test_samples_of_the_bundled_trainer_are_equal_on_any_ranks(kind, how):
    graph = parts_of(homo_data() if kind == "homo" else hetero_data(), 2)
    target = TYPES[kind][0] or "node"
    settings = LoaderSettings("train", **{"fanouts": (4, 3), "global_batch": 9, "target": target, **BUNDLED[how]})

    def seen(layout):
        loaders = [BatchLoader(graph, settings, rank, layout).epoch(1) for rank in range(layout.world_size)]
        return [_merged(shares, TYPES[kind][0]) for shares in zip(*loaders, strict=True)]

    expected = seen(RankLayout.single(2))
    assert sum(map(len, expected)) == len(graph.store.seeds(target, "train"))
    for layout in (layout_of(2, 2), layout_of(3, 2), RankLayout.everywhere(3, 2)):
        assert seen(layout) == expected


def _merged(shares, target):
    """Return {input id: (seed, label, digest of the seed's tree)}. ``shares``: the batches of all ranks."""
    found = {}
    for batch in shares:
        labels = trees(batch)[target or ""]
        nodes = batch.n_id if target is None else batch.n_id[target]
        for row, seed in enumerate(batch.input_id.tolist()):
            assert seed not in found
            found[seed] = (int(nodes[row]), int(batch.y[row]), labels[row])
    return found


def test_trees_differ_between_samples():
    # Check of the comparison itself: another sampling seed gives every seed another tree.
    graph = parts_of(homo_data(), 2)
    found = []
    for seed in (0, 1):
        settings = LoaderSettings("train", (2, 2), 99, seed=seed, shuffle=False)
        (batch,) = BatchLoader(graph, settings, 0, RankLayout.single(2)).epoch(0)
        found.append(_merged([batch], None))
    assert found[0].keys() == found[1].keys()
    assert sum(found[0][seed] == found[1][seed] for seed in found[0]) < len(found[0]) / 3
