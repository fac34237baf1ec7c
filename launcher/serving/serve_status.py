"""``gnnfleet serve status``: load and clients of each graph server, and how stopped ones ended."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group
from rich.filesize import decimal
from rich.live import Live
from rich.text import Text

from launcher.manage.node_views import OpenRun
from launcher.serving.cluster_state import (
    ClusterDescription,
    ServerState,
    newest_description,
    parts_words,
    server_states,
)
from launcher.text import Cell, Column, FittedTable, count, spans

_EVERY = 2.0  # seconds between updates with --watch

_STALE = 10.0  # seconds after which statistics of a server are outdated

_SERVERS = (
    Column("server", 12, cut_to=24),
    Column("state", 11),
    Column("parts", 10, cut_to=12),
    Column("busy", 9, right=True),
    Column("clients", 8, right=True),
    Column("queue", 7, right=True),
    Column("batches/s", 6, right=True),
    Column("out/s", 5, right=True),
    Column("buffer", 4, right=True),
    Column("memory", 3, right=True),
    Column("dropped", 2, right=True),
    Column("restarts", 1, right=True),
)

_CLIENTS = (
    Column("client", 9, cut_to=30),
    Column("server", 8, cut_to=12),
    Column("batches", 7, right=True),
    Column("bytes", 6, right=True),
    Column("queue", 5, right=True),
    Column("buffer", 4, right=True),
    Column("last seen", 3, right=True),
)

_STYLES = {"serving": "green", "failed": "red", "lost": "red", "unreachable": "yellow", "stopped": "yellow"}


@dataclass(frozen=True)
class ServeStatus:
    cluster: ClusterDescription
    nodes: tuple[ServerState, ...]  #: those that hold parts, in node_rank order

    @property
    def down(self) -> tuple[ServerState, ...]:
        return tuple(node for node in self.nodes if not node.serves)

    @property
    def exit_status(self) -> int:
        if all(node.view.unreachable for node in self.nodes):
            return 3
        return 1 if self.down else 0

    @property
    def sentence(self) -> str:
        name, down = self.cluster.name, self.down
        clients = len({client["name"] for node in self.nodes for client in _clients(node)})
        what = f"{self.cluster.words}, {count(clients, 'client')}"
        if not down:
            return f"serving cluster {name} is up: {what}"
        lost = self.lost_parts
        gone = f"; no server has {parts_words(lost)}" if lost else "; all parts are served"
        if len(down) == len(self.nodes):
            gone = ""
        return f"serving cluster {name}: {len(down)} of {count(len(self.nodes), 'server')} down{gone} ({what})"

    @property
    def lost_parts(self) -> tuple[int, ...]:
        """Parts that no running server holds."""
        served = {part for node in self.nodes if node.serves for part in node.view.node.parts}
        return tuple(sorted(set(range(self.cluster.num_parts)) - served))

    @property
    def notes(self) -> list[str]:
        """Lines for the user: why nodes do not serve, and the command that starts them again."""
        notes = [f"{node.view.node.label}: {_how_down(node)}" for node in self.down]
        name = self.cluster.name
        return [*notes, f"start them again: gnnfleet serve --config FILE --name {name}"] if notes else []

    def to_json(self) -> dict[str, Any]:
        # The statistics are exactly as the servers wrote them.
        nodes = [
            {
                "node_rank": node.view.node.node_rank,
                "target": node.view.node.target,
                "state": node.view.word,
                "why": _how_down(node) if not node.serves else "",
                "parts": list(node.view.node.parts),
                "stats": dict(node.stats),
            }
            for node in self.nodes
        ]
        head = {"name": self.cluster.name, "sentence": self.sentence, "exit_status": self.exit_status}
        return {**head, "version": self.cluster.version, "num_parts": self.cluster.num_parts, "nodes": nodes}

    def rendered(self) -> Group:
        style = "bold green" if not self.down else "bold red" if self.lost_parts else "bold yellow"
        parts: list[Text | FittedTable] = [Text(self.sentence, style)]
        servers: list[tuple[Cell, ...]] = []
        for node in self.nodes:
            view, stats = node.view, _fresh(node)
            state = Text(view.word, _STYLES.get(view.word, ""))
            dropped = [stats[name] for name in ("malformed", "refused") if name in stats]
            buffer = "–"
            if {"buffer_bytes", "buffer_limit"} <= stats.keys():
                buffer = f"{_size(stats['buffer_bytes'])} of {_size(stats['buffer_limit'])}"
            findings = (view.state or {}).get("findings") or ()
            restarts = sum(finding["kind"] == "server-restart" for finding in findings)
            servers.append(
                (
                    view.node.label,
                    state,
                    spans(view.node.parts),
                    _form(stats, "busy", lambda value: f"{value:.0%}"),
                    str(len(_clients(node))) if stats else "–",
                    _form(stats, "queue", lambda value: f"{value:,}"),
                    _form(stats, "batches_s", lambda value: f"{value:,.1f}"),
                    _form(stats, "bytes_out_s", _size),
                    buffer,
                    _form(stats, "memory", _size),
                    f"{sum(dropped):,}" if dropped else "–",
                    str(restarts) if view.alive else "–",
                )
            )
        parts.append(FittedTable(_SERVERS, servers))
        rows: list[tuple[Cell, ...]] = []
        for node in self.nodes:
            for client in sorted(_clients(node), key=lambda client: str(client["name"])):
                rows.append(
                    (
                        str(client["name"]),
                        f"node{node.view.node.node_rank}",
                        _form(client, "batches", lambda value: f"{value:,}"),
                        _form(client, "bytes", _size),
                        _form(client, "queue", lambda value: f"{value:,}"),
                        _form(client, "buffer_bytes", _size),
                        _form(client, "seconds_since", lambda value: f"{value:,.0f} s ago"),
                    )
                )
        if rows:
            parts += [Text(""), FittedTable(_CLIENTS, rows)]
        parts += [Text(f"note: {note}", "yellow") for note in self.notes]
        return Group(*parts)


def status_of(run: OpenRun) -> ServeStatus:
    """Query all nodes of a serving cluster. Raises FleetError if no node has files of the cluster."""
    states = server_states(run)
    cluster = newest_description(states, run.found.run_id)
    return ServeStatus(cluster, tuple(one for one in states.values() if one.view.node.parts))


def watch_status(run: OpenRun, console: Console) -> ServeStatus:
    """Show the status every two seconds until Ctrl-C; return the last one."""
    with Live(console=console, auto_refresh=False) as live:
        while True:
            status = status_of(run)
            live.update(status.rendered(), refresh=True)
            try:
                time.sleep(_EVERY)
            except KeyboardInterrupt:
                return status


def _how_down(node: ServerState) -> str:
    view = node.view
    result = view.result or {}
    if view.unreachable:
        return f"cannot be reached from here: {view.unreachable}"
    if view.alive:
        return f"not ready yet ({view.word})"
    if view.absent:
        return "this node has no files of the cluster any more"
    how = view.lost or str(result.get("reason") or "") or f"it ended ({view.word})"
    asked = result.get("asked")
    return f"{how} (by {asked['by']})" if asked and asked.get("by") and asked["by"] not in how else how


def _fresh(node: ServerState) -> Mapping[str, Any]:
    """Return the statistics of a graph server; {} if they are outdated or the server has ended."""
    stats, view = node.stats, node.view
    return stats if view.alive and view.now - float(stats.get("time", 0.0)) < _STALE else {}


def _clients(node: ServerState) -> list[Mapping[str, Any]]:
    return list(_fresh(node).get("clients") or ())


def _form(values: Mapping[str, Any], name: str, how: Any) -> str:
    value = values.get(name)
    return "–" if value is None else str(how(value))


def _size(value: float) -> str:
    return decimal(int(value))
