"""Nodes on this machine, without sshd: commands are subprocesses in their own session."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import tempfile
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from launcher.command import Command, shell_line
from launcher.errors import CommandTimeout, RemoteFileError
from launcher.files import appearing
from launcher.transport.base import Completed, OnBytes, OnLine, Talk, Transport
from launcher.transport.lines import LineSplitter
from launcher.transport.talks import PipeTalk

_CHUNK = 1 << 20

_KILL_AFTER = 1.0  # seconds a stopped command gets between SIGTERM and SIGKILL


class LocalTransport(Transport):
    """A node on this machine. Nothing is kept open, so ``connect`` and ``close`` do nothing."""

    target = "local"

    def __init__(self, node_rank: int | None = None):
        self.node_rank = node_rank

    def connect(self, timeout: float) -> None:
        """Nothing to open."""

    def close(self) -> None:
        """Nothing to close."""

    def run(self, command: Command, *, stdin: bytes = b"", timeout: float) -> Completed:
        process = _start(command)
        try:
            stdout, stderr = process.communicate(stdin, timeout=timeout)
        except subprocess.TimeoutExpired:
            raise CommandTimeout(
                f"`{command.argv[0]}` did not end within {timeout:g} s", host=self.target, node_rank=self.node_rank
            ) from None
        finally:
            _end(process)
        return Completed(process.returncode, stdout, stderr)

    def stream(self, command: Command, on_line: OnLine, stop: threading.Event) -> int:
        process = _start(command, stderr=subprocess.DEVNULL)
        lines = LineSplitter(on_line)
        try:
            for data in _chunks(process, stop):
                lines.feed(data)
            lines.finish()
            return -1 if stop.is_set() else process.wait()
        finally:
            _end(process)

    def talk(self, command: Command) -> Talk:
        stderr = tempfile.TemporaryFile()
        return PipeTalk(_start(command, stderr.fileno()), stderr, _end, command.argv[0], self.node_rank)

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
        beside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
        with self._file_errors("write", dest):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                # opened with its final mode, so that a secret is never readable by others
                with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as out:
                    os.fchmod(out.fileno(), mode)
                    out.write(data)
                beside.replace(path)
            finally:
                beside.unlink(missing_ok=True)

    def download(self, source: str, dest: Path, *, on_bytes: OnBytes | None = None) -> None:
        with self._file_errors("read", source):
            src = Path(source).expanduser().open("rb")
        with src, appearing(dest) as out:
            _copy(src, out, on_bytes)

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


def _start(command: Command, stderr: int = subprocess.PIPE) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        ["/bin/sh", "-c", shell_line(command)],
        cwd=Path.home(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        start_new_session=True,  # its own process group, so that all of it can be ended
    )


def _chunks(process: subprocess.Popen[bytes], stop: threading.Event) -> Iterator[bytes]:
    """Stdout as it comes, until end of file or ``stop``."""
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while not stop.is_set():
            if not selector.select(timeout=0.1):
                continue
            data = os.read(process.stdout.fileno(), 65536)
            if not data:
                return
            yield data


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the group of a command that still runs: SIGTERM, then SIGKILL; close its pipes."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            break
        os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_KILL_AFTER)
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with suppress(BrokenPipeError):
                pipe.close()


def _copy(src: BinaryIO, out: BinaryIO, on_bytes: OnBytes | None) -> None:
    while data := src.read(_CHUNK):
        out.write(data)
        if on_bytes:
            on_bytes(len(data))
