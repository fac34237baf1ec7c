"""Queries the state of all nodes of a run in parallel: on each node it runs ``launcher/node/watch.py --once``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from launcher.errors import FleetError, TransportError, reason_of
from launcher.node.json_records import Damaged, message_in
from launcher.plan.model import NodePlan
from launcher.report.run_folder import FoundRun
from launcher.report.verdict import NodeView
from launcher.run.tmux_session import if_run_exists, run_was_absent
from launcher.transport import close_all, connect_all
from launcher.transport.base import Transport
from launcher.transport.fanout import on_nodes

_TIMEOUT = 30.0  # seconds for one query


@dataclass(frozen=True)
class OpenRun:
    """A run and its nodes. ``connections``: the open transport of each node_rank, or why it could not connect."""

    found: FoundRun
    connections: Mapping[int, Transport | TransportError]

    @property
    def nodes(self) -> dict[int, NodePlan]:
        return {node.node_rank: node for node in self.found.needed_plan.nodes}

    @property
    def transports(self) -> dict[int, Transport]:
        return {k: connection for k, connection in self.connections.items() if isinstance(connection, Transport)}

    @property
    def errors(self) -> dict[int, TransportError]:
        return {k: connection for k, connection in self.connections.items() if isinstance(connection, TransportError)}

    def views(
        self, ranks: Sequence[int] | None = None, options: Callable[[int], Sequence[str]] = lambda k: ("--only", "")
    ) -> dict[int, NodeView]:
        """Query the state of the nodes ``ranks`` (None: all) in parallel.

        ``options``: returns the options of ``watch.py --once`` for a node_rank. By default no log or metrics file is
        read.
        """
        nodes = {k: node for k, node in self.nodes.items() if ranks is None or k in ranks}
        asked = [k for k in nodes if k in self.transports]
        unreachable = ",".join(map(str, self.errors))
        peers = ("--peers", unreachable) if unreachable else ()  # what the other nodes know about them
        answers = on_nodes(asked, lambda k: node_view(nodes[k], self.transports[k], (*options(k), *peers)))
        errors = {k: error for k, error in (self.errors | answers.errors).items() if k in nodes}
        views = answers.values | {k: NodeView(nodes[k], unreachable=reason_of(error)) for k, error in errors.items()}
        return {k: views[k] for k in sorted(views)}


@contextmanager
def opened(found: FoundRun) -> Iterator[OpenRun]:
    """Connect to all nodes of a run with the logins in the run's config. Closes the connections on exit."""
    ranks = [node.node_rank for node in found.needed_plan.nodes]
    connections = connect_all(found.needed_config)
    try:
        yield OpenRun(found, {k: connections[k] for k in ranks})
    finally:
        close_all(connections)


def node_view(node: NodePlan, transport: Transport, words: Sequence[str]) -> NodeView:
    """Query the state of one node by ``watch.py --once`` with the options ``words``. Raises FleetError."""
    watch = node.program("watch", node.run_dir, "--once", *words)
    done = transport.run(if_run_exists(node, watch), timeout=_TIMEOUT)
    ended = time.time()
    if run_was_absent(done):
        return NodeView(node, absent=True)
    lines: dict[str, list[str]] = {}
    values: dict[str, Any] = {}
    printed = done.stdout.decode("utf-8", "replace").split("\n")
    try:
        for message in filter(None, map(message_in, printed)):  # skips the output of a shell profile
            if "file" in message:
                lines.setdefault(message["file"], []).extend(message["lines"])
            values |= message
    except Damaged as error:
        raise FleetError(f"the node's state could not be read: {error}") from None
    if "now" not in values:
        errors = done.stderr.decode("utf-8", "replace").strip().splitlines()
        words = errors or [text for text in printed if text.strip()]
        raise FleetError(
            f"the node's state could not be read: {words[-1] if words else f'exit status {done.returncode}'}"
        )
    return NodeView(
        node,
        values.get("state"),
        values.get("result"),
        values.get("lost", {}).get("reason", ""),
        now=values["now"],
        offset=values["now"] - ended,  # watch.py prints its clock last: the error is the latency
        lines=lines,
    )
