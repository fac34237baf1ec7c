"""Compares the opened files of a partition folder with the sha256 digests in its manifest, once per run.

This finds damage that does not change size or mtime of a file.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path

from trainer.core.errors import PartitionError
from trainer.store.part_files import FIX, FileNote, distrusting
from trainer.store.part_store import PartStore

_BLOCK = 4 << 20

_INDEXING = ("/indptr.npy", "/indices.npy", "/orig_id.npy", "/global_id.npy")  #: files that contain indices


@contextmanager
def checked_digests(store: PartStore, note: Path | None = None) -> Iterator[None]:
    """Compare every opened file with its sha256 in the manifest, with one thread per CPU.

    Files with ids and offsets are compared before the ``with`` block, all others while the block runs. The end of the
    block waits for them.

    Args:
        store: the opened parts.
        note: file that records what was compared, so that a restarted process skips it; None: no record.

    Raises:
        PartitionError: when a file does not match; the message names it. An exception of the block takes precedence.
    """
    noted = FileNote(note)
    left = [path for path in store.files if not noted.has(store.folder / path, path)]
    expected = {entry.path: entry.sha256 for entry in store.manifest.files}
    first = [path for path in left if path.endswith(_INDEXING)]
    rest = sorted(set(left).difference(first), key=lambda path: -(store.folder / path).stat().st_size)
    pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)), thread_name_prefix="digests")
    try:
        checks = {path: pool.submit(_check, store.folder / path, expected.get(path, "")) for path in [*first, *rest]}
        with distrusting(store.folder):
            _finish([checks[path] for path in first])
        yield
        with distrusting(store.folder):
            _finish(list(checks.values()))
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    noted.save()


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file, hex. Raises ``OSError``."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        block = memoryview(bytearray(_BLOCK))
        while count := file.readinto(block):
            digest.update(block[:count])
    return digest.hexdigest()


def _finish(checks: list[Future[None]]) -> None:
    for check in wait(checks, return_when=FIRST_EXCEPTION).done:
        check.result()


def _check(path: Path, expected: str) -> None:
    try:
        found = sha256_of(path)
    except OSError as error:
        raise PartitionError(f"{path} cannot be read: {error.strerror}; {FIX}") from error
    if found != expected:
        raise PartitionError(
            f"{path} does not have the sha256 {expected[:12]}… of the manifest: it was damaged or changed since it was"
            f" written; {FIX}"
        )
