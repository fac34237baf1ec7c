"""Tests of ``run.json``, the record of a plan in the run folder."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from launcher.command import Command, Secret
from launcher.config.resolve import resolve_run
from launcher.config.schema import NodeConfig
from launcher.errors import FleetError
from launcher.plan.build import final_plan, make_plan, new_token
from launcher.plan.model import LaunchPlan, NodePlan
from launcher.plan.serialize import read_run, run_json, to_json
from plan_kit import TOKEN, cluster, facts_of, plan_of


def without_secrets(value: Any) -> Any:
    """Return a plan or a command as run.json records it: without secrets and files."""
    if isinstance(value, Command):
        env = {name: "***" if isinstance(text, Secret) else text for name, text in value.env.items()}
        return dataclasses.replace(value, env=env)
    if not isinstance(value, LaunchPlan):
        return value
    nodes = []
    for node in value.nodes:
        commands = {name: without_secrets(getattr(node, name)) for name in ("start", "server", "trainer")}
        nodes.append(dataclasses.replace(node, **commands, files=()))
    return dataclasses.replace(value, nodes=tuple(nodes), code=())


@pytest.mark.parametrize("nodes", [1, 2, 70])
def test_round_trip(nodes: int) -> None:
    # Reading run.json gives the recorded plan, also with so many nodes that the plan in it is compressed.
    hosts = (NodeConfig(f"h{k}", env={"ODD": "a'b\n$(c) é"}, devices=(0, 2), setup=("true",)) for k in range(nodes))
    plan = plan_of(cluster(*hosts), facts=facts_of(nodes))
    text = run_json(plan)
    assert read_run(text) == without_secrets(plan)
    assert TOKEN.reveal() not in text and len(text) < 150_000
    assert json.loads(text)["run_id"] == "r1" and ("packed" in json.loads(text)) == (nodes == 70)


def test_every_node_gets_the_same_run_json() -> None:
    plan = final_plan(make_plan(resolve_run(cluster()), run_id="r1", facts=facts_of(2), token=new_token()))
    sent = [file for node in plan.nodes for file in node.files if file.dest == f"{node.run_dir}/run.json"]
    assert len(sent) == 2 and {file.content for file in sent} == {run_json(plan)}
    assert all(file.bytes == len(file.content) and file.sha256 and oct(file.mode) == "0o600" for file in sent)
    assert [len(node.files) for node in plan.nodes] == [len(node.files) for node in plan_of(cluster()).nodes]


def test_all_nodes_get_the_same_service_key_and_it_is_never_shown() -> None:
    plan = final_plan(make_plan(resolve_run(cluster()), run_id="r1", facts=facts_of(2), token=new_token()))
    one, two = (
        file.content for node in plan.nodes for file in node.files if file.dest == f"{node.run_dir}/service.key"
    )
    assert isinstance(one, Secret) and one == two
    pair = json.loads(one.reveal())
    assert set(pair) == {"public", "secret"} and pair["secret"] not in repr(plan) + to_json(plan) + run_json(plan)
    given = final_plan(plan_of(cluster()), Secret("the cluster's"))
    assert "the cluster's" in [file.content for file in given.nodes[0].files]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "run.json is damaged: Expecting property name"),
        ("[]", "run.json is damaged"),
        (
            '{"format": "gnnfleet-run", "version": 1}',
            "format gnnfleet-run version 1; this program reads gnnfleet-run 3",
        ),
        ('{"format": "gnnfleet-run", "version": 3}', "run.json is damaged: Expected `object`, got `null`"),
        ('{"format": "gnnfleet-run", "version": 3, "plan": {}}', "damaged: Object missing required field `run_id`"),
        (
            '{"format": "gnnfleet-run", "version": 3, "plan": {"run_id": 1}}',
            "Expected `str`, got `int`",
        ),
        ('{"format": "gnnfleet-run", "version": 3, "packed": "AAAA"}', "run.json is damaged"),
    ],
)
def test_an_invalid_run_file_is_an_error(text: str, words: str) -> None:
    with pytest.raises(FleetError, match=words):
        read_run(text)


def spec_of(node: NodePlan) -> dict[str, Any]:
    content = next(file.content for file in node.files if file.dest.endswith("/node.json"))
    assert isinstance(content, Secret)
    spec: dict[str, Any] = json.loads(content.reveal())
    return spec


def test_node_json_has_the_hubs_address_and_the_nodes_leases() -> None:
    hosts = (NodeConfig("a", devices=(2, 0)), NodeConfig("b", user="ann", devices=(1,)))
    plan = plan_of(cluster(*hosts), facts=facts_of(2, free_ports=(29402, 29501, 29600, 29601)), operator="al@laptop")
    specs = [spec_of(node) for node in plan.nodes]
    assert plan.control_port == 29402
    first = {"address": "10.0.0.1", "bind": "10.0.0.1", "control_port": 29402, "master_port": 29501}
    everyone = [
        {"label": "node0 (a)", "ranks": [0, 1], "parts": [0], **first},
        {"label": "node1 (ann@b)", "ranks": [2], "parts": [1]},
    ]
    assert [(spec["hub"], spec["nodes"]) for spec in specs] == [(0, everyone)] * 2
    assert specs[0]["leases"] == ["cuda:0", "cuda:2", "port:29501", "port:29402", "port:29600"]
    assert specs[1]["leases"] == ["cuda:1", "port:29601"] and specs[1]["operator"] == "al@laptop"
    settings = ("peer_timeout", "on_stall", "stall_after", "on_nan")
    assert [specs[0][name] for name in settings] == [6.0, "stop", "auto", "warn"]


def test_single_node_has_no_hub() -> None:
    plan = plan_of(cluster(NodeConfig("a")))
    spec = spec_of(plan.nodes[0])
    assert (
        plan.control_port is None
        and "control_port" not in spec["nodes"][0]
        and spec["leases"] == ["port:29500", "cpu:r1-node0"]
    )


def test_the_printed_plan_and_run_json_are_the_same_plan() -> None:
    config = resolve_run(cluster(*(NodeConfig(f"h{k}") for k in range(3))))
    plan = final_plan(make_plan(config, run_id="r1", facts=facts_of(3), token=new_token()))
    printed, kept = json.loads(to_json(plan)), json.loads(run_json(plan))["plan"]
    assert printed["code"] and all(node["files"] for node in printed["nodes"])
    printed["code"] = []
    for node in printed["nodes"]:
        node["files"] = []
    assert printed == kept


def test_the_size_of_run_json_is_linear_in_the_number_of_nodes() -> None:
    sizes = []
    for nodes in (5, 10, 20):
        plan = plan_of(cluster(*(NodeConfig(f"h{k}") for k in range(nodes))), facts=facts_of(nodes))
        sizes.append(len(run_json(plan)))
    assert sizes[2] - sizes[1] < 2.2 * (sizes[1] - sizes[0])
