"""Reads the present state of a serving cluster from its nodes."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from launcher.command import Command
from launcher.config.roles import GraphServer
from launcher.config.schema import ClusterConfig
from launcher.errors import FleetError, TransportError, UsageError, node_label
from launcher.manage.node_views import OpenRun, opened
from launcher.manage.select import Choice, chosen, discovered
from launcher.node.json_reader import checked, json_object, loads
from launcher.node.json_records import STATS
from launcher.report.run_folder import FoundRun, known_here, read_folder
from launcher.report.verdict import NodeView
from launcher.text import count, spans
from launcher.transport.base import Transport
from launcher.transport.fanout import on_nodes


@dataclass(frozen=True)
class ClusterDescription:
    """The content of ``cluster.json``: the servers of a serving cluster."""

    name: str
    version: int  #: increases whenever servers are started again, as they may have another address then
    num_parts: int
    servers: tuple[GraphServer, ...]

    @property
    def words(self) -> str:
        return f"{count(len(self.servers), 'server')}, {count(self.num_parts, 'part')}"

    def label(self, server: GraphServer) -> str:
        return node_label(server.node_rank, server.host)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "servers": [asdict(server) for server in self.servers]}


def read_description(text: str, where: str) -> ClusterDescription:
    """Parse the text of a ``cluster.json``. Raises FleetError if it is damaged; the message begins with ``where``."""
    try:
        raw: Mapping[str, Any] = loads(text)
        servers = tuple(
            GraphServer(
                int(node["node_rank"]), str(node["host"]), str(node["endpoint"]), tuple(map(int, node["parts"]))
            )
            for node in raw["nodes"]
            if node["endpoint"] and node["parts"]
        )
        return ClusterDescription(str(raw["run_id"]), int(raw.get("version", 1)), int(raw["num_parts"]), servers)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise FleetError(
            f"{where}: cluster.json is damaged ({error!r}); `gnnfleet serve --config FILE` writes it again"
        ) from None


def server_rows(cluster: ClusterDescription) -> list[str]:
    """Return one line of text for each server: label, endpoint, parts."""
    width = max((len(cluster.label(server)) for server in cluster.servers), default=0)
    return [
        f"  {cluster.label(server):{width}}  {server.endpoint}  {parts_words(server.parts)}"
        for server in cluster.servers
    ]


def parts_words(parts: tuple[int, ...]) -> str:
    """Return part numbers as ``part 3``, ``parts 0–2, 5`` or ``no parts``."""
    return f"{'part' if len(parts) == 1 else 'parts'} {spans(parts)}" if parts else "no parts"


_TIMEOUT = 30.0

_MARK = "gnnfleet-file "

#: $@: glob patterns, ``~`` is the home folder. Prints the content in base64 and the path of each file.
_READ = f"""
for pattern; do compgen -G "${{pattern/#\\~/$HOME}}"; done | while IFS= read -r file; do
  [ -f "$file" ] && printf '{_MARK}%s %s\\n' "$(base64 -w0 <"$file")" "$file"
done
exit 0
"""


@dataclass(frozen=True)
class ServerState:
    """The state of one node of a serving cluster, and the content of some files in its run folder."""

    view: NodeView
    files: Mapping[str, str]  #: content of files in its run folder, by relative path

    @property
    def serves(self) -> bool:
        return self.view.alive and self.view.word == "serving"

    @property
    def stats(self) -> Mapping[str, Any]:
        """The last ``server_stats.json`` of the graph server; empty if missing or damaged."""
        return checked(STATS, json_object(self.files.get("server_stats.json", ""))) or {}


FILES = ("cluster.json", "server_stats.json")

SECRETS = ("service.key", "clients/*.key")


def server_states(run: OpenRun, names: Sequence[str] = FILES) -> dict[int, ServerState]:
    """Query all nodes of a serving cluster, and read the files ``names`` of each."""
    views = run.views()

    def files_of(k: int) -> dict[str, str]:
        folder = run.nodes[k].run_dir
        found = read_files(run.transports[k], [f"{folder}/{name}" for name in names])
        return {path[len(folder) + 1 :]: text for path, text in found.items()}

    reached = [k for k, view in views.items() if view.reached]
    files = on_nodes(reached, files_of).or_raise()
    return {k: ServerState(view, files.get(k, {})) for k, view in views.items()}


def read_files(transport: Transport, patterns: Sequence[str]) -> dict[str, str]:
    """Return the content of all files on a node that match ``patterns``, by path."""
    done = transport.run(Command(("bash", "-c", _READ, "bash", *patterns)), timeout=_TIMEOUT)
    texts = {}
    for row in done.stdout.decode("utf-8", "replace").splitlines():
        _, mark, rest = row.partition(_MARK)  # skips the output of a shell profile
        if mark:
            data, _, path = rest.partition(" ")
            texts[path] = base64.b64decode(data).decode("utf-8", "replace")
    return texts


def remove_files(transport: Transport, paths: Sequence[str]) -> None:
    """Remove files and folders on a node. Raises FleetError."""
    done = transport.run(Command(("rm", "-rf", "--", *paths)), timeout=_TIMEOUT)
    if done.returncode:
        raise FleetError(f"{transport.target}: {done.stderr.decode('utf-8', 'replace').strip()}")


def newest_description(states: Mapping[int, ServerState], name: str) -> ClusterDescription:
    """Return the ``cluster.json`` with the highest version on the nodes. Raises FleetError if no node has one."""
    texts = {k: one.files["cluster.json"] for k, one in states.items() if "cluster.json" in one.files}
    clusters = [read_description(text, states[k].view.node.label) for k, text in texts.items()]
    if not clusters:
        unreachable = "".join(
            f"\n  {one.view.node.label}: {one.view.unreachable}" for one in states.values() if one.view.unreachable
        )
        why = "none of its nodes has files of the cluster any more"
        why += f"; these cannot be reached:{unreachable}" if unreachable else ""
        if all(one.view.unreachable for one in states.values()):
            why = f"none of its nodes can be reached:{unreachable}"
        raise FleetError(f"serving cluster {name}: {why}")
    return max(clusters, key=lambda cluster: cluster.version)


def _check_serving(found: FoundRun) -> None:
    """Raise UsageError if ``found`` is a training run, not a serving cluster."""
    if found.plan is not None and not found.plan.serve_only:
        raise UsageError(
            f"{found.run_id} is a training run, not a serving cluster; `gnnfleet serve` starts serving clusters"
        )


@contextmanager
def open_serving(name: str, config: ClusterConfig, config_path: Path) -> Iterator[OpenRun]:
    """Find serving cluster ``name`` and connect to its nodes.

    Looks for the cluster on this machine, then on the server nodes of ``config`` (read from ``config_path``). Raises
    UsageError if no cluster has that name.
    """
    folder = known_here(name, [Path(config.run.runs_dir).expanduser()])
    if folder is not None and (folder / "run.json").is_file():
        found = read_folder(folder)
        _check_serving(found)
        with opened(found) as run:
            yield run
        return
    hosts = tuple(node for node in config.nodes if node.role == "server")
    if not hosts:
        raise UsageError(
            f"serving cluster `{name}` is not known on this machine, and {config_path} has no node with "
            f"`role: server` that could belong to it. Start the cluster (gnnfleet serve --config FILE --name {name}), "
            f"or list its hosts with `role: server` in {config_path}"
        )
    with discovered(replace(config, nodes=hosts, transport=config.transport), config_path, name) as run:
        if run.found.run_id != name:
            raise UsageError(f"no serving cluster `{name}` on the server nodes of {config_path}")
        _check_serving(run.found)
        yield run


def on_connections(
    connections: Mapping[int, Transport | TransportError], work: Callable[[int, Transport], Any]
) -> dict[int, Exception]:
    """Run ``work(node_rank, transport)`` on all connected nodes in parallel; return errors by node_rank.

    The errors include those of nodes that could not be connected.
    """
    transports = {k: connection for k, connection in connections.items() if isinstance(connection, Transport)}
    errors: dict[int, Exception] = {k: error for k, error in connections.items() if isinstance(error, TransportError)}
    return errors | on_nodes(transports, lambda k: work(k, transports[k])).errors


@contextmanager
def open_named(
    name: str, config: Path | None, runs_dir: str | None, offline: Callable[[FoundRun], bool]
) -> Iterator[OpenRun]:
    """Find serving cluster ``name``, and connect to its nodes unless ``offline(cluster)`` is true.

    Raises UsageError if no cluster of that name is known on this machine or on the hosts of ``config``.
    """
    with chosen(Choice(name, config, (), runs_dir), offline=offline) as run:
        if run.found.run_id != name and Path(name).name != run.found.run_id:
            raise UsageError(f"no serving cluster `{name}` is known here; did you mean {run.found.run_id}?")
        _check_serving(run.found)
        yield run
