"""Monitors a run on every node until it ends. A lost connection never ends a run.

When one node fails, the supervisors stop the others; the launcher stops them if the supervisors are too slow. At the
end the launcher cleans up every node.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from launcher.config.schema import RunConfig
from launcher.errors import FleetError, SessionExists
from launcher.node.json_reader import records
from launcher.node.json_records import EVENT, METRIC
from launcher.plan.model import LaunchPlan, NodePlan
from launcher.report.ending import nodes_reported_lost
from launcher.report.events import EventLog, finding_words
from launcher.report.last_attempt import ExpendableNodes
from launcher.report.report import Detached, Lost, RunReport
from launcher.run.interrupts import InterruptPrompt, Interrupts
from launcher.run.live_log import LiveLog, log_lines
from launcher.run.node_stream import NodeMessage, NodeStream
from launcher.run.start_progress import StartProgress
from launcher.run.tmux_session import STOP_EXTRA, how_to_stop, return_session, stop_node
from launcher.text import seconds_words
from launcher.transport.base import Transport

_POLL = 0.2  # seconds to wait for a message

_CHECK_EVERY = 0.5  # seconds between checks of timeouts

_STOP_AFTER = 4.0  # seconds beyond peer_timeout after which the launcher stops the nodes of a failed run itself

_LAST_RESULT = 5.0  # seconds to wait for the result of a stopped node

_LOST_TO_PEERS = 10.0  # seconds to wait for unreachable nodes if other nodes report one of them as lost

_STARTED = 2.0  # seconds that all ranks of an own command must run before --detach detaches

_RETURN_AFTER = 4.0  # seconds after the loss of a node; results of a run that has just ended arrive earlier

_RETURN_AGAIN = 15.0  # seconds after a failed return of a node until the next one

_MAX_QUEUED = 1000  # node messages in the queue

_JOIN_TIMEOUT = 3.0  # seconds to wait for the node streams to end


@dataclass
class _FollowedNode:
    """A node as its launcher or viewer sees it.

    =========  ====================================================================================================
    state      and what comes next
    =========  ====================================================================================================
    starting   its supervisor is being started here: ``running``, or ``lost`` if that fails
    running    its supervisor reports, or its connection is broken and being restored: ``ended`` or ``lost``
    ended      it has sent its result; as in the states below, its further messages are ignored
    silent     it was stopped, and has sent no result since
    lost       it ended without a result, or is out of reach: ``returning`` if the run has gone on without it
    returning  a new supervisor is being started on it: ``running``, or ``lost`` again
    =========  ====================================================================================================
    """

    plan: NodePlan
    stream: NodeStream
    state: Literal["starting", "running", "ended", "silent", "lost", "returning"]
    stopper: threading.Thread | None = None  #: stops what is left of the run on the node; each is stopped once
    stopped_at: float | None = None  #: when ``stopper`` was done, monotonic
    return_at: float = 0.0  #: when a lost node may be started again, monotonic
    not_returned: str = ""  #: why its last return failed
    has_returned: bool = False  #: its supervisor was started again

    @property
    def is_up(self) -> bool:
        return self.state in ("starting", "running")


class RunFollower:
    """Follows all nodes of a run from start to the last result, and fills its report.

    ``starts``: functions that start the nodes, by node_rank; None if the run has started already. ``on_training``:
    called when all ranks have started.

    ``tail``: how many of the lines already in a log are shown, counted from its end; None: all.

    ``leave_when_trained``: detach after the first training step, or while the run waits in line. With the user's own
    command, detach at the latest two seconds after all ranks have started, even if no step was reported.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        transports: Mapping[int, Transport],
        limits: RunConfig,
        live: LiveLog,
        events: EventLog,
        report: RunReport,
        *,
        starts: Mapping[int, Callable[[], None]] | None = None,
        leave_when_trained: bool = False,
        tail: int | None = None,
        on_training: Callable[[], None] = lambda: None,
    ):
        self.plan, self.transports, self.limits, self.live, self.events = plan, transports, limits, live, events
        self.report = report
        self._messages: queue.SimpleQueue[NodeMessage] = queue.SimpleQueue()
        self._signals: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._enough = threading.Event()
        starts = starts or {}
        self._nodes: dict[int, _FollowedNode] = {}
        for node in plan.nodes:
            stream = NodeStream(
                node,
                transports[node.node_rank],
                self._put,
                self._enough,
                connect_timeout=limits.connect_timeout,
                start=starts.get(node.node_rank),
                start_timeout=limits.start_timeout,
                skip=("--tail", str(tail)) if tail is not None else (),
            )
            state: Literal["starting", "running"] = "starting" if node.node_rank in starts else "running"
            self._nodes[node.node_rank] = _FollowedNode(node, stream, state)
        self._leave_when_trained, self._on_training = leave_when_trained, on_training
        self._detaching: Detached = ""
        self._stop_reason = ""
        self._failing = ""  # text of the first failure, once reported
        self._failed_attempts: set[int] = set()  # attempts whose first failure was reported, with run.restarts
        self._sharing: set[str] = set()  # runs that use the same CPUs, as said
        self._spares = ExpendableNodes(plan, limits.restarts)
        self._stop_at = float("inf")
        self._launching = bool(starts)  # a run that is only followed does not resend its start events
        self._starting = StartProgress(plan)
        self._states: dict[int, Mapping[str, Any]] = {}  # last state of each node
        self._queued: set[int] = set()  # nodes whose last state is to wait in line
        self._waiting = ""  # what the run waits for, as last said
        self._began = self._next_check = time.monotonic()
        self._last_end = self._began  # when the last node ended

    # The run, top to bottom.

    def follow(self, interrupts: Interrupts | None = None, prompt: InterruptPrompt | None = None) -> None:
        """Follow until every node has ended or the run is detached.

        ``prompt`` decides whether a signal or key press stops the run, detaches from it, or does neither.
        """
        interrupts, prompt = interrupts or Interrupts(), prompt or InterruptPrompt(self.live)
        interrupts.double_press = prompt.policy.can_ask
        for node in self._nodes.values():
            node.stream.start()
        with interrupts.handed_to(self._signals.put), prompt:
            while not self.report.detached:
                # When all nodes have ended, remaining processes and tmux sessions are removed.
                if not any(node.is_up for node in self._nodes.values()):
                    self.live.tick(all_of_them=True)
                    self.stop("all nodes have ended")
                    if not any(node.stopper is not None and node.stopper.is_alive() for node in self._nodes.values()):
                        break

                # Signals and answers of the user.
                action = prompt.answer()
                while not self._signals.empty():
                    action = prompt.signal(self._signals.get(), time.monotonic()) or action
                if action == "detach" and not self._stop_reason:
                    if not self._detaching and any(node.state == "starting" for node in self._nodes.values()):
                        self.live.say("detaching as soon as every node has started", "bold yellow")
                    self._detaching = "asked"
                elif action == "stop" and not self.report.interrupted:
                    self.interrupt(interrupts.cause or prompt.cause)
                interrupts.exit_on_next = bool(self._stop_reason)

                self._turn()
                if time.monotonic() >= self._next_check:
                    self._check_timeouts(time.monotonic())
            self._enough.set()
            if self.report.detached:
                self._join_streams()

    @property
    def _up(self) -> set[int]:
        """Nodes from which more messages are expected."""
        return {k for k, node in self._nodes.items() if node.is_up}

    def abandon(self) -> None:
        """Stop every node and print nothing, after an error in the launcher such as a closed output."""
        self.stop("the launcher failed")
        for node in self._nodes.values():
            if node.stopper is not None:
                node.stopper.join(self.limits.grace + STOP_EXTRA + self.limits.connect_timeout)
        self._enough.set()

    def leave(self) -> None:
        self._enough.set()
        self._join_streams()

    def _join_streams(self) -> None:
        # The threads end with ``watch.py`` on the nodes. Gives up after ``_JOIN_TIMEOUT`` seconds in all.
        deadline = time.monotonic() + _JOIN_TIMEOUT
        for node in self._nodes.values():
            node.stream.join(max(0.0, deadline - time.monotonic()))

    def stop(self, reason: str) -> None:
        """Stop all nodes in parallel; later calls do nothing."""
        if self._stop_reason:
            return
        self._stop_reason = reason
        self.live.quiet()
        self.events.add("stop", reason=reason)
        for k, node in self._nodes.items():
            if node.stream.broken_since is None or self.report.interrupted:
                self._clean_up(k)  # other nodes are stopped once their connection is restored

    def interrupt(self, cause: str) -> None:
        """Stop the run because of a signal. ``cause``: name of the signal, such as Ctrl-C."""
        if not self._failing:
            self.report.interrupted = cause
        self.live.say(f"{cause}: stopping every node (Ctrl-C exits immediately)", "bold yellow")
        self.events.add("interrupted", by=cause)
        self.stop(cause)

    # Messages of nodes.

    def _put(self, message: NodeMessage) -> None:
        # Blocks the node's thread while the queue is full, as when the terminal accepts no output (Ctrl-S).
        while self._messages.qsize() >= _MAX_QUEUED and not self._enough.wait(_POLL):
            pass
        self._messages.put(message)

    def _turn(self) -> None:
        """Handle one message of a node, or wait up to ``_POLL`` seconds for one."""
        try:
            message = self._messages.get(timeout=_POLL)
        except queue.Empty:
            self.live.tick()
            return
        always = "stopped" in message.values or "returned" in message.values
        if self._nodes[message.node_rank].is_up or always:
            self._handle(message.node_rank, message.values)
        self.live.tick()

    def _handle(self, k: int, message: Mapping[str, Any]) -> None:
        """Handle a message of ``watch.py`` on node ``k``, or one that a thread here has made about it."""
        node = self._nodes[k]

        # Of the node itself: lines of its files, its state, its result, and that its supervisor is gone without one.
        if "file" in message:
            file = message["file"]
            if file == "events.jsonl":
                for event in records(EVENT, message["lines"]):
                    self._handle_event(k, event)
            elif file.startswith("metrics-"):
                for metric in records(METRIC, message["lines"]):
                    self.events.write_to_stream({**metric, "node_rank": k})
                    self.live.metric(metric)
            elif file.startswith("logs/"):
                lines = list(log_lines(message["lines"], k, file))
                for line in lines:
                    self.events.write_to_stream({"kind": "log", "node_rank": k, "name": line.name, "text": line.text})
                self.live.process_lines(lines)
        elif "state" in message:
            state = message["state"]
            # The network's latency makes each offset too small, so the maximum is the best estimate.
            offset = state["time"] - time.time()
            self.report.clocks[k] = max(offset, self.report.clocks.get(k, offset))
            self.live.board.state(k, state)
            self._states[k] = state
            (self._queued.add if state["state"] == "queued" else self._queued.discard)(k)
            if self._queued or self._waiting:
                self._say_waiting()
            self._spares.take(k, state)
            for finding in state.get("findings") or ():
                if finding not in self.report.findings:
                    self.report.findings.append(finding)
                    self.live.board.finding(finding)
                    self.live.say(finding_words(finding), "yellow")
        elif "result" in message:
            result = message["result"]
            self.report.results[k] = result
            self._spares.take_result(k, result)
            self._ended(k, "ended", result["state"])
            if self._stop_reason or self._failing:
                self.live.say(f"{node.plan.label}: {result['state']}")
            if result["state"] != "done":
                why = result.get("reason", "") or result["state"]
                self._handle_failure(k, f"{node.plan.label} {result['state']} ({why})", f"node{k} {result['state']}")
            self._leave_behind()
        elif "lost" in message:
            last = message["lost"].get("state")
            when = last["time"] - self.report.clocks.get(k, 0.0) if last else time.time()
            self._lose(k, Lost(message["lost"]["reason"], when))

        # Of its stream: the connection, and the start of its supervisor.
        elif "broken" in message:
            why = message["broken"]
            self.live.board.connection_lost(k, why)
            goes_on = "" if self._stop_reason or self._failing else "; the run goes on"
            self.live.say(f"{node.plan.label}: disconnected ({why}){goes_on}", "yellow")
            self.events.add("line-lost", node_rank=k, reason=why)
        elif "back" in message:
            self.live.board.connection_restored(k)
            self.live.say(f"{node.plan.label}: reconnected after {message['back']:.0f} s", "yellow")
            self.events.add("line-back", node_rank=k, seconds=round(message["back"], 1))
            if self._stop_reason:
                self._clean_up(k)
        elif "started" in message:
            node.state = "running"
        elif "not-started" in message:
            self._spares.discard(k)
            self.events.add("start-failed", node_rank=k, reason=str(message["not-started"]))
            why = str(message["not-started"]).removeprefix(f"{node.plan.label}: ")
            self._lose(k, Lost(why, time.time()), f"{node.plan.label} could not be started: {why}")
        elif "bug" in message:
            self._lose(k, Lost(message["bug"], time.time()))

        # Of the threads that stop a node, or start its supervisor again.
        elif "stopped" in message:
            node.stopped_at = time.monotonic()
        elif "returned" in message:
            self._handle_returned(k, message["returned"])

    def _say_waiting(self) -> None:
        """Say what a run that waits in line waits for, whenever that changes; not before all nodes have reported."""
        queued = bool(self._queued)
        if queued and len(self._states) < len(self._nodes):
            return
        text = ""
        if queued:
            from launcher.report.waiting import waiting_words

            text = waiting_words(self._states)
        if text and text != self._waiting:
            self.live.say(text, "yellow")
        if self._waiting and not queued:
            waited = time.monotonic() - self._began
            self.live.say(f"its turn has come after {seconds_words(waited)}: starting", "dim")
            self._began = time.monotonic()
        self._waiting = self.live.board.waiting = text if text or not queued else self._waiting

    def _handle_event(self, k: int, event: Mapping[str, Any]) -> None:
        self.events.add_from_node(event)
        if event["kind"] == "process-exit":
            if event.get("rank") in self.live.board.ranks:
                self.live.board.rank_ended(event["rank"], failed=event.get("returncode") != 0)
            generation = self.live.board.generation
            if self.limits.restarts and generation in self._failed_attempts:
                return
            if event.get("failed") and not self._failing and not self._stop_reason:
                self._failed_attempts.add(generation)
                name = event.get("name", "a process")
                text = f"a process failed: {name} of {self._nodes[k].plan.label}"
                self._handle_failure(k, text, f"{name} of node{k} failed")
        elif event["kind"] == "tracker":
            self.live.say(str(event.get("text")), "dim")
        elif event["kind"] == "shares-cpus":
            if (run := str(event.get("run"))) not in self._sharing:  # said for the first node of several
                self._sharing.add(run)
                self.live.say(f"{self._nodes[k].plan.label}: {event.get('text')}; both runs get slower", "yellow")
        elif event["kind"] == "restart":
            self.live.board.forget_ends(k)
        else:
            before = self._starting.all_ranks_at
            if text := self._starting.add(k, event, time.monotonic() - self._began):
                self.live.say(text, "dim")
                if self._starting.all_ranks_at != before:
                    self._on_training()

    def _handle_failure(self, k: int, text: str, reason: str) -> None:
        # If the supervisors do not stop the run in time, this launcher does, unless the run can do without the node.
        if self._failing:
            return
        if k in self._spares:
            if not self._stop_reason:
                self.live.say(text, "yellow")
            return
        self._failing = reason
        if not self._stop_reason:
            self.live.quiet()
            rest = "; every node stops" if self._up else ""
            self.live.say(f"{text}{rest}", "bold red")
        self._stop_at = time.monotonic() + self.limits.peer_timeout + _STOP_AFTER

    # Nodes that have ended.

    def _ended(self, k: int, state: Literal["ended", "lost"], shown: str) -> None:
        self._nodes[k].state = state
        self._last_end = time.monotonic()
        self.live.board.ended(k, shown)

    def _lose(self, k: int, lost: Lost, text: str = "") -> None:
        label = self._nodes[k].plan.label
        self.report.lost[k] = lost
        self._ended(k, "lost", "lost")
        self.events.add("node-lost", node_rank=k, reason=lost.why)
        self._handle_failure(k, text or f"{label} is lost: {lost.why}", f"node{k} lost")
        if lost.out_of_reach:
            alone = len(self.plan.nodes) == 1
            state = "it may still run" if alone else "it stops by itself if it cannot reach the other nodes"
            self.report.notes.append(f"{label} cannot be reached; {state}. {how_to_stop(self._nodes[k].plan)}")
        else:
            self._clean_up(k)
            if k not in self._spares:
                self.stop(f"node{k} lost")

    def _leave_behind(self) -> None:
        # Stops supervisors that were started again to join the next restart of a run that is over.
        for k in self._spares.left_behind & self._up:
            if self._nodes[k].has_returned:
                self._lose(k, Lost("the run ended before it could join again", time.time()))

    def _handle_returned(self, k: int, why: str) -> None:
        """Follow lost node ``k`` again after its supervisor was started. ``why``: the error if that failed, else ''."""
        node = self._nodes[k]
        if why:
            node.state, node.return_at = "lost", time.monotonic() + _RETURN_AGAIN
            if why != node.not_returned:
                self.live.say(f"{node.plan.label}: its supervisor could not be started again: {why}", "yellow")
            node.not_returned = why
            return
        self.report.lost.pop(k, None)
        self.live.board.returned(k)
        self.live.say(f"{node.plan.label}: its supervisor was started again; it joins at the next restart", "yellow")
        self.events.add("node-back", node_rank=k)
        stream = NodeStream(
            node.plan, node.stream.transport, self._put, self._enough, connect_timeout=self.limits.connect_timeout
        )
        stream.offsets = node.stream.offsets
        stream.start()
        self._nodes[k] = _FollowedNode(node.plan, stream, "running", has_returned=True)
        if self._stop_reason:
            self._clean_up(k)
        self._leave_behind()

    # Timeouts; ``now`` in monotonic seconds.

    def _check_timeouts(self, now: float) -> None:
        self._next_check = now + _CHECK_EVERY
        for node in self._nodes.values():
            node.stream.close_if_silent(now)
            if node.stopped_at is not None and now - node.stopped_at > _LAST_RESULT and node.is_up:
                node.state = "silent"
        if now > self._stop_at and not self._stop_reason:
            self.stop(self._failing)
        if self._launching and not (self._stop_reason or self._failing or self._waiting):
            if text := self._starting.late(now - self._began, self._nodes.keys() - self._up):
                self.live.say(text, "dim")

        # Detach if the user has asked for it or, with --detach, if training has begun; not before all nodes have
        # started, and not after a failure or a stop request.
        starting = any(node.state == "starting" for node in self._nodes.values())
        if not (self._stop_reason or self._failing or starting):
            ranks_at = self._starting.all_ranks_at
            started_well = self.plan.own_command and ranks_at is not None and now - self._began - ranks_at > _STARTED
            if self._detaching:
                self.report.detached = self._detaching
            elif self._leave_when_trained and (self.live.board.stepping() or started_well):
                self.report.detached = "trained"
            elif self._leave_when_trained and self._waiting:
                self.report.detached = "queued"

        self._check_unreachable(now)

        # Start new supervisors on lost nodes that can be reached, if the run has gone on without them.
        over = any(not result.get("left") for result in self.report.results.values())
        goes_on = self.limits.restarts and not (self._stop_reason or self._failing or over)
        settled = now - self._last_end >= _RETURN_AFTER
        for k, lost in self.report.lost.items() if goes_on and settled else ():
            node = self._nodes[k]
            cleaned = node.stopper is not None and not node.stopper.is_alive()
            due = node.state == "lost" and now >= node.return_at
            if k in self._spares.gone and not lost.out_of_reach and cleaned and due:
                node.state = "returning"
                threading.Thread(target=self._return, args=(k,), daemon=True).start()

    def _check_unreachable(self, now: float) -> None:
        """Detach, or record nodes as lost, if the launcher has lost contact with all running nodes for too long.

        If the run can continue without the nodes that have ended, this process detaches. Otherwise the run has failed,
        and the nodes without contact are recorded as lost.
        """
        waiting = sorted(self._up)
        broken = {k: self._nodes[k].stream.broken_since for k in waiting}
        since = [when for when in broken.values() if when is not None]
        if not waiting or len(since) < len(waiting):
            return  # at least one node is connected
        silent = now - max(since)
        if all(k in self._spares for k in self._nodes.keys() - self._up):
            if silent > self.limits.lost_after:
                self.report.detached = "unreachable"
            return
        patience = self.limits.lost_after
        unreachable = {*waiting, *(k for k, lost in self.report.lost.items() if lost.out_of_reach)}
        # One report suffices: a node that has lost the lead node learns nothing about further nodes.
        results = self.report.results.values()
        if any(str(k) in nodes_reported_lost(result) for result in results for k in unreachable):
            patience = min(patience, _LOST_TO_PEERS)
        for k in waiting:
            waited = now - max(self._last_end, broken[k] or now)
            if waited > patience or self._nodes[k].stopped_at is not None or k in self._spares.gone:
                self._lose(k, Lost(f"no contact for {now - (broken[k] or now):.0f} s", time.time(), out_of_reach=True))

    # Threads that stop a node, or start its supervisor again.

    def _clean_up(self, k: int) -> None:
        # A node is stopped once, and not if it was given up as unreachable.
        node, lost = self._nodes[k], self.report.lost.get(k)
        if node.stopper is None and (lost is None or not lost.out_of_reach):
            node.stopper = threading.Thread(target=self._stop_node, args=(k,), daemon=True)
            node.stopper.start()

    def _stop_node(self, k: int) -> None:
        """Stop node ``k``, reconnecting once if needed; queue a message that says whether this succeeded."""
        node = self._nodes[k].plan
        try:
            note = stop_node(node, self.transports[k], self.limits, self._stop_reason)
        except Exception as error:  # without a message the launcher would wait for this node for ever
            note = f"{node.label}: stopping it failed: {error!r}"
        if note:
            self.report.notes.append(note)
        self._messages.put(NodeMessage(k, {"stopped": True}))

    def _return(self, k: int) -> None:
        """Start a new supervisor on node ``k``; queue a message with the error, or '' on success."""
        node, why = self._nodes[k].plan, ""
        try:
            return_session(self.transports[k], node, start_timeout=self.limits.start_timeout)
        except SessionExists:  # an earlier return has started it, and the connection broke before the answer
            why = ""
        except FleetError as error:
            why = str(error).removeprefix(f"{node.label}: ")
        except Exception as error:  # without a message the node would never be tried again
            why = repr(error)
        self._messages.put(NodeMessage(k, {"returned": why}))
