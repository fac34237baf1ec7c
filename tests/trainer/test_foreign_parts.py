"""Tests of ``partition convert``, which keeps the part of every node."""

from __future__ import annotations

import json
import pickle
import re
import shutil
import tarfile
from contextlib import suppress

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from foreign_kit import BACK, SAMPLES, assert_same_graph, dataset_of, hetero, homo, partition_by_pyg
from partition_kit import assert_sound
from train_kit import curve, job
from trainer.core.errors import DataError, PartitionError, TrainerError
from trainer.core.ranks import Ranks
from trainer.core.schema import HOMO_EDGE, HOMO_NODE
from trainer.partition.cli import partition
from trainer.partition.make import PartitionSpec, convert_partition, make_partition
from trainer.partition.restore import restore_graph
from trainer.partition.source import open_source
from trainer.sources.load import load_dataset
from trainer.train.job import train


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    folder = tmp_path_factory.mktemp("samples")
    with tarfile.open(SAMPLES / "foreign_parts.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder


def converted(source, out, options=None):
    """Convert and verify a partition. Return its graph and the progress lines."""
    lines = []
    convert_partition(source, out, options, say=lines.append)
    assert_sound(out)
    return restore_graph(out), lines


def timed():
    data = homo()
    data.time = torch.arange(data.num_nodes) * 5 % 11
    return data


@pytest.mark.parametrize("made", [homo, timed, hetero], ids=["homogeneous", "with times", "heterogeneous"])
def test_partitions_of_torch_geometric(made, tmp_path, monkeypatch):
    data = made()
    source = partition_by_pyg(data, 3, tmp_path / "theirs", monkeypatch)
    found, lines = converted(source, tmp_path / "parts")
    assert "torch_geometric.distributed, 3 parts" in lines[0]
    assert_same_graph(found.dataset, dataset_of(data), without=("y", "edge_weight"))  # which they do not contain
    for of, part in found.parts.items():
        book = source / ("node_map.pt" if of == HOMO_NODE else f"node_map/{of}.pt")
        np.testing.assert_array_equal(part, torch.load(book))


@pytest.mark.parametrize("name", ["glt_homo", "glt_cached", "glt_hetero", "pyg24_hetero"])
def test_partitions_that_other_versions_made(name, samples, tmp_path):
    found, _ = converted(samples / name, tmp_path / "parts")
    of_graph = dataset_of(homo() if "hetero" not in name else hetero())
    without = ("y",) if name == "glt_homo" else ("y", "edge_weight")
    assert_same_graph(found.dataset, of_graph, without=without)
    for of, part in found.parts.items():
        books = {"node_pb.pt", f"node_pb/{of}.pt", f"node_map/{of}.pt"}
        (book,) = (samples / name / path for path in books if (samples / name / path).exists())
        np.testing.assert_array_equal(part, torch.load(book))


@pytest.mark.parametrize("name", ["dgl_homo", "dgl_csc", "dgl_hetero"])
def test_partitions_of_dgl(name, samples, tmp_path):
    # DGL renumbers nodes and edges; attribute `orig` has the ids of the input graph.
    found, lines = converted(samples / name, tmp_path / "parts")
    assert any("original ids are DGL's" in line for line in lines)
    expected = dataset_of(hetero() if name == "dgl_hetero" else homo())
    ranges = json.loads((samples / name / "demo.json").read_text())["node_map"]
    for of, nodes in expected.nodes.items():
        orig = found.dataset.nodes[of].attrs["orig"]
        for attr in set(nodes.attrs):
            np.testing.assert_array_equal(found.dataset.nodes[of].attrs[attr], nodes.attrs[attr][orig])
        for split, ids in nodes.splits.items():
            assert set(orig[found.dataset.nodes[of].splits[split]]) == set(ids)
        sizes = np.diff(ranges["_N" if of == HOMO_NODE else of]).reshape(-1)
        np.testing.assert_array_equal(np.bincount(found.parts[of], minlength=2), sizes)
    for of, edges in expected.edges.items():
        data = found.dataset.edges[of]
        ends = [found.dataset.nodes[of[k]].attrs["orig"][row] for k, row in zip((0, 2), data.edge_index, strict=True)]
        np.testing.assert_array_equal(ends, edges.edge_index[:, data.attrs["orig"]])
        if of == HOMO_EDGE:
            np.testing.assert_array_equal(data.attrs["edge_attr"], edges.attrs["edge_attr"][data.attrs["orig"]])


@pytest.mark.parametrize("name", ["dglids_homo", "dglids_hetero"])
def test_ids_of_the_input_graph_that_dgl_stored_are_used(name, samples, tmp_path):
    found, lines = converted(samples / name, tmp_path / "parts")
    assert not any("original ids are DGL's" in line for line in lines)
    without = ("orig", "edge_attr", "edge_weight")
    assert_same_graph(found.dataset, dataset_of(hetero() if "hetero" in name else homo()), without=without)
    for of, nodes in found.dataset.nodes.items():
        np.testing.assert_array_equal(nodes.attrs["orig"], np.arange(nodes.num_nodes))
        parts = [np.load(path) for path in sorted((tmp_path / "parts").glob(f"part*/nodes/{of}/orig_id.npy"))]
        assert [len(ids) for ids in parts] == list(np.bincount(found.parts[of], minlength=2))


def chunked(folder, data, form):
    """Write ``data`` in DGL's chunked graph format, with features in two files.

    form: file format of the features.
    """
    duckdb = pytest.importorskip("duckdb") if form == "parquet" else None
    meta = {"graph_name": "demo", "node_type": data.node_types, "edges": {}, "node_data": {}, "edge_data": {}}
    meta["num_nodes_per_type"] = [data[of].num_nodes for of in data.node_types]
    meta["edge_type"] = [":".join(of) for of in data.edge_types]
    for of in data.edge_types:
        np.savetxt(folder / f"{of[1]}.txt", data[of].edge_index.T.numpy(), "%d")
        entry = {"format": {"name": "csv", "delimiter": " "}, "data": [f"{of[1]}.txt"]}
        meta["edges"][":".join(of)] = entry
    for of in data.node_types:
        files = []
        for k, rows in enumerate(np.array_split(data[of].x.numpy().astype(np.float64), 2)):
            path = folder / f"{of}-{k}.{form}"
            if form == "csv":
                np.savetxt(path, rows, delimiter=",")
            elif form == "numpy":
                np.save(path.open("wb"), rows)
            else:
                frame = {f"column{i}": rows[:, i].copy() for i in range(rows.shape[1])}  # noqa: F841  read by DuckDB
                duckdb.sql(f"COPY (SELECT * FROM frame) TO '{path}'")
            files.append(path.name)
        meta["node_data"][of] = {"feat": {"format": {"name": form}, "data": files}}
    (folder / "metadata.json").write_text(json.dumps(meta))


@pytest.mark.parametrize("form", ["csv", "numpy", "parquet"])
def test_chunked_graphs_of_dgl(form, tmp_path):
    data, source = hetero(), tmp_path / "chunked"
    source.mkdir()
    chunked(source, data, form)
    with pytest.raises(PartitionError, match="not assigned to parts yet; .* repartition"):
        convert_partition(source, tmp_path / "parts")
    part_of = {of: np.arange(data[of].num_nodes) % 2 for of in data.node_types}
    (source / "two").mkdir()
    (source / "two/partition_meta.json").write_text('{"version": "1.0.0", "num_parts": 2, "algo_name": "random"}')
    for of, part in part_of.items():
        np.savetxt(source / f"two/{of}.txt", part, "%d")
    found, _ = converted(source, tmp_path / "parts")
    for of, part in part_of.items():
        np.testing.assert_array_equal(found.parts[of], part)
        np.testing.assert_array_equal(found.dataset.nodes[of].attrs["x"], data[of].x.numpy())
    np.testing.assert_array_equal(found.dataset.edges[BACK].edge_index, data[BACK].edge_index.numpy())


def test_labels_and_splits_beside_the_partition_are_read(tmp_path, monkeypatch):
    # As the examples of torch_geometric and GLT save them; --nodes gives what they do not.
    data, root = homo(), tmp_path / "root"
    partition_by_pyg(data, 2, root / "demo-partitions", monkeypatch)
    for name in ("demo-label", "demo-train-partitions", "demo-test-partitions"):
        (root / name).mkdir()
    torch.save(data.y, root / "demo-label/label.pt")
    for k, ids in enumerate(torch.arange(20).split(10)):
        torch.save(ids, root / f"demo-train-partitions/partition{k}.pt")
        torch.save(ids + 1, root / f"demo-test-partitions/partition{k}.pt")
    np.save(tmp_path / "val.npy", np.array([23, 22]))
    nodes = {"val_idx": str(tmp_path / "val.npy"), "test_idx": str(root / "demo-train-partitions")}
    found, lines = converted(root, tmp_path / "parts", {"nodes": nodes, "num_classes": 6})
    assert found.dataset.name == "demo"
    own = found.dataset.nodes[HOMO_NODE]
    np.testing.assert_array_equal(own.attrs["y"], data.y)
    assert own.num_classes == 6
    assert {name: list(ids) for name, ids in own.splits.items()} == {
        "train": [*range(20)], "val": [23, 22], "test": [*range(20)],
    }  # fmt: skip
    assert any(f"y is read from {root}/demo-label/label.pt" in line for line in lines)


def test_arrays_of_a_type_are_given_by_its_name(tmp_path, monkeypatch):
    source = partition_by_pyg(hetero(), 2, tmp_path / "theirs", monkeypatch)
    np.save(tmp_path / "y.npy", np.arange(15) % 3)
    np.save(tmp_path / "mask.npy", np.arange(8) < 4)
    nodes = {"y": str(tmp_path / "y.npy"), "author__train_mask": str(tmp_path / "mask.npy")}
    found, _ = converted(source, tmp_path / "parts", {"nodes": nodes})  # only papers are 15
    assert list(found.dataset.nodes["paper"].attrs["y"]) == [0, 1, 2] * 5
    assert list(found.dataset.nodes["author"].splits["train"]) == [0, 1, 2, 3]


def test_training_on_a_converted_partition_equals_training_on_the_own_one(tmp_path, monkeypatch):
    # Original ids stay, so that the same neighbours are sampled whatever the parts are.
    options = {"num_nodes": 600, "num_classes": 4, "num_features": 12}
    dataset = load_dataset("synthetic", options=options)
    make_partition(
        PartitionSpec("synthetic", str(tmp_path / "own"), options=options, num_parts=2), say=lambda line: None
    )
    nodes, edges = dataset.nodes[HOMO_NODE], dataset.edges[HOMO_EDGE]
    from torch_geometric.data import Data

    data = Data(x=torch.tensor(nodes.attrs["x"]), edge_index=torch.tensor(edges.edge_index).long())
    source = partition_by_pyg(data, 2, tmp_path / "theirs", monkeypatch)
    files = {"y": nodes.attrs["y"], **{f"{name}_idx": ids for name, ids in nodes.splits.items()}}
    for name, values in files.items():
        np.save(tmp_path / f"{name}.npy", values)
    given = {name: str(tmp_path / f"{name}.npy") for name in files}
    convert_partition(source, tmp_path / "converted", {"nodes": given}, say=lambda line: None)
    curves = []
    for name in ("own", "converted"):
        train(job(tmp_path / name, tmp_path / f"run-{name}", epochs=2), Ranks())
        curves.append(curve(tmp_path / f"run-{name}"))
    assert curves[0] == pytest.approx(curves[1], rel=1e-5) and len(curves[0]) > 2


def labels_of(data, folder):
    """Write labels and train seeds. Return their paths as ``convert_partition``'s option ``nodes``."""
    of = "paper__" if hasattr(data, "node_types") and "paper" in data.node_types else ""
    y = data["paper"].y if of else data.y
    torch.save(y, folder / "y.pt")
    torch.save(torch.arange(0, len(y), 2), folder / "train.pt")
    return {f"{of}y": str(folder / "y.pt"), f"{of}train_idx": str(folder / "train.pt")}


class Evil:
    def __reduce__(self):
        return (print, ("code from a file ran",))


def without_a_part(folder):
    shutil.rmtree(folder / "part_1")


def with_code(folder):
    (folder / "META.json").unlink()
    (folder / "META").write_bytes(pickle.dumps(Evil()))


def with_code_in_features(folder):
    torch.save({"feats": Evil()}, folder / "part_0/node_feats.pt")


def with_a_node_twice(folder):
    feats = torch.load(folder / "part_1/node_feats.pt")
    feats["global_id"][0] = torch.load(folder / "part_0/node_feats.pt")["global_id"][0]
    torch.save(feats, folder / "part_1/node_feats.pt")


def with_an_unknown_part(folder):
    torch.save(torch.full((24,), 2), folder / "node_map.pt")


def with_no_tensor(folder):
    torch.save("text", folder / "node_map.pt")


def cut_short(folder):
    path = folder / "part_0/graph.pt"
    path.write_bytes(path.read_bytes()[:100])


BROKEN = {
    without_a_part: r"part_1/graph.pt is missing: the partition is incomplete; copy the folders of all parts",
    with_code: r"META is not a file of tensors, or is damaged \(it holds builtins.print, which is not a plain value\)",
    with_code_in_features: r"part_0/node_feats.pt is not a file of tensors",
    with_a_node_twice: r"part_1/node_feats.pt \[x\]: node \d+ is also in an earlier part",
    with_an_unknown_part: r"node_map.pt: node 0 is in part 2, but parts go from 0 to 1",
    with_no_tensor: r"node_map.pt: holds a str, expected a tensor",
    cut_short: r"part_0/graph.pt is not a file of tensors, or is damaged",
}


@pytest.mark.parametrize("damage", BROKEN, ids=lambda damage: damage.__name__)
def test_a_damaged_partition_is_one_clear_message_and_leaves_nothing(damage, tmp_path, monkeypatch, capfd):
    source = partition_by_pyg(homo(), 2, tmp_path / "theirs", monkeypatch)
    damage(source)
    capfd.readouterr()
    with pytest.raises(DataError, match=BROKEN[damage]):
        convert_partition(source, tmp_path / "parts", say=lambda line: None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["theirs"]
    assert "code from a file ran" not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("sample", "file", "old", "new", "message"),
    [
        ("dgl_hetero", "demo.json", rb"(?<=0,)\s*5", b"%d" % 2**70, "node_map of author: expected a range"),
        ("pyg24_hetero", "META.json", rb'\["author",', b"[[],", "cannot be read as a partition of torch_geometric"),
        ("glt_hetero", "part1/node_feat/paper/feats.pkl", rb"(?s).*", b"", "paper: feats.pkl has fewer tensors"),
    ],
)  # fmt: skip
def test_odd_values_in_files_are_one_clear_message(samples, tmp_path, sample, file, old, new, message):
    source = shutil.copytree(samples / sample, tmp_path / "theirs")
    (source / file).write_bytes(re.sub(old, new, (source / file).read_bytes(), count=1))
    with pytest.raises(DataError, match=message):
        open_source(source).read()


def test_a_damaged_file_of_dgl_is_one_clear_message(samples, tmp_path):
    source = shutil.copytree(samples / "dgl_homo", tmp_path / "theirs")
    whole = {name: (source / f"part1/{name}.dgl").read_bytes() for name in ("graph", "node_feat")}
    rng = np.random.default_rng(1)
    for name, content in whole.items():
        path = source / f"part1/{name}.dgl"
        for size in (0, 10, len(content) // 2):
            path.write_bytes(content[:size])
            with pytest.raises(DataError, match=f"part1/{name}.dgl cannot be read"):
                open_source(source).read()
        for _ in range(12):
            damaged = bytearray(content)
            damaged[int(rng.integers(len(content)))] ^= 1 << int(rng.integers(8))
            path.write_bytes(damaged)
            with suppress(TrainerError):  # any other exception fails the test
                open_source(source).read()
        path.write_bytes(content)


def refused(*words):
    result = CliRunner().invoke(partition, [str(word) for word in words])
    assert isinstance(result.exception, TrainerError), result.output
    return str(result.exception)


def test_wrong_arguments_are_one_clear_message(samples, tmp_path, monkeypatch):
    source = partition_by_pyg(homo(), 2, tmp_path / "theirs", monkeypatch)
    parts, out = tmp_path / "parts", tmp_path / "out"
    convert_partition(source, parts, say=lambda line: None)
    (tmp_path / "empty").mkdir()
    assert "does not exist" in refused("convert", tmp_path / "nowhere", out)
    assert "is not a partition folder: expected META.json" in refused("convert", tmp_path / "empty", out)
    assert "is a partition of gnnfleet already" in refused("convert", parts, out)
    assert "holds several partitions" in refused("convert", several(samples, tmp_path / "all"), out)
    assert "x is also in" in refused("convert", source, out, "--nodes", f"x={source}/node_map.pt")
    assert "--nodes y=absent.npy: absent.npy does not" in refused("convert", source, out, "--nodes", "y=absent.npy")
    assert "unknown option 'colour'" in refused("convert", source, out, "--option", "colour=red")
    make = ("make", "--source", source, "--out", out, "--num-parts", 3, "--method", "keep", "--dataset")
    assert "has 2 parts, but 3 are needed" in refused(*make, "partition")
    assert "method `keep` needs dataset `partition`" in refused(*make, "synthetic")
    assert not out.exists()


def several(samples, folder):
    for name in ("glt_homo", "dgl_homo"):
        shutil.copytree(samples / name, folder / f"{name}-partitions")
    return folder
