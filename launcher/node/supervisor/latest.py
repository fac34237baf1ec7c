"""A file that holds the newest of many texts, written by a thread: a disk that stalls holds up nobody else."""

from __future__ import annotations

import threading

from launcher.node.record import write_text


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
