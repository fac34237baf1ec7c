"""After a failure, connects the supervisors to a hub, which decides whether the run starts again (a new attempt).

If the hub is lost, the remaining node with the lowest node_rank becomes the hub. A node that was cut off from the
others waits as their ``Guest``.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from launcher.node.child_process import Loop
from launcher.node.peers.hub import Hub
from launcher.node.peers.member import Member
from launcher.node.peers.model import Cause, Decision, Peers, first_cause, make_cause
from launcher.node.record import write_json
from launcher.node.spec import NodeSpec
from launcher.node.supervisor.attempt import archive, cluster_file, first_cluster, next_spec
from launcher.node.supervisor.journal import Journal
from launcher.node.supervisor.restart import AttemptEnd, Standing, decide, record

_MARGIN = 3.0  # seconds beyond peer_timeout in which a supervisor connects to a new hub

_TRY_FOR = 3.0  # seconds in which another node must answer a node that was cut off

_ENDING = 10.0  # seconds beyond the grace in which the nodes end their processes and read their checkpoints

# Every message of a hub repeats its decision with the earlier restarts, and messages are limited (``link.MAX_LINE``).
_RECORDS = 200  # restarts that it lists, the newest

_WHOLE = 3  # of them with their nodes and ranks

_WORDS = 200  # characters of their texts

_READING = 600.0  # seconds for a node that has ended its processes and still reads a large checkpoint


def connect(spec: NodeSpec, loop: Loop) -> Peers:
    """Make this node's connection to the other supervisors: as hub, as member, or as the only node of the run."""
    if not spec.has_peers:
        return Peers(spec)
    return Hub(spec, loop) if spec.node_rank == spec.hub else Member(spec, loop)


class _Rendezvous:
    """Makes or receives the decision about a restart after one attempt. Call ``look`` several times a second.

    spec: node.json of the attempt that has ended. first: node.json of the first attempt. cause: what ended the attempt,
    if it occurred on this node, else None. history: earlier restarts and lost nodes, added to the decision if this node
    makes it.
    """

    def __init__(
        self, spec: NodeSpec, first: NodeSpec, loop: Loop, peers: Peers, cause: Cause | None, history: Mapping[str, Any]
    ) -> None:
        self.peers = peers  #: replaced when the hub is lost
        self.stop = False  #: somebody has asked this node to stop the run
        self.trouble = ""  #: why this node cannot be the hub
        self._spec, self._first, self._loop, self._cause, self._history = spec, first, loop, cause, history
        self._began = time.monotonic()
        self.lost: dict[str, dict[str, Any]] = {}  #: hubs that were lost, as in result.json
        self._gone: dict[str, dict[str, Any]] = {}
        self._left: set[int] = set()  # hubs that have ended as they were told to
        self.look(None)

    def look(self, standing: Standing | None) -> Decision | None:
        """Return the decision once it has been made, else None. Connects to another hub if the hub is lost.

        standing: newest checkpoint and parts of this node; None until its processes have ended.
        """
        peers = self.peers
        if isinstance(peers, Member):
            decision = peers.decision
            if decision is not None and decision["generation"] > self._spec.generation:
                if not decision["leave"]:
                    return decision
                self._left.add(peers.spec.hub)
                self._replace_hub(peers)
            elif peers.lost:
                self.lost |= peers.lost
                self._replace_hub(peers)
            return None
        if standing is None:
            return None
        if not isinstance(peers, Hub):
            assert self._cause is not None
            own = {self._spec.node_rank: standing}
            end = AttemptEnd(self._spec, self._first, own, self._cause, {}, stop=self.stop)
            return {**decide(end, time.time()), **self._history}

        # As the hub, wait for the members, but not for ever.
        limit = self._spec.grace + self._spec.peer_timeout + _ENDING
        states = {peers.members[k].state for k in peers.awaited()}
        if states and time.monotonic() - self._began < (limit + _READING if "deciding" in states else limit):
            return None
        members = peers.members.values()
        staying = [one for one in members if not (one.lost or one.final or one.away or one.left)]
        standings = {one.node_rank: Standing.of(one.standing) for one in staying if one.standing}
        guests = {k: Standing.of(one.standing) for k, one in peers.guests.items() if one.standing}
        why = {int(k): str(lost["why"]) for k, lost in peers.lost.items()}
        cause = peers.cause or self._cause
        assert cause is not None
        end = AttemptEnd(
            self._spec,
            self._first,
            {**guests, **standings, self._spec.node_rank: standing},
            cause,
            {one.node_rank: why.get(one.node_rank, "") for one in members if one.lost},
            ended={one.node_rank for one in members if one.final},
            given_up={*map(int, peers.gone)},
            # After a pause of this hub, a closed connection may also mean that the member has found another hub.
            away={one.node_rank for one in members if one.away or (one.lost and peers.suspended)},
            stop=self.stop or peers.stop_asked,
        )
        decision = {**decide(end, time.time()), **self._history}
        if self.trouble:
            decision = {**decision, "restart": False, "why": self.trouble}
        peers.decide(decision)
        return decision

    def _replace_hub(self, peers: Member) -> None:
        """Connect to the remaining node with the lowest node_rank as the new hub; if that is this node, become the hub.

        If this node cannot listen, it decides against a restart; ``trouble`` says why.
        """
        spec = self._spec
        losses = (make_cause(int(k), "node", "lost", one["why"], one["since"]) for k, one in self.lost.items())
        cause = first_cause(self._cause, peers.cause, *losses)
        self._gone |= peers.gone
        known = {*self._left, *map(int, self.lost)}
        hub = next(k for k in spec.active if k not in known)
        self._cause = cause
        peers.leave()
        meeting = replace(spec, hub=hub, start_timeout=spec.peer_timeout + _MARGIN)
        if hub != spec.node_rank:
            self.peers = Member(meeting, self._loop)
            self.peers.open()
            self.peers.cause = cause
            return
        made = Hub(meeting, self._loop)
        assert cause is not None
        made.inherit(cause, self.lost, self._gone)
        for k in (*self._left, *map(int, self.lost)):
            if k in made.members:
                made.members[k].lost, made.members[k].final = k not in self._left, k in self._left
                made.members[k].state = "lost"
        try:
            made.open()
        except OSError as error:  # another program has taken the port; the others skip this node
            own = meeting.hub_node
            self.trouble = f"cannot listen at {own.bind} port {own.control_port}: {error.strerror}"
        self.peers = made


class Guest:
    """Finds the hub of the nodes that have gone on without this node, and waits to be part of their next attempt.

    Connects to the control port of one node after the other. Call ``look`` several times a second.
    """

    def __init__(self, spec: NodeSpec, loop: Loop) -> None:
        self._spec, self._loop = spec, loop
        self._others = [k for k in range(len(spec.nodes)) if k != spec.node_rank]
        self._tried = 0
        self._since = time.monotonic()  # of the last message of a hub
        self.peers: Member = self._next()

    def _next(self) -> Member:
        hub = self._others[self._tried % len(self._others)]
        made = Member(replace(self._spec, hub=hub, start_timeout=_TRY_FOR), self._loop)
        self._tried += 1
        made.open()
        return made

    def look(self) -> Decision | None:
        """Return the decision that this node takes part in an attempt or leaves the run; None while undecided."""
        peers, now = self.peers, time.monotonic()
        decision = peers.decision
        if decision is not None:
            self._since = now
        if decision is not None and decision["generation"] > self._spec.generation:
            if decision["restart"] and self._spec.node_rank in decision["nodes"]:
                return decision
            if not decision["restart"] and not decision["leave"]:
                return {**decision, "why": "the run has ended without this node", "left": True}
        if peers.lost:
            peers.leave()
            self.peers = self._next()
        if now - self._since > self._spec.lost_after:
            return {"restart": False, "leave": False, "left": True, "why": ""}
        return None


class Restarts:
    """The restarts of a run, as seen by the supervisor of one node.

    first: content of node.json, which describes the first attempt.
    """

    def __init__(self, first: NodeSpec, loop: Loop, journal: Journal) -> None:
        self.rendezvous: _Rendezvous | None = None  #: while the supervisors decide
        self.guest: Guest | None = None  #: while this node waits for the next attempt of the others
        self.standing: Standing | None = None  #: what this node can contribute; None while its processes run
        self.decision: Decision | None = None  #: of the rendezvous; None before it is made
        self.records: list[dict[str, Any]] = []  #: one per restart, as in state.json
        self.lost: dict[str, dict[str, Any]] = {}  #: hubs that were lost in this attempt, as in result.json
        self.left = False  #: the run may go on without this node
        self.why_not = ""  #: why there was no further restart; '' if no reason has to be named
        self._first, self._loop, self._journal = first, loop, journal
        self._gone: dict[str, dict[str, Any]] = {}  # nodes that the run goes on without, as in result.json

    def begin_rendezvous(self, spec: NodeSpec, peers: Peers, own: Cause | None) -> None:
        """Begin a rendezvous after an attempt, unless the run is done or was stopped.

        own: the cause of the attempt's end if it occurred on this node, else None.
        """
        self.rendezvous = self.decision = self.standing = None
        self.lost = {}
        cause = own or peers.cause
        if spec.restarts and cause is not None and cause["kind"] != "stop":
            # Of the earlier restarts, the newest, with shortened texts; older ones also without nodes and ranks.
            records = []
            for age, one in enumerate(reversed(self.records[-_RECORDS:])):
                texts = {name: one[name] for name in ("text", "reason")}
                cut = {name: text if len(text) <= _WORDS else f"{text[:_WORDS]}…" for name, text in texts.items()}
                records.append({**one, **cut} if age < _WHOLE else {**one, **cut, "nodes": [], "ranks": {}})
            history = {"records": records[::-1], "gone": self._gone | peers.gone}
            self.rendezvous = _Rendezvous(spec, self._first, self._loop, peers, own, history)

    def look(self, peers: Peers) -> Peers:
        """Check for a decision; return the connections to use, which are new ones when the hub was replaced."""
        if self.guest is not None:
            self.decision = self.decision or self.guest.look()
            return self.guest.peers
        if self.rendezvous is None:
            return peers
        self.decision = self.decision or self.rendezvous.look(self.standing)
        self.lost = self.rendezvous.lost
        return self.rendezvous.peers

    def leave(self, peers: Peers, generation: int) -> None:
        """Leave the run without a decision. A hub tells its members to find another hub."""
        self.rendezvous, self.left = None, True
        if isinstance(peers, Hub):
            peers.decide({"generation": generation + 1, "restart": False, "leave": True, "why": ""})

    def visit(self, spec: NodeSpec, peers: Peers) -> bool:
        """Begin to wait, as ``Guest``, for the next attempt of the other nodes.

        Does nothing and returns False if no further attempt can include this node. To be called after ``next_attempt``
        has returned None.
        """
        given_up = self.decision is not None and self.decision.get("given_up")
        if not self.left or given_up or not self._first.has_peers:
            return False
        peers.leave() if isinstance(peers, Member) else peers.close()
        self.decision = None
        self.guest = Guest(spec, self._loop)
        return True

    def next_attempt(self, spec: NodeSpec, peers: Peers) -> NodeSpec | None:
        """Prepare the next attempt that was decided: run folder, cluster.json, and the connections to the other nodes.

        spec: specification of this node in the attempt that has ended. Returns the specification of this node for the
        next attempt; None if this node does not take part.
        """
        decision, guest = self.decision, self.guest
        self.rendezvous = self.guest = None
        if decision is None or not decision["restart"]:
            self.why_not = (decision["why"] if decision else "") or (self.why_not if guest else "")
            self.left = decision is None or bool(decision.get("left"))
            return None
        if self._first.node_rank not in decision["nodes"]:
            self.why_not, self.left = "the other nodes go on without this one", True
            return None
        self.standing, self.why_not, self.left = None, "", False
        new = next_spec(self._first, decision)
        before = first_cluster(spec.run_dir)
        archive(spec.run_dir, spec.generation)
        if before is not None:
            self._journal.put("cluster.json", cluster_file(before, new, decision), write_json)
        own = record(decision, spec)
        self.records = [*decision["records"], own]
        gone = decision["gone"] | {str(k): _gone(k, own) for k in decision["without"]}
        self._gone = {k: one for k, one in gone.items() if int(k) not in decision["nodes"]}
        self._journal.event("restart", **{key: value for key, value in own.items() if key != "t"})
        peers.begin(new)
        peers.gone = dict(self._gone)
        return new

    @property
    def finding(self) -> dict[str, Any]:
        last = self.records[-1]
        about = {"t": last["t"], "kind": "restart", "node_rank": last["cause_node"], "rank": None}
        return {**about, "text": last["text"], "stop": False}

    def state(self, spec: NodeSpec, peers: Peers) -> dict[str, Any]:
        """Return the fields of state.json and result.json about restarts; {} without ``run.restarts``."""
        if not spec.restarts:
            return {}
        hub = peers.spec.hub if isinstance(peers, (Hub, Member)) else spec.node_rank
        about = {"generation": spec.generation, "hub": hub, "restarts": self.records}
        return {**about, "left": self.left, "no_restart": self.why_not}


def _gone(k: int, restart: dict[str, Any]) -> dict[str, Any]:
    why = restart["reason"] if restart["cause_node"] == k else "it did not take part in a restart"
    return {"since": restart["t"], "t": restart["t"], "why": why, "how": "lost", "kind": "node-lost", "text": why}
