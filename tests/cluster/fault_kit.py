"""Faults on namespaced hosts: what is injected into a run, and what must be said and left afterwards."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from launching import REPOSITORY, Launched, Running, write_config
from netns import Host, Machine, NetCluster
from netns_python import own_python, set_clock

SMALL = "/mnt/small"  # the work folder of a host whose disk is going to be full
CLEAN_WITHIN = 10.0  # seconds from the fault until nothing of the run is left
STEPS_OF_A_GOOD_RUN = 60

#: All ranks meet in every step, as in data-parallel training; a file asks a rank to go wrong.
JOB = """
import ctypes, json, os, sys, time, torch, torch.distributed as dist
rank, steps, folder = int(os.environ["RANK"]), int(sys.argv[1]), os.environ["GNNFLEET_RUN_DIR"]
dist.init_process_group("gloo")
kept, metrics = [], open(f"{folder}/metrics-rank{rank}.jsonl", "a")
for step in range(steps):
    dist.all_reduce(torch.ones(1000))
    line = {"t": time.time(), "kind": "step", "rank": rank, "epoch": 1, "step": step, "steps": steps, "loss": 1.0}
    line |= {"seeds": 10, "seeds_per_s": 200.0, "wait_s": 0.0}
    print(json.dumps(line), file=metrics, flush=True)
    print("step", step, flush=True)
    fault = f"/tmp/fault-rank{rank}"
    if os.path.exists(fault):
        kind = open(fault).read()
        os.remove(fault)
        if kind == "exception":
            raise ValueError("no such column: age")
        if kind == "exit":
            sys.stdout.flush()
            os._exit(3)
        if kind == "segfault":
            ctypes.string_at(0)
        while kind == "memory":
            kept.append(bytearray(os.urandom(1 << 20)) * 32)
    time.sleep(0.05)
dist.barrier()
"""


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong on one host, once the job has done ``step`` steps (-1: as soon as ranks start)."""

    kind: str
    node: int
    step: int
    clock: int | None = None  #: a host whose clock is five minutes off meanwhile

    def __str__(self) -> str:
        moment = "at start" if self.step < 0 else f"step {self.step}"
        clock = "" if self.clock is None else f", clock of node{self.clock} off"
        return f"{self.kind} on node{self.node}, {moment}{clock}"


#: What the report must name: a rank or the node as a whole, the words of the reason, and the least exit status.
EXPECTED: dict[str, tuple[str, tuple[str, ...], int]] = {
    "kill": ("rank", ("was killed by signal 9 (SIGKILL)",), 137),
    "exception": ("rank", ("raised ValueError: no such column: age",), 1),
    "exit": ("rank", ("ended with exit status 3",), 3),
    "segfault": ("rank", ("crashed: segmentation fault (SIGSEGV)",), 139),
    "memory": ("rank", ("ran out of memory (killed by the kernel",), 137),
    "power": ("node", ("no sign of life",), 1),
    "network": ("node", ("no sign of life", "no contact"), 1),
    "supervisor": ("node", ("supervisor",), 1),
    "disk": ("rank", ("No space left on device",), 1),
}
KINDS = (*EXPECTED, "launcher", "clock")
ASKED = ("exception", "exit", "segfault", "memory")  # of the job, by a file


def draw(count: int, seed: int, nodes: int = 4) -> list[Fault]:
    """``count`` faults at random: every kind comes before any kind comes again."""
    chance = random.Random(seed)
    faults: list[Fault] = []
    while len(faults) < count:
        for kind in chance.sample(KINDS, len(KINDS)):
            early = -1 if kind not in ASKED and kind != "disk" and chance.random() < 0.2 else chance.choice([2, 8, 25])
            clock = chance.randrange(nodes) if chance.random() < 0.3 else None
            faults.append(Fault(kind, chance.randrange(nodes), early, clock))
    return faults[:count]


@dataclass(frozen=True)
class Verdict:
    """What came of one fault."""

    fault: Fault
    said: str  #: the report's first line, or what status said
    status: int
    clean_after: float  #: seconds
    wrong: tuple[str, ...]

    def __str__(self) -> str:
        result = "ok" if not self.wrong else "WRONG: " + "; ".join(self.wrong)
        return f"{self.fault}: exit {self.status}, clean after {self.clean_after:.1f} s, {self.said!r}: {result}"


class FaultyCluster:
    """Four hosts, one after another of whose runs goes wrong."""

    def __init__(self, cluster: NetCluster, folder: Path):
        self.cluster, self.folder = cluster, folder
        self.pythons = [own_python(host) for host in cluster.hosts]
        self.serial = 0

    @staticmethod
    def machines(count: int = 4) -> dict[int, Machine]:
        return {k: Machine(own_memory=True) for k in range(count)}

    # --- one fault ------------------------------------------------------------------------

    def run(self, fault: Fault) -> Verdict:
        """Launch, inject, wait for the end, look at everything."""
        self.serial += 1
        for k, host in enumerate(self.cluster.hosts):
            set_clock(host, 300 if k == fault.clock else 0)
        running = self._launch(fault, STEPS_OF_A_GOOD_RUN if fault.kind == "clock" else 100_000)
        running.await_line("ranks have started" if fault.step < 0 else f"step {fault.step}")
        began = time.monotonic()
        try:
            self._inject(fault, running)
            if fault.kind == "launcher":
                return self._after_launcher(fault, running)
            if fault.kind == "clock":
                return self._after_clock(fault, running)
            clean_after = self._clean_after(began, besides=fault.node if fault.kind in ("power", "network") else None)
            done = running.end()
        finally:
            self._repair(fault)
        clean_after = max(clean_after, self._back_after(fault))
        return self._judge(fault, done, clean_after)

    def _launch(self, fault: Fault, steps: int) -> Running:
        folder = self.folder / f"run{self.serial}"
        folder.mkdir()
        (folder / "job.py").write_text(JOB)
        nodes = [
            {"host": host.address, "user": "root", "python": python, "env": {"NUMBA_CACHE_DIR": f"{host.home}/.numba"}}
            for host, python in zip(self.cluster.hosts, self.pythons, strict=True)
        ]
        if fault.kind == "disk":
            script = f"mkdir -p {SMALL} && mount -t tmpfs -o size=16m tmpfs {SMALL}"
            self.cluster.hosts[fault.node].run(["bash", "-c", script])
            nodes[fault.node]["workdir"] = f"{SMALL}/work"
        data = {"folder": str(self.folder / "parts"), "options": {"num_nodes": 400, "num_features": 4}}
        config = write_config(folder, nodes, data=data, run={"connect_timeout": 3, "lost_after": 20})
        words = ("--run-id", f"run{self.serial}", "--", "python", "job.py", str(steps))
        return Running(config, *words, env=self.environment)

    @property
    def environment(self) -> dict[str, str]:
        return self.cluster.environment(XDG_STATE_HOME=str(self.folder / "state"))

    def _inject(self, fault: Fault, running: Running) -> None:
        host = self.cluster.hosts[fault.node]
        if fault.kind in ASKED:
            if fault.kind == "memory":
                assert host.memory is not None
                host.limit_memory(host.memory.used() + (150 << 20))
            host.write(f"/tmp/fault-rank{fault.node}", fault.kind)
        elif fault.kind == "kill":
            self._kill(host, "job.py")
        elif fault.kind == "supervisor":
            self._kill(host, "node/supervisor.py")
        elif fault.kind == "power":
            host.power_cut()
        elif fault.kind == "network":
            host.cut_network()
        elif fault.kind == "disk":
            host.run(["bash", "-c", f"cat /dev/zero > {SMALL}/filler"], check=False)
        elif fault.kind == "launcher":
            running.process.send_signal(signal.SIGKILL)
        elif fault.kind == "clock":
            set_clock(host, -300)

    def _kill(self, host: Host, word: str) -> None:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            found = [each for each in host.processes() if each.cmdline.split()[1:2] and self._is(each.cmdline, word)]
            if found:
                host.kill(found[0].pid)
                return
            time.sleep(0.05)
        raise AssertionError(f"no {word} on {host.name}: {host.processes()}")

    @staticmethod
    def _is(cmdline: str, word: str) -> bool:
        return cmdline.split()[1].endswith(word) and "python" in cmdline.split()[0]

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
            host.run(["umount", SMALL])

    # --- what must hold ---------------------------------------------------------------------

    def left(self, hosts: Iterable[Host]) -> list[str]:
        """Processes of any kind (tmux included) and leases."""
        found = []
        for host in hosts:
            found += [f"{host.name}: {process}" for process in host.processes()]
            leases = host.root_path("/tmp/gnnfleet-leases").glob("*.json")
            found += [f"{host.name}: lease {lease.name}" for lease in leases]
        return found

    def _clean_after(self, began: float, besides: int | None = None) -> float:
        """Seconds since ``began`` until nothing is left, at most three times what is allowed."""
        hosts = [host for k, host in enumerate(self.cluster.hosts) if k != besides]
        while self.left(hosts) and time.monotonic() - began < 3 * CLEAN_WITHIN:
            time.sleep(0.1)
        return time.monotonic() - began

    def _back_after(self, fault: Fault) -> float:
        """The same of a host that was away, from the moment it is back."""
        return self._clean_after(time.monotonic()) if fault.kind in ("power", "network") else 0.0

    def _judge(self, fault: Fault, done: Launched, clean_after: float) -> Verdict:
        who, words, least = EXPECTED[fault.kind]
        head = next((line for line in done.output.splitlines() if line.startswith("The run failed:")), "(no report)")
        result = json.loads((done.folder / "runs" / f"run{self.serial}" / "result.json").read_text())
        first = result["first_failure"] or {}
        outcomes = [outcome for node in result["nodes"] for outcome in node["outcomes"]]
        own = [each["returncode"] or 1 for each in outcomes if each["failed"] and not each["stopped"]]
        name = f"rank{fault.node}" if who == "rank" else "node"
        checks = {
            f"named {first.get('name')} of node{first.get('node_rank')}": (first.get("name"), first.get("node_rank"))
            == (name, fault.node),
            f"reason {first.get('reason')!r}": any(word in str(first.get("reason")) for word in words),
            f"exit status {done.status}, highest {max(own, default=0)}": done.status == max(own, default=0) >= least,
            f"not clean: {self.left(self.cluster.hosts)}": clean_after <= CLEAN_WITHIN,
            "traceback of ours": "Traceback" not in done.output or fault.kind in ("exception", "disk"),
        }
        wrong = tuple(what for what, right in checks.items() if not right)
        return Verdict(fault, head, done.status, clean_after, wrong)

    def _after_launcher(self, fault: Fault, running: Running) -> Verdict:
        """The run goes on; ``status`` tells the truth from elsewhere, ``stop`` ends it."""
        running.process.wait()
        run_id = f"run{self.serial}"
        trains = self._until(lambda: self._gnnfleet("status", run_id), lambda done: "trains" in done.stdout)
        wrong = [] if "trains" in trains.stdout else [f"status says {trains.stdout + trains.stderr!r}"]
        began = time.monotonic()
        stopped = self._gnnfleet("stop", run_id)
        clean_after = self._clean_after(began)
        after = self._gnnfleet("status", run_id)
        if stopped.returncode or "stopped" not in after.stdout:
            wrong.append(f"stop: {stopped.stdout + stopped.stderr!r}; then {after.stdout + after.stderr!r}")
        if clean_after > CLEAN_WITHIN:
            wrong.append(f"not clean: {self.left(self.cluster.hosts)}")
        return Verdict(fault, trains.stdout.splitlines()[0] if trains.stdout else "", 0, clean_after, tuple(wrong))

    def _after_clock(self, fault: Fault, running: Running) -> Verdict:
        """A clock that is off does no harm."""
        done = running.end()
        left = self._clean_after(time.monotonic())
        wrong = () if done.status == 0 else (f"the run failed: {done.output[-2000:]}",)
        return Verdict(fault, "done" if not wrong else "failed", done.status, left, wrong)

    def _gnnfleet(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(REPOSITORY / "launch.py"), *words]
        environment = {"COLUMNS": "200", **self.environment}
        return subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, timeout=60)

    @staticmethod
    def _until(
        ask: Callable[[], subprocess.CompletedProcess[str]], good: Callable[[subprocess.CompletedProcess[str]], bool]
    ) -> subprocess.CompletedProcess[str]:
        deadline = time.monotonic() + 20
        while not good(done := ask()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return done


def write_log(verdict: Verdict, seconds: float) -> None:
    print(f"{seconds:5.1f} s  {verdict}", flush=True)


def main(count: int, seed: int, folder: Path) -> int:
    """Draw and inject; returns how many went wrong."""
    os.makedirs(folder, exist_ok=True)
    wrong = 0
    with NetCluster(4, machines=FaultyCluster.machines()) as cluster:
        faulty = FaultyCluster(cluster, folder)
        for fault in draw(count, seed):
            began = time.monotonic()
            verdict = faulty.run(fault)
            write_log(verdict, time.monotonic() - began)
            wrong += bool(verdict.wrong)
    print(f"{count - wrong} of {count} faults named right and cleaned up")
    return wrong
