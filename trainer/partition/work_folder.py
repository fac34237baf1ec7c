"""Intermediate results of ``partition make`` on disk, with which the next run goes on after an interruption."""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainer.core.errors import PartitionError
from trainer.core.files import write_whole

_LOCK = "lock"


class WorkFolder:
    """A hidden folder beside a partition folder, for one run at a time.

    A stage's result is recorded when the stage is finished, so a killed run loses the stage that it was in.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def folder(self, name: str) -> Path:
        """Return a folder of this name inside; it may contain what an interrupted run has left."""
        path = self.path / name
        path.mkdir(exist_ok=True)
        return path

    def emptied(self, name: str) -> Path:
        """Return an empty folder of this name inside."""
        shutil.rmtree(self.path / name, ignore_errors=True)
        return self.folder(name)

    def stages_done(self) -> list[str]:
        """Return the names of the finished stages, in the order of their ends."""
        found = sorted(self.path.glob("*.done"), key=lambda path: path.stat().st_mtime_ns)
        return [path.name.removesuffix(".done") for path in found]

    def is_done(self, stage: str) -> bool:
        """Return whether a stage is finished."""
        return self._record(stage).exists()

    def once(self, stage: str, run: Callable[[], Any]) -> Any:
        """Return the result of a finished stage, or run it and record its result, a JSON value."""
        if not self.is_done(stage):
            write_whole(self._record(stage), json.dumps(run()), sync=True)
        return json.loads(self._record(stage).read_text())

    def _record(self, stage: str) -> Path:
        return self.path / f"{stage}.done"


@contextmanager
def work_folder(folder: Path, fingerprint: str, keep: bool) -> Iterator[WorkFolder]:
    """Open the work folder of a partition folder. It is deleted at the end and on errors.

    A killed process leaves it; so does an interrupt (Ctrl-C) if ``keep``.

    What another partition's interrupted run has left is deleted first. Raises ``PartitionError`` if another process
    uses the work folder, or the disk cannot be written.
    """
    path = folder.with_name(f".{folder.name}.work")
    try:
        path.mkdir(parents=True, exist_ok=True)
        with (path / _LOCK).open("w") as lock:
            _take(lock, folder)
            try:
                _keep_if_same(path, fingerprint)
                yield WorkFolder(path)
            except BaseException as error:
                if isinstance(error, Exception) or not keep:
                    shutil.rmtree(path, ignore_errors=True)
                raise
            shutil.rmtree(path)
    except OSError as error:
        raise PartitionError(f"{error.filename or path} cannot be written: {error.strerror or error}") from error


def _take(lock: Any, folder: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
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
