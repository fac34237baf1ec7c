"""Tests that no message of another supervisor of the run, however damaged, breaks a supervisor."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest

from launcher.node.child_process import Loop
from launcher.node.diagnostics.process_state import STOPPED
from launcher.node.peers.member import Member
from launcher.node.peers.model import Peers, sentence
from launcher.node.spec import NodeSpec, RunNode
from launcher.node.supervisor.journal import Journal
from launcher.node.supervisor.rendezvous import Restarts
from launcher.node.supervisor.restart import Standing
from peers_kit import health_of

RANK = {
    "kind": "step",
    "t": 70.0,
    "ended": False,
    "at": [1, 2, "load"],
    "own_s": 0.1,
    "step_s": 0.2,
    "most": ["x", 0.5],
}
FOUND = {"t": 1.0, "kind": "nan", "node_rank": 1, "rank": 1, "text": "the loss is NaN", "stop": False}
CAUSE = {"node_rank": 1, "name": "rank1", "rank": 1, "kind": "failure", "reason": "x", "t": 1.0, "asked": None}
WAIT = {
    "t": 79.0,
    "rank": 1,
    "of": "server",
    "seconds": 9.0,
    "request": "sample",
    "node_rank": 1,
    "stack": [],
    "at": "",
}
REPORT = {
    "t": 80.0, "offset": 0.1, "state": "training", "trained": False, "final": None, "cause": None,
    "ranks": {"1": RANK}, "findings": [FOUND], "stacks": {"1": ["train.py:7 in step()"], "server": [STOPPED]},
    "own_ranks": [1], "waits": {"1": WAIT}, "generation": 0,
    "standing": {"checkpoint": {"file": "epoch-0001.pt", "epoch": 1, "step": 0}, "parts": [1], "stepped": True},
}  # fmt: skip
DECISION = {
    "generation": 1, "restart": True, "leave": False, "lead": 0, "t": 1.0, "nodes": [0, 1], "first": 0,
    "ranks": {"0": [0], "1": [1]}, "parts": {"0": [0]}, "checkpoint": None, "cause": CAUSE, "reason": "x",
    "without": [], "seconds": 1.0, "records": [], "gone": {},
}  # fmt: skip
ORDERS = {
    "t0": 1.0, "t1": 1.0, "t2": 1.0, "cause": CAUSE, "stop": True, "finish": False, "generation": 0, "stacks": True,
    "peers": {"0": {"state": "training", "age": 0.0}}, "known_final": False, "decision": DECISION,
}  # fmt: skip
ODD = (None, True, -1, 10**30, math.inf, math.nan, "", "\0\ud800", "9" * 30, [], {}, [None], {"0": 1}, [[]], 77)


def damaged(value: Any) -> Iterator[Any]:
    """Yield copies of ``value`` in which one field or item, at any depth, is missing or has an odd value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        others = {k: v for k, v in inner if k != key} if isinstance(value, dict) else {}
        yield others if isinstance(value, dict) else [v for k, v in inner if k != key]
        for odd in (*ODD, *damaged(one)):
            yield {**others, key: odd} if isinstance(value, dict) else [odd if k == key else v for k, v in inner]


#: Errors after which a ``Link`` closes the connection.
REFUSED = (ValueError, KeyError, TypeError, AttributeError, ArithmeticError)


def test_hostile_reports_of_a_member_break_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    health, hub = health_of(tmp_path, on_stall="warn")
    monkeypatch.setattr(health, "_collect", dict)  # the stacks of this node's own ranks take long
    for report in [REPORT, {**REPORT, "cause": CAUSE}, *damaged({**REPORT, "cause": CAUSE})]:
        member = hub.members[1]
        hub.order = hub.cause = member.left = None
        with suppress(*REFUSED):
            hub._take_report(member, json.loads(json.dumps(report)))
        health._waits_reported = False
        health.findings += [finding for finding in member.findings if finding not in health.findings]
        for finding in [*health._detected(), *health._expired()]:
            sentence({**CAUSE, "node_rank": finding["node_rank"]}, ("a", "b"))
        json.dumps([hub.table, health.newest])
        if hub.order is not None and hub.order.cause is not None:
            sentence(hub.order.cause, ("a", "b"))
        if member.standing:
            assert Standing.of(member.standing).place[1] >= 0
    assert hub.members[1].ranks["1"]["own_s"] == 0.1


def test_hostile_orders_of_a_hub_break_nothing(tmp_path: Path) -> None:
    nodes = tuple(RunNode(name, ranks=(k,), control_port=1, master_port=2) for k, name in enumerate("ab"))
    spec = NodeSpec("r1", "t", 1, str(tmp_path), nodes, None, None, start_timeout=9.0, grace=1.0)
    started, journal = [], Journal(str(tmp_path), 1)
    for orders in [ORDERS, *damaged(ORDERS)]:
        member = Member(spec, loop=cast(Loop, None))
        with suppress(*REFUSED):
            member._take_orders(json.loads(json.dumps(orders)))
        json.dumps(member.table)
        if member.order is not None and member.order.cause is not None:
            sentence(member.order.cause, spec.labels)
        if member.decision is not None and member.decision["restart"] and 1 in member.decision["nodes"]:
            restarts = Restarts(spec, cast(Loop, None), journal)
            restarts.decision = member.decision
            started.append(restarts.next_attempt(spec, Peers(spec)))
    assert started[0] is not None and started[0].ranks == (1,)
