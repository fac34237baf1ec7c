"""Tests of the arguments of ``DistNeighborLoader``: every accepted form, and the reason for each refusal."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from torch_geometric.sampler import NumNeighbors
from torch_geometric.sampler.base import SubgraphType

from load_kit import CITES, REV, WRITES, hetero_data, homo_data, parts_of
from trainer import DistNeighborLoader
from trainer.core.errors import SettingsError
from trainer.graph.seed_order import RankLayout

MASK = torch.arange(60) % 3 == 0


@pytest.mark.parametrize(
    ("given", "nodes", "input_id"),
    [
        (None, range(60), range(60)),
        (torch.tensor([7, 3, 3]), [7, 3, 3], [0, 1, 2]),
        (np.array([7, 3], np.int32), [7, 3], [0, 1]),
        ([7, 3], [7, 3], [0, 1]),
        ([], [], []),
        (MASK, range(0, 60, 3), range(0, 60, 3)),
        (MASK.numpy(), range(0, 60, 3), range(0, 60, 3)),
        ("train", None, None),
    ],
)
@pytest.mark.parametrize("source", ["memory", "2 parts"])
def test_forms_of_input_nodes(source, given, nodes, input_id):
    data = homo_data()
    loader = DistNeighborLoader(data if source == "memory" else parts_of(data, 2), [2], given, batch_size=60)
    if nodes is None:
        nodes = data.train_mask.nonzero().view(-1).tolist()
        input_id = range(len(nodes))
    batches = list(loader)
    assert [batch.n_id[: batch.batch_size].tolist() for batch in batches] == ([list(nodes)] if len(nodes) else [])
    assert [batch.input_id.tolist() for batch in batches] == ([list(input_id)] if len(nodes) else [])


@pytest.mark.parametrize(
    ("given", "nodes"),
    [
        ("paper", range(70)),
        (("paper", None), range(70)),
        (("paper", torch.tensor([5, 1])), [5, 1]),
        (["paper", [5, 1]], [5, 1]),
        (("paper", "train"), hetero_data()["paper"].train_mask.nonzero().view(-1).tolist()),
        (("paper", hetero_data()["paper"].train_mask), hetero_data()["paper"].train_mask.nonzero().view(-1).tolist()),
    ],
)
def test_forms_of_typed_input_nodes(given, nodes):
    (batch,) = DistNeighborLoader(parts_of(hetero_data(), 2), [2], given, batch_size=70)
    assert batch["paper"].n_id[: batch["paper"].batch_size].tolist() == list(nodes)


def test_input_id_and_time_can_be_given():
    loader = DistNeighborLoader(
        homo_data(), [2], [5, 6, 7], torch.tensor([9, 8, 7]), time_attr="time", input_id=torch.tensor([50, 60, 70])
    )
    assert [(int(batch.input_id), int(batch.seed_time)) for batch in loader] == [(50, 9), (60, 8), (70, 7)]


@pytest.mark.parametrize(
    "fanouts",
    [
        [2, 1],
        {of: [2, 1] for of in (WRITES, CITES, REV)},
        NumNeighbors({CITES: [2, 1]}, default=[2, 1]),
        NumNeighbors([2, 1]),
    ],
)
def test_forms_of_num_neighbors(fanouts):
    graph = parts_of(hetero_data())
    expected = [batch["paper"].n_id for batch in DistNeighborLoader(graph, [2, 1], "paper", batch_size=9)]
    for _ in range(2):  # PyG's object caches its answers
        got = [batch["paper"].n_id for batch in DistNeighborLoader(graph, fanouts, "paper", batch_size=9)]
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_an_edge_type_may_be_left_out_by_a_fanout_of_zero():
    fanouts = {WRITES: [3, 3], CITES: [0, 0], REV: [0, 3]}
    for batch in DistNeighborLoader(hetero_data(), fanouts, "paper", batch_size=20):
        assert batch[CITES].edge_index.shape == (2, 0) and batch.num_sampled_edges_dict[REV][0] == 0


def test_workers_become_threads_and_a_generator_a_seed():
    generator = torch.Generator().manual_seed(12)
    asked = {"shuffle": True, "batch_size": 20, "persistent_workers": True, "pin_memory": True, "timeout": 9}
    loader = DistNeighborLoader(homo_data(), [2], generator=generator, num_workers=3, prefetch_factor=2, **asked)
    assert (loader.options.threads, loader.options.prefetch, loader.options.deadline) == (3, 6, 9)
    same = DistNeighborLoader(homo_data(), [2], seed=12, batch_size=20, shuffle=True)
    assert all(torch.equal(a.n_id, b.n_id) for a, b in zip(loader, same, strict=True))
    assert loader.batch_size == 20 and len(loader.dataset) == 60


def test_worker_init_fn_is_called_on_each_sampler_thread():
    called, both = [], threading.Barrier(2)

    def prepare(number):
        called.append((number, threading.current_thread().name))
        both.wait(30)  # waits until both threads have started

    batches = list(DistNeighborLoader(homo_data(), [2], num_workers=2, worker_init_fn=prepare, batch_size=5))
    assert sorted(number for number, _ in called) == [0, 1] and len({name for _, name in called}) == 2
    assert len(batches) == 12
    list(DistNeighborLoader(homo_data(), [2], worker_init_fn=prepare))  # not called without workers, as in torch
    assert len(called) == 2

    def fail(number):
        raise LookupError(f"no table for thread {number}")

    with pytest.raises(LookupError, match="no table for thread"):
        next(iter(DistNeighborLoader(homo_data(), [2], num_workers=1, worker_init_fn=fail)))


@pytest.mark.parametrize("source", ["memory", "2 parts"])
def test_no_hop_gives_the_seeds_alone(source):
    data = homo_data() if source == "memory" else parts_of(homo_data(), 2)
    batch = DistNeighborLoader(data, [], [4, 7])([0, 1])
    assert batch.n_id.tolist() == [4, 7] and batch.num_edges == 0 and len(batch.blocks) == 0
    assert torch.equal(batch.x, homo_data().x[[4, 7]]) and batch.num_sampled_nodes == [2]


def test_loaders_print_and_fail_as_torch_geometrics():
    assert str(DistNeighborLoader(homo_data(), [2])) == "DistNeighborLoader()"
    with pytest.raises(ValueError, match="batch_size must be a whole number"):
        DistNeighborLoader(homo_data(), [2], batch_size=0)


def test_subgraph_type_as_enum_and_the_deprecated_directed():
    given = DistNeighborLoader(homo_data(), [2], [1], subgraph_type=SubgraphType.induced)
    with pytest.warns(DeprecationWarning, match="subgraph_type='induced'"):
        old = DistNeighborLoader(homo_data(), [2], [1], directed=False)
    assert torch.equal(next(iter(given)).e_id, next(iter(old)).e_id)


def test_transforms_work_as_in_torch_geometric():
    def drop_last_node(out):
        keep = (out.row < len(out.node) - 1) & (out.col < len(out.node) - 1)
        out.node, out.row, out.col, out.edge = out.node[:-1], out.row[keep], out.col[keep], out.edge[keep]
        return out

    data = homo_data()
    for graph in (data, parts_of(data, 2)):
        for on_threads in (None, True):
            whole = DistNeighborLoader(graph, [3], [5])(torch.tensor([0]))
            loader = DistNeighborLoader(
                graph, [3], [5], transform=lambda batch: batch.update({"seen": True}), filter_per_worker=on_threads,
                transform_sampler_output=drop_last_node,
            )  # fmt: skip
            batch = loader([0])
            assert batch.seen and torch.equal(batch.n_id, whole.n_id[:-1])
            assert torch.equal(batch.x, data.x[batch.n_id]) and torch.equal(batch.edge_attr, data.edge_attr[batch.e_id])


def test_a_transform_may_add_nodes_but_not_edges_of_a_partition():
    def add_hub(out):
        out.node = torch.cat([out.node, torch.tensor([59])])
        return out

    def add_edge(out):
        out.row, out.col, out.edge = (torch.cat([v, v.new_zeros(1)]) for v in (out.row, out.col, out.edge))
        return out

    data = homo_data()
    graph = parts_of(data, 2)
    batch = DistNeighborLoader(graph, [1], [5], transform_sampler_output=add_hub)([0])
    assert batch.n_id[-1] == 59 and torch.equal(batch.x, data.x[batch.n_id])
    with pytest.raises(SettingsError, match="edges of .* that were not sampled"):
        DistNeighborLoader(graph, [1], [5], transform_sampler_output=add_edge)([0])


HOMO_REFUSALS = {
    "neighbor_sampler": ({"neighbor_sampler": object()}, "neighbor_sampler: not supported"),
    "input_time alone": ({"input_time": torch.zeros(60)}, "input_time is given without time_attr"),
    "sampler": ({"sampler": [1]}, "sampler: not supported, as the loader orders the seeds"),
    "batch_sampler": ({"batch_sampler": [[1]]}, "batch_sampler: not supported, as the loader cuts"),
    "worker_init_fn": ({"worker_init_fn": 3}, "worker_init_fn must be a function of the thread's number, not 3"),
    "context": ({"multiprocessing_context": "fork"}, "multiprocessing_context: not supported, as threads"),
    "out of order": ({"in_order": False}, "batches always come in order"),
    "misspelt": ({"batchsize": 3}, "unknown argument 'batchsize'; did you mean 'batch_size'"),
    "batch_size": ({"batch_size": None}, "batch_size must be a whole number of at least 1, not None"),
    "batch_size 0": ({"batch_size": 0}, "batch_size must be a whole number of at least 1, not 0"),
    "two seeds": ({"seed": 1, "generator": torch.Generator()}, "seed and generator were both given"),
    "subgraph_type": ({"subgraph_type": "both"}, "subgraph_type 'both'; expected one of directional"),
    "strategy": ({"temporal_strategy": "first"}, "temporal_strategy 'first'"),
    "time and weight": ({"time_attr": "time", "weight_attr": "edge_weight"}, "cannot be used together"),
    "induced disjoint": ({"subgraph_type": "induced", "disjoint": True}, "induced subgraphs cannot be disjoint"),
    "no such time": ({"time_attr": "when"}, "'when' is neither a node-level nor an edge-level"),
    "no such weight": ({"weight_attr": "heft"}, "weight attribute 'heft'"),
    "edge time": ({"time_attr": "edge_time"}, "'node' nodes have no attribute 'edge_time' with their times"),
    "float time": ({"time_attr": "x"}, "expected one integer per node"),
    "input_time shape": ({"time_attr": "time", "input_time": [1, 2]}, r"input_time: int64 \[2\] for 60 'node' seeds"),
    "input_time dtype": ({"time_attr": "time", "input_time": torch.rand(60)}, "expected whole numbers"),
    "input_id": ({"input_id": [1]}, r"input_id: int64 \[1\] for 60"),
    "id too large": (
        {"input_nodes": [3, 60]},
        "input_nodes: 60 at position 1, but ids of 'node' nodes go from 0 to 59",
    ),
    "negative id": ({"input_nodes": [-1]}, "input_nodes: -1 at position 0"),
    "float ids": ({"input_nodes": [0.5]}, r"float64 \[1\]; expected integer node ids \[n\], or a boolean mask"),
    "short mask": ({"input_nodes": MASK[:5]}, r"mask has shape \[5\], there are 60"),
    "split": ({"input_nodes": "test"}, r"'node' nodes have no split 'test'; they have \['train'\]"),
    "typed": ({"input_nodes": ("paper", None)}, "the graph is homogeneous; pass the seeds alone"),
    "mapped fanouts": ({"num_neighbors": {CITES: [1]}}, "num_neighbors is a mapping over edge types, but"),
    "odd fanouts": ({"num_neighbors": 5}, "5 is not a list of whole numbers"),
    "fanout": ({"num_neighbors": [-2]}, "fanout -2"),
    "rank": ({"rank": 1}, "rank is given without layout"),
    "rank of layout": ({"rank": 1, "layout": RankLayout.single(2)}, "rank 1 is not one of the layout's 1 ranks"),
    "layout": ({"layout": RankLayout.single(3)}, "the layout places 3 parts, the graph has"),
}


@pytest.mark.parametrize("what", HOMO_REFUSALS)
@pytest.mark.parametrize("source", ["memory", "2 parts"])
def test_invalid_arguments_are_refused(source, what):
    arguments, message = HOMO_REFUSALS[what]
    data = homo_data() if source == "memory" else parts_of(homo_data(), 2)
    with pytest.raises(SettingsError, match=message):
        DistNeighborLoader(
            data, arguments.get("num_neighbors", [2]), **{k: v for k, v in arguments.items() if k != "num_neighbors"}
        )


HETERO_REFUSALS = {
    "no type": ({"input_nodes": None}, r"pass input_nodes as \(node type, seeds\); types are \['author'"),
    "ids alone": ({"input_nodes": torch.arange(3)}, "pass input_nodes as"),
    "unknown type": ({"input_nodes": "book"}, "no node type 'book'"),
    "edge type missing": ({"num_neighbors": {CITES: [1]}}, "Missing number of neighbors for edge type"),
    "edge type unknown": ({"num_neighbors": {("a", "b", "c"): [1]}}, "Not all edge types specified"),
    "hops": ({"num_neighbors": {CITES: [1], WRITES: [1, 2], REV: [1]}}, "Number of hops must be the same"),
    "no own time": ({"input_nodes": "venue", "time_attr": "time"}, "'venue' nodes have no attribute 'time' with their"),
    "mapped id": (
        {"input_nodes": "paper", "input_id": {"paper": [1]}},
        "input_id is a mapping, but input_nodes is not",
    ),
    "attrs": ({"attrs": ["colour"]}, "attrs: no attribute 'colour'"),
    "attrs type": ({"attrs": {"book": ["x"]}}, "attrs: the graph has no type 'book'"),
}


@pytest.mark.parametrize("what", HETERO_REFUSALS)
def test_invalid_arguments_for_typed_graphs_are_refused(what):
    arguments, message = HETERO_REFUSALS[what]
    given = {"num_neighbors": [2], "input_nodes": "paper", **arguments}
    with pytest.raises(SettingsError, match=message):
        DistNeighborLoader(parts_of(hetero_data(), 2), **given)


def test_data_of_another_kind_is_refused():
    with pytest.raises(SettingsError, match=r"not str; open it first: gnnfleet.open\('parts'\)"):
        DistNeighborLoader("parts", [2])
    with pytest.raises(SettingsError, match="attrs selects the attributes that hosts send"):
        DistNeighborLoader(homo_data(), [2], attrs=["x"])
