"""Tests of graphs with several types: equal answers from one process and from several hosts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from partitions import typed_store, write_store
from requests_kit import PLAIN, WRITES, hops_of_every_kind
from service_kit import (
    assert_same_sample,
    client_of,
    free_endpoint,
    rows_of,
    serve_process,
    serving,
    wait_for,
    write_cluster,
)
from trainer.core.errors import PartitionError, ServiceError
from trainer.sampler.dist_graph import DistGraph
from trainer.sampler.local_graph import LocalGraph
from trainer.sampler.types import HopSample, RowRequest, TimeBound
from trainer.service.cluster import connect_cluster
from trainer.service.messages import Stats
from trainer.store.manifest import manifest_digest
from trainer.store.part_store import open_parts

CITES = ("paper", "cites", "paper")
NONE_YET = ("paper", "praises", "author")
COUNTS = {"author": 60, "paper": 150}
OWNERS = [[0], [1, 2], [3]]  #: parts of each host; part 2 owns no paper, part 3 no author


def papers_parts(only=None):
    rng = np.random.default_rng(5)
    n, edges = COUNTS, {"writes": 900, "cites": 1200}
    pairs = {
        WRITES: np.stack([rng.integers(0, n["author"], edges["writes"]), rng.integers(0, n["paper"], edges["writes"])]),
        CITES: rng.integers(0, n["paper"], (2, edges["cites"])),
        NONE_YET: np.empty((2, 0), np.int64),
    }
    rows = np.arange(n["paper"])
    node_attrs = {
        "author": {"time": rng.integers(0, 40, n["author"])},
        "paper": {
            "flag": rows % 2 == 0, "bf16": rows.astype(np.uint16), "y": rows % 7, "half": rows.astype(np.float16),
            "wave": (rows + 1j).astype(np.complex64), "wide": np.outer(rows, [1j, 2]).astype(np.complex128),
            "deep": rng.random((n["paper"], 2, 1, 3, 2)), "cube": np.ones((n["paper"], 2, 3), np.int8),
            "nothing": np.empty((n["paper"], 0), np.float32), "nil": np.empty((n["paper"], 3, 0, 2), np.int32),
        },
    }  # fmt: skip
    edge_attrs = {
        WRITES: {
            "weight": rng.integers(0, 3, edges["writes"]).astype(np.float32),
            "time": rng.integers(0, 40, edges["writes"]),
            "e": rng.random((edges["writes"], 3)).astype(np.float32),
        },
        CITES: {"flag": rng.random(edges["cites"]) < 0.5},
    }
    owners = {"author": rng.integers(0, 3, n["author"]), "paper": np.array([0, 1, 3])[rng.integers(0, 3, n["paper"])]}
    return typed_store(n, pairs, 4, node_attrs=node_attrs, edge_attrs=edge_attrs, assignment=owners, only=only)


@pytest.fixture(scope="module")
def whole() -> LocalGraph:
    return LocalGraph(papers_parts())


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    """Yield a graph on three hosts: this process has the parts ``OWNERS[0]``, two server processes have the others."""
    folder = tmp_path_factory.mktemp("typed")
    parts = folder / "parts"
    write_store(parts, papers_parts())
    endpoints = [free_endpoint() for _ in OWNERS[1:]]
    cluster = write_cluster(
        folder / "cluster.json", (0, None, OWNERS[0]), (1, endpoints[0], OWNERS[1]), (2, endpoints[1], OWNERS[2])
    )
    with (
        serve_process(folder, parts, OWNERS[1], endpoints[0], cluster) as (one, ready_one),
        serve_process(folder, parts, OWNERS[2], endpoints[1], cluster) as (two, ready_two),
    ):
        wait_for(ready_one, one), wait_for(ready_two, two)
        clients = connect_cluster(cluster, 0, manifest_digest(parts), 60)
        yield DistGraph(LocalGraph(open_parts(parts, OWNERS[0])), clients)
        for client in clients.values():
            client.close()


def requests_so_far(graph: DistGraph) -> dict[int, int]:
    return {rank: client.ask(Stats()).requests for rank, client in graph.remotes.items()}


def test_hops_under_all_conditions_are_equal_everywhere_in_one_message(whole, hosts) -> None:
    nodes = np.random.default_rng(1).integers(0, COUNTS["paper"], 80)
    asked = hops_of_every_kind(nodes, WRITES, COUNTS["author"])
    asked += [replace(PLAIN, edge_type=CITES, nodes=nodes, fanout=4, key=9)]
    before = requests_so_far(hosts)
    hosts.take_cost()
    there = hosts.sample_hops(asked)
    assert requests_so_far(hosts) == {
        rank: count + 2 for rank, count in before.items()
    }  # the request and one stats request each
    assert hosts.take_cost().remote_bytes > 0 == hosts.take_cost().remote_bytes
    differing = set()
    for mine, theirs in zip(whole.sample_hops(asked), there, strict=True):
        assert_same_sample(theirs, mine)
        differing.add(mine.src.tobytes())
    assert len(differing) > 100  # the conditions changed the result


def test_rows_of_every_dtype_and_rank_in_one_message(whole, hosts) -> None:
    rng = np.random.default_rng(2)
    papers, edges = rng.integers(0, COUNTS["paper"], 200), rng.integers(0, 900, 100)
    names = tuple(whole.store.manifest.nodes["paper"].attrs)
    asked = [
        RowRequest("paper", papers, (*names, "orig_id", "in_degree")),
        RowRequest(WRITES, edges, ("e", "weight", "orig_id")),
        RowRequest("author", papers % 60, ("time", "in_degree")),
        RowRequest(CITES, edges[:0], ("flag",)),
    ]
    before = requests_so_far(hosts)
    there = hosts.gather(asked)
    assert requests_so_far(hosts) == {rank: count + 2 for rank, count in before.items()}
    for request, mine, theirs in zip(asked, whole.gather(asked), there, strict=True):
        assert list(theirs) == list(mine) == list(request.attrs)
        for name in request.attrs:
            assert theirs[name].dtype == mine[name].dtype and theirs[name].shape == mine[name].shape
            assert theirs[name].flags.writeable
            np.testing.assert_array_equal(theirs[name], mine[name])


def test_a_host_that_owns_no_rows_of_a_call_gets_no_message(whole, hosts) -> None:
    book = whole.books["author"]
    authors = np.arange(book.range_of(2)[0], book.range_of(2)[1])
    before = requests_so_far(hosts)
    praised = hosts.sample_hops([replace(PLAIN, edge_type=NONE_YET, nodes=authors)])[0]
    assert praised.counts.tolist() == [0] * len(authors)
    np.testing.assert_array_equal(rows_of(hosts, authors, ["time"], "author")["time"],
                                  rows_of(whole, authors, ["time"], "author")["time"])  # fmt: skip
    after = requests_so_far(hosts)
    assert (after[1] - before[1], after[2] - before[2]) == (3, 1)


def test_calls_without_rows_send_no_message(hosts) -> None:
    before = requests_so_far(hosts)
    empty = np.empty(0, np.int64)
    sample = hosts.sample_hops([replace(PLAIN, edge_type=WRITES, nodes=empty, with_edge=True)])[0]
    assert len(sample.counts) == len(sample.src) == 0 and sample.edge is not None
    assert rows_of(hosts, empty, ["deep"], "paper")["deep"].shape == (0, 2, 1, 3, 2)
    assert len(hosts.has_edges(WRITES, empty, empty)) == 0
    assert hosts.sample_hops([]) == hosts.gather([]) == []
    assert requests_so_far(hosts) == {rank: count + 1 for rank, count in before.items()}


def test_edges_are_found_on_any_host(whole, hosts) -> None:
    rng = np.random.default_rng(3)
    src, dst = rng.integers(0, COUNTS["author"], 3000), rng.integers(0, COUNTS["paper"], 3000)
    there = hosts.has_edges(WRITES, src, dst)
    assert 100 < there.sum() < 2000
    np.testing.assert_array_equal(there, whole.has_edges(WRITES, src, dst))


def test_unknown_names_and_ids_are_named(hosts) -> None:
    papers = np.arange(COUNTS["paper"])
    plain = replace(PLAIN, edge_type=WRITES, nodes=papers)
    for ask, words in [
        (lambda: hosts.sample_hops([replace(plain, edge_type=("a", "b", "c"))]), r"no edge type \('a', 'b'"),
        (lambda: hosts.sample_hops([replace(plain, weight="price")]), "no attribute 'price'"),
        (lambda: hosts.sample_hops([replace(plain, nodes=papers + 1)]), "no 'paper' with id 150; ids go from 0 to 149"),
        (lambda: rows_of(hosts, papers, ["z"], "paper"), "no attribute 'z' of 'paper'"),
        (lambda: rows_of(hosts, papers, [], "venue"), "no node type 'venue'"),
        (lambda: rows_of(hosts, -papers, ["y"], "paper"), "no 'paper' with id -1; ids"),
        (lambda: hosts.has_edges(("a", "b", "c"), papers, papers), "no edge type"),
    ]:  # fmt: skip
        with pytest.raises(PartitionError, match=words):
            ask()


def test_a_server_names_the_ids_and_attributes_it_lacks(whole, hosts) -> None:
    client, mine = hosts.remotes[1], np.arange(*whole.books["paper"].range_of(1))
    plain = replace(PLAIN, edge_type=WRITES, nodes=mine)
    who = r"graph server of node1 \(host1\) at tcp://.*, parts 1,2: "
    for ask, words in [
        (lambda: client.sample_hops([replace(plain, edge_type=("a", "b", "c"))]), "sample failed: no edge type"),
        (lambda: client.sample_hops([replace(plain, weight="price")]), "sample failed: no attribute 'price'"),
        (lambda: client.sample_hops([replace(plain, bound=TimeBound(mine, "year", "node"))]), "time attribute 'year'"),
        (lambda: client.sample_hops([plain] * 3000), "the request cannot be sent|3000 requests would have more"),
        (lambda: rows_of(client, mine, ["z"], "paper"), "gather failed: no attribute 'z'"),
        (lambda: rows_of(client, mine, ["x\ny"], "paper"), "gather failed: no attribute"),
        (lambda: client.has_edges(WRITES, mine[:2], mine), "has_edges failed: the request has 2 sources"),
    ]:  # fmt: skip
        with pytest.raises(ServiceError, match=who + f".*({words})"):
            ask()
    assert client.greet().result().node_rank == 1


class MismatchedHost:
    """A fake graph for a graph server. It answers every request with ``rows`` or ``samples``, which are wrong."""

    store = None

    def __init__(self, rows=None, samples=None):
        self._rows, self._samples = rows, samples

    def gather(self, requests):
        return [dict.fromkeys(request.attrs, self._rows) for request in requests]

    def sample_hops(self, requests):
        return self._samples


@pytest.mark.parametrize("rows", [np.zeros(1, np.int32), np.zeros((1, 2), np.int64), np.zeros(2, np.int64)])
def test_rows_of_another_kind_are_refused(whole, rows) -> None:
    one = whole.books["paper"].range_of(3)[0]
    with serving(MismatchedHost(rows)) as server, client_of(server.endpoint, parts=(3,)) as client:
        graph = DistGraph(LocalGraph(papers_parts(only=[0, 1, 2])), {1: client})
        with pytest.raises(
            ServiceError,
            match="graph server of node1 .*(manifest has int64|invalid reply to gather: attribute y has shape)",
        ):
            rows_of(graph, np.array([0, one]), ["y"], "paper")


def test_samples_of_another_length_are_refused() -> None:
    wrong = [HopSample(np.zeros(7, np.int32), np.empty(0, np.int64), None)]
    with serving(MismatchedHost(samples=wrong)) as server, client_of(server.endpoint) as client:
        with pytest.raises(ServiceError, match="invalid reply to sample: the reply has counts of .* for 4 nodes"):
            client.sample_hops([PLAIN])
