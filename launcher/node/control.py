"""Stops a node of a run, or reports its state: ``control.py stop|status RUN_DIR``. Prints one JSON object.

``stop`` asks the supervisor to end the run on this node. If the supervisor is dead or takes too long, ``stop`` ends the
remaining processes itself.

Exit status: 0 when no process of the run is left on this node, else 1.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

if not __package__:  # run as a file: make the package above importable
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from launcher.node import leases, procs
from launcher.node.json_reader import read_json, record_in
from launcher.node.json_records import RESULT, STATE
from launcher.node.record import write_json

_POLL = 0.1  # seconds

_GRACE = 5.0  # seconds between SIGTERM and SIGKILL if node.json, which has the configured grace, is damaged

_SLACK = 6.0  # seconds that a supervisor may need beyond its grace to end leftover processes and write its files

_FINISHING = 12.0  # seconds beyond the timeout that a supervisor without processes may wait for trackers and messages

_FRESH = 3.0  # seconds since the last heartbeat of a supervisor that works


class NodeFolder:
    """The run folder of a node. Raises SystemExit if the folder has no node.json."""

    def __init__(self, run_dir: str) -> None:
        self.run_dir = os.path.abspath(run_dir)
        self.damage = ""  #: why node.json cannot be used; '' when it can
        self.grace = _GRACE
        self.lease_key: tuple[str, int] | None = None
        self.mark = f"GNNFLEET_RUN_DIR={self.run_dir}"  #: entry in the environment of the run's processes
        try:
            spec = read_json(self.path("node.json"))
            if spec is None and not os.path.exists(self.path("node.json")):
                raise SystemExit(f"control: no run in {self.run_dir} (it has no node.json)")
            self.mark = f"{procs.TOKEN}={procs.node_token(spec['token'], spec['node_rank'])}"
            self.grace = float(spec["grace"])
            self.lease_key = str(spec["run_id"]), int(spec["node_rank"])
        except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
            self.damage = f"{self.path('node.json')} is damaged ({error!r}); processes are found by the run folder"

    def path(self, *names: str) -> str:
        return os.path.join(self.run_dir, *names)

    @property
    def state(self) -> dict[str, Any] | None:
        return record_in(STATE, self.path("state.json"))

    def supervisor(self) -> int | None:
        """Pid of the supervisor; None when it is not running."""
        state = self.state
        return state["pid"] if state and _alive(state) else None

    def recorded(self) -> list[procs.Process]:
        """Return the running processes in the process groups that are listed in ``state.json``."""
        entries = (self.state or {}).get("processes", [])
        groups = {entry["pgid"] for entry in entries if procs.alive(entry["pid"], entry["start_ticks"])}
        return [process for process in procs.table() if process.pgid in groups]

    def running(self) -> list[procs.Process]:
        """Return all running processes of the run on this node, including the supervisor."""
        root = self.supervisor()
        found = procs.run_processes(self.mark, root) + self.recorded()
        process = procs.look(root) if root else None
        return list({one.pid: one for one in [*found, *([process] if process else [])]}.values())


def _alive(state: dict[str, Any]) -> bool:
    return procs.alive(state["pid"], state["start_ticks"])


def stop(folder: NodeFolder, timeout: float, session: str, request: dict[str, Any]) -> dict[str, Any]:
    """Stop the node's processes of the run; after about ``timeout`` seconds, kill them with SIGKILL.

    A supervisor that has ended its processes gets some seconds more to write its result.

    session: tmux session to close, or ''. request: content of ``control/stop``. Returns {"stopped": whether no process
    is left, "was": state before, "killed", "leftovers": [{"pid", "command"}], "notes": [text]}.
    """
    state = folder.state
    alive = state is not None and _alive(state)
    before = result(folder)  # read after the supervisor's liveness
    if before is not None:
        was = str(before["state"])
    elif state is None:
        was = "not started"
    else:
        was = str(state["state"]) if alive else "lost"
    # Write ``control/stop``, without content if the disk is full. If that fails, send SIGTERM to the supervisor.
    path = folder.path("control", "stop")
    try:
        os.makedirs(folder.path("control"), exist_ok=True)
        try:
            write_json(path, request)
        except OSError:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK, 0o644))
    except OSError:
        supervisor = folder.supervisor()
        if supervisor is not None:
            procs.send(supervisor, signal.SIGTERM)
    deadline = time.monotonic() + timeout
    latest = deadline + (0.0 if request["now"] else _FINISHING)
    while state and _alive(state) and time.monotonic() < deadline:
        # state.json has the states of all nodes of the run: it is read again only at the end of this supervisor's time
        while _alive(state) and time.monotonic() < deadline:
            time.sleep(_POLL)
        state = folder.state
        works = state is not None and not state["processes"] and time.time() - state["time"] < _FRESH
        if works and result(folder) is None:
            deadline = min(time.monotonic() + 1.0, latest)
    killed = describe(folder.running())
    supervisor = folder.supervisor()
    if supervisor is not None:  # killed first, so that it does not report the end of its children as a failure
        procs.send(supervisor, signal.SIGKILL)
    left = procs.end(folder.running, 0.0 if request["now"] or not killed else min(folder.grace, 1.0))
    if session:
        with suppress(FileNotFoundError, subprocess.TimeoutExpired):  # tmux is not installed, or hangs
            command = ["tmux", "kill-session", "-t", f"={session}"]
            subprocess.run(command, capture_output=True, timeout=10, check=False)
    notes = [folder.damage] if folder.damage else []
    if not left and folder.lease_key is not None:
        try:
            leases.release(*folder.lease_key)
        except leases.LeaseError as error:
            notes.append(f"leases could not be released: {error}")
    ended = {"killed": killed, "leftovers": describe(left)}
    return {"stopped": not left, "was": was, **ended, "notes": notes}


def describe(processes: list[procs.Process]) -> list[dict[str, Any]]:
    """Return [{"pid", "command"}] of the processes."""
    return [{"pid": process.pid, "command": procs.command_line(process.pid)} for process in processes]


def status(folder: NodeFolder) -> dict[str, Any]:
    """Return the content of ``state.json``, whether the supervisor is alive, whether a stop was requested, and the
    content of ``result.json``.
    """
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
    """Return the content of ``result.json``; None if the file is missing or damaged."""
    return record_in(RESULT, folder.path("result.json"))


def main() -> int:
    parser = argparse.ArgumentParser(prog="control.py", description="Stops a node of a run, or reports its state.")
    parser.add_argument("action", choices=["stop", "status"])
    parser.add_argument("run_dir", help="the node's run folder")
    parser.add_argument("--timeout", type=float, help=f"seconds until SIGKILL; default: the run's grace + {_SLACK:g}")
    parser.add_argument("--session", default="", help="tmux session to close")
    parser.add_argument("--now", action="store_true", help="end the processes without a grace period")
    parser.add_argument("--by", default="", help="user who requests the stop, as alice@laptop")
    parser.add_argument("--why", default="", help="command that requests the stop, as `gnnfleet stop`")
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
