"""A node that a run has lost: in words, and what it leaves to the others."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from launcher.node.peers.crew import Crew, parts_words
from launcher.node.peers.model import Cause, Meeting, Team


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
