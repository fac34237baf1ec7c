"""A command on a node at the other end of an ``ssh`` process."""

from __future__ import annotations

import os
import select
import selectors
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from launcher.command import Command
from launcher.transport.channel import OnData, Remote, started_line

_READ = 1 << 16

_SSH_FAILED = 255  # also what ssh exits with for a command that a signal ended


class RemoteProcess(Remote):
    """Through the pipes of ``ssh …``; ``argv`` is all of its words but the command's."""

    def __init__(self, argv: Sequence[str], command: Command):
        super().__init__()
        self.process = subprocess.Popen(
            [*argv, started_line(command)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C on our terminal is not for it
        )
        assert self.process.stdin and self.process.stdout and self.process.stderr
        self._after_pid = b""  # stderr that came along with the pid
        self._stdin, self._writing = self.process.stdin, threading.Lock()
        self._pipes = selectors.DefaultSelector()
        for pipe, is_stdout in ((self.process.stdout, True), (self.process.stderr, False)):
            os.set_blocking(pipe.fileno(), False)
            self._pipes.register(pipe, selectors.EVENT_READ, is_stdout)

    def begun(self, deadline: float) -> bool:
        """Wait until the command says its pid; False when ssh could not start it (or does not in time)."""
        assert self.process.stderr is not None
        stderr = self.process.stderr
        while not self.pid and select.select([stderr], [], [], max(0.0, deadline - time.monotonic()))[0]:
            data = os.read(stderr.fileno(), _READ)
            self._after_pid += self._without_pid(data)
            if not data:
                break
        return bool(self.pid)

    @property
    def status(self) -> int | None:
        status = self.process.poll()
        return -1 if status is not None and (status == _SSH_FAILED or status < 0) else status

    def send(self, data: bytes) -> None:
        with self._writing:
            self._stdin.write(data)
            self._stdin.flush()

    def _close_input(self) -> None:
        with self._writing:
            self._stdin.close()

    def _at_end(self) -> bool:
        return not self._pipes.get_map()

    def _wait(self, seconds: float | None) -> None:
        self._pipes.select(seconds)

    def _await_status(self, seconds: float | None) -> bool:
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        return self.process.returncode is not None

    def _drain(self, on_stdout: OnData, on_stderr: OnData) -> None:
        after, self._after_pid = self._after_pid, b""
        on_stderr(after)
        for key, _ in self._pipes.select(0):
            data = os.read(key.fd, _READ)
            if not data:
                self._pipes.unregister(key.fileobj)
            elif key.data:
                on_stdout(data)
            else:
                on_stderr(self._without_pid(data))

    def close(self) -> None:
        """End ssh, not the command; a feeder that waits for room in the pipe ends with it."""
        self.process.kill()
        self.process.wait()
        if self._feeder is not None:
            self._feeder.join()
        self._pipes.close()
        for pipe in (self._stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()

    def words(self) -> str:
        """What ssh said instead of starting the command."""
        return self._early.decode(errors="replace").strip()
