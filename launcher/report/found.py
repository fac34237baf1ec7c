"""Which run is meant: by id, by a part of an id, by its folder, or the newest; and what is known of it here."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.config.loader import load_config
from launcher.config.schema import ClusterConfig
from launcher.errors import ConfigError, FleetError, UsageError
from launcher.plan.build import LaunchPlan
from launcher.plan.serialize import read_run
from launcher.report.run_folder import LaunchFile, is_run_folder, known_runs, registry_folder

_LISTED = 6


@dataclass(frozen=True)
class FoundRun:
    """A run, and what this machine knows of it."""

    run_id: str
    folder: Path | None  #: its run folder here; None: it was launched elsewhere and never collected here
    launch: LaunchFile | None
    plan: LaunchPlan | None  #: None when its launcher ended before there was one
    config: ClusterConfig | None
    result: Mapping[str, Any] | None  #: result.json here
    config_given: Path | None = None  #: the cluster file by whose hosts it was found

    @property
    def words(self) -> str:
        """The run as the commands we suggest name it."""
        return self.run_id + (f" --config {self.config_given}" if self.config_given and not self.folder else "")

    @property
    def own(self) -> bool:
        """Whether it runs an own command, as far as can be told from here."""
        if self.launch is not None:
            return bool(self.launch.own_command)
        return self.plan is not None and self.plan.own_command

    @property
    def plan_is_missing(self) -> bool:
        """Whether it may have got to its nodes although there is no plan here: deleted, or of an older version."""
        began = self.launch is None or self.launch.stage in ("start", "train", "collect")
        return self.plan is None and self.result is None and began

    @property
    def without_plan(self) -> str:
        """That nothing can be said of such a run, and what helps."""
        return (
            f"run {self.run_id}: {self.folder} holds no run.json, so what runs on its nodes cannot be told from here; "
            f"they have copies, so give the cluster file: gnnfleet status {self.run_id} --config cluster.yml"
        )

    @property
    def needed_plan(self) -> LaunchPlan:
        """The plan; raises FleetError where there is none."""
        if self.plan_is_missing:
            raise FleetError(self.without_plan)
        if self.plan is None:
            raise FleetError(
                f"run {self.run_id} never got to its nodes: its launcher ended before there was a plan; "
                f"`gnnfleet status {self.run_id}` tells more"
            )
        return self.plan

    @property
    def needed_config(self) -> ClusterConfig:
        """The config with the logins; raises FleetError where there is none."""
        if self.config is None:
            raise FleetError(
                f"run {self.run_id}: {self.folder} holds no config.yml, so its hosts are not known; give --config"
            )
        return self.config


def find_run(run: str | None, runs_dirs: Sequence[Path]) -> FoundRun:
    """The run meant by ``run`` (None: the newest); raises UsageError when there is none, or several."""
    if run is not None and "/" in run.rstrip("/"):
        return read_folder(_given_folder(Path(run).expanduser()))
    known = known_runs(runs_dirs)
    if not known:
        raise UsageError(_none_known(run, runs_dirs))
    if run is None:
        return read_folder(known[0])
    wanted = run.rstrip("/")
    how, names = matching([folder.name for folder in known], wanted)
    close = [folder for folder in known if folder.name in names]
    if len(close) == 1:
        return read_folder(close[0])
    if not close:
        raise UsageError(f"no run `{run}` is known here; the newest are {_names(known)} (`gnnfleet runs` lists all)")
    if not how:
        raise UsageError(f"`{run}` is the name of several run folders; give one by its path: {_paths(close)}")
    raise UsageError(
        f"`{run}` {how} the ids of {len(close)} runs; give more of it, or its last letters. Newest:\n{_listed(close)}"
    )


def matching(ids: Sequence[str], wanted: str) -> tuple[str, list[str]]:
    """Those of ``ids`` that are ``wanted``, else that begin with it, else end, else hold it; and which, as a verb: it
    ``begins``, ``ends``, ``is in`` them, '' where it is all of one."""
    ways: tuple[tuple[str, Callable[[str], bool]], ...] = (
        ("", lambda one: one == wanted),
        ("begins", lambda one: one.startswith(wanted)),
        ("ends", lambda one: one.endswith(wanted)),
        ("is in", lambda one: wanted in one),
    )
    found = ((how, [one for one in ids if fits(one)]) for how, fits in ways)
    return next(((how, names) for how, names in found if names), ("", []))


def known_here(run_id: str, runs_dirs: Sequence[Path]) -> Path | None:
    """The run's folder on this machine, if there is one."""
    return next((folder for folder in known_runs(runs_dirs) if folder.name == run_id), None)


def read_folder(folder: Path) -> FoundRun:
    """What a run folder tells; raises FleetError when a file in it is damaged."""
    launch = LaunchFile.read(folder)
    run_id = launch.run_id if launch else folder.name
    return FoundRun(run_id, folder, launch, read_plan(folder), read_config_of(folder), read_result(folder))


def read_plan(folder: Path) -> LaunchPlan | None:
    """The folder's ``run.json``; None where there is none. Raises FleetError when it is damaged."""
    text = _text(folder / "run.json")
    try:
        return read_run(text) if text else None
    except FleetError as error:
        raise FleetError(
            f"{folder}: {error}. Its nodes have copies: delete this one, and give the cluster file: "
            f"gnnfleet status {folder.name} --config cluster.yml"
        ) from None


def read_result(folder: Path) -> dict[str, Any] | None:
    """The folder's ``result.json``; None where there is none. Raises FleetError when it is damaged."""
    text = _text(folder / "result.json")
    if not text:
        return None
    try:
        values = json.loads(text)
        return {"nodes": [], "notes": [], "seconds": 0.0, **values, "state": str(values["state"])}
    except (ValueError, KeyError, TypeError) as error:
        raise FleetError(
            f"{folder / 'result.json'} is damaged ({error}); delete it, `gnnfleet collect {folder.name}` makes it anew"
        ) from None


def read_config_of(folder: Path) -> ClusterConfig | None:
    """The config as the run has used it; files it sent need not be on this machine any more."""
    path = folder / "config.yml"
    if not path.is_file():
        return None
    try:
        return load_config(path, ("run.files=[]",))
    except ConfigError as error:
        raise FleetError(f"the config that run {folder.name} has used cannot be read any more:\n{error}") from None


def _given_folder(folder: Path) -> Path:
    if is_run_folder(folder):
        return folder
    what = "holds no run (no launch.json or run.json)" if folder.is_dir() else "is no folder"
    raise UsageError(f"{folder} {what}; `gnnfleet runs` lists the runs known here")


def _none_known(run: str | None, runs_dirs: Sequence[Path]) -> str:
    places = ", ".join(map(str, [*runs_dirs, registry_folder()]))
    wanted = f"run `{run}` is not" if run else "no run is"
    return (
        f"{wanted} known on this machine (looked in {places}); "
        "for one that was launched elsewhere give its cluster file: --config cluster.yml"
    )


def _names(folders: Sequence[Path]) -> str:
    more = ", …" if len(folders) > _LISTED else ""
    return ", ".join(folder.name for folder in folders[:_LISTED]) + more


def _listed(folders: Sequence[Path]) -> str:
    """A line for each of the newest, with its state."""
    from launcher.report.run_history import entry_of

    newest = folders[:_LISTED]
    width = max(len(folder.name) for folder in newest)
    lines = [f"  {folder.name:{width}}  {entry_of(folder).state}" for folder in newest]
    return "\n".join([*lines, *(["  …"] if len(folders) > _LISTED else [])])


def _paths(folders: Sequence[Path]) -> str:
    return ", ".join(str(folder) for folder in folders[:_LISTED])


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""
