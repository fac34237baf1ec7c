"""Follow a started run to its end on every node, and stop the rest of it when one node fails."""

from __future__ import annotations

import json
import queue
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from launcher.errors import FleetError, TransportError
from launcher.events import EventLog
from launcher.logs import LiveLog
from launcher.outcome import Outcome
from launcher.plan import LaunchPlan, NodePlan
from launcher.session import StopReport, stop_session, watch_command
from launcher.transport.base import Transport

_SILENCE = 0.4  # of lost_after: how long a line may say nothing before it is opened anew
_LEAST_SILENCE = 5.0  # seconds; a live node says something every 3 s or so
_RETRY_EVERY = 2.0  # seconds between attempts to get a line back
_LAST_WORDS = 5.0  # seconds a stopped node's result may take to get here
_STOP_EXTRA = 10.0  # seconds a node may take to stop beyond its grace, before force


@dataclass(frozen=True)
class News:
    """One message of a node's follower: ``watch.py``'s, or what became of the line to it."""

    node_rank: int
    message: Mapping[str, Any]


@dataclass(frozen=True)
class Limits:
    """How long to wait for what, in seconds."""

    lost_after: float  #: without contact, until a node counts as lost
    grace: float  #: between SIGTERM and SIGKILL
    connect_timeout: float


@dataclass
class Followed:
    """How the run ended, node by node."""

    results: dict[int, Mapping[str, Any]] = field(default_factory=dict)  #: result.json
    lost: dict[int, Outcome] = field(default_factory=dict)  #: nodes that failed without one
    silent: set[int] = field(default_factory=set)  #: nodes that were stopped and said nothing more
    notes: list[str] = field(default_factory=list)  #: what may still run, and where
    interrupted: bool = False

    @property
    def ended(self) -> set[int]:
        return set(self.results) | set(self.lost) | self.silent


class _NodeFollower(threading.Thread):
    """Streams one node's news into the queue; gets a broken line back and goes on from where it was."""

    def __init__(
        self, node: NodePlan, transport: Transport, limits: Limits, put: Callable[[News], None], stop: threading.Event
    ):
        super().__init__(daemon=True, name=f"follow-node{node.node_rank}")
        self.node, self.transport, self.limits, self.put, self.stop = node, transport, limits, put, stop
        self.offsets: dict[str, int] = {}
        self.heard = self._spoken = time.monotonic()
        self.over = False
        self._streaming = False

    def run(self) -> None:
        try:
            self._follow()
        except Exception as error:  # without its follower a node would be waited for without end
            self._tell({"gone": f"following it failed: {error!r}"})

    def _follow(self) -> None:
        told = False
        while not self.over and not self.stop.is_set():
            why = self._stream()
            if self.over or self.stop.is_set():
                return
            silent = time.monotonic() - self.heard
            if silent > self.limits.lost_after:
                self._tell({"gone": f"no contact for {silent:.0f} s ({why})"})
                return
            if not told:
                self._tell({"broken": why})
            told = not self._line_is_back()

    def _stream(self) -> str:
        """Follow until the stream ends; why it did."""
        self._spoken, self._streaming = time.monotonic(), True
        try:
            status = self.transport.stream(watch_command(self.node, self.offsets), self._line, self.stop)
        except TransportError as error:
            return error.message
        finally:
            self._streaming = False
        return f"following it ended with status {status}"

    def break_silence(self) -> None:
        """Close a line on which nothing has come for long, so that it is opened anew or given up: TCP
        does not tell that the other end has vanished."""
        silent = time.monotonic() - self._spoken
        if self._streaming and silent > max(_LEAST_SILENCE, self.limits.lost_after * _SILENCE):
            self._spoken = time.monotonic()
            threading.Thread(target=self.transport.close, daemon=True).start()

    def _line(self, line: str) -> None:
        if not line.startswith("{"):
            return  # a profile or a setup line of the node that prints
        message = json.loads(line)
        self.heard = self._spoken = time.monotonic()
        if "file" in message:
            self.offsets[message["file"]] = message["offset"]
        self.over = "result" in message or "lost" in message
        self._tell(message)

    def _line_is_back(self) -> bool:
        if self.stop.wait(_RETRY_EVERY):
            return False
        try:
            self.transport.connect(self.limits.connect_timeout)
        except TransportError:
            return False  # the next stream says so again, until lost_after
        return True

    def _tell(self, message: Mapping[str, Any]) -> None:
        self.put(News(self.node.node_rank, message))


class RunFollower:
    """All nodes of a run, from start to the last result."""

    def __init__(
        self,
        plan: LaunchPlan,
        transports: Mapping[int, Transport],
        limits: Limits,
        live: LiveLog,
        events: EventLog,
    ):
        self.plan, self.transports, self.limits, self.live, self.events = plan, transports, limits, live, events
        self.followed = Followed()
        self._nodes = {node.node_rank: node for node in plan.nodes}
        self._news: queue.SimpleQueue[News] = queue.SimpleQueue()
        self._enough = threading.Event()
        self._stoppers: list[threading.Thread] = []
        self._stopped_at: dict[int, float] = {}
        self._seen: Counter[str] = Counter()
        self._began = time.monotonic()

    def follow(self) -> Followed:
        """Until every node has ended. Ctrl-C stops them all and goes on until they have."""
        followers = [
            _NodeFollower(node, self.transports[node.node_rank], self.limits, self._news.put, self._enough)
            for node in self.plan.nodes
        ]
        for follower in followers:
            follower.start()
        while not self._over():
            try:
                self._turn()
                for follower in followers:
                    follower.break_silence()
            except KeyboardInterrupt:
                self.interrupt()
        self._enough.set()
        return self.followed

    def stop(self, reason: str) -> None:
        """Have every node stop, all at once; does nothing the second time."""
        if self._stoppers:
            return
        self.live.quiet()
        self.events.add("stop", reason=reason)
        for node_rank in self._nodes:
            stopper = threading.Thread(target=self._stop_node, args=(node_rank,), daemon=True)
            self._stoppers.append(stopper)
            stopper.start()

    def abandon(self) -> None:
        """The launcher itself cannot go on (its output is closed, say): stop every node without a word."""
        self.stop("the launcher failed")
        for stopper in self._stoppers:
            stopper.join(self.limits.grace + _STOP_EXTRA + self.limits.connect_timeout)
        self._enough.set()

    def never_started(self, errors: Mapping[int, Exception]) -> None:
        """Nodes whose session could not be started count as lost; the others are stopped."""
        for node_rank, error in errors.items():
            note = str(error).removeprefix(f"{self._where(node_rank)}: ")
            self.followed.lost[node_rank] = Outcome.of_node(node_rank, self._host(node_rank), note, time.time())
            self.events.add("start-failed", node_rank=node_rank, reason=str(error))
        if errors:
            self.stop("a node could not be started")

    def interrupt(self) -> None:
        """Ctrl-C: have every node stop."""
        self.followed.interrupted = True
        self.live.say("interrupted: stopping every node (once more leaves at once)", "bold yellow")
        self.events.add("interrupted")
        self.stop("interrupted")

    def _over(self) -> bool:
        """Every node has ended, or was stopped and had its time for last words; and none has anything left."""
        now = time.monotonic()
        self.followed.silent |= {k for k, when in self._stopped_at.items() if now - when > _LAST_WORDS}
        if not self.followed.ended >= set(self._nodes):
            return False
        self.live.tick(all_of_them=True)
        self.stop("all nodes have ended")  # sees to it that nothing is left, sessions included
        return not any(stopper.is_alive() for stopper in self._stoppers)

    def _turn(self) -> None:
        try:
            news = self._news.get(timeout=0.2)
        except queue.Empty:
            self.live.tick()
            return
        self._take(news.node_rank, news.message)

    def _take(self, node_rank: int, message: Mapping[str, Any]) -> None:
        if "stopped" in message:
            self._stopped_at[node_rank] = time.monotonic()
        if node_rank in self.followed.ended:
            return
        if "file" in message:
            self._take_lines(node_rank, message["file"], message["lines"])
        elif "result" in message:
            self._take_result(node_rank, message["result"])
        elif "lost" in message:
            self._lose(node_rank, message["lost"]["reason"])
        elif "gone" in message:
            self._lose(node_rank, message["gone"])
        elif "broken" in message:
            self.live.say(f"{self._where(node_rank)}: line lost ({message['broken']}); trying to get it back", "yellow")
            self.events.add("line-lost", node_rank=node_rank, reason=message["broken"])

    def _take_lines(self, node_rank: int, file: str, lines: list[str]) -> None:
        if file != "events.jsonl":
            self.live.file_lines(node_rank, file, lines)
            return
        for event in map(json.loads, lines):
            self.events.take(event)
            self._tell_start(event)
            if event["kind"] == "process-exit" and event.get("failed") and not self._stoppers:
                self.live.say(
                    f"a process failed: {event['name']} of {self._where(node_rank)}; stopping every node", "bold red"
                )
                self.stop(f"{event['name']} of node{node_rank} failed")

    def _tell_start(self, event: Mapping[str, Any]) -> None:
        """One line when all graph servers are ready, one when all ranks have started."""
        kind = "ranks" if event["kind"] == "process-start" and event.get("rank") is not None else event["kind"]
        self._seen[kind] += 1
        wanted = {"server-ready": sum(1 for node in self.plan.nodes if node.server), "ranks": self.plan.world_size}
        if self._seen[kind] == wanted.get(kind):
            things = "graph servers are ready" if kind == "server-ready" else "ranks have started"
            self.live.say(f"all {wanted[kind]} {things} ({time.monotonic() - self._began:.1f} s)", "dim")

    def _take_result(self, node_rank: int, result: Mapping[str, Any]) -> None:
        self.followed.results[node_rank] = result
        if self._stoppers:
            self.live.say(f"{self._where(node_rank)}: {result['state']}")
        if result["state"] != "done":
            self.stop(f"node{node_rank} {result['state']}")

    def _lose(self, node_rank: int, reason: str) -> None:
        self.followed.lost[node_rank] = Outcome.of_node(node_rank, self._host(node_rank), reason, time.time())
        self.live.say(f"{self._where(node_rank)} is lost: {reason}; stopping the others", "bold red")
        self.events.add("node-lost", node_rank=node_rank, reason=reason)
        self.stop(f"node{node_rank} lost")

    def _stop_node(self, node_rank: int) -> None:
        """In a thread of its own: stop one node, with one new connection if the line is broken."""
        note = stop_node(self._nodes[node_rank], self.transports[node_rank], self.limits)
        if note:
            self.followed.notes.append(note)
        self._news.put(News(node_rank, {"gone": note} if note else {"stopped": True}))

    def _host(self, node_rank: int) -> str:
        return self._nodes[node_rank].target

    def _where(self, node_rank: int) -> str:
        return self._nodes[node_rank].label


def stop_node(node: NodePlan, transport: Transport, limits: Limits) -> str:
    """Stop one node, getting its line back first if need be; what may still run there, or ''."""
    try:
        transport.connect(limits.connect_timeout)
        report: StopReport = stop_session(transport, node, timeout=limits.grace + _STOP_EXTRA)
    except FleetError as error:
        return f"{error}; its processes may still run. {how_to_stop(node)}"
    if not report.stopped:
        return f"{node.label}: still running: {', '.join(report.leftovers)}"
    return ""


def how_to_stop(node: NodePlan) -> str:
    """What a person types to stop this node by hand."""
    line = f"tmux kill-session -t '={node.session}'"  # without =, tmux takes a name that merely begins so
    if node.target == "local":
        return f"To stop them: {line}"
    with_port = re.fullmatch(r"(.*@)?\[?([^:]+|.+(?=\]))\]?:(\d+)", node.target)  # ssh takes no brackets
    words = f"-p {with_port[3]} {with_port[1] or ''}{with_port[2]}" if with_port else node.target
    return f'To stop them: ssh {words} "{line}"'
