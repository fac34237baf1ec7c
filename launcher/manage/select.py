"""Finds the run that a command means, on this machine or on the hosts of a cluster file."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.command import Command
from launcher.config.loader import load_config
from launcher.config.resolve import resolve_saved
from launcher.config.schema import ClusterConfig, NodeConfig
from launcher.errors import FleetError, TransportError, UsageError
from launcher.manage.node_views import OpenRun, opened
from launcher.plan.model import LaunchPlan, NodePlan
from launcher.plan.serialize import read_run
from launcher.report.run_folder import FoundRun, known_here, read_folder
from launcher.report.run_history import find_run, matching
from launcher.transport import close_all, connect_all
from launcher.transport.base import Transport
from launcher.transport.fanout import on_nodes

_TIMEOUT = 20.0

_LISTED = 6

#: $1 a pattern of run.json files; a line of mtime and path for each.
_LIST = 'compgen -G "${1/#\\~/$HOME}" | while IFS= read -r file; do stat -c "gnnfleet-run %Y %n" "$file"; done'

_SEEN = re.compile(
    r"gnnfleet-run (?P<mtime>\d{1,18}) (?P<path>/.*/(?P<run_id>[^/\0]+)/node(?P<node_rank>\d{1,9})/run\.json)$"
)


@dataclass(frozen=True)
class RunFileSeen:
    """A run.json on one of the config's hosts."""

    run_id: str
    node_rank: int  #: in that run
    host: int  #: place among the config's nodes
    path: str
    mtime: int


@contextmanager
def discovered(config: ClusterConfig, given: Path, run: str | None) -> Iterator[OpenRun]:
    """The run ``run`` (id or a part of one; None: the newest) as the config's hosts know it, lines open.

    The hosts may be listed in another order than in the run, and may be more. Raises UsageError when none of
    them has such a run, FleetError when none can be reached.
    """
    attempts = connect_all(config)
    try:
        seen = _look_around(config, attempts)
        run_id = _choose(seen, run, given, attempts)
        plan = _read_plan([one for one in seen if one.run_id == run_id], attempts)
        places = _places(plan, config, [one for one in seen if one.run_id == run_id])
        lines = {k: _line(attempts, places.get(k), plan, k) for k in range(len(plan.nodes))}
        nodes = tuple(_login(config, places.get(k), plan.nodes[k]) for k in range(len(plan.nodes)))
        found = FoundRun(run_id, None, None, plan, resolve_saved(config, nodes), None, given)
        yield OpenRun(found, lines)
    finally:
        close_all(attempts)


def _look_around(config: ClusterConfig, attempts: Mapping[int, Transport | TransportError]) -> list[RunFileSeen]:
    """All run.json files below the hosts' work folders; ``{node_rank}`` may have been any number."""
    lines = {k: line for k, line in attempts.items() if isinstance(line, Transport)}
    if not lines:
        errors = "\n".join(f"  {error}" for error in attempts.values())
        raise FleetError(f"none of the {len(attempts)} hosts can be reached:\n{errors}")

    def ask(k: int) -> list[RunFileSeen]:
        folder = config.nodes[k].workdir.replace("{node_rank}", "*").rstrip("/")
        command = Command(("bash", "-c", _LIST, "bash", f"{folder}/runs/*/node*/run.json"))
        return list(_seen(k, lines[k].run(command, timeout=_TIMEOUT).stdout.decode("utf-8", "replace")))

    answers = on_nodes(lines, ask)
    return [one for k in sorted(answers.values) for one in answers.values[k]]


def _seen(host: int, listing: str) -> Iterator[RunFileSeen]:
    for line in listing.splitlines():
        found = _SEEN.search(line)  # a profile may have printed before it
        if found:
            yield RunFileSeen(found["run_id"], int(found["node_rank"]), host, found["path"], int(found["mtime"]))


def _choose(
    seen: list[RunFileSeen], run: str | None, given: Path, attempts: Mapping[int, Transport | TransportError]
) -> str:
    newest = sorted({one.run_id: one.mtime for one in sorted(seen, key=lambda one: one.mtime)}.items(), key=_mtime)
    ids = [run_id for run_id, _ in reversed(newest)]
    if not ids:
        away = sum(isinstance(line, TransportError) for line in attempts.values())
        more = f"; {away} of them cannot be reached" if away else ""
        raise UsageError(f"no run has left anything on the hosts of {given}{more}; is it the cluster file of that run?")
    if run is None:
        return ids[0]
    how, close = matching(ids, run)
    listed = ", ".join((close or ids)[:_LISTED])
    if not close:
        raise UsageError(f"no run `{run}` on the hosts of {given}; the newest there are {listed}")
    if len(close) > 1:
        raise UsageError(f"`{run}` {how} the ids of {len(close)} runs there ({listed}); give more of it")
    return close[0]


def _mtime(item: tuple[str, int]) -> int:
    return item[1]


def _read_plan(seen: list[RunFileSeen], attempts: Mapping[int, Transport | TransportError]) -> LaunchPlan:
    """The plan, which every node of the run has; the first that can be read."""
    errors: list[str] = []
    for one in seen:
        line = attempts[one.host]
        assert isinstance(line, Transport)
        done = line.run(Command(("cat", one.path)), timeout=_TIMEOUT)
        if done.returncode == 0:
            text = done.stdout.decode("utf-8", "replace")
            try:
                return read_run(text[max(0, text.find('{"format"')) :])  # a profile may have printed before it
            except FleetError as error:
                errors.append(f"{line.target}: {error}")
        else:
            errors.append(f"{line.target}: {done.stderr.decode('utf-8', 'replace').strip()}")
    raise FleetError(f"the plan of run {seen[0].run_id} cannot be read: {'; '.join(errors)}")


def _places(plan: LaunchPlan, config: ClusterConfig, seen: list[RunFileSeen]) -> dict[int, int]:
    """Which of the config's nodes each node of the run is: the one with its login, else one that has its files.

    Files alone do not tell: work folders may be shared, and then every host has all of them.
    """
    logins = {node.login: i for i, node in reversed(list(enumerate(config.nodes)))}
    hosts = {node.host: i for i, node in reversed(list(enumerate(config.nodes)))}
    known = {node.node_rank: logins.get(node.target, hosts.get(node.host)) for node in plan.nodes}
    places = {node_rank: place for node_rank, place in known.items() if place is not None}
    for one in sorted(seen, key=lambda one: one.host in places.values()):  # hosts that are no other node first
        places.setdefault(one.node_rank, one.host)
    return places


def _line(
    attempts: Mapping[int, Transport | TransportError], place: int | None, plan: LaunchPlan, node_rank: int
) -> Transport | TransportError:
    if place is None:
        target = plan.nodes[node_rank].target
        return TransportError("the cluster file does not list it", host=target, node_rank=node_rank)
    return attempts[place]


def _login(config: ClusterConfig, place: int | None, node: NodePlan) -> NodeConfig:
    return config.nodes[place] if place is not None else NodeConfig(host=node.host)


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
