"""Stops a node, or says how it is: ``control.py stop|status RUN_DIR``; prints one JSON object.

``stop`` asks the supervisor (``control/stop``) and waits for its result. A supervisor that is dead or
too slow is helped: its recorded groups, its descendants and all holders of the run's token are ended, its leases
given back, and so is the tmux session ended if it lingers. Exit 0 when nothing of the run is left on this node, else 1.
Where ``node.json`` is damaged the run's processes are known by its folder, which their environment names.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

if not __package__:  # run as a file: make the package above importable
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from launcher.node import leases, procs
from launcher.node.json_reader import RESULT, STATE, record_in
from launcher.node.record import read_json, write_json

_POLL = 0.1  # seconds

_GRACE = 5.0  # seconds, when node.json does not tell

_SLACK = 6.0  # seconds a supervisor may need beyond its grace: outcomes, leftovers, result


class NodeFolder:
    """A node's run folder, as seen by a process that is not its supervisor."""

    def __init__(self, run_dir: str) -> None:
        self.run_dir = os.path.abspath(run_dir)
        self.damage = ""  #: what is wrong with node.json
        self.grace = _GRACE
        self.lease_key: tuple[str, int] | None = None
        self.mark = f"GNNFLEET_RUN_DIR={self.run_dir}"  # what the run's processes have in their environment
        try:
            self._read_spec()
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            self.damage = f"{self.path('node.json')} is damaged ({error!r}); going by the folder instead"

    def _read_spec(self) -> None:
        spec = read_json(self.path("node.json"))
        if spec is None and not os.path.exists(self.path("node.json")):
            raise SystemExit(f"control: no run in {self.run_dir} (it has no node.json)")
        self.mark = f"{procs.TOKEN}={procs.node_token(spec['token'], spec['node_rank'])}"
        self.grace = float(spec["grace"])
        self.lease_key = str(spec["run_id"]), int(spec["node_rank"])

    def path(self, *names: str) -> str:
        return os.path.join(self.run_dir, *names)

    @property
    def state(self) -> dict[str, Any] | None:
        return record_in(STATE, self.path("state.json"))

    def supervisor(self) -> int | None:
        """The pid of the living supervisor."""
        state = self.state
        return state["pid"] if state and procs.alive(state["pid"], state["start_ticks"]) else None

    def recorded(self) -> list[procs.Process]:
        """Processes of the last recorded state that still run, with their groups."""
        entries = (self.state or {}).get("processes", [])
        groups = {entry["pgid"] for entry in entries if procs.alive(entry["pid"], entry["start_ticks"])}
        return [process for process in procs.table() if process.pgid in groups]

    def left(self) -> list[procs.Process]:
        """Whatever of the run still runs on this node, the supervisor included."""
        root = self.supervisor()
        found = procs.run_processes(self.mark, root) + self.recorded()
        process = procs.look(root) if root else None
        return list({one.pid: one for one in [*found, *([process] if process else [])]}.values())


def stop(folder: NodeFolder, timeout: float, session: str, request: dict[str, Any]) -> dict[str, Any]:
    """Stop the node within about ``timeout`` seconds, by force at the end of it."""
    ask(folder, request)
    deadline = time.monotonic() + timeout
    while folder.supervisor() is not None and time.monotonic() < deadline:
        time.sleep(_POLL)
    killed = describe(folder.left())
    supervisor = folder.supervisor()
    if supervisor is not None:  # too slow: it must not see its children end and call that a failure
        procs.send(supervisor, signal.SIGKILL)
    left = procs.end(folder.left, 0.0 if request["now"] or not killed else min(folder.grace, 1.0))
    if session:
        end_session(session)
    notes = [folder.damage, "" if left else give_back(folder)]
    return {"stopped": not left, "killed": killed, "leftovers": describe(left), "notes": [*filter(None, notes)]}


def give_back(folder: NodeFolder) -> str:
    """Release what the node held, as its supervisor cannot any more; what stands against it."""
    try:
        if folder.lease_key is not None:
            leases.release(*folder.lease_key)
    except leases.LeaseError as error:
        return f"leases were not given back: {error}"
    return ""


def ask(folder: NodeFolder, request: dict[str, Any]) -> None:
    """Ask the supervisor to stop: by the file, an empty one if the disk is full, or else by signal."""
    path = folder.path("control", "stop")
    try:
        os.makedirs(folder.path("control"), exist_ok=True)
        try:
            write_json(path, request)
        except OSError:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o644))
    except OSError:
        supervisor = folder.supervisor()
        if supervisor is not None:
            procs.send(supervisor, signal.SIGTERM)


def describe(processes: list[procs.Process]) -> list[dict[str, Any]]:
    return [{"pid": process.pid, "command": procs.command_line(process.pid)} for process in processes]


def end_session(name: str) -> None:
    """Close the tmux session of that name; there is none any more when all went well."""
    try:
        subprocess.run(["tmux", "kill-session", "-t", f"={name}"], capture_output=True, timeout=10, check=False)
    except FileNotFoundError:  # no tmux, no session
        return


def status(folder: NodeFolder) -> dict[str, Any]:
    """State, liveness and result of the node, and all that ``state.json`` says."""
    state = folder.state
    processes = [
        {**entry, "alive": procs.alive(entry["pid"], entry["start_ticks"])}
        for entry in (state or {}).get("processes", [])
    ]
    return {
        **(state or {}),
        "state": state["state"] if state else None,
        "alive": folder.supervisor() is not None,
        "heartbeat_age": round(time.time() - state["time"], 3) if state else None,
        "stop_requested": os.path.exists(folder.path("control", "stop")),
        "processes": processes,
        "result": result(folder),
        "damage": folder.damage,
    }


def result(folder: NodeFolder) -> dict[str, Any] | None:
    """``result.json``; None while there is none, or it is damaged."""
    return record_in(RESULT, folder.path("result.json"))


def main() -> int:
    parser = argparse.ArgumentParser(prog="control.py", description="Stops a node, or says how it is.")
    parser.add_argument("action", choices=["stop", "status"])
    parser.add_argument("run_dir")
    parser.add_argument("--timeout", type=float, help="seconds until force is used; default: the run's grace and some")
    parser.add_argument("--session", default="", help="tmux session to close if it is still there")
    parser.add_argument("--now", action="store_true", help="give the processes no time to end by themselves")
    parser.add_argument("--by", default="", help="who asks, as alice@laptop")
    parser.add_argument("--why", default="", help="and by what, as `gnnfleet stop`")
    options = parser.parse_args()
    folder = NodeFolder(options.run_dir)
    if options.action == "status":
        print(json.dumps(status(folder)))
        return 0
    patience = _SLACK + (0.0 if options.now else folder.grace)
    timeout = options.timeout if options.timeout is not None else patience
    request = {"by": options.by, "why": options.why, "now": options.now}
    report = stop(folder, timeout, options.session, request)
    print(json.dumps(report))
    return 0 if report["stopped"] else 1


if __name__ == "__main__":
    sys.exit(main())
