"""Tests of partition files that do not match the manifest: an error, never a crash or a wrong row."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from damage_kit import content_digest, damage, small_folder
from forked import Forked
from ports import free_port
from service_kit import write_cluster
from train_kit import environment, finish_all, job, start_rank
from trainer.core.errors import PartitionError
from trainer.core.ranks import Ranks
from trainer.graph.environment import open_any
from trainer.service import serve
from trainer.service.serve import ServeJob
from trainer.store import digest_check, part_files
from trainer.store.digest_check import checked_digests, sha256_of
from trainer.store.part_store import open_parts
from trainer.train.job import find_damage, train
from trainer.train.settings import TrainJob, TrainSettings

SECONDS = float(os.environ.get("GNNFLEET_DAMAGE_SECONDS") or 3)  #: of random damage; set the variable to test longer
EDGES = "part0/edges/v-1.0__pre-depends__v-1.0"
NODES = "part0/nodes"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_folder(tmp_path_factory.mktemp("sound") / "parts")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return small_folder(tmp_path / "parts")


@pytest.mark.timeout(SECONDS + 240)
def test_damage_never_causes_a_crash_or_a_wrong_row(sound: Path, tmp_path: Path) -> None:
    seed = time.time_ns() % 2**40
    process = Forked(damage, (sound, tmp_path / "work", seed, SECONDS), environment())
    with suppress(subprocess.TimeoutExpired):
        process.wait(SECONDS + 120)
    status, tail = process.returncode, process.output[-3000:]
    process.kill()
    assert status == 0, f"ended by {status} (None: it hangs): {tail}"
    word, tried, refused = process.output.splitlines()[-1].split()
    assert word == "done" and 0 < int(tried) < 3 * max(1, int(refused)), tail


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["manifest.json", f"{EDGES}/indices.npy", "part0/.gnnfleet-ranges.json"])
def test_a_named_pipe_in_place_of_a_file_does_not_block(folder: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    if name.endswith("ranges.json"):
        open_parts(folder)
    else:
        with pytest.raises(PartitionError, match="it is not a regular file"):
            open_parts(folder)


def rewrite(path: Path, change) -> None:
    array = np.load(path)
    np.save(path, change(array))


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("indices", lambda values: values[:-1], "holds int.* expected int.* according to the manifest"),
        ("indices", lambda values: values.astype(np.float32), "holds float32"),
        (
            "indices",
            lambda values: np.where(np.arange(len(values)) == 2, 10**6, values),
            "position 2: 1000000 is outside",
        ),
        ("indices", lambda values: np.where(np.arange(len(values)) == 2, -1, values), "position 2: -1 is outside"),
        ("indptr", lambda values: np.where(np.arange(len(values)) == 2, 10**6, values), "below the value before it"),
        ("indptr", lambda values: values + 1, "goes from 1 to"),
        ("orig_id", lambda values: values + 10**6, "is outside 0 to"),
    ],
)
def test_ids_and_offsets_out_of_range_are_refused(folder, file, change, message) -> None:
    rewrite(folder / EDGES / f"{file}.npy", lambda values: change(values).astype(change(values).dtype))
    with pytest.raises(PartitionError, match=f"{file}.npy.*{message}"):
        open_parts(folder)


def test_rows_of_another_length_or_layout_are_refused(folder: Path) -> None:
    path = folder / NODES / "v-1.0" / "attrs" / "half.npy"
    whole = np.load(path)
    for change in (whole[:-1], np.concatenate([whole, whole[:1]]), whole.astype(">u2"), whole.astype(np.int16)):
        np.save(path, change)
        with pytest.raises(PartitionError, match="half.npy holds .*, expected uint16"):
            open_parts(folder)
    np.save(path, np.asfortranarray(whole))
    with pytest.raises(PartitionError, match=r"half.npy .* C order"):
        open_parts(folder)
    np.save(path, whole)
    with open(path, "ab") as file:
        file.write(b"\0")
    with pytest.raises(PartitionError, match=r"half.npy holds .* bytes, but its header"):
        open_parts(folder)


def test_ranges_are_checked_once_and_again_after_a_change(folder, monkeypatch) -> None:
    monkeypatch.setattr(part_files, "_SETTLED_NS", 0)
    looked = []
    look = part_files._Bounds.problem
    monkeypatch.setattr(part_files._Bounds, "problem", lambda self: looked.append(self.path) or look(self))
    time.sleep(0.05)  # longer than the resolution of file times
    open_parts(folder)
    first = set(looked)
    looked.clear()
    open_parts(folder)
    assert not looked and f"{EDGES}/indices.npy" in first
    path = folder / EDGES / "indices.npy"
    before = path.stat()
    values = np.load(path, mmap_mode="r+")
    values[0] = 10**6
    values.flush()
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(PartitionError, match="position 0: 1000000 is outside"):
        open_parts(folder)
    assert looked == [f"{EDGES}/indices.npy"]


def test_files_written_just_now_are_checked_again(folder, monkeypatch) -> None:
    # A later change could leave the same file times.
    looked = []
    look = part_files._Bounds.problem
    monkeypatch.setattr(part_files._Bounds, "problem", lambda self: looked.append(self.path) or look(self))
    open_parts(folder)
    first = len(looked)
    open_parts(folder)
    assert len(looked) == 2 * first > 0


def flip_a_byte(path: Path) -> None:
    """Change a byte near the end of the file, but not the file's times."""
    before = path.stat()
    with open(path, "r+b") as file:
        file.seek(-4, os.SEEK_END)
        (byte,) = file.read(1)
        file.seek(-4, os.SEEK_END)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_flipped_byte_is_found_by_its_digest(folder: Path) -> None:
    flip_a_byte(folder / NODES / "v-1.0" / "attrs" / "half.npy")
    store = open_parts(folder)
    inside = []
    with pytest.raises(PartitionError, match=r"half.npy does not have the sha256"), checked_digests(store):
        inside.append("digests of attributes may be compared later")
    assert inside


def test_digests_of_index_files_are_compared_first(folder: Path) -> None:
    flip_a_byte(folder / EDGES / "orig_id.npy")
    store = open_parts(folder)
    with pytest.raises(PartitionError, match=r"orig_id.npy does not have the sha256"), checked_digests(store):
        raise AssertionError("the context was entered")


def test_a_restarted_process_does_not_compare_digests_again(folder, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(part_files, "_SETTLED_NS", 0)
    time.sleep(0.05)
    note = tmp_path / "run" / "digests.json"
    note.parent.mkdir()
    read = []
    monkeypatch.setattr(digest_check, "sha256_of", lambda path: read.append(path) or sha256_of(path))
    store = open_parts(folder, (0,))
    with checked_digests(store, note):
        pass
    assert sorted(read) == sorted(folder / path for path in store.files)
    read.clear()
    with checked_digests(store, note):
        pass
    assert not read
    flip_a_byte(folder / NODES / "v-1.0" / "attrs" / "half.npy")
    with pytest.raises(PartitionError, match=r"half.npy"), checked_digests(store, note):
        pass


def test_a_sound_folder_is_opened_alike_with_and_without_digests(sound: Path) -> None:
    assert content_digest(sound, True) == content_digest(sound, False)


def test_a_graph_server_compares_its_files_before_it_serves(folder: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(serve, "_catch_signals", lambda: (threading.Event(), threading.Event()))
    cluster = write_cluster(tmp_path / "cluster.json", (0, None, [0, 1]))
    serve_job = ServeJob(folder, (0, 1), "tcp://127.0.0.1:0", cluster, 0, tmp_path / "server.ready")
    flip_a_byte(folder / EDGES / "orig_id.npy")
    with pytest.raises(PartitionError, match=r"orig_id.npy does not have the sha256"):
        serve.serve(serve_job)
    assert not serve_job.ready_file.exists()
    monkeypatch.setattr(serve, "warm_up", lambda graph: sys.exit("goes on"))
    with pytest.raises(SystemExit, match="goes on"):
        serve.serve(replace(serve_job, digests=False))


def test_without_a_graph_server_the_first_rank_of_a_node_compares_digests(
    folder: Path, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.delenv("GNNFLEET_SERVER_READY", raising=False)
    train_job = TrainJob(TrainSettings(target="v-1.0"), folder, tmp_path)
    assert find_damage(train_job, Ranks()) is None
    flip_a_byte(folder / NODES / "v-1.0" / "attrs" / "half.npy")
    with pytest.raises(PartitionError, match=r"half.npy does not have the sha256"):
        train(train_job, Ranks())
    assert find_damage(replace(train_job, digests=False), Ranks()) is None
    assert find_damage(train_job, Ranks(rank=1, world_size=2, local_rank=1)) is None
    run = {"GNNFLEET_PARTS": str(folder), "GNNFLEET_PART_IDS": "0,1", "GNNFLEET_CLUSTER": ""}
    with pytest.raises(PartitionError, match=r"half.npy does not have the sha256"):
        open_any(environ=run)
    open_any(environ={**run, "GNNFLEET_DIGESTS": "0"}).close()
    open_any(environ={**run, "GNNFLEET_SERVER_READY": "/run/server.ready"}).close()
    open_any(folder).close()


def test_damage_found_by_one_rank_is_reported_by_all(folder: Path, tmp_path: Path) -> None:
    damaged, port = shutil.copytree(folder, tmp_path / "damaged"), free_port()
    flip_a_byte(damaged / NODES / "v-1.0" / "attrs" / "half.npy")
    jobs = [replace(job(parts, tmp_path), settings=TrainSettings(target="v-1.0")) for parts in (folder, damaged)]
    ranks = [start_rank([one], rank, 2, port, LOCAL_RANK="0") for rank, one in enumerate(jobs)]
    first, second = finish_all(ranks)
    assert first.returncode == second.returncode == 1
    assert "half.npy does not have the sha256" in second.output
    assert "error: rank 1 (node0" in first.output and "half.npy does not have the sha256" in first.output
