"""``--nodes-needed``: chooses some of the hosts of a cluster.yml, the first that are fit and free."""

from __future__ import annotations

import math
import re
from dataclasses import replace

from rich.console import Console
from rich.text import Text

from launcher.config.host_filter import with_nodes
from launcher.config.resolve import resolve_run
from launcher.config.schema import ClusterConfig
from launcher.errors import PreflightRefused, UsageError, node_label
from launcher.preflight.finding import Finding
from launcher.preflight.preflight_report import PreflightReport, finding_lines
from launcher.run.check import check_over
from launcher.run.options import LaunchOptions
from launcher.text import count
from launcher.transport import close_all, connect_all


def numbers_needed(text: str, hosts: int) -> tuple[int, int]:
    """Return the least and the largest number of hosts that ``2`` or ``2-4`` asks for. Raises UsageError."""
    match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", text)
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= least <= most:
        raise UsageError(f"--nodes-needed {text}: give a number of hosts, such as 2, or a range, such as 2-4")
    if least > hosts:
        raise UsageError(f"--nodes-needed {text}: the cluster file has only {count(hosts, 'host')}")
    return least, most


def choose_hosts(config: ClusterConfig, options: LaunchOptions, console: Console) -> ClusterConfig:
    """Check all hosts of ``config``; return it with only those on which the run is launched (``--nodes-needed``).

    These are the first in the order of the file that are fit and that no other run uses or waits for. With ``--wait``
    and too few of them, others follow: those with the fewest waiting runs, then with the earliest known end. Prints why
    the others are left out. Raises UsageError, and PreflightRefused if too few hosts are fit.
    """
    least, most = numbers_needed(options.nodes_needed, len(config.nodes))
    if any(node.role != "worker" for node in config.nodes):
        raise UsageError("--nodes-needed: the hosts have roles, so it matters which; choose them by --include")
    console.print(Text(f"choosing {options.nodes_needed} of {count(len(config.nodes), 'host')}"), soft_wrap=True)
    connections = connect_all(resolve_run(config))
    try:
        report = check_over(config, options, connections)
    finally:
        close_all(connections)
    chosen, left_out = chosen_nodes(report, len(config.nodes), least, most, wait=options.wait is not None)
    reasons = "".join(f"\n  left out: {line}" for line in finding_lines(left_out))
    if not chosen:
        free = "fit" if options.wait is not None else "fit and free"
        hint = "" if options.wait is not None else "; --wait also takes hosts in use"
        raise PreflightRefused(f"--nodes-needed {options.nodes_needed}: too few hosts are {free}{hint}{reasons}")
    named = ", ".join(node_label(k, config.nodes[k].host) for k in chosen)
    console.print(Text(f"chosen: {named}{reasons}"), soft_wrap=True)
    return with_nodes(config, [config.nodes[k] for k in chosen])


def chosen_nodes(
    report: PreflightReport, hosts: int, least: int, most: int, *, wait: bool
) -> tuple[list[int], list[Finding]]:
    """Return the node_ranks to take, ascending, [] if there are fewer than ``least``, and why others are not taken."""
    in_use: dict[int, list[Finding]] = {k: [] for k in range(hosts)}
    unfit: dict[int, list[Finding]] = {}
    for finding in report.findings:
        if finding.held_by:
            in_use[finding.node_rank].append(finding)
        elif finding.severity == "block":
            unfit.setdefault(finding.node_rank, []).append(finding)
    fit = [k for k in in_use if k not in unfit]

    def line(k: int) -> tuple[int, float, int]:
        """How many runs wait for node ``k``, and when those that use it will have ended."""
        runs = {finding.held_by for finding in in_use[k]}
        leases = [one for one in report.facts[k].leases if one["run_id"] in runs]
        waiting = {one["run_id"] for one in leases if one["resource"].startswith("ticket:")}
        ends = [one["ends"] or math.inf for one in leases if one["run_id"] not in waiting]
        return len(waiting), max(ends, default=0.0), k

    chosen = [k for k in fit if not in_use[k]][:most]
    if len(chosen) < least and wait:
        chosen = sorted(fit, key=line)[:least]
    chosen = sorted(chosen) if len(chosen) >= least else []
    others = [one for k in range(hosts) if k not in chosen for one in unfit.get(k) or in_use[k]]
    return chosen, [replace(one, remedy="", command="") for one in others]
