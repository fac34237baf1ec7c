"""Finds the run that a command names, on this machine or on the hosts of a cluster file."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.command import Command
from launcher.config.loader import load_config
from launcher.config.resolve import resolve_saved
from launcher.config.schema import ClusterConfig, NodeConfig
from launcher.errors import FleetError, TransportError, UsageError
from launcher.manage.node_views import OpenRun, opened
from launcher.plan.model import LaunchPlan
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
class _RunFileSeen:
    run_id: str
    node_rank: int  #: in that run
    host: int  #: index into the config's nodes
    path: str
    mtime: int  #: seconds since the epoch


@contextmanager
def discovered(config: ClusterConfig, config_path: Path, run: str | None) -> Iterator[OpenRun]:
    """Find a run on the hosts of ``config`` (read from ``config_path``) and open it.

    ``run``: the run's id or a part of it; None: the newest run that is alive, else the newest. ``config`` may list the
    run's hosts in another order than at launch, and further hosts. Raises UsageError if no run or several runs match,
    FleetError if no host can be reached.
    """
    connections = connect_all(config)
    try:
        seen = _list_runs(config, connections)
        ids = _choose(seen, run, config_path, connections)
        opened = _open(ids[0], seen, config, config_path, connections)
        for run_id in ids[1:_LISTED]:
            if any(view.alive for view in opened.views().values()):
                break
            with suppress(FleetError):  # a damaged plan
                other = _open(run_id, seen, config, config_path, connections)
                opened = other if any(view.alive for view in other.views().values()) else opened
        yield opened
    finally:
        close_all(connections)


def _open(
    run_id: str,
    seen: list[_RunFileSeen],
    config: ClusterConfig,
    config_path: Path,
    connections: Mapping[int, Transport | TransportError],
) -> OpenRun:
    """Open a run that was found on the hosts of ``config``."""
    of_run = [one for one in seen if one.run_id == run_id]
    plan = _read_plan(of_run, connections)

    # For each node_rank of the run, the node of the config with the same login, else with the same host, else whose
    # host has the run's files of this node_rank.
    logins = {node.login: i for i, node in reversed(list(enumerate(config.nodes)))}
    by_host = {node.host: i for i, node in reversed(list(enumerate(config.nodes)))}
    by_login = {node.node_rank: logins.get(node.target, by_host.get(node.host)) for node in plan.nodes}
    hosts = {node_rank: index for node_rank, index in by_login.items() if index is not None}
    for one in sorted(of_run, key=lambda one: one.host in hosts.values()):  # hosts without a node first
        hosts.setdefault(one.node_rank, one.host)
    by_node: dict[int, Transport | TransportError] = {}
    nodes = []
    for k, node in enumerate(plan.nodes):
        if k in hosts:
            by_node[k] = connections[hosts[k]]
            nodes.append(config.nodes[hosts[k]])
        else:
            why = "the cluster file does not list this node"
            by_node[k] = TransportError(why, host=node.target, node_rank=k)
            nodes.append(NodeConfig(host=node.host))
    found = FoundRun(run_id, None, None, plan, resolve_saved(config, nodes), None, config_path)
    return OpenRun(found, by_node)


def _list_runs(config: ClusterConfig, connections: Mapping[int, Transport | TransportError]) -> list[_RunFileSeen]:
    """List the run.json files of all runs in the work folders of the hosts.

    ``{node_rank}`` in the path of a work folder matches any text. Raises FleetError if no host can be reached.
    """
    transports = {k: connection for k, connection in connections.items() if isinstance(connection, Transport)}
    if not transports:
        errors = "\n".join(f"  {error}" for error in connections.values())
        raise FleetError(f"none of the {len(connections)} hosts can be reached:\n{errors}")

    def ask(k: int) -> list[_RunFileSeen]:
        folder = config.nodes[k].workdir.replace("{node_rank}", "*").rstrip("/")
        command = Command(("bash", "-c", _LIST, "bash", f"{folder}/runs/*/node*/run.json"))
        listing = transports[k].run(command, timeout=_TIMEOUT).stdout.decode("utf-8", "replace")
        matches = filter(None, map(_SEEN.search, listing.splitlines()))  # skips the output of a shell profile
        return [_RunFileSeen(m["run_id"], int(m["node_rank"]), k, m["path"], int(m["mtime"])) for m in matches]

    answers = on_nodes(transports, ask)
    return [one for k in sorted(answers.values) for one in answers.values[k]]


def _choose(
    seen: list[_RunFileSeen], run: str | None, config_path: Path, connections: Mapping[int, Transport | TransportError]
) -> list[str]:
    """Return the id of the run that ``run`` names; None: those of all runs, the newest first. Raises UsageError."""
    oldest_first = sorted(seen, key=lambda one: one.mtime)
    ids = list(dict.fromkeys(one.run_id for one in reversed(oldest_first)))
    if not ids:
        unreachable = sum(isinstance(connection, TransportError) for connection in connections.values())
        more = f"; {unreachable} of them cannot be reached" if unreachable else ""
        raise UsageError(
            f"no run has files on the hosts of {config_path}{more}; "
            "give the cluster file with which the run was launched"
        )
    if run is None:
        return ids
    how, close = matching(ids, run)
    listed = ", ".join((close or ids)[:_LISTED])
    if not close:
        raise UsageError(f"no run `{run}` on the hosts of {config_path}; the newest there are {listed}")
    if len(close) > 1:
        raise UsageError(f"`{run}` {how} the ids of {len(close)} runs there ({listed}); give more of the id")
    return close


def _read_plan(seen: list[_RunFileSeen], connections: Mapping[int, Transport | TransportError]) -> LaunchPlan:
    """Return the plan of a run, from the first run.json in ``seen`` that can be read; every node has a copy."""
    errors: list[str] = []
    for one in seen:
        transport = connections[one.host]
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


@dataclass(frozen=True)
class Choice:
    run: str | None = None  #: id, part of one, or run folder; None: the newest
    config: Path | None = None  #: cluster file of a run that was launched elsewhere
    sets: tuple[str, ...] = ()  #: key=value for that file
    runs_dir: str | None = None

    @property
    def runs_dirs(self) -> list[Path]:
        return [Path(os.path.expanduser(self.runs_dir or "runs"))]


@contextmanager
def chosen(choice: Choice, *, offline: Callable[[FoundRun], bool] = lambda found: False) -> Iterator[OpenRun]:
    """Find the run that ``choice`` names and connect to its nodes, unless ``offline(run)`` is true.

    Without a name it is the newest run that is alive; if none is, the newest.

    Raises UsageError if the run is not found, FleetError if its plan is unknown or no node can be reached.
    """
    is_id = choice.run is not None and "/" not in choice.run.rstrip("/")
    here = known_here(str(choice.run), choice.runs_dirs) if choice.config is not None and is_id else None
    planned_here = here is not None and (here / "run.json").is_file()
    if choice.config is None or (choice.run is not None and (planned_here or not is_id)):
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
    from launcher.config.importers.detect import read_foreign

    # Without a dataset the config would be invalid, but the search for a run does not use it.
    foreign = read_foreign(choice.config)
    any_graph = ("data.dataset=synthetic",) if foreign and "data" not in foreign.tree.items else ()
    config = load_config(choice.config, ("run.files=[]", *any_graph, *choice.sets), foreign=foreign)
    with discovered(config, choice.config, choice.run) as run:
        folder = known_here(run.found.run_id, choice.runs_dirs)
        if folder is not None:
            known = read_folder(folder)
            run = replace(run, found=replace(run.found, folder=folder, launch=known.launch, result=known.result))
        yield run
