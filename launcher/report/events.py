"""Writes ``events.jsonl`` of a run: events of the launcher and of the nodes; with ``--json`` also to stdout."""

from __future__ import annotations

import fcntl
import json
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from launcher.node.record import write_line


class EventLog:
    """Appends events as JSON lines to a file and to ``stream``; thread-safe.

    Several processes may write to the same file. Each event of a node is written only once.
    """

    def __init__(self, path: Path, stream: TextIO | None = None):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b", buffering=0)
        self._lock = threading.Lock()
        self.path, self.stream = path, stream
        self._known: set[str] = set()  # lines in the file that are events of nodes
        self._read_to = 0  # offset up to which the file was read for them
        self._failed = False

    def add(self, kind: str, **more: Any) -> None:
        """Write an event of the launcher, with the current time and the values in ``more``."""
        line = json.dumps({"t": time.time(), "kind": kind, **more}) + "\n"
        with self._lock:
            self._append(line)
            self._stream(line)

    def add_from_node(self, event: Mapping[str, Any]) -> None:
        line = json.dumps(event) + "\n"
        with self._lock:
            self._append(line, once=True)
            self._stream(line)

    def write_to_stream(self, event: Mapping[str, Any]) -> None:
        """Write an event to ``stream`` but not to the file, because another file of the run has its data."""
        if self.stream is not None:
            with self._lock:
                self._stream(json.dumps(event) + "\n")

    def close(self) -> None:
        self._file.close()

    def _append(self, line: str, *, once: bool = False) -> None:
        """Append a line to the file. The first error, such as a full disk, is printed and does not end the run.

        ``once``: skip the line if the file already has it as an event of a node.
        """
        try:
            with self._locked():
                if once:  # reads only what was added since the last time
                    self._file.seek(self._read_to)
                    for known in self._file:
                        self._known |= {known.decode("utf-8", "replace")} if b'"node_rank"' in known else set()
                    self._read_to = self._file.tell()
                    if line in self._known:
                        return
                write_line(self._file.fileno(), line.encode())
        except OSError as error:
            if not self._failed:
                print(f"events cannot be written to {self.path}: {error.strerror}", file=sys.stderr)
            self._failed = True

    def _stream(self, line: str) -> None:
        if self.stream is not None:
            self.stream.write(line)
            self.stream.flush()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        # Other processes that follow the run write to the same file.
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)


def lasting_findings(findings: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the findings in order of time, without those about stragglers that have recovered."""
    kept: list[Mapping[str, Any]] = []
    for finding in sorted(findings, key=lambda one: float(one["t"])):
        if finding["kind"] != "straggler" or not finding.get("over"):
            kept.append(finding)
            continue
        rank = finding.get("rank")
        kept = [one for one in kept if one["kind"] != "straggler" or one.get("rank") != rank]
    return kept


def nan_finding(findings: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the finding about the first loss that was not finite, or None."""
    return min((one for one in findings if one["kind"] == "nan"), key=lambda one: float(one["t"]), default=None)


def nan_words(finding: Mapping[str, Any]) -> str:
    """Return a NaN loss in a few words: ``NaN loss of rank 1 in epoch 3 at step 17``."""
    at = "".join(f" {word} {finding[name]}" for word, name in _WHERE if finding.get(name) is not None)
    return f"NaN loss{at}"


_WHERE = (("of rank", "rank"), ("in epoch", "epoch"), ("at step", "step"))


def finding_words(finding: Mapping[str, Any]) -> str:
    """Return a finding as text: ``stall: no process has …``, or ``restart 1 of 3: …``."""
    return str(finding["text"]) if finding["kind"] == "restart" else f"{finding['kind']}: {finding['text']}"
