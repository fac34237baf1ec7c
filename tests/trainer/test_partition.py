"""Partitions: nothing is lost, cuts are good, folders appear whole or not at all, damage is named."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from graphs import DEBIAN, NO_DEBIAN, blocks, empty, graph, odd, ring, skewed, star
from trainer.data import load_dataset
from trainer.errors import DataError, PartitionError
from trainer.partition import make, write
from trainer.partition.assign import PartitionAssignment, assign_parts
from trainer.partition.cli import partition
from trainer.partition.format import manifest_digest, read_manifest, write_manifest
from trainer.partition.inspect import describe
from trainer.partition.make import PartitionSpec, make_partition
from trainer.partition.verify import verify_partition
from trainer.partition.write import edge_groups, relabel, write_partition
from trainer.store.part import open_parts

REPO = Path(__file__).resolve().parents[2]


def written(dataset, folder, num_parts=2, method="random", seed=0):
    write_partition(dataset, assign_parts(dataset, num_parts, method, seed), folder)
    return folder


def by_hand(dataset, part, num_parts):
    return PartitionAssignment("random", 0, num_parts, np.array(part, np.int32), 0.0, 1.0)


def assert_whole(folder, dataset):
    """The parts together are the dataset, exactly, in the order the format promises."""
    store = open_parts(folder)
    orig_id = np.concatenate([store.parts[p].orig_id for p in sorted(store.parts)])
    assert np.array_equal(np.sort(orig_id), np.arange(dataset.num_nodes))
    edges = np.full((2, dataset.num_edges), -1)
    for part in store.parts.values():
        assert np.all(np.diff(part.orig_id) > 0)
        targets = np.repeat(part.orig_id, np.diff(part.indptr))
        edges[:, part.edge_id] = orig_id[part.indices], targets
        for row in range(part.num_nodes):
            assert np.all(np.diff(part.edge_id[part.indptr[row] : part.indptr[row + 1]]) > 0)
        for name, values in dataset.attrs.items():
            assert part.attrs[name].dtype == values.dtype
            assert np.array_equal(part.attrs[name], values[part.orig_id])
    assert np.array_equal(edges, dataset.edge_index)
    for split, ids in dataset.splits.items():
        assert np.array_equal(orig_id[store.seeds(split)], ids)


GRAPHS = {
    "ring": lambda: ring(23),
    "star": lambda: star(40),
    "skewed": lambda: skewed(200, 3000),
    "empty": lambda: empty(9),
    "odd": odd,
    "one node": lambda: graph([(0, 0)], 1),
}


@pytest.mark.parametrize("method", ["metis", "random"])
@pytest.mark.parametrize("num_parts", [1, 2, 5])
@pytest.mark.parametrize("name", GRAPHS)
def test_parts_together_are_the_graph(tmp_path, name, num_parts, method):
    dataset = GRAPHS[name]()
    if num_parts > dataset.num_nodes:
        with pytest.raises(PartitionError, match=f"1 nodes cannot be divided into {num_parts} non-empty parts"):
            written(dataset, tmp_path / "parts", num_parts, method)
        return
    folder = written(dataset, tmp_path / "parts", num_parts, method)
    assert_whole(folder, dataset)
    assert verify_partition(folder) == []
    assert all(part.num_nodes for part in open_parts(folder).parts.values())


def test_an_empty_part_can_be_written_and_opened(tmp_path):
    dataset = odd()
    write_partition(dataset, by_hand(dataset, [0, 2, 2, 0, 0, 2, 2, 2, 0, 0], 4), tmp_path / "parts")
    assert_whole(tmp_path / "parts", dataset)
    assert verify_partition(tmp_path / "parts") == []
    assert [part.num_nodes for part in open_parts(tmp_path / "parts").parts.values()] == [5, 0, 5, 0]


def test_edges_cut_in_several_groups_are_the_same(tmp_path, monkeypatch):
    dataset = skewed(100, 2000)
    one = written(dataset, tmp_path / "one", 5)
    monkeypatch.setattr(write, "_EDGE_BYTES_AT_ONCE", 4000)
    several = written(dataset, tmp_path / "several", 5)
    assert manifest_digest(one) == manifest_digest(several)


def test_edge_groups_stay_under_the_limit():
    offsets = np.array([0, 10, 20, 20, 100, 105])
    assert list(edge_groups(offsets, 8, 160)) == [range(0, 3), range(3, 4), range(4, 5)]


def test_ids_are_as_small_as_they_fit(tmp_path):
    part = open_parts(written(ring(8), tmp_path / "parts")).parts[0]
    assert [a.dtype.name for a in (part.orig_id, part.indices, part.edge_id, part.indptr)] == ["int32"] * 3 + ["int64"]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_relabelling_is_a_permutation_in_original_order(data):
    num_parts = data.draw(st.integers(1, 6))
    part = np.array(data.draw(st.lists(st.integers(0, num_parts - 1), min_size=1, max_size=60)), np.int32)
    labels = relabel(part, num_parts)
    assert np.array_equal(labels.orig_id[labels.global_id], np.arange(len(part)))
    for part_id in range(num_parts):
        owned = labels.orig_id[labels.offsets[part_id] : labels.offsets[part_id + 1]]
        assert owned.tolist() == np.flatnonzero(part == part_id).tolist()


# Assignment


@pytest.mark.parametrize("size", [8, 80])  # the second is dense enough for METIS to see a sample of the edges
def test_metis_finds_the_known_best_cut_of_directed_blocks(size):
    dataset = blocks(4, size)
    assignment = assign_parts(dataset, 4)
    assert assignment.edge_cut == pytest.approx(4 / dataset.num_edges)
    assert assignment.balance == 1.0


def test_metis_on_a_directed_star_and_ring():
    assert assign_parts(star(1000), 4).balance < 1.1
    assert assign_parts(ring(1000), 4).edge_cut <= 8 / 1000


def test_isolated_nodes_fill_up_the_smaller_parts():
    dense = blocks(3, 20)
    dataset = graph(dense.edge_index.T, 60 + 301)
    sizes = np.bincount(assign_parts(dataset, 3).part)
    assert sorted(sizes) == [120, 120, 121]


@pytest.mark.parametrize("method", ["metis", "random"])
def test_no_part_is_empty_when_there_are_nodes_enough(method):
    for dataset in (empty(7), star(6), ring(7)):
        assert np.bincount(assign_parts(dataset, 7, method).part, minlength=7).tolist() == [1] * 7


def test_random_is_balanced_and_follows_the_seed():
    one, same, other = (assign_parts(ring(1000), 7, "random", seed).part for seed in (1, 1, 2))
    assert np.array_equal(one, same) and not np.array_equal(one, other)
    assert set(np.bincount(one)) == {142, 143}


def test_equal_arguments_give_equal_bytes(tmp_path):
    for method in ("metis", "random"):
        folders = [written(skewed(300, 9000), tmp_path / f"{method}{turn}", 3, method, seed=5) for turn in range(2)]
        assert manifest_digest(folders[0]) == manifest_digest(folders[1])


def test_arguments_that_cannot_be_met():
    with pytest.raises(PartitionError, match="unknown partition method 'mettis'; there are metis, random"):
        assign_parts(ring(5), 2, "mettis")
    with pytest.raises(PartitionError, match="num_parts must be from 1 to the number of nodes"):
        assign_parts(ring(5), 6)


@pytest.mark.skipif(not DEBIAN.is_dir(), reason=NO_DEBIAN)
def test_metis_cuts_far_less_of_real_data_than_random(tmp_path):
    dataset = load_dataset("file", str(DEBIAN))
    assignment = assign_parts(dataset, 4)
    assert assignment.edge_cut < 0.25 * assign_parts(dataset, 4, "random").edge_cut
    assert assignment.balance < 1.05
    write_partition(dataset, assignment, tmp_path / "parts")
    assert verify_partition(tmp_path / "parts") == []
    figures = describe(tmp_path / "parts").parts
    assert sum(part.cut_edges for part in figures) == round(assignment.edge_cut * dataset.num_edges)
    assert sum(part.seeds["train"] for part in figures) == 31833


# A folder appears whole or not at all

SPEC = {"num_nodes": 500, "avg_degree": 6, "num_features": 4, "num_classes": 3}


def spec(folder, **changes):
    return PartitionSpec("synthetic", str(folder), options=SPEC, **{"num_parts": 2, "method": "random", **changes})


def test_an_equal_partition_is_found_before_data_is_read(tmp_path, monkeypatch):
    made = make_partition(spec(tmp_path / "parts"), say=lambda line: None)
    monkeypatch.setattr(make, "load_dataset", lambda *_: pytest.fail("the dataset was loaded again"))
    said = []
    assert make_partition(spec(tmp_path / "parts"), say=said.append) == made
    assert said == [f"{tmp_path / 'parts'} is up to date: synthetic, 2 parts by random"]


def test_a_partition_that_lacks_a_file_is_made_again(tmp_path):
    make_partition(spec(tmp_path / "parts"), say=lambda line: None)
    (tmp_path / "parts" / "part1" / "nodes" / "x.npy").unlink()
    make_partition(spec(tmp_path / "parts"), say=lambda line: None)
    assert verify_partition(tmp_path / "parts") == []


@pytest.mark.parametrize("exchange", [True, False])
def test_another_partition_is_replaced(tmp_path, monkeypatch, exchange):
    if not exchange:
        monkeypatch.setattr("trainer.partition.folder._exchange", lambda one, other: False)
    make_partition(spec(tmp_path / "parts", num_parts=4), say=lambda line: None)
    made = make_partition(spec(tmp_path / "parts"), say=lambda line: None)
    assert read_manifest(tmp_path / "parts") == made and made.num_parts == 2
    assert sorted(path.name for path in (tmp_path / "parts").iterdir()) == ["manifest.json", "part0", "part1", "shared"]
    assert os.listdir(tmp_path) == ["parts"]


def test_replacing_another_partition_is_said(tmp_path):
    make_partition(spec(tmp_path / "parts", num_parts=4), say=lambda line: None)
    said = []
    make_partition(spec(tmp_path / "parts"), say=said.append)
    assert said[0] == f"replacing 4 parts of synthetic (random) in {tmp_path / 'parts'}"
    assert not any(line.startswith("note:") for line in said)


@pytest.mark.parametrize("name", ["notes.txt", "part0/nodes/more.npy", "part1/mine/.hidden"])
def test_a_file_of_somebody_else_keeps_its_folder_from_being_replaced(tmp_path, name):
    made = make_partition(spec(tmp_path / "parts", num_parts=4), say=lambda line: None)
    foreign = tmp_path / "parts" / name
    foreign.parent.mkdir(exist_ok=True)
    foreign.write_text("keep me")
    said = []
    with pytest.raises(PartitionError, match=f"{name} is not a file of the partition .* move it away or choose"):
        make_partition(spec(tmp_path / "parts"), say=said.append)
    assert foreign.read_text() == "keep me" and said == []
    assert read_manifest(tmp_path / "parts") == made
    assert make_partition(spec(tmp_path / "parts", num_parts=4), say=said.append) == made  # nothing to replace


def test_what_the_launcher_left_goes_with_the_partition(tmp_path):
    make_partition(spec(tmp_path / "parts", num_parts=4), say=lambda line: None)
    for name in (".gnnfleet-made.json", ".gnnfleet-digests.json", "part0/edges/.gnnfleet-digests.json"):
        (tmp_path / "parts" / name).write_text("{}")
    make_partition(spec(tmp_path / "parts"), say=lambda line: None)
    assert list((tmp_path / "parts").rglob(".gnnfleet-*")) == []


def test_a_file_that_comes_while_the_parts_are_made_is_kept(tmp_path, monkeypatch):
    made = make_partition(spec(tmp_path / "parts", num_parts=4), say=lambda line: None)
    real = write.write_manifest

    def late(root, manifest):
        (tmp_path / "parts" / "notes.txt").write_text("keep me")
        return real(root, manifest)

    monkeypatch.setattr(write, "write_manifest", late)
    with pytest.raises(PartitionError, match="notes.txt is not a file of the partition"):
        make_partition(spec(tmp_path / "parts"), say=lambda line: None)
    assert (tmp_path / "parts" / "notes.txt").read_text() == "keep me"
    assert read_manifest(tmp_path / "parts") == made and os.listdir(tmp_path) == ["parts"]


@pytest.mark.parametrize("content", ['"files": 5', '"files": [3, {}]', '"version": 99'])
def test_a_manifest_that_cannot_be_trusted_protects_the_files_it_does_not_list(tmp_path, content):
    (tmp_path / "manifest.json").write_text(f'{{"format": "gnnfleet-partition", {content}}}')
    (tmp_path / "notes.txt").write_text("keep me")
    with pytest.raises(PartitionError, match="notes.txt is not a file of the partition"):
        make_partition(spec(tmp_path), say=lambda line: None)


def test_parts_without_train_seeds_are_noted(tmp_path):
    np.save(tmp_path / "edge_index.npy", np.array([[0, 1], [1, 2]]))
    np.save(tmp_path / "y.npy", np.array([0, 1, 0]))
    source = PartitionSpec("file", str(tmp_path / "parts"), source=str(tmp_path), method="random")
    said = []
    make_partition(source, say=said.append)
    assert "note: no train split: the bundled trainer needs train_idx or train_mask" in said


def test_what_is_no_partition_is_left_alone(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years of work")
    with pytest.raises(PartitionError, match="home holds something that is not a partition"):
        make_partition(spec(tmp_path / "home"))
    assert (tmp_path / "home" / "thesis.tex").read_text() == "years of work"
    with pytest.raises(PartitionError, match="in the way and not a folder"):
        make_partition(spec(tmp_path / "home" / "thesis.tex"))


def test_an_empty_folder_may_be_used(tmp_path):
    make_partition(spec(tmp_path), say=lambda line: None)
    assert verify_partition(tmp_path) == []


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_an_error_or_interrupt_leaves_nothing(tmp_path, monkeypatch, error):
    real = write.write_npy

    def failing(root, path, *rest):
        if path.endswith("part1/edges/indices.npy"):
            raise error
        return real(root, path, *rest)

    monkeypatch.setattr(write, "write_npy", failing)
    with pytest.raises((PartitionError, KeyboardInterrupt)) as caught:
        make_partition(spec(tmp_path / "parts"), say=lambda line: None)
    assert os.listdir(tmp_path) == []
    if isinstance(error, OSError):
        assert "No space left on device; nothing was left behind" in str(caught.value)


STALLED = """
import sys, time
from trainer.partition import write
from trainer.partition.make import PartitionSpec, make_partition
real = write.write_npy
def stalling(root, path, *rest):
    entry = real(root, path, *rest)
    if path.endswith("edge_id.npy"):
        print("writing", flush=True)
        time.sleep(60)
    return entry
write.write_npy = stalling
spec = PartitionSpec("synthetic", sys.argv[1], options={"num_nodes": 500}, num_parts=2, method="random")
make_partition(spec, say=str)
"""


def test_a_killed_process_leaves_no_folder_and_the_next_one_cleans_up(tmp_path):
    command = [sys.executable, "-c", STALLED, str(tmp_path / "parts")]
    with subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "writing\n"
        process.send_signal(signal.SIGKILL)
    assert not (tmp_path / "parts").exists()
    assert len(os.listdir(tmp_path)) == 1
    make_partition(spec(tmp_path / "parts"), say=lambda line: None)
    assert os.listdir(tmp_path) == ["parts"]
    assert verify_partition(tmp_path / "parts") == []


# Damage is named


def flip_byte(path, position=-3):
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def test_a_flipped_byte_names_its_file(tmp_path):
    folder = written(skewed(100, 900), tmp_path / "parts", 3)
    for entry in read_manifest(folder).files:
        flip_byte(folder / entry.path)
        findings = verify_partition(folder)
        assert findings[0].path == entry.path and "does not match its sha256" in findings[0].problem
        flip_byte(folder / entry.path)
    assert verify_partition(folder) == []


def test_a_missing_and_a_truncated_file(tmp_path):
    folder = written(skewed(100, 900), tmp_path / "parts", 2)
    (folder / "part0/nodes/x.npy").unlink()
    target = folder / "part1/edges/indices.npy"
    target.write_bytes(target.read_bytes()[:-8])
    assert [str(finding) for finding in verify_partition(folder, digests=False)] == [
        "part0/nodes/x.npy: missing",
        f"part1/edges/indices.npy: {target.stat().st_size} bytes, the manifest says {target.stat().st_size + 8}",
    ]
    with pytest.raises(PartitionError, match=r"part0/nodes/x.npy is missing"):
        open_parts(folder)


def test_one_part_can_be_checked_where_the_others_are_not(tmp_path):
    folder = written(skewed(100, 900), tmp_path / "parts", 2)
    for path in sorted((folder / "part1").rglob("*.npy")):
        path.unlink()
    assert verify_partition(folder, part_ids=[0]) == []
    assert {finding.problem for finding in verify_partition(folder)} == {"missing"}
    with pytest.raises(PartitionError, match="no part 2; the folder has 2 parts"):
        verify_partition(folder, part_ids=[2])


def at(position, value):
    def change(array):
        array[position] = value

    return change


def swapped(array):
    array[:2] = array[1::-1].copy()


INVARIANTS = {
    "seed outside": ("shared/seeds/train.npy", at(3, 100), "position 3: 100 is no global id (0 to 99)"),
    "nodes unordered": ("part0/nodes/orig_id.npy", swapped, "position 1: original ids do not ascend"),
    "no such node": ("part0/nodes/orig_id.npy", at(-1, 100), "100 is no node (0 to 99)"),
    "indptr start": ("part1/edges/indptr.npy", at(0, 1), "begins with 1, expected 0"),
    "indptr order": ("part1/edges/indptr.npy", at(4, 0), "position 4: 0 is below the value before it"),
    "indptr end": ("part1/edges/indptr.npy", at(-1, 10_000), "expected integers [10000] (the end of indptr)"),
    "no such source": ("part0/edges/indices.npy", at(7, -1), "position 7: -1 is outside 0 to 99"),
    "no such edge": ("part0/edges/edge_id.npy", at(7, 900), "position 7: 900 is outside 0 to 899"),
    "edge order": ("part0/edges/edge_id.npy", swapped, "edge ids do not ascend inside their row"),
}


@pytest.mark.parametrize("name", INVARIANTS)
def test_every_invariant_is_checked(tmp_path, name):
    path, change, problem = INVARIANTS[name]
    hubs = graph([(v % 100, v % 7) for v in range(900)], 100)
    folder = tmp_path / "parts"
    write_partition(hubs, by_hand(hubs, [0, 1] * 50, 2), folder)
    change(np.lib.format.open_memmap(folder / path, mode="r+"))
    assert any(problem in str(finding) for finding in verify_partition(folder, digests=False))


@pytest.mark.parametrize(
    ("path", "position", "problem"),
    [
        ("part1/nodes/orig_id.npy", 0, "node 0 is in an earlier part too"),
        ("part1/edges/edge_id.npy", 0, "edge 1 appears twice"),
    ],
)
def test_nodes_and_edges_belong_to_one_part(tmp_path, path, position, problem):
    dataset = ring(10)
    folder = tmp_path / "parts"
    write_partition(dataset, by_hand(dataset, [0, 1] * 5, 2), folder)
    other = path.replace("part1", "part0")
    at(position, np.load(folder / other).min())(np.lib.format.open_memmap(folder / path, mode="r+"))
    assert any(problem in str(finding) for finding in verify_partition(folder, digests=False))


def test_edges_that_are_nowhere(tmp_path):
    folder = written(ring(10), tmp_path / "parts")
    write_manifest(folder, replace(read_manifest(folder), num_edges=12))
    assert [str(finding) for finding in verify_partition(folder)] == [
        "manifest.json: num_edges is 12, the parts hold 10"
    ]


def test_a_manifest_that_forgets_a_file(tmp_path):
    folder = written(ring(10), tmp_path / "parts")
    manifest = read_manifest(folder)
    write_manifest(folder, replace(manifest, files=tuple(f for f in manifest.files if not f.path.endswith("/x.npy"))))
    assert [str(finding) for finding in verify_partition(folder)] == [
        f"part{p}/nodes/x.npy: not listed in the manifest" for p in (0, 1)
    ]


# What a user sees


def test_figures_of_a_ring_cut_in_two(tmp_path):
    dataset = ring(10)
    write_partition(dataset, by_hand(dataset, [0] * 4 + [1] * 6, 2), tmp_path / "parts")
    first, second = describe(tmp_path / "parts").parts
    assert (first.nodes, first.edges, first.cut_edges, first.halo) == (4, 4, 1, 1)
    assert (second.nodes, second.edges, second.cut_edges, second.halo) == (6, 6, 1, 1)
    assert first.seeds == {"train": 2, "val": 1} and second.seeds == {"train": 3, "val": 0}
    on_disk = sum(path.stat().st_size for path in (tmp_path / "parts" / "part0").rglob("*.npy"))
    assert first.bytes == on_disk


def run(*arguments):
    return CliRunner().invoke(partition, [str(argument) for argument in arguments])


def test_command_line_from_nothing_to_figures(tmp_path):
    folder = tmp_path / "parts"
    options = [f"--option={name}={value}" for name, value in SPEC.items()]
    made = run("make", "--dataset", "synthetic", *options, "--num-parts", 3, "--out", folder)
    assert made.exit_code == 0, made.output
    assert [line.split()[0] for line in made.output.splitlines()] == ["load", "assign", "write"]
    again = run("make", "--dataset", "synthetic", *options, "--num-parts", 3, "--out", folder)
    assert "is up to date" in again.output
    assert run("verify", folder).output == f"{folder}: sound\n"
    figures = json.loads(run("inspect", folder, "--json").output)
    assert sum(part["nodes"] for part in figures["parts"]) == 500
    table = run("inspect", folder).output
    assert "3 parts by metis" in table and "halo nodes" in table


def test_command_line_statuses(tmp_path):
    folder = written(ring(10), tmp_path / "parts")
    flip_byte(folder / "part1/nodes/x.npy")
    failed = run("verify", folder)
    assert failed.exit_code == 1 and f"{folder}/part1/nodes/x.npy: content does not match" in failed.output
    assert run("verify", folder, "--part", 0).exit_code == 0
    assert run("make", "--dataset", "synthetic", "--option", "seed", "--out", folder).exit_code == 2
    wrong = run("make", "--dataset", "synthetic", "--option", "nodes=5", "--out", tmp_path / "new")
    assert isinstance(wrong.exception, DataError) and "did you mean 'num_nodes'" in str(wrong.exception)
