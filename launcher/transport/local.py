"""Nodes on the launching machine, without SSH: commands are subprocesses in their own session."""

from __future__ import annotations

import math
import os
import signal
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from launcher.command import Command, shell_line
from launcher.errors import RemoteFileError
from launcher.files import atomic_file
from launcher.transport.base import OnBytes
from launcher.transport.process import PipeProcess, Process, ProcessTransport

_CHUNK = 1 << 20

_KILL_AFTER = 1.0  # seconds between SIGTERM and SIGKILL


class LocalTransport(ProcessTransport):
    """A node on the launching machine. It needs no connection: ``connect`` and ``close`` do nothing."""

    target = "local"

    def __init__(self, node_rank: int | None = None):
        self.node_rank = node_rank

    def connect(self, timeout: float) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""

    def _begin(self, command: Command, deadline: float) -> Process:
        return LocalProcess(command)

    def _kill(self, process: Process) -> None:
        process.close()

    def upload(self, source: Path, dest: str, *, offset: int = 0, on_bytes: OnBytes | None = None) -> None:
        path = Path(dest).expanduser()
        with source.open("rb") as src, self._file_errors("write", dest):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("r+b" if offset else "wb") as out:
                src.seek(offset)
                out.seek(offset)
                _copy(src, out, on_bytes)

    def write(self, data: bytes, dest: str, *, mode: int = 0o644) -> None:
        path = Path(dest).expanduser()
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
        with self._file_errors("write", dest):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                # opened with its final mode, so that a secret is never readable by others
                with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as out:
                    os.fchmod(out.fileno(), mode)
                    out.write(data)
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)

    def download(self, source: str, dest: Path, *, most: int | None = None, on_bytes: OnBytes | None = None) -> None:
        with self._file_errors("read", source):
            src = Path(source).expanduser().open("rb")
        with src, atomic_file(dest) as out:
            _copy(src, out, on_bytes, most)

    @contextmanager
    def _file_errors(self, verb: str, path: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RemoteFileError(
                f"cannot {verb} {error.filename or path}: {error.strerror}",
                errno=error.errno,
                host=self.target,
                node_rank=self.node_rank,
            ) from error


class LocalProcess(PipeProcess):
    """A command on the launching machine, in a process group of its own."""

    def __init__(self, command: Command):
        super().__init__(["/bin/sh", "-c", shell_line(command)], Path.home())
        self.pid = self.process.pid

    def close(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self.status is None:
                os.killpg(self.pid, number)
                self.await_status(_KILL_AFTER)
        super().close()


def _copy(src: BinaryIO, out: BinaryIO, on_bytes: OnBytes | None, most: int | None = None) -> None:
    left = math.inf if most is None else most
    while data := src.read(int(min(_CHUNK, left))):
        out.write(data)
        left -= len(data)
        if on_bytes:
            on_bytes(len(data))
