"""A run's folder on this machine: ``launch.json``, the registry of runs, and what is known of a run."""

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
from launcher.node.json_reader import EVENT, REPORT, Record, flag, items, moment, none_or, one_of, place, records, text
from launcher.plan.model import LaunchPlan
from launcher.plan.serialize import read_run

Stage = Literal["connect", "preflight", "partition", "sync", "start", "train", "collect", "end"]

NAME = "launch.json"

_MARKS = (NAME, "run.json")  # a folder with one of them is a run's

BEFORE_NODES = ("connect", "preflight", "partition", "sync")  #: stages in which nothing of a run runs on its nodes

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Of this machine; '' where the kernel has none (not Linux)."""
    return (_text_of(_BOOT_ID) or "").strip()


@dataclass(frozen=True)
class LaunchFile:
    """``launch.json`` of a run folder: the launching process, and its stage. Times are of this machine's clock."""

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
    since: float  #: when this stage began
    detached: bool = False
    resumed_from: str | None = None  #: id of an earlier run

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
    ) -> LaunchFile:
        """Of a launch that begins now, in this process."""
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
            boot_id=boot_id(),
            started=now,
            stage="connect",
            since=now,
            resumed_from=resumed_from,
        )

    def at(self, stage: Stage, *, detached: bool = False) -> LaunchFile:
        """The same launch, now at ``stage``; ``detached``: it has left the run to itself."""
        return replace(self, stage=stage, since=time.time(), detached=detached)

    def write(self, folder: Path) -> None:
        """Write it whole into the run's folder, which is made if need be."""
        write_whole(folder / NAME, json.dumps(asdict(self), indent=1) + "\n", private=True)

    @classmethod
    def read(cls, folder: Path) -> LaunchFile | None:
        """The folder's; None where there is none. Raises FleetError when it is damaged."""
        text = _text_of(folder / NAME)
        if text is None:
            return None
        try:
            return _from_json(json.loads(text))
        except (ValueError, RecursionError) as error:
            raise FleetError(
                f"{folder / NAME} is damaged ({error}); delete it, the run's other files do without"
            ) from None

    @property
    def who(self) -> str:
        """``alice@laptop``."""
        return f"{self.user}@{self.host}"

    @property
    def here(self) -> bool:
        """Whether it was launched on this machine, by this or an earlier name or boot of it."""
        return self.host == socket.gethostname() or self.alive() is True

    def alive(self) -> bool | None:
        """Whether the launching process still runs; None: it is another machine's, so this one cannot know.

        A machine is known by its boot id, as its name may change with the network. Containers share their host's
        boot id, but not its name or processes.
        """
        this_boot, this_name = self.boot_id == boot_id(), self.host == socket.gethostname()
        if this_boot and procs.alive(self.pid, self.start_ticks):
            return True
        return False if this_name else None


def register(run_id: str, folder: Path) -> str:
    """Have later commands find the run from any working directory; why they will not, or ''."""
    entry = {"folder": str(folder.absolute())}
    try:
        write_whole(registry_folder() / f"{run_id}.json", json.dumps(entry) + "\n")
    except OSError as error:
        return f"this run will be found from this folder only: {error.filename or registry_folder()}: {error.strerror}"
    return ""


def registry_folder() -> Path:
    """``${XDG_STATE_HOME:-~/.local/state}/gnnfleet/runs``; where nobody can write, for a user without a home."""
    state = os.path.expanduser(os.environ.get("XDG_STATE_HOME") or "~/.local/state")
    return Path("/nonexistent" if state.startswith("~") else state) / "gnnfleet" / "runs"


def known_runs(runs_dirs: Iterable[Path]) -> list[Path]:
    """Folders of all registered runs and of those in ``runs_dirs``, the newest first; each once."""
    folders = [*_registered(), *(folder for top in runs_dirs if top.is_dir() for folder in top.iterdir())]
    unique = {folder.resolve(): folder for folder in folders if is_run_folder(folder)}
    return sorted(unique.values(), key=began, reverse=True)


def is_run_folder(folder: Path) -> bool:
    """Whether a launch, or ``collect``, has made it."""
    return any(os.path.isfile(folder / mark) for mark in _MARKS)  # False where it may not be looked at


def never_ran(folder: Path) -> bool:
    """Whether the launch that made the folder has ended before anything ran, so that its id is free again."""
    try:
        launch = LaunchFile.read(folder)
    except FleetError:
        return False
    if launch is None:
        return False
    if launch.stage in BEFORE_NODES:
        return launch.alive() is False
    return launch.stage == "end" and _given_up_at(folder) in BEFORE_NODES


def clear(folder: Path) -> None:
    """Remove what a launch that ``never_ran`` has left."""
    for path in (folder / name for name in ("result.json", "events.jsonl", "run.json")):
        if path.is_file():
            path.unlink()


def began(folder: Path) -> float:
    """When the run was launched (or first brought here), as far as its folder tells."""
    try:
        launch = LaunchFile.read(folder)
    except (FleetError, OSError):
        launch = None
    return launch.started if launch else min(_mtimes(folder), default=0.0)


def last_sign(folder: Path) -> float:
    """When the launcher last wrote something there."""
    return max(_mtimes(folder), default=0.0)


def user_name() -> str:
    """Who I am; the uid where it has no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def user_at_host() -> str:
    """``alice@laptop``: who asks for things, as others will read it."""
    return f"{user_name()}@{socket.gethostname()}"


def _registered() -> list[Path]:
    folders = map(_registered_folder, sorted(registry_folder().glob("*.json")))
    return [folder for folder in folders if folder is not None]


def _registered_folder(entry: Path) -> Path | None:
    """None where the entry is damaged: one must not hide all other runs."""
    try:
        return Path(json.loads(_text_of(entry) or "")["folder"])
    except (ValueError, KeyError, TypeError):
        return None


_LAUNCH = Record(
    {
        **dict.fromkeys(("run_id", "name", "config", "cwd", "host", "user", "boot_id"), text),
        **dict.fromkeys(("argv", "own_command", "overrides"), items(text)),
        **dict.fromkeys(("pid", "start_ticks"), place),
        **dict.fromkeys(("started", "since"), moment),
        "stage": one_of(*get_args(Stage)),
    },
    {"detached": (flag, False), "resumed_from": (none_or(text), None)},
    {},
)


def _from_json(value: Any) -> LaunchFile:
    """Of what a newer version has added, nothing is taken."""
    values = _LAUNCH(value)
    lists = {name: tuple(values[name]) for name in ("argv", "own_command", "overrides")}
    known = {field.name for field in fields(LaunchFile)}
    return LaunchFile(**{name: value for name, value in {**values, **lists}.items() if name in known})


def _given_up_at(folder: Path) -> str:
    """The stage at which the launch was given up; '' when it was not."""
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
    """A run, and what this machine knows of it."""

    run_id: str
    folder: Path | None  #: its run folder here; None: it was launched elsewhere and never collected here
    launch: LaunchFile | None
    plan: LaunchPlan | None  #: None when its launcher ended before there was one
    config: ResolvedConfig | None
    result: Mapping[str, Any] | None  #: result.json here
    config_given: Path | None = None  #: the cluster file by whose hosts it was found

    @property
    def words(self) -> str:
        """The run as the commands we suggest name it."""
        return self.run_id + (f" --config {self.config_given}" if self.config_given and not self.folder else "")

    @property
    def own(self) -> bool:
        """Whether it runs an own command, as far as can be told from here."""
        if self.launch is not None:
            return bool(self.launch.own_command)
        return self.plan is not None and bool(self.plan.own_command)

    @property
    def plan_is_missing(self) -> bool:
        """Whether it may have got to its nodes although there is no plan here: deleted, or of an older version."""
        began = self.launch is None or self.launch.stage in ("start", "train", "collect")
        return self.plan is None and self.result is None and began

    @property
    def without_plan(self) -> str:
        """That nothing can be said of such a run, and what helps."""
        return (
            f"run {self.run_id}: {self.folder} holds no run.json, so what runs on its nodes cannot be told from here; "
            f"they have copies, so give the cluster file: gnnfleet status {self.run_id} --config cluster.yml"
        )

    @property
    def needed_plan(self) -> LaunchPlan:
        """The plan; raises FleetError where there is none."""
        if self.plan_is_missing:
            raise FleetError(self.without_plan)
        if self.plan is None:
            raise FleetError(
                f"run {self.run_id} never got to its nodes: its launcher ended before there was a plan; "
                f"`gnnfleet status {self.run_id}` tells more"
            )
        return self.plan

    @property
    def needed_config(self) -> ResolvedConfig:
        """The config with the logins; raises FleetError where there is none."""
        if self.config is None:
            raise FleetError(
                f"run {self.run_id}: {self.folder} holds no config.yml, so its hosts are not known; give --config"
            )
        return self.config


def known_here(run_id: str, runs_dirs: Sequence[Path]) -> Path | None:
    """The run's folder on this machine, if there is one."""
    return next((folder for folder in known_runs(runs_dirs) if folder.name == run_id), None)


def read_folder(folder: Path) -> FoundRun:
    """What a run folder tells; raises FleetError when a file in it is damaged."""
    launch = LaunchFile.read(folder)
    run_id = launch.run_id if launch else folder.name
    return FoundRun(run_id, folder, launch, read_plan(folder), read_config_of(folder), read_result(folder))


def read_plan(folder: Path) -> LaunchPlan | None:
    """The folder's ``run.json``; None where there is none. Raises FleetError when it is damaged."""
    text = _text(folder / "run.json")
    try:
        return read_run(text) if text else None
    except FleetError as error:
        raise FleetError(
            f"{folder}: {error}. Its nodes have copies: delete this one, and give the cluster file: "
            f"gnnfleet status {folder.name} --config cluster.yml"
        ) from None


def read_result(folder: Path) -> dict[str, Any] | None:
    """The folder's ``result.json``; None where there is none. Raises FleetError when it is damaged."""
    text = _text(folder / "result.json")
    if not text:
        return None
    try:
        return REPORT(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise FleetError(
            f"{folder / 'result.json'} is damaged ({error}); delete it, `gnnfleet collect {folder.name}` makes it anew"
        ) from None


def read_config_of(folder: Path) -> ResolvedConfig | None:
    """The config as the run has used it; files it sent need not be on this machine any more."""
    path = folder / "config.yml"
    if not path.is_file():
        return None
    try:
        return resolve_saved(load_config(path, ("run.files=[]",)))
    except ConfigError as error:
        raise FleetError(f"the config that run {folder.name} has used cannot be read any more:\n{error}") from None


def _given_folder(folder: Path) -> Path:
    if is_run_folder(folder):
        return folder
    what = "holds no run (no launch.json or run.json)" if folder.is_dir() else "is no folder"
    raise UsageError(f"{folder} {what}; `gnnfleet runs` lists the runs known here")


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
