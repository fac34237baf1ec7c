"""Recognises processes that the kernel keeps from running: stopped, waiting for memory, or blocked in a system call."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from launcher.node.exit_description import size

STOPPED = "state T: stopped by SIGSTOP or a debugger; kill -CONT continues it"

_FAULTS_PER_S = 20.0  # major page faults per second of a process that waits for memory

_MOSTLY = 0.5  # such a process computes for less than this share of the time, or has a thread in state D for more

_ALWAYS = 0.95  # share of the samples in which one thread of a blocked process is in state D

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")

_SHORTEST = 0.3  # seconds of samples that a decision needs

#: Kernel functions in which a task that has used too much memory of its cgroup is held back (memory.high) or reclaims.
_RECLAIM = ("mem_cgroup_handle_over_high", "try_to_free_mem_cgroup_pages", "try_to_free_pages", "shrink_", "reclaim_")


@dataclass(frozen=True)
class Sample:
    t: float  #: seconds, monotonic
    states: Mapping[int, str]  #: state letter of each thread, by thread id
    major_faults: int  #: page faults of the whole process, since its start, that had to read a disk
    cpu_s: float  #: CPU seconds of the whole process, since its start


def parse_stat(text: str) -> tuple[str, int, float]:
    """Return (state letter, major page faults, CPU seconds) from the content of ``/proc/<pid>/stat``. Raises
    ValueError.
    """
    fields = text.rpartition(")")[2].split()
    if len(fields) < 13:
        raise ValueError(text)
    return fields[0], int(fields[9]), (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def held_up(pid: int, samples: Sequence[Sample], in_swap: int = 0, wchans: Mapping[int, str] | None = None) -> str:
    """Return why the kernel keeps a process from running, as ``state D: …`` or ``state T: …``; '' if it does not.

    in_swap: bytes of the process in swap. wchans: kernel function in which each thread waits, by thread id; read after
    the samples.
    """
    if samples and samples[-1].states.get(pid, "") in ("T", "t"):
        return STOPPED
    if len(samples) < 3 or samples[-1].t - samples[0].t < _SHORTEST:
        return ""
    seconds = samples[-1].t - samples[0].t
    faults = (samples[-1].major_faults - samples[0].major_faults) / seconds
    idle = (samples[-1].cpu_s - samples[0].cpu_s) / seconds < _MOSTLY
    blocked = sum("D" in sample.states.values() for sample in samples) / len(samples)
    threads = {tid for sample in samples for tid, state in sample.states.items() if state == "D"}
    if faults >= _FAULTS_PER_S and (idle or blocked >= _MOSTLY):
        swap = f", {size(in_swap)} of it are in swap" if in_swap else ""
        return f"state D: waits for memory ({faults:,.0f} major page faults per second{swap})"
    shares = {tid: sum(sample.states.get(tid) == "D" for sample in samples) / len(samples) for tid in threads}
    wchans = wchans or {}
    reclaiming = [where for tid in threads if any(name in (where := wchans.get(tid, "")) for name in _RECLAIM)]
    if blocked >= _MOSTLY and reclaiming:
        return f"state D: waits for memory (held back by the memory limit of its cgroup, in {reclaiming[0]})"
    tid = max(shares, key=lambda tid: shares[tid], default=None)
    if tid is None or shares[tid] < _ALWAYS:
        return ""
    where = f" in {wchans[tid]}" if wchans.get(tid, "0") not in ("", "0") else ""
    return f"state D: is blocked{where} (a disk, a network file system or a device does not answer)"


class ProcessWatch:
    """Samples one process: call ``look`` several times, then ``held_up``."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.samples: list[Sample] = []

    def look(self, now: float) -> None:
        """Add a sample, unless the process has ended. now: ``time.monotonic()``."""
        try:
            state, faults, cpu_s = parse_stat(_text(f"/proc/{self.pid}/stat"))
            states = dict.fromkeys(map(int, os.listdir(f"/proc/{self.pid}/task")), "")
            for tid in states:
                with suppress(OSError):  # the thread has ended
                    states[tid] = parse_stat(_text(f"/proc/{self.pid}/task/{tid}/stat"))[0]
        except (OSError, ValueError):
            return
        self.samples.append(Sample(now, {**states, self.pid: state}, faults, cpu_s))

    def held_up(self) -> str:
        """Return why the kernel keeps the process from running, by the samples so far; '' if it does not."""
        blocked = {tid for sample in self.samples for tid, state in sample.states.items() if state == "D"}
        wchans = {tid: first_word(f"/proc/{self.pid}/task/{tid}/wchan") for tid in blocked}
        in_swap = 0
        with suppress(OSError):
            in_swap = swapped(_text(f"/proc/{self.pid}/status"))
        return held_up(self.pid, self.samples, in_swap, wchans)


def swapped(status: str) -> int:
    """Return the bytes in swap according to the content of ``/proc/<pid>/status``; 0 without ``VmSwap``."""
    for line in status.splitlines():
        if line.startswith("VmSwap:"):
            return int(line.split()[1]) * 1024
    return 0


def first_word(path: str) -> str:
    """Return the first word of a file of /proc; '' if it has none or cannot be read."""
    try:
        return (_text(path).split() or [""])[0]
    except OSError:
        return ""


def _text(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()
