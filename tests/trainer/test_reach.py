"""Tests that replicated topology, a row cache and held rows save requests and change no batch."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from cache_kit import ready
from fast_cases import fast_grid
from load_kit import CITES, COUNTS, hetero_data, homo_data, parts_of
from oracle import assert_identical, hosts_of, loader_of
from partitions import write_store
from service_kit import assert_same_sample, client_of, free_endpoint, serve_process, wait_for, write_cluster
from test_oracle import HOW, arguments_of
from trainer.core.errors import PartitionError
from trainer.core.remote_settings import RemoteAccess
from trainer.core.schema import HOMO_EDGE
from trainer.graph.open import Graph, open_graph
from trainer.sampler.dist_graph import DistGraph
from trainer.sampler.local_graph import LocalGraph
from trainer.sampler.requests import Gather
from trainer.sampler.types import HopRequest, RowRequest
from trainer.service.messages import Stats
from trainer.store.part_store import open_parts
from trainer.store.row_cache import CachedRows, RowCache

MAKE = {"homo": homo_data, "hetero": hetero_data}
PARTS = 3
WAYS = (
    ("partitioned", False, 2),
    ("partitioned", True, 2),
    ("replicated", False, 0),
    ("replicated", True, 0),
    ("replicated", True, 2),
)


class Host:
    def __init__(self, store):
        self.name, self.part_ids = f"host of {list(store.parts)}", tuple(store.parts)
        self.asked = []
        self._graph = LocalGraph(store)

    def submit(self, request):
        self.asked.append(request)
        return ready(request.answer(self._graph))

    @property
    def rows(self):
        return [one for request in self.asked if isinstance(request, Gather) for one in request.requests]

    def asked_ids(self, of, name):
        """Return all ids for which attribute ``name`` of node type ``of`` was requested."""
        found = [request.ids for request in self.rows if request.of == of and name in request.attrs]
        return np.concatenate([np.empty(0, np.int64), *found])


def host_store(data, own, topology="replicated", parts=PARTS):
    whole = parts_of(data, parts).store
    others = {p: light(part) for p, part in whole.parts.items() if p != own} if topology == "replicated" else {}
    return dataclasses.replace(whole, parts={own: whole.parts[own]}, replicas=others)


def light(part):
    def of(tables):
        return {
            key: dataclasses.replace(table, attrs={k: v for k, v in table.attrs.items() if v.ndim == 1})
            for key, table in tables.items()
        }

    return dataclasses.replace(part, nodes=of(part.nodes), edges=of(part.edges))


def some_rows(graph, share=0.3):
    """Return a row cache with random rows.

    share: fraction of the nodes of each type.
    """
    rng, types = np.random.default_rng(1), {}
    for of, spec in graph.manifest.nodes.items():
        ids = rng.permutation(spec.num_nodes)[: round(share * spec.num_nodes)]
        names = tuple(name for name, attr in spec.attrs.items() if len(attr.shape) > 1)
        if names:
            names = (*names, "orig_id") if of != "venue" else names
            types[of] = CachedRows.of(ids, graph.access.gather([RowRequest(of, ids, names)])[0], spec.num_nodes)
    return RowCache(types)


def host_of(data, topology, cache, held):
    """Return the graph of host 0, and a ``Host`` for each other part, by part. All are in this process."""
    others = {part: Host(host_store(data, part, "partitioned")) for part in range(1, PARTS)}
    store = host_store(data, 0, topology)
    graph = Graph(store, DistGraph(LocalGraph(store), others, held=held))
    if cache:
        graph.access.use_cache(some_rows(parts_of(data, PARTS)))
    return graph, others


@pytest.mark.parametrize(("kind", "how"), fast_grid(MAKE, HOW, share=2))
def test_topology_cache_and_held_rows_do_not_change_batches(kind, how) -> None:
    data = MAKE[kind]()
    load = "binary" if how in ("uniform", "induced") else "nodes"
    arguments = arguments_of(data, HOW[how])
    expected = list(loader_of(parts_of(data, 1), load, arguments))
    for topology, cache, held in WAYS:
        graph, others = host_of(data, topology, cache, held)
        assert_identical(list(loader_of(graph, load, arguments)), expected)
        edges_asked = any(request.of_topology for host in others.values() for request in host.asked)
        assert edges_asked == (topology == "partitioned")


@pytest.mark.parametrize("kind", MAKE)
def test_batches_are_equal_over_the_wire(kind) -> None:
    data = MAKE[kind]()

    def make(data, num_parts, only):
        return SimpleNamespace(store=host_store(data, only[0], parts=num_parts))

    arguments = arguments_of(data, HOW["weighted"])
    expected = list(loader_of(parts_of(data, 1), "nodes", arguments))
    with hosts_of(data, 2, make=make) as hosts:
        for graph in hosts:
            for cache in (None, some_rows(graph)):
                graph.access.use_cache(cache)
                before = [client.ask(Stats()) for client in graph.clients.values()]
                assert_identical(list(loader_of(graph, "nodes", {**arguments, "threads": 2})), expected)
                after = [client.ask(Stats()) for client in graph.clients.values()]
                asked = [
                    a.seconds.get("sample", 0) - b.seconds.get("sample", 0) for a, b in zip(after, before, strict=True)
                ]
                assert asked == [0.0]


@pytest.mark.parametrize("topology", ["partitioned", "replicated"])
def test_cached_and_held_rows_are_not_requested_again(topology) -> None:
    graph, others = host_of(homo_data(), topology, cache=True, held=2)
    rng, access = np.random.default_rng(0), graph.access
    cached = np.flatnonzero(some_rows(parts_of(homo_data(), PARTS)).types["node"].slots >= 0)
    own, wide = graph.store.books["node"].range_of(0), ("x", "image", "half", "orig_id")
    asked, needed = np.empty(0, np.int64), []
    for _ in range(2):  # as many batches as are held
        ids = np.sort(rng.permutation(60)[:30])
        access.take_cost()
        access.gather([RowRequest("node", ids, wide)])
        cost = access.take_cost()
        far = ids[(ids < own[0]) | (ids >= own[1])]
        here, held = np.isin(far, cached), np.isin(far, asked)
        assert (cost.rows, cost.remote_rows) == (30, len(far))
        assert (cost.cached_rows, cost.held_rows) == (here.sum(), (held & ~here).sum())
        for host, counts in cost.by_host.items():
            first, end = graph.store.books["node"].range_of(others[host].part_ids[0])
            theirs = (far >= first) & (far < end)
            assert counts[1:] == (theirs.sum(), (theirs & here).sum(), (theirs & held & ~here).sum())
        assert [sum(part) for part in zip(*cost.by_host.values(), strict=True)] == [
            cost.remote_bytes, cost.remote_rows, cost.cached_rows, cost.held_rows
        ]  # fmt: skip
        asked = np.union1d(asked, far[~here])
        needed.append(cost.remote_rows - cost.cached_rows - cost.held_rows)
    there = np.concatenate([host.asked_ids("node", "x") for host in others.values()])
    assert len(there) == len(asked) == sum(needed) and set(there) == set(asked)
    assert np.concatenate([host.asked_ids("node", "orig_id") for host in others.values()]).size == (
        0 if topology == "replicated" else len(there)
    )


def test_changing_a_batch_does_not_change_held_rows() -> None:
    graph, _ = host_of(homo_data(), "replicated", cache=True, held=2)
    request = [RowRequest("node", np.arange(60), ("x",))]
    first = graph.access.gather(request)[0]["x"]
    kept = first.copy()
    first[:] = -1
    assert np.array_equal(graph.access.gather(request)[0]["x"], kept)


def test_held_rows_are_released_after_some_batches() -> None:
    graph, others = host_of(homo_data(), "replicated", cache=False, held=2)
    pieces = np.split(np.arange(*graph.store.books["node"].range_of(1))[:12], 4)
    for ids in pieces:
        graph.access.gather([RowRequest("node", ids, ("x",))])
    for ids in (pieces[3], pieces[2], pieces[0]):
        graph.access.gather([RowRequest("node", ids, ("x",))])
    asked = [request.ids.tolist() for request in others[1].rows]
    assert asked == [ids.tolist() for ids in (*pieces, pieces[0])]


def test_many_small_answers_are_merged_and_found() -> None:
    graph, others = host_of(homo_data(), "replicated", cache=False, held=100)
    far = np.arange(*graph.store.books["node"].range_of(0)).max() + 1 + np.arange(30)
    whole = parts_of(homo_data(), PARTS).access.gather([RowRequest("node", far, ("x",))])[0]["x"]
    for _ in range(3):
        for at in range(30):
            (found,) = graph.access.gather([RowRequest("node", far[: at + 1], ("x",))])
            assert np.array_equal(found["x"], whole[: at + 1])
    assert sum(len(host.asked_ids("node", "x")) for host in others.values()) == 30


def test_small_columns_and_labels_are_local_with_replicated_topology() -> None:
    data = hetero_data()
    graph, others = host_of(data, "replicated", cache=False, held=2)
    papers = np.arange(COUNTS["paper"])
    request = [
        RowRequest("paper", papers, ("y", "time", "orig_id", "in_degree")),
        RowRequest(CITES, papers, ("edge_weight",)),
    ]
    whole = LocalGraph(parts_of(data, PARTS).store)
    for found, expected in zip(graph.access.gather(request), whole.gather(request), strict=True):
        assert all(np.array_equal(found[name], expected[name]) for name in expected)
    assert not any(host.rows for host in others.values())
    cost = graph.access.take_cost()
    assert (cost.rows, cost.remote_rows, cost.remote_bytes) == (140, 0, 0)


def test_a_cache_can_be_saved_and_loaded(tmp_path) -> None:
    graph = parts_of(hetero_data(), PARTS)
    cache, folder = some_rows(graph), tmp_path / "here" / "cache"
    for kept in (RowCache({}), cache):  # the second cache overwrites the first
        kept.save(folder)
    again = RowCache.open(folder)
    assert again.types.keys() == cache.types.keys() and again.num_rows == cache.num_rows > 0
    for of, kept in cache.types.items():
        assert np.array_equal(again.types[of].slots, kept.slots)
        assert all(np.array_equal(again.types[of].rows[name], rows) for name, rows in kept.rows.items())
    assert [path.name for path in folder.parent.iterdir()] == ["cache"]
    (folder / "cache.json").unlink()
    with pytest.raises(PartitionError, match="cannot be read: .*delete it"):
        RowCache.open(folder)


def test_opening_with_and_without_the_topology_of_other_parts(tmp_path) -> None:
    data = homo_data()
    write_store(tmp_path, parts_of(data, 2).store)
    for path in (tmp_path / "part1").rglob("*.npy"):
        if np.load(path, mmap_mode="r").ndim > 1:
            path.unlink()
    store = open_parts(tmp_path, [0], "replicated")
    assert list(store.parts) == [0] and list(store.topology) == [0, 1]
    assert "x" not in store.replicas[1].nodes["node"].attrs and "y" in store.replicas[1].nodes["node"].attrs
    with pytest.raises(PartitionError, match=r"parts \[1\] .* neither opened here nor served"):
        open_graph(tmp_path, [0], remote_access=RemoteAccess(topology="replicated"))
    (tmp_path / "part1" / "nodes" / "node" / "attrs" / "y.npy").unlink()
    with pytest.raises(PartitionError, match="(?s)y.npy is missing.*--topology partitioned"):
        open_parts(tmp_path, [0], "replicated")


def test_a_server_with_replicated_topology_samples_without_the_others(tmp_path) -> None:
    whole, parts = parts_of(homo_data(), 2), tmp_path / "parts"
    write_store(parts, whole.store)
    ends = free_endpoint(), free_endpoint()
    cluster = write_cluster(tmp_path / "cluster.json", (0, ends[0], [0]), (1, ends[1], [1]))
    hop = HopRequest(HOMO_EDGE, np.arange(60), fanout=4, shuffle=0, key=5, with_edge=True)
    with serve_process(tmp_path, parts, [0], ends[0], cluster, topology="replicated") as (process, ready):
        wait_for(ready, process)
        with client_of(ends[0], 60.0, parts=(0,), route=True) as client:
            assert_same_sample(client.sample_hops([hop])[0], whole.access.sample_hops([hop])[0])
            assert client.gather([RowRequest("node", np.arange(60), ("y",))])[0]["y"].shape == (60,)
