"""Tests of a graph node with a million neighbours, and of ids beyond 2^31."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

import trainer
from load_kit import opened
from oracle import assert_identical, hosts_of, loader_of
from service_kit import place_of, serving
from trainer.core.schema import HOMO_EDGE, HOMO_NODE
from trainer.data.memory import dataset_of
from trainer.graph.open import Graph
from trainer.partition.methods.assign import assign_parts
from trainer.partition.write import write_partition
from trainer.sampler.dist_graph import DistGraph
from trainer.sampler.local_graph import LocalGraph
from trainer.sampler.types import HopSample
from trainer.service.client import HostClient
from trainer.store.manifest import AttrSpec, EdgeSpec, Manifest, NodeSpec
from trainer.store.part_store import EdgePart, NodePart, Part, PartStore, open_parts

MILLION = 1_000_000
HOW = {
    "uniform": {},
    "replace": {"replace": True},
    "weighted": {"weight_attr": "weight"},
    "weighted replace": {"weight_attr": "weight", "replace": True},
    "times": {"time_attr": "when"},
    "last": {"time_attr": "when", "temporal_strategy": "last"},
    "disjoint": {"disjoint": True},
    "induced": {"subgraph_type": "induced"},
    "bidirectional": {"subgraph_type": "bidirectional"},
}


def hub():
    """Return a graph in which a million nodes point to node 0, and node 0 points to ten of them."""
    ends = torch.arange(1, MILLION + 1)
    edges = torch.cat(
        [torch.stack([ends, torch.zeros_like(ends)]), torch.stack([torch.zeros(10), ends[:10]]).long()], 1
    )
    count = edges.shape[1]
    weight = (torch.arange(count) % 3).float()
    return Data(edge_index=edges, num_nodes=MILLION + 1, weight=weight, when=torch.arange(count) % 50)


@pytest.fixture(scope="module")
def hubs(tmp_path_factory):
    """Yield the graph of ``hub`` in memory, in two parts, and as each of two hosts opens it."""
    data, folder = hub(), tmp_path_factory.mktemp("hub")
    dataset = dataset_of(data, "hub", ("when",))
    write_partition(dataset, assign_parts(dataset, 2, "hash"), folder)

    def make(_, __, only):
        return opened(open_parts(folder, only))

    with hosts_of(data, 2, make=make) as hosts:
        yield data, trainer.open(folder), hosts


@pytest.mark.parametrize(
    ("how", "load"),
    [*((how, "nodes") for how in HOW), ("uniform", "binary"), ("weighted", "triplet"), ("times", "binary")],
)
def test_hub_with_a_million_neighbours(hubs, how, load):
    data, parts, hosts = hubs
    seeds = torch.tensor([0, 3, 0, 7, MILLION, 5])
    links = torch.stack([seeds, torch.tensor([1, 0, 0, 0, 0, 2])])
    times = torch.full((6,), 30)
    arguments = {"num_neighbors": [5, 4], "input_nodes": seeds, "edge_label_index": links, "edge_label_time": times,
                 "batch_size": 6, **HOW[how]}  # fmt: skip
    arguments |= {"input_time": times} if "time_attr" in HOW[how] else {}
    if load != "nodes":
        arguments |= {"exclude": "both", "avoid_links": load == "binary"}
    (expected,) = loader_of(parts, load, arguments)
    for host in hosts:
        (batch,) = loader_of(host, load, arguments)
        assert_identical(batch, expected)
    (memory,) = loader_of(data, load, arguments)
    assert torch.equal(memory.n_id, expected.n_id) and torch.equal(memory.edge_index, expected.edge_index)
    if load == "nodes" and "subgraph_type" not in HOW[how]:
        first = expected.edge_index[1] == 0
        assert int(first.sum()) == 5 and (data.edge_index[1, expected.e_id[first]] == 0).all()
        if how == "last":
            assert (data.when[expected.e_id[first]] == 30).all()


def test_all_of_the_million_neighbours(hubs):
    data, parts, hosts = hubs
    for graph in (parts, hosts[1]):
        (batch,) = loader_of(graph, "nodes", {"num_neighbors": [-1, 2], "input_nodes": torch.tensor([0])})
        assert batch.num_sampled_nodes == [1, MILLION, 0] and batch.num_sampled_edges == [MILLION, 10]
        assert torch.equal(torch.sort(batch.e_id).values, torch.arange(data.num_edges))


# Ids beyond 2^31 ------------------------------------------------------------------------------------------------------

FAR = 2**31 + 5  #: first id of the second part
COUNT, DEGREE = FAR + 10, 3


def sources_of(nodes):
    """Return three in-neighbours of each node, [n, 3]. The second is an id above 2^31, the third the node itself."""
    near, far = nodes * 5 % COUNT, FAR + nodes % 10
    return np.stack([near, far, nodes], axis=1)


class FarGraph:
    """The first part of a huge graph, which computes its edges instead of storing them.

    Node v has the in-edges with ids 3 v, 3 v + 1 and 3 v + 2.
    """

    def sample_hops(self, requests):
        return [self._hop(request) for request in requests]

    def _hop(self, request):
        assert request.fanout == -1 or request.fanout >= DEGREE and not request.replace
        sources, edges = sources_of(request.nodes), request.nodes[:, None] * DEGREE + np.arange(DEGREE)
        kept = np.ones(sources.shape, bool) if request.sources is None else np.isin(sources, request.sources)
        if request.exclude is not None:
            barred = set(zip(*(ids.tolist() for ids in request.exclude), strict=True))
            kept &= [[(v, u) not in barred for u in row] for v, row in
                     zip(request.nodes.tolist(), sources.tolist(), strict=True)]  # fmt: skip
        return HopSample(kept.sum(1).astype(np.int32), sources[kept], edges[kept] if request.with_edge else None)

    def gather(self, requests):
        return [dict.fromkeys(request.attrs, request.ids) for request in requests]

    def has_edges(self, edge_type, src, dst):
        return (sources_of(dst) == src[:, None]).any(1)


def far_store():
    ids = np.arange(FAR, COUNT)
    edges = np.arange(FAR * DEGREE, COUNT * DEGREE)
    value = {"value": AttrSpec("int64", (COUNT,))}
    manifest = Manifest(
        dataset="far", fingerprint="", num_parts=2, algorithm="given", seed=0, hetero=False,
        nodes={HOMO_NODE: NodeSpec(COUNT, (0, FAR, COUNT), value, {}, 0)},
        edges={HOMO_EDGE: EdgeSpec(COUNT * DEGREE, (0, FAR * DEGREE, COUNT * DEGREE),
                                   {"edge_value": AttrSpec("int64", (COUNT * DEGREE,))}, (), 0.0)},
        edge_cut=0.0, balance=1.0, graph_attrs={}, files=(),
    )  # fmt: skip
    indptr = np.arange(0, len(edges) + 1, DEGREE)
    rows = EdgePart(FAR * DEGREE, indptr, sources_of(ids).ravel(), edges, {"edge_value": edges}, {})
    part = Part(1, {HOMO_NODE: NodePart(FAR, ids, {"value": ids})}, {HOMO_EDGE: rows})
    return PartStore(Path("far"), manifest, {1: part}, {}, {})


@pytest.fixture(scope="module")
def far():
    store = far_store()
    with serving(FarGraph()) as server:
        client = HostClient(place_of(server.endpoint, parts=(0,)), 20.0)
        yield Graph(store, DistGraph(LocalGraph(store), {1: client}), {1: client})
        client.close()


SEEDS = torch.tensor([FAR + 3, 2**31 - 1, 17, COUNT - 1, FAR, FAR + 3])


@pytest.mark.parametrize("more", [{}, {"disjoint": True}, {"subgraph_type": "induced"}], ids=str)
@pytest.mark.parametrize("fanout", [-1, 3])
def test_ids_beyond_32_bits_in_node_batches(far, fanout, more):
    loader = loader_of(far, "nodes", {"num_neighbors": [fanout, fanout], "input_nodes": SEEDS, "batch_size": 4, **more})
    batches = list(loader)
    assert torch.cat([batch.n_id[: batch.batch_size] for batch in batches]).tolist() == SEEDS.tolist()
    for batch in batches:
        src, dst = batch.n_id[batch.edge_index]
        assert torch.equal(batch.e_id // DEGREE, dst)
        assert torch.equal(batch.value, batch.n_id) and torch.equal(batch.edge_value, batch.e_id)
        wanted = sources_of(dst.numpy())[np.arange(len(dst)), batch.e_id.numpy() % DEGREE]
        assert np.array_equal(wanted, src.numpy())
        found = set(batch.n_id.tolist())
        assert found == reached(batch.n_id[: batch.batch_size].numpy(), 2) and max(found) > 2**31
        if not more:
            assert torch.bincount(batch.edge_index[1])[: batch.batch_size].tolist() == [DEGREE] * batch.batch_size


def reached(seeds, hops):
    found = set(seeds.tolist())
    for _ in range(hops):
        found |= set(sources_of(np.array(sorted(found))).ravel().tolist())
    return found


@pytest.mark.parametrize("load", ["binary", "triplet"])
def test_ids_beyond_32_bits_in_link_batches(far, load):
    links = torch.stack([torch.tensor(sources_of(SEEDS.numpy())[:, 1]), SEEDS])
    more = {"edge_label_index": links, "num_neighbors": [-1], "batch_size": 6, "avoid_links": True, "exclude": "self"}
    (batch,) = loader_of(far, load, more)
    if load == "binary":
        ends = batch.n_id[batch.edge_label_index]
        assert torch.equal(ends[:, :6], links) and batch.edge_label.tolist() == [1] * 6 + [0] * 9
        negatives = ends[:, 6:]
    else:
        assert torch.equal(batch.n_id[batch.src_index], links[0])
        assert torch.equal(batch.n_id[batch.dst_pos_index], links[1])
        negatives = torch.stack([links[0].repeat_interleave(2), batch.n_id[batch.dst_neg_index].view(-1)])
    assert not FarGraph().has_edges(None, *negatives.numpy()).any() and negatives.max() < COUNT
    used = set(map(tuple, batch.n_id[batch.edge_index].t().tolist()))
    assert used and not used & set(map(tuple, links.t().tolist()))
