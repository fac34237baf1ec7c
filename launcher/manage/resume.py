"""``gnnfleet resume``: launches a run again from its newest checkpoint."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.errors import FleetError, UsageError
from launcher.manage.collect_run import collect_run, folder_for
from launcher.manage.node_views import OpenRun
from launcher.report.run_folder import FoundRun, read_folder
from launcher.report.verdict import known_without_nodes, progress_words
from launcher.run.options import SHORT_KEYS, TRAINER_ONLY, LaunchOptions


@dataclass(frozen=True)
class PreparedResume:
    """A launch that resumes an earlier run."""

    options: LaunchOptions
    cwd: Path | None  #: working directory for the own command; None: the current one
    told: str  #: message: what the launch resumes from
    notes: tuple[str, ...]


def needs_no_node(found: FoundRun) -> bool:
    """Whether the run can be resumed without asking its nodes: it has ended (or never began), and its files are on this
    machine."""
    return known_without_nodes(found)


def prepare(run: OpenRun, runs_dir: Path, options: LaunchOptions) -> PreparedResume:
    """Return the launch that resumes a run; first collects the run's files if they are not here. ``options``: those of
    the resume command, which has no config file.

    Raises UsageError if the run is still running or has nothing left to train.
    """
    found = run.found
    if found.plan_is_missing:
        raise UsageError(found.without_plan)
    if found.plan is not None and found.plan.serve_only:
        raise UsageError(
            f"{found.run_id} is a serving cluster, not a training run; `gnnfleet serve --config FILE --name "
            f"{found.run_id}` starts its stopped servers again"
        )
    notes: tuple[str, ...] = ()
    if not needs_no_node(found):
        views = run.views()
        alive = [view for view in views.values() if view.alive]
        if alive:
            where = progress_words(found, alive)
            raise UsageError(
                f"run {found.run_id} still runs{f' ({where})' if where else ''}; "
                f"`gnnfleet follow {found.words}` to watch it, or `gnnfleet stop {found.words}` before you resume it"
            )
        collected = collect_run(run, folder_for(run, runs_dir), views)
        notes = collected.notes
        found = replace(read_folder(collected.folder), launch=found.launch)
    elif found.launch is not None and found.result is None and found.launch.alive():
        raise UsageError(f"run {found.run_id} is still being prepared; `gnnfleet stop {found.words}` stops it")
    return _prepared(found, options, notes)


def _prepared(found: FoundRun, options: LaunchOptions, notes: tuple[str, ...]) -> PreparedResume:
    folder = found.folder
    _ = found.needed_config
    assert folder is not None
    own = options.own_command or own_command_of(found)
    if own and not options.own_command:
        _check_no_trainer_options(found, options)
    _check_unfinished(found, options, own)
    checkpoint = folder / "checkpoints" / "last.pt"
    overrides: tuple[str, ...] = (f"run.runs_dir={folder.parent.absolute()}",)
    told = f"run {found.run_id} left no checkpoint; the new run starts from the beginning"
    if own and not checkpoint.is_file():
        told += ", unless its command reads files of its own (StepLog.restore saves checkpoints)"
    elif checkpoint.is_file():
        overrides += (f"train.resume={checkpoint.absolute()}",)
        told = f"resuming from {checkpoint}"
    resumed = replace(
        options,
        config=folder / "config.yml",
        overrides=(*overrides, *options.overrides),
        own_command=own,
        resumed_from=found.run_id,
    )
    cwd = Path(found.launch.cwd) if own and found.launch else None
    return PreparedResume(resumed, cwd, told, notes)


def _check_no_trainer_options(found: FoundRun, options: LaunchOptions) -> None:
    """Raise UsageError if ``options`` change settings of the bundled trainer, which an own command does not read."""
    keys = {text.partition("=")[0] for text in options.overrides}
    if given := sorted(keys & {SHORT_KEYS[name] for name in TRAINER_ONLY}):
        raise UsageError(
            f"{', '.join(given)}: the run's own command does not read settings of the bundled trainer; give the "
            f"command with its new options: gnnfleet resume {found.words} -- python …"
        )


def _check_unfinished(found: FoundRun, options: LaunchOptions, own: Sequence[str]) -> None:
    """Raise UsageError if the run has done all epochs and ``options`` does not set ``train.epochs``."""
    done = found.result is not None and found.result["state"] == "done"
    if done and not own and not any(text.startswith("train.epochs=") for text in options.overrides):
        epochs = found.needed_config.train.epochs
        raise UsageError(
            f"run {found.run_id} has finished all its {epochs} epochs; to train further, give a larger number: "
            f"gnnfleet resume {found.run_id} --epochs {2 * epochs}"
        )


def own_command_of(found: FoundRun) -> tuple[str, ...]:
    """Return the user's own command that the run trains with; () for the bundled trainer. Raises UsageError if this
    machine does not know the command."""
    if found.launch is not None:
        return found.launch.own_command
    if not found.own:
        return ()
    raise UsageError(
        f"run {found.run_id} ran a command of its own and was launched on another machine; "
        f"resume it there, or give the command again: gnnfleet resume {found.words} -- python …"
    )


def go_to(cwd: Path | None) -> None:
    """Change to ``cwd``, the directory in which the user's own command was launched, as the command may contain
    relative paths."""
    if cwd is None:
        return
    try:
        os.chdir(cwd)
    except OSError as error:
        raise FleetError(
            f"the run was launched in {cwd}, which cannot be entered ({error.strerror}); "
            "use `gnnfleet launch` in the folder that has your command's files"
        ) from None
