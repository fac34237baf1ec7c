"""The config that command-line options produce: with a file of gnnfleet or of another launcher."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from launcher.config.importers.base import (
    FLAG_KEYS,
    NODES_ONLY,
    Flags,
    Foreign,
    dataset_overrides,
    environment_overrides,
)
from launcher.config.schema import ClusterConfig
from launcher.errors import UsageError
from launcher.hostlist import split_list
from launcher.run.options import LaunchOptions
from launcher.text import count, duration
from launcher.yaml_tree import Override

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


def overrides_of(values: Mapping[str, Any], sets: Sequence[str]) -> tuple[Override, ...]:
    """Return the config overrides of the command line; later ones win.

    ``--nodes`` and ``--dataset`` come first, then ``--set``, then all other options. ``values``: values of all options,
    by name. ``sets``: the values of ``--set``. Raises UsageError for an option with an empty value.
    """
    nodes: tuple[Override, ...] = ()
    if (given := values.get("nodes")) and values["config"] != NODES_ONLY:  # they replace the file's
        local = given.isdecimal()
        nodes = (("nodes", given if local else split_list(given)), ("transport", "local" if local else "ssh"))
    environment = environment_overrides(values.get("venv"), values.get("conda"))
    folders = Flags(
        workspace=values.get("workspace"),
        part_config=values.get("part_config"),
        dataset_root_dir=values.get("dataset_root_dir"),
    )
    parts, name = folders.parts, values.get("dataset")
    if parts is not None and (parts.labelled or not name):  # with a dataset only if the parts need none for labels
        dataset = parts.overrides
    else:
        dataset = dataset_overrides(name) if name else ()
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
    flags = options.flags or Flags()
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
