"""Decides whether a run starts again after a failure (``run.restarts``), on which nodes, with which ranks and parts.

All functions are pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from launcher.node.peers.hub import KILLED
from launcher.node.peers.model import Cause, Decision, sentence
from launcher.node.spec import NodeSpec, parts_words

_TRAIN = ("worker", "client")  # roles

_HOLD = ("worker", "server")


@dataclass(frozen=True)
class Standing:
    """What a node can contribute to a restart, once it has ended its processes."""

    checkpoint: Mapping[str, Any] | None = None  #: its newest one: {"file", "epoch", "step"}; None without any
    parts: tuple[int, ...] = ()  #: part ids on its disk
    stepped: bool = False  #: one of its ranks has trained a step in the attempt that ended

    def to_json(self) -> dict[str, Any]:
        return {"checkpoint": self.checkpoint, "parts": list(self.parts), "stepped": self.stepped}

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> Standing:
        """Convert the field ``standing`` of a report."""
        return cls(value["checkpoint"], tuple(value["parts"]), value["stepped"])

    @property
    def place(self) -> tuple[int, int]:
        """(epochs done, steps done of the next epoch) as in the checkpoint; (-1, 0) without a checkpoint."""
        return (self.checkpoint["epoch"], self.checkpoint["step"]) if self.checkpoint else (-1, 0)


@dataclass(frozen=True)
class AttemptEnd:
    """How an attempt ended, as far as its hub knows. Its mappings and collections name nodes by node_rank."""

    spec: NodeSpec  #: of the hub's node
    first: NodeSpec  #: of the hub's node in the first attempt, which had all nodes
    standings: Mapping[int, Standing]  #: nodes that are ready for a restart; also some that were not in this attempt
    cause: Cause  #: what ended the attempt, on any node
    lost: Mapping[int, str]  #: lost nodes, and why they count as lost
    ended: Collection[int] = ()  #: nodes whose supervisors have ended, as they were told to
    given_up: Collection[int] = ()  #: nodes that the attempt has continued without
    away: Collection[int] = ()  #: nodes that have left for another hub
    stop: bool = False  #: somebody has asked to stop the run


class _NoRestart(Exception):
    """Raised when the hub decides against a restart. The message is the reason; '' if the run was stopped.

    left: whether nodes that the hub cannot reach may restart the run without it.
    """

    def __init__(self, why: str, left: bool = False) -> None:
        super().__init__(why)
        self.left = left


def decide(end: AttemptEnd, now: float) -> Decision:
    """Decide whether and how the run starts again.

    now: seconds since the epoch by the hub's clock. The result always has "generation" (number of the next attempt),
    "restart" (true or false), "t" and "lead" (node_rank of the hub).

    Without a restart, it also has "why", and "left": whether nodes that the hub cannot reach may go on with the run.

    With a restart, it also has

    - "first": node of rank 0
    - "nodes": the nodes that take part
    - "ranks", "parts": those of each node, by node_rank
    - "checkpoint": {"file", "epoch", "step"} or null
    - "cause", and "reason": the cause as a sentence
    - "without": nodes lost in this attempt
    - "seconds": time since the failure
    """
    spec = end.spec
    head = {"generation": spec.generation + 1, "lead": spec.node_rank, "leave": False, "t": now}
    try:
        nodes = _check(end)
        parts = _parts(end, nodes)
    except _NoRestart as error:
        # Servers that were cut off: the others do not even need a restart.
        spared = spec.crew.can_lose_all(end.standings, end.given_up) and not _is_stop(end)
        return {**head, "restart": False, "why": str(error), "left": error.left or spared}
    training = [k for k in nodes if end.first.nodes[k].role in _TRAIN]
    first = max(training, key=lambda k: (end.standings[k].place, -k))
    ranks: dict[str, list[int]] = {}
    for k in [first, *(k for k in training if k != first)]:
        begin = sum(map(len, ranks.values()))
        ranks[str(k)] = list(range(begin, begin + len(end.first.nodes[k].ranks)))
    return {
        **head,
        "restart": True,
        "nodes": nodes,
        "first": first,
        "ranks": ranks,
        "parts": {str(k): list(parts.get(k, ())) for k in nodes},
        "checkpoint": end.standings[first].checkpoint,
        "cause": end.cause,
        "reason": sentence(end.cause, spec.labels),
        "without": [k for k in spec.active if k not in nodes],
        "seconds": round(max(0.0, now - float(end.cause["t"])), 1),
    }


def words(decision: Decision, spec: NodeSpec) -> str:
    """Return a restart as a sentence: ``restart 1 of 3: rank 2 on … was killed …; going on with 2 of 3 nodes from epoch
    3, step 120 (7.3 s)``.
    """
    found = decision["checkpoint"]
    at = f"epoch {found['epoch'] + 1}, step {found['step']}" if found else "the beginning"
    nodes = f"{len(decision['nodes'])} of {len(spec.nodes)} node{'' if len(spec.nodes) == 1 else 's'}"
    head = f"restart {decision['generation']} of {spec.restarts}: {decision['reason'].rstrip('.')}"
    return f"{head}; going on with {nodes} from {at} ({decision['seconds']:.1f} s)"


def record(decision: Decision, spec: NodeSpec) -> dict[str, Any]:
    """Return an entry of ``restarts`` in state.json and result.json, which is equal on all nodes."""
    found = decision["checkpoint"] or {}
    return {
        "t": decision["t"],
        "generation": decision["generation"],
        "of": spec.restarts,
        "text": words(decision, spec),
        "reason": decision["reason"],
        "cause_node": decision["cause"]["node_rank"],
        "nodes": decision["nodes"],
        "without": decision["without"],
        "ranks": decision["ranks"],
        "hub": decision["lead"],
        "epoch": found.get("epoch"),
        "step": found.get("step"),
        "seconds": decision["seconds"],
    }


def _is_stop(end: AttemptEnd) -> bool:
    return end.stop or end.cause["kind"] == "stop"


def _check(end: AttemptEnd) -> list[int]:
    """Return the nodes of the next attempt. Raises _NoRestart."""
    spec, nodes = end.spec, sorted(end.standings)
    if _is_stop(end):
        raise _NoRestart("")
    if end.cause["kind"] == "nan":
        raise _NoRestart("the loss would become NaN or infinite again")
    if spec.generation >= spec.restarts:
        raise _NoRestart(f"the limit of run.restarts ({spec.restarts}) is reached")
    if not end.lost and not end.ended and not any(one.stepped for one in end.standings.values()):
        raise _NoRestart("no process had trained a step, so it would fail again")
    # The nodes must suffice, and no others may go on by themselves.
    killed = {k for k, why in end.lost.items() if why == KILLED and k not in end.away}
    doubtful = [k for k in spec.active if k not in killed and k not in end.ended and k not in end.given_up]
    old = [k for k in nodes if k in spec.active]
    if 2 * len(old) < len(doubtful) + bool(end.away):
        silent = [spec.labels[k] for k in doubtful if k not in old and k not in end.away]
        left = f"only {len(old)} of {len(doubtful)} nodes can reach each other, and the others may go on by themselves"
        raise _NoRestart(f"{left}; no answer from {', '.join(silent)}" if silent else left, left=True)
    training = [k for k in nodes if end.first.nodes[k].role in _TRAIN]
    if len(training) < max(1, spec.min_nodes):
        least = max(1, spec.min_nodes)
        raise _NoRestart(f"training nodes left: {len(training)}, needed: {least} (run.min_nodes)")
    return nodes


def _parts(end: AttemptEnd, nodes: Iterable[int]) -> dict[int, tuple[int, ...]]:
    """Return the parts that each node holds in the next attempt. Raises _NoRestart if a part is on no node.

    A node keeps its parts; a node that was not in the last attempt gets its parts of the first attempt. Any other part
    goes to a node that has the part on its disk: to the one with the fewest parts, if several have it.

    nodes: node_ranks of the nodes in the next attempt.
    """
    spec = end.spec
    holders = [k for k in nodes if end.first.nodes[k].role in _HOLD]
    held = {k: set((spec if k in spec.active else end.first).nodes[k].parts) for k in holders}
    every = {part for node in spec.nodes for part in node.parts}
    missing = []
    for part in sorted(every - set().union(*held.values())):
        having = [k for k in holders if part in end.standings[k].parts]
        if having:
            held[min(having, key=lambda k: (len(held[k]), k))].add(part)
        else:
            missing.append(part)
    if missing:
        raise _NoRestart(f"no remaining node has {parts_words(missing)}")
    return {k: tuple(sorted(parts)) for k, parts in held.items()}
