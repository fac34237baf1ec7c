"""Nodes of a Slurm job, without SSH: each command is a job step, started by ``srun`` on the node."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path

from launcher.command import Command, render
from launcher.errors import FleetError, RemoteFileError, UnreachableError
from launcher.files import atomic_file
from launcher.transport.base import Completed, OnBytes, Session, Transport
from launcher.transport.local import LocalProcess, LocalTransport
from launcher.transport.process import STALL, PipeProcess, Process, ProcessTransport
from launcher.transport.slurm_client import JobStatus, job_status

_CHUNK = 1 << 18

#: What srun prints if a job that is being ended, or has ended, gets no more steps.
_REFUSED = (
    *(b"has expired", b"Job/step already completing or completed", b"Invalid job id specified"),
    b"Job is pending execution",  # Slurm has put it back into the queue
)

_ASK_AGAIN = 5.0  # seconds after which Slurm is asked again whether a job has ended

_CLOSE_WAIT = 2.0  # seconds that srun gets to end its step before it is killed

# $1: file, $2: offset. Missing folders are created.
_UPLOAD = 'mkdir -p "$(dirname "$1")" && truncate -s "$2" "$1" && cat >>"$1"'

# $1: temporary file, $2: file, $3: mode. The mode is set first, so that a secret is never readable by others.
_WRITE = 'mkdir -p "$(dirname "$2")" && (umask 077 && : >"$1") && chmod "$3" "$1" && cat >"$1" && mv "$1" "$2"'

# $1: file, $2: number of bytes, or empty for all. The first line of stdout is the number of bytes that follow.
_DOWNLOAD = (
    'exec <"$1" && n=$(stat -Lc %s "$1") && { [ -z "$2" ] || [ "$2" -ge "$n" ] || n=$2; } && echo "$n" && head -c "$n"'
)


def step_words(job: str, host: str) -> tuple[str, ...]:
    """Return the words that run a command on a host of a job."""
    return ("srun", "--overlap", f"--jobid={job}", f"--nodelist={host}")


def open_slurm(job: str | None, host: str, node_rank: int) -> Transport:
    """Return a transport to a node of a job.

    If the job has ended, or waits in the queue again, the transport reads the files of the run on this machine, through
    the shared file system. Raises UnreachableError if there is no job yet (``job`` is None), if the job is being
    started or ended, or if Slurm does not answer.
    """
    return _opened(_status(job, host, node_rank), host, node_rank)


def open_job(job: str | None, hosts: list[str]) -> dict[int, Transport | UnreachableError]:
    """Return, by node_rank, a transport to each node of a job, or the error of opening it. Asks Slurm only once."""
    try:
        status = _status(job, hosts[0], 0)
    except UnreachableError as error:
        return {
            k: UnreachableError(error.message, host=host, node_rank=k, remedy=error.remedy)
            for k, host in enumerate(hosts)
        }
    opened: dict[int, Transport | UnreachableError] = {}
    for k, host in enumerate(hosts):
        try:
            opened[k] = _opened(status, host, k)
        except UnreachableError as error:
            opened[k] = error
    return opened


def _status(job: str | None, host: str, node_rank: int) -> JobStatus:
    if not job:
        remedy = "launch inside salloc or sbatch, or with --slurm"
        raise UnreachableError("no Slurm job has this node yet", host=host, node_rank=node_rank, remedy=remedy)
    try:
        return job_status(job)
    except FleetError as error:
        raise UnreachableError(str(error), host=host, node_rank=node_rank, remedy="try again") from None


def _opened(status: JobStatus, host: str, node_rank: int) -> Transport:
    if status.ended or status.state == "PENDING":
        return LocalTransport(node_rank)
    if not status.running:
        message = f"Slurm job {status.job} is {status.state.lower()}{f' ({status.reason})' if status.reason else ''}"
        remedy = f"see `squeue -j {status.job}`"
        raise UnreachableError(message, host=host, node_rank=node_rank, remedy=remedy)
    return SlurmTransport(status.job, host, node_rank)


_asked: dict[str, tuple[float, bool]] = {}  # by job: when Slurm was asked last, and its answer

_asking = threading.Lock()


def _is_over(job: str) -> bool:
    """Whether a job is being ended, has ended or waits in the queue again, as Slurm said in the last seconds."""
    with _asking:
        when, over = _asked.get(job, (-_ASK_AGAIN, False))
        if time.monotonic() - when > _ASK_AGAIN:
            with suppress(FleetError):  # Slurm does not answer: its last answer is used
                status = job_status(job)
                over = status.ended or status.state in ("COMPLETING", "PENDING")
            _asked[job] = (time.monotonic(), over)
        return over


class SlurmTransport(ProcessTransport):
    """A node of a running job. It needs no connection: ``connect`` and ``close`` do nothing.

    Each command is a step that shares the resources of the job (``--overlap``). Commands see the environment of this
    process, as srun passes it on. A job that is being ended starts no more steps, and Slurm ends all its processes;
    commands then run on this machine, to read the files of the run through the shared file system.
    """

    def __init__(self, job: str, host: str, node_rank: int | None = None):
        self.job, self.target, self.node_rank = job, host, node_rank
        self._ending = False  #: the job has ended or is being ended, and Slurm starts no more steps of it

    def connect(self, timeout: float) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""

    def start_session(self, name: str, command: Command) -> Session:
        """Start a command as a step of its own, which continues when the launcher exits."""
        return _Step(self._argv(command, name))

    def run(self, command: Command, *, stdin: bytes = b"", timeout: float) -> Completed:
        done = super().run(command, stdin=stdin, timeout=timeout)
        if self._ending or not done.returncode or not any(text in done.stderr for text in _REFUSED):
            return done
        self._ending = True
        return super().run(command, stdin=stdin, timeout=timeout)

    def _begin(self, command: Command, deadline: float) -> Process:
        self._ending = self._ending or _is_over(self.job)
        return LocalProcess(command) if self._ending else _SrunProcess(self._argv(command))

    def _kill(self, process: Process) -> None:
        process.close()

    def _argv(self, command: Command, name: str = "gnnfleet") -> list[str]:
        return [
            *("srun", f"--jobid={self.job}", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={self.target}"),
            *("--mem=0", "--cpu-bind=none", "--quiet", "--unbuffered", f"--job-name={name}", "--chdir=/"),
            # a home folder that does not exist is no error here: paths of the plan are absolute after preflight
            *("bash", "-c", f"cd 2>/dev/null\n{render(command)}"),
        ]

    def upload(self, source: Path, dest: str, *, offset: int = 0, on_bytes: OnBytes | None = None) -> None:
        command = Command(("bash", "-c", _UPLOAD, "bash", dest, str(offset)))
        with source.open("rb") as src, self._started(command, time.monotonic() + STALL) as process:
            src.seek(offset)
            try:
                while data := src.read(_CHUNK):
                    process.send(data)
                    if on_bytes:
                        on_bytes(len(data))
                process.close_input()
            except BrokenPipeError:
                pass  # its exit status and stderr say why
            self._finished(process, "write", dest)

    def write(self, data: bytes, dest: str, *, mode: int = 0o644) -> None:
        temporary = f"{dest}.{uuid.uuid4().hex[:8]}"
        command = Command(("bash", "-c", _WRITE, "bash", temporary, dest, f"{mode:o}"))
        with self._started(command, time.monotonic() + STALL) as process:
            process.feed(data)
            self._finished(process, "write", dest)

    def download(self, source: str, dest: Path, *, most: int | None = None, on_bytes: OnBytes | None = None) -> None:
        command = Command(("bash", "-c", _DOWNLOAD, "bash", source, "" if most is None else str(most)))
        with atomic_file(dest) as out, self._started(command, time.monotonic() + STALL) as process:
            process.close_input()
            expected, received, more = -1, 0, True
            while more:
                more = process.read(STALL)
                if expected < 0 and b"\n" in process.stdout:
                    line, _, rest = bytes(process.stdout).partition(b"\n")
                    expected, process.stdout[:] = int(line), rest
                if expected >= 0:
                    out.write(process.stdout)
                    received += len(process.stdout)
                    if on_bytes:
                        on_bytes(len(process.stdout))
                    process.stdout.clear()
            self._finished(process, "read", source)
            if received != expected:
                raise self._file_error("read", source, f"{received} of {expected} bytes arrived")

    def _finished(self, process: Process, verb: str, path: str) -> None:
        """Wait for the end of a command that reads or writes a file. Raises RemoteFileError if it has failed."""
        if not process.finish(time.monotonic() + STALL):
            raise self._file_error(verb, path, f"no progress for {STALL:g} s")
        if process.status:
            lines = process.stderr.decode("utf-8", "replace").strip().splitlines()
            why = [line for line in lines if not line.startswith("srun:")] or lines
            raise self._file_error(verb, path, why[-1] if why else f"exit status {process.status}")

    def _file_error(self, verb: str, path: str, why: str) -> RemoteFileError:
        codes = {os.strerror(code): code for code in (errno.ENOENT, errno.ENOSPC, errno.EACCES, errno.EROFS)}
        code = next((code for text, code in codes.items() if why.endswith(text)), None)
        message = f"cannot {verb} {path}: {why.rpartition(': ')[2]}"
        return RemoteFileError(message, errno=code, host=self.target, node_rank=self.node_rank)


def _environment() -> dict[str, str]:
    """Return the environment for srun: without the variables of a surrounding job, which act as options of srun."""
    kept = ("SLURM_CONF",)
    return {name: text for name, text in os.environ.items() if name in kept or not name.startswith(("SLURM_", "SRUN_"))}


_NOTICE = b"srun: cluster configuration lacks support for cpu binding\n"  # not an error, and not silenced by --quiet


class _SrunProcess(PipeProcess):
    def __init__(self, argv: list[str]):
        super().__init__(argv, env=_environment())
        self.pid = self.process.pid

    def _add_stderr(self, data: bytes) -> None:
        super()._add_stderr(data)
        if _NOTICE in self.stderr:
            self.stderr[:] = self.stderr.replace(_NOTICE, b"")

    def close(self) -> None:
        """End the step if it is still running, and close the pipes."""
        _end(self.process)
        super().close()


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_CLOSE_WAIT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class _Step(Session):
    """A step that continues when the launcher exits; ``srun`` runs in a session of its own."""

    def __init__(self, argv: list[str]):
        self._process = subprocess.Popen(
            argv,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def running(self) -> bool:
        return self._process.poll() is None

    def end(self) -> None:
        _end(self._process)
