"""Tests of the list of nodes and parts of a serving cluster, also after changes of the config file."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launcher.config.resolve import resolve_serving
from launcher.config.schema import ClusterConfig, DataConfig, NodeConfig
from launcher.errors import UsageError
from launcher.plan.build import make_plan
from launcher.plan.model import LaunchPlan, Login
from launcher.serving.membership import ServingState, assign_parts, only_holders, roster_of, too_few_copies
from launcher.serving.serve import _few_copies


def config(*hosts: str, role: str = "server", **data: object) -> ClusterConfig:
    nodes = tuple(NodeConfig(host, role=role) for host in hosts)  # type: ignore[arg-type]
    return ClusterConfig(nodes, DataConfig("synthetic", **data))  # type: ignore[arg-type]


def served(wanted: ClusterConfig) -> LaunchPlan:
    return make_plan(resolve_serving(wanted), run_id="products", code_digest="abc")


def test_servers_serve_or_workers_if_there_are_none() -> None:
    mixed = config("g1", "g2")
    mixed = replace(mixed, nodes=(*mixed.nodes, NodeConfig("w1", devices=(0,)), NodeConfig("c1", role="client")))
    assert [node.host for node in resolve_serving(mixed).nodes] == ["g1", "g2"]
    workers = replace(mixed, nodes=mixed.nodes[2:])
    (only,) = resolve_serving(workers).nodes
    assert (only.host, only.role, only.devices) == ("w1", "server", ())


def test_nodes_that_cannot_serve_are_refused_with_the_reason() -> None:
    with pytest.raises(
        UsageError, match="all are clients, so no node can serve; give the hosts of the graph `role: server`"
    ):
        resolve_serving(config("c1", role="client"))
    with pytest.raises(UsageError, match="uses the graph of serving cluster products"):
        resolve_serving(config("g1", serving="products"))


def test_nodes_keep_their_numbers_when_the_file_is_reordered() -> None:
    plan = served(config("g1", "g2"))
    roster = roster_of(plan, None, config("g3", "g2", "g1"))
    assert [node.host for node in roster.config.nodes] == ["g1", "g2", "g3"]
    assert (roster.joined, roster.removed, roster.removed_before) == ((2,), (), ())
    assert roster.config.num_parts == 2, "one more node does not change the number of parts"


def test_several_nodes_of_one_machine_are_matched_by_their_order() -> None:
    plan = served(config("g1", "g1"))
    assert roster_of(plan, None, config("g1", "g1", "g1")).joined == (2,)
    assert roster_of(plan, None, config("g1", replicas=1)).removed == (1,)


def test_a_removed_node_that_returns_joins_under_its_old_number() -> None:
    plan = served(config("g1", "g2"))
    left = replace(plan, nodes=(plan.nodes[0], replace(plan.nodes[1], parts=())))
    without = roster_of(left, None, config("g1"))
    assert (without.joined, without.removed, without.removed_before) == ((), (), (1,))
    assert without.config.nodes[1].host == "g2", "kept, so that later nodes get higher numbers"
    assert roster_of(left, None, config("g1", "g2")).joined == (1,)


@pytest.mark.parametrize(("user", "host", "port"), [("ann", "g2", None), ("ann", "fe80::1", 2222), (None, "g2", None)])
def test_the_login_of_a_removed_node_is_known_without_the_old_file(
    user: str | None, host: str, port: int | None
) -> None:
    plan = served(config("g1", "g2", replicas=2))
    plan = replace(plan, nodes=(plan.nodes[0], replace(plan.nodes[1], login=Login(user, host, port))))
    roster = roster_of(plan, None, config("g1"))
    assert roster.removed == (1,)
    left = roster.config.nodes[1]
    assert (left.user, left.host, left.port) == (user, host, port)


def test_a_new_server_gets_copies_of_the_rarest_parts() -> None:
    assert assign_parts({0: (0, 1), 1: (2, 3)}, [2], 4)[2] == (0, 1)
    assert assign_parts({0: (0, 1), 1: (2, 3), 2: (0, 1)}, [3, 4], 4) == {
        0: (0, 1), 1: (2, 3), 2: (0, 1), 3: (2, 3), 4: (0, 1),
    }  # fmt: skip
    assert assign_parts({0: (0,), 1: ()}, [1], 1) == {0: (0,), 1: (0,)}


def test_parts_with_fewer_copies_than_wanted_are_reported() -> None:
    held = {0: (0, 1), 1: (1, 0), 2: (0,)}
    assert too_few_copies(held, (), config("g1", "g2", "g3", replicas=2)) == ()
    assert too_few_copies(held, (1,), config("g1", "g2", "g3", replicas=2)) == (1,)
    assert too_few_copies(held, (), config("g1", "g2", "g3", replicas=3)) == (1,)
    wanted = config("g1", "g2", replicas=2)
    plan = served(config("g1", "g2"))
    found = ServingState(roster_of(plan, None, wanted), {}, plan)
    assert _few_copies(found, {0: (0,), 1: (1,)}) == (
        "data.replicas: each part should be on 2 nodes, but fewer hold parts 0–1. Running servers keep their parts: "
        "add nodes, which get the parts with the fewest copies, or stop the cluster and serve again",
    )
    assert _few_copies(found, {0: (0, 1), 1: (0, 1)}) == ()


def test_only_a_sole_holder_cannot_leave() -> None:
    held = {0: (0, 1), 1: (1, 2), 2: (0, 2)}
    assert only_holders(held, [1]) == {}
    assert only_holders(held, [0, 1]) == {0: (1,), 1: (1,)}
