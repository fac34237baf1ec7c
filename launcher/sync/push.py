"""Sends the files of a plan to the nodes. Files that are already there are skipped, and cut transfers are resumed.

With ``data.store`` the nodes fetch their parts themselves, after all other files have been sent.

A file is written to ``<file>.part`` and renamed after its digest has been checked. The manifest comes last: a partition
folder with a manifest is complete.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import io
import secrets
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from rich.filesize import decimal

from launcher.errors import ConnectionLost, FleetError, RemoteFileError, SyncError, UnreachableError
from launcher.node.programs.files import PART_SUFFIX, sha256_of
from launcher.plan.files import FETCH_SPEC
from launcher.plan.model import LaunchPlan, NodePlan, PlannedFile
from launcher.plan.partition import PartFile
from launcher.sync.progress import TransferProgress
from launcher.sync.store_progress import StoreProgress
from launcher.transport.base import Transport
from launcher.transport.fanout import on_nodes
from launcher.transport.rpc import call

_BACK_OFF = (0.5, 2.0, 5.0, 10.0)  # seconds before each attempt to reconnect

_OTHERS_PAUSES = (0.2, 0.5, 1.0, 0.0)  #: seconds between checks whether another run has sent a file

_SLOWEST_DISK = 20e6  # bytes per second; a node that reads and hashes files more slowly is given up

_CALL_TIMEOUT = 60.0  # seconds

_LARGE = 64 << 20  # bytes; larger files are committed one at a time, so that progress shows during hashing


@dataclass(frozen=True)
class NodeSync:
    node_rank: int
    files_sent: int
    bytes_sent: int
    bytes_present: int  #: bytes of files that the node already had
    seconds: float
    bytes_fetched: int = 0  #: bytes that the node read from ``data.store``


@dataclass(frozen=True)
class SyncReport:
    nodes: tuple[NodeSync, ...]  #: in node_rank order

    @property
    def bytes_sent(self) -> int:
        return sum(node.bytes_sent for node in self.nodes)

    @property
    def bytes_present(self) -> int:
        return sum(node.bytes_present for node in self.nodes)

    @property
    def bytes_fetched(self) -> int:
        return sum(node.bytes_fetched for node in self.nodes)


class Stopped(FleetError):
    """A transfer ended because another one failed, or by Ctrl-C."""

    exit_status = 130


def sync(
    plan: LaunchPlan,
    transports: Mapping[int, Transport],
    progress: TransferProgress | None = None,
    *,
    connect_timeout: float = 10.0,
) -> SyncReport:
    """Send all files of ``plan`` to the nodes in parallel.

    A failure on one node, or Ctrl-C, stops all transfers; the next sync resumes them. Raises SyncError.
    """
    stop = threading.Event()
    archive = _CodeArchive(plan)
    jobs = {
        node.node_rank: _NodeJob(
            node, transports[node.node_rank], archive, progress or TransferProgress(), stop, connect_timeout
        )
        for node in plan.nodes
    }
    try:
        answers = on_nodes(jobs, lambda k: jobs[k].run(), on_error=lambda *_: stop.set())
    finally:
        stop.set()
    causes = {k: error for k, error in answers.errors.items() if not isinstance(error, Stopped)}
    for node_rank in sorted(causes):
        raise causes[node_rank]
    return SyncReport(tuple(answers.values[node.node_rank] for node in plan.nodes))


class _CodeArchive:
    """The code files of a plan as one compressed archive; equal code gives equal bytes."""

    def __init__(self, plan: LaunchPlan):
        self.plan = plan
        self._lock = threading.Lock()
        self._data = b""

    def data(self) -> bytes:
        with self._lock:
            if not self._data:
                self._data = _pack(self.plan.nodes[0])
            return self._data


def _pack(node: NodePlan) -> bytes:
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as stream, tarfile.open(fileobj=stream, mode="w") as tar:
        for file in sorted((file for file in node.files if _is_code(node, file)), key=lambda file: file.dest):
            data = Path(file.source).read_bytes() if file.source else file.content.encode()
            entry = tarfile.TarInfo(file.dest[len(node.code_dir) + 1 :])
            entry.size, entry.mode = len(data), file.mode
            tar.addfile(entry, io.BytesIO(data))
    return packed.getvalue()


class _NodeJob:
    def __init__(
        self,
        node: NodePlan,
        transport: Transport,
        archive: _CodeArchive,
        progress: TransferProgress,
        stop: threading.Event,
        connect_timeout: float,
    ):
        self.node, self.transport, self.archive = node, transport, archive
        self.progress, self.stop, self.connect_timeout = progress, stop, connect_timeout
        self.files_sent = self.bytes_sent = self.bytes_present = self.bytes_fetched = 0
        self.current = "its files"

    def run(self) -> NodeSync:
        started = time.monotonic()
        failures, sent_before = 0, 0
        while True:
            try:
                self._send_all()
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
        return NodeSync(self.node.node_rank, self.files_sent, sent, present, seconds, fetched)

    def _reconnect(self, failures: int, error: FleetError) -> None:
        if failures > len(_BACK_OFF):
            raise self._error(
                f"{self.current}: the connection broke {failures} times in a row; run again to resume ({error})"
            ) from error
        self.progress.note(self.node.node_rank, f"connection lost while sending {self.current}; trying again")
        if self.stop.wait(_BACK_OFF[failures - 1]):
            raise Stopped("stopped")
        try:
            self.transport.connect(self.connect_timeout)
        except (ConnectionLost, UnreachableError) as again:
            self._reconnect(failures + 1, again)

    def _send_all(self) -> None:
        files = [_with_digest(file) for file in self.node.files if file.source and not _is_code(self.node, file)]
        files.sort(key=_is_manifest)
        entries = [_entry(file) for file in files]
        request = {"op": "inventory", "files": entries, "folders": [self.node.code_dir]}
        found = self._ask(request, hash_time(files))
        code = 0
        if found["folders"][0]:
            code = sum(file.bytes for file in self.node.files if _is_code(self.node, file))
        else:
            self._send_code()
        self._send_files(list(zip(files, found["files"], strict=True)))
        self.bytes_present += code
        for file in self.node.files:
            if not file.source and not file.url:
                self._check_stop()
                self.current = file.dest
                self.transport.write(file.content.encode(), file.dest, mode=file.mode)
        if any(file.url for file in self.node.files):
            self._fetch()

    def _fetch(self) -> None:
        self.current = f"the parts in {self.node.data_dir}"
        program = self.node.program("store/fetch_parts", f"{self.node.run_dir}/{FETCH_SPEC}")
        reader = StoreProgress(self.node.node_rank, self.progress)
        try:
            self.files_sent += reader.follow(self.transport, program, self.stop)
        except SyncError as error:
            raise self._error(str(error)) from None
        finally:
            self.bytes_fetched += reader.bytes
        self._check_stop()
        self.bytes_present += reader.present

    def _send_code(self) -> None:
        self.current = self.node.code_dir
        data = self.archive.data()
        sha256 = hashlib.sha256(data).hexdigest()
        # A unique name: launches at the same time send the same code, and each deletes its own archive.
        dest = f"{self.node.code_dir}-{sha256[:8]}-{secrets.token_hex(4)}.tgz{PART_SUFFIX}"
        with tempfile.NamedTemporaryFile(suffix=".tgz") as packed:
            packed.write(data)
            packed.flush()
            self.progress.start(self.node.node_rank, len(data))
            self.transport.upload(Path(packed.name), dest, on_bytes=self._advance)
        self._ask({"op": "unpack", "archive": dest, "sha256": sha256, "dest": self.node.code_dir})
        self.files_sent += 1
        self.bytes_sent += len(data)

    def _send_files(self, found: list[tuple[PlannedFile, dict[str, Any]]]) -> None:
        todo = [(file, _have(state)) for file, state in found if state["state"] != "present"]
        need = sum(file.bytes - have for file, have in todo)
        self.bytes_present = sum(file.bytes for file, _ in found) - sum(file.bytes for file, _ in todo)
        self.progress.start(self.node.node_rank, need)
        if todo:
            self._check_room(need, str(PurePosixPath(todo[0][0].dest).parent))
        waiting: list[PlannedFile] = []
        for file, have in todo:
            if _is_manifest(file) or file.bytes >= _LARGE:
                self._commit(waiting)
                waiting = []
            self._upload(file, have)
            waiting.append(file)
        self._commit(waiting)

    def _commit(self, files: list[PlannedFile]) -> None:
        for file, error in self._commit_once(files):
            self._check_source(file)
            self.progress.start(self.node.node_rank, file.bytes)
            self._upload(file, 0)
            if self._commit_once([file]) and not self._is_there(file):
                raise self._error(
                    f"{file.dest}: {error}, in two transfers; check disk and memory of the host, and the network to it"
                )
        self.files_sent += len(files)

    def _commit_once(self, files: list[PlannedFile]) -> list[tuple[PlannedFile, str]]:
        if not files:
            return []
        request = {"op": "commit", "files": [{**_entry(file), "mode": file.mode} for file in files]}
        answers = self._ask(request, hash_time(files))["files"]
        return [(file, answer["error"]) for file, answer in zip(files, answers, strict=True) if answer["error"]]

    def _upload(self, file: PlannedFile, offset: int) -> None:
        self._check_stop()
        self.current = file.dest
        try:
            self.transport.upload(Path(file.source), file.dest + PART_SUFFIX, offset=offset, on_bytes=self._count)
        except RemoteFileError as error:
            if error.errno != errno.ENOSPC and self._is_there(file):
                return  # another run has sent the same file at the same time and renamed the .part file
            self._check_room(
                file.bytes - offset, str(PurePosixPath(file.dest).parent), full=error.errno == errno.ENOSPC
            )
            raise self._error(f"{file.dest}: {error.message}") from error
        except FileNotFoundError as error:
            raise SyncError(
                f"{file.source} is missing on this machine, and {self.node.label} needs "
                "it. If it belongs to a partition, delete the partition folder and run again"
            ) from error

    def _is_there(self, file: PlannedFile) -> bool:
        # Another run may be sending the file: waits up to two seconds.
        for pause in _OTHERS_PAUSES:
            if self._ask({"op": "inventory", "files": [_entry(file)], "folders": []})["files"][0]["state"] == "present":
                return True
            self.stop.wait(pause)
        return False

    def _check_source(self, file: PlannedFile) -> None:
        # If the local file itself has a wrong digest, sending it again does not help.
        if sha256_of(file.source) != file.sha256:
            raise SyncError(
                f"{file.source} on this machine differs from its manifest (damaged, or changed after partitioning), "
                f"so {self.node.label} rejected it. Delete the partition folder and run again"
            )

    def _check_room(self, need: int, folder: str, full: bool = False) -> None:
        disk = self._ask({"op": "disk", "path": folder})
        if full or disk["free"] < need:
            raise self._error(
                f"disk full at {folder}: {decimal(need)} still to be sent, {decimal(disk['free'])} free. "
                "Make room or choose another workdir, then run again to resume"
            )

    def _count(self, count: int) -> None:
        self.bytes_sent += count
        self._advance(count)

    def _advance(self, count: int) -> None:
        self.progress.advance(self.node.node_rank, count)
        self._check_stop()

    def _check_stop(self) -> None:
        if self.stop.is_set():
            raise Stopped("stopped")

    def _ask(self, request: dict[str, Any], timeout: float = _CALL_TIMEOUT) -> dict[str, Any]:
        self._check_stop()
        return ask_files(self.transport, self.node, request, timeout)

    def _error(self, message: str) -> SyncError:
        return SyncError(f"{self.node.label}: {message}")


def ask_files(transport: Transport, node: NodePlan, request: dict[str, Any], timeout: float) -> dict[str, Any]:
    """Send one request to ``launcher/node/programs/files.py`` on a node; ``timeout`` in seconds. Raises SyncError."""
    answer: dict[str, Any] = call(transport, node.python, "files", request, timeout)
    if answer.get("errno") == errno.ENOSPC:
        place = request.get("dest", node.code_dir)
        raise SyncError(
            f"{node.label}: disk full at {place}: no room to {request['op']}. "
            "Make room or choose another workdir, then run again to resume"
        )
    if answer.get("error"):
        raise SyncError(f"{node.label}: {request['op']}: {answer['error']}")
    return answer


def _with_digest(file: PlannedFile) -> PlannedFile:
    if file.sha256:
        return file
    return replace(file, bytes=Path(file.source).stat().st_size, sha256=sha256_of(file.source))


def _entry(file: PlannedFile) -> dict[str, Any]:
    return {"path": file.dest, "bytes": file.bytes, "sha256": file.sha256}


def _have(state: dict[str, Any]) -> int:
    return int(state["have"]) if state["state"] == "partial" else 0


def _is_manifest(file: PlannedFile) -> bool:
    return PurePosixPath(file.dest).name == "manifest.json"


def _is_code(node: NodePlan, file: PlannedFile) -> bool:
    return file.dest.startswith(node.code_dir + "/")


def hash_time(files: Iterable[PlannedFile] | Iterable[PartFile]) -> float:
    """Return the timeout in seconds for a node to read and hash the files."""
    return _CALL_TIMEOUT + sum(file.bytes for file in files) / _SLOWEST_DISK
