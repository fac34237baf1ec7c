"""Stores intermediate results of ``partition make``, so that after an interruption the next call can continue."""

from __future__ import annotations

import fcntl
import getpass
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from trainer.core.errors import PartitionError
from trainer.core.files import write_whole


class WorkFolder:
    """A hidden folder beside a partition folder with the intermediate results of ``partition make``.

    The work is divided into named stages, and the result of each finished stage is recorded.
    """

    def __init__(self, path: Path, fingerprint: str) -> None:
        self.path, self._fingerprint = path, fingerprint
        self._opened = False
        if path.is_dir():
            self._open()

    def folder(self, name: str) -> Path:
        """Return the subfolder ``name``, created if missing. It may contain files of an interrupted call."""
        self._open()
        path = self.path / name
        path.mkdir(exist_ok=True)
        return path

    def emptied(self, name: str) -> Path:
        self._open()
        shutil.rmtree(self.path / name, ignore_errors=True)
        return self.folder(name)

    def stages_done(self) -> list[str]:
        """Return the names of the finished stages, in the order in which they finished."""
        found = sorted(self.path.glob("*.done"), key=lambda path: path.stat().st_mtime_ns)
        return [path.name.removesuffix(".done") for path in found]

    def is_done(self, stage: str) -> bool:
        return self._record(stage).exists()

    def once(self, stage: str, run: Callable[[], Any]) -> Any:
        """Return the recorded result of a stage. If the stage is not finished, call ``run`` and record its result.

        The result must be serialisable as JSON.
        """
        if not self.is_done(stage):
            result = json.dumps(run())
            self._open()
            write_whole(self._record(stage), result, sync=True)
        return json.loads(self._record(stage).read_text())

    def close(self, delete: bool) -> None:
        if self._opened and delete:
            shutil.rmtree(self.path, ignore_errors=True)

    def _open(self) -> None:
        if self._opened:
            return
        # Not created earlier, as METIS ends at once on Ctrl-C, without cleaning up.
        self.path.mkdir(parents=True, exist_ok=True)
        self._opened = True
        note = self.path / "fingerprint"
        if note.is_file() and note.read_text() == self._fingerprint:
            return
        for found in self.path.iterdir():
            if found.is_dir():
                shutil.rmtree(found)
            else:
                found.unlink()
        write_whole(note, self._fingerprint)

    def _record(self, stage: str) -> Path:
        return self.path / f"{stage}.done"


@contextmanager
def work_folder(folder: Path, fingerprint: str, keep: bool) -> Iterator[WorkFolder]:
    """Open the work folder of a partition folder for the ``with`` block, and delete it at the end and after errors.

    The work folder remains if the process is killed and, with ``keep``, after an interrupt (Ctrl-C). ``fingerprint``:
    identifies the work; results of other work are deleted first. Must be called in ``locked``. Raises
    ``PartitionError`` in place of any ``OSError``.
    """
    work = None
    try:
        work = WorkFolder(folder.with_name(f".{folder.name}.work"), fingerprint)
        yield work
        work.close(delete=True)
    except BaseException as error:
        if work is not None:
            work.close(delete=isinstance(error, Exception) or not keep)
        if isinstance(error, OSError):
            place = error.filename or folder
            raise PartitionError(f"{place} cannot be written: {error.strerror or error}") from error
        raise


@contextmanager
def locked(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Keep other processes from making the partition ``folder`` during the ``with`` block.

    Waits for a process that makes these parts, and for launches that send them (launcher/sync/parts_store.py); ``say``
    is then called with a line that names it. The lock is a file beside the folder, deleted at the end.
    """
    path = folder.with_name(f".{folder.name}.lock")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = _lock(path, lambda who: say(f"{who} makes or sends the parts in {folder}; waiting for it"))
    except OSError:  # such as a read-only folder, where nobody can make parts
        yield
        return
    with lock:
        lock.truncate(0)
        lock.write(f"{getpass.getuser()}@{socket.gethostname()}, pid {os.getpid()}")
        lock.flush()
        try:
            yield
        finally:
            with suppress(OSError):
                path.unlink()


def _lock(path: Path, on_wait: Callable[[str], None]) -> TextIO:
    waited = False
    while True:
        lock = path.open("a+")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not waited:
                on_wait(path.read_text()[:200] or "another process")
            waited = True
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            lock.close()
            raise
        if path.exists() and os.path.samestat(os.fstat(lock.fileno()), os.stat(path)):
            return lock
        lock.close()  # its last holder has deleted it
