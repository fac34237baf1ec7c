"""Tests of loaders over all edges: equal batches with the ends of edges in memory or in files."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

from gateway_kit import client_graph, serving_parts, written
from load_kit import WRITES, hetero_data, homo_data, opened, parts_of
from partition_kit import assert_sound, odd_types
from partition_kit import written as write_parts
from partitions import store_of
from samplers_kit import assert_same_everywhere, over_the_wire
from trainer import DistGraphSAINTEdgeSampler, DistGraphSAINTNodeSampler, DistLinkNeighborLoader, DistZipLoader
from trainer.core.errors import PartitionError
from trainer.core.schema import HOMO_EDGE
from trainer.graph import seed_order
from trainer.graph.open import open_graph
from trainer.graph.seed_order import RankLayout
from trainer.loader.edge_endpoints import HeldEndpoints, StoredEndpoints
from trainer.loader.saint_draws import SaintEdgeDraw, SaintNodeDraw, uniform
from trainer.partition.verify import verify_partition
from trainer.sampler.requests import Endpoints

LINKS = {"num_neighbors": [3, 2], "batch_size": 20, "shuffle": True, "seed": 4, "neg_sampling": "binary"}


def links(graph, **more):
    return DistLinkNeighborLoader(graph, **(LINKS | more))


@pytest.mark.parametrize("keyed_from", [1, 1 << 20])
def test_batches_of_all_edges_are_the_same_everywhere(monkeypatch, keyed_from):
    monkeypatch.setattr(seed_order, "KEYED_FROM", keyed_from)
    batches = assert_same_everywhere(links, homo_data(), exclude="both", avoid_links=True)
    assert sorted(torch.cat([batch.input_id for batch in batches]).tolist()) == list(range(260))


def test_links_given_by_ids_are_those_of_all_edges():
    data = homo_data()
    for mine, other in zip(links(parts_of(data, 2)), links(data, edge_label_index=data.edge_index), strict=True):
        assert torch.equal(mine.input_id, other.input_id)
        assert torch.equal(mine.n_id[mine.edge_label_index], other.n_id[other.edge_label_index])


@pytest.mark.parametrize("num_parts", [1, 3, 7])
def test_ends_are_those_of_the_dataset(num_parts):
    data = hetero_data()
    graph = parts_of(data, num_parts)
    ends, edge_index = StoredEndpoints(graph, WRITES), data[WRITES].edge_index.numpy()
    assert len(ends) == edge_index.shape[1]
    edges = np.random.default_rng(0).integers(0, len(ends), 300)
    for found, expected in zip(ends.ends_of(edges), edge_index[:, edges], strict=True):
        assert found.dtype == np.int64
        np.testing.assert_array_equal(found, expected)
    assert [len(side) for side in ends.ends_of(edges[:0])] == [0, 0]
    with pytest.raises(PartitionError, match="outside 0..149"):
        graph.access.endpoints(WRITES, np.array([150]))
    with pytest.raises(PartitionError, match="no edge type"):
        graph.access.endpoints(("a", "b", "c"), edges)


def test_edges_of_data_in_memory_are_not_copied():
    data = homo_data()
    ends = links(data).inputs.ends
    assert isinstance(ends, StoredEndpoints)
    part = ends.graph.store.parts[0].edges[HOMO_EDGE]
    assert np.shares_memory(part.endpoints, data.edge_index.numpy())


def test_a_loader_of_all_edges_allocates_nothing_per_edge(monkeypatch):
    monkeypatch.setattr(seed_order, "KEYED_FROM", 1)
    num_edges = 400_000
    graph = opened(store_of(np.random.default_rng(0).integers(0, 500, (2, num_edges)), 500))
    links(graph).share(next(iter(links(graph).work_items(0, 0))))  # compiles
    tracemalloc.start()
    loader = links(graph)
    loader.share(next(iter(loader.work_items(0, 0))))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < num_edges / 2


def test_ranks_share_the_links_and_zip_reads_their_ends():
    data = homo_data()
    graph = parts_of(data, 2)
    layout = RankLayout(2, ((0,), (1,)))
    ranks = [links(graph, rank=rank, layout=layout) for rank in range(2)]
    ids = [[batch.input_id.tolist() for batch in loader] for loader in ranks]
    assert sorted(edge for of_rank in ids for batch in of_rank for edge in batch) == list(range(260))
    zipped = DistZipLoader([links(graph), links(graph, seed=9)], batch_size=20, shuffle=True, seed=4)
    for (one, other), alone in zip(zipped, links(graph), strict=True):
        assert torch.equal(one.input_id, alone.input_id) and torch.equal(one.input_id, other.input_id)
        assert torch.equal(one.n_id[one.edge_label_index[:, :20]], alone.n_id[alone.edge_label_index[:, :20]])


def test_ends_of_other_hosts_cost_one_request_per_step(monkeypatch):
    with over_the_wire(homo_data()) as graph:
        (client,) = graph.access.remotes.values()
        asked = []
        submit = client.submit

        def watched(request):
            if isinstance(request, Endpoints):
                asked.append(len(request.edges))
            return submit(request)

        monkeypatch.setattr(client, "submit", watched)
        loader = links(graph, neg_sampling=None)
        batches = list(loader)
        assert len(asked) == len(batches) == 13 and sum(asked) == 130  # the server holds two of four parts


def test_clients_read_the_ends_of_many_edges_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("trainer.service.remote_graph._AT_ONCE", 50)
    data = homo_data()
    with serving_parts(written(tmp_path / "parts", data)) as servers, client_graph(servers) as client:
        for found, expected in zip(client.access.endpoints(HOMO_EDGE, np.arange(260)), data.edge_index, strict=True):
            np.testing.assert_array_equal(found, expected)


def test_a_written_partition_has_endpoints(tmp_path):
    dataset = odd_types()
    for parts in (1, 3):
        folder = tmp_path / f"{parts}"
        write_parts(dataset, folder, parts)
        assert_sound(folder)
        with open_graph(folder) as graph:
            for of, edges in dataset.edges.items():
                found = graph.access.endpoints(of, np.arange(edges.num_edges))
                np.testing.assert_array_equal(np.stack(found), edges.edge_index)
    path = folder / "part1/edges/tag__has.not__v-1.0/endpoints.npy"
    ends = np.load(path)
    ends[2, 0] = 1 << 20
    np.save(path, ends)
    assert "position 2: 1048576 is outside 0 to" in str(verify_partition(folder, digests=False)[0])


@pytest.mark.parametrize("most_sums", [1, 3, 40, 1000])
def test_saint_draws_do_not_depend_on_the_number_of_running_sums(most_sums, monkeypatch):
    monkeypatch.setattr("trainer.loader.edge_endpoints.EDGES_AT_ONCE", 64)
    data = homo_data()
    src, dst = data.edge_index.numpy()
    draw = SaintEdgeDraw.of(HeldEndpoints(src, dst), 60, most_sums)
    assert len(draw.running) <= most_sums
    in_degree, out_degree = np.bincount(dst, minlength=60), np.bincount(src, minlength=60)
    running = np.cumsum(in_degree[src] + out_degree[dst])
    expected = np.searchsorted(running, uniform(5, 500, int(running[-1])), "right")
    np.testing.assert_array_equal(draw.edges(5, 500), expected)
    np.testing.assert_array_equal(draw(5, 500), np.unique(np.stack([src[expected], dst[expected]])))
    np.testing.assert_array_equal(SaintNodeDraw.of(HeldEndpoints(src, dst), 60).running, np.cumsum(out_degree))


def test_saint_batches_over_the_wire_with_few_running_sums(monkeypatch):
    data = homo_data()
    expected = [batch.n_id.tolist() for batch in DistGraphSAINTEdgeSampler(data, 12, 4, log=False)]
    of = SaintEdgeDraw.of.__func__
    monkeypatch.setattr(SaintEdgeDraw, "of", classmethod(lambda cls, ends, nodes: of(cls, ends, nodes, 20)))
    with over_the_wire(data) as graph:
        assert [batch.n_id.tolist() for batch in DistGraphSAINTEdgeSampler(graph, 12, 4, log=False)] == expected
        nodes = [[b.n_id.tolist() for b in DistGraphSAINTNodeSampler(of, 12, 4, log=False)] for of in (graph, data)]
        assert nodes[0] == nodes[1]


def test_a_graph_without_edges_has_no_links():
    empty = Data(edge_index=torch.empty(2, 0, dtype=torch.int64), num_nodes=3)
    assert list(DistLinkNeighborLoader(empty, [2])) == []
