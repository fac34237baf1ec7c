"""The boundary between the launcher and a machine: what ``local`` and ``ssh`` both do."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from launcher.command import Command

OnBytes = Callable[[int], None]  #: called with the bytes moved since its last call

OnLine = Callable[[str], None]


@dataclass(frozen=True)
class Completed:
    """A finished remote command: its exit status (negative: ended by a signal) and all it printed."""

    returncode: int
    stdout: bytes
    stderr: bytes


class Talk(ABC):
    """A command that runs and is talked with, line by line. For one thread; leaving the context ends the command."""

    @abstractmethod
    def send(self, line: str) -> None:
        """Write one line to its stdin; raises ``TransportError`` when it has ended or the line is lost."""

    @abstractmethod
    def receive(self, timeout: float) -> str | None:
        """Its next line of stdout; None when it has ended. Raises ``CommandTimeout``, ``ConnectionLost``."""

    @abstractmethod
    def ended(self) -> Completed:
        """After ``receive`` gave None: exit status and stderr (stdout is empty)."""

    @abstractmethod
    def close(self) -> None:
        """End the command if it still runs. Safe to call twice."""

    def __enter__(self) -> Talk:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Transport(ABC):
    """One open line to one node. Methods may be called from several threads at once.

    Paths are POSIX paths on the node; a leading ``~/`` is the login user's home. Every
    method raises ``TransportError`` (host named, remedy given) when the line itself fails;
    a command that runs and exits non-zero is not an error of the transport. A file that
    cannot be read or written raises ``RemoteFileError``.
    """

    target: str  #: what a person would type after ``ssh``, or ``local``
    node_rank: int | None = None  #: named in errors

    @abstractmethod
    def connect(self, timeout: float) -> None:
        """Open the line; raises ``AuthError``, ``HostKeyError`` or ``UnreachableError``."""

    @abstractmethod
    def run(self, command: Command, *, stdin: bytes = b"", timeout: float) -> Completed:
        """Run to the end; raises ``CommandTimeout`` after ``timeout`` seconds."""

    @abstractmethod
    def stream(self, command: Command, on_line: OnLine, stop: threading.Event) -> int:
        """Run, handing each stdout line over as it comes, until exit or ``stop`` is set.

        Returns the exit status, or -1 when stopped. The command's stdin stays open until
        then, so it can tell by end of file that nobody listens any more; stderr is dropped.
        """

    @abstractmethod
    def talk(self, command: Command) -> Talk:
        """Start a command to talk with. Its stdin stays open, so it can tell by end of file that nobody listens."""

    @abstractmethod
    def upload(self, source: Path, dest: str, *, offset: int = 0, on_bytes: OnBytes | None = None) -> None:
        """Write ``source[offset:]`` to ``dest`` at ``offset`` (0 truncates); parents are made."""

    @abstractmethod
    def write(self, data: bytes, dest: str, *, mode: int = 0o644) -> None:
        """Write a small file whole: beside it first, then renamed into place."""

    @abstractmethod
    def download(self, source: str, dest: Path, *, most: int | None = None, on_bytes: OnBytes | None = None) -> None:
        """Fetch one file, of a larger one its first ``most`` bytes; ``dest`` appears only when it is complete."""

    @abstractmethod
    def close(self) -> None:
        """Let the line go. Safe to call twice."""
