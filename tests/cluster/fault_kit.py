"""Test kit that injects faults into runs on namespaced hosts. It checks the report, and that nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from fault_draw import EXPECTED, JOB, NODES, TRIGGERED, UNREACHABLE, Fault, draw
from launching import REPOSITORY, Launched, Running, write_config
from netns import Host, Machine, NetCluster
from netns_python import own_python, set_clock
from operator_kit import end_processes
from ssh_nodes import WORKDIR, ssh_nodes

CLEAN_WITHIN = 10.0  # seconds from the fault until no process of the run may be left
STEPS_OF_A_GOOD_RUN = 60
EPOCHS_OF_A_GOOD_RUN = 40
#: Python code that prints the leases of all living processes on a host; these leases would block the next run.
HELD = f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); from launcher.node import leases; print(*leases.held())"


@dataclass(frozen=True)
class Verdict:
    """The behaviour of a run after one fault; ``wrong`` describes each deviation from the expected behaviour."""

    fault: Fault
    reported: str  #: the first line of the report, or of the output of ``gnnfleet status``
    status: int
    clean_after: float  #: seconds from the fault until no process of the run was left
    wrong: tuple[str, ...]

    def __str__(self) -> str:
        result = "ok" if not self.wrong else "WRONG: " + "; ".join(self.wrong)
        return f"{self.fault}: exit {self.status}, clean after {self.clean_after:.1f} s, {self.reported!r}: {result}"


class FaultyCluster:
    """Four hosts; each call of ``run`` launches a job on them and injects one fault."""

    def __init__(self, cluster: NetCluster, folder: Path):
        self.cluster, self.folder = cluster, folder
        self.pythons = [own_python(host) for host in cluster.hosts]
        self.serial = 0

    @staticmethod
    def machines() -> dict[int, Machine]:
        return {k: Machine(own_memory=True) for k in range(NODES)}

    @property
    def run_id(self) -> str:
        return f"run{self.serial}"

    # --- one fault ------------------------------------------------------------------------

    def run(self, fault: Fault) -> Verdict:
        """Launch a job, inject the fault, wait for the end of the run, and check its report and what is left behind."""
        self.serial += 1
        for k, host in enumerate(self.cluster.hosts):
            set_clock(host, 300 if k == fault.clock else 0)
        if fault.kind != "disk":
            return self._run(fault)
        host = self.cluster.hosts[fault.node]
        host.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", WORKDIR])
        try:
            return self._run(fault)
        finally:
            host.run(["umount", "-l", WORKDIR])

    def _run(self, fault: Fault) -> Verdict:
        running = self._launch(fault)
        self._await_moment(fault, running)
        began = time.monotonic()
        try:
            self._inject(fault, running)
            if fault.kind in TRIGGERED:
                self._await_triggered(fault)
                began = time.monotonic()
            if fault.kind == "launcher":
                return self._after_launcher(fault, running)
            if fault.kind == "clock":
                return self._after_clock(fault, running)
            clean_after = self._clean_after(began, besides=fault.node if fault.kind in UNREACHABLE else None)
            done = None if fault.detached else running.end()
        finally:
            self._repair(fault)
        if fault.kind in UNREACHABLE:
            clean_after = max(clean_after, self._clean_after(time.monotonic()))
        found = () if done else self._wrong_in_status(fault)
        return self._judge(fault, done or self._collect(), clean_after, found)

    def _launch(self, fault: Fault) -> Running:
        folder = self.folder / self.run_id
        folder.mkdir()
        (folder / "job.py").write_text(JOB)
        nodes = ssh_nodes(self.cluster, fault.procs, self.pythons)
        data = {"folder": str(self.folder / "parts"), "options": {"num_nodes": 400, "num_features": 4}}
        epochs = EPOCHS_OF_A_GOOD_RUN if fault.kind == "clock" else 100_000
        train = {"hidden": 8, "batch_size": 64, "epochs": epochs}
        config = write_config(folder, nodes, data=data, train=train, run={"connect_timeout": 3, "lost_after": 8})
        words = ["--run-id", self.run_id, *(["--detach"] if fault.detached else [])]
        if not fault.bundled:
            words += ["--", "python", "job.py", str(STEPS_OF_A_GOOD_RUN if fault.kind == "clock" else 100_000)]
        return Running(config, *words, env=self.environment)

    @staticmethod
    def _await_moment(fault: Fault, running: Running) -> None:
        if fault.detached:
            done = running.end(120)
            assert done.status == 0, done.output
        elif fault.step < 0:
            running.await_line("ranks have started")
        else:
            running.await_line(f"epoch {fault.step}/" if fault.bundled else f"step {fault.step}")

    def _await_triggered(self, fault: Fault) -> None:
        """Wait until the job has read the file that triggers the fault.

        In a detached run this may take a while, because the user script may still be importing.
        """
        asked = self.cluster.hosts[fault.node].root_path(f"/tmp/fault-{fault.victim}")
        deadline = time.monotonic() + 60
        while asked.exists():
            assert time.monotonic() < deadline, f"{fault.victim} did not read its trigger file"
            time.sleep(0.05)

    @property
    def environment(self) -> dict[str, str]:
        return self.cluster.environment(XDG_STATE_HOME=str(self.folder / "state"))

    def _inject(self, fault: Fault, running: Running) -> None:
        host = self.cluster.hosts[fault.node]
        if fault.kind in TRIGGERED:
            if fault.kind == "memory":
                assert host.memory is not None
                host.limit_memory(host.memory.used() + (150 << 20))
            host.write(f"/tmp/fault-{fault.victim}", fault.kind)
        elif fault.kind == "kill":
            self._kill(host, "trainer train" if fault.bundled else "job.py", fault.victim)
        elif fault.kind == "server":
            self._kill(host, "trainer serve")
        elif fault.kind == "supervisor":
            self._kill(host, "node/supervisor/supervisor.py")
        elif fault.kind == "power":
            host.power_cut()
        elif fault.kind == "network":
            host.cut_network()
        elif fault.kind == "disk":
            host.run(["bash", "-c", f"cat /dev/zero > {WORKDIR}/filler"], check=False)
        elif fault.kind == "launcher":
            running.process.send_signal(signal.SIGKILL)
        elif fault.kind == "clock":
            set_clock(host, -300)

    @staticmethod
    def _kill(host: Host, words: str, rank: str = "") -> None:
        """Send SIGKILL to the Python process on ``host`` that runs ``words``; if ``rank`` is given, to the process of
        that rank."""
        mark = f"RANK={rank.removeprefix('rank')}\0"
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            for process in host.processes():
                mine = not rank or f"\0{mark}" in host.root_path(f"/proc/{process.pid}/environ").read_text()
                if mine and _is_python(process.cmdline, words):
                    host.kill(process.pid)
                    return
            time.sleep(0.05)
        raise AssertionError(f"no {words} on {host.name}: {host.processes()}")

    def _repair(self, fault: Fault) -> None:
        host = self.cluster.hosts[fault.node]
        if fault.kind == "memory":
            host.limit_memory(None)
        elif fault.kind == "power":
            host.power_on()
            host.wait_until_up()
        elif fault.kind == "network":
            host.restore_network()
        elif fault.kind == "disk":
            host.run(["rm", f"{WORKDIR}/filler"])

    # --- what must hold ---------------------------------------------------------------------

    @staticmethod
    def left(hosts: Iterable[Host]) -> list[str]:
        """Return all processes on ``hosts``, those of tmux included."""
        return [f"{host.name}: {process}" for host in hosts for process in host.processes()]

    def held(self) -> list[str]:
        """Return the leases on all hosts that would block the next run."""
        found = [(host.name, host.run([sys.executable, "-c", HELD]).stdout.strip()) for host in self.cluster.hosts]
        return [f"{name} holds {leases}" for name, leases in found if leases]

    def _clean_after(self, began: float, besides: int | None = None) -> float:
        """Wait until no process is left on the hosts except on host ``besides``, at most three times CLEAN_WITHIN;
        return the seconds since ``began``."""
        hosts = [host for k, host in enumerate(self.cluster.hosts) if k != besides]
        while self.left(hosts) and time.monotonic() - began < 3 * CLEAN_WITHIN:
            time.sleep(0.1)
        return time.monotonic() - began

    def _judge(self, fault: Fault, done: Launched, clean_after: float, found: Iterable[str]) -> Verdict:
        who, words, least = EXPECTED[fault.kind]
        head = next((line for line in done.output.splitlines() if line.startswith("The run failed:")), "(no report)")
        result = json.loads((self.folder / self.run_id / "runs" / self.run_id / "result.json").read_text())
        first = result["first_failure"] or {}
        own = [
            each["returncode"] or 1
            for node in result["nodes"]
            for each in node["outcomes"]
            if each["failed"] and not each["stopped"]
        ]
        names = {"rank": [fault.victim], "server": ["server"], "node": ["node"]}[who]
        if fault.kind == "disk":  # either rank of the node may write first
            names = [f"rank{rank}" for rank in fault.ranks]
        traces = done.output.count("Traceback") - sum("Traceback" in line for line in first.get("traceback", ()))
        checks = {
            f"named {first.get('name')} of node{first.get('node_rank')}": first.get("name") in names
            and first.get("node_rank") == fault.node,
            f"reason {first.get('reason')!r}": any(word in str(first.get("reason")) for word in words),
            f"exit status {done.status}, highest {max(own, default=0)}": done.status == max(own, default=0) >= least,
            f"not clean: {self.left(self.cluster.hosts)}": clean_after <= CLEAN_WITHIN,
            f"{traces} tracebacks of ours": fault.step < 0 or traces <= 0 or fault.kind in ("exception", "disk"),
        }
        wrong = (*found, *(what for what, right in checks.items() if not right), *self.held())
        return Verdict(fault, head, done.status, clean_after, wrong)

    def _wrong_in_status(self, fault: Fault) -> list[str]:
        """Check that ``gnnfleet status`` reports the first cause after a detached run has failed."""
        reported = self._gnnfleet("status", self.run_id)
        words = EXPECTED[fault.kind][1]
        right = reported.returncode == 1 and f"node{fault.node}" in reported.stdout.split("\n")[0]
        right = right and any(word in reported.stdout.replace("\n", " ") for word in words)
        return [] if right else [f"status {reported.returncode}: {reported.stdout + reported.stderr!r}"]

    def _collect(self) -> Launched:
        done = self._gnnfleet("collect", self.run_id)
        return Launched(done.returncode, done.stdout + done.stderr, self.folder)

    def _after_launcher(self, fault: Fault, running: Running) -> Verdict:
        """Check that a run continues after its launcher was killed: ``gnnfleet status``, called in another folder, says
        that the run trains, and ``gnnfleet stop`` ends the run."""
        running.process.wait()
        trains = self._until(lambda: self._gnnfleet("status", self.run_id), lambda done: "trains" in done.stdout)
        wrong = [] if "trains" in trains.stdout else [f"status says {trains.stdout + trains.stderr!r}"]
        began = time.monotonic()
        stopped = self._gnnfleet("stop", self.run_id)
        clean_after = self._clean_after(began)
        after = self._gnnfleet("status", self.run_id)
        if stopped.returncode or "stopped" not in after.stdout:
            wrong.append(f"stop: {stopped.stdout + stopped.stderr!r}; then {after.stdout + after.stderr!r}")
        if clean_after > CLEAN_WITHIN:
            wrong.append(f"not clean: {self.left(self.cluster.hosts)}")
        reported = trains.stdout.splitlines()[0] if trains.stdout else ""
        return Verdict(fault, reported, stopped.returncode, clean_after, (*wrong, *self.held()))

    def _after_clock(self, fault: Fault, running: Running) -> Verdict:
        """Check that a run succeeds although the clock of one host is wrong."""
        if fault.detached:
            self._until(lambda: self._gnnfleet("status", self.run_id), lambda done: "is done" in done.stdout, 60)
        done = self._collect() if fault.detached else running.end()
        left = self._clean_after(time.monotonic())
        wrong = () if done.status == 0 else (f"the run failed: {done.output[-2000:]}",)
        return Verdict(fault, "done" if not wrong else "failed", done.status, left, (*wrong, *self.held()))

    def _gnnfleet(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(REPOSITORY / "launch.py"), *words]
        environment = {"COLUMNS": "200", **self.environment}
        return subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, timeout=60)

    @staticmethod
    def _until(
        ask: Callable[[], subprocess.CompletedProcess[str]],
        good: Callable[[subprocess.CompletedProcess[str]], bool],
        seconds: float = 20,
    ) -> subprocess.CompletedProcess[str]:
        deadline = time.monotonic() + seconds
        while not good(done := ask()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return done


def _is_python(cmdline: str, words: str) -> bool:
    """Return whether the process is a Python that runs ``words`` itself. The rank runner, whose arguments include the
    command of a rank, does not count."""
    program, *arguments = cmdline.split() or [""]
    given = " ".join(arguments).removeprefix("-u ").removeprefix("-m ")
    return "python" in program and (f"{given} ".startswith(f"{words} ") or given.split(" ")[0].endswith(f"/{words}"))


def main(count: int, seed: int, folder: Path) -> int:
    """Inject ``count`` random faults; return the number of faults after which a run behaved wrongly."""
    os.makedirs(folder, exist_ok=True)
    wrong = 0
    with NetCluster(NODES, machines=FaultyCluster.machines()) as cluster:
        faulty = FaultyCluster(cluster, folder)
        for fault in draw(count, seed):
            began = time.monotonic()
            try:
                verdict = faulty.run(fault)
            except AssertionError as error:  # the fault was not injected; the others can still be tried
                verdict = Verdict(fault, "", -1, 0.0, (f"never got there: {str(error)[-500:]}",))
                end_processes(cluster)
            print(f"{time.monotonic() - began:5.1f} s  {verdict}", flush=True)
            wrong += bool(verdict.wrong)
    print(f"{count - wrong} of {count} faults named right and cleaned up")
    return wrong
