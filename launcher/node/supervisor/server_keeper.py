"""Starts a node's graph server, waits until it is ready, and restarts it when it dies."""

from __future__ import annotations

import glob
import os
import signal
import stat
import time
from collections.abc import Callable, Mapping
from typing import Any

from launcher.node import procs
from launcher.node.child_process import Child, Loop, outcome
from launcher.node.diagnostics.oom import OomWatch
from launcher.node.exit_description import describe
from launcher.node.peers.model import MAX_TEXT
from launcher.node.spec import NodeSpec
from launcher.node.supervisor.journal import Journal

_FIRST_PAUSE = 0.5  # seconds before the first restart of a server; doubled with each restart

_LATE = 3.0  # seconds after which a server without cached kernels is reported as compiling

#: Seconds by which a server that compiles its kernels first may be later: half a minute alone, minutes on a busy host.
COMPILING = 480.0

_FORGIVEN = 3600.0  # seconds after which a restart no longer counts towards run.server_restarts

Finding = dict[str, Any]


class ServerKeeper:
    """Starts and restarts the graph server of one node: call ``begin`` once, then ``look`` several times a second.

    ``start(name, command)`` starts a process; ``forget(child)`` removes an ended one from the supervisor's list.
    """

    def __init__(
        self,
        spec: NodeSpec,
        journal: Journal,
        loop: Loop,
        oom: OomWatch,
        start: Callable[[str, Mapping[str, Any]], Child],
        forget: Callable[[Child], None],
    ) -> None:
        self.child: Child | None = None
        self.ready = False
        self.limit = spec.start_timeout  #: seconds in which the server must be ready
        self.findings: list[Finding] = []  #: one for each restart
        self._spec, self._journal, self._loop, self._oom = spec, journal, loop, oom
        self._start, self._forget = start, forget
        self._was_ready = False
        self._report_compiling_at = float("inf")  # monotonic
        self._restarts: list[float] = []  # times of the restarts that count; monotonic
        self._again_at = self._deadline = 0.0
        self._last: dict[str, Any] = {}  # outcome of the last server that ended

    def begin(self) -> None:
        """Start the server for the first time. Raises OSError if the process cannot be started."""
        if os.path.exists(self._spec.ready_file):
            os.remove(self._spec.ready_file)
        assert self._spec.server is not None
        found, why = _kernels({**os.environ, **self._spec.server.get("env", {})})
        self._report_compiling_at = float("inf") if found or why else time.monotonic() + _LATE
        if why and not found:
            self._journal.event("server-compiles", reason=why)
        self.limit = self._spec.start_timeout + (0.0 if found else COMPILING)
        self.child, self.ready = self._start("server", self._spec.server), False
        self._deadline = time.monotonic() + self.limit

    @property
    def restarting(self) -> bool:
        """Whether a server that was ready before has been restarted and is not ready yet."""
        return self._was_ready and not self.ready

    @property
    def waiting(self) -> dict[str, Any] | None:
        """The outcome of a server that has died and will be restarted, until its restart; else None."""
        return self._last if self.child is None and self._last else None

    def look(self) -> str:
        """Check the server, and restart it when due. Returns why the node must fail, or ''."""
        if self.child is None:
            if time.monotonic() >= self._again_at:
                self.begin()
            return ""
        if not self.child.running():
            return self._died(self.child)
        if not self.ready and os.path.exists(self._spec.ready_file):
            self.ready = self._was_ready = True
            self._journal.event("server-ready", seconds=round(time.time() - self.child.started, 3))
        elif not self.ready and time.monotonic() > self._deadline:
            more = f" and {COMPILING:g} s for compiling kernels" if self.limit > self._spec.start_timeout else ""
            late = f"was not ready within {self._spec.start_timeout:g} s (run.start_timeout){more}"
            return f"{late}: it has not written {self._spec.ready_file}"
        elif not self.ready and time.monotonic() > self._report_compiling_at:
            self._report_compiling_at = float("inf")
            self._journal.event("server-compiles")
        return ""

    def _died(self, child: Child) -> str:
        ready = os.path.exists(self._spec.ready_file)
        why = "ended while it was needed" if ready else "ended before it was ready"
        if not self._was_ready and not ready:
            return why
        self._was_ready = True
        now = time.monotonic()
        self._restarts = [when for when in self._restarts if now - when < _FORGIVEN]
        if len(self._restarts) >= self._spec.server_restarts:
            count = len(self._restarts)
            tried = f", after {count} restart{'s' if count > 1 else ''} (run.server_restarts)" if count else ""
            return why + tried
        # The server is started again after a pause.
        pause = _FIRST_PAUSE * 2 ** len(self._restarts)
        self._restarts.append(now)
        self.child, self.ready, self._again_at = None, False, now + pause
        child.pump()
        more = self._oom.outcome_fields(child.pid) if child.status[1] == "SIGKILL" else {}
        self._last = outcome("server", self._spec.node_rank, None, child, **more)
        procs.send_group(child.pid, signal.SIGKILL)  # a remaining process could still hold the port
        self._loop.forget(child)
        self._forget(child)
        how = describe(self._last)[:MAX_TEXT]
        tries = f"{len(self._restarts)} of {self._spec.server_restarts}"
        self._journal.event("server-restart", reason=how, attempt=len(self._restarts), seconds=pause)
        text = f"server of {self._spec.label} {how}; restart {tries} in {pause:g} s"
        finding = {"t": time.time(), "kind": "server-restart", "node_rank": self._spec.node_rank, "rank": None}
        self.findings.append({**finding, "text": text, "stop": False})
        return ""


def _kernels(env: Mapping[str, str]) -> tuple[bool, str]:
    """Return whether a graph server with the environment ``env`` finds compiled kernels, and a warning or ''.

    The warning says that the usual cache folder is not writable, and which folder is used instead. Looks in the same
    folders as trainer/core/compiled.py.
    """
    cache = env.get("XDG_CACHE_HOME") or os.path.join(env.get("HOME", "~"), ".cache")
    folder = env.get("GNNFLEET_KERNELS") or os.path.join(os.path.expanduser(cache), "gnnfleet", "kernels")
    why = ""
    if not _writable(folder):
        usual = os.path.join(env.get("TMPDIR") or "/tmp", f"gnnfleet-kernels-{os.geteuid()}")
        # another user may have created a folder of the usual name
        taken = [path for path in (usual, *sorted(glob.glob(f"{glob.escape(usual)}-*"))) if os.path.lexists(path)]
        instead = next(filter(_own, taken), f"{usual}-*" if taken else usual)
        why = f"{folder} cannot be written, so compiled kernels are kept in {instead}"
        folder = instead
    try:
        return any(name.endswith(".nbc") for name in os.listdir(folder)), why
    except OSError:
        return False, why


def _own(folder: str) -> bool:
    found = os.lstat(folder)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o002


def _writable(folder: str) -> bool:
    """Whether files can be created in ``folder`` or, if it does not exist, in the nearest existing folder above it."""
    while not os.path.exists(folder) and folder != os.path.dirname(folder):
        folder = os.path.dirname(folder)
    return os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)
