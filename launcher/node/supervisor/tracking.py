"""Runs the process that sends a run to its trackers (``train.track``), on the node with rank 0.

The process reads the metrics files by itself. What only supervisors know goes into its folder ``track/``: figures of
all nodes in ``nodes.json``, and how the run has ended in ``end.json``. ``track/<tracker>.json`` is its answer.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator, Mapping
from typing import Any

from launcher.node import procs
from launcher.node.child_process import Child
from launcher.node.diagnostics.host_load import HostLoad
from launcher.node.json_reader import read_json
from launcher.node.peers.hub import Hub
from launcher.node.record import write_json
from launcher.node.spec import NodeSpec
from launcher.node.supervisor.journal import LatestWriter
from launcher.node.supervisor.observer import End, Finding, Observer, Sight

_MARK = "GNNFLEET_TRACKERS"

_PATIENCE, _SHORT_PATIENCE = 10.0, 2.0  # seconds that trackers get after the run; the second if it must end at once

_MARGIN = 3.0  # seconds beyond that in which the process ends

_INTERVAL = 5.0  # seconds between two looks

_SHOWN = ("seeds_per_s", "remote_share", "own_s", "step_s", "batch_s", "device")  # of the last metrics of a rank


class Tracking(Observer):
    """Runs the process on the node with rank 0; on other nodes that may train it only reports their load."""

    kind = "tracker"

    def __init__(self, *of_node: Any) -> None:
        super().__init__(*of_node)
        self._load = HostLoad(self.first.run_dir)
        self._names: list[str] = []
        self._child: Child | None = None
        self._figures: LatestWriter | None = None
        self._told: set[tuple[str, str]] = set()
        self._next = self._deadline = 0.0
        self._sight: Sight | None = None  #: the last one

    @staticmethod
    def wanted(spec: NodeSpec) -> bool:
        return spec.tracker is not None

    def begin(self, spec: NodeSpec, restart: Mapping[str, Any] | None) -> None:
        """Start the process if this node has rank 0 in the attempt that begins, unless it runs."""
        assert spec.tracker is not None
        if 0 not in spec.ranks:
            elsewhere = {"reason": "the run goes on with rank 0 on another node"}
            return self.conclude(End("stopped", None, report=elsewhere))
        if self._child is not None and not self._deadline:
            return
        self._end_process()
        self._names = list(spec.tracker["job"]["trackers"])
        # Without the variable of other processes: these end earlier.
        value = procs.node_token(spec.token, spec.node_rank)
        env = {name: text for name, text in os.environ.items() if name != procs.TOKEN}
        env |= {**spec.tracker["env"], _MARK: value}
        self.mark = f"{_MARK}={value}"  # W&B's client starts further processes, which inherit it
        try:
            os.makedirs(self.journal.path("track"), exist_ok=True)
            for name in ("end.json", "nodes.json"):
                if os.path.exists(path := self.journal.path("track", name)):
                    os.unlink(path)
            write_json(self.journal.path("track", "job.json"), spec.tracker["job"])
            log = self.journal.path("logs", "track.log")
            self._child = Child("track", spec.tracker["argv"], log, env=env, cwd=spec.tracker["cwd"])
        except OSError as error:
            return self.journal.log(f"the trackers could not be started: {error.strerror}")
        self.loop.add(self._child)
        self._figures, self._deadline = LatestWriter(self.journal.path("track", "nodes.json")), 0.0

    def look(self, sight: Sight) -> list[Finding]:
        """Hand on the load of nodes and the last metrics of ranks, as far as this node knows them.

        Returns findings about trackers that fail.
        """
        self.signs["host"], self._sight = self._load.look(), sight
        if self._child is None or time.monotonic() < self._next:
            return []
        self._next = time.monotonic() + _INTERVAL
        if not self._child.running() and self._child.status[0] and ("", "problem") not in self._told:
            self._told.add(("", "problem"))
            return [self.finding(f"the process for {' and '.join(self._names)} ended; see logs/track.log")]
        if self._figures is not None and not self._deadline:
            self._put_figures(self._figures, sight)
        return list(self._news())

    def _put_figures(self, figures: LatestWriter, sight: Sight) -> None:
        members = sight.peers.members if isinstance(sight.peers, Hub) else {}
        nodes = {k: member.host for k, member in members.items()} | {self.first.node_rank: self.signs["host"]}
        ranks = {int(rank): one for member in members.values() for rank, one in member.ranks.items()}
        ranks |= sight.state["ranks"]
        shown = {rank: {name: one[name] for name in _SHOWN if one.get(name)} for rank, one in ranks.items()}
        figures.put(json.dumps({"t": time.time(), "nodes": nodes, "ranks": shown}))

    def conclude(self, end: End) -> None:
        """Tell the process how the run has ended."""
        if self._child is None or self._deadline:
            return
        patience = _SHORT_PATIENCE if end.now else _PATIENCE
        self._deadline = time.monotonic() + patience + _MARGIN
        if self._figures is not None:
            if self._sight is not None:  # of a short run the first figures had nothing of the ranks yet
                self._put_figures(self._figures, self._sight)
            self._figures.settle(1.0)
        self.journal.put(
            "track/end.json", {"state": end.state, "report": dict(end.report), "patience": patience}, write_json
        )

    def ended(self, sight: Sight, end: End) -> list[Finding]:
        """Wait until the process has ended, or is killed at its deadline; return the last findings."""
        return self._end_process()

    def _end_process(self) -> list[Finding]:
        if self._child is None:
            return []
        while self._child.running() and time.monotonic() < self._deadline:
            self.idle(0.05)
        procs.end(lambda: procs.with_variable(self.mark), 0.0, lambda: self.idle(0.05))
        procs.send_group(self._child.pid, signal.SIGKILL)  # it may have given itself another environment
        give_up = time.monotonic() + _MARGIN  # as for a process that waits for its disk
        while self._child.running() and time.monotonic() < give_up:
            self.idle(0.05)
        self.loop.forget(self._child)
        self._child = None
        return list(self._news())

    def _news(self) -> Iterator[Finding]:
        """Log where each tracker shows the run, and yield a finding about each that lacks something; once."""
        for name in self._names:
            try:
                state = read_json(self.journal.path("track", f"{name}.json")) or {}
            except (OSError, ValueError):
                state = {}
            if state.get("id") and (name, "id") not in self._told:
                self._told.add((name, "id"))
                place = state.get("url") or self.journal.path("track", str(state.get("folder")))
                self.journal.event("tracker", name=name, text=f"{name}: run {state['id']}, {place}")
            if state.get("problem") and (name, "problem") not in self._told:
                self._told.add((name, "problem"))
                yield self.finding(f"{name}: {state['problem']}")

    def finding(self, text: str) -> Finding:
        return super().finding(f"{text}; the run itself is not affected")
