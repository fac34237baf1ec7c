"""Processes of runs whose supervisor is gone. Part of node/programs/probe.py, loaded only where there may be some."""

from __future__ import annotations

import os
from typing import Any, Iterable

from launcher.node.programs.folders import Suspect, lives


def of_runs(suspects: Iterable[Suspect]) -> list[dict[str, Any]]:
    """[{"run_id", "pids", "commands"}] of the runs of which something still lives: what their last state.json
    names, and all that carries GNNFLEET_RUN_DIR of theirs in its environment."""
    named = {one.run_dir: one for one in suspects}
    pids: dict[str, set[int]] = {folder: known(one) for folder, one in named.items()}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        folder = run_dir_of(pid)
        if folder in pids:
            pids[folder].add(int(pid))
    return [
        {"run_id": named[folder].run_id, "pids": sorted(found), "commands": sorted({command(pid) for pid in found})}
        for folder, found in sorted(pids.items())
        if found
    ]


def known(suspect: Suspect) -> set[int]:
    return {entry["pid"] for entry in suspect.processes if lives(entry.get("pid"), entry.get("start_ticks"))}


def run_dir_of(pid: str) -> str:
    try:
        with open("/proc/%s/environ" % pid, "rb") as file:
            entries = file.read().split(b"\0")
    except OSError:  # ended meanwhile, or another user's
        return ""
    value = next((entry for entry in entries if entry.startswith(b"GNNFLEET_RUN_DIR=")), b"=")
    return os.path.realpath(value.split(b"=", 1)[1].decode("utf-8", "replace")) if value != b"=" else ""


def command(pid: int) -> str:
    try:
        with open("/proc/%d/cmdline" % pid, "rb") as file:
            return file.read().replace(b"\0", b" ").decode("utf-8", "replace").strip()[:80]
    except OSError:
        return ""
