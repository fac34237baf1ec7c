"""A run's folder on this machine: its ``launch.json``, the registry of runs, and what the folder says about the run."""

from __future__ import annotations

import getpass
import json
import os
import socket
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from launcher.config.loader import load_config
from launcher.config.resolve import ResolvedConfig, resolve_saved
from launcher.errors import ConfigError, FleetError, UsageError
from launcher.files import write_whole
from launcher.node import procs
from launcher.node.json_reader import (
    EVENT,
    REPORT,
    Record,
    flag,
    items,
    moment,
    natural,
    none_or,
    one_of,
    records,
    text,
)
from launcher.plan.model import LaunchPlan
from launcher.plan.serialize import read_run
from launcher.transport.slurm_client import job_status

Stage = Literal["queue", "connect", "preflight", "partition", "sync", "start", "train", "collect", "end"]

NAME = "launch.json"

_MARKS = (NAME, "run.json")  # a folder with one of these files is a run folder

BEFORE_NODES = (
    "queue",
    "connect",
    "preflight",
    "partition",
    "sync",
)  #: stages in which no process of a run runs on its nodes


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
        now = time.time()
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
            start_ticks=_start_ticks(os.getpid()),
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
        """Read ``launch.json`` in ``folder``; None if there is none. Raises FleetError if the file is damaged."""
        text = _text_of(folder / NAME)
        if text is None:
            return None
        try:
            return _from_json(json.loads(text))
        except (ValueError, RecursionError) as error:
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
            return self._job_alive()
        return self._process_alive()

    @property
    def requeued(self) -> bool:
        """Whether the batch job that launched the run waits in its queue again; its next start resumes the run."""
        try:
            return bool(self.slurm_job) and self.stage != "queue" and job_status(self.slurm_job).state == "PENDING"
        except FleetError:
            return False

    def _job_alive(self) -> bool | None:
        try:
            return not job_status(self.slurm_job).ended
        except FleetError:
            return None  # this machine is not in the cluster, or Slurm does not answer

    def _process_alive(self) -> bool | None:
        this_boot, this_name = self.boot_id == procs.boot_id(), self.host == socket.gethostname()
        if this_boot and procs.alive(self.pid, self.start_ticks):
            return True
        return False if this_name else None


def waits_for_job(folder: Path, job: str) -> bool:
    """Return whether the launch that created the folder waits for the start of this Slurm job."""
    try:
        launch = LaunchFile.read(folder)
    except FleetError:
        return False
    return launch is not None and launch.stage == "queue" and launch.slurm_job == job


def attempts(folder: Path) -> list[Path]:
    """Return the run folders of a batch job: ``folder`` of its first start, then the folder of each requeued start."""
    again = sorted(folder.parent.glob(f"{folder.name}-r[0-9]*"), key=lambda path: (len(path.name), path.name))
    return [folder, *(path for path in again if path.name[len(folder.name) + 2 :].isdecimal())]


def register(run_id: str, folder: Path) -> str:
    """Add a run to the registry of runs on this machine; return '', or a warning if this failed."""
    entry = {"folder": str(folder.absolute())}
    try:
        write_whole(registry_folder() / f"{run_id}.json", json.dumps(entry) + "\n")
    except OSError as error:
        where = error.filename or registry_folder()
        return (
            f"this run could not be registered, so commands find it only from this directory: {where}: {error.strerror}"
        )
    return ""


def registry_folder() -> Path:
    """Return the folder of the registry of runs: ``${XDG_STATE_HOME:-~/.local/state}/gnnfleet/runs``.

    If the user has no home folder, returns a path that does not exist.
    """
    state = os.path.expanduser(os.environ.get("XDG_STATE_HOME") or "~/.local/state")
    return Path("/nonexistent" if state.startswith("~") else state) / "gnnfleet" / "runs"


def known_runs(runs_dirs: Iterable[Path]) -> list[Path]:
    """Return the folders of all runs in the registry and in ``runs_dirs``, newest first, each once."""
    folders = [*_registered(), *(folder for top in runs_dirs if top.is_dir() for folder in top.iterdir())]
    unique = {folder.resolve(): folder for folder in folders if is_run_folder(folder)}
    return sorted(unique.values(), key=began, reverse=True)


def is_run_folder(folder: Path) -> bool:
    """Return whether a launch or ``gnnfleet collect`` created the folder."""
    return any(os.path.isfile(folder / mark) for mark in _MARKS)  # False also without permission


def never_ran(folder: Path) -> bool:
    """Whether the launch ended before any process of the run started, so that its run id is free again."""
    try:
        launch = LaunchFile.read(folder)
    except FleetError:
        return False
    if launch is None:
        return False
    if launch.stage in BEFORE_NODES:
        return launch.alive() is False
    return launch.stage == "end" and _aborted_stage(folder) in BEFORE_NODES


def clear(folder: Path) -> None:
    """Remove the files of a launch that ended before any process of the run started (``never_ran``)."""
    for path in (folder / name for name in ("result.json", "events.jsonl", "run.json")):
        if path.is_file():
            path.unlink()


def began(folder: Path) -> float:
    """Return when the run was launched or, without ``launch.json``, when its oldest file was written."""
    try:
        launch = LaunchFile.read(folder)
    except (FleetError, OSError):
        launch = None
    return launch.started if launch else min(_mtimes(folder), default=0.0)


def last_sign(folder: Path) -> float:
    """Return when the launcher last wrote a file of the run folder."""
    return max(_mtimes(folder), default=0.0)


def user_name() -> str:
    """Return the name of the user of this process, or the uid if the user has no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def user_at_host() -> str:
    """Return ``alice@laptop``: this user and machine."""
    return f"{user_name()}@{socket.gethostname()}"


def _registered() -> list[Path]:
    folders = map(_registered_folder, sorted(registry_folder().glob("*.json")))
    return [folder for folder in folders if folder is not None]


def _registered_folder(entry: Path) -> Path | None:
    # A damaged file must not hide the other runs.
    try:
        return Path(json.loads(_text_of(entry) or "")["folder"])
    except (ValueError, KeyError, TypeError):
        return None


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


def _from_json(value: Any) -> LaunchFile:
    """Check and convert the content of ``launch.json``; ignores fields of newer versions."""
    values = _LAUNCH(value)
    lists = {name: tuple(values[name]) for name in ("argv", "own_command", "overrides")}
    known = {field.name for field in fields(LaunchFile)}
    return LaunchFile(**{name: value for name, value in {**values, **lists}.items() if name in known})


def _aborted_stage(folder: Path) -> str:
    """Return the stage at which the launch was aborted; '' if it was not."""
    events = records(EVENT, (_text_of(folder / "events.jsonl") or "").splitlines())
    return next((str(event.get("stage", "")) for event in events if event["kind"] == "given-up"), "")


def _mtimes(folder: Path) -> list[float]:
    names = (*_MARKS, "events.jsonl", "config.yml")
    return [path.stat().st_mtime for path in (folder / name for name in names) if path.is_file()]


def _start_ticks(pid: int) -> int:
    process = procs.look(pid)
    return process.start_ticks if process else 0


def _text_of(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None


@dataclass(frozen=True)
class FoundRun:
    """What this machine knows about a run. A field is None if it is unknown here."""

    run_id: str
    folder: Path | None  #: run folder on this machine; None: launched elsewhere and never collected here
    launch: LaunchFile | None
    plan: LaunchPlan | None  #: None if its launcher ended before it made a plan
    config: ResolvedConfig | None
    result: Mapping[str, Any] | None  #: result.json on this machine
    config_given: Path | None = None  #: the cluster file on whose hosts the run was found

    @property
    def words(self) -> str:
        """Arguments that select this run in a command that is suggested to the user."""
        return self.run_id + (f" --config {self.config_given}" if self.config_given and not self.folder else "")

    @property
    def own(self) -> bool:
        """Whether the run executes the user's own command instead of the bundled trainer; False if unknown."""
        if self.launch is not None:
            return bool(self.launch.own_command)
        return self.plan is not None and bool(self.plan.own_command)

    @property
    def plan_is_missing(self) -> bool:
        """Whether the run may have processes on its nodes, but its plan is not on this machine."""
        began = self.launch is None or self.launch.stage in ("start", "train", "collect")
        return self.plan is None and self.result is None and began

    @property
    def without_plan(self) -> str:
        """Error message for a run whose plan is not on this machine."""
        return (
            f"run {self.run_id}: {self.folder} has no run.json, so the state of its nodes cannot be determined; the "
            f"nodes have copies, so give the cluster file: gnnfleet status {self.run_id} --config cluster.yml"
        )

    @property
    def needed_plan(self) -> LaunchPlan:
        """The plan of the run. Raises FleetError if this machine does not have it."""
        if self.plan_is_missing:
            raise FleetError(self.without_plan)
        if self.plan is None and self.result is None and self.launch is not None and self.launch.slurm_job:
            raise FleetError(
                f"run {self.run_id} has started nothing on its nodes yet; see `gnnfleet status {self.run_id}`, and the "
                f"output of Slurm job {self.launch.slurm_job} in {self.folder}/slurm.log"
            )
        if self.plan is None:
            raise FleetError(
                f"run {self.run_id} started nothing on its nodes: its launcher ended before it had made a plan; "
                f"see `gnnfleet status {self.run_id}`"
            )
        return self.plan

    @property
    def needed_config(self) -> ResolvedConfig:
        """The config of the run. Raises FleetError if this machine does not have it."""
        if self.config is None:
            raise FleetError(
                f"run {self.run_id}: {self.folder} has no config.yml, so its hosts are not known; give --config"
            )
        return self.config


def known_here(run_id: str, runs_dirs: Sequence[Path]) -> Path | None:
    """Return the folder of the run ``run_id`` on this machine; None if there is none."""
    return next((folder for folder in known_runs(runs_dirs) if folder.name == run_id), None)


def read_folder(folder: Path) -> FoundRun:
    """Read a run folder. Raises FleetError if a file in it is damaged."""
    launch = LaunchFile.read(folder)
    run_id = launch.run_id if launch else folder.name
    return FoundRun(run_id, folder, launch, read_plan(folder), read_config_of(folder), read_result(folder))


def read_plan(folder: Path) -> LaunchPlan | None:
    """Read ``run.json`` in ``folder``; None if there is none. Raises FleetError if the file is damaged."""
    text = _text(folder / "run.json")
    try:
        return read_run(text) if text else None
    except FleetError as error:
        raise FleetError(
            f"{folder}: {error}. The nodes have copies of run.json: delete it here, and give the cluster file: "
            f"gnnfleet status {folder.name} --config cluster.yml"
        ) from None


def read_result(folder: Path) -> dict[str, Any] | None:
    """Read ``result.json`` in ``folder``; None if there is none. Raises FleetError if the file is damaged."""
    text = _text(folder / "result.json")
    if not text:
        return None
    try:
        return REPORT(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise FleetError(
            f"{folder / 'result.json'} is damaged ({error}); delete it, then `gnnfleet collect {folder.name}`"
            " writes a new one"
        ) from None


def read_config_of(folder: Path) -> ResolvedConfig | None:
    """Read the config of a run from its folder; None if it has none. Ignores ``run.files``: the files may be gone.

    Raises FleetError if the config is invalid.
    """
    path = folder / "config.yml"
    if not path.is_file():
        return None
    try:
        return resolve_saved(load_config(path, ("run.files=[]",)))
    except ConfigError as error:
        raise FleetError(f"the config that run {folder.name} used cannot be read:\n{error}") from None


def _given_folder(folder: Path) -> Path:
    if is_run_folder(folder):
        return folder
    what = "is not a run folder (no launch.json or run.json)" if folder.is_dir() else "is not a folder"
    raise UsageError(f"{folder} {what}; `gnnfleet runs` lists the runs known here")


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
