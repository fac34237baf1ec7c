"""The folders of runs on this machine: the registry of runs, and what a folder says about its run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.config.loader import load_config
from launcher.config.resolve import ResolvedConfig, resolve_saved
from launcher.errors import ConfigError, FleetError, UsageError
from launcher.files import write_whole
from launcher.node.json_reader import loads, record_in, records
from launcher.node.json_records import EVENT, REPORT, TRACKED
from launcher.plan.model import LaunchPlan
from launcher.plan.serialize import read_run
from launcher.report.launch_file import BEFORE_NODES, NAME, LaunchFile

_MARKS = (NAME, "run.json")  # a folder with one of these files is a run folder


def attempts(folder: Path) -> list[Path]:
    """Return the run folders of a batch job: ``folder`` of its first start, then the folder of each requeued start."""
    again = sorted(folder.parent.glob(f"{folder.name}-r[0-9]*"), key=lambda path: (len(path.name), path.name))
    return [folder, *(path for path in again if path.name[len(folder.name) + 2 :].isdecimal())]


def register(run_id: str, folder: Path) -> str:
    """Add a run to the registry of runs on this machine; return '', or a warning if this failed."""
    entry = {"folder": str(folder.absolute())}
    try:
        write_whole(registry_folder() / f"{run_id}.json", json.dumps(entry) + "\n")
    except OSError as error:
        where = error.filename or registry_folder()
        return (
            f"this run could not be registered, so commands find it only from this directory: {where}: {error.strerror}"
        )
    return ""


def registry_folder() -> Path:
    """Return the folder of the registry of runs: ``${XDG_STATE_HOME:-~/.local/state}/gnnfleet/runs``.

    If the user has no home folder, returns a path that does not exist.
    """
    state = os.path.expanduser(os.environ.get("XDG_STATE_HOME") or "~/.local/state")
    return Path("/nonexistent" if state.startswith("~") else state) / "gnnfleet" / "runs"


def known_runs(runs_dirs: Iterable[Path]) -> list[Path]:
    """Return the folders of all runs in the registry and in ``runs_dirs``, newest first, each once."""
    folders: list[Path] = []
    for entry in sorted(registry_folder().glob("*.json")):
        with suppress(ValueError, KeyError, TypeError):  # a damaged file must not hide the other runs
            folders.append(Path(loads(_text(entry))["folder"]))
    folders += [folder for top in runs_dirs if top.is_dir() for folder in top.iterdir()]
    unique = {folder.resolve(): folder for folder in folders if _is_run_folder(folder)}
    return sorted(unique.values(), key=began, reverse=True)


def _is_run_folder(folder: Path) -> bool:
    """Return whether a launch or ``gnnfleet collect`` created the folder."""
    return any(os.path.isfile(folder / mark) for mark in _MARKS)  # False also without permission


def never_ran(folder: Path) -> bool:
    """Whether the launch ended before any process of the run started, so that its run id is free again."""
    try:
        launch = LaunchFile.read(folder)
    except FleetError:
        return False
    if launch is None:
        return False
    if launch.stage in BEFORE_NODES:
        return launch.alive() is False
    events = records(EVENT, _text(folder / "events.jsonl").splitlines())
    aborted = next((event.get("stage") for event in events if event["kind"] == "given-up"), None)
    return launch.stage == "end" and aborted in BEFORE_NODES


def clear(folder: Path) -> None:
    """Remove the files of a launch that ended before any process of the run started (``never_ran``)."""
    for path in (folder / name for name in ("result.json", "events.jsonl", "run.json")):
        if path.is_file():
            path.unlink()


def began(folder: Path) -> float:
    """Return when the run was launched or, without ``launch.json``, when its oldest file was written."""
    try:
        launch = LaunchFile.read(folder)
    except (FleetError, OSError):
        launch = None
    return launch.started if launch else min(_mtimes(folder), default=0.0)


def last_sign(folder: Path) -> float:
    """Return when the launcher last wrote a file of the run folder."""
    return max(_mtimes(folder), default=0.0)


def _mtimes(folder: Path) -> list[float]:
    names = (*_MARKS, "events.jsonl", "config.yml")
    return [path.stat().st_mtime for path in (folder / name for name in names) if path.is_file()]


@dataclass(frozen=True)
class FoundRun:
    """What this machine knows about a run. A field is None if it is unknown here."""

    run_id: str
    folder: Path | None  #: run folder on this machine; None: launched elsewhere and never collected here
    launch: LaunchFile | None
    plan: LaunchPlan | None  #: None if its launcher ended before it made a plan
    config: ResolvedConfig | None
    result: Mapping[str, Any] | None  #: result.json on this machine
    config_given: Path | None = None  #: the cluster file on whose hosts the run was found

    @property
    def words(self) -> str:
        """Arguments that select this run in a command that is suggested to the user."""
        return self.run_id + (f" --config {self.config_given}" if self.config_given and not self.folder else "")

    @property
    def own(self) -> bool:
        """Whether the run executes the user's own command instead of the bundled trainer; False if unknown."""
        if self.launch is not None:
            return bool(self.launch.own_command)
        return self.plan is not None and bool(self.plan.own_command)

    @property
    def plan_is_missing(self) -> bool:
        """Whether the run may have processes on its nodes, but its plan is not on this machine."""
        began = self.launch is None or self.launch.stage in ("start", "train", "collect")
        return self.plan is None and self.result is None and began

    def without_plan(self, command: str = "status") -> str:
        """Return the error message for a run whose plan is not on this machine, with the ``command`` that helps."""
        return (
            f"run {self.run_id}: {self.folder} has no run.json, so the state of its nodes cannot be determined; the "
            f"nodes have copies, so give the cluster file: gnnfleet {command} {self.run_id} --config cluster.yml"
        )

    @property
    def needed_plan(self) -> LaunchPlan:
        """The plan of the run. Raises FleetError if this machine does not have it."""
        if self.plan_is_missing:
            raise FleetError(self.without_plan())
        if self.plan is None and self.result is None and self.launch is not None and self.launch.slurm_job:
            raise FleetError(
                f"run {self.run_id} has started nothing on its nodes yet; see `gnnfleet status {self.run_id}`, and the "
                f"output of Slurm job {self.launch.slurm_job} in {self.folder}/slurm.log"
            )
        if self.plan is None:
            raise FleetError(
                f"run {self.run_id} started nothing on its nodes: its launcher ended before it had made a plan; "
                f"see `gnnfleet status {self.run_id}`"
            )
        return self.plan

    @property
    def needed_config(self) -> ResolvedConfig:
        """The config of the run. Raises FleetError if this machine does not have it."""
        if self.config is None:
            raise FleetError(
                f"run {self.run_id}: {self.folder} has no config.yml, so its hosts are not known; give --config"
            )
        return self.config


def known_here(run_id: str, runs_dirs: Sequence[Path]) -> Path | None:
    """Return the folder of the run ``run_id`` on this machine; None if there is none."""
    return next((folder for folder in known_runs(runs_dirs) if folder.name == run_id), None)


def read_folder(folder: Path) -> FoundRun:
    """Read a run folder. Raises FleetError if a file in it is damaged."""
    launch = LaunchFile.read(folder)
    run_id = launch.run_id if launch else folder.name
    plan, config, path = read_plan(folder), None, folder / "config.yml"
    if path.is_file():
        try:
            config = resolve_saved(load_config(path, ("run.files=[]",)))  # the files may be gone
        except ConfigError as error:
            raise FleetError(f"the config that run {folder.name} used cannot be read:\n{error}") from None
    return FoundRun(run_id, folder, launch, plan, config, read_result(folder))


def resumed_runs(found: FoundRun, runs_dirs: Sequence[Path]) -> Iterator[FoundRun]:
    """Yield the runs on this machine that a run resumed, the newest first, as far as their folders are sound.

    ``runs_dirs``: folders in which to look for them, beside those of the runs.
    """
    folders = [found.folder] if found.folder else []
    while found.launch and found.launch.resumed_from:
        places = [*(folder.parent for folder in folders), *runs_dirs]
        folder = known_here(found.launch.resumed_from, places)
        if folder is None or folder in folders:
            return
        try:
            found = read_folder(folder)
        except FleetError:  # must not prevent a report on the later runs
            return
        folders.append(folder)
        yield found


def read_plan(folder: Path) -> LaunchPlan | None:
    """Read ``run.json`` in ``folder``; None if there is none. Raises FleetError if the file is damaged."""
    text = _text(folder / "run.json")
    try:
        return read_run(text) if text else None
    except FleetError as error:
        raise FleetError(
            f"{folder}: {error}. The nodes have copies of run.json: delete it here, and give the cluster file: "
            f"gnnfleet status {folder.name} --config cluster.yml"
        ) from None


def read_result(folder: Path) -> dict[str, Any] | None:
    """Read ``result.json`` in ``folder``; None if there is none. Raises FleetError if the file is damaged."""
    text = _text(folder / "result.json")
    if not text:
        return None
    try:
        return REPORT(loads(text))
    except ValueError as error:
        raise FleetError(
            f"{folder / 'result.json'} is damaged ({error}); delete it, then `gnnfleet collect {folder.name}`"
            " writes a new one"
        ) from None


def given_folder(folder: Path) -> Path:
    if _is_run_folder(folder):
        return folder
    what = "is not a run folder (no launch.json or run.json)" if folder.is_dir() else "is not a folder"
    raise UsageError(f"{folder} {what}; `gnnfleet runs` lists the runs known here")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    except FileNotFoundError:  # deleted meanwhile
        return ""


Tracked = Mapping[str, str]  #: ``tracker``, ``id``, ``url`` ('' without a page), ``path`` (of files; '' without)


def tracked_runs(folder: Path) -> list[Tracked]:
    """Return where each tracker shows the run in ``folder``; [] if it has none."""
    found: list[Tracked] = []
    for path in sorted((folder / "track").glob("*.json")):
        state = record_in(TRACKED, str(path))
        if state and state["id"]:
            files = str(folder / "track" / state["folder"]) if state["folder"] else ""
            found.append({"tracker": path.stem, "id": state["id"], "url": state["url"], "path": files})
    return found


def tracked_words(run: Tracked) -> str:
    """Return a tracker's run in one line: ``mlflow: run 3fa2, http://mlflow:5000/#/…``."""
    place = run["url"] or run["path"]
    if run["tracker"] == "wandb" and not run["url"]:  # a resumed run has several folders
        place = f"offline; to upload it: wandb sync --id {run['id']} {Path(place).parent}/offline-run-*"
    return f"{run['tracker']}: run {run['id']}, {place}"
