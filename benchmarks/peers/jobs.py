"""Runs servers and a client, or simulated hosts, as processes, and measures their peak memory."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

Argv = Sequence[str | Path]
GLANCE = 0.25  #: seconds between measurements of the memory


@dataclass(frozen=True)
class Job:
    """Commands of servers and of a client. The servers run until the client ends."""

    servers: Sequence[Argv]
    client: Argv
    cwd: Path
    ready: Sequence[Path] = ()  #: files that exist as soon as the servers answer requests
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Done:
    result: Mapping[str, Any]  #: JSON of the last line that the client printed
    server_memory: int  #: bytes, peak of the proportional set sizes of all servers' processes
    client_memory: int


def run_job(job: Job, network: Sequence[str], log: Path, timeout: float = 900.0) -> Done:
    """Run a job. ``network`` is a prefix for each command. Output goes to ``log``.

    Raises ``RuntimeError`` with the end of the log if the client fails or a server does not start.
    """
    with contextlib.ExitStack() as stack, log.open("w") as out:
        servers = [stack.enter_context(_process([*network, *argv], job, out)) for argv in job.servers]
        _await(job.ready, servers, timeout)
        pids = " ".join(str(server.pid) for server in servers)
        job = replace(job, env={**job.env, "BENCH_SERVERS": pids})
        client = stack.enter_context(_process([*network, *job.client], job, out, subprocess.PIPE))
        there, here = _Watch([server.pid for server in servers]), _Watch([client.pid])
        with there, here:
            stdout, _ = client.communicate(timeout=timeout)
    lines = stdout.strip().splitlines()
    if client.returncode or not lines:
        raise RuntimeError(f"{job.client}: exit {client.returncode}\n{log.read_text()[-3000:]}")
    return Done(json.loads(lines[-1]), there.peak, here.peak)


@dataclass(frozen=True)
class HostDone:
    """Output of a process that simulates a host, and peak memory of the process and its children."""

    result: Mapping[str, Any]  #: the last line of JSON that the process printed
    memory: int  #: bytes, peak of the proportional set size of the process and its children


def run_hosts(
    hosts: Sequence[Argv], cwd: Path, folder: Path, env: Mapping[str, str] | None = None, timeout: float = 900.0
) -> list[HostDone]:
    """Run the commands of all hosts at the same time. Their output goes to files in ``folder``.

    Raises ``RuntimeError`` with the end of a host's output as soon as the host fails, or after ``timeout`` seconds.
    """
    outs, errors = ([folder / f"host{k}.{kind}" for k in range(len(hosts))] for kind in ("out", "err"))
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(
                _process(argv, Job((), argv, cwd, env=env or {}), stack.enter_context(err.open("w")),
                         stack.enter_context(out.open("w")))
            )
            for argv, out, err in zip(hosts, outs, errors, strict=True)
        ]  # fmt: skip
        watches = [stack.enter_context(_Watch([process.pid])) for process in processes]
        until = time.monotonic() + timeout
        while any(process.poll() is None for process in processes) and not any(process.poll() for process in processes):
            if time.monotonic() > until:
                break
            time.sleep(0.05)
        codes = [process.poll() for process in processes]  # before the remaining processes are killed
    for code, err in zip(codes, errors, strict=True):
        if code:
            raise RuntimeError(f"{err.stem}: exit status {code}\n{err.read_text()[-3000:]}")
    return [_host_done(*each, timeout) for each in zip(processes, outs, errors, watches, strict=True)]


def _host_done(process: subprocess.Popen[str], out: Path, err: Path, watch: _Watch, timeout: float) -> HostDone:
    lines = [line for line in out.read_text().splitlines() if line.startswith("{")]  # DGL prints other lines at its end
    if process.returncode or not lines:
        ended = f"exit status {process.returncode}; the time limit was {timeout:.0f} s"
        raise RuntimeError(f"{ended}\n{err.read_text()[-3000:]}")
    return HostDone(json.loads(lines[-1]), watch.peak)


@contextlib.contextmanager
def private_loopback() -> Iterator[list[str]]:
    """Make a network namespace, and yield the command prefix that runs a command in it.

    The prefix is empty if no namespace can be made.
    """
    name = f"gnnfleet-bench-{os.getpid()}"
    if os.geteuid() or subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
        print("serving: cannot make a network namespace (not root?), so bytes include other programs of this machine")
        yield []
        return
    try:
        subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)
        yield ["ip", "netns", "exec", name]
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True)


@contextlib.contextmanager
def _process(argv: Argv, job: Job, out: Any, stdout: int | None = None) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, **job.env}
    process = subprocess.Popen(
        argv, cwd=job.cwd, env=environment, text=True, stdout=stdout or out, stderr=out, start_new_session=True
    )
    try:
        yield process
    finally:
        family = _family(process.pid)
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
        for member in family:  # children that still run
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        with contextlib.suppress(ProcessLookupError):  # processes whose parent had already ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(5)


def _await(files: Sequence[Path], servers: Sequence[subprocess.Popen[str]], timeout: float) -> None:
    until = time.monotonic() + timeout
    while not all(file.exists() for file in files):
        if time.monotonic() > until or any(server.poll() is not None for server in servers):
            raise RuntimeError(f"a server did not start: {[server.args for server in servers]}")
        time.sleep(0.05)


def _family(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    return []


class _Watch:
    """A thread that measures the peak memory of processes and all their children."""

    def __init__(self, pids: Sequence[int]):
        self._pids, self._done = pids, threading.Event()
        self.peak = 0
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._done.wait(GLANCE):
            self.peak = max(self.peak, sum(map(self._look, (member for pid in self._pids for member in _family(pid)))))

    @staticmethod
    def _look(process: psutil.Process) -> int:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            return int(process.memory_full_info().pss)
        return 0
