"""Calls Slurm's commands: submits a job, asks for its state, cancels and requeues it."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import FleetError

_TIMEOUT = 60.0  # seconds one command may take; a busy slurmctld answers slowly

_ENDED = {
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "TIMEOUT",
}


@dataclass(frozen=True)
class JobStatus:
    """The state of a job, as ``scontrol show job`` reports it."""

    job: str
    state: (
        str  #: such as PENDING, RUNNING or COMPLETED; UNKNOWN if Slurm has forgotten the job, as it does after a time
    )
    reason: str = ""  #: why a job waits, such as Priority or Resources; '' if there is none
    nodes: str = ""  #: node list of a running job
    start: str = ""  #: expected start of a waiting job, local time; '' if unknown
    restarts: int = 0  #: how many times the job was requeued
    may_requeue: bool = False  #: whether Slurm puts the job back into the queue after the failure of a node

    @property
    def ended(self) -> bool:
        """Whether the job has ended and will not run again."""
        return self.state in _ENDED or self.state == "UNKNOWN"

    @property
    def running(self) -> bool:
        return self.state == "RUNNING"


def submit(script: Path) -> str:
    """Submit a batch script; returns the id of the job. Raises FleetError with the message of sbatch."""
    return _call("sbatch", "--parsable", str(script)).strip().partition(";")[0]


def job_status(job: str) -> JobStatus:
    """Return the state of a job. Raises FleetError if Slurm does not answer."""
    try:
        shown = _call("scontrol", "show", "job", job, "--oneliner")
    except FleetError as error:
        if "Invalid job id" in str(error):
            return JobStatus(job, "UNKNOWN")
        raise
    fields = dict(re.findall(r"(\w+)=(\S*)", shown))
    known = {name: "" if text in ("None", "(null)", "Unknown", "N/A") else text for name, text in fields.items()}
    state = known.get("JobState", "UNKNOWN")
    restarts = known.get("Restarts", "")
    return JobStatus(
        job,
        state,
        known.get("Reason", ""),
        known.get("NodeList", ""),
        known.get("StartTime", "").replace("T", " "),
        int(restarts) if restarts.isdecimal() else 0,
        known.get("Requeue") == "1",
    )


def cancel(job: str) -> None:
    """Cancel a job. Raises FleetError."""
    _call("scancel", job)


def requeue(job: str) -> None:
    """End a job and put it back into its queue. Raises FleetError."""
    _call("scontrol", "requeue", job)


def _call(*argv: str) -> str:
    try:
        # names and comments of jobs may be in any encoding
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT
        )
    except FileNotFoundError:
        raise FleetError(
            f"{argv[0]} is not installed on this machine; use a login node of the Slurm cluster (or install "
            "slurm-client)"
        ) from None
    except subprocess.TimeoutExpired:
        raise FleetError(
            f"{argv[0]} did not answer within {_TIMEOUT:g} s; see whether slurmctld runs: scontrol ping"
        ) from None
    if done.returncode != 0:
        raise FleetError(f"{argv[0]} failed: {done.stderr.strip() or f'exit status {done.returncode}'}")
    return done.stdout
