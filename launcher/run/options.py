"""Command-line options of a launch, the config they produce, and the choice of a run id."""

from __future__ import annotations

import re
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.config.consistency import is_run_id
from launcher.config.importers.base import (
    FLAG_KEYS,
    NODES_ONLY,
    Flags,
    environment_overrides,
    named_dataset_overrides,
    node_overrides,
)
from launcher.config.schema import ClusterConfig
from launcher.errors import UsageError
from launcher.report.launch_file import LaunchFile, Stage, waits_for_job
from launcher.report.run_folder import never_ran
from launcher.text import count, duration
from launcher.yaml_tree import Override, split_override

if TYPE_CHECKING:
    from launcher.config.importers.base import Foreign

#: Command-line option → config key that it sets.
SHORT_KEYS: Mapping[str, str] = {
    "name": "name",
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

#: Options in ``SHORT_KEYS`` that have no effect on an own command.
TRAINER_ONLY = ("epochs", "batch_size", "num_neighbors")


@dataclass(frozen=True)
class LaunchOptions:
    config: Path
    overrides: tuple[Override, ...] = ()
    include: tuple[str, ...] = ()  #: hosts and devices, see ``launcher.config.host_filter``; empty: all
    exclude: tuple[str, ...] = ()
    run_id: str | None = None
    own_command: tuple[str, ...] = ()
    as_json: bool = False
    verbose: bool = False
    plain: bool = False  #: no live view
    detach: bool = False  #: return once the first step has trained, or the run waits in line
    wait: float | None = None  #: seconds to wait for devices and hosts in use; 0: no limit; None: no waiting
    nodes_needed: str = ""  #: ``2`` or ``2-4``: see ``launcher.run.choose_hosts``
    resumed_from: str | None = None  #: id of the run that this one resumes
    flags: Flags = Flags()  #: options of other launchers, given with their files

    def choose(self, config: ClusterConfig) -> ClusterConfig:
        """Return ``config`` with the hosts and devices selected by ``--include`` and ``--exclude``.

        Raises UsageError for options that do not fit.
        """
        from launcher.config.host_filter import filtered

        if (self.wait is not None or self.nodes_needed) and config.transport == "slurm":
            option = "--nodes-needed" if self.nodes_needed else "--wait"
            raise UsageError(f"{option}: Slurm queues jobs and chooses their hosts; see `slurm` in the cluster file")
        return filtered(config, self.include, self.exclude)

    def launch_file(self, run_id: str, name: str, *, job: str = "", stage: Stage = "connect") -> LaunchFile:
        """Return the content of ``launch.json`` for a launch with these options that begins now, in this process.

        name: ``name`` in the config. job: batch job whose script is the launcher, or will be; '' for none.
        """
        return LaunchFile.mine(
            run_id,
            name,
            config=str(self.config),
            own_command=self.own_command,
            overrides=["=".join(split_override(override)) for override in self.overrides],
            resumed_from=self.resumed_from,
            slurm_job=job,
            stage=stage,
        )


def overrides_of(values: Mapping[str, Any], sets: Sequence[str]) -> tuple[Override, ...]:
    """Return the config overrides of the command line; later ones win.

    ``--nodes`` and ``--dataset`` come first, then ``--set``, then all other options. ``values``: values of all options,
    by name. ``sets``: the values of ``--set``. Raises UsageError for an option with an empty value.
    """
    nodes = node_overrides(values["nodes"]) if values.get("nodes") and values["config"] != NODES_ONLY else ()
    environment = environment_overrides(values.get("venv"), values.get("conda"))
    folders = Flags(
        workspace=values.get("workspace"),
        part_config=values.get("part_config"),
        dataset_root_dir=values.get("dataset_root_dir"),
    )
    dataset = named_dataset_overrides(values.get("dataset"), folders.parts)
    keys = {**SHORT_KEYS, **FLAG_KEYS}
    job = slurm_overrides(values["slurm"]) if values.get("slurm") else ()
    for name in (*keys, "nodes", "dataset", "venv", "conda"):
        if values.get(name) == "":
            raise UsageError(f"--{name.replace('_', '-')}: the value is empty; give one, or leave the option out")
    short = ((key, values[name]) for name, key in keys.items() if values.get(name) is not None)
    return (*nodes, *dataset, *sets, *environment, *job, *short)


def wait_limit(text: str | None) -> float | None:
    """Return the value of ``--wait`` in seconds: 0 without a limit, None without the option. Raises UsageError."""
    seconds = None if text is None else duration(text)
    if text is not None and seconds is None:
        raise UsageError(f"--wait {text}: give the longest time to wait, such as 90s, 30m, 2h or 1d, or no value")
    return seconds


def slurm_overrides(text: str) -> tuple[Override, ...]:
    """Return the config overrides of ``--slurm partition=gpu,nodes=4,requeue``. Raises UsageError."""
    from launcher.plan.sbatch import parse_options

    return (("transport", "slurm"), *((f"slurm.{name}", value) for name, value in parse_options(text).items()))


def read_config(options: LaunchOptions) -> ClusterConfig:
    """Read the config file that ``options`` names; apply the overrides, ``--include`` and ``--exclude``.

    A file of another launcher is converted, with a notice on stderr. Raises ConfigError and UsageError.
    """
    from launcher.config.importers.detect import read_foreign
    from launcher.config.loader import load_config

    foreign = read_foreign(options.config, options.flags)
    if foreign is None:
        return load_config(options.config, options.overrides, options.choose)
    overrides, notes = foreign_overrides(options, foreign)
    config = load_config(options.config, overrides, options.choose, foreign)
    for line in (f"{options.config}: recognised as {foreign.kind} ({count(len(config.nodes), 'host')})", *notes):
        print(line, file=sys.stderr, flush=True)
    return config


def foreign_overrides(options: LaunchOptions, foreign: Foreign) -> tuple[tuple[Override, ...], tuple[str, ...]]:
    """Return the config overrides of ``options`` for a file of another launcher, and notes for the user.

    An option with another meaning in that launcher, such as a batch size per process, is converted.
    """
    from launcher.config.loader import overridden, world_size

    overrides, notes = list(options.overrides), [f"note: {note}" for note in foreign.notes]
    flags = options.flags
    if flags.master_addr in ("0.0.0.0", "localhost", "127.0.0.1"):
        overrides = [each for each in overrides if each != ("run.master_addr", flags.master_addr)]
        notes.append(
            f"note: --master_addr {flags.master_addr} cannot be reached from other hosts; preflight chooses an address"
        )
    if foreign.batch_per_process and flags.batch_size is not None and flags.batch_size.isdecimal():
        overrides = [each for each in overrides if each != ("train.batch_size", flags.batch_size)]
        tree = overridden(options.config, overrides, foreign, lambda problem: None)
        processes = world_size(tree, options.choose)
        whole = int(flags.batch_size) * max(1, processes)
        overrides.append(("train.batch_size", whole))
        notes.append(
            f"note: --batch_size {flags.batch_size} is per process in that launcher; "
            f"the global batch of {processes} processes is {whole}"
        )
    return tuple(overrides), tuple(notes)


def choose_run_id(config: ClusterConfig, wanted: str | None) -> str:
    """Return the run id ``wanted``; None: a new one, ``<name>-YYYYmmdd-HHMMSS-xxxx``.

    Raises UsageError if ``wanted`` is invalid or in use; the id of a launch that started no process is free again.
    """
    if wanted is None:
        name = re.sub(r"[^A-Za-z0-9_-]+", "-", config.name).strip("-_")[:40] or "run"
        return f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    check_run_id(wanted, "--run-id")
    folder = run_folder(config, wanted)
    mine = config.slurm_job is not None and waits_for_job(folder, config.slurm_job)
    if folder.exists() and not mine and not never_ran(folder):
        raise UsageError(f"--run-id {wanted}: {folder} exists already; choose another id")
    return wanted


def check_run_id(wanted: str, option: str) -> None:
    """Raise UsageError if ``wanted``, the value of ``option``, is not a valid run id."""
    if not is_run_id(wanted):
        raise UsageError(
            f"{option} {wanted!r}: use up to 80 letters, digits, `-` and `_`, beginning with a letter or digit"
        )


def run_folder(config: ClusterConfig, run_id: str) -> Path:
    return Path(config.run.runs_dir).expanduser() / run_id
