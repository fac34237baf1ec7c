"""Words about a run that waits in line (``--wait``), from the states of its nodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher.text import clock_time

_NAMED = 2  # runs in the way that are named


def ordinal(number: int) -> str:
    """Return ``1st``, ``2nd``, ``3rd``, ``4th``, …"""
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def waiting_words(states: Mapping[int, Mapping[str, Any]]) -> str:
    """Return what a run waits for: ``waiting for run X of alice on node1 since 12:03:11, 2nd in line``; '' if it does
    not wait.

    states: content of state.json, by node_rank. Runs that hold something are named; if there are none, those that are
    earlier in line.
    """
    queues = {k: state["queue"] for k, state in states.items() if state["state"] == "queued" and state.get("queue")}
    found: dict[tuple[str, str], tuple[list[int], float]] = {}
    holding = any(not one["waits"] for queue in queues.values() for one in queue["blockers"])
    for k, queue in sorted(queues.items()):
        for one in queue["blockers"]:
            if one["waits"] != holding:
                nodes, since = found.get((one["run_id"], one["user"]), ([], one["since"]))
                found[one["run_id"], one["user"]] = ([*nodes, k], min(since, one["since"]))
    if not found:
        return ""
    runs = [
        f"run {run_id} of {user} on {', '.join(f'node{k}' for k in dict.fromkeys(nodes))} since {clock_time(since)}"
        for (run_id, user), (nodes, since) in [*found.items()][:_NAMED]
    ]
    more = [f"{len(found) - _NAMED} more"] if len(found) > _NAMED else []
    verb = "waiting for" if holding else "waiting behind"
    place = ordinal(1 + max(queue["earlier"] for queue in queues.values()))
    return f"{verb} {' and '.join([*runs, *more])}, {place} in line"
