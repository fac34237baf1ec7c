"""Runs one rank: ``rank_runner.py --run-dir R [--await-server] -- argv…``, started by the supervisor.

Writes the rank's output to ``logs/rank<r>.log`` and its outcome to ``outcomes/rank<r>.json``. Ends all processes that
the rank leaves behind. A rank that ends because it was stopped is marked ``stopped``.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

if not __package__:  # run as a file: make the package above importable
    sys.path[0] = os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 3))

from launcher.node import procs
from launcher.node.child_process import Child, Loop, outcome
from launcher.node.diagnostics.oom import OomWatch
from launcher.node.json_reader import record_in
from launcher.node.json_records import ERROR
from launcher.node.supervisor.outcomes import MAILBOX, write_or_mail

_GLANCE = 0.05  # seconds between two checks for the graph server's ready file

_LONE_GRACE = 1.0  # seconds between SIGTERM and SIGKILL when the supervisor has died


class _RankRunner:
    """Runs one rank: starts its command, copies its output to a log, and writes its outcome."""

    def __init__(
        self, run_dir: str, argv: Sequence[str], environment: dict[str, str], await_server: bool = False
    ) -> None:
        """await_server: start the command once the graph server's ready file exists."""
        self.run_dir, self.argv = run_dir, argv
        self.environment = {name: value for name, value in environment.items() if name != MAILBOX}
        self.mailbox = int(environment[MAILBOX]) if MAILBOX in environment else None
        self.ready_file = environment.get("GNNFLEET_SERVER_READY", "") if await_server else ""
        self.rank = int(environment["RANK"])
        self.node_rank = int(environment.get("NODE_RANK") or environment.get("GROUP_RANK") or 0)
        self.grace = float(environment.get("GNNFLEET_GRACE") or 5.0)
        self.name = f"rank{self.rank}"
        self.loop = Loop(signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        self._kill_at: float | None = None

    def run(self) -> int:
        """Start the rank and wait until it and its descendants have ended; return the rank's exit status."""
        for folder in ("logs", "outcomes", "procs"):
            os.makedirs(os.path.join(self.run_dir, folder), exist_ok=True)
        # No timeout: the supervisor stops the rank when the graph server takes too long.
        while self.ready_file and not os.path.exists(self.ready_file):
            if self.loop.signals or _supervisor_gone(self.environment):
                return 128 + signal.SIGTERM
            self.loop.poll(_GLANCE)

        # Start the command, and wait until it has ended; kill it after the grace once it is to stop.
        oom = OomWatch()
        started = time.time()
        environment = {**self.environment, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
        environment.setdefault("NODE_RANK", str(self.node_rank))
        try:
            child = Child(self.name, self.argv, self._path("logs", "log"), env=environment)
            self.loop.add(child)
            me = procs.look(os.getpid())
            runner = {"pid": os.getpid(), "start_ticks": me.start_ticks if me else 0}
            self._write("procs", {**child.record(), "rank": self.rank, "runner": runner})
        except OSError as error:
            text = f"cannot start {self.argv[0]}: {error.strerror}"
            print(text, file=sys.stderr)
            record = outcome(self.name, self.node_rank, self.rank, returncode=127, started=started, ended=time.time())
            self._write("outcomes", {**record, "failed": True, "note": text, "tail": [text]})
            return 127
        while child.running():
            self.loop.poll(0.5)
            now = time.monotonic()
            alone = _supervisor_gone(self.environment)
            if self._kill_at is None and (self.loop.signals or alone):
                child.terminate()
                self._kill_at = now + self.grace
            if self._kill_at is not None and alone:
                self._kill_at = min(self._kill_at, now + _LONE_GRACE)
            if self._kill_at is not None and now >= self._kill_at and child.running():
                procs.send_group(child.pid, signal.SIGKILL)
            oom.look()
        child.pump()

        # Write the outcome, then end what the rank has left behind.
        status, signaled = child.status
        assert status is not None
        more: dict[str, Any] = {
            "failed": status != 0 and not child.stop_sent,
            "max_rss": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
            "note": child.log.crash.innermost if signaled else "",
        }
        own = record_in(ERROR, os.path.join(self.run_dir, "procs", f"error-{self.name}.json"))
        if own is not None and not signaled:
            more |= {"follow_up": own["follow_up"], "note": own["message"]}
        if signaled == "SIGKILL" and not child.stop_sent:
            more |= oom.outcome_fields(child.pid)
        if signaled and child.log.crash.innermost:  # without Python frames, an earlier traceback says more
            more["traceback"] = child.log.crash.lines
        self._write("outcomes", outcome(self.name, self.node_rank, self.rank, child, **more))
        procs.end(lambda: _left_of(child), self.grace, lambda: self.loop.poll(0.05))
        self.loop.poll(0)  # reaps the last orphans; not every container's init does
        child.close()
        return status

    def _write(self, folder: str, record: dict[str, Any]) -> None:
        write_or_mail(self._path(folder, "json"), record, self.mailbox)

    def _path(self, folder: str, suffix: str) -> str:
        return os.path.join(self.run_dir, folder, f"{self.name}.{suffix}")


def _left_of(child: Child) -> list[procs.Process]:
    # Members of its process group, and orphans adopted by this process.
    running = procs.table()
    found = [process for process in running if process.pgid == child.pid] + procs.descendants(os.getpid(), running)
    return list({process.pid: process for process in found}.values())


def _supervisor_gone(environment: dict[str, str]) -> bool:
    pid, _, start_ticks = environment.get("GNNFLEET_SUPERVISOR", "").partition(":")
    return bool(pid) and not procs.alive(int(pid), int(start_ticks))


def main() -> int:
    parser = argparse.ArgumentParser(prog="rank_runner.py", description="Runs one rank of a run.")
    parser.add_argument("--run-dir", required=True, help="the node's run folder")
    parser.add_argument("--await-server", action="store_true", help="start the command once the graph server is ready")
    parser.add_argument("argv", nargs=argparse.REMAINDER, help="-- and the rank's command")
    options = parser.parse_args()
    argv = options.argv[1:] if options.argv[:1] == ["--"] else options.argv
    if not argv:
        parser.error("give the rank's command after --")
    procs.die_with_parent(signal.SIGTERM)
    procs.adopt_orphans()
    return _RankRunner(os.path.abspath(options.run_dir), argv, dict(os.environ), options.await_server).run()


if __name__ == "__main__":
    sys.exit(main())
