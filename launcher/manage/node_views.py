"""Asks all nodes of a run for their state at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from launcher.command import Command, render
from launcher.errors import FleetError, TransportError, reason_of
from launcher.node.json_reader import Damaged, message_in
from launcher.plan.model import NodePlan
from launcher.report.run_folder import FoundRun
from launcher.report.verdict import NodeView
from launcher.transport import close_all, connect_all
from launcher.transport.base import Completed, Transport
from launcher.transport.fanout import on_nodes

_ABSENT = "gnnfleet: nothing of this run is here"

_TIMEOUT = 30.0  # seconds for one look

#: $1 run folder, $2 what to run if the node has been sent something of the run.
_IF_THERE = f'if [ -e "$1/node.json" ]; then exec bash -c "$2"; else echo "{_ABSENT}"; fi'


@dataclass(frozen=True)
class OpenRun:
    """A run with lines to its nodes, or why there is none, by node_rank."""

    found: FoundRun
    attempts: Mapping[int, Transport | TransportError]

    @property
    def nodes(self) -> dict[int, NodePlan]:
        return {node.node_rank: node for node in self.found.needed_plan.nodes}

    @property
    def transports(self) -> dict[int, Transport]:
        """The lines that stand."""
        return {k: line for k, line in self.attempts.items() if isinstance(line, Transport)}

    @property
    def errors(self) -> dict[int, TransportError]:
        return {k: line for k, line in self.attempts.items() if isinstance(line, TransportError)}

    def views(
        self, ranks: Sequence[int] | None = None, options: Callable[[int], Sequence[str]] = lambda k: ("--only", "")
    ) -> dict[int, NodeView]:
        """All nodes (or ``ranks``) as they are now; ``options``: of ``watch.py --once``, by default no file."""
        nodes = {k: node for k, node in self.nodes.items() if ranks is None or k in ranks}
        asked = [k for k in nodes if k in self.transports]
        answers = on_nodes(asked, lambda k: node_view(nodes[k], self.transports[k], options(k)))
        errors = {k: error for k, error in (self.errors | answers.errors).items() if k in nodes}
        views = answers.values | {k: NodeView(nodes[k], unreachable=reason_of(error)) for k, error in errors.items()}
        return {k: views[k] for k in sorted(views)}


@contextmanager
def opened(found: FoundRun) -> Iterator[OpenRun]:
    """Lines to all nodes of the run by the logins of its config; closed in the end."""
    ranks = [node.node_rank for node in found.needed_plan.nodes]
    attempts = connect_all(found.needed_config)
    try:
        yield OpenRun(found, {k: attempts[k] for k in ranks})
    finally:
        close_all(attempts)


def node_view(node: NodePlan, transport: Transport, words: Sequence[str]) -> NodeView:
    """Ask one node; raises FleetError when it cannot be asked."""
    watch = node.program("watch", node.run_dir, "--once", *words)
    done = transport.run(if_there(node, watch), timeout=_TIMEOUT)
    ended = time.time()
    if _ABSENT in done.stdout.decode("utf-8", "replace"):
        return NodeView(node, absent=True)
    view = _view(node, done)
    return replace(view, offset=view.now - ended)  # it tells its clock last, so this is off by the way back alone


def if_there(node: NodePlan, program: Command) -> Command:
    """``program`` if the node has the run at all; nothing is made there when the run has never got so far."""
    return Command(("bash", "-c", _IF_THERE, "bash", node.run_dir, render(replace(program, cwd=""))))


def was_absent(done: Completed) -> bool:
    """Whether an ``if_there`` command found nothing of the run."""
    return _ABSENT.encode() in done.stdout


def _view(node: NodePlan, done: Completed) -> NodeView:
    """What ``watch.py --once`` has told; raises FleetError unless that is whole."""
    lines: dict[str, list[str]] = {}
    told: dict[str, Any] = {}
    said = done.stdout.decode("utf-8", "replace").split("\n")
    try:
        for message in filter(None, map(message_in, said)):  # other lines are a profile's that prints
            if "file" in message:
                lines.setdefault(message["file"], []).extend(message["lines"])
            told |= message
    except Damaged as error:
        raise FleetError(f"it could not say how it is: {error}") from None
    if "now" not in told:
        words = done.stderr.decode("utf-8", "replace").strip().splitlines() or [word for word in said if word.strip()]
        raise FleetError(f"it could not say how it is: {words[-1] if words else f'exit status {done.returncode}'}")
    lost = told.get("lost", {}).get("reason", "")
    return NodeView(node, told.get("state"), told.get("result"), lost, now=told["now"], lines=lines)
