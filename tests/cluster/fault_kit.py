"""Injects one fault into a run of the soak, the random test of ``make soak``, and repairs the hosts afterwards."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from launching import Running, json_lines
from netns import Host, NetCluster
from netns_python import own_python, set_clock
from scenario import LAUNCHES, SHELLS, TRIGGERED, UNREACHABLE, Scenario
from soak_config import cluster_file, job_words
from soak_job import JOB
from ssh_nodes import WORKDIR
from waiting import DEADLINE

SPARE_MEMORY = 150 << 20  # bytes that a node may still use after fault "memory"


class NotInjected(AssertionError):
    pass


@dataclass
class FaultyRun:
    cluster: NetCluster
    folder: Path
    scenario: Scenario
    pythons: list[str]
    parts: Path
    environment: dict[str, str]
    injected: float = field(default=0.0, init=False)  #: monotonic time

    @property
    def run_id(self) -> str:
        return self.folder.name

    @property
    def run_dir(self) -> Path:
        return self.folder / "runs" / self.run_id

    @property
    def host(self) -> Host:
        return self.cluster.hosts[self.scenario.fault.node]

    def prepare(self) -> None:
        for k, host in enumerate(self.cluster.hosts):
            set_clock(host, 300 if k == self.scenario.clock else 0)
            host.write("~/.bashrc", SHELLS[self.scenario.shell])
        if self.scenario.fault.kind == "disk":
            self.host.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", WORKDIR])

    def launch(self, more: str = "") -> Running:
        """Launch the run, or another one with ``more`` after its run id."""
        self.folder.mkdir(exist_ok=True)
        (self.folder / "job.py").write_text(JOB)
        epochs = {"epochs": 2} if self.scenario.fault.kind in LAUNCHES else {}
        config = cluster_file(self.folder, self.cluster, self.scenario, self.pythons, self.parts, **epochs)
        words = ["--run-id", self.run_id + more, *(["--detach"] if self.scenario.detached else [])]
        return Running(config, *words, *job_words(self.scenario, **epochs), env=self.environment)

    def await_moment(self, running: Running) -> None:
        if self.scenario.detached:
            done = running.end()
            if done.status:
                raise NotInjected(done.output)
        else:
            running.await_event("stage", stage="train")
        self.await_epoch(self.scenario.fault.epoch)

    def await_epoch(self, epoch: int, seconds: float = DEADLINE) -> None:
        deadline = time.monotonic() + seconds
        while epoch and self.epoch() < epoch:
            if time.monotonic() > deadline:
                raise NotInjected(f"{self.run_id} has reached only epoch {self.epoch()}, not {epoch}")
            time.sleep(0.1)

    def epoch(self) -> int:
        # a restart may move rank 0 to another host
        found = 0
        for k, host in enumerate(self.cluster.hosts):
            path = host.root_path(f"{WORKDIR}/runs/{self.run_id}/node{k}/metrics-rank0.jsonl")
            found = max([found, *(line["epoch"] for line in json_lines(path)[-20:] if "epoch" in line)])
        return found

    # --- faults -------------------------------------------------------------------------------

    def inject(self, running: Running) -> None:
        kind, host = self.scenario.fault.kind, self.host
        self.injected = time.monotonic()
        if kind in TRIGGERED:
            self._trigger(kind)
        elif kind in ("kill", "stop"):
            self._signal_rank(signal.SIGSTOP if kind == "stop" else signal.SIGKILL)
        elif kind == "server":
            self._signal("trainer serve")
        elif kind == "supervisor":
            self._signal("node/supervisor/supervisor.py")
        elif kind == "power":
            host.power_cut()
        elif kind in ("network", "blip", "returns"):
            host.cut_network()
        elif kind == "disk":
            host.run(["bash", "-c", f"cat /dev/zero > {WORKDIR}/filler"], check=False)
        elif kind == "ssh":
            self._cut_sessions()
        elif kind == "launcher":
            running.process.send_signal(signal.SIGKILL)
            running.process.wait()
        elif kind == "clock":
            set_clock(host, -300)
        elif kind == "damaged":
            self._flip_byte()

    def _flip_byte(self) -> None:
        nodes = json.loads((self.run_dir / "run.json").read_text())["plan"]["nodes"]
        node = nodes[self.scenario.fault.node]
        files = sorted(self.host.root_path(node["data_dir"]).glob(f"part{node['parts'][0]}/nodes/*/attrs/x.npy"))
        before = files[0].stat()
        with files[0].open("r+b") as file:
            file.seek(before.st_size - 1)
            last = file.read(1)[0]
            file.seek(before.st_size - 1)
            file.write(bytes([last ^ 1]))
        os.utime(files[0], ns=(before.st_atime_ns, before.st_mtime_ns))

    def _trigger(self, kind: str) -> None:
        if kind == "memory":
            assert self.host.memory is not None
            self.host.limit_memory(self.host.memory.used() + SPARE_MEMORY)
        path = f"/tmp/fault-rank{self.scenario.victim}"
        self.host.write(path, kind)
        deadline = time.monotonic() + DEADLINE
        while self.host.root_path(path).exists():
            if time.monotonic() > deadline:
                raise NotInjected(f"rank {self.scenario.victim} did not read its trigger file")
            time.sleep(0.05)
        self.injected = time.monotonic()

    def _signal_rank(self, signum: int) -> None:
        self._signal("job.py" if self.scenario.own else "trainer train", self.scenario.victim, signum)

    def _signal(self, words: str, rank: int | None = None, signum: int = signal.SIGKILL) -> None:
        """Send signal ``signum`` to the Python process that was started with the arguments ``words``.

        If ``rank`` is given, the process must also be that of this rank. Waits for the process to start.
        """
        deadline = time.monotonic() + DEADLINE
        while time.monotonic() < deadline:
            for process in self.host.processes():
                try:
                    variables = self.host.root_path(f"/proc/{process.pid}/environ").read_text().split("\0")
                except OSError:  # it has ended
                    continue
                if (rank is None or f"RANK={rank}" in variables) and _is_python(process.cmdline, words):
                    self.injected = time.monotonic()
                    self.host.kill(process.pid, signum)
                    return
            time.sleep(0.05)
        raise NotInjected(f"no process `{words}` on {self.host.name}, only {self.host.processes()}")

    def _cut_sessions(self) -> None:
        sessions = self.host.ssh_sessions()
        for each in sessions:
            self.host.run(["kill", "-9", str(each.pid)], check=False)
        if not sessions:
            raise NotInjected(f"no SSH connection to {self.host.name}")

    def repair(self) -> None:
        kind = self.scenario.fault.kind
        if kind == "memory":
            self.host.limit_memory(None)
        elif kind == "power":
            if self.host.init_pid == 0:
                self.host.power_on()
                self.host.wait_until_up()
        elif kind in ("network", "blip", "returns"):
            time.sleep(max(0.0, self.injected + self.scenario.fault.seconds - time.monotonic()))
            self.host.restore_network()
        elif kind == "disk":
            self.host.run(["rm", "-f", f"{WORKDIR}/filler"])

    def undo(self) -> None:
        if self.scenario.fault.kind == "disk":
            self.host.run(["umount", "-l", WORKDIR], check=False)
        for host in self.cluster.hosts:
            set_clock(host, 0)

    @property
    def unreachable(self) -> int | None:
        """Return the node that cannot be reached between the fault and the repair, or None."""
        return self.scenario.fault.node if self.scenario.fault.kind in UNREACHABLE else None


def pythons_of(cluster: NetCluster) -> list[str]:
    return [own_python(host) for host in cluster.hosts]


def _is_python(cmdline: str, words: str) -> bool:
    # a rank runner only has the command of its rank among its arguments
    program, *arguments = cmdline.split() or [""]
    given = re.sub(r"^(-[a-ln-zA-Z] )*(-m )?", "", " ".join(arguments))  # options of Python; only -m has a value
    return "python" in program and (f"{given} ".startswith(f"{words} ") or given.split(" ")[0].endswith(f"/{words}"))
