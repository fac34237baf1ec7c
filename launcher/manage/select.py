"""Finds the run that a command names, on this machine or on the hosts of a cluster file."""

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
from launcher.report.run_history import default_runs, find_run, matching
from launcher.transport import close_all, connect_all
from launcher.transport.base import Transport
from launcher.transport.fanout import on_nodes

_TIMEOUT = 20.0

_LISTED = 6

#: $1: glob pattern of run.json files. Prints mtime and path of each file.
_LIST = 'compgen -G "${1/#\\~/$HOME}" | while IFS= read -r file; do stat -c "gnnfleet-run %Y %n" "$file"; done'

_SEEN = re.compile(
    r"gnnfleet-run (?P<mtime>\d{1,18}) (?P<path>/.*/(?P<run_id>[^/\0]+)/node(?P<node_rank>\d{1,9})/run\.json)$"
)


@dataclass(frozen=True)
class RunFileSeen:
    run_id: str
    node_rank: int  #: in that run
    host: int  #: index into the config's nodes
    path: str
    mtime: int  #: seconds since the epoch


@contextmanager
def discovered(config: ClusterConfig, config_path: Path, run: str | None) -> Iterator[OpenRun]:
    """Find a run on the hosts of ``config`` (read from ``config_path``) and open it.

    ``run``: the run's id or a part of it; None: the newest run. ``config`` may list the run's hosts in another order
    than at launch, and further hosts. Raises UsageError if no run or several runs match, FleetError if no host can be
    reached.
    """
    attempts = connect_all(config)
    try:
        seen = _list_runs(config, attempts)
        run_id = _choose(seen, run, config_path, attempts)
        plan = _read_plan([one for one in seen if one.run_id == run_id], attempts)
        hosts = _match_hosts(plan, config, [one for one in seen if one.run_id == run_id])
        connections = {k: _connection(attempts, hosts.get(k), plan, k) for k in range(len(plan.nodes))}
        nodes = tuple(_node_config(config, hosts.get(k), plan.nodes[k]) for k in range(len(plan.nodes)))
        found = FoundRun(run_id, None, None, plan, resolve_saved(config, nodes), None, config_path)
        yield OpenRun(found, connections)
    finally:
        close_all(attempts)


def _list_runs(config: ClusterConfig, attempts: Mapping[int, Transport | TransportError]) -> list[RunFileSeen]:
    """List the run.json files of all runs in the work folders of the hosts.

    ``{node_rank}`` in the path of a work folder matches any text. Raises FleetError if no host can be reached.
    """
    transports = {k: attempt for k, attempt in attempts.items() if isinstance(attempt, Transport)}
    if not transports:
        errors = "\n".join(f"  {error}" for error in attempts.values())
        raise FleetError(f"none of the {len(attempts)} hosts can be reached:\n{errors}")

    def ask(k: int) -> list[RunFileSeen]:
        folder = config.nodes[k].workdir.replace("{node_rank}", "*").rstrip("/")
        command = Command(("bash", "-c", _LIST, "bash", f"{folder}/runs/*/node*/run.json"))
        return list(_parse_listing(k, transports[k].run(command, timeout=_TIMEOUT).stdout.decode("utf-8", "replace")))

    answers = on_nodes(transports, ask)
    return [one for k in sorted(answers.values) for one in answers.values[k]]


def _parse_listing(host: int, listing: str) -> Iterator[RunFileSeen]:
    for line in listing.splitlines():
        found = _SEEN.search(line)  # skips the output of a shell profile
        if found:
            yield RunFileSeen(found["run_id"], int(found["node_rank"]), host, found["path"], int(found["mtime"]))


def _choose(
    seen: list[RunFileSeen], run: str | None, config_path: Path, attempts: Mapping[int, Transport | TransportError]
) -> str:
    newest = sorted({one.run_id: one.mtime for one in sorted(seen, key=lambda one: one.mtime)}.items(), key=_mtime)
    ids = [run_id for run_id, _ in reversed(newest)]
    if not ids:
        unreachable = sum(isinstance(attempt, TransportError) for attempt in attempts.values())
        more = f"; {unreachable} of them cannot be reached" if unreachable else ""
        raise UsageError(
            f"no run has files on the hosts of {config_path}{more}; "
            "give the cluster file with which the run was launched"
        )
    if run is None:
        return ids[0]
    how, close = matching(ids, run)
    listed = ", ".join((close or ids)[:_LISTED])
    if not close:
        raise UsageError(f"no run `{run}` on the hosts of {config_path}; the newest there are {listed}")
    if len(close) > 1:
        raise UsageError(f"`{run}` {how} the ids of {len(close)} runs there ({listed}); give more of the id")
    return close[0]


def _mtime(item: tuple[str, int]) -> int:
    return item[1]


def _read_plan(seen: list[RunFileSeen], attempts: Mapping[int, Transport | TransportError]) -> LaunchPlan:
    """Return the plan of a run, from the first run.json in ``seen`` that can be read; every node has a copy."""
    errors: list[str] = []
    for one in seen:
        transport = attempts[one.host]
        assert isinstance(transport, Transport)
        done = transport.run(Command(("cat", one.path)), timeout=_TIMEOUT)
        if done.returncode == 0:
            text = done.stdout.decode("utf-8", "replace")
            try:
                return read_run(text[max(0, text.find('{"format"')) :])  # skips the output of a shell profile
            except FleetError as error:
                errors.append(f"{transport.target}: {error}")
        else:
            errors.append(f"{transport.target}: {done.stderr.decode('utf-8', 'replace').strip()}")
    raise FleetError(f"the plan of run {seen[0].run_id} cannot be read: {'; '.join(errors)}")


def _match_hosts(plan: LaunchPlan, config: ClusterConfig, seen: list[RunFileSeen]) -> dict[int, int]:
    """Return, for each node_rank of the run, the index of its node in ``config``.

    A node of ``config`` matches if it has the same login; else if it has the same host; else if its host has the run's
    files of this node_rank, as listed in ``seen``. A node_rank without a match is left out.
    """
    logins = {node.login: i for i, node in reversed(list(enumerate(config.nodes)))}
    hosts = {node.host: i for i, node in reversed(list(enumerate(config.nodes)))}
    by_login = {node.node_rank: logins.get(node.target, hosts.get(node.host)) for node in plan.nodes}
    matched = {node_rank: index for node_rank, index in by_login.items() if index is not None}
    for one in sorted(seen, key=lambda one: one.host in matched.values()):  # hosts without a node first
        matched.setdefault(one.node_rank, one.host)
    return matched


def _connection(
    attempts: Mapping[int, Transport | TransportError], host: int | None, plan: LaunchPlan, node_rank: int
) -> Transport | TransportError:
    if host is None:
        target = plan.nodes[node_rank].target
        return TransportError("the cluster file does not list this node", host=target, node_rank=node_rank)
    return attempts[host]


def _node_config(config: ClusterConfig, host: int | None, node: NodePlan) -> NodeConfig:
    return config.nodes[host] if host is not None else NodeConfig(host=node.host)


@dataclass(frozen=True)
class Choice:
    run: str | None = None  #: id, part of one, or run folder; None: the newest
    config: Path | None = None  #: cluster file of a run that was launched elsewhere
    sets: tuple[str, ...] = ()  #: key=value for that file
    runs_dir: str | None = None

    @property
    def runs_dirs(self) -> list[Path]:
        return [Path(self.runs_dir or "runs").expanduser()]


@contextmanager
def chosen(choice: Choice, *, offline: Callable[[FoundRun], bool] = lambda found: False) -> Iterator[OpenRun]:
    """Find the run that ``choice`` names and connect to its nodes, unless ``offline(run)`` is true.

    Without a name it is the newest run that is alive; if none is, the newest.

    Raises UsageError if the run is not found, FleetError if its plan is unknown or no node can be reached.
    """
    elsewhere = choice.config is not None and (choice.run is None or (_is_id(choice.run) and not _planned_here(choice)))
    if not elsewhere:
        runs = default_runs(choice.runs_dirs) if choice.run is None else [find_run(choice.run, choice.runs_dirs)]
        for k, found in enumerate(runs, 1):
            if offline(found):
                yield OpenRun(found, {})
                return
            with opened(found) as run:
                # Only the nodes know whether a run that was left running still is.
                if k == len(runs) or any(view.alive for view in run.views().values()):
                    yield run
                    return
        return
    assert choice.config is not None
    config = load_config(choice.config, ("run.files=[]", *_any_graph(choice.config), *choice.sets))
    with discovered(config, choice.config, choice.run) as run:
        yield replace(run, found=_with_folder(run.found, choice))


def _any_graph(config: Path) -> tuple[str, ...]:
    # Without a dataset the config would be invalid, but the search for a run does not use it.
    from launcher.config.importers.detect import read_foreign

    foreign = read_foreign(config)
    return ("data.dataset=synthetic",) if foreign and "data" not in foreign.tree.items else ()


def _planned_here(choice: Choice) -> bool:
    folder = known_here(str(choice.run), choice.runs_dirs)
    return folder is not None and (folder / "run.json").is_file()


def _with_folder(found: FoundRun, choice: Choice) -> FoundRun:
    folder = known_here(found.run_id, choice.runs_dirs)
    if folder is None:
        return found
    here = read_folder(folder)
    return replace(found, folder=folder, launch=here.launch, result=here.result)


def _is_id(run: str) -> bool:
    return "/" not in run.rstrip("/")
