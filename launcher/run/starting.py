"""What the start of a run has come to, in words: what is ready, and, where that takes long, what it waits for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from launcher.plan.build import LaunchPlan
from launcher.words import spans

_LATE = (8.0, 60.0, 180.0)  # seconds after the start at which graph servers that are not ready are named


class Starting:
    """Takes the nodes' events; all times are seconds since the start."""

    def __init__(self, plan: LaunchPlan):
        self._servers = {node.node_rank for node in plan.nodes if node.server}
        self._wanted = {"server-ready": len(self._servers), "ranks": plan.world_size}
        self._seen: Counter[str] = Counter()
        self._ready: set[int] = set()
        self._compiling: set[int] = set()
        self._lines = 0  # told of servers that are late
        self.all_ranks_at: float | None = None

    def take(self, k: int, event: Mapping[str, Any], now: float) -> str:
        """One line when all graph servers are ready, one when all ranks have started; else ''."""
        kind = "ranks" if event["kind"] == "process-start" and event.get("rank") is not None else event["kind"]
        self._seen[kind] += 1
        if kind == "server-ready":
            self._ready.add(k)
        elif kind == "server-compiles":
            self._compiling.add(k)
        if self._seen[kind] != self._wanted.get(kind):
            return ""
        if kind == "ranks":
            self.all_ranks_at = now
        things = "graph servers are ready" if kind == "server-ready" else "ranks have started"
        return f"all {things}: {self._wanted[kind]} in {now:.1f} s"

    def late(self, now: float, over: Collection[int] = ()) -> str:
        """A line that names graph servers which are late, now and then; '' while there is nothing to say.

        over: nodes that have ended, for which nobody waits.
        """
        late = self._servers - self._ready - set(over)
        if not late or self._lines == len(_LATE) or now < _LATE[self._lines]:
            return ""
        self._lines += 1
        compiling = sorted(late & self._compiling)
        words = [f"{spans(compiling, 'node')}: kernels are compiled, up to a minute or two on a host's first run"]
        words = words if compiling else []
        if others := sorted(late - self._compiling):
            words.append(f"{spans(others, 'node')}: starting, `gnnfleet logs --all` has its words")
        ready = f"{len(self._servers & self._ready)} of {len(self._servers)} ready after {now:.0f} s"
        return f"waiting for graph servers: {ready}; {'; '.join(words)}"
