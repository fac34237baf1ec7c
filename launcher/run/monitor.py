"""Monitors a run on every node until it ends. A lost connection never ends a run.

The supervisors stop each other when one fails (``launcher/node/peers/model.py``); from here they are helped when they
have not managed after a few seconds, told what a person wants, and swept when all is over.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from launcher.errors import FleetError
from launcher.node.json_reader import EVENT, records
from launcher.plan.model import LaunchPlan
from launcher.report.ending import Detached, Followed, Limits, Lost, Spares, missed_by
from launcher.report.events import EventLog
from launcher.run.interrupts import Interrupts, Talking
from launcher.run.live_log import LiveLog
from launcher.run.node_stream import News, NodeLine, for_machines
from launcher.run.tmux_session import STOP_EXTRA, stop_node, stops_itself
from launcher.text import spans
from launcher.transport.base import Transport

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
        """One line when all graph servers are ready, one when all ranks have started, one for each graph server that
        cannot keep its kernels; else ''."""
        kind = "ranks" if event["kind"] == "process-start" and event.get("rank") is not None else event["kind"]
        self._seen[kind] += 1
        if kind == "server-ready":
            self._ready.add(k)
        elif kind == "server-compiles":
            self._compiling.add(k)
            if reason := event.get("reason"):
                return f"node{k}: {reason}; they are compiled now, which takes up to a minute or two"
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


_TURN = 0.2  # seconds to wait for news

_LOOK_EVERY = 0.5  # seconds between looks at what time alone changes

_HELP_AFTER = 4.0  # seconds the supervisors have to begin stopping each other, beyond peer_timeout

_LAST_WORDS = 5.0  # seconds a stopped node's result may take to get here

_LOST_TO_ALL = 10.0  # seconds to wait for lines to nodes of which the others have lost one as well

_STARTED = 2.0  # seconds all ranks of an own command have to run to count as started well

_MOST_NEWS = 1000  # messages that wait to be shown

_LET_GO = 3.0  # seconds the watchers on the nodes have to end when we leave


class RunFollower:
    """All nodes of a run, from start to the last result.

    ``starts``: what starts each node; none for a run that goes on already. ``tail``: log lines to begin with, all
    by default. ``leave_when_trained``: detach once the first step has trained, or all ranks of an own command run.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        transports: Mapping[int, Transport],
        limits: Limits,
        live: LiveLog,
        events: EventLog,
        *,
        starts: Mapping[int, Callable[[], None]] | None = None,
        leave_when_trained: bool = False,
        tail: int | None = None,
        on_training: Callable[[], None] = lambda: None,
    ):
        self.plan, self.limits, self.live, self.events = plan, limits, live, events
        self.followed = Followed()
        self.transports = transports
        self._nodes = {node.node_rank: node for node in plan.nodes}
        self._news: queue.SimpleQueue[News] = queue.SimpleQueue()
        self._signals: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._enough = threading.Event()
        starts = starts or {}
        self._lines = {
            k: NodeLine(
                node,
                transports[k],
                self._put,
                self._enough,
                connect_timeout=limits.connect_timeout,
                start=starts.get(k),
                start_timeout=limits.start_timeout,
                tail=tail,
            )
            for k, node in self._nodes.items()
        }
        self._not_started = set(starts)
        self._leave_when_trained, self._on_training = leave_when_trained, on_training
        self._leaving: Detached = ""
        self._stoppers: dict[int, threading.Thread] = {}
        self._stop_reason = ""
        self._stopped_at: dict[int, float] = {}
        self._failing = ""  # the first failure told
        self._spares = Spares(plan)
        self._help_at = float("inf")
        self._launches = bool(starts)  # what a run taken up again told at its start may be past
        self._starting = Starting(plan)
        self._began = self._next_look = time.monotonic()
        self._last_end = self._began  # when a node ended

    # The run, top to bottom.

    def follow(self, interrupts: Interrupts | None = None, talking: Talking | None = None) -> Followed:
        """Until every node has ended or the run is left to itself. Signals are asked about, or do as decided."""
        interrupts, talking = interrupts or Interrupts(), talking or Talking(self.live)
        interrupts.quick = talking.policy.can_ask
        for line in self._lines.values():
            line.start()
        with interrupts.handed_to(self._signals.put), talking:
            while not self._over():
                self._listen(interrupts, talking)
                self._turn()
                if time.monotonic() >= self._next_look:
                    self._look(time.monotonic())
            self._enough.set()
            if self.followed.detached:
                self._let_go()
        return self.followed

    def abandon(self) -> None:
        """The launcher itself cannot go on (its output is closed, say): stop every node without a word."""
        self.stop("the launcher failed")
        for stopper in list(self._stoppers.values()):
            stopper.join(self.limits.grace + STOP_EXTRA + self.limits.connect_timeout)
        self._enough.set()

    def leave(self) -> None:
        """A viewer cannot go on: the run does."""
        self._enough.set()
        self._let_go()

    def stop(self, reason: str) -> None:
        """Have every node stop, all at once; does nothing the second time."""
        if self._stop_reason:
            return
        self._stop_reason = reason
        self.live.quiet()
        self.events.add("stop", reason=reason)
        for k, line in self._lines.items():
            if line.broken_since is None or self.followed.interrupted:
                self._sweep(k)  # the others when their line is back

    def interrupt(self, what: str) -> None:
        """A person wants the run to stop."""
        if not self._failing:
            self.followed.interrupted = what
        self.live.say(f"{what}: stopping every node (Ctrl-C leaves at once)", "bold yellow")
        self.events.add("interrupted", by=what)
        self.stop(what)

    # What a person wants.

    def _listen(self, interrupts: Interrupts, talking: Talking) -> None:
        """Take signals and answers."""
        wish = talking.answer()
        while not self._signals.empty():
            wish = talking.signal(self._signals.get(), time.monotonic()) or wish
        if wish == "detach" and not self._stop_reason:
            if not self._leaving and self._not_started:
                self.live.say("detaching as soon as every node has started", "bold yellow")
            self._leaving = "asked"
        elif wish == "stop" and not self.followed.interrupted:
            self.interrupt(talking.what)
        interrupts.last_chance = bool(self._stop_reason)

    def _over(self) -> bool:
        """Every node has ended, or was stopped and had its time for last words, and none has anything left; or the
        run is left to itself."""
        if self.followed.detached:
            return True
        if not self.followed.ended >= set(self._nodes):
            return False
        self.live.tick(all_of_them=True)
        self.stop("all nodes have ended")  # sees to it that nothing is left, sessions included
        return not any(stopper.is_alive() for stopper in self._stoppers.values())

    def _let_go(self) -> None:
        """Leave no watcher behind on the nodes."""
        deadline = time.monotonic() + _LET_GO
        for line in self._lines.values():
            line.join(max(0.0, deadline - time.monotonic()))

    # News.

    def _put(self, news: News) -> None:
        """Of a line. Where the terminal takes no more (Ctrl-S), the nodes keep what they have to tell."""
        while self._news.qsize() >= _MOST_NEWS and not self._enough.wait(_TURN):
            pass
        self._news.put(news)

    def _turn(self) -> None:
        try:
            news = self._news.get(timeout=_TURN)
        except queue.Empty:
            self.live.tick()
            return
        if news.node_rank not in self.followed.ended or "stopped" in news.message:
            self._take(news.node_rank, news.message)
        self.live.tick()

    def _take(self, k: int, message: Mapping[str, Any]) -> None:
        if "file" in message:
            self._take_lines(k, message["file"], message["lines"])
        elif "state" in message:
            self._take_state(k, message["state"])
        elif "result" in message:
            self._take_result(k, message["result"])
        elif "lost" in message:
            self._take_lost(k, message["lost"])
        elif "stopped" in message:
            self._stopped_at[k] = time.monotonic()
        else:
            self._take_line_news(k, message)

    def _take_line_news(self, k: int, message: Mapping[str, Any]) -> None:
        """What became of the line, or of starting the node."""
        if "broken" in message:
            why = message["broken"]
            self.live.board.line_lost(k, why)
            goes_on = "" if self._stop_reason or self._failing else "; the run goes on"
            self.live.say(f"{self._where(k)}: line lost ({why}){goes_on}", "yellow")
            self.events.add("line-lost", node_rank=k, reason=why)
        elif "back" in message:
            self.live.board.line_back(k)
            self.live.say(f"{self._where(k)}: line is back after {message['back']:.0f} s", "yellow")
            self.events.add("line-back", node_rank=k, seconds=round(message["back"], 1))
            if self._stop_reason:
                self._sweep(k)
        elif "started" in message:
            self._not_started.discard(k)
        elif "not-started" in message:
            self._take_not_started(k, message["not-started"])
        elif "bug" in message:
            self._lose(k, Lost(message["bug"], time.time()))

    def _take_not_started(self, k: int, error: FleetError) -> None:
        self._not_started.discard(k)
        self._spares.discard(k)
        self.events.add("start-failed", node_rank=k, reason=str(error))
        why = str(error).removeprefix(f"{self._where(k)}: ")
        self._lose(k, Lost(why, time.time()), f"{self._where(k)} could not be started: {why}")

    def _take_state(self, k: int, state: Mapping[str, Any]) -> None:
        offset = state["time"] - time.time()  # too small by as long as it took to get here
        self.followed.clocks[k] = max(offset, self.followed.clocks.get(k, offset))
        self.live.board.state(k, state)
        self._spares.take(k, state)
        for finding in state.get("findings") or ():
            self._take_finding(finding)

    def _take_finding(self, finding: Mapping[str, Any]) -> None:
        """Each is told once, however many nodes say it at each heartbeat."""
        if finding not in self.followed.findings:
            self.followed.findings.append(finding)
            self.live.board.finding(finding)
            self.live.say(f"{finding['kind']}: {finding['text']}", "yellow")

    def _take_lines(self, k: int, file: str, lines: list[str]) -> None:
        if file == "events.jsonl":
            for event in records(EVENT, lines):
                self._take_event(k, event)
            return
        if self.events.stream is not None:
            for told in for_machines(k, file, lines):
                self.events.tell(told)
        self.live.file_lines(k, file, lines)

    def _take_event(self, k: int, event: Mapping[str, Any]) -> None:
        self.events.take(event)
        if event["kind"] == "process-exit":
            self._take_exit(k, event)
        else:
            self._tell_start(k, event)

    def _take_exit(self, k: int, event: Mapping[str, Any]) -> None:
        if event.get("rank") in self.live.board.ranks:
            self.live.board.rank_ended(event["rank"], failed=event.get("returncode") != 0)
        if event.get("failed") and not self._failing and not self._stop_reason:
            name = event.get("name", "a process")
            self._fails(k, f"a process failed: {name} of {self._where(k)}", f"{name} of node{k} failed")

    def _fails(self, k: int, told: str, reason: str) -> None:
        """The supervisors stop each other now; should they not, we do. A node that the run may do without ends nothing
        by itself: what the others make of it will be told."""
        if self._failing:
            return
        if k in self._spares:
            if not self._stop_reason:
                self.live.say(told, "yellow")
            return
        self._failing = reason
        if not self._stop_reason:
            self.live.quiet()
            rest = "; every node stops" if len(self.followed.ended) < len(self._nodes) else ""
            self.live.say(f"{told}{rest}", "bold red")
        self._help_at = time.monotonic() + self.limits.peer_timeout + _HELP_AFTER

    def _tell_start(self, k: int, event: Mapping[str, Any]) -> None:
        """One line when all graph servers are ready, one when all ranks have started."""
        before = self._starting.all_ranks_at
        if told := self._starting.take(k, event, time.monotonic() - self._began):
            self.live.say(told, "dim")
            if self._starting.all_ranks_at != before:
                self._on_training()

    # Ends.

    def _take_result(self, k: int, result: Mapping[str, Any]) -> None:
        self.followed.results[k] = result
        self._spares.take_result(k, result)
        self._ended(k, result["state"])
        if self._stop_reason or self._failing:
            self.live.say(f"{self._where(k)}: {result['state']}")
        if result["state"] != "done":
            why = result.get("reason", "") or result["state"]
            self._fails(k, f"{self._where(k)} {result['state']} ({why})", f"node{k} {result['state']}")

    def _take_lost(self, k: int, lost: Mapping[str, Any]) -> None:
        """The node itself says that its supervisor is gone."""
        state = lost.get("state")
        when = state["time"] - self.followed.clocks.get(k, 0.0) if state else time.time()
        self._lose(k, Lost(lost["reason"], when))

    def _lose(self, k: int, lost: Lost, told: str = "") -> None:
        """A node that will give no result: what is left there is ended, and so are the others where they need it."""
        self.followed.lost[k] = lost
        self._ended(k, "lost")
        self.events.add("node-lost", node_rank=k, reason=lost.why)
        self._fails(k, told or f"{self._where(k)} is lost: {lost.why}", f"node{k} lost")
        if lost.out_of_reach:
            self.followed.notes.append(f"{self._where(k)} is out of reach; {stops_itself(self.plan, self._nodes[k])}")
        else:
            self._sweep(k)
            if k not in self._spares:
                self.stop(f"node{k} lost")

    def _ended(self, k: int, state: str) -> None:
        self._last_end = time.monotonic()
        self.live.board.ended(k, state)

    # What time alone changes.

    def _look(self, now: float) -> None:
        self._next_look = now + _LOOK_EVERY
        for line in self._lines.values():
            line.break_silence(now)
        self.followed.silent |= {
            k for k, when in self._stopped_at.items() if now - when > _LAST_WORDS and k not in self.followed.ended
        }
        if now > self._help_at and not self._stop_reason:
            self.stop(self._failing)
        if self._launches and not self._stop_reason and not self._failing:
            if told := self._starting.late(now - self._began, self.followed.ended):
                self.live.say(told, "dim")
        self._leave(now)
        self._give_up(now)

    def _leave(self, now: float) -> None:
        """Detach where that is wanted, but not before every node has been started."""
        if self._stop_reason or self._failing or self._not_started:
            return
        ranks_at = self._starting.all_ranks_at
        started_well = self.plan.own_command and ranks_at is not None and now - self._began - ranks_at > _STARTED
        if self._leaving:
            self.followed.detached = self._leaving
        elif self._leave_when_trained and (self.live.board.stepping() or started_well):
            self.followed.detached = "trained"

    def _give_up(self, now: float) -> None:
        """Nodes out of reach: waited for; and in the end lost, or all of them left to themselves."""
        waiting = [k for k in self._nodes if k not in self.followed.ended]
        broken = {k: line.broken_since for k, line in self._lines.items() if k in waiting}
        since = [when for when in broken.values() if when is not None]
        if not waiting or len(since) < len(waiting):
            return  # somebody still tells
        silent = now - max(since)
        if all(k in self._spares for k in self.followed.ended):
            if silent > self.limits.lost_after:
                self.followed.detached = "unreachable"
            return
        away = {*waiting, *(k for k, lost in self.followed.lost.items() if lost.out_of_reach)}
        patience = min(self.limits.lost_after, _LOST_TO_ALL if self._lost_to_others(away) else float("inf"))
        for k in waiting:
            waited = now - max(self._last_end, broken[k] or now)
            if waited > patience or k in self._stopped_at:
                self._lose(k, Lost(f"no contact for {now - (broken[k] or now):.0f} s", time.time(), out_of_reach=True))

    def _lost_to_others(self, nodes: Iterable[int]) -> bool:
        """Whether nodes that have ended miss one of ``nodes``: who has lost the lead node knows of no other."""
        return any(str(k) in missed_by(result) for result in self.followed.results.values() for k in nodes)

    # Sweeping: in a thread for each node.

    def _sweep(self, k: int) -> None:
        if k in self._stoppers:
            return
        lost = self.followed.lost.get(k)
        if lost is None or not lost.out_of_reach:
            self._stoppers[k] = threading.Thread(target=self._stop_node, args=(k,), daemon=True)
            self._stoppers[k].start()

    def _stop_node(self, k: int) -> None:
        """Stop one node, with one new connection if the line is broken."""
        note = stop_node(self._nodes[k], self.transports[k], self.limits, self._stop_reason)
        if note:
            self.followed.notes.append(note)
        self._news.put(News(k, {"stopped": not note}))

    def _where(self, k: int) -> str:
        return self._nodes[k].label
