"""``launch.json`` of a run folder: the process that launches the run, and whether this process is still alive."""

from __future__ import annotations

import getpass
import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Literal, get_args

from launcher.errors import FleetError
from launcher.files import write_whole
from launcher.node import procs
from launcher.node.json_reader import Record, flag, items, loads, moment, natural, none_or, one_of, text
from launcher.text import clock_time

Stage = Literal["queue", "connect", "preflight", "partition", "sync", "start", "train", "collect", "end"]

#: Stages in which no process of a run runs on its nodes.
BEFORE_NODES = ("queue", "connect", "preflight", "partition", "sync")

NAME = "launch.json"


@dataclass(frozen=True)
class LaunchFile:
    """Content of ``launch.json`` in a run folder: the process that launches the run, and the stage of the launch.

    Times are seconds since the epoch by the launching machine's clock.
    """

    run_id: str
    name: str
    config: str  #: path as given
    cwd: str
    argv: tuple[str, ...]
    own_command: tuple[str, ...]
    overrides: tuple[str, ...]  #: key=value
    host: str
    user: str
    pid: int
    start_ticks: int
    boot_id: str
    started: float
    stage: Stage
    since: float  #: when the stage began
    detached: bool = False  #: the launcher ended while the run continued
    resumed_from: str | None = None  #: id of the run that was resumed
    slurm_job: str = ""  #: batch job of Slurm whose script is the launcher, or will be; '': none

    @classmethod
    def mine(
        cls,
        run_id: str,
        name: str,
        *,
        config: str,
        own_command: Sequence[str] = (),
        overrides: Sequence[str] = (),
        resumed_from: str | None = None,
        slurm_job: str = "",
        stage: Stage = "connect",
    ) -> LaunchFile:
        """Return the content of ``launch.json`` for a launch that begins now, in this process."""
        now, process = time.time(), procs.look(os.getpid())
        return cls(
            run_id=run_id,
            name=name,
            config=config,
            cwd=os.getcwd(),
            argv=tuple(sys.argv),
            own_command=tuple(own_command),
            overrides=tuple(overrides),
            host=socket.gethostname(),
            user=user_name(),
            pid=os.getpid(),
            start_ticks=process.start_ticks if process else 0,
            boot_id=procs.boot_id(),
            started=now,
            stage=stage,
            since=now,
            resumed_from=resumed_from,
            slurm_job=slurm_job,
        )

    def at(self, stage: Stage, *, detached: bool = False) -> LaunchFile:
        """Return a copy at ``stage``, which begins now. ``detached``: the launcher ends, and the supervisors continue
        the run.
        """
        return replace(self, stage=stage, since=time.time(), detached=detached)

    def write(self, folder: Path) -> None:
        """Write ``launch.json`` atomically into ``folder``; create the folder if necessary."""
        write_whole(folder / NAME, json.dumps(asdict(self), indent=1) + "\n", private=True)

    @classmethod
    def read(cls, folder: Path) -> LaunchFile | None:
        """Read ``launch.json`` in ``folder``; None if there is none. Raises FleetError if the file is damaged.

        Fields of newer versions are ignored.
        """
        known = {field.name for field in fields(LaunchFile)}
        try:
            values = _LAUNCH(loads((folder / NAME).read_text(encoding="utf-8", errors="replace")))
            values |= {name: tuple(values[name]) for name in ("argv", "own_command", "overrides")}
            return LaunchFile(**{name: value for name, value in values.items() if name in known})
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise FleetError(
                f"{folder / NAME} is damaged ({error}); delete it, the run's other files are enough"
            ) from None

    @property
    def who(self) -> str:
        """User and machine that launched the run: ``alice@laptop``."""
        return f"{self.user}@{self.host}"

    @property
    def here(self) -> bool:
        """Whether the run was launched on this machine, even if its host name has changed since."""
        return self.host == socket.gethostname() or self.alive() is True

    def alive(self) -> bool | None:
        """Return whether the launching process still runs; None if that is unknown.

        - True: the process runs on this machine, recognised by the boot id, even if the host name has changed.
        - False: otherwise, if this machine's host name is that of the launching machine.
        - None: otherwise. The process may run on another machine, or in a container on this machine.

        For a launcher in a batch job: whether the job has not ended yet; None if Slurm does not tell.
        """
        if self.slurm_job:
            from launcher.transport.slurm_client import job_status

            try:
                return not job_status(self.slurm_job).ended
            except FleetError:
                return None  # this machine is not in the cluster, or Slurm does not answer
        if self.boot_id == procs.boot_id() and procs.alive(self.pid, self.start_ticks):
            return True
        return False if self.host == socket.gethostname() else None

    @property
    def requeued(self) -> bool:
        """Whether the batch job that launched the run waits in its queue again; its next start resumes the run."""
        if not self.slurm_job or self.stage == "queue":
            return False
        from launcher.transport.slurm_client import job_status

        try:
            return job_status(self.slurm_job).state == "PENDING"
        except FleetError:
            return False

    @property
    def process(self) -> str:
        """Who runs the launcher, and as which process or job: ``alice@laptop, pid 71``."""
        return f"{self.who}, Slurm job {self.slurm_job}" if self.slurm_job else f"{self.who}, pid {self.pid}"

    @property
    def doing(self) -> str:
        """What the launcher does in its stage: ``checking its nodes``."""
        return _DOING[self.stage]

    def words(self, last: float) -> str:
        """Return a clause such as ``its launcher (alice@laptop, pid 71) has ended``. ``last``: when it last wrote."""
        who, alive = self.process, self.alive()
        if self.requeued:
            return f"its launcher ({who}) waits in the queue of Slurm and will resume it"
        if self.stage == "end":
            return f"its launcher ({who}) has ended"
        if self.detached:
            return f"its launcher ({who}) detached at {clock_time(self.since)}"
        if alive:
            return f"its launcher ({who}) is {self.doing}"
        if alive is None:
            return f"it was launched by {self.who} on another machine, so the state of that launcher is unknown here"
        if self.stage == "queue":
            return f"its Slurm job {self.slurm_job}, submitted by {self.who}, ended before it began"
        return f"its launcher ({who}) died while {self.doing} (last update {clock_time(last)})"


_DOING = {
    "queue": "waiting in the queue of Slurm",
    "connect": "connecting to its nodes",
    "preflight": "checking its nodes",
    "partition": "making its parts",
    "sync": "sending files to its nodes",
    "start": "starting the run",
    "train": "following the run",
    "collect": "collecting its results",
    "end": "ending",
}


def waits_for_job(folder: Path, job: str) -> bool:
    """Return whether the launch that created the folder waits for the start of this Slurm job."""
    try:
        launch = LaunchFile.read(folder)
    except FleetError:
        return False
    return launch is not None and launch.stage == "queue" and launch.slurm_job == job


def user_name() -> str:
    """Return the name of the user of this process, or the uid if the user has no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def user_at_host() -> str:
    """Return ``alice@laptop``: this user and machine."""
    return f"{user_name()}@{socket.gethostname()}"


_LAUNCH = Record(
    {
        **dict.fromkeys(("run_id", "name", "config", "cwd", "host", "user", "boot_id"), text),
        **dict.fromkeys(("argv", "own_command", "overrides"), items(text)),
        **dict.fromkeys(("pid", "start_ticks"), natural),
        **dict.fromkeys(("started", "since"), moment),
        "stage": one_of(*get_args(Stage)),
    },
    {"detached": (flag, False), "resumed_from": (none_or(text), None), "slurm_job": (text, "")},
    {},
)
