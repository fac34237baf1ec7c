"""What a supervisor writes into its run folder. A failed write never keeps it from ending processes."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from launcher.node.log_lines import LineLog
from launcher.node.record import append_json, read_json, why_unwritten, write_json, write_text


class Latest:
    """What is overtaken before it was written never is."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._next: str | None = None
        self._busy = False
        self._error: OSError | None = None
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def put(self, text: str) -> None:
        """Have ``text`` written soon."""
        with self._changed:
            self._next = text
            if self._thread is None:
                self._thread = threading.Thread(target=self._write_on, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def settle(self, seconds: float) -> bool:
        """Wait until all is written; whether it was within that time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._next is None and not self._busy, seconds)

    def failed(self) -> OSError | None:
        """Why the last value could not be written, if it has not been asked for since."""
        with self._changed:
            error, self._error = self._error, None
        return error

    def _write_on(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next is not None)
                text, self._next, self._busy = self._next or "", None, True
            error = self._write(text)
            with self._changed:
                self._busy, self._error = False, error
                self._changed.notify_all()

    def _write(self, text: str) -> OSError | None:
        try:
            write_text(self._path, text)
        except OSError as error:
            return error
        return None


_STDOUT = 1


class Screen:
    """Standard output that never blocks where it is a terminal; what it does not take is not shown."""

    def __init__(self) -> None:
        self._file = _terminal() if os.isatty(_STDOUT) else _STDOUT

    def show(self, line: bytes) -> None:
        """Show a line. The terminal may be stopped, or gone with its tmux session."""
        try:
            os.write(self._file, line)
        except OSError:  # the log has it
            return


def _terminal() -> int:
    """The terminal, opened once more: the shell that it is shared with would be surprised by O_NONBLOCK."""
    try:
        return os.open(os.ttyname(_STDOUT), os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:  # not to be found from here, as in some containers
        return _STDOUT


_FOLDERS = ("logs", "outcomes", "procs", "control", "checkpoints", "output")

_RESERVE = 1 << 18  # bytes kept for the last words of a node whose disk is full


class Journal:
    """Events, log and state of one node; what cannot be written is said, and kept in mind as ``trouble``."""

    def __init__(self, run_dir: str, node_rank: int) -> None:
        self.run_dir, self.node_rank = run_dir, node_rank
        self.trouble = ""  #: why the disk does not take what the run writes
        self._said: set[str] = set()  # troubles with files that were told already
        for folder in _FOLDERS:
            os.makedirs(self.path(folder), exist_ok=True)
        self._log = LineLog(self.path("logs", "supervisor.log"))
        self._screen = Screen()
        self._state = Latest(self.path("state.json"))
        self._reserve()

    def path(self, *names: str) -> str:
        return os.path.join(self.run_dir, *names)

    def there(self) -> bool:
        """Whether the run folder still exists; a file server that does not answer has not deleted it."""
        try:
            os.stat(self.run_dir)
        except FileNotFoundError:
            return False
        except OSError:
            return True
        return True

    def event(self, kind: str, **more: Any) -> None:
        """Add to ``events.jsonl``, and in words to the log."""
        record = {"t": time.time(), "kind": kind, "node_rank": self.node_rank, **more}
        self.put("events.jsonl", record, append_json)
        self.say(" ".join([kind, *(f"{key}={value}" for key, value in more.items() if value not in (None, ""))]))

    def put(self, name: str, value: Any, write: Callable[[str, Any], None] = write_json) -> bool:
        """Write a file of the run folder; whether that worked."""
        try:
            write(self.path(name), value)
        except OSError as error:
            self._note(name, error)
            return False
        return True

    def put_state(self, value: Any) -> None:
        """Have ``state.json`` written, without waiting for a disk that is slow."""
        self._state.put(json.dumps(value))
        self._note_state()

    def settle(self, seconds: float) -> None:
        """Wait until ``state.json`` is written."""
        self._state.settle(seconds)
        self._note_state()

    def _note_state(self) -> None:
        error = self._state.failed()
        if error is not None:
            self._note("state.json", error)

    def put_last(self, name: str, value: Any) -> None:
        """Write what must not be lost, with the room kept for it if there is no other."""
        if not self.put(name, value):
            self.free_reserve()
            self.put(name, value)

    def say(self, text: str) -> None:
        """Log, and show whoever attaches to the session."""
        line = f"{text}\n".encode("utf-8", "replace")
        self._log.feed(line)
        self._screen.show(line)

    def free_reserve(self) -> None:
        """Give the room back that was kept."""
        try:
            os.unlink(self.path(".reserve"))
        except OSError:  # none was kept, or the whole folder is gone
            return

    def _reserve(self) -> None:
        try:
            with open(self.path(".reserve"), "wb") as file:
                file.write(b"\1" * _RESERVE)  # not zeros, which some file systems store as nothing
        except OSError as error:
            self._note(".reserve", error)

    def _note(self, name: str, error: OSError) -> None:
        self.trouble = why_unwritten(self.path(name), error)
        self._say_once(f"cannot write {self.path(name)}: {error.strerror}")

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self.say(text)


def stop_request(journal: Journal) -> Mapping[str, Any] | None:
    """What ``control/stop`` says: {"by", "why", "now"}, as far as told; None while nobody asked."""
    path = journal.path("control", "stop")
    if not os.path.exists(path):
        return None
    try:
        value = read_json(path)
    except (OSError, ValueError):  # a person's `touch`, or no room for more than the name
        value = None
    return value if isinstance(value, dict) else {}
