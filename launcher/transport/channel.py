"""One command on a node: feed it, read it, know how to end it."""

from __future__ import annotations

import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import paramiko

from launcher.command import Command, shell_line

_READ = 1 << 16

_INLINE_STDIN = 1 << 15  # what every server's first window takes without waiting

# Closing a channel ends nothing, and sshd takes signals only for users other than root. So
# each command first says on stderr which process it is, and is ended by a second command.
_PID_LINE = re.compile(rb"gnnfleet-pid:(\d+)\n")

_SAY_PID = "echo gnnfleet-pid:$$ >&2"

OnData = Callable[[bytes], None]


def started_line(command: Command) -> str:
    """The command for the node's shell; it says its pid first."""
    return shell_line(replace(command, setup=(_SAY_PID, *command.setup)))


class Remote(ABC):
    """A started command. ``pid`` is its process there, 0 until it has said so."""

    def __init__(self) -> None:
        self.pid = 0
        self._early = b""  # stderr before the pid was said
        self._feeder: threading.Thread | None = None

    @property
    @abstractmethod
    def status(self) -> int | None:
        """Exit status; -1 when there is none to tell, None while it runs."""

    @abstractmethod
    def send(self, data: bytes) -> None:
        """Send some of stdin, which stays open; raises OSError when the command has ended."""

    @abstractmethod
    def _close_input(self) -> None: ...

    @abstractmethod
    def _at_end(self) -> bool:
        """Whether all output has come."""

    @abstractmethod
    def _wait(self, seconds: float | None) -> None:
        """Return when there is output, or after ``seconds``."""

    @abstractmethod
    def _drain(self, on_stdout: OnData, on_stderr: OnData) -> None:
        """Hand on what has come, stderr through ``_without_pid`` as long as there is no pid."""

    @abstractmethod
    def _await_status(self, seconds: float | None) -> bool: ...

    @abstractmethod
    def close(self) -> None: ...

    def feed(self, data: bytes) -> None:
        """Send all of stdin and close it; a long one from a thread, as the command may write first."""
        if len(data) <= _INLINE_STDIN:
            self._send_all(data)
        else:
            self._feeder = threading.Thread(target=self._send_all, args=(data,), name="ssh-stdin", daemon=True)
            self._feeder.start()

    def _send_all(self, data: bytes) -> None:
        with suppress(OSError, paramiko.SSHException, EOFError):  # a command need not read its stdin
            self.send(data)
            self._close_input()

    def end_input(self, seconds: float) -> None:
        """Close stdin and give the command some time to end by itself."""
        with suppress(OSError, paramiko.SSHException, EOFError):
            self._close_input()
            self._await_status(seconds)

    def read_some(self, on_stdout: OnData, on_stderr: OnData, deadline: float) -> bool:
        """Hand on what has come, at the latest at ``deadline``; False when nothing more can come."""
        if self._at_end():
            return False
        self._wait(_left(deadline))
        self._drain(on_stdout, on_stderr)
        return True

    def read(self, on_stdout: OnData, on_stderr: OnData, deadline: float, stop: threading.Event | None = None) -> bool:
        """Hand output on as it comes; True at its end, False when stopped or past the deadline."""
        while not self._at_end():
            # with a stop event, look at it ten times a second; data wakes at once
            self._wait(0.1 if stop else _left(deadline))
            self._drain(on_stdout, on_stderr)
            if (stop is not None and stop.is_set()) or time.monotonic() >= deadline:
                return False
        ended = self._await_status(_left(deadline))
        self._drain(on_stdout, on_stderr)
        on_stderr(self._early)
        return ended

    def await_pid(self, deadline: float) -> int:
        """The command's pid, 0 when it does not say by ``deadline``; output meanwhile is dropped."""
        while not (self.pid or self._at_end()) and time.monotonic() < deadline:
            self._wait(_left(deadline))
            self._drain(ignore, ignore)
        return self.pid

    def _without_pid(self, data: bytes) -> bytes:
        """Keep stderr back until the line with the pid has come, and take that out."""
        if self.pid:
            return data
        self._early += data
        if found := _PID_LINE.search(self._early):
            self.pid = int(found[1])
            data, self._early = self._early[: found.start()] + self._early[found.end() :], b""
            return data
        return b""


class _Wake(threading.Event):
    """Told by both buffers of a channel. They also clear it when one runs empty, which
    would hide news of the other, so only the reader may."""

    def clear(self) -> None:
        pass

    def reset(self) -> None:
        super().clear()


class RemoteCommand(Remote):
    """On a channel of paramiko's."""

    def __init__(self, channel: paramiko.Channel, command: Command):
        super().__init__()
        self.channel = channel
        self._news = _Wake()
        channel.in_buffer.set_event(self._news)
        channel.in_stderr_buffer.set_event(self._news)
        channel.exec_command(started_line(command))

    @property
    def status(self) -> int | None:
        return self.channel.exit_status if self.channel.exit_status_ready() else None

    def send(self, data: bytes) -> None:
        self.channel.sendall(data)

    def _close_input(self) -> None:
        self.channel.shutdown_write()

    def _at_end(self) -> bool:
        return bool(self.channel.eof_received or self.channel.closed)

    def _wait(self, seconds: float | None) -> None:
        self._news.wait(seconds)
        self._news.reset()

    def _await_status(self, seconds: float | None) -> bool:
        return self.channel.status_event.wait(seconds)

    def _drain(self, on_stdout: OnData, on_stderr: OnData) -> None:
        while self.channel.recv_ready():
            on_stdout(self.channel.recv(_READ))
        while self.channel.recv_stderr_ready():
            on_stderr(self._without_pid(self.channel.recv_stderr(_READ)))

    def close(self) -> None:
        self.channel.close()
        if self._feeder is not None:
            self._feeder.join()


def ignore(data: bytes) -> None:
    """For output nobody wants."""


def _left(deadline: float) -> float | None:
    """Seconds to ``deadline``; None when there is none."""
    return None if deadline == float("inf") else max(0.0, deadline - time.monotonic())
