"""Transfers files to one node: resumes broken transfers, reconnects, checks a file's digest before renaming it."""

from __future__ import annotations

import errno
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from rich.filesize import decimal

from launcher.command import Command
from launcher.errors import ConnectionLost, FleetError, RemoteFileError, SyncError, UnreachableError
from launcher.node.programs.files import PART_SUFFIX, sha256_of
from launcher.plan.model import PlannedFile
from launcher.plan.partition import PartFile
from launcher.sync.progress import TransferProgress
from launcher.transport.base import Transport
from launcher.transport.rpc import call

_BACK_OFF = (0.5, 2.0, 5.0, 10.0)  # seconds before each attempt to reconnect

_OTHERS_PAUSES = (0.2, 0.5, 1.0, 0.0)  #: seconds between checks whether another run has sent a file

_SLOWEST_DISK = 20e6  # bytes per second; a node that reads and hashes files more slowly is given up

_CALL_TIMEOUT = 60.0  # seconds

_LARGE = 64 << 20  # bytes; larger files are committed one at a time, so that progress shows during hashing


class _Receiver(Protocol):
    """The node to which files are sent, such as a ``NodePlan``."""

    @property
    def node_rank(self) -> int: ...

    @property
    def label(self) -> str:
        """Name of the node in messages."""

    @property
    def python(self) -> Command:
        """Command that starts a Python on the node."""


@dataclass(frozen=True)
class NodeSync:
    """Result of the transfer to one node."""

    node_rank: int
    files_sent: int
    bytes_sent: int
    bytes_present: int  #: bytes of files that the node already had
    seconds: float
    bytes_fetched: int = 0  #: bytes that the node read from ``data.store``


class Stopped(FleetError):
    """A transfer was stopped, because another one failed or by Ctrl-C."""

    exit_status = 130


class FileTransfer(ABC):
    """The transfer of files to one node; ``send_all`` of a subclass says which files.

    ``stop``: event that ends the transfer, with ``Stopped``. ``connect_timeout``: seconds.
    """

    def __init__(
        self,
        node: _Receiver,
        transport: Transport,
        progress: TransferProgress,
        stop: threading.Event,
        connect_timeout: float,
    ):
        self.receiver, self.transport = node, transport
        self.progress, self.stop, self.connect_timeout = progress, stop, connect_timeout
        self.files_sent = self.bytes_sent = self.bytes_present = self.bytes_fetched = 0
        self.current = "its files"

    @abstractmethod
    def send_all(self) -> None:
        """Send what is missing on the node. Called again after the connection broke."""

    def run(self) -> NodeSync:
        """Send all files of the node, and reconnect when the connection breaks."""
        started = time.monotonic()
        failures, sent_before = 0, 0
        while True:
            try:
                self.send_all()
                break
            except (ConnectionLost, UnreachableError) as error:
                if self.stop.is_set():
                    raise Stopped("stopped") from error
                sent = self.bytes_sent + self.bytes_fetched
                failures = 1 if sent > sent_before else failures + 1
                sent_before = sent
                self._reconnect(failures, error)
        seconds = time.monotonic() - started
        sent, present, fetched = self.bytes_sent, self.bytes_present, self.bytes_fetched
        return NodeSync(self.receiver.node_rank, self.files_sent, sent, present, seconds, fetched)

    def _reconnect(self, failures: int, error: FleetError) -> None:
        if failures > len(_BACK_OFF):
            raise self.error(
                f"{self.current}: the connection broke {failures} times in a row; run again to resume ({error})"
            ) from error
        self.progress.note(self.receiver.node_rank, f"connection lost while sending {self.current}; trying again")
        if self.stop.wait(_BACK_OFF[failures - 1]):
            raise Stopped("stopped")
        try:
            self.transport.connect(self.connect_timeout)
        except (ConnectionLost, UnreachableError) as again:
            self._reconnect(failures + 1, again)

    def inventory(self, files: Sequence[PlannedFile], folders: Sequence[str] = (), below: str = "") -> dict[str, Any]:
        """Ask the node which ``files`` and ``folders`` it has; return the reply of ``node/programs/files.py``.

        below: folder in which the node deletes what is no file but stands in the place of one.
        """
        entries = [_entry_of(file) for file in files]
        request = {"op": "inventory", "files": entries, "folders": list(folders), "below": below}
        return self.ask(request, hash_time(files))

    def send_files(self, found: Sequence[tuple[PlannedFile, dict[str, Any]]]) -> None:
        """Upload missing files, resuming partial ones; the manifest gets its final name after all other files.

        ``found``: each file with its state in the reply of ``inventory``.
        """
        missing = [(file, state) for file, state in found if state["state"] != "present"]
        todo = [(file, int(state["have"]) if state["state"] == "partial" else 0) for file, state in missing]
        need = sum(file.bytes - have for file, have in todo)
        self.bytes_present = sum(file.bytes for file, _ in found) - sum(file.bytes for file, _ in todo)
        self.progress.start(self.receiver.node_rank, need)
        if todo:
            self._check_room(need, str(PurePosixPath(todo[0][0].dest).parent))
        waiting: list[PlannedFile] = []
        for file, have in todo:
            if is_manifest(file) or file.bytes >= _LARGE:
                self._commit(waiting)
                waiting = []
            self._upload(file, have)
            waiting.append(file)
        self._commit(waiting)

    def _commit(self, files: list[PlannedFile]) -> None:
        """Let the node check and rename uploaded files. Send a file with a wrong digest once more."""
        for file, error in self._commit_once(files):
            if sha256_of(file.source) != file.sha256:
                raise SyncError(
                    f"{file.source} on this machine differs from its manifest (damaged, or changed after "
                    f"partitioning), so {self.receiver.label} rejected it. Delete the partition folder and run again"
                )
            self.progress.start(self.receiver.node_rank, file.bytes)
            self._upload(file, 0)
            if self._commit_once([file]) and not self._is_there(file):
                raise self.error(
                    f"{file.dest}: {error}, in two transfers; check disk and memory of the host, and the network to it"
                )
        self.files_sent += len(files)

    def _commit_once(self, files: list[PlannedFile]) -> list[tuple[PlannedFile, str]]:
        if not files:
            return []
        request = {"op": "commit", "files": [{**_entry_of(file), "mode": file.mode} for file in files]}
        answers = self.ask(request, hash_time(files))["files"]
        return [(file, answer["error"]) for file, answer in zip(files, answers, strict=True) if answer["error"]]

    def _upload(self, file: PlannedFile, offset: int) -> None:
        self.check_stop()
        self.current = file.dest
        try:
            self.transport.upload(Path(file.source), file.dest + PART_SUFFIX, offset=offset, on_bytes=self._count)
        except RemoteFileError as error:
            if error.errno != errno.ENOSPC and self._is_there(file):
                return  # another run has sent the same file at the same time and renamed the .part file
            self._check_room(
                file.bytes - offset, str(PurePosixPath(file.dest).parent), full=error.errno == errno.ENOSPC
            )
            raise self.error(f"{file.dest}: {error.message}") from error
        except FileNotFoundError as error:
            raise SyncError(
                f"{file.source} is missing on this machine, and {self.receiver.label} needs "
                "it. If it belongs to a partition, delete the partition folder and run again"
            ) from error

    def _is_there(self, file: PlannedFile) -> bool:
        """Whether the node has the complete file. Waits up to two seconds, as another run may be sending it."""
        for pause in _OTHERS_PAUSES:
            if self.inventory([file])["files"][0]["state"] == "present":
                return True
            self.stop.wait(pause)
        return False

    def _check_room(self, need: int, folder: str, full: bool = False) -> None:
        disk = self.ask({"op": "disk", "path": folder})
        if full or disk["free"] < need:
            raise self.error(
                f"disk full at {folder}: {decimal(need)} still to be sent, {decimal(disk['free'])} free. "
                "Make room or choose another workdir, then run again to resume"
            )

    def _count(self, count: int) -> None:
        self.bytes_sent += count
        self.advance(count)

    def advance(self, count: int) -> None:
        self.progress.advance(self.receiver.node_rank, count)
        self.check_stop()

    def check_stop(self) -> None:
        if self.stop.is_set():
            raise Stopped("stopped")

    def ask(self, request: dict[str, Any], timeout: float = _CALL_TIMEOUT) -> dict[str, Any]:
        self.check_stop()
        return ask_files(self.transport, self.receiver, request, timeout)

    def error(self, message: str) -> SyncError:
        return SyncError(f"{self.receiver.label}: {message}")


def ask_files(transport: Transport, node: _Receiver, request: dict[str, Any], timeout: float) -> dict[str, Any]:
    """Send one request to ``launcher/node/programs/files.py`` on a node; ``timeout`` in seconds. Raises SyncError."""
    answer: dict[str, Any] = call(transport, node.python, "files", request, timeout)
    if answer.get("errno") == errno.ENOSPC:
        place = request.get("dest") or request.get("path", "its disk")
        raise SyncError(
            f"{node.label}: disk full at {place} (operation: {request['op']}). "
            "Make room or choose another workdir, then run again to resume"
        )
    if answer.get("error"):
        raise SyncError(f"{node.label}: {request['op']}: {answer['error']}")
    return answer


def _entry_of(file: PlannedFile) -> dict[str, Any]:
    return {"path": file.dest, "bytes": file.bytes, "sha256": file.sha256}


def is_manifest(file: PlannedFile) -> bool:
    return PurePosixPath(file.dest).name == "manifest.json"


def hash_time(files: Iterable[PlannedFile] | Iterable[PartFile]) -> float:
    """Timeout in seconds for a node to read and hash these files."""
    return _CALL_TIMEOUT + sum(file.bytes for file in files) / _SLOWEST_DISK
