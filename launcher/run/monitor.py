"""Monitors a run on every node until it ends. A lost connection never ends a run.

When one node fails, the supervisors stop the others; the launcher stops them if the supervisors are too slow. At the
end the launcher cleans up every node.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from launcher.errors import FleetError
from launcher.node.json_reader import records
from launcher.node.json_records import EVENT
from launcher.plan.model import LaunchPlan
from launcher.report.ending import Detached, ExpendableNodes, Followed, Limits, Lost, nodes_reported_lost
from launcher.report.events import EventLog, finding_words
from launcher.run.interrupts import InterruptPrompt, Interrupts
from launcher.run.live_log import LiveLog
from launcher.run.node_stream import NodeMessage, NodeStream, for_machines
from launcher.run.start_progress import StartProgress
from launcher.run.tmux_session import STOP_EXTRA, return_session, stop_node, what_remains
from launcher.transport.base import Transport

_TURN = 0.2  # seconds to wait for a message

_CHECK_EVERY = 0.5  # seconds between checks of timeouts

_STOP_AFTER = 4.0  # seconds beyond peer_timeout after which the launcher stops the nodes of a failed run itself

_LAST_RESULT = 5.0  # seconds to wait for the result of a stopped node

_LOST_TO_PEERS = 10.0  # seconds to wait for unreachable nodes if other nodes report one of them as lost

_STARTED = 2.0  # seconds that all ranks of an own command must run before --detach detaches

_RETURN_AFTER = 4.0  # seconds after the loss of a node; results of a run that has just ended arrive earlier

_RETURN_AGAIN = 15.0  # seconds after a failed return of a node until the next one

_MAX_QUEUED = 1000  # node messages in the queue

_JOIN_TIMEOUT = 3.0  # seconds to wait for the node streams to end


class RunFollower:
    """Follows all nodes of a run from start to the last result.

    ``starts``: functions that start the nodes, by node_rank; None if the run has started already. ``on_training``:
    called when all ranks have started.

    ``tail``: how many of the lines already in a log are shown, counted from its end; None: all.

    ``leave_when_trained``: detach after the first training step. With the user's own command, detach at the latest two
    seconds after all ranks have started, even if no step was reported.
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
        self._messages: queue.SimpleQueue[NodeMessage] = queue.SimpleQueue()
        self._signals: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._enough = threading.Event()
        starts = starts or {}
        self._streams = {
            k: NodeStream(
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
        self._detaching: Detached = ""
        self._stoppers: dict[int, threading.Thread] = {}
        self._return_at: dict[int, float] = {}  # when a lost node may be started again; inf: being started
        self._not_returned: dict[int, str] = {}  # why the last return of a node failed
        self._returned: set[int] = set()  # nodes whose supervisors were started again
        self._stop_reason = ""
        self._stopped_at: dict[int, float] = {}
        self._failing = ""  # text of the first failure, once reported
        self._failed_attempts: set[int] = set()  # attempts whose first failure was reported, with run.restarts
        self._spares = ExpendableNodes(plan, limits.restarts)
        self._stop_at = float("inf")
        self._launching = bool(starts)  # a run that is only followed does not resend its start events
        self._starting = StartProgress(plan)
        self._began = self._next_check = time.monotonic()
        self._last_end = self._began  # when the last node ended

    # The run, top to bottom.

    def follow(self, interrupts: Interrupts | None = None, prompt: InterruptPrompt | None = None) -> Followed:
        """Follow until every node has ended or the run is detached.

        ``prompt`` decides whether a signal or key press stops the run, detaches from it, or does neither.
        """
        interrupts, prompt = interrupts or Interrupts(), prompt or InterruptPrompt(self.live)
        interrupts.double_press = prompt.policy.can_ask
        for stream in self._streams.values():
            stream.start()
        with interrupts.handed_to(self._signals.put), prompt:
            while not self._over():
                self._handle_input(interrupts, prompt)
                self._turn()
                if time.monotonic() >= self._next_check:
                    self._check_timeouts(time.monotonic())
            self._enough.set()
            if self.followed.detached:
                self._join_streams()
        return self.followed

    def abandon(self) -> None:
        """Stop every node and print nothing, after an error in the launcher such as a closed output."""
        self.stop("the launcher failed")
        for stopper in list(self._stoppers.values()):
            stopper.join(self.limits.grace + STOP_EXTRA + self.limits.connect_timeout)
        self._enough.set()

    def leave(self) -> None:
        self._enough.set()
        self._join_streams()

    def stop(self, reason: str) -> None:
        """Stop all nodes in parallel; later calls do nothing."""
        if self._stop_reason:
            return
        self._stop_reason = reason
        self.live.quiet()
        self.events.add("stop", reason=reason)
        for k, stream in self._streams.items():
            if stream.broken_since is None or self.followed.interrupted:
                self._clean_up(k)  # other nodes are stopped once their connection is restored

    def interrupt(self, cause: str) -> None:
        """Stop the run because of a signal. ``cause``: name of the signal, such as Ctrl-C."""
        if not self._failing:
            self.followed.interrupted = cause
        self.live.say(f"{cause}: stopping every node (Ctrl-C exits immediately)", "bold yellow")
        self.events.add("interrupted", by=cause)
        self.stop(cause)

    # Signals and answers.

    def _handle_input(self, interrupts: Interrupts, prompt: InterruptPrompt) -> None:
        action = prompt.answer()
        while not self._signals.empty():
            action = prompt.signal(self._signals.get(), time.monotonic()) or action
        if action == "detach" and not self._stop_reason:
            if not self._detaching and self._not_started:
                self.live.say("detaching as soon as every node has started", "bold yellow")
            self._detaching = "asked"
        elif action == "stop" and not self.followed.interrupted:
            self.interrupt(interrupts.cause or prompt.cause)
        interrupts.exit_on_next = bool(self._stop_reason)

    def _over(self) -> bool:
        if self.followed.detached:
            return True
        if not self.followed.ended >= set(self._nodes):
            return False
        self.live.tick(all_of_them=True)
        self.stop("all nodes have ended")  # removes remaining processes and tmux sessions
        return not any(stopper.is_alive() for stopper in self._stoppers.values())

    def _join_streams(self) -> None:
        # The threads end with ``watch.py`` on the nodes. Gives up after ``_JOIN_TIMEOUT`` seconds in all.
        deadline = time.monotonic() + _JOIN_TIMEOUT
        for stream in self._streams.values():
            stream.join(max(0.0, deadline - time.monotonic()))

    # Messages of nodes.

    def _put(self, message: NodeMessage) -> None:
        # Blocks the node's thread while the queue is full, as when the terminal accepts no output (Ctrl-S).
        while self._messages.qsize() >= _MAX_QUEUED and not self._enough.wait(_TURN):
            pass
        self._messages.put(message)

    def _turn(self) -> None:
        """Handle one message of a node, or wait up to ``_TURN`` seconds for one."""
        try:
            message = self._messages.get(timeout=_TURN)
        except queue.Empty:
            self.live.tick()
            return
        always = "stopped" in message.values or "returned" in message.values
        if message.node_rank not in self.followed.ended or always:
            self._handle(message.node_rank, message.values)
        self.live.tick()

    def _handle(self, k: int, message: Mapping[str, Any]) -> None:
        if "file" in message:
            self._handle_lines(k, message["file"], message["lines"])
        elif "state" in message:
            self._handle_state(k, message["state"])
        elif "result" in message:
            self._handle_result(k, message["result"])
        elif "lost" in message:
            self._handle_lost(k, message["lost"])
        elif "stopped" in message:
            self._stopped_at[k] = time.monotonic()
        elif "returned" in message:
            self._handle_returned(k, message["returned"])
        else:
            self._handle_connection(k, message)

    def _handle_connection(self, k: int, message: Mapping[str, Any]) -> None:
        """Handle a message that ``NodeStream`` itself has made about node ``k`` (see ``NodeMessage``)."""
        if "broken" in message:
            why = message["broken"]
            self.live.board.connection_lost(k, why)
            goes_on = "" if self._stop_reason or self._failing else "; the run goes on"
            self.live.say(f"{self._label(k)}: disconnected ({why}){goes_on}", "yellow")
            self.events.add("line-lost", node_rank=k, reason=why)
        elif "back" in message:
            self.live.board.connection_restored(k)
            self.live.say(f"{self._label(k)}: reconnected after {message['back']:.0f} s", "yellow")
            self.events.add("line-back", node_rank=k, seconds=round(message["back"], 1))
            if self._stop_reason:
                self._clean_up(k)
        elif "started" in message:
            self._not_started.discard(k)
        elif "not-started" in message:
            self._handle_not_started(k, message["not-started"])
        elif "bug" in message:
            self._lose(k, Lost(message["bug"], time.time()))

    def _handle_not_started(self, k: int, error: FleetError) -> None:
        self._not_started.discard(k)
        self._spares.discard(k)
        self.events.add("start-failed", node_rank=k, reason=str(error))
        why = str(error).removeprefix(f"{self._label(k)}: ")
        self._lose(k, Lost(why, time.time()), f"{self._label(k)} could not be started: {why}")

    def _handle_state(self, k: int, state: Mapping[str, Any]) -> None:
        # The network's latency makes each offset too small, so the maximum is the best estimate.
        offset = state["time"] - time.time()
        self.followed.clocks[k] = max(offset, self.followed.clocks.get(k, offset))
        self.live.board.state(k, state)
        self._spares.take(k, state)
        for finding in state.get("findings") or ():
            self._handle_finding(finding)

    def _handle_finding(self, finding: Mapping[str, Any]) -> None:
        if finding not in self.followed.findings:
            self.followed.findings.append(finding)
            self.live.board.finding(finding)
            self.live.say(finding_words(finding), "yellow")

    def _handle_lines(self, k: int, file: str, lines: list[str]) -> None:
        if file == "events.jsonl":
            for event in records(EVENT, lines):
                self._handle_event(k, event)
            return
        if self.events.stream is not None:
            for record in for_machines(k, file, lines):
                self.events.write_to_stream(record)
        self.live.file_lines(k, file, lines)

    def _handle_event(self, k: int, event: Mapping[str, Any]) -> None:
        self.events.add_from_node(event)
        if event["kind"] == "process-exit":
            self._handle_exit(k, event)
        elif event["kind"] == "restart":
            self.live.board.forget_ends(k)
        else:
            self._handle_start(k, event)

    def _handle_exit(self, k: int, event: Mapping[str, Any]) -> None:
        if event.get("rank") in self.live.board.ranks:
            self.live.board.rank_ended(event["rank"], failed=event.get("returncode") != 0)
        generation = self.live.board.generation
        if self.limits.restarts and generation in self._failed_attempts:
            return
        if event.get("failed") and not self._failing and not self._stop_reason:
            self._failed_attempts.add(generation)
            name = event.get("name", "a process")
            self._handle_failure(k, f"a process failed: {name} of {self._label(k)}", f"{name} of node{k} failed")

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
            rest = "; every node stops" if len(self.followed.ended) < len(self._nodes) else ""
            self.live.say(f"{text}{rest}", "bold red")
        self._stop_at = time.monotonic() + self.limits.peer_timeout + _STOP_AFTER

    def _handle_start(self, k: int, event: Mapping[str, Any]) -> None:
        before = self._starting.all_ranks_at
        if text := self._starting.add(k, event, time.monotonic() - self._began):
            self.live.say(text, "dim")
            if self._starting.all_ranks_at != before:
                self._on_training()

    # Nodes that have ended.

    def _handle_result(self, k: int, result: Mapping[str, Any]) -> None:
        self.followed.results[k] = result
        self._spares.take_result(k, result)
        self._ended(k, result["state"])
        if self._stop_reason or self._failing:
            self.live.say(f"{self._label(k)}: {result['state']}")
        if result["state"] != "done":
            why = result.get("reason", "") or result["state"]
            self._handle_failure(k, f"{self._label(k)} {result['state']} ({why})", f"node{k} {result['state']}")
        self._leave_behind()

    def _leave_behind(self) -> None:
        # Stops supervisors that were started again to join the next restart of a run that is over.
        for k in (self._returned & self._spares.left_behind) - self.followed.ended:
            self._lose(k, Lost("the run ended before it could join again", time.time()))

    def _handle_lost(self, k: int, lost: Mapping[str, Any]) -> None:
        # ``watch.py`` has reported that the supervisor ended without a result.
        state = lost.get("state")
        when = state["time"] - self.followed.clocks.get(k, 0.0) if state else time.time()
        self._lose(k, Lost(lost["reason"], when))

    def _lose(self, k: int, lost: Lost, text: str = "") -> None:
        self.followed.lost[k] = lost
        self._ended(k, "lost")
        self.events.add("node-lost", node_rank=k, reason=lost.why)
        self._handle_failure(k, text or f"{self._label(k)} is lost: {lost.why}", f"node{k} lost")
        if lost.out_of_reach:
            self.followed.notes.append(f"{self._label(k)} cannot be reached; {what_remains(self.plan, self._nodes[k])}")
        else:
            self._clean_up(k)
            if k not in self._spares:
                self.stop(f"node{k} lost")

    def _bring_back(self) -> None:
        """Start new supervisors on lost nodes that can be reached, if the run has gone on without them."""
        if self._stop_reason or self._failing or not self.limits.restarts or self.followed.results:
            return
        if time.monotonic() - self._last_end < _RETURN_AFTER:
            return
        for k, lost in self.followed.lost.items():
            stopper = self._stoppers.get(k)
            cleaned = stopper is not None and not stopper.is_alive()
            due = time.monotonic() >= self._return_at.get(k, 0.0)
            if k in self._spares.gone and not lost.out_of_reach and cleaned and due:
                self._return_at[k] = float("inf")
                threading.Thread(target=self._return, args=(k,), daemon=True).start()

    def _return(self, k: int) -> None:
        """Start a new supervisor on node ``k``; queue a message with the error, or '' on success."""
        why = ""
        try:
            return_session(self.transports[k], self._nodes[k], start_timeout=self.limits.start_timeout)
        except FleetError as error:
            why = str(error).removeprefix(f"{self._label(k)}: ")
        except Exception as error:  # without a message the node would never be tried again
            why = repr(error)
        self._messages.put(NodeMessage(k, {"returned": why}))

    def _handle_returned(self, k: int, why: str) -> None:
        """Follow lost node ``k`` again after its supervisor was started. ``why``: the error if that failed, else ''."""
        if why:
            self._return_at[k] = time.monotonic() + _RETURN_AGAIN
            if why != self._not_returned.get(k):
                self.live.say(f"{self._label(k)}: its supervisor could not be started again: {why}", "yellow")
            self._not_returned[k] = why
            return
        self.followed.lost.pop(k, None)
        self._stoppers.pop(k, None)
        self._stopped_at.pop(k, None)
        self._return_at.pop(k, None)
        self._not_returned.pop(k, None)
        self._returned.add(k)
        self.live.board.returned(k)
        self.live.say(f"{self._label(k)}: its supervisor was started again; it joins at the next restart", "yellow")
        self.events.add("node-back", node_rank=k)
        old = self._streams[k]
        self._streams[k] = NodeStream(
            old.node, old.transport, self._put, self._enough, connect_timeout=self.limits.connect_timeout
        )
        self._streams[k].offsets = old.offsets
        self._streams[k].start()
        if self._stop_reason:
            self._clean_up(k)
        self._leave_behind()

    def _ended(self, k: int, state: str) -> None:
        self._last_end = time.monotonic()
        self.live.board.ended(k, state)

    # Timeouts; ``now`` in monotonic seconds.

    def _check_timeouts(self, now: float) -> None:
        self._next_check = now + _CHECK_EVERY
        for stream in self._streams.values():
            stream.close_if_silent(now)
        self.followed.silent |= {
            k for k, when in self._stopped_at.items() if now - when > _LAST_RESULT and k not in self.followed.ended
        }
        if now > self._stop_at and not self._stop_reason:
            self.stop(self._failing)
        if self._launching and not self._stop_reason and not self._failing:
            if text := self._starting.late(now - self._began, self.followed.ended):
                self.live.say(text, "dim")
        self._detach_if_due(now)
        self._check_unreachable(now)
        self._bring_back()

    def _detach_if_due(self, now: float) -> None:
        """Detach if the user has asked for it or, with ``--detach``, if training has begun.

        Does nothing before all nodes have started, and after a failure or a stop request.
        """
        if self._stop_reason or self._failing or self._not_started:
            return
        ranks_at = self._starting.all_ranks_at
        started_well = self.plan.own_command and ranks_at is not None and now - self._began - ranks_at > _STARTED
        if self._detaching:
            self.followed.detached = self._detaching
        elif self._leave_when_trained and (self.live.board.stepping() or started_well):
            self.followed.detached = "trained"

    def _check_unreachable(self, now: float) -> None:
        """Detach, or record nodes as lost, if the launcher has lost contact with all running nodes for too long.

        If the run can continue without the nodes that have ended, this process detaches. Otherwise the run has failed,
        and the nodes without contact are recorded as lost.
        """
        waiting = [k for k in self._nodes if k not in self.followed.ended]
        broken = {k: self._streams[k].broken_since for k in waiting}
        since = [when for when in broken.values() if when is not None]
        if not waiting or len(since) < len(waiting):
            return  # at least one node is connected
        silent = now - max(since)
        if all(k in self._spares for k in self.followed.ended):
            if silent > self.limits.lost_after:
                self.followed.detached = "unreachable"
            return
        unreachable = {*waiting, *(k for k, lost in self.followed.lost.items() if lost.out_of_reach)}
        patience = min(self.limits.lost_after, _LOST_TO_PEERS if self._lost_to_others(unreachable) else float("inf"))
        for k in waiting:
            waited = now - max(self._last_end, broken[k] or now)
            if waited > patience or k in self._stopped_at or k in self._spares.gone:
                self._lose(k, Lost(f"no contact for {now - (broken[k] or now):.0f} s", time.time(), out_of_reach=True))

    def _lost_to_others(self, nodes: Iterable[int]) -> bool:
        # One suffices: a node that has lost the lead node learns nothing about further nodes.
        return any(str(k) in nodes_reported_lost(result) for result in self.followed.results.values() for k in nodes)

    # Cleaning up, in a thread for each node.

    def _clean_up(self, k: int) -> None:
        # A node is stopped once, and not if it was given up as unreachable.
        if k in self._stoppers:
            return
        lost = self.followed.lost.get(k)
        if lost is None or not lost.out_of_reach:
            self._stoppers[k] = threading.Thread(target=self._stop_node, args=(k,), daemon=True)
            self._stoppers[k].start()

    def _stop_node(self, k: int) -> None:
        """Stop node ``k``, reconnecting once if needed; queue a message that says whether this succeeded."""
        try:
            note = stop_node(self._nodes[k], self.transports[k], self.limits, self._stop_reason)
        except Exception as error:  # without a message the launcher would wait for this node for ever
            note = f"{self._label(k)}: stopping it failed: {error!r}"
        if note:
            self.followed.notes.append(note)
        self._messages.put(NodeMessage(k, {"stopped": not note}))

    def _label(self, k: int) -> str:
        return self._nodes[k].label
