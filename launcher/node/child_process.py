"""Child processes with time-stamped logs, and the event loop that waits for them."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from launcher.node import procs
from launcher.node.exit_description import looks_like_follow_up
from launcher.node.log_lines import LineLog

_READ = 1 << 16

_READS_AT_ONCE = 32  # enough to read a full pipe: one call of ``pump`` after the process's end reads all output


class Child:
    """A child process in its own session; its output goes to a log file. The kernel kills it when its parent ends.

    log: path of the log file. cwd: working directory; None for the parent's. inherited: file descriptors that the
    process gets, besides its standard ones. Raises OSError when the process cannot be
    started.
    """

    def __init__(
        self, name: str, argv: Sequence[str], log: str, *, env: Mapping[str, str], cwd: str | None = None,
        inherited: Sequence[int] = (),
    ):  # fmt: skip
        self.name = name
        self.log = LineLog(log)
        self.started = time.time()
        self.ended: float | None = None
        self.stop_sent = False  #: ``terminate`` was called before it ended by itself
        self.stop_sent_at = 0.0  #: monotonic seconds
        self.process = subprocess.Popen(
            list(argv),
            env=dict(env),
            cwd=cwd or None,
            pass_fds=inherited,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: procs.die_with_parent(signal.SIGKILL),
        )
        self.pid = self.process.pid
        seen = procs.look(self.pid)
        self.start_ticks = seen.start_ticks if seen else 0
        assert self.process.stdout is not None
        self._pipe = self.process.stdout.fileno()
        os.set_blocking(self._pipe, False)

    def fileno(self) -> int:
        """File descriptor of the pipe with the process's output. This method lets ``selectors`` accept a ``Child``."""
        return self._pipe

    def pump(self) -> bool:
        """Copy the output written so far to the log; return False once no process has the pipe open."""
        for _ in range(_READS_AT_ONCE):
            try:
                data = os.read(self._pipe, _READ)
            except BlockingIOError:
                return True
            if not data:
                return False
            self.log.feed(data)
        return True

    def running(self) -> bool:
        """Whether the process still runs. Sets ``ended`` when it has ended."""
        if self.ended is None and self.process.poll() is not None:
            self.ended = time.time()
        return self.ended is None

    def terminate(self, number: int = signal.SIGTERM) -> None:
        """Send a signal that ends it to the process group, unless the process has ended."""
        if self.running():
            self.stop_sent_at = self.stop_sent_at if self.stop_sent else time.monotonic()
            self.stop_sent = True
            procs.send_group(self.pid, number)

    def close(self) -> None:
        self.pump()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.log.close()

    @property
    def status(self) -> tuple[int | None, str | None]:
        """Exit status as in a shell (128 + n for signal n), and the signal's name; (None, None) while running."""
        number = self.process.returncode
        if number is None or number >= 0:
            return number, None
        return 128 - number, signal_name(-number)

    def record(self) -> dict[str, Any]:
        """{"name", "pid", "pgid", "start_ticks"}, by which other programs identify this process."""
        return {"name": self.name, "pid": self.pid, "pgid": self.pid, "start_ticks": self.start_ticks}


class Loop:
    """Single-threaded event loop: waits for output and exits of child processes, sockets, signals and timeouts.

    numbers: signals to catch. A caught signal is only appended to ``signals``, which the caller of ``poll`` checks.
    """

    def __init__(self, *numbers: int) -> None:
        self.signals: list[int] = []
        self._children: list[Child] = []
        self._selector = selectors.DefaultSelector()
        self._wake, write_end = os.pipe()
        for end in (self._wake, write_end):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        self._selector.register(self._wake, selectors.EVENT_READ)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # with a handler the end of a child wakes the selector
        for number in numbers:
            signal.signal(number, lambda received, _: self.signals.append(received))

    def add(self, child: Child) -> None:
        """Copy the output of ``child`` to its log from now on."""
        self._children.append(child)
        self._selector.register(child, selectors.EVENT_READ, child)

    def forget(self, child: Child) -> None:
        """Stop waiting for a child that has ended, and copy the rest of its output to its log."""
        self._children.remove(child)
        if child.fileno() in self._selector.get_map():
            self._selector.unregister(child)
        child.close()

    def watch(self, opened: socket.socket, events: int, ready: Callable[[int], None]) -> None:
        """Call ``ready(events)`` whenever a socket is ready for one of ``events`` (as defined in ``selectors``).

        A further call for the same socket replaces ``events`` and ``ready``.
        """
        known = opened in self._selector.get_map()
        (self._selector.modify if known else self._selector.register)(opened, events, ready)

    def unwatch(self, opened: socket.socket) -> None:
        """Stop watching a socket, if it is watched."""
        if opened in self._selector.get_map():
            self._selector.unregister(opened)

    def poll(self, timeout: float) -> None:
        """Handle what is ready within ``timeout`` seconds, and reap processes that have ended."""
        for key, events in self._selector.select(timeout):
            if key.data is None:
                os.read(self._wake, 4096)
            elif not isinstance(key.data, Child):
                # An earlier event of the same call may have closed the socket.
                if self._selector.get_map().get(key.fd) == key:
                    key.data(events)
            elif not key.data.pump():
                self._selector.unregister(key.data)
        # Adopted orphans are reaped, too, so that no zombies remain.
        own = {child.pid: child for child in self._children}
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            if ended.si_pid in own:
                own[ended.si_pid].running()
            else:
                os.waitpid(ended.si_pid, 0)


def signal_name(number: int) -> str:
    """Return the name of a signal: ``SIGTERM`` for 15, ``SIG40`` for a real-time signal."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"


def outcome(name: str, node_rank: int, rank: int | None, child: Child | None = None, **more: Any) -> dict[str, Any]:
    """Return an outcome record (docs/ARCHITECTURE.md, "Node run folder").

    more: fields that replace those taken from ``child``.
    """
    returncode, signaled = child.status if child else (None, None)
    record: dict[str, Any] = {
        "name": name,
        "node_rank": node_rank,
        "rank": rank,
        "pid": child.pid if child else None,
        "returncode": returncode,
        "signal": signaled,
        "started": child.started if child else None,
        "ended": child.ended if child else None,
        "failed": False,
        "stopped": bool(child and child.stop_sent),
        "oom": False,
        "max_rss": None,
        "note": "",
        "traceback": list(child.log.traceback.lines) if child else [],
        "tail": list(child.log.tail) if child else [],
    }
    record.update(more)
    record.setdefault("follow_up", rank is not None and record["failed"] and looks_like_follow_up(record))
    return record
