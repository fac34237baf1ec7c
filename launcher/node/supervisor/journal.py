"""Writes a supervisor's events, log and state to its run folder. Failed writes are logged, never raised."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from launcher.node.json_reader import read_json
from launcher.node.log_lines import LineLog
from launcher.node.record import append_json, why_unwritten, write_json, write_text


class LatestWriter:
    """Writes a file in a background thread; a newer text replaces one that is not yet written.

    before: called once in the thread, before the first write.
    """

    def __init__(self, path: str, before: Callable[[], None] = lambda: None) -> None:
        self._path, self._before = path, before
        self._next: str | None = None
        self._busy = False
        self._error: OSError | None = None
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def put(self, text: str) -> None:
        """Schedule ``text`` to be written, in place of a text that has not been written yet."""
        with self._changed:
            self._next = text
            if self._thread is None:
                self._thread = threading.Thread(target=self._write_on, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def settle(self, seconds: float) -> bool:
        """Wait at most ``seconds`` until all scheduled texts are written; return whether they are."""
        with self._changed:
            return self._changed.wait_for(lambda: self._next is None and not self._busy, seconds)

    def failed(self) -> OSError | None:
        """Return the error of the last write, or None; each error is returned once."""
        with self._changed:
            error, self._error = self._error, None
        return error

    def _write_on(self) -> None:
        self._before()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next is not None)
                text, self._next, self._busy = self._next or "", None, True
            failed: OSError | None = None
            try:
                write_text(self._path, text)
            except OSError as error:
                failed = error
            with self._changed:
                self._busy, self._error = False, failed
                self._changed.notify_all()


_STDOUT = 1

_FOLDERS = ("logs", "outcomes", "procs", "control", "checkpoints", "output")

_RESERVE = 1 << 18  # bytes reserved for result.json, in case the disk is full


class Journal:
    """Writes the events, log and state of one node to its run folder.

    A failed write is logged once and remembered in ``trouble``.
    """

    def __init__(self, run_dir: str, node_rank: int) -> None:
        self.run_dir, self.node_rank = run_dir, node_rank
        self.trouble = ""  #: error of the last failed write; '' if none has failed
        self._logged: set[str] = set()  # write errors that are already in the log
        for folder in _FOLDERS:
            os.makedirs(self.path(folder), exist_ok=True)
        self._log = LineLog(self.path("logs", "supervisor.log"))
        # Standard output. A write to a terminal must not block; lines that it does not accept are dropped. On the
        # existing descriptor O_NONBLOCK would also affect the shell that uses the same terminal.
        self._screen = _STDOUT
        if os.isatty(_STDOUT):
            with suppress(OSError):  # some containers have no device file for the terminal
                self._screen = os.open(os.ttyname(_STDOUT), os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
        self._state = LatestWriter(self.path("state.json"))
        try:
            with open(self.path(".reserve"), "wb") as file:
                file.write(b"\1" * _RESERVE)  # some file systems allocate no space for zeros
        except OSError as error:
            self._note(".reserve", error)

    def path(self, *names: str) -> str:
        return os.path.join(self.run_dir, *names)

    def folder_exists(self) -> bool:
        """Whether the run folder still exists; true as well if its file server does not answer."""
        try:
            os.stat(self.run_dir)
        except FileNotFoundError:
            return False
        except OSError:
            return True
        return True

    def event(self, kind: str, **more: Any) -> None:
        """Append an event to ``events.jsonl`` and, as a line of text, to the supervisor's log."""
        record = {"t": time.time(), "kind": kind, "node_rank": self.node_rank, **more}
        self.put("events.jsonl", record, append_json)
        shown = {key: _text_of(value) for key, value in more.items() if value not in (None, "")}
        self.log(" ".join([kind, *(text if key == kind else f"{key}={text}" for key, text in shown.items())]))

    def put(self, name: str, value: Any, write: Callable[[str, Any], None] = write_json) -> bool:
        """Write a file of the run folder; return whether that succeeded."""
        try:
            write(self.path(name), value)
        except OSError as error:
            self._note(name, error)
            return False
        return True

    def put_state(self, value: Any) -> None:
        """Schedule ``state.json`` to be written, without waiting for the disk."""
        self._state.put(json.dumps(value))
        self._note_state()

    def settle(self, seconds: float) -> None:
        """Wait at most ``seconds`` until ``state.json`` is written."""
        self._state.settle(seconds)
        self._note_state()

    def _note_state(self) -> None:
        error = self._state.failed()
        if error is not None:
            self._note("state.json", error)

    def put_last(self, name: str, value: Any) -> None:
        """Write a file that must not be lost; if the disk is full, free the disk space reserved at the start."""
        if not self.put(name, value):
            self.free_reserve()
            self.put(name, value)

    def log(self, text: str) -> None:
        """Write a line to supervisor.log and to the terminal of the tmux session."""
        line = f"{text}\n".encode("utf-8", "replace")
        self._log.feed(line)
        with suppress(OSError):  # supervisor.log has the line
            os.write(self._screen, line)

    def free_reserve(self) -> None:
        """Delete the file that reserves disk space for the last files of the run."""
        try:
            os.unlink(self.path(".reserve"))
        except OSError:  # nothing was reserved, or the run folder has been deleted
            return

    def _note(self, name: str, error: OSError) -> None:
        self.trouble = why_unwritten(self.path(name), error)
        text = f"cannot write {self.path(name)}: {error.strerror}"
        if text not in self._logged:
            self._logged.add(text)
            self.log(text)


def stop_request(journal: Journal) -> Mapping[str, Any] | None:
    """Return the content of ``control/stop``: {"by", "why", "now"}, all optional; None while no stop is requested."""
    path = journal.path("control", "stop")
    if not os.path.exists(path):
        return None
    try:
        value = read_json(path)
    except (OSError, ValueError):  # an empty file: made with `touch`, or on a full disk
        value = None
    return value if isinstance(value, dict) else {}


def _text_of(value: Any) -> str:
    """Return a value of an event as it is logged: a finding or cause by its text, other objects and lists as JSON."""
    if isinstance(value, dict) and isinstance(value.get("text"), str):
        return f"{value['kind']}: {value['text']}" if "kind" in value else str(value["text"])
    return json.dumps(value) if isinstance(value, (dict, list, tuple)) else str(value)
