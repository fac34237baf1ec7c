"""Progress of a starting run: which graph servers and ranks have started, and which graph servers are late."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from launcher.plan.model import LaunchPlan
from launcher.text import spans

_LATE = (8.0, 60.0, 180.0)  # seconds after the start at which graph servers that are not ready are reported


class StartProgress:
    """Counts the graph servers and ranks that have started. Times are in seconds since the start of the run."""

    def __init__(self, plan: LaunchPlan):
        self._servers = {node.node_rank for node in plan.nodes if node.server}
        self._expected = {"server-ready": len(self._servers), "ranks": plan.world_size}
        self._seen: Counter[str] = Counter()
        self._ready: set[int] = set()
        self._compiling: set[int] = set()
        self._reports = 0  # number of messages about late servers
        self.all_ranks_at: float | None = None

    def add(self, k: int, event: Mapping[str, Any], now: float) -> str:
        """Count an event of node ``k``; return a text to print, or ''.

        The text says that all servers are ready, that all ranks have started, or that a server cannot store its
        compiled kernels.
        """
        kind = "ranks" if event["kind"] == "process-start" and event.get("rank") is not None else event["kind"]
        self._seen[kind] += 1
        if kind == "server-ready":
            self._ready.add(k)
        elif kind == "server-compiles":
            self._compiling.add(k)
            if reason := event.get("reason"):
                return f"node{k}: {reason}; compiling them now takes up to two minutes"
        if self._seen[kind] != self._expected.get(kind):
            return ""
        if kind == "ranks":
            self.all_ranks_at = now
        what = "graph servers are ready" if kind == "server-ready" else "ranks have started"
        return f"all {what}: {self._expected[kind]} in {now:.1f} s"

    def late(self, now: float, over: Collection[int] = ()) -> str:
        """Return a message about the graph servers that are not ready; '' if all are ready, or no message is due.

        One message is due at each time in ``_LATE``. ``over``: nodes that have ended; the message does not name their
        servers.
        """
        late = self._servers - self._ready - set(over)
        if not late or self._reports == len(_LATE) or now < _LATE[self._reports]:
            return ""
        self._reports += 1
        compiling = sorted(late & self._compiling)
        words = [f"{spans(compiling, 'node')}: compiling kernels, up to two minutes on the first run of a host"]
        words = words if compiling else []
        if others := sorted(late - self._compiling):
            words.append(f"{spans(others, 'node')}: starting, see `gnnfleet logs --all`")
        ready = f"{len(self._servers & self._ready)} of {len(self._servers)} ready after {now:.0f} s"
        return f"waiting for graph servers: {ready}; {'; '.join(words)}"
