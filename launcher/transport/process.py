"""Runs commands on a node: waits for their end, streams their output, or exchanges lines with them.

The code is the same for pipes of a subprocess and for SSH channels (``Process``).
"""

from __future__ import annotations

import math
import os
import re
import selectors
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher.command import Command, shell_line
from launcher.errors import CommandTimeout, TransportError
from launcher.node.json_reader import MAX_LINE
from launcher.transport.base import Completed, OnLine, Talk, Transport

READ_SIZE = 1 << 16

STALL = 60.0  #: seconds without progress after which a transfer or the start of a command fails

_INLINE_STDIN = 1 << 15  # bytes that fit into every SSH server's first window, so that sending does not block

_POLL = 0.1  # seconds between checks of a stop event, at least

_POLLS = 1000  # such checks per second, at most, over all streams of this process

_END_WAIT = 3.0  # seconds a command gets to end by itself after its stdin is closed

_JOIN_TIMEOUT = 5.0  # seconds

_MOST_STDERR = 8 << 20  # bytes of stderr that are kept, the last ones

# Closing an SSH channel does not end its command, and sshd forwards signals only for users other than root. Therefore
# each command first writes its pid to stderr, and a second command kills it.
_PID_LINE = re.compile(rb"gnnfleet-pid:(\d+)\n")

_PRINT_PID = "echo gnnfleet-pid:$$ >&2"


def with_pid(command: Command) -> str:
    """Return a command line for a node's login shell that runs ``command`` and first prints its pid to stderr."""
    return shell_line(replace(command, setup=(_PRINT_PID, *command.setup)))


class Process(ABC):
    """A started command. ``stdout`` and ``stderr`` buffer its output until the caller removes it."""

    def __init__(self) -> None:
        self.pid = 0  #: pid on the node; 0 until the command has written it
        self.stdout, self.stderr = bytearray(), bytearray()
        self._feeder: threading.Thread | None = None

    @property
    @abstractmethod
    def status(self) -> int | None:
        """Exit status, negative after a signal (-1: signal unknown); None while the command is running."""

    @abstractmethod
    def send(self, data: bytes) -> None:
        """Write to stdin and leave it open. Raises OSError if the command has ended."""

    @abstractmethod
    def close_input(self) -> None: ...

    @abstractmethod
    def read(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for output and append it to ``stdout`` and ``stderr``; False at end of output."""

    @abstractmethod
    def await_status(self, seconds: float | None) -> bool:
        """Wait up to ``seconds`` (None: without limit) for the exit status; False if the command is still running."""

    @abstractmethod
    def close(self) -> None: ...

    def feed(self, data: bytes) -> None:
        """Write ``data`` to stdin and close it. A thread writes long data, since the command may read late."""
        if len(data) <= _INLINE_STDIN:
            self._send_all(data)
        else:
            self._feeder = threading.Thread(target=self._send_all, args=(data,), name="ssh-stdin", daemon=True)
            self._feeder.start()

    def _send_all(self, data: bytes) -> None:
        with suppress(Exception):  # a command need not read its stdin; a lost connection is detected by reading
            self.send(data)
            self.close_input()

    def join_feeder(self) -> None:
        """Wait up to 5 s for the end of the thread that ``feed`` may have started."""
        if self._feeder is not None:
            self._feeder.join(_JOIN_TIMEOUT)

    def finish(self, deadline: float) -> bool:
        """Read until the command ends; False if it has not ended by ``deadline`` (monotonic time).

        Raises TransportError if stdout grows beyond ``MAX_LINE`` bytes.
        """
        while self.read(max(0.0, deadline - time.monotonic())):
            if len(self.stdout) > MAX_LINE:
                raise TransportError(f"a command printed more than {MAX_LINE >> 20} MiB")
            if time.monotonic() >= deadline:
                return False
        return self.await_status(max(0.0, deadline - time.monotonic()))

    def take_lines(self) -> list[str]:
        """Remove and return the complete lines of stdout; an incomplete last line stays in the buffer.

        Raises TransportError for a line of more than ``MAX_LINE`` bytes.
        """
        end = self.stdout.rfind(b"\n") + 1
        lines = self.stdout[:end].split(b"\n")[:-1]
        del self.stdout[:end]
        if len(self.stdout) > MAX_LINE:
            raise TransportError(f"a command printed a line of more than {MAX_LINE >> 20} MiB")
        return [line.rstrip(b"\r").decode("utf-8", "replace") for line in lines]

    def await_pid(self, deadline: float) -> int:
        """Return the pid that the command writes to stderr; 0 if none comes by ``deadline`` (monotonic time)."""
        while not self.pid and time.monotonic() < deadline and self.read(max(0.0, deadline - time.monotonic())):
            pass
        return self.pid

    def _add_stderr(self, data: bytes) -> None:
        self.stderr += data
        del self.stderr[:-_MOST_STDERR]
        if not self.pid and (found := _PID_LINE.search(self.stderr)):
            self.pid = int(found[1])
            del self.stderr[found.start() : found.end()]


_streaming: set[Process] = set()  # the commands whose output ``ProcessTransport.stream`` is reading


class PipeProcess(Process):
    """A subprocess of the launcher: a local command, or an ssh client that runs a remote one."""

    def __init__(self, argv: Sequence[str], cwd: Path | None = None, env: Mapping[str, str] | None = None):
        super().__init__()
        self.process = subprocess.Popen(
            argv,
            cwd=cwd,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # its own process group: Ctrl-C on the launcher's terminal must not end it
        )
        assert self.process.stdin and self.process.stdout and self.process.stderr
        self._stdin, self._writing = self.process.stdin, threading.Lock()
        self._pipes = selectors.DefaultSelector()
        self._pipes.register(self.process.stdout, selectors.EVENT_READ, self.stdout.extend)
        self._pipes.register(self.process.stderr, selectors.EVENT_READ, self._add_stderr)

    @property
    def status(self) -> int | None:
        return self.process.poll()

    def send(self, data: bytes) -> None:
        with self._writing:
            self._stdin.write(data)
            self._stdin.flush()

    def close_input(self) -> None:
        with self._writing:
            self._stdin.close()

    def read(self, seconds: float) -> bool:
        if not self._pipes.get_map():
            return False
        for key, _ in self._pipes.select(seconds):
            data = os.read(key.fd, READ_SIZE)
            key.data(data)
            if not data:
                self._pipes.unregister(key.fileobj)
        return True

    def await_status(self, seconds: float | None) -> bool:
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        return self.process.returncode is not None

    def close(self) -> None:
        # Killing the subprocess also unblocks the thread of ``feed``.
        self.process.kill()
        self.process.wait()
        self.join_feeder()
        self._pipes.close()
        for pipe in (self._stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()


class ProcessTransport(Transport):
    """Base of transports that run commands as a ``Process``; subclasses start and kill them."""

    @abstractmethod
    def _begin(self, command: Command, deadline: float) -> Process:
        """Start a command by ``deadline`` (monotonic time)."""

    @abstractmethod
    def _kill(self, process: Process) -> None:
        """Kill a command and its children, unless it has ended."""

    def status_of(self, process: Process) -> int:
        """Return the exit status of a command whose output has ended; -1 if unknown."""
        return -1 if process.status is None else process.status

    def translated(self) -> AbstractContextManager[None]:
        """Return a context in which errors of the connection are raised as TransportError."""
        return nullcontext()

    @contextmanager
    def _started(self, command: Command, deadline: float) -> Iterator[Process]:
        process = self._begin(command, deadline)
        try:
            yield process
        finally:
            process.close()

    def run(self, command: Command, *, stdin: bytes = b"", timeout: float) -> Completed:
        deadline = time.monotonic() + timeout
        with self._started(command, deadline) as process:
            process.feed(stdin)
            try:
                ended = process.finish(deadline)
            except TransportError:
                self._kill(process)
                raise
            if not ended:
                self._kill(process)
                raise self._timed_out(command, timeout)
            return Completed(self.status_of(process), bytes(process.stdout), bytes(process.stderr))

    def stream(self, command: Command, on_line: OnLine, stop: threading.Event) -> int:
        with self._started(command, math.inf) as process:
            _streaming.add(process)
            try:
                more = True
                while more and not stop.is_set():
                    more = process.read(max(_POLL, len(_streaming) / _POLLS))
                    for line in process.take_lines():
                        on_line(line)
                    if process.pid:
                        process.stderr.clear()
            except BaseException:
                self._kill(process)
                raise
            finally:
                _streaming.discard(process)
            if stop.is_set():
                self._kill(process)
                return -1
            process.await_status(None)
            return self.status_of(process)

    def talk(self, command: Command) -> Talk:
        with ExitStack() as stack:
            process = stack.enter_context(self._started(command, time.monotonic() + STALL))
            stack.callback(self._kill, process)
            return _ProcessTalk(self, process, command.argv[0], stack.pop_all().close)

    def _timed_out(self, command: Command, timeout: float) -> CommandTimeout:
        message = f"`{command.argv[0]}` did not end within {timeout:g} s"
        return CommandTimeout(message, host=self.target, node_rank=self.node_rank)


class _ProcessTalk(Talk):
    """A ``Talk`` with a ``Process``. ``end`` kills the command if it is still running, and closes its pipes."""

    def __init__(self, transport: ProcessTransport, process: Process, name: str, end: Callable[[], None]):
        self._transport, self._process, self._name, self._end = transport, process, name, end
        self._lines: deque[str] = deque()
        self._at_end = self._closed = False

    def send(self, line: str) -> None:
        with self._transport.translated():
            try:
                self._process.send(line.encode() + b"\n")
            except OSError:
                self._transport.status_of(self._process)  # raises ConnectionLost if the connection is lost
                raise TransportError(f"`{self._name}` has ended", **self._where()) from None

    def receive(self, timeout: float) -> str | None:
        deadline = time.monotonic() + timeout
        self._lines += self._process.take_lines()
        while not self._lines and not self._at_end:
            if (left := deadline - time.monotonic()) <= 0:
                raise CommandTimeout(f"`{self._name}` did not answer within {timeout:g} s", **self._where())
            with self._transport.translated():
                self._at_end = not self._process.read(left)
                if self._at_end:
                    self._process.await_status(max(0.0, deadline - time.monotonic()))
                    self._transport.status_of(self._process)
            self._lines += self._process.take_lines()
        return self._lines.popleft() if self._lines else None

    def ended(self) -> Completed:
        with self._transport.translated():
            return Completed(self._transport.status_of(self._process), b"", bytes(self._process.stderr))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with suppress(TransportError):  # with a lost connection, the command sees end of file on its stdin
            with suppress(Exception):
                self._process.close_input()
                self._process.await_status(_END_WAIT)
            self._end()

    def _where(self) -> dict[str, Any]:
        return {"host": self._transport.target, "node_rank": self._transport.node_rank}
