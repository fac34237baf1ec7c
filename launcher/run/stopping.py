"""Stopping one node from here, and what to type where that does not work."""

from __future__ import annotations

from launcher.config.schema import login_text
from launcher.errors import FleetError
from launcher.plan.build import LaunchPlan, NodePlan
from launcher.report.followed import Limits
from launcher.report.run_folder import user_at_host
from launcher.run.tmux_session import StopReport, stop_session
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
    if node.login is None:
        return f"To stop them: {line}"
    port = f"-p {node.login.port} " if node.login.port else ""
    words = port + login_text(node.login.user, node.login.host, None)  # ssh takes no brackets
    return f'To stop them: ssh {words} "{line}"'


def stops_itself(plan: LaunchPlan, node: NodePlan) -> str:
    """What becomes of a node that nobody reaches."""
    itself = "it stops by itself where it does not reach the others" if len(plan.nodes) > 1 else "it may still run"
    return f"{itself}. {how_to_stop(node)}"
