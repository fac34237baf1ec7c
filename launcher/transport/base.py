"""Interface of a connection to one node: run commands, exchange lines with them, transfer files."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from launcher.command import Command

OnBytes = Callable[[int], None]  #: called with the number of bytes transferred since the last call

OnLine = Callable[[str], None]


@dataclass(frozen=True)
class Completed:
    returncode: int  #: exit status; negative if a signal ended the command
    stdout: bytes
    stderr: bytes


class Talk(ABC):
    """A running command that reads requests from stdin and writes replies to stdout, line by line.

    For use by one thread. Leaving the context ends the command.
    """

    @abstractmethod
    def send(self, line: str) -> None:
        """Write one line to the command's stdin. Raises TransportError if it has ended or the connection is lost."""

    @abstractmethod
    def receive(self, timeout: float) -> str | None:
        """Return the next line of stdout within ``timeout`` seconds; None when the command has ended.

        Raises CommandTimeout, ConnectionLost.
        """

    @abstractmethod
    def ended(self) -> Completed:
        """Return exit status and stderr (stdout is empty); to be called after ``receive`` has returned None."""

    @abstractmethod
    def close(self) -> None:
        """End the command if it is still running. Safe to call twice."""

    def __enter__(self) -> Talk:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Session(ABC):
    """A command that continues when the launcher exits, started by the cluster's scheduler instead of tmux."""

    @abstractmethod
    def running(self) -> bool:
        """Whether the command is still running."""

    @abstractmethod
    def end(self) -> None:
        """End the command if it is still running."""


class Transport(ABC):
    """A connection to one node. Methods may be called from several threads at once.

    Paths are POSIX paths on the node; a leading ``~/`` means the login user's home folder. Every method raises
    TransportError, with host and remedy, when the connection fails. A command that exits with a status other than 0
    raises nothing. A file that cannot be read or written raises RemoteFileError.
    """

    target: str  #: ``user@host:port``, or ``local``
    node_rank: int | None = None  #: for error messages

    @abstractmethod
    def connect(self, timeout: float) -> None:
        """Open the connection within ``timeout`` seconds. Raises AuthError, HostKeyError or UnreachableError."""

    @abstractmethod
    def run(self, command: Command, *, stdin: bytes = b"", timeout: float) -> Completed:
        """Run a command to its end. Kills it and raises CommandTimeout after ``timeout`` seconds."""

    @abstractmethod
    def stream(self, command: Command, on_line: OnLine, stop: threading.Event) -> int:
        """Run a command and pass each line of stdout to ``on_line``, until it exits or ``stop`` is set.

        Returns the exit status, or -1 when stopped. The command's stdin stays open: its end of file means that the
        launcher is gone. stderr is discarded.
        """

    @abstractmethod
    def talk(self, command: Command) -> Talk:
        """Start a command, and return a ``Talk`` that exchanges lines with it.

        Closing the ``Talk`` or losing the connection gives the command end of file on stdin.
        """

    def check_sessions(self) -> None:  # noqa: B027  only SSH limits them
        """Raise ``TransportError`` if the host allows fewer sessions per connection than a launch needs."""

    def start_session(self, name: str, command: Command) -> Session | None:
        """Start a command that continues when the launcher exits.

        Returns None if the connection cannot do this. The caller then starts the command in a tmux session.
        """
        return None

    @abstractmethod
    def upload(self, source: Path, dest: str, *, offset: int = 0, on_bytes: OnBytes | None = None) -> None:
        """Write ``source[offset:]`` to ``dest`` at ``offset`` bytes; create missing parent folders.

        Offset 0 truncates ``dest`` first.
        """

    @abstractmethod
    def write(self, data: bytes, dest: str, *, mode: int = 0o644) -> None:
        """Write a small file atomically."""

    @abstractmethod
    def download(self, source: str, dest: Path, *, most: int | None = None, on_bytes: OnBytes | None = None) -> None:
        """Fetch a file, or only its first ``most`` bytes; ``dest`` appears once the transfer is complete."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection. Safe to call twice."""
