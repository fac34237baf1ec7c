"""Runs the process that sends a run to its trackers (``train.track``), on the node with rank 0.

The process reads the metrics files by itself. What only supervisors know goes into its folder ``track/``: figures of
all nodes in ``nodes.json``, and how the run has ended in ``end.json``. ``track/<tracker>.json`` is its answer.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from launcher.node import procs
from launcher.node.child_process import Child, Loop
from launcher.node.json_reader import read_json
from launcher.node.record import write_json
from launcher.node.spec import NodeSpec
from launcher.node.supervisor.journal import Journal, LatestWriter

_MARK = "GNNFLEET_TRACKERS"

_PATIENCE, _SHORT_PATIENCE = 10.0, 2.0  # seconds that trackers get after the run; the second if it must end at once

_MARGIN = 3.0  # seconds beyond that in which the process ends

_INTERVAL = 5.0  # seconds between two looks

_SHOWN = ("seeds_per_s", "remote_share", "own_s", "step_s", "batch_s", "device")  # of the last metrics of a rank


class Tracking:
    def __init__(self, journal: Journal, loop: Loop, idle: Callable[[float], object]) -> None:
        self._journal, self._loop, self._idle = journal, loop, idle
        self.mark = ""  #: variable in the environment of its processes, of which W&B's client starts some; '' without
        self._names: list[str] = []
        self._child: Child | None = None
        self._figures: LatestWriter | None = None
        self._told: set[tuple[str, str]] = set()
        self._next = self._deadline = 0.0

    def begin(self, spec: NodeSpec) -> None:
        """Start the process if this node has rank 0 in the attempt that begins, unless it runs."""
        if spec.tracker is None:
            return
        if 0 not in spec.ranks:
            return self.conclude("stopped", {"reason": "the run goes on with rank 0 on another node"})
        if self._child is not None and not self._deadline:
            return
        self.close()
        self._names = list(spec.tracker["job"]["trackers"])
        # Without the variable of other processes: these end earlier.
        value = procs.node_token(spec.token, spec.node_rank)
        env = {name: text for name, text in os.environ.items() if name != procs.TOKEN}
        env |= {**spec.tracker["env"], _MARK: value}
        self.mark = f"{_MARK}={value}"
        try:
            os.makedirs(self._journal.path("track"), exist_ok=True)
            for name in ("end.json", "nodes.json"):
                if os.path.exists(path := self._journal.path("track", name)):
                    os.unlink(path)
            write_json(self._journal.path("track", "job.json"), spec.tracker["job"])
            log = self._journal.path("logs", "track.log")
            self._child = Child("track", spec.tracker["argv"], log, env=env, cwd=spec.tracker["cwd"])
        except OSError as error:
            return self._journal.log(f"the trackers could not be started: {error.strerror}")
        self._loop.add(self._child)
        self._figures, self._deadline = LatestWriter(self._journal.path("track", "nodes.json")), 0.0

    def look(self, nodes: Mapping[int, Mapping[str, float]], ranks: Mapping[int, Mapping[str, Any]]) -> list[Any]:
        """Hand on the figures of nodes and the last metrics of ranks, and return findings about trackers that fail.

        nodes: ``HostLoad.look`` of each node. ranks: as in ``Vitals.ranks``. Both as far as this node knows them.
        """
        if self._child is None or time.monotonic() < self._next:
            return []
        self._next = time.monotonic() + _INTERVAL
        if not self._child.running() and self._child.status[0] and ("", "problem") not in self._told:
            self._told.add(("", "problem"))
            return [self._finding(f"the process for {' and '.join(self._names)} ended; see logs/track.log")]
        if self._figures is not None and not self._deadline:
            shown = {rank: {name: one[name] for name in _SHOWN if one.get(name)} for rank, one in ranks.items()}
            self._figures.put(json.dumps({"t": time.time(), "nodes": nodes, "ranks": shown}))
        return list(self._news())

    def conclude(self, state: str, report: Mapping[str, Any], *, now: bool = False) -> None:
        """Tell the process how the run has ended: done, failed or stopped. report: further words and figures."""
        if self._child is None or self._deadline:
            return
        patience = _SHORT_PATIENCE if now else _PATIENCE
        self._deadline = time.monotonic() + patience + _MARGIN
        if self._figures is not None:
            self._figures.settle(1.0)
        self._journal.put("track/end.json", {"state": state, "report": dict(report), "patience": patience}, write_json)

    def close(self) -> list[Any]:
        """Wait until the process has ended, or is killed at its deadline; return the last findings."""
        if self._child is None:
            return []
        while self._child.running() and time.monotonic() < self._deadline:
            self._idle(0.05)
        procs.end(lambda: procs.with_variable(self.mark), 0.0, lambda: self._idle(0.05))
        while self._child.running():
            self._idle(0.05)
        self._loop.forget(self._child)
        self._child = None
        return list(self._news())

    def _news(self) -> Iterator[dict[str, Any]]:
        """Log where each tracker shows the run, and yield a finding about each that lacks something; once."""
        for name in self._names:
            try:
                state = read_json(self._journal.path("track", f"{name}.json")) or {}
            except (OSError, ValueError):
                state = {}
            if state.get("id") and (name, "id") not in self._told:
                self._told.add((name, "id"))
                place = state.get("url") or self._journal.path("track", str(state.get("folder")))
                self._journal.event("tracker", name=name, text=f"{name}: run {state['id']}, {place}")
            if state.get("problem") and (name, "problem") not in self._told:
                self._told.add((name, "problem"))
                yield self._finding(f"{name}: {state['problem']}")

    def _finding(self, why: str) -> dict[str, Any]:
        finding = {"t": time.time(), "kind": "tracker", "node_rank": self._journal.node_rank, "rank": None}
        return {**finding, "text": f"{why}; the run itself is not affected", "stop": False}
