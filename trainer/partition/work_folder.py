"""Stores intermediate results of ``partition make``, so that after an interruption the next call can continue."""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from trainer.core.errors import PartitionError
from trainer.core.files import write_whole

_LOCK = "lock"


class WorkFolder:
    """A hidden folder beside a partition folder with the intermediate results of ``partition make``.

    The work is divided into named stages, and the result of each finished stage is recorded.
    """

    def __init__(self, path: Path, folder: Path, fingerprint: str) -> None:
        self.path, self._folder, self._fingerprint = path, folder, fingerprint
        self._lock: TextIO | None = None
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
        """Unlock the folder. With ``delete``, delete it first."""
        if self._lock is not None:
            if delete:
                shutil.rmtree(self.path, ignore_errors=True)
            self._lock.close()

    def _open(self) -> None:
        if self._lock is None:
            # Not created earlier, as METIS ends at once on Ctrl-C, without cleaning up.
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(self.path / _LOCK, self._folder)
            _keep_if_same(self.path, self._fingerprint)

    def _record(self, stage: str) -> Path:
        return self.path / f"{stage}.done"


@contextmanager
def work_folder(folder: Path, fingerprint: str, keep: bool) -> Iterator[WorkFolder]:
    """Open the work folder of a partition folder for the ``with`` block, and delete it at the end and after errors.

    The work folder remains if the process is killed and, with ``keep``, after an interrupt (Ctrl-C). ``fingerprint``:
    identifies the work; results of other work are deleted first. Raises ``PartitionError`` if another process uses the
    work folder, and in place of any ``OSError``.
    """
    work = None
    try:
        work = WorkFolder(folder.with_name(f".{folder.name}.work"), folder, fingerprint)
        yield work
        work.close(delete=True)
    except BaseException as error:
        if work is not None:
            work.close(delete=isinstance(error, Exception) or not keep)
        if isinstance(error, OSError):
            place = error.filename or folder
            raise PartitionError(f"{place} cannot be written: {error.strerror or error}") from error
        raise


def _locked(path: Path, folder: Path) -> TextIO:
    lock = path.open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return lock
    except BlockingIOError:
        lock.close()
        raise PartitionError(f"another process is making the parts in {folder}; wait for it, or end it") from None


def _keep_if_same(path: Path, fingerprint: str) -> None:
    note = path / "fingerprint"
    if note.is_file() and note.read_text() == fingerprint:
        return
    for found in path.iterdir():
        if found.is_dir():
            shutil.rmtree(found)
        elif found.name != _LOCK:
            found.unlink()
    write_whole(note, fingerprint)
