"""How each node of a run is, asked of the nodes themselves, all at once."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from launcher.command import Command, render
from launcher.errors import FleetError, TransportError
from launcher.fanout import on_nodes
from launcher.plan.build import NodePlan
from launcher.report.found import FoundRun
from launcher.transport import close_all, connect_all
from launcher.transport.base import Completed, Transport

_ABSENT = "gnnfleet: nothing of this run is here"

_TIMEOUT = 30.0  # seconds for one look

#: $1 run folder, $2 what to run if the node has been sent something of the run.
_IF_THERE = f'if [ -e "$1/node.json" ]; then exec bash -c "$2"; else echo "{_ABSENT}"; fi'


@dataclass(frozen=True)
class NodeView:
    """One node of a run, as it answered just now."""

    node: NodePlan
    state: Mapping[str, Any] | None = None  #: state.json
    result: Mapping[str, Any] | None = None  #: result.json
    lost: str = ""  #: why no result can be expected any more
    absent: bool = False  #: nothing of the run has ever been sent there
    unreachable: str = ""  #: why it could not be asked
    now: float = 0.0  #: its clock when it answered
    offset: float = 0.0  #: its clock minus ours, seconds
    lines: Mapping[str, Sequence[str]] = field(default_factory=dict)  #: of the files asked for

    @property
    def reached(self) -> bool:
        return not self.unreachable

    @property
    def alive(self) -> bool:
        """Its supervisor works."""
        return self.reached and self.state is not None and self.result is None and not self.lost

    @property
    def word(self) -> str:
        """Its state in a word or two."""
        if self.unreachable:
            return "unreachable"
        if self.result is not None:
            return str(self.result["state"])
        if self.lost:
            return "lost"
        return str(self.state["state"]) if self.state is not None else "not started"

    @property
    def heartbeat_age(self) -> float | None:
        """Seconds since its supervisor last wrote; by its own clock, whatever that shows."""
        return max(0.0, self.now - self.state["time"]) if self.alive and self.state else None

    @property
    def ranks(self) -> Mapping[str, Mapping[str, Any]]:
        """Last step of each of its ranks, by rank."""
        return (self.state or {}).get("ranks") or {}

    @property
    def cluster_offset(self) -> float:
        """Its clock minus the lead node's, as the nodes have measured it; 0 when they have not."""
        told = (self.result or {}).get("clock_offset")
        return float(told if told is not None else (self.state or {}).get("clock_offset") or 0.0)


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

    def look(
        self, ranks: Sequence[int] | None = None, options: Callable[[int], Sequence[str]] = lambda k: ("--only", "")
    ) -> dict[int, NodeView]:
        """All nodes (or ``ranks``) as they are now; ``options``: of ``watch.py --once``, by default no file."""
        nodes = {k: node for k, node in self.nodes.items() if ranks is None or k in ranks}
        asked = [k for k in nodes if k in self.transports]
        answers = on_nodes(asked, lambda k: look_at(nodes[k], self.transports[k], options(k)))
        errors = {k: error for k, error in (self.errors | answers.errors).items() if k in nodes}
        views = answers.values | {k: NodeView(nodes[k], unreachable=_why(error)) for k, error in errors.items()}
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


def look_at(node: NodePlan, transport: Transport, words: Sequence[str]) -> NodeView:
    """Ask one node; raises FleetError when it cannot be asked."""
    done = transport.run(watch_once(node, words), timeout=_TIMEOUT)
    ended = time.time()
    if _ABSENT in done.stdout.decode("utf-8", "replace"):
        return NodeView(node, absent=True)
    view = _view(node, done)
    return replace(view, offset=view.now - ended)  # it tells its clock last, so this is off by the way back alone


def watch_once(node: NodePlan, words: Sequence[str]) -> Command:
    """``watch.py --once`` with the supervisor's interpreter and surroundings, if the node has the run at all."""
    return if_there(node, (f"{node.code_dir}/launcher/node/watch.py", node.run_dir, "--once", *words))


def if_there(node: NodePlan, argv: Sequence[str]) -> Command:
    """One of our programs on the node; nothing is made there when the run has never got so far."""
    inner = replace(node.start, argv=(node.start.argv[0], *argv), cwd="")
    return Command(("bash", "-c", _IF_THERE, "bash", node.run_dir, render(inner)))


def was_absent(done: Completed) -> bool:
    """Whether an ``if_there`` command found nothing of the run."""
    return _ABSENT.encode() in done.stdout


def _view(node: NodePlan, done: Completed) -> NodeView:
    """What ``watch.py --once`` has told."""
    lines: dict[str, list[str]] = {}
    told: dict[str, Any] = {}
    for text in done.stdout.decode("utf-8", "replace").splitlines():
        if text.startswith("{"):  # else a profile that prints
            message = json.loads(text)
            lines.setdefault(message["file"], []).extend(message["lines"]) if "file" in message else told.update(
                message
            )
    if "now" not in told:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise FleetError(f"it could not say how it is: {said[-1] if said else f'exit status {done.returncode}'}")
    lost = told.get("lost", {}).get("reason", "")
    return NodeView(node, told.get("state"), told.get("result"), lost, now=told["now"], lines=lines)


def _why(error: Exception) -> str:
    return error.message if isinstance(error, TransportError) else str(error)
