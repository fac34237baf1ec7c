"""From the words of a command to the run they mean, with lines to its nodes where those are needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.config.loader import load_config
from launcher.manage.discover import discovered
from launcher.manage.node_views import OpenRun, opened
from launcher.report.found import FoundRun, find_run, known_here, read_folder


@dataclass(frozen=True)
class Choice:
    """Which run, as the command line says it."""

    run: str | None = None  #: id, part of one, or run folder; None: the newest
    config: Path | None = None  #: cluster file of a run that was launched elsewhere
    sets: tuple[str, ...] = ()  #: key=value for that file
    runs_dir: str | None = None

    @property
    def runs_dirs(self) -> list[Path]:
        return [Path(self.runs_dir or "runs").expanduser()]


@contextmanager
def chosen(choice: Choice, *, offline: Callable[[FoundRun], bool] = lambda found: False) -> Iterator[OpenRun]:
    """The run, with lines to its nodes; without any where ``offline`` says that they are not needed.

    Raises UsageError when there is no such run, FleetError when it has no plan or no node can be reached.
    """
    elsewhere = choice.config is not None and (choice.run is None or (_is_id(choice.run) and not _planned_here(choice)))
    if not elsewhere:
        found = find_run(choice.run, choice.runs_dirs)
        if offline(found):
            yield OpenRun(found, {})
            return
        with opened(found) as run:
            yield run
        return
    assert choice.config is not None
    config = load_config(choice.config, ("run.files=[]", *_any_graph(choice.config), *choice.sets))
    with discovered(config, choice.config, choice.run) as run:
        yield replace(run, found=_with_folder(run.found, choice))


def _any_graph(config: Path) -> tuple[str, ...]:
    """A bare host list is enough to look for runs on its hosts."""
    from launcher.config.importers.detect import read_foreign

    foreign = read_foreign(config)
    return ("data.dataset=synthetic",) if foreign and "data" not in foreign.tree.items else ()


def _planned_here(choice: Choice) -> bool:
    """Whether this machine has the plan of the run."""
    folder = known_here(str(choice.run), choice.runs_dirs)
    return folder is not None and (folder / "run.json").is_file()


def _with_folder(found: FoundRun, choice: Choice) -> FoundRun:
    """What this machine knows of a run that was found on its hosts."""
    folder = known_here(found.run_id, choice.runs_dirs)
    if folder is None:
        return found
    here = read_folder(folder)
    return replace(found, folder=folder, launch=here.launch, result=here.result)


def _is_id(run: str) -> bool:
    return "/" not in run.rstrip("/")
