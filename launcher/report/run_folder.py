"""The operator's runs: ``launch.json`` (who launched one, how far that got), and where run folders are."""

from __future__ import annotations

import getpass
import json
import os
import socket
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from launcher.errors import FleetError
from launcher.files import write_whole
from launcher.node import procs

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
        except (ValueError, KeyError, TypeError) as error:
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


def _from_json(values: dict[str, Any]) -> LaunchFile:
    """Of what a newer version has added, nothing is taken."""
    lists = {name: tuple(values[name]) for name in ("argv", "own_command", "overrides")}
    known = {field.name for field in fields(LaunchFile)}
    return LaunchFile(**{name: value for name, value in {**values, **lists}.items() if name in known})


def _given_up_at(folder: Path) -> str:
    """The stage at which the launch was given up; '' when it was not."""
    events = (json.loads(line) for line in (_text_of(folder / "events.jsonl") or "").splitlines())
    return next((str(event["stage"]) for event in events if event["kind"] == "given-up"), "")


def _mtimes(folder: Path) -> list[float]:
    names = (*_MARKS, "events.jsonl", "config.yml")
    return [path.stat().st_mtime for path in (folder / name for name in names) if path.is_file()]


def _start_ticks(pid: int) -> int:
    process = procs.look(pid)
    return process.start_ticks if process else 0


def _text_of(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
