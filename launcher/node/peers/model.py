"""Types exchanged by the supervisors of a run: reports of members, orders of the hub, and causes of the run's end.

Each member reports its state once a second, and the hub answers. A failure or stop on any node becomes an order for all
nodes. Every message contains the full state, so a connection may be replaced at any time.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from launcher.node.exit_description import Failure, first_failure
from launcher.node.spec import Crew, NodeSpec, parts_words

_EOF_PATIENCE = 2.0  # seconds


def eof_patience(peer_timeout: float) -> float:
    """Return the seconds without a new connection, after one was closed, until a supervisor counts as killed.

    A third of ``peer_timeout``, which is larger on machines that are slow to answer, but at least 2 s.
    """
    return min(peer_timeout, max(_EOF_PATIENCE, peer_timeout / 3))


MAX_TEXT = 2000  #: maximum length of a reason or finding, in characters: messages to the hub are limited

#: Why a run ended: ``{"node_rank", "name": rank3·server·launcher·node, "rank", "kind": failure·stop·lost·nan·stall,
#: "reason", "t": seconds since the epoch, "follow_up": as in an outcome, "asked": {"by", "why", "now"} of a stop
#: request, else null}``
Cause = dict[str, Any]

#: State of a node, sent to the hub: ``{"state", "trained": None on a node without ranks, "final": state of result.json,
#: "cause", "ranks", "findings", "stacks": {rank, or "server": [summary]} once requested, "own_ranks": [ranks of the
#: node], "waits": {rank: content of procs/wait-rank<r>.json}, "host": ``HostLoad.look``, if trackers want it}``; with
#: ``run.restarts`` also "generation" and "standing" (launcher.node.supervisor.restart); "place" while it waits
Report = dict[str, Any]

#: Decision of the hub after an attempt, for all nodes: ``{"generation": number of the next attempt, "restart": whether
#: there is one, "leave": whether the hub itself ends, …}``; further keys in launcher.node.supervisor.restart
Decision = dict[str, Any]


#: What the lead node tells the nodes of a waiting run: ``{"round", "take": whether to take the leases now, "go":
#: whether all have}`` (launcher.node.supervisor.waiting). A node reports its place, ``{"ready", "round", "held"}``.
Turn = dict[str, Any]

NO_TURN: Turn = {"round": 0, "take": False, "go": False}


class Order(NamedTuple):
    """An order of the hub to a node: stop because of ``cause`` or, if it is None, finish."""

    cause: Cause | None = None


class Peers:
    """A supervisor's connection to the other supervisors: none in a run with a single node, for which this class is.

    Times are by this node's clock, seconds since the epoch.
    """

    def __init__(self, spec: NodeSpec) -> None:
        self.spec = spec  #: of the current attempt
        self.order: Order | None = None  #: None while the run continues
        self.cause: Cause | None = None  #: first cause of the run's end, on any node
        #: lost nodes that ended the run, by node_rank: {"since", "why"}
        self.lost: dict[str, dict[str, Any]] = {}
        #: nodes the run continues without; like ``lost``, with "t", "how", "kind", "text"
        self.gone: dict[str, dict[str, Any]] = {}
        self.decision: Decision | None = None  #: the hub's last decision; None before the first
        self.turn = NO_TURN  #: whose turn it is, as the lead node has decided

    def open(self) -> None:
        """Start to listen (hub) or to connect (member); raises OSError when the hub cannot listen."""

    def look(self) -> None:
        """Check timeouts; called several times a second."""

    def report(self, report: Report) -> None:
        """Send this node's state to the other supervisors; called with each heartbeat and each change."""

    def may_leave(self) -> bool:
        """Whether this supervisor may exit: the others know that it has ended, and none needs it any more."""
        return True

    def begin(self, spec: NodeSpec) -> None:
        """Begin the attempt that ``spec`` describes; open connections are kept."""
        self.spec, self.order, self.cause = spec, None, None

    def call(self, turn: Turn) -> None:
        """As the lead node, send ``turn`` to all nodes, and repeat it in every later message."""
        self.turn = turn

    def close(self) -> None:
        return

    @property
    def offset(self) -> float | None:
        """Seconds by which this clock is ahead of the hub's; None until measured."""
        return 0.0

    @property
    def table(self) -> dict[str, dict[str, Any]]:
        """The state of each other node, by node_rank: {"state", "age": seconds since its last message, or None}."""
        return {}

    @property
    def spare(self) -> list[int]:
        """node_ranks of the nodes that the run can lose now (``Crew.spare``)."""
        return []


def make_cause(
    node_rank: int, name: str, kind: str, reason: str, t: float, asked: Mapping[str, Any] | None = None,
    follow_up: bool = False,
) -> Cause:  # fmt: skip
    """Return a cause of the run's end.

    name: process, such as ``rank3``, or "node". t: seconds since the epoch. asked: content of a stop request.
    follow_up: as in the outcome of the process.
    """
    rank = int(name[4:]) if name.startswith("rank") else None
    if asked is not None:
        texts = {name: str(asked.get(name) or "")[:MAX_TEXT] for name in ("by", "why")}
        asked = {**texts, "now": bool(asked.get("now"))}
    return {
        "node_rank": node_rank,
        "name": name,
        "rank": rank,
        "kind": kind,
        "reason": reason[:MAX_TEXT],
        "t": t,
        "follow_up": follow_up,
        "asked": asked,
    }


def received_cause(cause: Cause | None, ahead: float, num_nodes: int) -> Cause | None:
    """Convert the time of a cause from a node whose clock is ``ahead`` seconds ahead to this node's clock.

    Raises ValueError if the cause is on none of the run's ``num_nodes`` nodes.
    """
    if cause is None:
        return None
    if cause["node_rank"] >= num_nodes:
        raise ValueError(f"no node {cause['node_rank']}")
    return {**cause, "reason": cause["reason"][:MAX_TEXT], "t": cause["t"] - ahead}


def first_cause(*causes: Cause | None) -> Cause | None:
    """Return the cause that came first; None without any."""
    known = [cause for cause in causes if cause is not None]
    return first_failure(
        known, lambda one: Failure(one["t"], one["node_rank"], one["rank"], one["kind"], one["follow_up"])
    )


def sentence(cause: Mapping[str, Any], labels: tuple[str, ...]) -> str:
    """Return a cause as a sentence: ``rank 5 on node2 (gpu3) ended with exit status 3``."""
    label, name = labels[cause["node_rank"]], cause["name"]
    if cause["kind"] in ("nan", "stall"):
        return str(cause["reason"])
    if cause["kind"] == "stop":
        return f"{cause['reason']}, on {label}"
    if name == "node":
        return f"{label}: {cause['reason']}"
    who = f"{name} of" if cause["rank"] is None else f"rank {cause['rank']} on"
    return f"{who} {label} {cause['reason']}"


def left_words(cause: Cause, crew: Crew, gone: Collection[int]) -> str:
    """Return the message about a lost or failed server; it names the other nodes that hold the server's parts.

    gone: nodes that were lost earlier.
    """
    k = cause["node_rank"]
    verb = "was lost" if cause["kind"] == "lost" else "failed"
    at = time.strftime("%H:%M:%S UTC", time.gmtime(cause["t"]))
    who = "" if cause["name"] == "node" else f"{cause['name'].replace('rank', 'rank ')} "
    loss = f"server {crew.nodes[k].label} {verb} at {at} ({who}{cause['reason']})"
    others = ", ".join(crew.nodes[j].label for j in crew.served_by(k, gone))
    verb = "are" if len(crew.nodes[k].parts) > 1 else "is"
    return f"{loss}: {crew.held(k)} {verb} served by {others}" if others else f"{loss}: it is no longer needed"


def fatal(cause: Cause, crew: Crew, gone: Collection[int]) -> Cause:
    """Return ``cause``. If a server failed or was lost, its reason also names the parts that no remaining node holds.

    gone: nodes that were lost earlier.
    """
    if cause["kind"] not in ("failure", "lost"):
        return cause
    addition = nobody_left(cause["node_rank"], crew, gone)
    return {**cause, "reason": cause["reason"] + addition} if addition else cause


def nobody_left(k: int, crew: Crew, gone: Collection[int]) -> str:
    """Return ``; no other node holds part 1`` if server ``k`` had the last copy, else ''. gone: nodes lost before."""
    missing = crew.last_copies(k, gone) if crew.nodes[k].role == "server" else []
    if not missing:
        return ""
    before = ", ".join(crew.nodes[j].label for j in sorted(gone) if set(missing) & set(crew.nodes[j].parts))
    return f"; no other node holds {parts_words(missing)}" + (f", as {before} was lost before" if before else "")
