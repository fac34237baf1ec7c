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
from launcher.run.options import LaunchOptions


@dataclass(frozen=True)
class PreparedResume:
    """A launch that goes on from an earlier run."""

    options: LaunchOptions
    cwd: Path | None  #: where the own command's files are looked up; None: here
    told: str  #: from what it goes on
    notes: tuple[str, ...]


def needs_no_node(found: FoundRun) -> bool:
    """Whether the run is over (or never began) and all it left is here."""
    return known_without_nodes(found)


def prepare(run: OpenRun, runs_dir: Path, options: LaunchOptions) -> PreparedResume:
    """What to launch, the checkpoint fetched if need be. ``options``: those given now; its config is not looked at.

    Raises UsageError while the run still goes on, and when there is nothing left to do.
    """
    found = run.found
    if found.plan_is_missing:
        raise UsageError(found.without_plan)
    if found.plan is not None and found.plan.serve_only:
        raise UsageError(
            f"{found.run_id} is a serving cluster, not a training run; `gnnfleet serve --config FILE --name "
            f"{found.run_id}` starts again what is down"
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
        brought = collect_run(run, folder_for(run, runs_dir), views)
        notes = brought.notes
        found = replace(read_folder(brought.folder), launch=found.launch)
    elif found.launch is not None and found.result is None and found.launch.alive():
        raise UsageError(f"run {found.run_id} is still being prepared; `gnnfleet stop {found.words}` ends that")
    return _again(found, options, notes)


def _again(found: FoundRun, options: LaunchOptions, notes: tuple[str, ...]) -> PreparedResume:
    folder = found.folder
    _ = found.needed_config
    assert folder is not None
    own = options.own_command or own_command_of(found)
    _something_is_left(found, options, own)
    checkpoint = folder / "checkpoints" / "last.pt"
    overrides: tuple[str, ...] = (f"run.runs_dir={folder.parent.absolute()}",)
    told = f"run {found.run_id} left no checkpoint, so this one begins where that one began"
    if own:
        told = f"run {found.run_id} again: its own command finds its own way to go on"
    elif checkpoint.is_file():
        overrides += (f"train.resume={checkpoint.absolute()}",)
        told = f"going on from {checkpoint}"
    made = replace(
        options,
        config=folder / "config.yml",
        overrides=(*overrides, *options.overrides),
        own_command=own,
        resumed_from=found.run_id,
    )
    cwd = Path(found.launch.cwd) if own and found.launch else None
    return PreparedResume(made, cwd, told, notes)


def _something_is_left(found: FoundRun, options: LaunchOptions, own: Sequence[str]) -> None:
    """A run that has done all its epochs needs to be told more of them."""
    done = found.result is not None and found.result["state"] == "done"
    if done and not own and not any(text.startswith("train.epochs=") for text in options.overrides):
        epochs = found.needed_config.train.epochs
        raise UsageError(
            f"run {found.run_id} is done with all its {epochs} epochs; to train further give more: "
            f"gnnfleet resume {found.run_id} --epochs {2 * epochs}"
        )


def own_command_of(found: FoundRun) -> tuple[str, ...]:
    """The own command it ran; () for the bundled trainer. Raises UsageError where only its launcher knows."""
    if found.launch is not None:
        return found.launch.own_command
    if not found.own:
        return ()
    raise UsageError(
        f"run {found.run_id} ran an own command and was launched on another machine; "
        f"resume it there, or give the command again: gnnfleet resume {found.words} -- python …"
    )


def go_to(cwd: Path | None) -> None:
    """Change to the folder from which the own command was launched; its files are named from there."""
    if cwd is None:
        return
    try:
        os.chdir(cwd)
    except OSError as error:
        raise FleetError(
            f"the run was launched in {cwd}, which cannot be entered any more ({error.strerror}); "
            "launch anew from where your command's files are"
        ) from None
