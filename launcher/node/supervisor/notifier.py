"""Tells the people of a run what happens to it (``run.notify``): from the nodes, so that it needs no launcher.

One supervisor speaks for the run: the hub. If the hub is lost, and with it the run, the remaining node with the lowest
node_rank does. Each message is sent by a process of its own, which the run never waits for before its end.
"""

from __future__ import annotations

import json
import math
import os
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from launcher.node import procs
from launcher.node.child_process import Child
from launcher.node.json_reader import loads
from launcher.node.peers.member import Member
from launcher.node.peers.model import Peers, sentence
from launcher.node.programs import notify
from launcher.node.regular_file import open_regular
from launcher.node.spec import NodeSpec
from launcher.node.supervisor.observer import End, Finding, Observer, Sight

#: What is told of findings; one that ends the run is told as the failure.
_FINDINGS = {"nan": "nan", "stall": "stall", "node-lost": "lost", "server-lost": "lost"}

_PAUSES = (2.0, 8.0)  # seconds before the second and the third attempt to send a message

_AT_THE_END = 5.0  # seconds in which the last message should arrive before the end of the node is recorded

_LEAVING = 45.0  # seconds that a supervisor stays for messages that still wait for an answer

_MARK = "GNNFLEET_NOTIFIER"

_SPLITS = ("train_", "val_", "test_")

_TAIL = 1 << 16  # bytes at the end of the metrics in which the result stands


class Notifier(Observer):
    """Sends the messages of one node; none unless this node speaks for the run."""

    kind = "notify"

    def __init__(self, *of_node: Any) -> None:
        super().__init__(*of_node)
        self._mark = procs.node_token(self.first.token, self.first.node_rank)
        self.mark = f"{_MARK}={self._mark}"
        self._sending: list[tuple[str, Child]] = []  # event and process of each message under way
        self._told: set[tuple[str, Any]] = set()
        self._told_until = 0.0  # time of the last restart: findings before it have been told

    @staticmethod
    def wanted(spec: NodeSpec) -> bool:
        return bool(spec.notify)

    def begin(self, spec: NodeSpec, restart: Mapping[str, Any] | None) -> None:
        """Tell of an automatic restart, if this node is the hub of the new attempt."""
        if restart is None:
            return
        self._told.clear()
        self._told_until = restart["t"]
        if spec.hub == spec.node_rank:
            cause = {"node_rank": restart["cause_node"], "reason": restart["reason"]}
            self._tell("restart", "running", restart["text"], {"cause": cause, "restarts": spec.generation})

    def look(self, sight: Sight) -> list[Finding]:
        """Send a message about each new finding on any node; return findings about messages that did not arrive."""
        for one in sight.findings if self._speaks(sight.peers) else ():
            told = _FINDINGS.get(one["kind"])
            # A NaN reaches all ranks, and a stall all nodes: the first is told.
            key = (one["kind"], one["node_rank"] if told == "lost" else None)
            if told and not one["stop"] and one["t"] > self._told_until and key not in self._told:
                self._told.add(key)
                self._tell(told, "running", one["text"], {"node_rank": one["node_rank"], "rank": one["rank"]})
        return self._arrived(0.0)

    def ended(self, sight: Sight, end: End) -> list[Finding]:
        """Send the message about the end of the run; wait briefly until it has arrived."""
        if end.left or not self._speaks(sight.peers):
            return []
        spec, cause = sight.spec, end.cause
        state = "done" if cause is None else "stopped" if cause["kind"] == "stop" else "failed"
        # The numbers of each split in the result of rank 0's metrics, if this node has them.
        found: Any = {}
        with suppress(OSError, ValueError), open_regular(os.path.join(spec.run_dir, "metrics-rank0.jsonl")) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
            lines = [line for line in file.read().splitlines() if b'"result"' in line]
            found = loads(lines[-1].decode()) if lines else {}
        numbers = found.items() if isinstance(found, dict) else ()
        own = {name: value for name, value in numbers if name.startswith(_SPLITS) and isinstance(value, float)}
        result = {name: value for name, value in own.items() if math.isfinite(value)}
        shown = ", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in result.items())
        text = f"{state}: {sentence(cause, spec.labels) if cause else shown}".rstrip(": ")
        more = {"cause": cause, "restarts": spec.generation, "result": result}
        self._tell("failure" if state == "failed" else "end", state, text, more)
        lost = self._arrived(_AT_THE_END)
        late = (f"the message `{event}` had not arrived when the run ended" for event, _ in self._sending)
        return lost + [self.finding(text) for text in late]

    def close(self) -> list[Finding]:
        """Wait for the messages that are still being sent, at most ``_LEAVING`` seconds."""
        return self._arrived(_LEAVING)

    def _arrived(self, seconds: float) -> list[Finding]:
        """Wait at most ``seconds`` for the messages under way; return findings about those that did not arrive."""
        until, lost = time.monotonic() + seconds, []
        while True:
            for event, child in [one for one in self._sending if not one[1].running()]:
                self._sending.remove((event, child))
                self.loop.forget(child)
                if child.status[0]:
                    why = "; ".join(child.log.tail) or "its process was killed"
                    lost.append(self.finding(f"the message `{event}` did not arrive: {why}"))
            if not self._sending or time.monotonic() >= until:
                return lost
            self.idle(0.05)

    def _speaks(self, peers: Peers) -> bool:
        if isinstance(peers, Member):
            remaining = (k for k in peers.spec.active if str(k) not in peers.lost)
            return str(peers.spec.hub) in peers.lost and self.first.node_rank == next(remaining)
        return True

    def _tell(self, event: str, state: str, text: str, more: Mapping[str, Any]) -> None:
        spec = self.first
        if spec.notify_on and event not in spec.notify_on:
            return
        message = {
            "text": f"gnnfleet {spec.run_id}: {text}",
            "event": event,
            "run_id": spec.run_id,
            "state": state,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "operator": spec.operator,
            "from": socket.gethostname(),
            "nodes": list(spec.labels),
            **more,
        }
        command = spec.trainer or spec.server or {}
        self.journal.event("notify", event=event, text=text)
        argv = [sys.executable, str(Path(notify.__file__).resolve())]
        for target in spec.notify:
            request = {"targets": [target], "message": message, "env": command.get("env", {}), "pauses": _PAUSES}
            # not in argv, which all users can read
            env = {**os.environ, notify.NOTICE: json.dumps(request), _MARK: self._mark}
            env.pop(procs.TOKEN, None)  # the end of an attempt is not its end
            try:
                child = Child("notify", argv, self.journal.path("logs", "notify.log"), env=env, cwd=spec.run_dir)
            except OSError as error:
                self.journal.log(f"notify: {event}: {error.strerror}")
                continue
            self.loop.add(child)
            self._sending.append((event, child))
