"""One command on one SSH channel: feed it, read it, end it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

import paramiko
from paramiko.common import cMSG_CHANNEL_REQUEST

_READ = 1 << 16
_INLINE_STDIN = 1 << 15  # what every server's first window takes without waiting
_KILL_AFTER = 1.0  # seconds a stopped command gets between SIGTERM and SIGKILL

OnData = Callable[[bytes], None]


class _Wake(threading.Event):
    """Told by both buffers of a channel. They also clear it when one runs empty, which
    would hide news of the other, so only the reader may."""

    def clear(self) -> None:
        pass

    def reset(self) -> None:
        super().clear()


class RemoteCommand:
    """A started command on ``channel``."""

    def __init__(self, channel: paramiko.Channel, line: str):
        self.channel = channel
        self._wake = _Wake()
        self._feeder: threading.Thread | None = None
        channel.in_buffer.set_event(self._wake)
        channel.in_stderr_buffer.set_event(self._wake)
        channel.exec_command(line)

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
        return ended

    def _drain(self, on_stdout: OnData, on_stderr: OnData) -> None:
        while self.channel.recv_ready():
            on_stdout(self.channel.recv(_READ))
        while self.channel.recv_stderr_ready():
            on_stderr(self.channel.recv_stderr(_READ))

    def kill(self) -> None:
        """SIGTERM to the command's process group, SIGKILL when it stays (sshd 7.9 or newer)."""
        for name in ("TERM", "KILL"):
            if self.channel.closed or self.channel.exit_status_ready():
                return
            self._signal(name)
            self.channel.status_event.wait(_KILL_AFTER)

    def _signal(self, name: str) -> None:
        message = paramiko.Message()
        message.add_byte(cMSG_CHANNEL_REQUEST)
        message.add_int(self.channel.remote_chanid)
        message.add_string("signal")
        message.add_boolean(False)
        message.add_string(name)
        with suppress(OSError, paramiko.SSHException, EOFError):  # the line may be gone already
            self.channel.get_transport()._send_user_message(message)  # type: ignore[attr-defined]

    def close(self) -> None:
        self.channel.close()
        if self._feeder is not None:
            self._feeder.join()


def _left(deadline: float) -> float | None:
    """Seconds to ``deadline``; None when there is none."""
    return None if deadline == float("inf") else max(0.0, deadline - time.monotonic())
