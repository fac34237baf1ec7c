"""What a launch was asked for on the command line, and the choice of a run id."""

from __future__ import annotations

import re
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.config.consistency import is_run_id
from launcher.config.schema import ClusterConfig
from launcher.errors import UsageError
from launcher.report.launch_file import LaunchFile, Stage, waits_for_job
from launcher.report.run_folder import never_ran
from launcher.yaml_tree import Override, split_override

if TYPE_CHECKING:
    from launcher.config.importers.base import Flags


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
    flags: Flags | None = None  #: options of other launchers, given with their files

    def choose(self, config: ClusterConfig) -> ClusterConfig:
        """Return ``config`` with the hosts and devices selected by ``--include`` and ``--exclude``.

        Raises UsageError for options that do not fit.
        """
        from launcher.config.host_filter import filtered

        if (self.wait is not None or self.nodes_needed) and config.in_job_steps:
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
