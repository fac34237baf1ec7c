"""Commands that are talked with: over the pipes of a process here, or over an SSH channel."""

from __future__ import annotations

import os
import selectors
import subprocess
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING, BinaryIO

from launcher.errors import CommandTimeout, TransportError
from launcher.transport.base import Completed, Talk
from launcher.transport.lines import LineSplitter

if TYPE_CHECKING:
    from launcher.transport.channel import Remote

_END_WAIT = 3.0  # seconds a command gets to end by itself when its stdin is closed


class _LineTalk(Talk):
    """Lines out of the chunks that a subclass reads."""

    def __init__(self, name: str, host: str, node_rank: int | None):
        self._name, self._host, self._node_rank = name, host, node_rank
        self._lines: deque[str] = deque()
        self._splitter = LineSplitter(self._lines.append)
        self._at_end = False

    def receive(self, timeout: float) -> str | None:
        deadline = time.monotonic() + timeout
        while not self._lines and not self._at_end:
            left = deadline - time.monotonic()
            if left <= 0:
                message = f"`{self._name}` did not answer within {timeout:g} s"
                raise CommandTimeout(message, host=self._host, node_rank=self._node_rank)
            if not self._read(left):
                self._at_end = True
                self._splitter.finish()
        return self._lines.popleft() if self._lines else None

    @abstractmethod
    def _read(self, seconds: float) -> bool:
        """Wait for output and feed it to the splitter; False at its end."""

    def _has_ended(self) -> TransportError:
        return TransportError(f"`{self._name}` has ended", host=self._host, node_rank=self._node_rank)


class PipeTalk(_LineTalk):
    """With a process of this machine; ``stderr`` is the file it writes to, ``end`` ends it."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        stderr: BinaryIO,
        end: Callable[[subprocess.Popen[bytes]], None],
        name: str,
        node_rank: int | None,
    ):
        super().__init__(name, "local", node_rank)
        assert process.stdin is not None and process.stdout is not None
        self._process, self._stdin, self._stdout = process, process.stdin, process.stdout
        self._stderr, self._end = stderr, end
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._stdout, selectors.EVENT_READ)

    def send(self, line: str) -> None:
        try:
            self._stdin.write(line.encode() + b"\n")
            self._stdin.flush()
        except BrokenPipeError:
            raise self._has_ended() from None

    def _read(self, seconds: float) -> bool:
        if not self._selector.select(seconds):
            return True
        data = os.read(self._stdout.fileno(), 65536)
        self._splitter.feed(data)
        return bool(data)

    def ended(self) -> Completed:
        returncode = self._process.wait()
        self._stderr.seek(0)
        return Completed(returncode, b"", self._stderr.read())

    def close(self) -> None:
        if self._stderr.closed:
            return
        with suppress(BrokenPipeError):
            self._stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_WAIT)
        self._selector.close()
        self._end(self._process)
        self._stderr.close()


class ChannelTalk(_LineTalk):
    """With a command on an SSH channel. ``errors`` turns errors of the line into ours, ``status`` gives the
    exit status, ``end`` ends the command if it runs and lets its channel go."""

    def __init__(
        self,
        remote: Remote,
        errors: Callable[[], AbstractContextManager[None]],
        status: Callable[[Remote], int],
        end: Callable[[], None],
        name: str,
        host: str,
        node_rank: int | None,
    ):
        super().__init__(name, host, node_rank)
        self._remote, self._errors, self._status, self._end = remote, errors, status, end
        self._stderr = bytearray()
        self._closed = False

    def send(self, line: str) -> None:
        with self._errors():
            try:
                self._remote.send(line.encode() + b"\n")
            except OSError:
                self._status(self._remote)  # raises where it is the line that is gone
                raise self._has_ended() from None

    def _read(self, seconds: float) -> bool:
        with self._errors():
            deadline = time.monotonic() + seconds
            if self._remote.read_some(self._splitter.feed, self._stderr.extend, deadline):
                return True
            self._remote.read(self._splitter.feed, self._stderr.extend, deadline)
            self._status(self._remote)
            return False

    def ended(self) -> Completed:
        with self._errors():
            return Completed(self._status(self._remote), b"", bytes(self._stderr))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with suppress(TransportError):  # a command whose line is gone learns by end of file
            self._remote.end_input(_END_WAIT)
            self._end()
