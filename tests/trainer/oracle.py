"""Compares the batches of one graph across partitions, hosts, graph servers and ranks."""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from dataclasses import fields, is_dataclass

import torch

from load_kit import parts_of
from service_kit import place_of
from trainer import DistLinkNeighborLoader, DistNeighborLoader
from trainer.graph.open import Graph
from trainer.graph.seed_order import RankLayout
from trainer.loader.pyg_batch import LazyBlocks
from trainer.sampler.dist_graph import DistGraph
from trainer.sampler.local_graph import LocalGraph
from trainer.service.client import HostClient
from trainer.service.messages import HelloInfo
from trainer.service.server import GraphServer


@contextlib.contextmanager
def hosts_of(data, num_parts, keys=None, make=parts_of):
    """Yield a list of graphs, one for each of ``num_parts`` hosts. Host k opens part k; graph servers serve the others.

    keys: keys of the encrypted service, or None. make: function that cuts ``data`` into parts.
    """
    with contextlib.ExitStack() as stack:
        stores = [make(data, num_parts, only=[part]).store for part in range(num_parts)]
        ends = [stack.enter_context(_served(store, part, keys)) for part, store in enumerate(stores)]
        graphs = []
        for own, store in enumerate(stores):
            clients = {
                part: stack.enter_context(
                    contextlib.closing(HostClient(place_of(end, part, "loop", (part,)), 60.0, keys))
                )
                for part, end in enumerate(ends)
                if part != own
            }
            graphs.append(Graph(store, DistGraph(LocalGraph(store), clients), clients))
        yield graphs


@contextlib.contextmanager
def _served(store, part, keys):
    info = HelloInfo(part, "loop", (part,), "d" * 64)
    server = GraphServer(LocalGraph(store), "tcp://127.0.0.1:0", info, 1, keys)
    server.start()
    try:
        yield server.endpoint
    finally:
        server.stop()


def loader_of(graph, load, arguments):
    """Return a loader of nodes, or of links with negatives.

    load: "nodes", or "binary" or "triplet" for links. For links, arguments about nodes are ignored, and vice versa.
    """
    only = {"nodes": ("input_nodes", "input_time"), "links": ("edge_label_index", "edge_label_time", "edge_label")}
    kind = "nodes" if load == "nodes" else "links"
    other = only["links" if kind == "nodes" else "nodes"]
    taken = {name: value for name, value in arguments.items() if name not in other}
    if kind == "nodes":
        return DistNeighborLoader(graph, **taken)
    if taken.get("time_attr") is None:
        taken.pop("edge_label_time", None)
    negatives = {"binary": {"mode": "binary", "amount": 1.5}, "triplet": {"mode": "triplet", "amount": 2}}[load]
    return DistLinkNeighborLoader(graph, neg_sampling=negatives, **taken)


def assert_identical(ours, theirs, ignore=()):
    """Assert that two batches, or lists of batches, have bit-identical attributes and blocks."""
    mine, others = dict(_leaves(ours)), dict(_leaves(theirs))
    drop = {path for path in mine.keys() ^ others.keys() if path[-1] in ignore}
    assert [path for path in mine if path not in drop] == [path for path in others if path not in drop]
    for path, value in others.items():
        if path not in drop:
            assert mine[path] == value, path


def _leaves(value, path=()):
    """Yield (path, plain value) for every leaf of a batch. A tensor becomes its dtype, shape and bytes."""
    if isinstance(value, torch.Tensor):
        yield path, (value.dtype, tuple(value.shape), value.numpy().tobytes())
    elif hasattr(value, "stores"):
        for store in value.stores:
            for name in store.keys():  # noqa: SIM118 (a store iterates over its values)
                yield from _leaves(store[name], (*path, store._key, name))
    elif is_dataclass(value):
        for field in fields(value):
            if field.name != "cost":  # traffic and times differ between runs
                yield from _leaves(getattr(value, field.name), (*path, field.name))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    elif isinstance(value, (list, tuple, LazyBlocks)):
        yield (*path, "length"), len(value)
        for place, item in enumerate(value):
            yield from _leaves(item, (*path, place))
    else:
        yield path, value


# What a seed gets, on any rank ----------------------------------------------------------------------------------------


def layout_of(world_size, num_parts):
    ranks = [[] for _ in range(num_parts)]
    for rank in range(world_size):
        ranks[rank % num_parts].append(rank)
    return RankLayout(world_size, tuple(map(tuple, ranks)))


def facts(batches, load, target=None, link=None):
    """Return the content of a global batch in a form that does not depend on how ranks share the batch.

    batches: the batches of all ranks. target: node type of the seeds. link: edge type of the links.
    """
    # node seeds and trees are identified by input id; seed nodes of joint link batches by their own id, counted once
    found = Counter(fact for batch in batches for fact in _facts(batch, load, target, link))
    return {fact: 1 if fact[0] == "node" else count for fact, count in found.items()}


def _facts(batch, load, target, link):
    hetero = target is not None or link is not None
    nodes = {of: batch[of] for of in batch.node_types} if hetero else {"": batch}
    disjoint = all(store.get("batch") is not None for store in nodes.values())
    input_id = (batch[link or target] if hetero else batch).input_id.tolist()
    labels = trees(batch)
    for of, store in nodes.items():
        ids = store.n_id.tolist()
        owner = [input_id[tree] for tree in store.batch.tolist()] if disjoint else [None] * len(ids)
        for row in range(store.num_sampled_nodes[0]):
            if load == "nodes" or disjoint:
                yield "tree", of, owner[row] if disjoint else input_id[row], ids[row], labels[of][row]
            else:
                yield "node", of, ids[row], labels[of][row]
        if disjoint:
            yield from (("in", of, tree, node) for tree, node in zip(owner, ids, strict=True))
    if disjoint:
        yield from _edges(batch, nodes, input_id, hetero)
    if load != "nodes":
        yield from _links(batch, nodes, link)


def _edges(batch, nodes, input_id, hetero):
    for of in batch.edge_types if hetero else [("", "", "")]:
        store, ends = (batch[of] if hetero else batch), (nodes[of[0]], nodes[of[2]])
        trees = ends[1].batch[store.edge_index[1]].tolist()
        assert trees == ends[0].batch[store.edge_index[0]].tolist(), "no edge leaves its tree"
        pairs = zip(*(end.n_id[row].tolist() for end, row in zip(ends, store.edge_index, strict=True)), strict=True)
        for tree, edge, pair in zip(trees, store.e_id.tolist(), pairs, strict=True):
            yield "edge", of, input_id[tree], edge, *pair


def _links(batch, nodes, link):
    src, dst, store = (nodes[link[0]], nodes[link[2]], batch[link]) if link else (batch, batch, batch)
    if "dst_neg_index" in dst:
        columns = store.input_id, src.n_id[src.src_index], dst.n_id[dst.dst_pos_index], dst.n_id[dst.dst_neg_index]
    else:
        columns = (*(end.n_id[row] for end, row in zip((src, dst), store.edge_label_index, strict=True)),
                   store.edge_label)  # fmt: skip
    for row in zip(*(column.tolist() for column in columns), strict=True):
        yield "link", *(tuple(item) if isinstance(item, list) else item for item in row)


def trees(batch):
    """Return a digest of the computation tree of each node in ``batch.blocks``, as one list per node type."""
    layers = batch.blocks
    hetero = isinstance(layers[0], dict)
    if not hetero:
        ids = {"": batch.n_id}
    else:  # HeteroData, or the bundled trainer's HeteroBatch
        ids = {of: batch[of].n_id for of in batch.node_types} if hasattr(batch, "node_types") else batch.n_id
    labels = {of: [str(node) for node in nodes.tolist()] for of, nodes in ids.items()}
    for layer in layers:
        below = {of: [[label] for label in known] for of, known in labels.items()}
        for of, block in layer.items() if hetero else [(("", "", ""), layer)]:
            bounds, indices = block.indptr.tolist(), block.indices.tolist()
            for row, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
                below[of[2]][row].append((of, sorted(labels[of[0]][at] for at in indices[begin:end])))
        labels = {of: [hashlib.sha256(repr(item).encode()).hexdigest() for item in rows] for of, rows in below.items()}
    return labels
