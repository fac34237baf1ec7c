"""Fetches files of a partition folder from a store into a local folder; resumes an interrupted fetch.

Chunks of several files are read ahead in parallel and written in order, so that ``<file>.part`` never has gaps and its
size says where to continue. A complete file is renamed once its digest matches the manifest.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError
from contextlib import contextmanager
from typing import Any, BinaryIO, NamedTuple

from launcher.node.exit_description import size
from launcher.node.programs.files import PART_SUFFIX, commit, disk, inventory
from launcher.node.remote_folder import NotStored, RemoteFolder, StoreError
from launcher.node.store.progress_lines import ProgressLines

CHUNK = 4 << 20  # bytes per request

_AHEAD = 16  # chunks that are requested at the same time

_STALLED = 300.0  # seconds without a byte from the store after which a fetch fails

_PAUSES = (0.5, 2.0, 5.0, 10.0)  # seconds before a chunk is requested again

_BATCH = 64 << 20  # bytes of files whose digests are checked together

_LOCK = ".gnnfleet-fetch.lock"

MANIFEST = "manifest.json"


class StoredFile(NamedTuple):
    path: str  #: relative to the partition folder
    bytes: int
    sha256: str


class _Chunk(NamedTuple):
    file: StoredFile
    start: int
    end: int


def fetch(store: RemoteFolder, folder: str, files: list[StoredFile], lines: ProgressLines) -> int:
    """Fetch ``files`` into ``folder``, except complete files with the right digest; return how many were fetched.

    The manifest is fetched last, so a folder with a manifest is complete. Waits while another process fetches into
    ``folder``. Raises StoreError and OSError.
    """
    os.makedirs(folder, exist_ok=True)
    with _locked(folder, lines):
        states = inventory([_entry(folder, file) for file in files], folder)
        missing = [(file, state) for file, state in zip(files, states, strict=True) if state["state"] != "present"]
        todo = [(file, int(state["have"]) if state["state"] == "partial" else 0) for file, state in missing]
        todo.sort(key=lambda item: item[0].path == MANIFEST)
        need = sum(file.bytes - have for file, have in todo)
        lines.put("start", bytes=need, present=sum(file.bytes for file in files) - need)
        free = disk(folder)["free"]
        if free < need:
            raise StoreError(
                f"disk full at {folder}: {size(need)} still to be fetched, {size(free)} free. Make room or choose "
                "another workdir, then run again to resume"
            )
        last = [item for item in todo if item[0].path == MANIFEST]
        for group in (todo[: len(todo) - len(last)], last):
            for file, error in _Transfer(store, folder, lines).run(group):
                lines.add(-file.bytes)
                for _, again in _Transfer(store, folder, lines).run([(file, 0)]):
                    raise StoreError(
                        f"{store.url}/{file.path}: {again or error}, in two transfers: the file in the store is "
                        "damaged; push the parts again with `gnnfleet partition push --config FILE --force`"
                    )
        return len(todo)


class _Transfer:
    """Reads chunks ahead in threads, appends them to the .part files, and checks and renames complete files."""

    def __init__(self, store: RemoteFolder, folder: str, lines: ProgressLines):
        self.store, self.folder, self.lines = store, folder, lines
        lines.add(0)
        self._complete: list[StoredFile] = []

    def run(self, files: list[tuple[StoredFile, int]]) -> list[tuple[StoredFile, str]]:
        """Fetch the rest of each file; return the files whose digest is wrong, each with the reason.

        files: each with the byte at which to continue.
        """
        reads, checks = ThreadPoolExecutor(_AHEAD), ThreadPoolExecutor(1)
        try:
            pending: list[Future[list[tuple[StoredFile, str]]]] = []
            for chunk, data in self._read_ahead(reads, _chunks(files)):
                path = f"{self.folder}/{chunk.file.path}{PART_SUFFIX}"
                os.makedirs(os.path.dirname(path), exist_ok=True)
                with open(path, "r+b" if chunk.start else "wb") as out:
                    out.seek(chunk.start)
                    out.write(data)
                if chunk.end == chunk.file.bytes:
                    self._complete.append(chunk.file)
                if sum(file.bytes for file in self._complete) >= _BATCH:
                    pending.append(checks.submit(self._commit, self._taken()))
            pending.append(checks.submit(self._commit, self._taken()))
            return [wrong for each in pending for wrong in each.result()]
        finally:
            reads.shutdown(wait=False, cancel_futures=True)
            checks.shutdown(wait=False, cancel_futures=True)

    def _read_ahead(self, pool: ThreadPoolExecutor, chunks: Iterator[_Chunk]) -> Iterator[tuple[_Chunk, bytes]]:
        waiting: deque[tuple[_Chunk, Future[bytes]]] = deque()
        for chunk in chunks:
            waiting.append((chunk, pool.submit(self._read, chunk)))
            if len(waiting) == _AHEAD:
                yield self._next(waiting)
        while waiting:
            yield self._next(waiting)

    def _next(self, waiting: deque[tuple[_Chunk, Future[bytes]]]) -> tuple[_Chunk, bytes]:
        chunk, future = waiting.popleft()
        while True:
            try:
                return chunk, future.result(timeout=1.0)
            except TimeoutError:
                if time.monotonic() - self.lines.active > _STALLED:
                    raise StoreError(
                        f"no data from {self.store.url} for {_STALLED:.0f} s; check the network to the store, then run "
                        "again to resume"
                    ) from None

    def _read(self, chunk: _Chunk) -> bytes:
        if chunk.start == chunk.end:
            return b""
        for pause in (*_PAUSES, None):
            try:
                data = self.store.read(chunk.file.path, chunk.start, chunk.end)
                if len(data) != chunk.end - chunk.start:
                    raise StoreError(
                        f"{self.store.url}/{chunk.file.path} has fewer bytes than its manifest says "
                        f"({chunk.start + len(data)} of {chunk.file.bytes}); push the parts again with `gnnfleet "
                        "partition push --config FILE --force`",
                        retry=True,
                    )
                self.lines.add(len(data))
                return data
            except NotStored:
                raise StoreError(
                    f"{self.store.url}/{chunk.file.path} is missing in the store, but its manifest lists it; push the "
                    "parts again with `gnnfleet partition push --config FILE --force`"
                ) from None
            except StoreError as error:
                if pause is None or not error.retry:
                    raise
                time.sleep(pause)
        raise AssertionError

    def _taken(self) -> list[StoredFile]:
        taken, self._complete = self._complete, []
        return taken

    def _commit(self, files: list[StoredFile]) -> list[tuple[StoredFile, str]]:
        answers = commit([_entry(self.folder, file) for file in files])
        self.lines.add(0)  # hashing is progress, too
        return [(file, answer["error"]) for file, answer in zip(files, answers, strict=True) if answer["error"]]


def _chunks(files: list[tuple[StoredFile, int]]) -> Iterator[_Chunk]:
    for file, have in files:
        starts = range(have, file.bytes, CHUNK) if have < file.bytes else (have,)
        for start in starts:
            yield _Chunk(file, start, min(start + CHUNK, file.bytes))


def _entry(folder: str, file: StoredFile) -> dict[str, Any]:
    return {"path": f"{folder}/{file.path}", "bytes": file.bytes, "sha256": file.sha256}


@contextmanager
def _locked(folder: str, lines: ProgressLines) -> Iterator[None]:
    with open(os.path.join(folder, _LOCK), "ab") as file:
        wait_for_lock(file, lambda: lines.put("note", text="another launch is fetching the same parts; waiting for it"))
        yield


def wait_for_lock(file: BinaryIO, on_wait: Any) -> None:
    """Lock an open file exclusively until it is closed; call ``on_wait`` if another process holds the lock."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        on_wait()
        fcntl.flock(file, fcntl.LOCK_EX)
