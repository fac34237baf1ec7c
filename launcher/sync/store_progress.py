"""Follows a program of ``launcher/node/store``, on a node or on this machine, by its progress lines."""

from __future__ import annotations

import threading
from typing import Literal

import msgspec

from launcher.command import Command
from launcher.errors import SyncError
from launcher.sync.progress import TransferProgress
from launcher.transport.base import Transport
from trainer.core.typed import parse_json


class _Line(msgspec.Struct):
    kind: Literal["start", "bytes", "note", "done", "error"]
    bytes: int = 0
    present: int = 0
    files: int = 0
    text: str = ""


class StoreProgress:
    """Passes the progress of one program to a ``TransferProgress``."""

    def __init__(self, node_rank: int, progress: TransferProgress):
        self.node_rank, self.progress = node_rank, progress
        self.bytes = 0  #: transferred by the program
        self.present = 0  #: bytes of files that needed no transfer
        self._last: _Line | None = None

    def follow(self, transport: Transport, program: Command, stop: threading.Event) -> int:
        """Run ``program`` to its end, or until ``stop`` is set; return the number of files that it transferred.

        Raises SyncError with the program's message, and TransportError.
        """
        status = transport.stream(program, self._line, stop)
        if stop.is_set():
            return 0
        if self._last is None:
            raise SyncError(
                f"{program.argv[1]} ended with status {status} and without a result; check that {program.argv[0]} is "
                "Python 3.10 or newer"
            )
        if self._last.kind == "error":
            raise SyncError(self._last.text)
        return self._last.files

    def _line(self, text: str) -> None:
        try:
            line = parse_json(text, _Line)
        except (ValueError, RecursionError):
            return  # output of a login profile
        if line.kind == "start":
            self.present = line.present
            self.progress.start(self.node_rank, line.bytes)
        elif line.kind == "bytes":
            self.bytes += line.bytes
            self.progress.advance(self.node_rank, line.bytes)
        elif line.kind == "note":
            self.progress.note(self.node_rank, line.text)
        else:
            self._last = line
