"""``gnnfleet resume``: launches a run again from its newest checkpoint."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.errors import FleetError, UsageError
from launcher.manage.collect_run import collect_run, folder_for
from launcher.manage.node_views import OpenRun
from launcher.node.json_reader import records
from launcher.node.json_records import METRIC
from launcher.plan.own_script import own_command_files
from launcher.report.run_folder import FoundRun, began, read_folder
from launcher.report.verdict import known_without_nodes, progress_words
from launcher.run.config_of_options import SHORT_KEYS, TRAINER_ONLY
from launcher.run.options import LaunchOptions
from launcher.yaml_tree import Override, split_override

_EPOCH_LINE = re.compile(rb'"kind":\s*"(checkpoint|epoch)"')


@dataclass(frozen=True)
class PreparedResume:
    options: LaunchOptions
    cwd: Path | None  #: working directory for the own command; None: the current one
    message: str  #: for the user: from which checkpoint the launch resumes
    notes: tuple[str, ...]


def prepare(run: OpenRun, runs_dir: Path, options: LaunchOptions) -> PreparedResume:
    """Return the launch that resumes a run; first collects the run's files if they are not on this machine.

    ``options``: options of ``gnnfleet resume``, without a config file. Raises UsageError if the run is still running or
    has nothing left to train.
    """
    found = run.found
    if found.plan_is_missing:
        raise UsageError(found.without_plan())
    if found.plan is not None and found.plan.serve_only:
        raise UsageError(
            f"{found.run_id} is a serving cluster, not a training run; `gnnfleet serve --config FILE --name "
            f"{found.run_id}` starts its stopped servers again"
        )
    notes: tuple[str, ...] = ()
    if not known_without_nodes(found):
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
    return prepare_offline(found, options, notes)


def prepare_offline(found: FoundRun, options: LaunchOptions, notes: tuple[str, ...] = ()) -> PreparedResume:
    """Return the launch that resumes a run whose files are on this machine.

    ``options`` and the errors raised are as in ``prepare``.
    """
    folder = found.folder
    _ = found.needed_config
    assert folder is not None
    own = options.own_command or (found.launch.own_command if found.launch is not None else ())
    if not own and found.own:  # a run that this machine did not launch
        raise UsageError(
            f"the command of run {found.run_id} is known only to the machine that launched it; "
            f"resume it there, or give the command again: gnnfleet resume {found.words} -- python …"
        )
    if own and not options.own_command:
        # The user's own command does not read trainer settings.
        keys = {split_override(override)[0] for override in options.overrides}
        if given := sorted(keys & {SHORT_KEYS[name] for name in TRAINER_ONLY}):
            raise UsageError(
                f"{', '.join(given)}: the run's own command does not read settings of the bundled trainer; give the "
                f"command with its new options: gnnfleet resume {found.words} -- python …"
            )
    _check_not_done(found, options, own)
    checkpoint = folder / "checkpoints" / "last.pt"
    overrides: tuple[Override, ...] = (("run.runs_dir", str(folder.parent.absolute())),)
    if found.config is not None and found.config.slurm_job:
        overrides += (("slurm_job", None),)  # the nodes are those of the job that resumes the run
    message = f"run {found.run_id} left no checkpoint; the new run starts from the beginning"
    if own and not checkpoint.is_file():
        message += ", unless its command reads files of its own (StepLog.restore saves checkpoints)"
    elif checkpoint.is_file():
        overrides += (("train.resume", str(checkpoint.absolute())),)
        message = f"resuming from {checkpoint}"
    resumed = replace(
        options,
        config=folder / "config.yml",
        overrides=(*overrides, *options.overrides),
        own_command=own,
        resumed_from=found.run_id,
    )
    sends_files = own or ":" in found.needed_config.train.model  # of the folder of the first launch
    cwd = Path(found.launch.cwd) if sends_files and found.launch else None
    if cwd is not None and not own:
        # The files of a model class that differ from those that are kept with the run.
        kept = folder / "files"
        names = sorted(path.relative_to(kept) for path in kept.rglob("*.py"))
        both = (name for name in names if (cwd / name).is_file())
        changed = [str(name) for name in both if (cwd / name).read_bytes() != (kept / name).read_bytes()]
        if changed:
            notes += (f"{', '.join(changed)}: changed since run {found.run_id}; the new version is sent",)
    return PreparedResume(resumed, cwd, message, notes)


def _check_not_done(found: FoundRun, options: LaunchOptions, own: Sequence[str]) -> None:
    """Raise UsageError if there is nothing left to train.

    A run of the bundled trainer is done if it has trained all epochs that ``options`` ask for. A run of the user's
    command ``own`` is done if it succeeded, and neither the command nor its files have changed since.
    """
    result = found.result or {}
    done, epochs = result.get("state") == "done", _epochs_trained(found)
    if own:
        if done and not options.own_command and not options.overrides and not _files_changed(found, own):
            raise UsageError(
                f"run {found.run_id} is done{f' at epoch {epochs}' if epochs else ''}, and its command would find "
                f"nothing to train; to train on, give the command with more epochs: "
                f"gnnfleet resume {found.words} -- {shlex.join(own)} …"
            )
        return
    patience = any(split_override(override)[0].startswith("train.early_stop") for override in options.overrides)
    if done and not patience and (why := result["metrics"].get("ended_early")):
        raise UsageError(
            f"run {found.run_id} ended early at epoch {epochs}, as {why}; to train on, give a larger patience: "
            f"gnnfleet resume {found.words} --set train.early_stop.patience=…"
        )
    given = [text for key, text in map(split_override, options.overrides) if key == "train.epochs"]
    asked = int(given[-1]) if given and given[-1].strip().isdecimal() else 0
    wanted = asked or found.needed_config.train.epochs
    if wanted < epochs or (wanted == epochs and done):
        state = "is done at" if done else "has trained"
        few = f", so {wanted} epochs leave nothing to train" if wanted < epochs else ""
        raise UsageError(
            f"run {found.run_id} {state} epoch {epochs}{few}; to train on, give a larger number: "
            f"gnnfleet resume {found.words} --epochs {2 * epochs}"
        )


def _epochs_trained(found: FoundRun) -> int:
    """Return the number of epochs that the run has trained, including those of the runs that it resumed."""
    assert found.folder is not None
    result = found.result or {}
    if result.get("state") == "done":
        recorded = result["metrics"].get("epochs") or (0 if found.own else found.needed_config.train.epochs)
        if isinstance(recorded, int) and recorded:
            return recorded
    path = found.folder / "metrics.jsonl"
    if not path.is_file():
        return 0
    with path.open("rb") as file:
        lines = [line for line in file if _EPOCH_LINE.search(line)]  # without the step lines, of which there are many
    return max((line["epoch"] for line in records(METRIC, lines) if "epoch" in line), default=0)


def _files_changed(found: FoundRun, own: Sequence[str]) -> bool:
    """Return whether a file that is sent for the user's own command has changed since the launch or is missing."""
    assert found.folder is not None and found.launch is not None
    cwd, began_at = Path(found.launch.cwd), began(found.folder)
    try:
        sent = own_command_files(own, found.needed_config.run.files, cwd).files
        return any(Path(file.source).stat().st_mtime > began_at for file in sent)
    except (UsageError, OSError):
        return True  # the launch reports what is missing


def go_to(cwd: Path | None) -> None:
    """Change to ``cwd``, the directory in which the user's own command was launched."""
    if cwd is None:
        return
    try:
        os.chdir(cwd)
    except OSError as error:
        raise FleetError(
            f"the run was launched in {cwd}, which cannot be entered ({error.strerror}); "
            "use `gnnfleet launch` in the folder that has your command's files"
        ) from None
