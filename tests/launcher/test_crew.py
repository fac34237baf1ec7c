"""Tests of ``Crew``, which determines the nodes that a run can lose, and of messages about a lost node."""

from __future__ import annotations

import pytest

from launcher.node.peers.model import fatal, left_words, make_cause
from launcher.node.spec import Crew, RunNode

COPIES = ((0, 1, 2, 3), (2, 3, 0, 1), (), ())
ROLES = ("server", "server", "client", "client")
LABELS = ("node0 (g0)", "node1 (g1)", "node2 (c0)", "node3 (c1)")


def crew(lead: int, roles: tuple[str, ...], parts: tuple[tuple[int, ...], ...]) -> Crew:
    nodes = zip(("", *LABELS)[-len(roles) :], roles, parts, strict=True) if roles else ()
    return Crew(lead, [RunNode(label, role, parts=held) for label, role, held in nodes])


@pytest.mark.parametrize(
    ("roles", "parts", "gone", "spare"),
    [
        (ROLES, COPIES, (), [0, 1]),
        (ROLES, COPIES, (1,), []),
        (ROLES, ((0, 1), (2, 3), (), ()), (), []),
        (ROLES, ((0, 1), (1, 2), (), ()), (), []),
        (("server", "server", "server", "client"), ((0, 1), (1, 2), (2, 0), ()), (), [0, 1, 2]),
        (("server", "server", "server", "client"), ((0, 1), (1, 2), (2, 0), ()), (1,), []),
        (("worker", "server"), ((0, 1), (1, 0)), (), [1]),
        (("worker", "server", "client"), ((0, 1), (1, 0), ()), (), []),
        ((), (), (), []),
    ],
)
def test_which_nodes_can_be_lost(
    roles: tuple[str, ...], parts: tuple[tuple[int, ...], ...], gone: tuple[int, ...], spare: list[int]
) -> None:
    lead = next((k for k, role in enumerate(roles) if role != "server"), 0)
    assert crew(lead, roles, parts).spare(gone) == spare


@pytest.mark.parametrize(("nodes", "all_of_them"), [((0,), True), ((0, 1), False), ((2,), False), ((), True)])
def test_losses_at_the_same_time(nodes: tuple[int, ...], all_of_them: bool) -> None:
    assert crew(2, ROLES, COPIES).can_lose_all(nodes) == all_of_them
    assert crew(3, ("server", *ROLES), ((0, 1, 2, 3), *COPIES)).can_lose_all((0, 1))


def test_messages_of_losses() -> None:
    everyone = crew(2, ROLES, COPIES)
    lost, failed = (
        make_cause(1, "node", "lost", "no sign of life", 0.0),
        make_cause(3, "rank3", "failure", "raised X", 0.0),
    )
    assert left_words(lost, everyone, ()) == (
        "server node1 (g1) was lost at 00:00:00 UTC (no sign of life): parts 0, 1, 2, 3 are served by node0 (g0)"
    )
    assert fatal(failed, everyone, ()) == failed
    assert fatal(lost, everyone, {0})["reason"] == (
        "no sign of life; no other node holds parts 0, 1, 2, 3, as node0 (g0) was lost before"
    )
