"""What a tracker must do, and the table of trackers."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from trainer.core.errors import SettingsError
from trainer.core.train_config import TRACKERS

#: The trackers of ``trainer.core.train_config``: name → (module, class).
CLASSES: Mapping[str, tuple[str, str]] = {
    "tensorboard": ("trainer.track.tensorboard", "TensorBoard"),
    "wandb": ("trainer.track.wandb", "Wandb"),
    "mlflow": ("trainer.track.mlflow", "Mlflow"),
}


class Point(NamedTuple):
    """Values at one place of an axis."""

    axis: str  #: epoch, step (training steps of all epochs) or seconds (since the first start of the run)
    at: int
    t: float  #: seconds since the epoch
    values: Mapping[str, float]  #: by name, such as ``epoch/loss``


class Job(NamedTuple):
    """The run, as trackers show it."""

    run_id: str
    folder: Path  #: for files of trackers
    config: Mapping[str, Any]  #: settings of the run, nested; without secrets
    before: Sequence[str] = ()  #: ids of the runs that this one resumes, oldest first


class Place(NamedTuple):
    """Where a tracker shows the run."""

    id: str  #: the tracker's name for the run
    url: str  #: page of the run; '' if there is none
    folder: str  #: its files, relative to ``Job.folder``; '' if there are none


class Tracker(Protocol):
    """One tracker of one run. Any method may raise, and take any time: each tracker has a thread of its own."""

    def __init__(self, job: Job, options: Mapping[str, Any], known: str) -> None:
        """Open the run. options: those of the config. known: ``Place.id`` of an earlier start of the run, or ''."""

    @property
    def place(self) -> Place: ...

    def log(self, points: Sequence[Point]) -> None:
        """Record points, and return once they are safe from the end of this process, or sent."""

    def end(self, state: str, summary: Mapping[str, Any]) -> None:
        """Record how the run has ended, and close it. state: done, failed or stopped. summary: the final report."""


def make_tracker(name: str, job: Job, options: Mapping[str, Any], known: str) -> Tracker:
    """Open a run of a tracker. Raises ``SettingsError`` if its package cannot be imported, and the client's errors."""
    module, attribute = CLASSES[name]
    try:
        kind = getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        raise SettingsError(f"it needs a package: pip install {TRACKERS[name].package} ({error})") from error
    tracker: Tracker = kind(job, options, known)
    return tracker


def flat(tree: Mapping[str, Any], above: str = "", separator: str = ".") -> dict[str, Any]:
    """Return the values of nested mappings by their path, such as ``train.lr``."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        path = f"{above}{separator}{name}" if above else name
        found |= flat(value, path, separator) if isinstance(value, Mapping) and value else {path: value}
    return found


def title_of(summary: Mapping[str, Any]) -> str:
    """Return the final report as lines of ``name: value``."""
    return "\n".join(f"{name}: {value}" for name, value in flat(summary).items() if value not in (None, "", [], {}))
