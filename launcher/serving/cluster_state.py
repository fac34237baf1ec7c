"""The present state of a serving cluster, as its nodes report it."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from launcher.command import Command
from launcher.config.loader import to_yaml
from launcher.config.resolve import ResolvedConfig
from launcher.config.roles import GraphServer
from launcher.config.schema import ClusterConfig
from launcher.errors import FleetError, TransportError, UsageError, node_label
from launcher.manage.node_views import OpenRun, opened
from launcher.manage.select import Choice, chosen, discovered
from launcher.node.json_reader import STATS, checked, json_object
from launcher.plan.model import LaunchPlan
from launcher.plan.serialize import run_json
from launcher.report.events import EventLog
from launcher.report.report import RunState
from launcher.report.run_folder import FoundRun, Stage, known_here, read_folder, register
from launcher.report.verdict import NodeView
from launcher.run.launch import LaunchContext
from launcher.run.options import LaunchOptions
from launcher.text import count, spans
from launcher.transport.base import Transport
from launcher.transport.fanout import on_nodes


@dataclass(frozen=True)
class ClusterDescription:
    """A serving cluster as the newest ``cluster.json`` on its nodes has it."""

    name: str
    version: int  #: rises whenever nodes join or leave
    num_parts: int
    servers: tuple[GraphServer, ...]

    @property
    def words(self) -> str:
        """``3 servers, 4 parts``."""
        return f"{count(len(self.servers), 'server')}, {count(self.num_parts, 'part')}"

    def label(self, server: GraphServer) -> str:
        """``node1 (gnn2)``."""
        return node_label(server.node_rank, server.host)

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return {**asdict(self), "servers": [asdict(server) for server in self.servers]}


def read_description(text: str, where: str) -> ClusterDescription:
    """From the text of a ``cluster.json``; ``where`` it was found is for the FleetError when it is none."""
    try:
        raw: Mapping[str, Any] = json.loads(text)
        servers = tuple(_server(node) for node in raw["nodes"] if node["endpoint"] and node["parts"])
        return ClusterDescription(str(raw["run_id"]), int(raw.get("version", 1)), int(raw["num_parts"]), servers)
    except (ValueError, KeyError, TypeError) as error:
        raise FleetError(f"{where}: cluster.json is damaged ({error!r})") from None


def _server(node: Mapping[str, Any]) -> GraphServer:
    parts = tuple(map(int, node["parts"]))
    return GraphServer(int(node["node_rank"]), str(node["host"]), str(node["endpoint"]), parts)


def server_lines(cluster: ClusterDescription) -> list[str]:
    """A line for each server: who, where, which parts."""
    width = max((len(cluster.label(server)) for server in cluster.servers), default=0)
    return [
        f"  {cluster.label(server):{width}}  {server.endpoint}  {parts_words(server.parts)}"
        for server in cluster.servers
    ]


def parts_words(parts: tuple[int, ...]) -> str:
    """``parts 0–2, 5``; ``no parts``."""
    return f"{'part' if len(parts) == 1 else 'parts'} {spans(parts)}" if parts else "no parts"


_TIMEOUT = 30.0

_MARK = "gnnfleet-file "

#: $@: patterns of files, ~ is home; a line of base64 and path for each.
_READ = f"""
for pattern; do compgen -G "${{pattern/#\\~/$HOME}}"; done | while IFS= read -r file; do
  [ -f "$file" ] && printf '{_MARK}%s %s\\n' "$(base64 -w0 <"$file")" "$file"
done
exit 0
"""


@dataclass(frozen=True)
class ServerState:
    """One node as it answered just now."""

    view: NodeView
    files: Mapping[str, str]  #: text of those in its run folder, by path below it

    @property
    def serves(self) -> bool:
        return self.view.alive and self.view.word == "serving"

    @property
    def stats(self) -> Mapping[str, Any]:
        """What its graph server has last written of itself; empty when that is nothing."""
        return checked(STATS, json_object(self.files.get("server_stats.json", ""))) or {}


FILES = ("cluster.json", "server_stats.json")

SECRETS = ("service.key", "clients/*.key")


def server_states(
    run: OpenRun, names: Sequence[str] = FILES, ranks: Sequence[int] | None = None
) -> dict[int, ServerState]:
    """All nodes of a serving cluster (or ``ranks``), and those files of them."""
    views = run.views(ranks)
    reached = [k for k, view in views.items() if view.reached]
    files = on_nodes(reached, lambda k: _files_of(run, k, names)).or_raise()
    return {k: ServerState(view, files.get(k, {})) for k, view in views.items()}


def _files_of(run: OpenRun, k: int, names: Sequence[str]) -> dict[str, str]:
    folder = run.nodes[k].run_dir
    found = read_files(run.transports[k], [f"{folder}/{name}" for name in names])
    return {path[len(folder) + 1 :]: text for path, text in found.items()}


def read_files(line: Transport, patterns: Sequence[str]) -> dict[str, str]:
    """Texts of all files on a node that match, by path."""
    done = line.run(Command(("bash", "-c", _READ, "bash", *patterns)), timeout=_TIMEOUT)
    texts = {}
    for told in done.stdout.decode("utf-8", "replace").splitlines():
        _, mark, rest = told.partition(_MARK)  # a profile may have printed before it
        if mark:
            data, _, path = rest.partition(" ")
            texts[path] = base64.b64decode(data).decode("utf-8", "replace")
    return texts


def remove_files(line: Transport, paths: Sequence[str]) -> None:
    """Remove files and folders; raises FleetError when one cannot be."""
    done = line.run(Command(("rm", "-rf", "--", *paths)), timeout=_TIMEOUT)
    if done.returncode:
        raise FleetError(f"{line.target}: {done.stderr.decode('utf-8', 'replace').strip()}")


def move_folder(line: Transport, folder: str, dest: str) -> None:
    """Rename a folder; what was at ``dest`` is removed. Raises FleetError when it cannot be."""
    done = line.run(
        Command(("bash", "-c", 'rm -rf -- "$2" && mv -- "$1" "$2"', "bash", folder, dest)), timeout=_TIMEOUT
    )
    if done.returncode:
        raise FleetError(f"{line.target}: {done.stderr.decode('utf-8', 'replace').strip()}")


def newest(there: Mapping[int, ServerState], name: str) -> ClusterDescription:
    """The cluster by the newest ``cluster.json`` on its nodes; raises FleetError when none has one."""
    texts = {k: one.files["cluster.json"] for k, one in there.items() if "cluster.json" in one.files}
    clusters = [read_description(text, there[k].view.node.label) for k, text in texts.items()]
    if not clusters:
        raise FleetError(f"serving cluster {name}: {why_unknown(there)}")
    return max(clusters, key=lambda cluster: cluster.version)


def why_unknown(there: Mapping[int, ServerState]) -> str:
    """Why nothing can be said of any node."""
    away = [f"  {one.view.node.label}: {one.view.unreachable}" for one in there.values() if one.view.unreachable]
    if len(away) == len(there):
        return "none of its nodes can be reached:\n" + "\n".join(away)
    return "none of its nodes has anything of it any more" + ("; out of reach:\n" + "\n".join(away) if away else "")


def check_serving(found: FoundRun) -> None:
    """Raises UsageError when the run is no serving cluster."""
    if found.plan is not None and not found.plan.serve_only:
        raise UsageError(f"{found.run_id} is a training run, not a serving cluster; `gnnfleet serve` makes those")


@contextmanager
def open_serving(name: str, config: ClusterConfig, given: Path) -> Iterator[OpenRun]:
    """Serving cluster ``name`` with lines to its nodes: as known on this machine, else found on the server nodes of
    ``config`` (read from ``given``). Raises UsageError when there is none of that name."""
    folder = known_here(name, [Path(config.run.runs_dir).expanduser()])
    if folder is not None and (folder / "run.json").is_file():
        found = read_folder(folder)
        check_serving(found)
        with opened(found) as run:
            yield run
        return
    hosts = tuple(node for node in config.nodes if node.role == "server")
    if not hosts:
        raise UsageError(
            f"serving cluster `{name}` is not known on this machine, and {given} has no node with `role: server` to "
            f"look for it on. Start one (gnnfleet serve --config FILE --name {name}), or list its hosts with that role"
        )
    with discovered(replace(config, nodes=hosts, transport=config.transport), given, name) as run:
        if run.found.run_id != name:
            raise UsageError(f"no serving cluster `{name}` on the server nodes of {given}")
        check_serving(run.found)
        yield run


def on_lines(
    attempts: Mapping[int, Transport | TransportError], work: Callable[[int, Transport], Any]
) -> dict[int, Exception]:
    """Do ``work`` on all nodes in reach at once; what went wrong, by node_rank."""
    lines = {k: line for k, line in attempts.items() if isinstance(line, Transport)}
    errors: dict[int, Exception] = {k: line for k, line in attempts.items() if isinstance(line, TransportError)}
    return errors | on_nodes(lines, lambda k: work(k, lines[k])).errors


@contextmanager
def open_named(
    name: str, config: Path | None, runs_dir: str | None, offline: Callable[[FoundRun], bool]
) -> Iterator[OpenRun]:
    """Serving cluster ``name`` for a command about it; without lines where ``offline`` says that none is needed.

    Raises UsageError when there is none of that name, known here or on the hosts of ``config``.
    """
    with chosen(Choice(name, config, (), runs_dir), offline=offline) as run:
        if run.found.run_id != name and Path(name).name != run.found.run_id:
            raise UsageError(f"no serving cluster `{name}` is known here; there is {run.found.run_id}")
        check_serving(run.found)
        yield run


class ServeContext(LaunchContext):
    """A ``gnnfleet serve`` at work. Where the cluster ``stands`` already, its folder goes on telling of that until all
    is done: what goes wrong with a new server says nothing of the others."""

    def __init__(self, config: ResolvedConfig, options: LaunchOptions, name: str, console: Console, *, stands: bool):
        self.stands = stands
        super().__init__(config, options, name, console)

    def _open_folder(self) -> EventLog:
        if not self.stands:
            return super()._open_folder()
        return EventLog(self.folder / "events.jsonl", sys.stdout if self.options.as_json else None)

    def enter_stage(self, stage: Stage, *, detached: bool = False) -> None:
        """Write down that ``stage`` begins."""
        if self.stands and not detached:
            self.events.add("stage", stage=stage)
        else:
            super().enter_stage(stage, detached=detached)

    def give_up(self, state: RunState, why: str, exit_status: int) -> None:
        """It ends without the servers that were to be started."""
        if self.stands:
            self.events.add("given-up", stage=self.file.stage, reason=why)
        else:
            super().give_up(state, why, exit_status)

    def keep_plan(self, plan: LaunchPlan) -> None:
        """Before anything is started, so that it can be found again."""
        parts = replace(self.config.data, num_parts=None)  # the plan tells; more nodes than parts is no mistake here
        self.write_file("config.yml", to_yaml(replace(self.config, data=parts)))
        self.write_file("run.json", run_json(plan))
        register(self.run_id, self.folder)

    def done(self) -> None:
        """All that was to be started serves."""
        (self.folder / "result.json").unlink(missing_ok=True)
        self.enter_stage("train", detached=True)
