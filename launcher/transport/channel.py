"""One command on one SSH channel: feed it, read it, know how to end it."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import paramiko

from launcher.script import Command, shell_line

_READ = 1 << 16
_INLINE_STDIN = 1 << 15  # what every server's first window takes without waiting
# Closing a channel ends nothing, and sshd takes signals only for users other than root. So
# each command first says on stderr which process it is, and is ended by a second command.
_PID_LINE = re.compile(rb"gnnfleet-pid:(\d+)\n")
_SAY_PID = "echo gnnfleet-pid:$$ >&2"

OnData = Callable[[bytes], None]


class _Wake(threading.Event):
    """Told by both buffers of a channel. They also clear it when one runs empty, which
    would hide news of the other, so only the reader may."""

    def clear(self) -> None:
        pass

    def reset(self) -> None:
        super().clear()


class RemoteCommand:
    """A started command on ``channel``. ``pid`` is its process there, 0 until it has said so."""

    def __init__(self, channel: paramiko.Channel, command: Command):
        self.channel, self.pid = channel, 0
        self._early = b""  # stderr before the pid was said
        self._wake = _Wake()
        self._feeder: threading.Thread | None = None
        channel.in_buffer.set_event(self._wake)
        channel.in_stderr_buffer.set_event(self._wake)
        channel.exec_command(shell_line(replace(command, setup=(_SAY_PID, *command.setup))))

    def feed(self, data: bytes) -> None:
        """Send all of stdin and close it; a long one from a thread, as the command may write first."""
        if len(data) <= _INLINE_STDIN:
            self._send(data)
        else:
            self._feeder = threading.Thread(target=self._send, args=(data,), name="ssh-stdin", daemon=True)
            self._feeder.start()

    def _send(self, data: bytes) -> None:
        with suppress(OSError, paramiko.SSHException, EOFError):  # a command need not read its stdin
            self.channel.sendall(data)
            self.channel.shutdown_write()

    def send(self, data: bytes) -> None:
        """Send some of stdin, which stays open; raises OSError when the command has ended."""
        self.channel.sendall(data)

    def end_input(self, seconds: float) -> None:
        """Close stdin and give the command some time to end by itself."""
        with suppress(OSError, paramiko.SSHException, EOFError):
            self.channel.shutdown_write()
            self.channel.status_event.wait(seconds)

    def read_some(self, on_stdout: OnData, on_stderr: OnData, deadline: float) -> bool:
        """Hand on what has come, at the latest at ``deadline``; False when nothing more can come."""
        if self.channel.eof_received or self.channel.closed:
            return False
        self._wake.wait(_left(deadline))
        self._wake.reset()
        self._drain(on_stdout, on_stderr)
        return True

    def read(self, on_stdout: OnData, on_stderr: OnData, deadline: float, stop: threading.Event | None = None) -> bool:
        """Hand output on as it comes; True at its end, False when stopped or past the deadline."""
        while not (self.channel.eof_received or self.channel.closed):
            # with a stop event, look at it ten times a second; data wakes at once
            self._wake.wait(0.1 if stop else _left(deadline))
            self._wake.reset()
            self._drain(on_stdout, on_stderr)
            if (stop is not None and stop.is_set()) or time.monotonic() >= deadline:
                return False
        ended = self.channel.status_event.wait(_left(deadline))
        self._drain(on_stdout, on_stderr)
        on_stderr(self._early)
        return ended

    def await_pid(self, deadline: float) -> int:
        """The command's pid, 0 when it does not say by ``deadline``; output meanwhile is dropped."""
        while not (self.pid or self.channel.closed) and time.monotonic() < deadline:
            self._wake.wait(_left(deadline))
            self._wake.reset()
            self._drain(ignore, ignore)
        return self.pid

    def _drain(self, on_stdout: OnData, on_stderr: OnData) -> None:
        while self.channel.recv_ready():
            on_stdout(self.channel.recv(_READ))
        while self.channel.recv_stderr_ready():
            data = self.channel.recv_stderr(_READ)
            on_stderr(data if self.pid else self._without_pid(data))

    def _without_pid(self, data: bytes) -> bytes:
        """Keep stderr back until the line with the pid has come, and take that out."""
        self._early += data
        if found := _PID_LINE.search(self._early):
            self.pid = int(found[1])
            data, self._early = self._early[: found.start()] + self._early[found.end() :], b""
            return data
        return b""

    def close(self) -> None:
        self.channel.close()
        if self._feeder is not None:
            self._feeder.join()


def ignore(data: bytes) -> None:
    """For output nobody wants."""


def _left(deadline: float) -> float | None:
    """Seconds to ``deadline``; None when there is none."""
    return None if deadline == float("inf") else max(0.0, deadline - time.monotonic())
