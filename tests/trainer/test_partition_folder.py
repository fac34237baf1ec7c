"""Tests that a partition folder appears complete or not at all, and that a folder with other files is never
replaced.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from partition_kit import EDGE, NODE, assert_sound, spec
from trainer.core.errors import PartitionError
from trainer.core.schema import HOMO_EDGE
from trainer.partition import make, write
from trainer.partition.make import PartitionSpec, make_partition
from trainer.store.manifest import read_manifest
from trainer.store.npy import NpyWriter

REPO = Path(__file__).resolve().parents[2]


def test_an_equal_partition_is_reused_without_reading_data(tmp_path, monkeypatch):
    made = make_partition(spec(tmp_path / "parts"), say=lambda line: None)
    monkeypatch.setattr(make, "load_dataset", lambda *_: pytest.fail("the dataset was loaded again"))
    said = []
    assert make_partition(spec(tmp_path / "parts"), say=said.append) == made
    assert said == [f"{tmp_path / 'parts'} is up to date: synthetic, 2 parts by random"]


def test_time_attributes_are_known_before_data_is_read(tmp_path):
    np.save(tmp_path / "edge_index.npy", np.array([[0, 1], [1, 2]]))
    np.save(tmp_path / "age.npy", np.array([30, 20, 10]))
    np.save(tmp_path / "y.npy", np.array([0, 1, 0]))
    for options, times in [({}, ()), ({"time_attrs": "age"}, ("age",))]:
        source = PartitionSpec("file", str(tmp_path / "parts"), source=str(tmp_path), options=options, method="random")
        made = make_partition(source, say=lambda line: None)
        assert made.edges[HOMO_EDGE].src_times == times
        said = []
        assert make_partition(source, say=said.append) == made
        assert "is up to date" in said[0]


def test_a_partition_that_lacks_a_file_is_made_again(tmp_path):
    make_partition(spec(tmp_path / "parts"), say=lambda line: None)
    (tmp_path / "parts" / "part1" / NODE / "attrs/x.npy").unlink()
    make_partition(spec(tmp_path / "parts"), say=lambda line: None)
    assert_sound(tmp_path / "parts")


def test_a_damaged_file_of_the_same_size_is_made_again(tmp_path):
    make_partition(spec(tmp_path / "parts"), say=lambda line: None)
    path = tmp_path / "parts" / "part1" / NODE / "attrs/x.npy"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    said = []
    make_partition(spec(tmp_path / "parts"), say=said.append)
    assert said[0] == f"damaged in {tmp_path / 'parts'}: part1/{NODE}/attrs/x.npy; made again"
    assert_sound(tmp_path / "parts")


def test_a_large_partition_is_not_called_up_to_date_without_its_digests(tmp_path, monkeypatch):
    made = make_partition(spec(tmp_path / "parts"), say=lambda line: None)
    monkeypatch.setattr("trainer.partition.folder._COMPARED", 1000)
    said = []
    assert make_partition(spec(tmp_path / "parts"), say=said.append) == made
    assert "up to date" not in said[0] and f"partition verify {tmp_path / 'parts'}` compares" in said[0]


@pytest.mark.parametrize("other", [{"dataset": "synthetic-hetero", "options": {}}, {"options": {"num_nodes": 321}}])
def test_parts_of_another_graph_are_replaced_only_by_force(tmp_path, other):
    made = make_partition(spec(tmp_path / "parts"), say=lambda line: None)
    wanted = replace(spec(tmp_path / "parts"), **other)
    with pytest.raises(PartitionError, match="holds 2 parts of synthetic .*another graph than .*--force"):
        make_partition(wanted, say=lambda line: None)
    assert read_manifest(tmp_path / "parts") == made
    assert make_partition(replace(wanted, force=True), say=lambda line: None) != made


@pytest.mark.parametrize("exchange", [True, False])
def test_another_partition_is_replaced(tmp_path, monkeypatch, exchange):
    if not exchange:
        monkeypatch.setattr("trainer.partition.folder._exchange", lambda one, other: False)
    make_partition(spec(tmp_path / "parts", num_parts=4), say=lambda line: None)
    made = make_partition(spec(tmp_path / "parts"), say=lambda line: None)
    assert read_manifest(tmp_path / "parts") == made and made.num_parts == 2
    assert sorted(path.name for path in (tmp_path / "parts").iterdir()) == ["manifest.json", "part0", "part1", "shared"]
    assert os.listdir(tmp_path) == ["parts"]


def test_replacing_another_partition_is_logged(tmp_path):
    make_partition(spec(tmp_path / "parts", num_parts=4), say=lambda line: None)
    said = []
    make_partition(spec(tmp_path / "parts"), say=said.append)
    assert said[1] == f"replacing 4 parts of synthetic (random) in {tmp_path / 'parts'}"
    assert not any(line.startswith("note:") for line in said)


@pytest.mark.parametrize("name", ["notes.txt", "part0/nodes/node/more.npy", "part1/mine/.hidden"])
def test_a_folder_with_a_foreign_file_is_not_replaced(tmp_path, name):
    made = make_partition(spec(tmp_path / "parts", num_parts=4), say=lambda line: None)
    foreign = tmp_path / "parts" / name
    foreign.parent.mkdir(exist_ok=True)
    foreign.write_text("keep me")
    said = []
    with pytest.raises(PartitionError, match=f"{name} would be deleted, .* move it away or choose"):
        make_partition(spec(tmp_path / "parts"), say=said.append)
    assert foreign.read_text() == "keep me" and said == []
    assert read_manifest(tmp_path / "parts") == made
    assert make_partition(spec(tmp_path / "parts", num_parts=4), say=said.append) == made  # the partition is up to date


def test_launcher_files_are_removed_with_the_partition(tmp_path):
    make_partition(spec(tmp_path / "parts", num_parts=4), say=lambda line: None)
    for name in (".gnnfleet-made.json", ".gnnfleet-digests.json", "part0/edges/.gnnfleet-digests.json"):
        (tmp_path / "parts" / name).write_text("{}")
    make_partition(spec(tmp_path / "parts"), say=lambda line: None)
    assert list((tmp_path / "parts").rglob(".gnnfleet-*")) == []


def test_a_file_added_while_the_parts_are_made_is_kept(tmp_path, monkeypatch):
    made = make_partition(spec(tmp_path / "parts", num_parts=4), say=lambda line: None)
    real = write.write_manifest

    def late(root, manifest):
        (tmp_path / "parts" / "notes.txt").write_text("keep me")
        return real(root, manifest)

    monkeypatch.setattr(write, "write_manifest", late)
    with pytest.raises(PartitionError, match="notes.txt would be deleted, as the partition"):
        make_partition(spec(tmp_path / "parts"), say=lambda line: None)
    assert (tmp_path / "parts" / "notes.txt").read_text() == "keep me"
    assert read_manifest(tmp_path / "parts") == made and os.listdir(tmp_path) == ["parts"]


@pytest.mark.parametrize("content", ['"files": 5', '"files": [3, {}]', '"version": 99'])
def test_an_invalid_manifest_does_not_allow_deleting_unlisted_files(tmp_path, content):
    (tmp_path / "manifest.json").write_text(f'{{"format": "gnnfleet-partition", {content}}}')
    (tmp_path / "notes.txt").write_text("keep me")
    with pytest.raises(PartitionError, match="notes.txt would be deleted, as the partition"):
        make_partition(spec(tmp_path), say=lambda line: None)


def test_parts_without_train_seeds_are_logged(tmp_path):
    np.save(tmp_path / "edge_index.npy", np.array([[0, 1], [1, 2]]))
    np.save(tmp_path / "y.npy", np.array([0, 1, 0]))
    source = PartitionSpec("file", str(tmp_path / "parts"), source=str(tmp_path), method="random")
    said = []
    make_partition(source, say=said.append)
    assert "note: no train split: the bundled trainer needs train_idx or train_mask" in said


def test_a_folder_without_a_partition_is_not_touched(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years of work")
    with pytest.raises(PartitionError, match="home holds files but no partition"):
        make_partition(spec(tmp_path / "home"))
    assert (tmp_path / "home" / "thesis.tex").read_text() == "years of work"
    with pytest.raises(PartitionError, match="exists and is not a folder"):
        make_partition(spec(tmp_path / "home" / "thesis.tex"))


def test_an_empty_folder_may_be_used(tmp_path):
    make_partition(spec(tmp_path), say=lambda line: None)
    assert_sound(tmp_path)


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_an_error_or_interrupt_leaves_nothing(tmp_path, monkeypatch, error):
    real = NpyWriter.finish

    def failing(self):
        if self.path.endswith(f"part1/{EDGE}/indices.npy"):
            raise error
        return real(self)

    monkeypatch.setattr(NpyWriter, "finish", failing)
    with pytest.raises((PartitionError, KeyboardInterrupt)) as caught:
        make_partition(spec(tmp_path / "parts"), say=lambda line: None)
    assert os.listdir(tmp_path) == []
    if isinstance(error, OSError):
        assert "No space left on device; nothing was left behind" in str(caught.value)


STALLED = """
import os, sys, time
from trainer.store.npy import NpyWriter
from trainer.partition.make import PartitionSpec, make_partition
real = NpyWriter.finish
def stalling(self):
    entry = real(self)
    if self.path.endswith("indices.npy"):
        os.write(1, b"writing\\n")  # by several threads: a whole line at once
        time.sleep(60)
    return entry
NpyWriter.finish = stalling
spec = PartitionSpec("synthetic", sys.argv[1], options={"num_nodes": 500}, num_parts=2, method="random")
make_partition(spec, say=str)
"""


def test_a_killed_process_leaves_no_folder_and_the_next_one_cleans_up(tmp_path):
    command = [sys.executable, "-c", STALLED, str(tmp_path / "parts")]
    with subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "writing\n"
        process.send_signal(signal.SIGKILL)
    assert sorted(os.listdir(tmp_path)) == [".parts.lock", ".parts.work"], "the lock died with the process"
    make_partition(spec(tmp_path / "parts"), say=lambda line: None)
    assert os.listdir(tmp_path) == ["parts"]
    assert_sound(tmp_path / "parts")
