"""Runs one node of a run: ``supervisor.py node.json``, inside the node's tmux session.

Starts the graph server and, once that is ready, the trainer; writes what docs/ARCHITECTURE.md
lists under "Node run folder"; and when anything fails, or a stop is asked for, ends every process
of the run on this node. One thread, standard library only. Exits 0 (done) or 1 (failed, stopped).
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

if not __package__:  # run as a file: make the package above importable
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from launcher.node import procs
from launcher.node.child import Child, Loop, outcome, signal_name
from launcher.node.lines import LineLog
from launcher.node.record import append_json, read_json, write_json

HEARTBEAT = 1.0  #: seconds between two state.json
_TURN = 0.2  # seconds between two looks at files
_MARGIN = 2.0  # seconds rank runners get beyond grace to write their outcomes
_LEFTOVER_GRACE = 2.0  # seconds that what escaped from the process groups gets after SIGTERM
_FOLDERS = ("logs", "outcomes", "procs", "control", "checkpoints", "output")


@dataclass(frozen=True)
class NodeSpec:
    """``node.json``."""

    run_id: str
    token: str
    node_rank: int
    num_nodes: int
    run_dir: str
    ranks: tuple[int, ...]
    server: Mapping[str, Any] | None
    trainer: Mapping[str, Any] | None
    ready_file: str
    start_timeout: float
    grace: float

    @staticmethod
    def read(path: str) -> NodeSpec:
        """Read ``node.json``; keys of later versions are let be."""
        values = read_json(path)
        if values is None:
            raise SystemExit(f"supervisor: no such file: {path}")
        known = {name: values[name] for name in NodeSpec.__dataclass_fields__}
        return NodeSpec(**{**known, "ranks": tuple(known["ranks"])})


class Failed(Exception):
    """A process of this node failed; its outcome is recorded."""


class StopRequested(Exception):
    """Somebody asked this node to stop."""


class Supervisor:
    """One node, from start to ``result.json``."""

    def __init__(self, spec: NodeSpec) -> None:
        self.spec = spec
        for folder in _FOLDERS:
            os.makedirs(self.path(folder), exist_ok=True)
        self.log = LineLog(self.path("logs", "supervisor.log"))
        self.loop = Loop(signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        self.children: list[Child] = []
        self.server: Child | None = None
        self.launcher: Child | None = None
        self.outcomes: dict[str, dict[str, Any]] = {}
        self.runners: dict[int, dict[str, Any]] = {}  # rank -> procs/rank<r>.json
        self.state = "starting"
        self.token = procs.node_token(spec.token, spec.node_rank)
        me = procs.look(os.getpid())
        self.start_ticks = me.start_ticks if me else 0
        self._next_heartbeat = 0.0

    # The run, top to bottom.

    def run(self) -> int:
        """Serve and train until done, failed or told to stop; leaves nothing running."""
        self.event("supervisor-start", pid=os.getpid())
        reason = ""
        try:
            self.serve()
            end = self.train()
        except Failed as failure:
            end, reason = "failed", str(failure)
        except StopRequested as stop:
            serving_only = self.spec.trainer is None and self.state == "serving"
            end, reason = "done" if serving_only else "stopped", str(stop)
            self.event("stop-requested", reason=reason)
        except Exception:  # a mistake of ours must still end the run's processes
            end, reason = "failed", traceback.format_exc()
        self.stop_all()
        self.finish(end, reason)
        return 0 if end == "done" else 1

    def serve(self) -> None:
        """Start the graph server, if any, and wait until its ready file is there."""
        if self.spec.server is None:
            return
        if os.path.exists(self.spec.ready_file):
            os.remove(self.spec.ready_file)
        self.server = self.start("server", self.spec.server)
        deadline = time.monotonic() + self.spec.start_timeout
        while not os.path.exists(self.spec.ready_file):
            if time.monotonic() > deadline:
                self.fail_server(
                    f"not ready after {self.spec.start_timeout:g} s (it has not written {self.spec.ready_file})"
                )
            self.turn()
        self.set_state("serving")
        self.event("server-ready", seconds=round(time.time() - self.server.started, 3))

    def train(self) -> str:
        """Run the trainer to its end; without one, serve until told to stop."""
        if self.spec.trainer is None:
            self.set_state("serving")
            while True:
                self.turn()
        self.launcher = self.start("launcher", self.spec.trainer)
        self.set_state("training")
        while self.launcher.running():
            self.turn()
        self.check_ranks()
        status, _ = self.launcher.status
        if status != 0:
            self.fail_launcher()
        return "done"

    # Processes.

    def start(self, name: str, command: Mapping[str, Any]) -> Child:
        """Start one of the node's own processes with its log."""
        log = self.path("logs", f"{name}.log")
        try:
            child = Child(name, command["argv"], log, env=self.environment(command), cwd=command.get("cwd"))
        except OSError as error:
            note = f"cannot start {command['argv'][0]} in {command.get('cwd') or os.getcwd()}: {error.strerror}"
            self.record(
                outcome(name, self.spec.node_rank, None, returncode=127, ended=time.time(), failed=True, note=note)
            )
            raise Failed(f"{name}: {note}") from error
        self.children.append(child)
        self.loop.add(child)
        self.event("process-start", name=name, pid=child.pid, pgid=child.pid, rank=None)
        return child

    def environment(self, command: Mapping[str, Any]) -> dict[str, str]:
        """Our own environment, the command's, and what rank runners and leftover hunts go by."""
        return {
            **os.environ,
            **command.get("env", {}),
            procs.TOKEN: self.token,
            "GNNFLEET_RUN_ID": self.spec.run_id,
            "GNNFLEET_RUN_DIR": self.spec.run_dir,
            "GNNFLEET_GRACE": str(self.spec.grace),
            "GNNFLEET_SUPERVISOR": f"{os.getpid()}:{self.start_ticks}",
            "NODE_RANK": str(self.spec.node_rank),
        }

    def turn(self) -> None:
        """Wait a moment; raises Failed or StopRequested when there is a reason to end."""
        self.idle()
        if self.loop.signals:
            raise StopRequested(signal_name(self.loop.signals[0]))
        if os.path.exists(self.path("control", "stop")):
            raise StopRequested("control/stop")
        if self.server is not None and not self.server.running():
            ready = os.path.exists(self.spec.ready_file)
            self.fail_server("ended while it was needed" if ready else "ended before it was ready")
        self.check_ranks()

    def idle(self, timeout: float = _TURN) -> None:
        """Wait a moment, logging output and keeping the heartbeat."""
        self.loop.turn(timeout)
        if time.monotonic() >= self._next_heartbeat:
            self.heartbeat()

    # Failures.

    def check_ranks(self) -> None:
        """Take in what the rank runners wrote; raises Failed for a rank that failed by itself."""
        for rank in self.spec.ranks:
            self.look_at(rank)
        failed = [record for record in self.outcomes.values() if record["failed"]]
        if failed:
            first = min(failed, key=lambda record: float(record["ended"]))
            raise Failed(f"{first['name']}: {describe(first)}")

    def look_at(self, rank: int) -> None:
        """Note the start and the end of one rank."""
        name = f"rank{rank}"
        if rank not in self.runners:
            started = read_json(self.path("procs", f"{name}.json"))
            if started is not None:
                self.runners[rank] = started
                self.event("process-start", name=name, pid=started["pid"], pgid=started["pgid"], rank=rank)
        if name in self.outcomes:
            return
        runner = self.runners.get(rank, {}).get("runner")
        gone = runner is not None and not procs.alive(runner["pid"], runner["start_ticks"])
        ended = read_json(self.path("outcomes", f"{name}.json"))  # after looking whether the runner is gone
        if ended is not None:
            self.take(ended)
        elif gone:
            self.record(self.lost_rank(rank))

    def lost_rank(self, rank: int) -> dict[str, Any]:
        """The outcome of a rank whose runner was killed before it could write one."""
        stopping = self.state == "stopping"
        return outcome(
            f"rank{rank}",
            self.spec.node_rank,
            rank,
            pid=self.runners[rank]["pid"],
            returncode=128 + signal.SIGKILL,
            signal="SIGKILL",
            ended=time.time(),
            failed=not stopping,
            stopped=stopping,
            note="killed together with its rank runner",
        )

    def fail_server(self, note: str) -> None:
        """Record the graph server as failed, ended or not, and raise Failed."""
        assert self.server is not None
        self.server.pump()
        record = outcome("server", self.spec.node_rank, None, self.server, failed=True, note=note)
        record["ended"] = record["ended"] or time.time()
        self.record(record)
        raise Failed(f"server: {note}; {describe(record)}")

    def fail_launcher(self) -> None:
        """Record torch.distributed.run itself as failed: it ended although no rank failed."""
        assert self.launcher is not None
        self.launcher.pump()
        note = "torch.distributed.run failed though no rank on this node did"
        record = outcome("launcher", self.spec.node_rank, None, self.launcher, failed=True, note=note)
        self.record(record)
        raise Failed(f"launcher: {note}; {describe(record)}")

    def record(self, record: dict[str, Any]) -> None:
        """Write an outcome of our own making."""
        self.put(self.path("outcomes", f"{record['name']}.json"), record)
        self.take(record)

    def take(self, record: dict[str, Any]) -> None:
        self.outcomes[record["name"]] = record
        told = {key: record[key] for key in ("name", "rank", "pid", "returncode", "signal", "stopped", "failed")}
        self.event("process-exit", **told)

    # The end.

    def stop_all(self) -> None:
        """End all processes of the run on this node: politely first, by group, then whatever is left."""
        self.set_state("stopping")
        for child in self.children:
            child.terminate()
        for runner in self.living_runners():
            procs.send(runner, signal.SIGTERM)
        self.wait_for(lambda: not self.living_runners() and not any(child.running() for child in self.children))
        stubborn = any(child.running() for child in self.children)
        grace = 0.0 if stubborn else min(self.spec.grace, _LEFTOVER_GRACE)
        left = procs.end(self.still_running, grace, lambda: self.idle(0.05))
        self.idle(0)  # takes in the last that ended; not every machine's init does
        if left:
            self.say(f"could not end: {', '.join(f'{p.pid} {procs.command_line(p.pid)}' for p in left)}")

    def living_runners(self) -> list[int]:
        runners = [started["runner"] for started in self.runners.values()]
        return [one["pid"] for one in runners if procs.alive(one["pid"], one["start_ticks"])]

    def wait_for(self, ended: Callable[[], bool]) -> None:
        """Wait for ``ended``, at most the grace and a margin."""
        deadline = time.monotonic() + self.spec.grace + _MARGIN
        while not ended() and time.monotonic() < deadline:
            self.idle(0.05)

    def still_running(self) -> list[procs.Process]:
        return procs.run_processes(self.token, os.getpid())

    def finish(self, end: str, reason: str) -> None:
        """Complete the outcomes and write ``result.json``, last of all."""
        for child in self.children:
            child.running()
            child.close()
        for rank in self.spec.ranks:
            self.look_at(rank)
        if self.server is not None and "server" not in self.outcomes:
            self.record(outcome("server", self.spec.node_rank, None, self.server))
        if self.launcher is not None and "launcher" not in self.outcomes:
            status, signaled = self.launcher.status
            self.event(
                "process-exit", name="launcher", rank=None, pid=self.launcher.pid, returncode=status, signal=signaled
            )
        self.event("node-end", state=end, reason=reason)
        self.set_state(end)
        result = {"node_rank": self.spec.node_rank, "state": end, "reason": reason}
        self.put(self.path("result.json"), {**result, "outcomes": list(self.outcomes.values())})

    # What others see.

    def set_state(self, state: str) -> None:
        self.state = state
        self.heartbeat()

    def heartbeat(self) -> None:
        """Rewrite ``state.json``."""
        self._next_heartbeat = time.monotonic() + HEARTBEAT
        running = [{**child.record(), "rank": None} for child in self.children if child.running()]
        running += [runner for rank, runner in self.runners.items() if f"rank{rank}" not in self.outcomes]
        me = {"pid": os.getpid(), "start_ticks": self.start_ticks}
        self.put(self.path("state.json"), {"state": self.state, "time": time.time(), **me, "processes": running})

    def event(self, kind: str, **more: Any) -> None:
        """Add to ``events.jsonl``, and in words to the log."""
        record = {"t": time.time(), "kind": kind, "node_rank": self.spec.node_rank, **more}
        self.put(self.path("events.jsonl"), record, append_json)
        self.say(" ".join([kind, *(f"{key}={value}" for key, value in more.items() if value not in (None, ""))]))

    def put(self, path: str, value: Any, write: Callable[[str, Any], None] = write_json) -> None:
        """Write a file of the run folder; a full disk must not keep us from ending the processes."""
        try:
            write(path, value)
        except OSError as error:
            self.say(f"cannot write {path}: {error.strerror}")

    def say(self, text: str) -> None:
        """Log, and show whoever attaches to the session."""
        self.log.feed(f"{text}\n".encode())
        try:
            print(text, flush=True)
        except OSError:  # the terminal is gone with its tmux session; the log has it
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def path(self, *names: str) -> str:
        return os.path.join(self.spec.run_dir, *names)


def describe(record: Mapping[str, Any]) -> str:
    """An outcome's end in words."""
    if record["signal"]:
        return f"ended by {record['signal']}"
    if record["returncode"] is None:
        return "was still running"
    return f"exit status {record['returncode']}"


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: supervisor.py node.json", file=sys.stderr)
        return 2
    procs.adopt_orphans()
    return Supervisor(NodeSpec.read(sys.argv[1])).run()


if __name__ == "__main__":
    sys.exit(main())
