"""Tests that each loader gives bit-identical batches for all parts, hosts, threads and graph servers."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.loader import LinkNeighborLoader, NeighborLoader

from fast_cases import fast_cases, fast_grid
from load_kit import CITES, WRITES, hetero_data, homo_data, parts_of
from oracle import assert_identical, hosts_of, loader_of
from service_kit import new_keys
from trainer import DistLinkNeighborLoader, DistNeighborLoader
from trainer.core.errors import SettingsError
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
    "top until a time": {"weight_attr": "edge_weight", "neighbors": "top", "time_attr": "edge_time"},
    "disjoint": {"disjoint": True},
    "disjoint weighted": {"disjoint": True, "weight_attr": "edge_weight"},
    "induced": {"subgraph_type": "induced"},
    "bidirectional": {"subgraph_type": "bidirectional"},
}
LOADS = ("nodes", "binary", "triplet")
#: Each way with nodes and with one of the kinds of negatives, which do not depend on the way that neighbours are drawn.
GRID = [(how, load) for k, how in enumerate(HOW) for load in ("nodes", LOADS[1 + k % 2])]
MAKE = {"homo": homo_data, "hetero": hetero_data}
PLACES = ("4 parts", "wire 4")


@pytest.fixture(scope="module")
def graphs():
    """Yield the opened graphs, keyed by ("homo" or "hetero", place).

    Places: "memory", "N parts" (all opened in this process), and "wire N" (N parts, all but one behind graph servers).
    """
    with contextlib.ExitStack() as stack:
        opened = {}
        for kind, make in MAKE.items():
            data = opened[kind, "memory"] = make()
            for parts in (1, 2, 4):
                opened[kind, f"{parts} parts"] = parts_of(data, parts)
            for parts in (2, 4):
                opened[kind, f"wire {parts}"] = stack.enter_context(hosts_of(data, parts))[parts - 1]
        yield opened


def arguments_of(data, how, seeds=19):
    times = torch.arange(60) % 20 + 30
    if isinstance(data, Data):
        nodes, links = torch.arange(3, 3 + seeds), data.edge_index[:, 5 : 5 + seeds]
    else:
        nodes, links = ("paper", torch.arange(3, 3 + seeds)), (CITES, data[CITES].edge_index[:, 5 : 5 + seeds])
    given = {"input_nodes": nodes, "edge_label_index": links, "edge_label_time": times[:seeds], **how}
    if how.get("time_attr") == "edge_time":
        given["input_time"] = times[:seeds]
    return {**given, "num_neighbors": [4, 3], "batch_size": 8, "shuffle": True, "seed": 4}


@pytest.mark.parametrize(("kind", "case"), fast_grid(MAKE, GRID, share=2))
def test_every_batch_is_bit_identical(graphs, kind, case):
    how, load = case
    data = graphs[kind, "memory"]
    arguments = arguments_of(data, HOW[how])
    expected = list(loader_of(graphs[kind, "1 parts"], load, arguments))
    assert len(expected) == 3
    for place in PLACES:
        assert_identical(list(loader_of(graphs[kind, place], load, arguments)), expected)
    threads = loader_of(graphs[kind, "wire 2"], load, {**arguments, "threads": 3, "prefetch": 4})
    assert_identical(list(threads), expected)


@pytest.mark.parametrize(("how", "load"), GRID)
@pytest.mark.parametrize("kind", MAKE)
def test_data_in_memory_gives_the_batches_of_its_partition(graphs, kind, how, load):
    data = graphs[kind, "memory"]
    arguments = arguments_of(data, HOW[how])
    for mine, other in zip(loader_of(data, load, arguments), loader_of(graphs[kind, "4 parts"], load, arguments),
                           strict=True):  # fmt: skip
        assert_same_by_name(mine, other)


def assert_same_by_name(ours, theirs):
    """Assert that two batches have equal attributes, in any order. Ignores ``num_nodes`` and values that are None."""
    # for data in memory, torch_geometric keeps the user's order and may omit ``num_nodes``
    for mine, other in zip(ours.stores, theirs.stores, strict=True):
        pairs = [{k: v for k, v in store.items() if v is not None and k != "num_nodes"} for store in (mine, other)]
        assert pairs[0].keys() == pairs[1].keys()
        assert_identical({k: pairs[0][k] for k in pairs[1]}, pairs[1])


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("kind", MAKE)
def test_encryption_does_not_change_batches(graphs, kind, load):
    data = graphs[kind, "memory"]
    arguments = arguments_of(data, HOW["weighted"])
    with hosts_of(data, 2, new_keys()) as hosts:
        found = [list(loader_of(graph, load, arguments)) for graph in hosts]
    for batches in found:
        assert_identical(batches, list(loader_of(graphs[kind, "1 parts"], load, arguments)))


MORE = {
    "all": {"num_neighbors": [-1, -1]},
    "growing": {"num_neighbors": [2, 5, 1]},
    "gap": {"num_neighbors": [2, 0, 3]},
    "hidden links": {"exclude": "both", "reverse_type": CITES},
    "no false negatives": {"avoid_links": True},
    "seed order": {"shuffle": False},
    "drop last": {"drop_last": True},
}


@pytest.mark.parametrize("load", fast_cases(LOADS, "nodes", "binary"))
@pytest.mark.parametrize("more", MORE)
@pytest.mark.parametrize("kind", MAKE)
def test_batches_are_equal_for_every_other_argument(graphs, kind, more, load):
    if load == "nodes" and more in ("hidden links", "no false negatives"):
        return
    arguments = {**arguments_of(graphs[kind, "memory"], {}), **MORE[more]}
    if kind == "homo" and "reverse_type" in arguments:
        del arguments["reverse_type"]
    expected = list(loader_of(graphs[kind, "1 parts"], load, arguments))
    for place in ("4 parts", "wire 4"):
        assert_identical(list(loader_of(graphs[kind, place], load, arguments)), expected)


def test_fanouts_by_edge_type_and_links_between_two_types(graphs):
    more = {"num_neighbors": {of: [4, 2] if of == WRITES else [2, -1] for of in hetero_data().edge_types}}
    for load in LOADS:
        arguments = {**arguments_of(graphs["hetero", "memory"], {}), **more, "edge_label_index": WRITES}
        expected = list(loader_of(graphs["hetero", "1 parts"], load, arguments))
        for place in PLACES:
            assert_identical(list(loader_of(graphs["hetero", place], load, arguments)), expected)


BUNDLED = {
    "uniform": {},
    "replace": {"replace": True},
    "weighted": {"weight": "edge_weight"},
    "disjoint": {"disjoint": True},
    "times": {"time_attr": "time"},
    "last": {"time_attr": "time", "last": True},
    "growing": {"fanouts": (2, 5, 3)},
}


@pytest.mark.parametrize("how", BUNDLED)
@pytest.mark.parametrize("kind", MAKE)
def test_batches_of_the_bundled_trainer_are_bit_identical(graphs, kind, how):
    target = "node" if kind == "homo" else "paper"
    settings = LoaderSettings("train", **{"fanouts": (4, 3), "global_batch": 9, "target": target, **BUNDLED[how]})

    def batches(place):
        graph = graphs[kind, place]
        return list(BatchLoader(graph, settings, 0, RankLayout.single(graph.manifest.num_parts)).epoch(2))

    if kind == "hetero":
        assert {"x", "blocks", "n_id"} <= vars(batches("1 parts")[0]).keys()
    for place in PLACES:
        assert_identical(batches(place), batches("1 parts"))


NODES_REFUSED = {
    "weight and time": ({"weight_attr": "edge_weight", "time_attr": "time"}, "cannot be used together"),
    "induced and disjoint": ({"subgraph_type": "induced", "disjoint": True}, "induced subgraphs cannot be disjoint"),
    "induced and time": ({"subgraph_type": "induced", "time_attr": "time"}, "induced subgraphs cannot be temporal"),
    "time without attribute": ({"input_time": torch.zeros(19, dtype=torch.int64)}, "without time_attr"),
    "neither node nor edge": ({"time_attr": "when"}, "neither a node-level nor an edge-level"),
}


@pytest.mark.filterwarnings("ignore:Using 'NeighborSampler' without")
@pytest.mark.parametrize("case", NODES_REFUSED)
@pytest.mark.parametrize("place", ["memory", "2 parts"])
@pytest.mark.parametrize("kind", MAKE)
def test_what_torch_geometric_refuses_is_refused_with_the_reason(graphs, kind, place, case):
    how, message = NODES_REFUSED[case]
    nodes = arguments_of(graphs[kind, "memory"], {})["input_nodes"]
    with pytest.raises(SettingsError, match=message):
        DistNeighborLoader(graphs[kind, place], [3], nodes, **how)
    if case in ("time without attribute", "neither node nor edge"):  # pyg-lib's kernels refuse the other cases
        with pytest.raises((ValueError, KeyError)):
            NeighborLoader(graphs[kind, "memory"], [3], nodes, **how)


LINKS_REFUSED = {
    "times without attribute": ({"edge_label_time": torch.full((60,), 40)}, "pass edge_label_time"),
    "attribute without times": ({"time_attr": "time"}, "pass edge_label_time"),
    "triplet with labels": ({"neg_sampling": "triplet", "edge_label": torch.ones(60)}, "triplet"),
}


@pytest.mark.filterwarnings("ignore:Using 'NeighborSampler' without")
@pytest.mark.parametrize("case", LINKS_REFUSED)
@pytest.mark.parametrize("kind", MAKE)
def test_links_that_torch_geometric_refuses_are_refused_with_the_reason(graphs, kind, case):
    data = graphs[kind, "memory"]
    how, message = LINKS_REFUSED[case]
    links = arguments_of(data, {}, seeds=20)["edge_label_index"]
    how = {name: value[:20] if isinstance(value, torch.Tensor) else value for name, value in how.items()}
    with pytest.raises(SettingsError, match=message):
        DistLinkNeighborLoader(data, [3], links, **how)
    with pytest.raises(ValueError):
        LinkNeighborLoader(data, [3], edge_label_index=links, **how)
