"""Test kit: writes partition folders of small graphs with the real writer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from graphs import graph, hetero
from partitions import typed_store
from trainer.core.schema import HOMO_NODE
from trainer.partition.make import PartitionSpec
from trainer.partition.methods.assign import PartitionAssignment, assign_parts
from trainer.partition.verify import verify_partition
from trainer.partition.write import write_partition
from trainer.store.manifest import read_manifest
from trainer.store.part_store import open_parts

OPTIONS = {"num_nodes": 500, "avg_degree": 6, "num_features": 4, "num_classes": 3}
NODE, EDGE = "nodes/node", "edges/node__to__node"


def spec(folder, **changes):
    return PartitionSpec("synthetic", str(folder), options=OPTIONS, **{"num_parts": 2, "method": "random", **changes})


def written(dataset, folder, num_parts=2, method="random", seed=0):
    write_partition(dataset, assign_parts(dataset, num_parts, method, seed), folder)
    return folder


def by_hand(dataset, parts, num_parts, **options):
    """Return a ``PartitionAssignment`` with the given parts, and with placeholders for the quality measures.

    parts: for each node type, the part of each node; for a homogeneous graph, only the list of parts.
    """
    given = parts if isinstance(parts, dict) else {HOMO_NODE: parts}
    arrays = {of: np.asarray(part, np.int32) for of, part in given.items()}
    return PartitionAssignment("random", 0, num_parts, arrays, dict.fromkeys(dataset.edges, 0.0), 0.0, 1.0, options)


def odd_types():
    rng = np.random.default_rng(3)
    pre, has, none = ("v-1.0", "pre-depends", "v-1.0"), ("tag", "has.not", "v-1.0"), ("v-1.0", "none", "lonely")
    edges = {
        pre: np.concatenate([rng.integers(0, 30, (80, 2)), [[4, 4], [4, 4], [7, 4], [7, 4]]]),
        has: np.stack([rng.integers(0, 5, 60), rng.integers(0, 40, 60)], 1),
        none: [],
    }
    attrs = {
        pre: {"weight": rng.random(84, np.float32), "flag": rng.integers(-3, 3, 84).astype(np.int8)},
        has: {"vector": rng.random((60, 2, 3)), "time": rng.integers(0, 9, 60)},
    }
    dataset = hetero({"v-1.0": 40, "tag": 5, "lonely": 6}, edges, attrs, name="odd-types")
    nodes = dataset.nodes["v-1.0"]
    times = {"time": rng.integers(0, 9, 40).astype(np.int32), "half": rng.integers(0, 2**16, (40, 3)).astype(np.uint16)}
    return with_nodes(dataset, "v-1.0", attrs={**nodes.attrs, **times}, bfloat16=frozenset({"half"}))


def with_nodes(dataset, node_type, **changes):
    return replace(dataset, nodes={**dataset.nodes, node_type: replace(dataset.nodes[node_type], **changes)})


def expected_store(dataset, assignment):
    """Return the store that ``open_parts`` should return, computed with numpy."""
    return typed_store(
        {of: data.num_nodes for of, data in dataset.nodes.items()},
        {of: data.edge_index for of, data in dataset.edges.items()},
        assignment.num_parts,
        node_attrs={of: data.attrs for of, data in dataset.nodes.items()},
        edge_attrs={of: data.attrs for of, data in dataset.edges.items()},
        splits={(of, split): ids for of, data in dataset.nodes.items() for split, ids in data.splits.items()},
        assignment=assignment.parts,
        time_attrs=dataset.time_attrs,
        hetero=dataset.hetero,
    )


def assert_whole(folder, dataset, assignment):
    """Assert that the folder holds exactly the dataset, in the order that the format defines."""
    found, expected = open_parts(folder), expected_store(dataset, assignment)
    _assert_equal(found.global_ids, expected.global_ids)
    _assert_equal(found.splits, expected.splits)
    _assert_equal(found.graph_attrs, dataset.graph_attrs)
    assert list(found.parts) == list(range(assignment.num_parts))
    for part_id, part in found.parts.items():
        for of, nodes in part.nodes.items():
            other = expected.parts[part_id].nodes[of]
            assert nodes.start == other.start
            _assert_equal({"orig_id": nodes.orig_id, **nodes.attrs}, {"orig_id": other.orig_id, **other.attrs})
        for of, edges in part.edges.items():
            other = expected.parts[part_id].edges[of]
            assert edges.start == other.start
            for name in ("indptr", "indices", "orig_id", "endpoints"):
                assert np.array_equal(getattr(edges, name), getattr(other, name)), (part_id, of, name)
            _assert_equal(edges.attrs, other.attrs)
            _assert_equal(edges.src_times, other.src_times)


def _assert_equal(found, expected):
    assert set(found) == set(expected)
    for name, values in expected.items():
        assert found[name].shape == values.shape and np.array_equal(found[name], values), name
        if name != "orig_id" and values.dtype.kind not in "i":
            assert found[name].dtype == values.dtype


def assert_sound(folder):
    """Check what only a bug of the writer could break, and what ``partition verify`` checks."""
    assert verify_partition(folder) == []
    store, manifest = open_parts(folder), read_manifest(folder)
    for of, nodes in manifest.nodes.items():
        orig_id = [part.nodes[of].orig_id for part in store.parts.values()]
        assert all((np.diff(ids) > 0).all() for ids in orig_id)
        global_id = store.to_global(of, np.arange(nodes.num_nodes))
        np.testing.assert_array_equal(global_id[np.concatenate(orig_id)], np.arange(nodes.num_nodes))
    for of, edges in manifest.edges.items():
        src, dst, ids = [], [], []
        for part_id, part in store.parts.items():
            each = part.edges[of]
            targets = np.repeat(np.arange(len(each.indptr) - 1), np.diff(each.indptr))
            np.testing.assert_array_equal(np.lexsort((each.orig_id, targets)), np.arange(len(targets)))
            dst.append(targets + manifest.nodes[of[2]].offsets[part_id])
            src.append(each.indices)
            ids.append(each.orig_id)
            for name, times in each.src_times.items():
                values = np.concatenate([store.parts[k].nodes[of[0]].attrs[name] for k in store.parts])
                np.testing.assert_array_equal(times, values[each.indices])
        order = np.concatenate(ids)
        np.testing.assert_array_equal(np.sort(order), np.arange(edges.num_edges))
        ends = np.concatenate([part.edges[of].endpoints for part in store.parts.values()])
        for side, found in ((0, src), (2, dst)):
            expected = store.to_global(of[side], ends[:, side // 2])
            np.testing.assert_array_equal(np.concatenate(found), expected[order])


def flip_byte(path, position=-3):
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def hubs(num_edges=900):
    """Return a graph of 100 nodes in which all edges point to seven nodes."""
    return graph([(v % 100, v % 7) for v in range(num_edges)], 100)
