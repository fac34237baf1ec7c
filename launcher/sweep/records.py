"""The files of a sweep in ``sweeps/NAME/``: what was asked for (sweep.json), and a record of each trial."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec

from launcher.errors import FleetError, UsageError
from launcher.files import write_whole
from launcher.sweep.space import Space
from trainer.core.typed import parse_json

_State = Literal["waiting", "running", "done", "pruned", "failed"]

_NAME = "sweep.json"


class Definition(msgspec.Struct, frozen=True):
    """What was asked for. A sweep goes on only with the same."""

    name: str
    config: str  #: content of the config.yml that trials launch
    space: Space
    nodes_per_run: int
    search: Literal["grid", "random", "tpe"]
    trials: int  #: number of trials; of a grid the number of its combinations
    pruner: Literal["none", "median", "hyperband"]
    seed: int
    metric: str  #: ``val_accuracy``, ``loss``; '': the task's own metric on val
    goal: Literal["max", "min", ""]  #: '': as the runs say
    own_command: tuple[str, ...]
    wait: bool  #: whether trials wait in line for hosts and devices in use
    cwd: str  #: folder in which trials are launched
    runs_dir: str  #: absolute


class Trial(msgspec.Struct):
    """One trial. A trial whose hosts were lost is launched again under another run id."""

    number: int
    values: dict[str, str]  #: by config key, as in ``--set``
    state: _State = "waiting"
    attempt: int = 1  #: number of its run, for the run id
    losses: int = 0  #: how many of its runs have lost a host
    hosts: tuple[str, ...] = ()  #: names of the nodes of this attempt or, while it waits, none
    scores: dict[int, float] = {}  #: the metric after each epoch
    score: float | None = None  #: of the best epoch, once the trial has ended
    cause: str = ""  #: why it failed; while it waits: why the attempt before failed
    pruned_at: int | None = None  #: epoch after which it was stopped
    seconds: float | None = None  #: of its run

    @property
    def name(self) -> str:
        return f"t{self.number:03}"

    @property
    def ended(self) -> bool:
        return self.state not in ("waiting", "running")

    def run_id(self, sweep: str) -> str:
        return f"{sweep}-{self.name}" + (f"-{self.attempt}" if self.attempt > 1 else "")


class SweepFolder:
    """The folder of a sweep on this machine."""

    def __init__(self, path: Path):
        self.path = path

    @property
    def config(self) -> Path:
        return self.path / "config.yml"

    @property
    def study(self) -> Path:
        return self.path / "study.log"  #: storage of Optuna

    def file_of(self, run_id: str, suffix: str) -> Path:
        """Return the path of a file about one launch: ``.jsonl`` (its messages) or ``.log`` (what it printed)."""
        return self.path / "launches" / f"{run_id}{suffix}"

    def define(self, wanted: Definition) -> bool:
        """Write sweep.json and config.yml; return whether the sweep has begun earlier, with the same definition.

        Raises UsageError if the folder has another sweep, or cannot be written.
        """
        if (self.path / _NAME).exists():
            found = self.definition()
            if found != wanted:
                differing = [
                    name for name in Definition.__struct_fields__ if getattr(found, name) != getattr(wanted, name)
                ]
                raise UsageError(
                    f"{self.path} has another sweep, with other {', '.join(differing)}; start this one with another "
                    f"--name, or continue that one: gnnfleet sweep --resume {found.name}"
                )
            return True
        try:
            write_whole(self.config, wanted.config, private=True)
            write_whole(self.path / _NAME, _json(wanted), private=True)
        except OSError as error:
            raise UsageError(f"the folder of the sweep cannot be written: {self.path}: {error.strerror}") from None
        return False

    def definition(self) -> Definition:
        """Read sweep.json. Raises UsageError if there is none, and FleetError if it is damaged."""
        try:
            return parse_json((self.path / _NAME).read_bytes(), Definition)
        except FileNotFoundError:
            raise UsageError(f"{self.path} is not the folder of a sweep: it has no {_NAME}") from None
        except msgspec.MsgspecError as error:
            raise FleetError(f"{self.path / _NAME} is damaged: {error}") from None

    def trials(self) -> list[Trial]:
        """Read the records of all trials, by number. Raises FleetError if one is damaged."""
        found = []
        for path in sorted((self.path / "trials").glob("t*.json")):
            try:
                found.append(parse_json(path.read_bytes(), Trial))
            except msgspec.MsgspecError as error:
                raise FleetError(f"{path} is damaged ({error}); delete it, the run of the trial is enough") from None
        return sorted(found, key=lambda trial: trial.number)

    def write(self, trial: Trial) -> None:
        write_whole(self.path / "trials" / f"{trial.name}.json", _json(trial))

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep other processes from continuing this sweep at the same time. Raises UsageError if one does."""
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / "lock").open("a+") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.seek(0)
                raise UsageError(f"{self.path}: this sweep is running (pid {lock.read(20).strip()})") from None
            lock.truncate(0)
            lock.write(f"{os.getpid()}\n")
            lock.flush()
            yield


def _json(value: Definition | Trial) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=1).decode() + "\n"


def chosen_folder(name: str, folders: Sequence[Path]) -> SweepFolder:
    """Find a sweep by its name or its folder. Raises UsageError, which lists the known ones."""
    for path in (Path(name), *(folder / name for folder in folders)):
        if (path / _NAME).is_file():
            return SweepFolder(path)
    known = sorted({path.parent.name for folder in folders for path in folder.glob(f"*/{_NAME}")})
    where = ", ".join(str(folder) for folder in folders)
    raise UsageError(f"no sweep {name} in {where}" + (f"; there are {', '.join(known)}" if known else ""))
