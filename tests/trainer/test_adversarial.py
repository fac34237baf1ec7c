"""Tests of extreme graphs: all kinds of sampling and loaders give equal batches for any number of parts and ranks."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

from fast_cases import fast_cases
from load_kit import assert_same
from odd_graphs import GRAPHS, TO, cut, seeds_of
from oracle import assert_identical, facts, hosts_of, layout_of, loader_of
from pyg_reference import node_loader
from trainer.graph.seed_order import RankLayout
from trainer.loader.block_loader import BatchLoader, LoaderSettings

HOW = {
    "uniform": {},
    "replace": {"replace": True},
    "all": {"num_neighbors": [-1, -1]},
    "weighted": {"weight_attr": "edge_weight"},
    "node times": {"time_attr": "time"},
    "last edge times": {"time_attr": "edge_time", "temporal_strategy": "last"},
    "disjoint": {"disjoint": True},
    "induced": {"subgraph_type": "induced"},
    "bidirectional": {"subgraph_type": "bidirectional"},
}
FAST = ("uniform", "node times", "induced")  # the last one is not for ranks
LOADS = ("nodes", "binary", "triplet")
EMPTY = functools.partial(cut, empty=(0, 2))


def arguments_of(data, how, load):
    arguments, num_seeds = seeds_of(data)
    arguments |= {"num_neighbors": [3, 2], "batch_size": 4, "shuffle": True, "seed": 1, **HOW[how]}
    if HOW[how].get("time_attr") == "edge_time" and load == "nodes":
        arguments["input_time"] = torch.arange(num_seeds) % 6
    return arguments


@pytest.fixture(scope="module")
def places():
    """Return a function ``of(name)`` that returns the graph ``name`` as (data, opened in one part, others).

    ``others``: the graph opened in four parts, and in four parts of which two are empty.
    """
    with_wires = {}

    def of(name):
        if name not in with_wires:
            data = GRAPHS[name]()
            with_wires[name] = data, cut(data, 1), [cut(data, 4), EMPTY(data, 4)]
        return with_wires[name]

    return of


@pytest.mark.parametrize("how", fast_cases(HOW, *FAST))
@pytest.mark.parametrize("name", GRAPHS)
def test_batches_do_not_depend_on_parts_or_empty_parts(places, name, how):
    data, whole, others = places(name)
    for load in LOADS:
        arguments = arguments_of(data, how, load)
        expected = list(loader_of(whole, load, arguments))
        assert len(expected) == -(-_count(arguments, load) // 4)
        for graph in others:
            assert_identical(list(loader_of(graph, load, arguments)), expected)


def _count(arguments, load):
    given = arguments["input_nodes" if load == "nodes" else "edge_label_index"]
    return (given[1] if isinstance(given, tuple) else given).shape[-1]


@pytest.mark.parametrize("name", GRAPHS)
def test_batches_over_the_network_are_identical(places, name):
    # Each kind of sampling is tested with one loader; test_oracle.py tests all combinations over full parts.
    data, whole, _ = places(name)
    with hosts_of(data, 4, make=EMPTY) as hosts:
        for how, load in zip(HOW, itertools.cycle(LOADS), strict=False):
            arguments = arguments_of(data, how, load)
            assert_identical(list(loader_of(hosts[2], load, arguments)), list(loader_of(whole, load, arguments)))


@pytest.mark.parametrize("how", [name for name in HOW if name != "induced"])
@pytest.mark.parametrize("name", GRAPHS)
def test_whole_neighbourhoods_equal_those_of_torch_geometric(places, name, how):
    data, _, (graph, _) = places(name)
    arguments = {**arguments_of(data, how, "nodes"), "num_neighbors": [-1, -1], "shuffle": False}
    theirs = {k: v for k, v in arguments.items() if k not in ("edge_label_index", "edge_label_time", "shuffle", "seed")}
    for mine, other in zip(loader_of(graph, "nodes", arguments), node_loader(data, **theirs), strict=True):
        assert_same(mine, other, ignore=("num_nodes",))


@pytest.mark.filterwarnings("ignore:.* for 3 ranks")
@pytest.mark.parametrize(
    "how", fast_cases([name for name in HOW if name not in ("induced", "bidirectional")], *FAST[:2])
)
@pytest.mark.parametrize("name", GRAPHS)
def test_shares_of_ranks_add_up_to_the_same_batches(places, name, how):
    # Every rank gets the same number of batches, some without seeds when there are fewer seeds than ranks.
    data, whole, (graph, _) = places(name)
    for load in LOADS:
        of = {"target": None, "link": None}
        if not isinstance(data, Data):
            of = {"target": "item", "link": None if load == "nodes" else TO}
        for few in (None, 1) if how != "uniform" else (None, 2, 1, 0):
            arguments = arguments_of(data, how, load)
            rest = _count(arguments, load) % 6  # on three ranks, a rest of 1 or 2 joins the batch before
            few_or_full = _count(arguments, load) - (rest if rest < 3 else 0) if few is None else few
            arguments = _first(arguments, few_or_full)
            expected = [facts([b], load, **of) for b in loader_of(whole, load, {**arguments, "batch_size": 6})]
            loaders = [
                loader_of(graph, load, {**arguments, "batch_size": 2, "rank": rank, "layout": layout_of(3, 4)})
                for rank in range(3)
            ]
            shares = list(zip(*loaders, strict=True))
            assert [facts(share, load, **of) for share in shares] == expected
            assert few is None or len(shares) == min(few, 1)


def _first(arguments, count):
    def cut_one(value):
        return (value[0], value[1][..., :count]) if isinstance(value, tuple) else value[..., :count]

    names = ("input_nodes", "edge_label_index", "input_time", "edge_label_time")
    return {**arguments, **{name: cut_one(arguments[name]) for name in names if name in arguments}}


@pytest.mark.parametrize("name", GRAPHS)
def test_batches_of_the_bundled_trainer_do_not_depend_on_parts(places, name):
    data, whole, others = places(name)
    target = "node" if isinstance(data, Data) else "item"
    for more in ({}, {"replace": True}, {"weight": "edge_weight"}, {"time_attr": "time"}, {"disjoint": True}):
        settings = LoaderSettings("train", (3, -1) if "replace" not in more else (3, 2), 4, target=target, **more)

        def batches(graph, settings=settings):
            return list(BatchLoader(graph, settings, 0, RankLayout.single(graph.manifest.num_parts)).epoch(0))

        assert sum(batch.num_seeds for batch in batches(whole)) == whole.manifest.nodes[target].splits["train"]
        for graph in others:
            assert_identical(batches(graph), batches(whole))


@pytest.mark.parametrize("world_size", [2, 7, 40])
def test_fewer_train_seeds_than_ranks(places, world_size):
    _, _, (graph, _) = places("multi-edges")
    seeds = graph.store.seeds("node", "train")
    layout = RankLayout.everywhere(world_size, 4)
    ranks = [list(BatchLoader(graph, LoaderSettings("train", (2,), world_size), r, layout).epoch(0))
             for r in range(world_size)]  # fmt: skip
    assert {len(batches) for batches in ranks} == {-(-len(seeds) // world_size)}
    found = sorted(i for batches in ranks for batch in batches for i in batch.input_id.tolist())
    assert found == list(range(len(seeds)))
    for batch in (batch for batches in ranks for batch in batches if batch.num_seeds == 0):
        assert batch.x.shape == (0, 2) and batch.blocks[0].indptr.tolist() == [0] and len(batch.y) == 0


def test_duplicate_seeds_keep_their_places():
    graph = cut(GRAPHS["complete"](), 3)
    ids = torch.tensor([4, 4, 4, 1, 4])
    (batch,) = loader_of(graph, "nodes", {"num_neighbors": [3], "input_nodes": ids, "batch_size": 9})
    assert torch.equal(batch.n_id[:5], ids) and batch.num_sampled_nodes[0] == 5
    rows = [batch.n_id[batch.edge_index[0][batch.edge_index[1] == place]].tolist() for place in range(5)]
    assert rows[0] == rows[1] == rows[2] == rows[4] and len(set(rows[0])) == 3
    assert np.bincount(batch.edge_index[1].numpy()).tolist() == [3] * 5
