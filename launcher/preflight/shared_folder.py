"""Tests whether nodes share the partition folder: a file written by one node must be visible on the others."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from typing import Any

from launcher.config.schema import ClusterConfig
from launcher.errors import NodeError
from launcher.preflight.finding import Finding, Survey, connect_finding
from launcher.text import spans
from launcher.transport.fanout import on_nodes
from launcher.transport.rpc import NodeAgent

_TIMEOUT = 60.0  # seconds; a network disk may be slow to wake up


def data_folder(config: ClusterConfig, k: int) -> str:
    return config.nodes[k].data_folder or config.data.folder


class SharedFolderTest:
    """Tests which nodes share one partition folder. Nodes without one are skipped."""

    def __init__(self, survey: Survey, agents: Mapping[int, NodeAgent]):
        with_folder = [k for k in sorted(agents) if survey.probes[k]["manifest"]]
        self.survey, self.agents = survey, {k: agents[k] for k in with_folder}
        self.name = f".gnnfleet-{secrets.token_hex(8)}"

    def findings(self) -> Iterator[Finding]:
        """Yield one finding per node with a partition folder; none if there is only one such node."""
        if len(self.agents) < 2:
            return
        try:
            yield from self._compared(*self.agents)
        except NodeError as error:
            first = next(iter(self.agents))
            yield connect_finding(self.survey.config, first, error)

    def _compared(self, first: int, *others: int) -> Iterator[Finding]:
        wrote = self._call("write", first)
        answers = on_nodes(others, lambda k: self._call("look", k), timeout=2 * _TIMEOUT)
        self._call("remove", first)
        same = [first]
        for k, looked in sorted(answers.values.items()):
            if looked["seen"] if wrote["written"] else wrote["identity"] == looked["identity"]:
                same.append(k)
        apart = [k for k in others if k not in same]
        shared = (
            "the same folder" if wrote["written"] else "probably the same folder (read-only, so not tested by a write)"
        )
        for k in same if len(same) > 1 else ():
            yield self.survey.finding(k, "ok", "shared folder", f"{shared} on {spans(same, 'node')}")
        for k in [first, *apart] if len(same) == 1 else apart:
            differs = f"another folder than on node{first}"
            text = "every node has its own partition folder" if len(same) == 1 else differs
            yield self.survey.finding(k, "ok", "shared folder", f"{text}; parts are compared by digest")

    def _call(self, op: str, k: int) -> dict[str, Any]:
        request = {"op": op, "folder": data_folder(self.survey.config, k), "name": self.name}
        reply: dict[str, Any] = self.agents[k].call("folders", request, _TIMEOUT)
        return reply
