"""A launcher that is the batch script of a Slurm job: the warning before the job ends, and the requeueing of the job.

Slurm warns by SIGUSR1, before the time limit or before preemption. The launcher then asks the run for a checkpoint,
stops the run as SIGTERM does, and requeues the job if ``slurm: {requeue: true}``.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType

from launcher.command import Command
from launcher.config.schema import ClusterConfig
from launcher.errors import FleetError
from launcher.plan.model import LaunchPlan
from launcher.plan.sbatch import is_on
from launcher.run.interrupts import Interrupts
from launcher.transport.base import Transport
from launcher.transport.slurm_client import job_status, requeue

_CHECKPOINT_TIMEOUT = 60  # seconds to wait for the checkpoint; Slurm warns two minutes before it ends the job

#: $1: run folder of the node with rank 0, $2: seconds. Waits until the trainer has saved a checkpoint.
_REQUEST = """
mkdir -p "$1/control" && : >"$1/control/checkpoint" || exit
end=$((SECONDS + $2))
while [ -e "$1/control/checkpoint" ]; do
  [ "$SECONDS" -lt "$end" ] || exit 1
  sleep 0.1
done
"""


class JobWarning:
    """Context manager that handles SIGUSR1 in a batch job."""

    def __init__(self, interrupts: Interrupts) -> None:
        self.interrupts, self.received = interrupts, False
        self.save: Callable[[], object] | None = None  #: saves a checkpoint of the run; None while no run goes on

    def __enter__(self) -> JobWarning:
        self.interrupts.patient = True
        signal.signal(signal.SIGUSR1, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a second warning must not end what is left to do

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.received:
            self.received = True
            self.interrupts.cause = f"Slurm (end of job {os.environ['SLURM_JOB_ID']})"

            def act() -> None:
                if self.save is not None:
                    self.save()
                os.kill(os.getpid(), signal.SIGTERM)

            threading.Thread(target=act, name="job-warning", daemon=True).start()


def request_checkpoint(plan: LaunchPlan, transports: Mapping[int, Transport], say: Callable[[str], object]) -> None:
    """Ask the ranks to save a checkpoint, and wait up to a minute until it is on the disk. ``say`` gets the result."""
    lead = plan.nodes[plan.lead]
    command = Command(("bash", "-c", _REQUEST, "bash", lead.run_dir, str(_CHECKPOINT_TIMEOUT)))
    say("Slurm ends the job soon: saving a checkpoint")
    try:
        done = transports[plan.lead].run(command, timeout=_CHECKPOINT_TIMEOUT + 10.0)
    except (FleetError, OSError) as error:  # OSError: srun cannot be started; the run is stopped nevertheless
        say(f"no checkpoint could be saved now ({error}); the run resumes from an earlier one")
        return
    if done.returncode:
        say(f"no checkpoint within {_CHECKPOINT_TIMEOUT} s; the run resumes from an earlier one")


def requeue_job(config: ClusterConfig, run_id: str, folder: Path, say: Callable[..., object]) -> None:
    """Put the job of this launcher back into its queue, if the config says so and the run has a checkpoint.

    The next start of the job resumes the run ``run_id`` from the checkpoint. ``folder``: of the run. ``say`` prints a
    text in a style.
    """
    job = config.slurm_job
    if job is None:  # a launch by SSH from a job; its nodes are not those of the job
        return
    with suppress(FleetError):  # Slurm does not answer: the job is requeued below, if that works
        if job_status(job).restarts > int(os.environ.get("SLURM_RESTART_COUNT") or 0):  # after the failure of a node
            say(f"Slurm has put job {job} back into its queue; its next start resumes the run")
            return
    if not is_on(config.slurm, "requeue"):
        say(f"the job is not requeued (slurm: requeue); `gnnfleet resume {run_id}` resumes the run")
    elif not (folder / "checkpoints" / "last.pt").is_file():
        say("the job is not requeued, as the run has saved no checkpoint in its time", "yellow")
    else:
        say(f"requeueing job {job}, which will resume the run")
        requeue(job)
