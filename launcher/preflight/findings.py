"""What preflight makes of the facts: one Finding per node and check. Pure functions."""

from __future__ import annotations

from launcher.config.schema import ClusterConfig
from launcher.errors import NodeCallError, NodeError
from launcher.preflight.check_devices import device_findings
from launcher.preflight.check_machine import machine_findings, same_machine
from launcher.preflight.check_packages import package_findings
from launcher.preflight.check_storage import storage_findings
from launcher.preflight.finding import Finding, Survey


def all_findings(survey: Survey) -> list[Finding]:
    """Every check of every node that answered."""
    found: list[Finding] = []
    for node_rank in sorted(survey.probes):
        found.append(survey.finding(node_rank, "ok", "connect", "connected"))
        for check in (machine_findings, storage_findings, device_findings):
            found += check(survey, node_rank)
    found += package_findings(survey)
    found += same_machine(survey)
    return found


def connect_finding(config: ClusterConfig, node_rank: int, error: Exception) -> Finding:
    """Why a node cannot be worked with."""
    what, remedy = str(error), ""
    if isinstance(error, NodeError):
        what, remedy = error.message, error.remedy
    check = "python" if isinstance(error, NodeCallError) else "connect"
    return Finding(node_rank, config.nodes[node_rank].host, "block", check, what, remedy)
