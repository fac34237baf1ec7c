"""``run.json``: the plan as it is kept with a run, on every node and here, for those who come back to it later.

It holds the LaunchPlan without ``files`` and without environment variables that are secret.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import zlib
from collections.abc import Mapping
from typing import Any

from launcher.errors import FleetError
from launcher.plan import LaunchPlan, NodePlan
from launcher.planned import generated
from launcher.script import Command, Secret
from launcher.topology import Topology

FORMAT, VERSION = "gnnfleet-run", 1
_LARGE = 100_000  # characters; every node gets the whole plan, so that of many nodes is packed


def run_json(plan: LaunchPlan) -> str:
    """``plan`` as the text of a ``run.json``."""
    head = {"format": FORMAT, "version": VERSION, "run_id": plan.run_id}
    text = json.dumps({**head, "plan": _plain(plan)})
    if len(text) <= _LARGE:
        return text + "\n"
    packed = base64.b64encode(zlib.compress(json.dumps(_plain(plan)).encode())).decode()
    return json.dumps({**head, "packed": packed}) + "\n"


def read_run(text: str) -> LaunchPlan:
    """The plan in the text of a ``run.json``, nodes with ``files=()``; raises FleetError when it is none."""
    try:
        values = json.loads(text)
        kind = values.get("format"), values.get("version")
    except (ValueError, AttributeError) as error:
        raise FleetError(f"run.json is damaged: {error}") from None
    if kind != (FORMAT, VERSION):
        raise FleetError(f"run.json is of format {kind[0]} version {kind[1]}; this program reads {FORMAT} {VERSION}")
    try:
        plan = json.loads(zlib.decompress(base64.b64decode(values["packed"]))) if "packed" in values else values["plan"]
        return _launch_plan(plan)
    except (ValueError, KeyError, TypeError, zlib.error) as error:
        raise FleetError(f"run.json is damaged: {error!r}") from None


def with_run_file(plan: LaunchPlan) -> LaunchPlan:
    """``plan`` with the content of the ``run.json`` that each node gets."""
    content = run_json(plan)
    files = {node.node_rank: generated(f"{node.run_dir}/run.json", content, mode=0o600) for node in plan.nodes}
    nodes = tuple(
        dataclasses.replace(
            node,
            files=tuple(
                files[node.node_rank] if file.dest == files[node.node_rank].dest else file for file in node.files
            ),
        )
        for node in plan.nodes
    )
    return dataclasses.replace(plan, nodes=nodes)


def _plain(value: Any) -> Any:
    if isinstance(value, (LaunchPlan, NodePlan, Command, Topology)):
        names = (field.name for field in dataclasses.fields(value))
        return {name: _plain(getattr(value, name)) for name in names if name != "files"}
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items() if not isinstance(item, Secret)}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def _launch_plan(values: Mapping[str, Any]) -> LaunchPlan:
    nodes = tuple(map(_node_plan, values["nodes"]))
    made: dict[str, Any] = {"nodes": nodes, "partition": _command(values["partition"])}
    made |= {"topology": Topology(**values["topology"])} if "topology" in values else {}  # else of an older version
    return LaunchPlan(**{**_tuples(values), **made})


def _node_plan(values: Mapping[str, Any]) -> NodePlan:
    commands = {name: _command(values[name]) for name in ("start", "server", "trainer")}
    return NodePlan(**{**_tuples(values), **commands, "files": ()})


def _command(values: Mapping[str, Any] | None) -> Command | None:
    return None if values is None else Command(**_tuples(values))


def _tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
