"""Runs one node of a run: ``supervisor.py node.json``, inside the node's tmux session.

Starts the graph server and the ranks, and ends them after a failure on any node or a stop request. Writes the files
listed in docs/ARCHITECTURE.md, "Node run folder". Exit status: 0 (done), 1 (failed, stopped) or 2 (wrong arguments).
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, NoReturn

if not __package__:  # run as a file: make the package above importable
    sys.path[0] = os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 3))

from launcher.node import leases, procs
from launcher.node.child_process import Child, Loop, outcome, signal_name
from launcher.node.diagnostics.oom import OomWatch
from launcher.node.environment import process_environment
from launcher.node.exit_description import describe
from launcher.node.peers.hub import Hub
from launcher.node.peers.member import Member
from launcher.node.peers.model import Cause, Peers, make_cause, sentence
from launcher.node.spec import NodeSpec
from launcher.node.supervisor.attempt import newest_checkpoint, parts_on_disk, read_returns
from launcher.node.supervisor.health import Health
from launcher.node.supervisor.journal import Journal, stop_request
from launcher.node.supervisor.notifier import Notifier
from launcher.node.supervisor.observer import End, Observer, Sight
from launcher.node.supervisor.outcomes import MAILBOX, Ended, Mailbox, OutcomeBook
from launcher.node.supervisor.processes import RankRunners, end_processes
from launcher.node.supervisor.prometheus import PrometheusFile
from launcher.node.supervisor.rendezvous import Restarts, connect
from launcher.node.supervisor.restart import Standing
from launcher.node.supervisor.server_keeper import ServerKeeper
from launcher.node.supervisor.tracking import Tracking
from launcher.node.supervisor.waiting import Forecast, WaitedTooLong, Waiting

_HEARTBEAT = 1.0  # seconds between two writes of state.json

_FILES = 256  # open files besides the connections to the other supervisors

_POLL = 0.2  # seconds between two checks of files and requests

_LOST_GRACE = 2.0  # seconds of grace after a lost node: its detection has used most of the 10 s in which a run must end

_LEAVING = 15.0  # seconds beyond the grace to wait for the other supervisors' end or acknowledgement

#: What tells others of the run, in the order in which they end.
OBSERVERS: tuple[type[Observer], ...] = (PrometheusFile, Notifier, Tracking)

_SIGNALS = {"SIGHUP": "its tmux session was closed", "SIGINT": "Ctrl-C was pressed in its tmux session"}


class Supervisor:
    def __init__(self, spec: NodeSpec) -> None:
        self.first = spec  # node.json
        self.returns, spec = read_returns(spec)
        self.journal = Journal(spec.run_dir, spec.node_rank)
        self.loop = Loop(signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        self.restarts = Restarts(self.first, self.loop, self.journal)
        of_node = (self.first, self.journal, self.loop, self.idle)
        self.observers = [kind(*of_node) for kind in OBSERVERS if kind.wanted(self.first)]
        self.began = time.monotonic()
        self.waiting = Waiting(spec, self.journal)
        self.waiting.over |= bool(self.returns)
        self.state, self.final = "starting", ""
        self.token = procs.node_token(spec.token, spec.node_rank)
        me = procs.look(os.getpid())
        self.start_ticks = me.start_ticks if me else 0
        self.address = f"{os.getpid()}:{self.start_ticks}"
        self._next_heartbeat = 0.0
        self.begin(spec, Peers(spec) if self.returns else connect(spec, self.loop))

    def begin(self, spec: NodeSpec, peers: Peers) -> None:
        """Create the objects of one attempt; starts no process."""
        self.spec, self.peers = spec, peers
        self.children: list[Child] = []
        self.trained: bool | None = None if spec.trainer is None else False
        self.cause: Cause | None = None  # set when the attempt was ended by this node
        self.book = OutcomeBook(self.journal, spec.node_rank, spec.ranks)
        self.mailbox = Mailbox(self.loop, self.book)
        self.health = Health(spec, self.book, self.peers, self.idle, self.server_pid)
        self.oom = OomWatch()
        self.keeper = ServerKeeper(spec, self.journal, self.loop, self.oom, self.start, self.children.remove)
        self.runners = RankRunners(spec, self.book, self.start)
        self.forecast = Forecast(spec)

    # The stages of the run, in order.

    def run(self) -> int:
        """Run all attempts of this node and write its result; return the exit status."""
        self.journal.event("supervisor-start", pid=os.getpid())
        end = self.rejoin() if self.returns else self.attempt()
        while self.restarts.rendezvous is not None:
            end = self.await_decision(end, "deciding")
            spec = self.restarts.next_attempt(self.spec, self.peers)
            if spec is None and not self.leaves() and self.restarts.visit(self.spec, self.peers):
                end = self.await_decision(end, "waiting")
                spec = self.restarts.next_attempt(self.spec, self.peers)
            if spec is None:
                break
            self.restart(spec)
            end = self.attempt()
        self.finish(end.without_restart(self.restarts.why_not))
        return 0 if end.state == "done" else 1

    def attempt(self) -> Ended:
        """Serve and train until this node is done, failed or stopped, then end all its processes."""
        spec = self.spec
        try:
            # Before the first start: the leases, and the connections to the other supervisors. A run that waits in line
            # has its ports at once, and all else together with the other nodes.
            if spec.generation == 0:
                self.take_leases()
                try:
                    self.peers.open()
                except OSError as error:
                    place = f"{spec.hub_node.bind} port {spec.hub_node.control_port} (run.control_port)"
                    why = f"it cannot listen for the other nodes at {place}: {error.strerror}"
                    raise self.failed("node", why) from error
                if not self.waiting.over:
                    self.await_turn()
                self.set_state("starting")

            for observer in self.observers:
                observer.begin(spec, self.restarts.records[-1] if spec.generation else None)

            # Start the graph server and the rank runners. A user's own command is started only once the graph server is
            # ready; ranks of the bundled trainer wait for it themselves.
            if spec.server is not None:
                self.keeper.begin()
            if spec.trainer is not None:
                self.runners.begin()
            if spec.server is not None:
                while not self.keeper.ready and (spec.trainer is None or self.runners.running()):
                    self.look()
                self.set_state("serving")

            # Train.
            if spec.trainer is not None:
                self.set_state("training")
                while self.runners.running():
                    self.look()
                self.check_ranks()
                self.trained = True

            # A node with a graph server, and the hub, go on while other nodes train, until a look raises Ended.
            if self.trained is None or (spec.has_peers and (spec.server or isinstance(self.peers, Hub))):
                self.set_state("serving")
                while True:
                    self.look()
            end = Ended("done", "")
        except Ended as ended:
            end = ended
        except Exception:  # a bug in the supervisor must still end the run's processes
            text = traceback.format_exc()
            end = Ended("failed", text, self.own_cause("node", "failure", f"its supervisor failed: {text}"))
        self.cause = end.cause
        if not self.leaves() and self.waiting.over:
            self.restarts.begin_rendezvous(self.spec, self.peers, end.cause)
        self.stop_all(end)
        return end

    def await_turn(self) -> None:
        """Wait in line for the leases of this node. Raises Ended, also at the limit."""
        try:
            self.waiting.begin()
        except leases.LeaseError as error:
            raise self.failed("node", f"it cannot wait in line: {error}") from error
        self.set_state("queued")
        while not self.waiting.over:
            self.idle()
            self.check_requests()
            self.check_order()
            try:
                if self.waiting.look(self.peers):
                    self.heartbeat()
            except WaitedTooLong as error:
                raise self.failed("node", str(error)) from None

    def rejoin(self) -> Ended:
        """End the processes of an earlier supervisor of this node, then wait for the next attempt and take part in it.

        Called if the earlier supervisor ended without a result, for instance because the host was switched off.
        """
        end = Ended("failed", "its supervisor had ended, and was started again")
        self.restarts.left = True
        try:
            self.take_leases()
        except Ended as ended:
            return ended
        end_processes([], self.book, self.token, 0.0, self.idle)
        if not self.restarts.visit(self.spec, self.peers):
            return end
        end = self.await_decision(end, "waiting")
        spec = self.restarts.next_attempt(self.spec, self.peers)
        if spec is None:
            return end
        self.restart(spec)
        return self.attempt()

    def await_decision(self, end: Ended, state: str) -> Ended:
        """Wait until a hub has decided whether the run starts again. Returns how this node ends without a new start.

        end: how this node's attempt has ended; this is returned unless a signal, a stop request or the deletion of the
        run folder interrupts the wait. state: state of this node while it waits.
        """
        stepped = self.health.stepped()
        self.set_state(state)
        checkpoint = newest_checkpoint(self.first.run_dir, self.idle)
        self.restarts.standing = Standing(checkpoint, parts_on_disk(self.first), stepped)
        self.report()
        while self.restarts.decision is None:
            self.idle(0.05)
            try:
                self.check_requests()
            except Ended as ended:
                if self.leaves() or self.restarts.guest is not None:
                    self.cause = ended.cause
                    return ended
                if self.restarts.rendezvous is not None and not self.restarts.rendezvous.stop:
                    self.restarts.rendezvous.stop, self.cause = True, ended.cause
                    self.report()
        return end

    def restart(self, spec: NodeSpec) -> None:
        """Begin the attempt that ``spec`` describes; the findings of earlier attempts are kept."""
        found = [{**finding, "stop": False} for finding in self.health.findings]
        self.mailbox.close()
        self.begin(spec, self.peers)
        self.health.findings += [*found, self.restarts.finding]
        self.set_state("starting")

    def leaves(self) -> bool:
        return bool(self.loop.signals) or not self.journal.folder_exists()

    def take_leases(self) -> None:
        """Lease this node's devices and ports; only its ports if it is to wait in line.

        Raises Ended when another run holds one of them.
        """
        spec = self.spec
        wanted = [one for one in spec.leases if self.waiting.over or one.startswith("port:")]
        try:
            me = leases.this_process(spec.run_id, spec.node_rank, spec.operator)
            taken = leases.take(wanted, me) if wanted else []
        except leases.LeaseError as error:
            return self.journal.event("no-leases", reason=str(error))
        if taken:
            # The other supervisors are told of the end, unless the control port is what another run holds: then they
            # wait for start_timeout.
            held = {one.resource for one in taken}
            if spec.has_peers and f"port:{spec.hub_node.control_port}" not in held:
                with suppress(OSError):
                    self.peers.open()
            held_by = (f"{leases.resource_label(one.resource)} is {leases.describe(one)}" for one in taken)
            raise self.failed("node", "; ".join(held_by))
        with suppress(leases.LeaseError):  # a warning only
            # Preflight warns of runs that it saw; of launches at once, the one that is later here sees the other.
            for run_id, lease in leases.sharing_cpus(wanted, spec.run_id).items():
                self.journal.event("shares-cpus", run=run_id, text=f"its CPUs are {leases.describe(lease)}")

    # Processes.

    def start(self, name: str, command: Mapping[str, Any], log_name: str = "") -> Child:
        """Start a process of this node, with a log file. Raises Ended when the process cannot be started."""
        log = self.journal.path("logs", f"{log_name or name}.log")
        try:
            env = process_environment(self.spec, command, self.address, self.keeper.limit)
            inherited = [self.mailbox.sender] if log_name == "runners" else []
            if inherited:
                env[MAILBOX] = str(inherited[0])
            child = Child(name, command["argv"], log, env=env, cwd=command.get("cwd"), inherited=inherited)
        except OSError as error:
            where = command.get("cwd") or os.getcwd()
            note = f"cannot start {command['argv'][0]} in {where}: {error.strerror}"
            self.record(name, None, returncode=127, ended=time.time(), note=note)
            raise self.failed(name, f"could not start ({command['argv'][0]} in {where}: {error.strerror})") from error
        self.children.append(child)
        self.loop.add(child)
        self.journal.event("process-start", name=name, pid=child.pid, pgid=child.pid, rank=None)
        return child

    def look(self) -> None:
        """Wait briefly, then check once for each possible reason to end this node. Raises Ended if there is one."""
        self.idle()
        self.check_requests()

        # The graph server: it is restarted, or has failed for good.
        if self.spec.server is not None:
            restarts = len(self.keeper.findings)
            trouble = self.keeper.look()
            if trouble and self.keeper.child is not None:
                trouble += self.health.server_words()
                self.fail_own("server", self.keeper.child, trouble)
            self.health.findings += self.keeper.findings[restarts:]
            state = "restarting" if self.keeper.restarting else "serving"
            if self.state in ("serving", "restarting") and self.state != state:
                self.set_state(state)
        self.check_ranks()

        self.check_order()
        if self.peers.decision is not None and self.peers.decision["generation"] > self.spec.generation:
            raise self.failed("node", "it was cut off, and the other nodes have gone on without it")

        # A finding about the health of the ranks ends the run. The hub may first ask for their stacks.
        if isinstance(self.peers, Member) and self.peers.stacks_wanted and self.health.stacks is None:
            self.health.show_stacks()
            self.report()
        finding = self.health.look()
        if finding is not None:
            name = "node" if finding["rank"] is None else f"rank{finding['rank']}"
            cause = self.own_cause(name, finding["kind"], finding["text"])
            raise Ended("failed", finding["text"], {**cause, "node_rank": finding["node_rank"]})

    def idle(self, timeout: float = _POLL) -> None:
        """Wait at most ``timeout`` seconds; meanwhile handle output, other supervisors' messages and the heartbeat."""
        self.loop.poll(timeout)
        self.peers.look()
        self.peers = self.restarts.look(self.peers)
        self.health.look_for_departed()
        if time.monotonic() >= self._next_heartbeat:
            self.heartbeat()

    def server_pid(self) -> int | None:
        child = self.keeper.child
        return child.pid if child is not None and child.running() else None

    # Reasons to end.

    def check_requests(self) -> None:
        """Raise Ended on a signal, a stop request, or a deleted run folder."""
        if self.loop.signals:
            name = signal_name(self.loop.signals[0])
            why = f"its supervisor got {name}: {_SIGNALS.get(name, 'somebody on the node stopped it')}"
            raise self.stopped(why, self.own_cause("node", "failure", why))
        request = stop_request(self.journal)
        if request is not None:
            why = f"stop requested by {request.get('by') or 'the file control/stop'}"
            if request.get("by") and request.get("why"):
                why += f" ({request['why']})"
            raise self.stopped(why, self.own_cause("node", "stop", why, request))
        if not self.journal.folder_exists():
            why = f"its run folder {self.spec.run_dir} has been deleted"
            raise Ended("failed", why, self.own_cause("node", "failure", why))

    def check_order(self) -> None:
        """Raise Ended when the hub ends the run.

        A node that itself detected the loss that ends it is "failed", unless its ranks have finished training.
        """
        order = self.peers.order
        if order is None:
            return
        if order.cause is None:
            raise Ended("done", "")
        why = sentence(order.cause, self.spec.labels)
        if str(order.cause["node_rank"]) in self.peers.lost:
            raise Ended("done" if self.trained else "failed", why)
        raise self.stopped(why, None)

    def check_ranks(self) -> None:
        """Raise Ended when a rank has failed without being stopped, or when a rank runner has failed."""
        for child in self.runners.children.values():
            child.running()  # before book.look(): the outcome file of a runner exists by the time the runner has ended
        self.book.look()
        first = self.book.first_failure()
        if first is not None:
            raise self.failed(first["name"], self.with_trouble(describe(first)), first["ended"], first["follow_up"])
        runner = self.runners.ended_badly()
        if runner is not None:
            self.fail_own(runner.name, runner, "ended though its rank had not failed")

    def stopped(self, reason: str, cause: Cause | None) -> Ended:
        needless = self.trained if self.trained is not None else self.state in ("serving", "restarting")
        return Ended("done" if needless else "stopped", reason, cause)

    def failed(self, name: str, words: str, t: float | None = None, follow_up: bool = False) -> Ended:
        """Return how this node ends after a failure.

        name: the failed process, such as ``rank3``; "node" if no single process failed. words: what happened, without
        the process's name. t: time of the failure, seconds since the epoch; None: now. follow_up: as in its outcome.
        """
        cause = self.own_cause(name, "failure", words)
        who = "" if name == "node" else f"{name.replace('rank', 'rank ')} "
        return Ended("failed", who + words, {**cause, "t": t or cause["t"], "follow_up": follow_up})

    def fail_own(self, name: str, child: Child, note: str) -> NoReturn:
        """Record the graph server or a rank runner as failed, whether it still runs or not, and raise Ended.

        note: why it counts as failed.
        """
        child.pump()
        record = self.record(name, child, note=note)
        how = describe({**record, "note": record["note"] if record["oom"] else ""})
        raise self.failed(name, self.with_trouble(f"{note}; it {how}"))

    def record(self, name: str, child: Child | None, **more: Any) -> dict[str, Any]:
        """Write and return the outcome of a failed graph server or rank runner, which may still run."""
        if child is not None and child.status[1] == "SIGKILL":
            more |= self.oom.outcome_fields(child.pid)
        record = outcome(name, self.spec.node_rank, None, child, failed=True, **more)
        record["ended"] = record["ended"] or time.time()
        self.book.record(record)
        return record

    def with_trouble(self, words: str) -> str:
        # An error of writing to the run folder often is why the process failed.
        return f"{words}; {self.journal.trouble}" if self.journal.trouble else words

    def own_cause(self, name: str, kind: str, reason: str, request: Mapping[str, Any] | None = None) -> Cause:
        return make_cause(self.spec.node_rank, name, kind, reason, time.time(), request)

    # The end.

    def stop_all(self, end: Ended) -> None:
        if end.state == "stopped" or end.reason:
            self.journal.event("stop-requested", reason=end.reason)
        self.set_state("stopping")
        done = end.state == "done"

        # The seconds between SIGTERM and SIGKILL.
        cause, grace = self.cause or self.peers.cause, self.spec.grace
        if cause is not None and cause["asked"] and cause["asked"]["now"]:
            grace = 0.0
        elif self.peers.lost or (cause is not None and cause["kind"] == "lost"):
            grace = min(grace, _LOST_GRACE)
        spared = [observer.mark for observer in self.observers if observer.mark]
        left = end_processes(self.children, self.book, self.token, grace, self.idle, done=done, spared=spared)
        if left:
            self.journal.log(f"could not kill: {', '.join(f'{p.pid} {procs.command_line(p.pid)}' for p in left)}")

        # Close the logs, and record the last outcomes of ranks and of the graph server, and how rank runners ended.
        for child in self.children:
            child.running()
            self.loop.forget(child)
        self.book.look()
        if self.keeper.child is not None and "server" not in self.book.outcomes:
            self.book.record(outcome("server", self.spec.node_rank, None, self.keeper.child))
        elif self.keeper.waiting is not None:
            self.book.record(self.keeper.waiting)
        for runner in self.runners.children.values():
            if runner.name not in self.book.outcomes:
                status, signaled = runner.status
                known = {"name": runner.name, "rank": None, "pid": runner.pid}
                self.journal.event("process-exit", **known, returncode=status, signal=signaled)

    def finish(self, end: Ended) -> None:
        if self.spec.restarts and self.leaves():
            self.restarts.leave(self.peers, self.spec.generation)
        self.final = end.state
        first = self.peers.cause or self.cause
        asked = first and first["asked"] and first["asked"]["now"]
        words = {
            "seconds": round(time.monotonic() - self.began, 1),
            "reason": sentence(first, self.spec.labels) if first and end.state != "done" else end.reason,
            "restarts": self.spec.generation,
            "findings": [f"{finding['kind']}: {finding['text']}" for finding in self.health.newest],
        }
        ending = End(end.state, first, now=bool(asked or self.leaves()), report=words)
        for observer in self.observers:
            observer.conclude(ending)

        # Wait until the hub has acknowledged this node's end; as the hub, for the end of all members.
        self.report()
        deadline = time.monotonic() + self.spec.grace + _LEAVING
        while not self.peers.may_leave() and time.monotonic() < deadline:
            self.idle(0.05)
        cause = self.peers.cause or self.cause
        ending = replace(ending, cause=cause, left=self.restarts.left)
        for observer in self.observers:
            self.take_findings(observer.ended(self.sight(), ending))
        self.journal.event("node-end", state=end.state, reason=end.reason)
        self.set_state(end.state)
        self.journal.settle(_LEAVING)
        result = {**end.result(self.spec.node_rank, cause), "outcomes": list(self.book.outcomes.values())}
        lost = {**self.restarts.lost, **self.peers.lost}
        result |= {"clock_offset": self.peers.offset, "lost": lost, "gone": self.peers.gone}
        result |= {"findings": self.health.findings, **self.restarts.state(self.spec, self.peers)}
        self.journal.put_last("result.json", result)
        self.peers.close()
        self.mailbox.close()
        self.journal.free_reserve()
        try:
            leases.release(self.spec.run_id, self.spec.node_rank)
        except leases.LeaseError as error:
            self.journal.log(f"leases could not be released: {error}")
        for observer in self.observers:
            self.take_findings(observer.close())

    # State shown to other programs.

    def set_state(self, state: str) -> None:
        self.state = state
        self.heartbeat()

    def heartbeat(self) -> None:
        self._next_heartbeat = time.monotonic() + _HEARTBEAT
        self.oom.look()
        self.forecast.look(self.health.ranks)
        sight = self.sight()
        for observer in self.observers:
            self.take_findings(observer.look(sight))
        self.journal.put_state(sight.state)
        self.report()

    def sight(self) -> Sight:
        state = {
            "state": self.state,
            "time": time.time(),
            "pid": os.getpid(),
            "start_ticks": self.start_ticks,
            "processes": self.book.running(self.children),
            "clock_offset": self.peers.offset,
            "peers": self.peers.table,
            "spare": self.peers.spare,
            "gone": self.peers.gone,
            "ranks": self.health.ranks,
            "findings": self.health.newest,
            "queue": self.waiting.state,
            **self.restarts.state(self.spec, self.peers),
        }
        return Sight(self.spec, self.peers, state, self.health.findings)

    def take_findings(self, found: list[dict[str, Any]]) -> None:
        self.health.findings += found
        for finding in found:
            self.journal.event("finding", finding=finding)

    def report(self) -> None:
        own = {"state": self.state, "trained": self.trained, "final": self.final or None, "cause": self.cause}
        signs: dict[str, Any] = {
            "ranks": self.health.ranks,
            "findings": self.health.newest,
            "stacks": self.health.stacks,
            "waits": self.health.waits,
            "own_ranks": list(self.spec.ranks),
            "place": self.waiting.place,
        }
        for observer in self.observers:
            signs |= observer.signs
        if self.spec.restarts:
            standing = self.restarts.standing and self.restarts.standing.to_json()
            signs |= {"generation": self.spec.generation, "standing": standing}
        self.peers.report({**own, **signs})


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: supervisor.py node.json", file=sys.stderr)
        return 2
    procs.adopt_orphans()
    spec = NodeSpec.read(sys.argv[1])
    procs.allow_open_files(_FILES + 2 * len(spec.nodes))
    return Supervisor(spec).run()


if __name__ == "__main__":
    sys.exit(main())
