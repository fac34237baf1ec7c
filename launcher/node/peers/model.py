"""What supervisors of a run exchange: reports of members, orders of the hub, causes of an end.

Each member connects to the hub and says each second how its node is; the hub answers each time. What ends the run
travels at once: the first failure or stop anywhere becomes an order for all. Silence counts as well: who is not heard
for ``peer_timeout`` seconds is lost, and a lost node ends the run too, unless the run can do without it (``Crew``).
Every message repeats all that matters, so that a connection may break and be made anew without harm.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol


@dataclass(frozen=True)
class Crew:
    """The nodes of a run. A server may go while others hold its parts, a client if that is wanted; the lead never."""

    lead: int  #: node_rank of the hub
    roles: tuple[str, ...] = ()  #: worker, server or client, by node_rank; empty: all are workers
    parts: tuple[tuple[int, ...], ...] = ()  #: held, by node_rank
    go_on: bool = False  #: without lost clients

    def role(self, k: int) -> str:
        return self.roles[k] if self.roles else "worker"

    def can_lose(self, k: int, gone: Collection[int] = ()) -> bool:
        """Whether the run can do without node ``k``, where ``gone`` have left already."""
        if self.role(k) == "server":
            return k != self.lead and not self.last_copies(k, gone) and self._clients_have_others(k, gone)
        return self.role(k) == "client" and self.go_on and k != self.lead

    def spare(self, gone: Collection[int] = ()) -> list[int]:
        """All nodes of which any one could be lost next."""
        return [k for k in range(len(self.roles)) if k not in gone and self.can_lose(k, gone)]

    def last_copies(self, k: int, gone: Collection[int] = ()) -> list[int]:
        """Parts that nobody holds but ``k`` and those who are gone."""
        return [part for part in self._held(k) if not self.holders([part], {*gone, k})]

    def holders(self, parts: Collection[int], gone: Collection[int]) -> list[int]:
        """Nodes that hold any of ``parts``."""
        return [j for j in range(len(self.parts)) if j not in gone and set(parts) & set(self._held(j))]

    def served_by(self, k: int, gone: Collection[int]) -> list[int]:
        """Who still holds the parts of ``k``."""
        return self.holders(self._held(k), {*gone, k})

    def held(self, k: int) -> str:
        """``parts 2, 3``."""
        return parts_words(self._held(k))

    def _held(self, k: int) -> tuple[int, ...]:
        return self.parts[k] if k < len(self.parts) else ()

    def _clients_have_others(self, k: int, gone: Collection[int]) -> bool:
        """Clients ask server nodes only, where there are any."""
        servers = [j for j, role in enumerate(self.roles) if role == "server" and j != k and j not in gone]
        return bool(servers) or "client" not in self.roles


def parts_words(parts: Collection[int]) -> str:
    """``part 2``, ``parts 2, 3``."""
    return f"part{'s' if len(parts) > 1 else ''} {', '.join(map(str, sorted(parts)))}"


EOF_PATIENCE = 2.0  #: seconds a closed connection has to come back; that of a killed supervisor never does

_MAX_TEXT = 2000  # characters of a reason

Cause = dict[str, Any]

#: ``{"node_rank", "name": rank3·server·launcher·node, "rank", "kind": failure·stop·lost·nan·stall, "reason", "t",
#: "asked": {"by", "why", "now"} of a stop, else null}``
Report = dict[str, Any]

#: ``{"state", "trained": None where nothing trains, "final": state of result.json, "cause", "ranks", "findings",
#: "stacks": {rank: [summary]} once asked for, "own_ranks": [ranks of the node], "begun": whether one has started}``
Team = dict[str, Any]

#: ``team.json``: {"generation": 1 and up, "ranks": [that go on], "lost": [{"node_rank", "ranks", "why"}]}


@dataclass(frozen=True)
class Meeting:
    """Where the supervisors of a run meet, and how patient they are."""

    token: str
    node_rank: int
    labels: tuple[str, ...]  #: by node_rank
    address: str  #: of the hub, for members
    bind: str  #: what the hub listens on
    port: int
    start_timeout: float
    peer_timeout: float
    crew: Crew = field(default_factory=lambda: Crew(0))

    @property
    def hub(self) -> int:
        """Node rank of the lead node."""
        return self.crew.lead


class Order(NamedTuple):
    """What the others want of this node: to stop because of a cause, or, without one, to finish: all have trained."""

    cause: Cause | None = None


class Peers(Protocol):
    """The other supervisors, as one of them sees them. Times are by this node's clock."""

    order: Order | None
    cause: Cause | None  #: what ended the run first, wherever that was
    lost: dict[str, dict[str, Any]]  #: by node_rank: {"since", "why"}; which ended the run
    gone: dict[str, dict[str, Any]]  #: the same of nodes that the run does without; also "t", "how", "kind", "text"
    team: Team | None  #: the ranks that go on, once some do not any more

    def open(self) -> None:
        """Begin; raises OSError when the hub cannot listen."""

    def look(self) -> None:
        """Take note of the time; called several times a second."""

    def report(self, report: Report) -> None:
        """How this node is from now on; told at once, and again with each beat."""

    def parted(self) -> bool:
        """Whether this supervisor may leave: the others know its end, and need it no more."""

    def close(self) -> None:
        """End all connections."""

    @property
    def offset(self) -> float | None:
        """This clock minus the hub's, in seconds."""

    @property
    def table(self) -> dict[str, dict[str, Any]]:
        """The others by node_rank: {"state", "age": seconds since they were heard}."""

    @property
    def spare(self) -> list[int]:
        """Nodes of which the run could do without any one."""


class Alone:
    """The only node of its run."""

    def __init__(self) -> None:
        self.order: Order | None = None
        self.cause: Cause | None = None
        self.lost: dict[str, dict[str, Any]] = {}
        self.gone: dict[str, dict[str, Any]] = {}
        self.team: Team | None = None
        self.spare: list[int] = []
        self.offset = 0.0
        self.table: dict[str, dict[str, Any]] = {}

    def open(self) -> None:
        return

    def look(self) -> None:
        return

    def report(self, report: Report) -> None:
        return

    def parted(self) -> bool:
        return True

    def close(self) -> None:
        return


def make_cause(
    node_rank: int, name: str, kind: str, reason: str, t: float, asked: Mapping[str, Any] | None = None
) -> Cause:
    """A cause, by the clock that ``t`` is of; ``asked`` is what a stop request says."""
    rank = int(name[4:]) if name.startswith("rank") else None
    return {
        "node_rank": node_rank,
        "name": name,
        "rank": rank,
        "kind": kind,
        "reason": reason[:_MAX_TEXT],
        "t": t,
        "asked": None if asked is None else _asked(asked),
    }


def _asked(request: Mapping[str, Any]) -> dict[str, Any]:
    texts = {name: str(request.get(name) or "")[:_MAX_TEXT] for name in ("by", "why")}
    return {**texts, "now": bool(request.get("now"))}


def received_cause(value: Any, ahead: float) -> Cause | None:
    """A cause from another node, whose clock is ``ahead`` of this one; raises ValueError and the like."""
    if value is None:
        return None
    node_rank, name, kind, reason = (
        int(value["node_rank"]),
        str(value["name"]),
        str(value["kind"]),
        str(value["reason"]),
    )
    return make_cause(node_rank, name, kind, reason, float(value["t"]) - ahead, value["asked"])


def earlier(one: Cause | None, other: Cause | None) -> Cause | None:
    """The cause that came first."""
    known = [cause for cause in (one, other) if cause is not None]
    return min(known, key=lambda cause: float(cause["t"]), default=None)


def sentence(cause: Mapping[str, Any], labels: tuple[str, ...]) -> str:
    """A cause in words: ``rank 5 on node2 (gpu3) ended with exit status 3``."""
    label, name = labels[cause["node_rank"]], cause["name"]
    if cause["kind"] in ("nan", "stall"):
        return str(cause["reason"])
    if cause["kind"] == "stop":
        return f"{cause['reason']}, on {label}"
    if name == "node":
        return f"{label}: {cause['reason']}"
    who = f"{name} of" if cause["rank"] is None else f"rank {cause['rank']} on"
    return f"{who} {label} {cause['reason']}"


def left_words(cause: Cause, meeting: Meeting, gone: Collection[int]) -> str:
    """How the run goes on without a node; ``gone`` had left before."""
    k, crew = cause["node_rank"], meeting.crew
    verb = "was lost" if cause["kind"] == "lost" else "failed"
    at = time.strftime("%H:%M:%S UTC", time.gmtime(cause["t"]))
    told = f"{crew.role(k)} {meeting.labels[k]} {verb} at {at} ({_why(cause)})"
    if crew.role(k) != "server":
        return f"{told}: the others go on without it"
    others = ", ".join(meeting.labels[j] for j in crew.served_by(k, gone))
    verb = "are" if len(crew.parts[k]) > 1 else "is"
    return f"{told}: {crew.held(k)} {verb} served by {others}" if others else f"{told}: nobody needs it any more"


def fatal(cause: Cause, meeting: Meeting, gone: Collection[int]) -> Cause:
    """The cause, with the parts that nobody holds any more where a server node takes the last copies along."""
    if cause["kind"] not in ("failure", "lost"):
        return cause
    told = nobody_left(cause["node_rank"], meeting.crew, meeting.labels, gone)
    return {**cause, "reason": cause["reason"] + told} if told else cause


def nobody_left(k: int, crew: Crew, labels: Sequence[str], gone: Collection[int]) -> str:
    """``; nobody holds part 1 any more`` where server node ``k`` takes the last copies along, else ''."""
    missing = crew.last_copies(k, gone) if crew.role(k) == "server" else []
    if not missing:
        return ""
    before = ", ".join(labels[j] for j in sorted(gone) if set(missing) & set(crew.parts[j]))
    return f"; nobody holds {parts_words(missing)} any more" + (f", as {before} was lost before" if before else "")


def next_team(before: Team | None, staying: Sequence[Sequence[int]], lost: Sequence[int], cause: Cause) -> Team:
    """Who goes on after a node's ranks ``lost``: the ranks of those who stay and still train."""
    told = {"node_rank": cause["node_rank"], "ranks": list(lost), "why": _why(cause)}
    return {
        "generation": before["generation"] + 1 if before else 1,
        "ranks": sorted(rank for ranks in staying for rank in ranks),
        "lost": [*(before["lost"] if before else []), told],
    }


def _why(cause: Cause) -> str:
    """``rank 3 was killed by signal 9 (SIGKILL)``."""
    name = cause["name"]
    return str(cause["reason"]) if name == "node" else f"{name.replace('rank', 'rank ')} {cause['reason']}"
