"""Stopping one node from here, and what to type where that does not work."""

from __future__ import annotations

import re

from launcher.errors import FleetError
from launcher.followed import Limits
from launcher.plan import LaunchPlan, NodePlan
from launcher.registry import user_at_host
from launcher.session import StopReport, stop_session
from launcher.transport.base import Transport

STOP_EXTRA = 10.0  #: seconds a node may take to stop beyond its grace, before force


def stop_node(node: NodePlan, transport: Transport, limits: Limits, why: str = "") -> str:
    """Stop one node, getting its line back first if need be; what may still run there, or ''."""
    try:
        transport.connect(limits.connect_timeout)
        report: StopReport = stop_session(
            transport, node, timeout=limits.grace + STOP_EXTRA, by=user_at_host(), why=why
        )
    except FleetError as error:
        return f"{error}; its processes may still run. {how_to_stop(node)}"
    if not report.stopped:
        return f"{node.label}: still running: {', '.join(report.leftovers)}"
    return ""


def how_to_stop(node: NodePlan) -> str:
    """What a person types to stop this node by hand."""
    line = f"tmux kill-session -t '={node.session}'"  # without =, tmux takes a name that merely begins so
    if node.target == "local":
        return f"To stop them: {line}"
    with_port = re.fullmatch(r"(.*@)?\[?([^:]+|.+(?=\]))\]?:(\d+)", node.target)  # ssh takes no brackets
    words = f"-p {with_port[3]} {with_port[1] or ''}{with_port[2]}" if with_port else node.target
    return f'To stop them: ssh {words} "{line}"'


def stops_itself(plan: LaunchPlan, node: NodePlan) -> str:
    """What becomes of a node that nobody reaches."""
    itself = "it stops by itself where it does not reach the others" if len(plan.nodes) > 1 else "it may still run"
    return f"{itself}. {how_to_stop(node)}"
