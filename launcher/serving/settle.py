"""Tell the graph servers that go on who has joined and who has left; stop those that were taken out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from launcher.errors import FleetError, TransportError
from launcher.fanout import on_nodes
from launcher.plan.build import LaunchPlan, NodePlan
from launcher.report.run_folder import user_at_host
from launcher.run.stopping import STOP_EXTRA, how_to_stop
from launcher.run.tmux_session import stop_session
from launcher.serving.cluster_state import NodeThere
from launcher.transport.base import Transport

Lines = Mapping[int, Transport | TransportError]

_TOLD = ("run.json", "cluster.json")  # the last one is what servers look at


def tell_others(plan: LaunchPlan, lines: Lines, but: Sequence[int]) -> list[str]:
    """Give the nodes that go on (all but those) the plan as it is now; of those that do not get it, why."""
    others = {node.node_rank: node for node in plan.nodes if node.parts and node.node_rank not in but}

    def tell(k: int) -> None:
        line = lines[k]
        if isinstance(line, TransportError):
            raise line
        for name in _TOLD:
            file = next(file for file in others[k].files if file.dest.endswith(f"/{name}"))
            line.write(file.content.encode(), file.dest, mode=file.mode)

    errors = on_nodes(others, tell).errors
    return [
        f"{others[k].label} has not been told of the change ({_reason(error)}); when it can be reached, serve again"
        for k, error in sorted(errors.items())
    ]


def stop_gone(
    nodes: Mapping[int, NodePlan], lines: Lines, there: Mapping[int, NodeThere], gone: Sequence[int], grace: float
) -> list[str]:
    """Stop the nodes that were taken out; of those that may still run, why."""

    def stop(k: int) -> None:
        line = lines[k]
        if isinstance(line, TransportError):
            raise line
        report = stop_session(line, nodes[k], timeout=grace + STOP_EXTRA, by=user_at_host(), why="gnnfleet serve")
        if not report.stopped:
            raise FleetError(f"still running: {', '.join(report.leftovers)}")

    alive = [k for k in gone if there[k].view.alive or there[k].view.unreachable]
    errors = on_nodes(alive, stop).errors
    return [
        f"{nodes[k].label} was taken out, but may still run: {_reason(error)}. {how_to_stop(nodes[k])}"
        for k, error in sorted(errors.items())
    ]


def _reason(error: Exception) -> str:
    return error.message if isinstance(error, TransportError) else str(error)
