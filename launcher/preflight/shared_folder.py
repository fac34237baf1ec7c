"""Tests whether nodes share the partition folder: a file written by one node must be visible on the others."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from typing import Any

from launcher.errors import NodeError
from launcher.preflight.finding import Finding, connect_finding
from launcher.preflight.survey import Survey
from launcher.text import spans
from launcher.transport.fanout import on_nodes
from launcher.transport.rpc import NodeAgent

_TIMEOUT = 60.0  # seconds; a network disk may be slow to wake up


def shared_folder_findings(survey: Survey, agents: Mapping[int, NodeAgent]) -> Iterator[Finding]:
    """Yield which nodes share one partition folder; nothing for nodes without one, or for a single node with one."""
    config, name = survey.config, f".gnnfleet-{secrets.token_hex(8)}"

    def call(op: str, k: int) -> dict[str, Any]:
        request = {"op": op, "folder": config.nodes[k].data_folder or config.data.folder, "name": name}
        reply: dict[str, Any] = agents[k].call("folders", request, _TIMEOUT)
        return reply

    with_folder = [k for k in sorted(agents) if survey.probes[k]["manifest"]]
    if len(with_folder) < 2:
        return
    first, *others = with_folder
    try:
        wrote = call("write", first)
        answers = on_nodes(others, lambda k: call("look", k), timeout=2 * _TIMEOUT)
        call("remove", first)
    except NodeError as error:
        yield connect_finding(config, first, error)
        return
    same = [first]
    for k, looked in sorted(answers.values.items()):
        if looked["seen"] if wrote["written"] else wrote["identity"] == looked["identity"]:
            same.append(k)
    apart = [k for k in others if k not in same]
    shared = "the same folder" if wrote["written"] else "probably the same folder (read-only, so not tested by a write)"
    for k in same if len(same) > 1 else ():
        yield survey.finding(k, "ok", "shared folder", f"{shared} on {spans(same, 'node')}")
    for k in [first, *apart] if len(same) == 1 else apart:
        differs = f"another folder than on node{first}"
        text = "every node has its own partition folder" if len(same) == 1 else differs
        yield survey.finding(k, "ok", "shared folder", f"{text}; parts are compared by digest")
