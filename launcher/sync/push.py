"""Sends the files of a plan to the nodes. Files that are already there are skipped, and broken transfers are resumed.

A file is written to ``<file>.part`` and renamed after its digest has been checked. The manifest comes last: a partition
folder with a manifest is complete.

With ``data.store`` the nodes fetch their parts themselves, after all other files have been sent.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import secrets
import tarfile
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.errors import SyncError
from launcher.node.programs.files import CODE_LIST, PART_SUFFIX, code_list, sha256_of
from launcher.plan.files import FETCH_SPEC
from launcher.plan.model import LaunchPlan, NodePlan
from launcher.sync.progress import TransferProgress
from launcher.sync.transfer import FileTransfer, NodeSync, Stopped, ask_files, is_manifest
from launcher.transport.base import Transport
from launcher.transport.fanout import on_nodes

_RELEASE = 10.0  # seconds to delete the run folder of a launch that has failed

_LAST_WRITE = 3.0  # seconds to wait before for a transfer that has been stopped, as it may be writing there


@dataclass(frozen=True)
class _SyncReport:
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


def sync(
    plan: LaunchPlan,
    transports: Mapping[int, Transport],
    progress: TransferProgress | None = None,
    *,
    connect_timeout: float = 10.0,
) -> _SyncReport:
    """Send all files of ``plan`` to the nodes in parallel.

    A failure on one node, or Ctrl-C, stops all transfers; the next sync resumes them, and the run folders on the nodes
    are deleted. Raises SyncError, also if another launch has made the run folder of a new run.
    """
    stop = threading.Event()
    archive = _CodeArchive(plan)
    jobs = {
        node.node_rank: _PlanTransfer(
            plan, node, transports[node.node_rank], archive, progress or TransferProgress(), stop, connect_timeout
        )
        for node in plan.nodes
    }
    try:
        answers = on_nodes(jobs, lambda k: jobs[k].run(), on_error=lambda *_: stop.set())
        causes = {k: error for k, error in answers.errors.items() if not isinstance(error, Stopped)}
        for node_rank in sorted(causes):
            raise causes[node_rank]
    except BaseException:
        stop.set()
        on_nodes(jobs, lambda k: jobs[k].release())
        raise
    return _SyncReport(tuple(answers.values[node.node_rank] for node in plan.nodes))


class _CodeArchive:
    """The code files of a plan as one compressed archive; equal code gives equal bytes."""

    def __init__(self, plan: LaunchPlan):
        self.plan = plan
        self._lock = threading.Lock()
        self._data, self._sha256 = b"", ""
        self.unpacked_bytes = sum(file.bytes for file in plan.code)

    def data(self) -> tuple[bytes, str]:
        """Return the archive and its SHA-256, computed once for all nodes."""
        with self._lock:
            if not self._data:
                packed = io.BytesIO()
                with (
                    gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as stream,
                    tarfile.open(fileobj=stream, mode="w") as tar,
                ):
                    files = sorted(self.plan.code, key=lambda file: file.dest)
                    data = {
                        file.dest: Path(file.source).read_bytes() if file.source else file.content.encode()
                        for file in files
                    }
                    listed = code_list([(dest, hashlib.sha256(content).hexdigest()) for dest, content in data.items()])
                    modes = {CODE_LIST: 0o644, **{file.dest: file.mode for file in files}}
                    for dest, content in {**data, CODE_LIST: listed}.items():
                        entry = tarfile.TarInfo(dest)
                        entry.size, entry.mode = len(content), modes[dest]
                        tar.addfile(entry, io.BytesIO(content))
                self._data = packed.getvalue()
                self._sha256 = hashlib.sha256(self._data).hexdigest()
            return self._data, self._sha256


class _PlanTransfer(FileTransfer):
    """The transfer of the files of a plan to one node."""

    def __init__(
        self,
        plan: LaunchPlan,
        node: NodePlan,
        transport: Transport,
        archive: _CodeArchive,
        progress: TransferProgress,
        stop: threading.Event,
        connect_timeout: float,
    ):
        super().__init__(node, transport, progress, stop, connect_timeout)
        self.node, self.archive = node, archive
        self.new_run = not plan.serve_only  # graph servers start again in the folder that they have
        generated = "\0".join(file.content for file in node.files if not file.source)  # contains the run's token
        self.owner = hashlib.sha256(generated.encode()).hexdigest()
        self.claimed = False
        self.ended = threading.Event()

    def run(self) -> NodeSync:
        try:
            return super().run()
        finally:
            self.ended.set()

    def release(self) -> None:
        """Delete the run folder, in which nothing has been started, if this launch has made it. Raises FleetError."""
        self.ended.wait(_LAST_WRITE)
        if self.claimed:
            request = {"op": "release", "path": self.node.run_dir, "owner": self.owner}
            ask_files(self.transport, self.node, request, _RELEASE)

    def send_all(self) -> None:
        if self.new_run:
            self.claimed = True  # or may be, if the connection breaks before the answer
            answer = self.ask({"op": "claim", "path": self.node.run_dir, "owner": self.owner})
            if not answer["mine"]:
                raise self.error(
                    f"the run id is already in use: another launch has just made {self.node.run_dir}; "
                    "choose another --run-id"
                )
        files = []
        for file in self.node.files:
            if file.source and not file.sha256:
                file = replace(file, bytes=Path(file.source).stat().st_size, sha256=sha256_of(file.source))
            if file.source:
                files.append(file)
        files.sort(key=is_manifest)
        found = self.inventory(files, [self.node.code_dir], below=self.node.data_dir)
        has_code = found["folders"][0]
        if not has_code:
            self.current = self.node.code_dir
            data, sha256 = self.archive.data()
            # A unique name: launches at the same time send the same code, and each deletes its own archive.
            dest = f"{self.node.code_dir}-{sha256[:8]}-{secrets.token_hex(4)}.tgz{PART_SUFFIX}"
            with tempfile.NamedTemporaryFile(suffix=".tgz") as packed:
                packed.write(data)
                packed.flush()
                self.progress.start(self.node.node_rank, len(data))
                self.transport.upload(Path(packed.name), dest, on_bytes=self.advance)
            self.ask({"op": "unpack", "archive": dest, "sha256": sha256, "dest": self.node.code_dir})
            self.files_sent += 1
            self.bytes_sent += len(data)
        self.send_files(list(zip(files, found["files"], strict=True)))
        if has_code:
            self.bytes_present += self.archive.unpacked_bytes
        for file in self.node.files:
            if not file.source and not file.url:
                self.check_stop()
                self.current = file.dest
                self.transport.write(file.content.encode(), file.dest, mode=file.mode)
        if any(file.url for file in self.node.files):
            from launcher.sync.store_progress import StoreProgress

            self.current = f"the parts in {self.node.data_dir}"
            program = self.node.program("store/fetch_parts", f"{self.node.run_dir}/{FETCH_SPEC}")
            reader = StoreProgress(self.node.node_rank, self.progress)
            try:
                self.files_sent += reader.follow(self.transport, program, self.stop)
            except SyncError as error:
                raise self.error(str(error)) from None
            finally:
                self.bytes_fetched += reader.bytes
            self.check_stop()
            self.bytes_present += reader.present
