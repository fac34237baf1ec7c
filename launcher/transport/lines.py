"""Cut a byte stream into text lines."""

from __future__ import annotations

from launcher.transport.base import OnLine


class LineSplitter:
    """Collects bytes and hands each complete line on, without its newline."""

    def __init__(self, on_line: OnLine):
        self._on_line, self._rest = on_line, b""

    def feed(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._on_line(line.rstrip(b"\r").decode("utf-8", "replace"))

    def finish(self) -> None:
        """Hand over what came after the last newline, if anything."""
        if self._rest:
            self.feed(b"\n")
