"""What the command line asks for, as a value; and the run ids it may name."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.config import ClusterConfig
from launcher.errors import UsageError
from launcher.registry import never_ran

#: Option of the command line → config key it sets.
SHORT_KEYS: Mapping[str, str] = {
    "epochs": "train.epochs",
    "batch_size": "train.batch_size",
    "num_neighbors": "train.fanouts",
    "num_training_procs": "nodes.*.procs",
    "resume": "train.resume",
    "master_addr": "run.master_addr",
    "master_port": "run.master_port",
    "runs_dir": "run.runs_dir",
    "on_interrupt": "run.on_interrupt",
    "serving": "data.serving",
}
#: Short options that say nothing to a command of one's own.
TRAINER_ONLY = ("epochs", "batch_size", "num_neighbors", "resume")
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,79}")


@dataclass(frozen=True)
class LaunchOptions:
    """One invocation."""

    config: Path
    overrides: tuple[str, ...] = ()  #: ``key=value``
    include: tuple[str, ...] = ()  #: hosts and devices, see ``launcher.filters``; none: all
    exclude: tuple[str, ...] = ()
    run_id: str | None = None
    own_command: tuple[str, ...] = ()
    as_json: bool = False
    verbose: bool = False
    plain: bool = False  #: no live view
    detach: bool = False  #: return once the first step has trained
    fresh: bool = False  #: preflight believes nothing that an earlier one has shown
    resumed_from: str | None = None  #: id of the run that this one goes on from


def overrides_of(values: Mapping[str, Any], sets: Sequence[str]) -> tuple[str, ...]:
    """The ``key=value`` texts of short options that were given, after those of ``--set``."""
    short = (f"{key}={values[name]}" for name, key in SHORT_KEYS.items() if values.get(name) is not None)
    return (*sets, *short)


def read_config(options: LaunchOptions) -> ClusterConfig:
    """The config file with the command line's changes and choice of hosts; raises ConfigError and UsageError."""
    from launcher.filters import filtered
    from launcher.yaml_schema import load_config

    return load_config(
        options.config, options.overrides, lambda config: filtered(config, options.include, options.exclude)
    )


def choose_run_id(config: ClusterConfig, wanted: str | None) -> str:
    """The run id asked for, or ``<name>-YYYYmmdd-HHMMSS-xxxx``; refuses unusable and used ones. One whose launch was
    refused or interrupted before anything ran can be used again."""
    if wanted is None:
        name = re.sub(r"[^A-Za-z0-9_-]+", "-", config.name).strip("-_")[:40] or "run"
        return f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    check_run_id(wanted, "--run-id")
    folder = run_folder(config, wanted)
    if folder.exists() and not never_ran(folder):
        raise UsageError(f"--run-id {wanted}: {folder} exists already; choose another id")
    return wanted


def is_run_id(text: str) -> bool:
    """Whether it can be the id of a run, and so the name of a serving cluster."""
    return _RUN_ID.fullmatch(text) is not None


def check_run_id(wanted: str, option: str) -> None:
    """Raises UsageError where ``wanted``, given by ``option``, cannot be the id of a run."""
    if not is_run_id(wanted):
        raise UsageError(
            f"{option} {wanted!r}: use up to 80 letters, digits, `-` and `_`, beginning with a letter or digit"
        )


def run_folder(config: ClusterConfig, run_id: str) -> Path:
    """Where this run's files are kept on this machine."""
    return Path(config.run.runs_dir).expanduser() / run_id
