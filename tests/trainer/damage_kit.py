"""Damages files of a small partition folder, then samples and gathers from it.

Run ``damage`` in a process of its own: compiled code that reads a damaged file could crash the process.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import shutil
import time
from pathlib import Path

import numpy as np

from partition_kit import odd_types, with_nodes
from trainer.core.errors import TrainerError
from trainer.partition.methods.assign import assign_parts
from trainer.partition.write import write_partition
from trainer.sampler.local_graph import LocalGraph
from trainer.sampler.types import HopRequest, RowRequest, TimeBound
from trainer.store.digest_check import checked_digests
from trainer.store.part_store import EndpointTable, open_parts

HEADER = 128  #: bytes of the .npy headers in this folder


def small_folder(folder: Path) -> Path:
    dataset = odd_types()
    tag = dataset.nodes["tag"]
    wide = np.random.default_rng(1).random((5, 70), np.float32)
    dataset = with_nodes(dataset, "tag", attrs={**tag.attrs, "wide": wide})
    write_partition(dataset, assign_parts(dataset, 2, "random", 0), folder, "int8")
    return folder


def content_digest(folder: Path, digests: bool) -> str:
    """Sample and gather from the folder, and return a digest of the answers.

    digests: whether to compare the files with the digests in the manifest first.
    """
    store = open_parts(folder, (0,), "replicated")
    if digests:
        with checked_digests(store):
            pass
    total = hashlib.sha256()
    for array in _answers(LocalGraph(store)):
        total.update(f"{array.dtype} {array.shape}".encode() + array.tobytes())
    return total.hexdigest()


def _answers(graph: LocalGraph):
    manifest = graph.store.manifest
    for of, nodes in manifest.nodes.items():
        own = np.arange(*graph.books[of].range_of(0))
        yield from graph.gather([RowRequest(of, own, ("orig_id", "in_degree", *nodes.attrs))])[0].values()
        yield from (graph.store.to_global(of, np.asarray(graph.store.seeds(of, split))) for split in nodes.splits)
    for of, edges in manifest.edges.items():
        own = np.arange(*graph.books[of].range_of(0))
        yield from graph.gather([RowRequest(of, own, ("orig_id", *edges.attrs))])[0].values()
        targets = np.arange(manifest.nodes[of[2]].num_nodes)
        whole = HopRequest(of, targets, -1, 1, 0, with_edge=True, trees=targets)
        asked = [whole, HopRequest(of, targets, 2, 1, 5, with_edge=True)]
        if "weight" in edges.attrs:
            asked.append(HopRequest(of, targets, 2, 1, 5, with_edge=True, weight="weight"))
        for name in edges.src_times:
            bound = TimeBound(targets, name, "node")
            asked.append(HopRequest(of, targets, 2, 1, 5, with_edge=True, trees=targets, bound=bound))
        for sample in graph.sample_hops(asked):
            yield from (sample.counts, sample.src, sample.edge)
        yield graph.has_edges(of, targets, np.zeros_like(targets))
        yield from graph.endpoints(of, np.arange(*graph.books[EndpointTable(of)].range_of(0)))


class Damage:
    """Random damage to a random file of ``folder``, determined by ``seed``."""

    def __init__(self, seed: int, folder: Path):
        self.rng = np.random.default_rng(seed)
        self.files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
        self.path, self.other = (self.files[int(self.rng.integers(len(self.files)))] for _ in range(2))
        self.how = str(self.rng.choice([name for name in dir(self) if name.startswith("do_")]))

    def __str__(self) -> str:
        return f"{self.how} {self.path.name} {self.other.name}"

    def apply(self) -> None:
        """Damage the file but keep its access and modification times."""
        before = os.stat(self.path)
        getattr(self, self.how)()
        if os.path.isfile(self.path) and not self.path.is_symlink():
            os.utime(self.path, ns=(before.st_atime_ns, before.st_mtime_ns))

    def do_truncate(self) -> None:
        os.truncate(self.path, int(self.rng.integers(self.path.stat().st_size)))

    def do_extend(self) -> None:
        with open(self.path, "ab") as file:
            file.write(self.rng.bytes(int(self.rng.integers(1, 200))))

    def do_flip(self) -> None:
        self._flip(0, self.path.stat().st_size)

    def do_flip_header(self) -> None:
        self._flip(0, HEADER)

    def do_flip_data(self) -> None:
        self._flip(HEADER, self.path.stat().st_size)

    def do_extreme(self) -> None:
        values = [2**31 - 1, -1, 2**63 - 1, -(2**63), 0x7FF0000000000000, 0x7FC000007FC00000, 0x7F8000007F800000]
        size = self.path.stat().st_size
        if size >= HEADER + 8:
            with open(self.path, "r+b") as file:
                file.seek(HEADER + int(self.rng.integers((size - HEADER) // 8)) * 8)
                file.write(np.int64(self.rng.choice(values)).tobytes())

    def do_header_word(self) -> None:
        words = [
            (b"<i8", b"<f8"),
            (b"<i8", b"<u8"),
            (b"<i8", b">i8"),
            (b"<i4", b"<f4"),
            (b"<f4", b"<i4"),
            (b"<i4", b"<i2"),
        ]
        words += [(b"<i8", b"|O8"), (b"<f4", b">f4"), (b"False", b"True "), (b"(", b"["), (b"}", b" "), (b",)", b"0)")]
        data = self.path.read_bytes()
        old, new = words[int(self.rng.integers(len(words)))]
        self.path.write_bytes(data[:HEADER].replace(old, new, 1) + data[HEADER:])

    def do_swap(self) -> None:
        mine, others = self.path.read_bytes(), self.other.read_bytes()
        self.path.write_bytes(others)
        self.other.write_bytes(mine)

    def do_copy(self) -> None:
        self.path.write_bytes(self.other.read_bytes())

    def do_link(self) -> None:
        self._replace()
        self.path.symlink_to(self.other)

    def do_link_loop(self) -> None:
        self._replace()
        self.path.symlink_to(self.path)

    def do_folder(self) -> None:
        self._replace()
        self.path.mkdir()

    def do_pipe(self) -> None:
        self._replace()
        os.mkfifo(self.path)

    def do_delete(self) -> None:
        self._replace()

    def do_empty(self) -> None:
        self.path.write_bytes(b"")

    def do_other_dtype(self) -> None:
        if self.path.suffix == ".npy":
            kinds = ["int8", "int16", "int32", "int64", "uint32", "float16", "float32", "float64", "bool", "U3"]
            np.save(self.path, np.load(self.path).astype(self.rng.choice(kinds)))

    def do_other_shape(self) -> None:
        if self.path.suffix == ".npy":
            array = np.load(self.path)
            shapes = [array.T, array.reshape(-1), array[None], array[..., None], array[:-1], np.asfortranarray(array)]
            np.save(self.path, shapes[int(self.rng.integers(len(shapes)))])

    def do_archive(self) -> None:
        buffer = io.BytesIO()
        np.savez(buffer, a=np.arange(3))
        self.path.write_bytes(buffer.getvalue())

    def do_pickle(self) -> None:
        self.path.write_bytes(pickle.dumps([1, 2]))

    def _flip(self, begin: int, end: int) -> None:
        if begin >= end:
            return
        with open(self.path, "r+b") as file:
            for at in self.rng.integers(begin, end, int(self.rng.integers(1, 4))).tolist():
                file.seek(at)
                (byte,) = file.read(1) or b"\0"
                file.seek(at)
                file.write(bytes([byte ^ 1 << int(self.rng.integers(8))]))

    def _replace(self) -> None:
        self.path.unlink()


def damage(sound: Path, work: Path, seed: int, seconds: float) -> None:
    """Damage, read and restore ``work``, a copy of the folder ``sound``, for ``seconds``.

    Prints each case, then ``done``, the number of cases, and how many the digest check refused. Raises
    ``AssertionError`` if the check misses a wrong row.
    """
    shutil.copytree(sound, work)
    right, until, tried, refused = content_digest(work, True), time.monotonic() + seconds, 0, 0
    while time.monotonic() < until:
        number = seed + tried
        case = Damage(number, work)
        print(number, case, flush=True)
        case.apply()
        try:
            content_digest(work, False)  # rows may be wrong, but no kernel may read beyond its arrays
        except TrainerError as error:
            assert str(error)
        try:
            changed = content_digest(work, True) != right
            assert not changed or case.path.name == "manifest.json", "a wrong row"
        except TrainerError:
            refused += 1
        tried += 1
        _restore(sound, work, case)
    assert content_digest(work, True) == right
    print(f"done {tried} {refused}", flush=True)


def _restore(sound: Path, work: Path, case: Damage) -> None:
    for path in {case.path, case.other}:
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)
    for path in {case.path, case.other}:
        shutil.copy2(sound / path.relative_to(work), path)
