"""``gnnfleet queue``: what runs on the hosts of a cluster.yml, who waits there for what, and until when."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from launcher.config.resolve import ResolvedConfig
from launcher.config.schema import node_workdir
from launcher.errors import FleetError, TransportError, reason_of
from launcher.node.leases import Lease, in_the_way, resource_label
from launcher.plan.placement import interpreter
from launcher.report.waiting import ordinal
from launcher.text import Cell, Column, FittedTable, clock_time, seconds_words
from launcher.transport import close_all, connect_all
from launcher.transport.fanout import on_nodes
from launcher.transport.rpc import NodeAgent

_TIMEOUT = 90.0  # seconds; a Python on a shared disk is slow

_COLUMNS = (
    Column("host", 9, cut_to=24),
    Column("", 8),
    Column("run", 9, cut_to=24),
    Column("user", 6),
    Column("uses or wants", 5, cut_to=20),
    Column("since", 4),
    Column("ends or starts", 7),
)


@dataclass(frozen=True)
class HostLine:
    """The runs of one host. Times are seconds since the epoch, by this machine's clock."""

    host: str
    leases: tuple[Lease, ...] = ()  #: of running runs
    tickets: tuple[Lease, ...] = ()  #: of waiting runs, in their order
    error: str = ""  #: why the host did not answer


def lines_of(config: ResolvedConfig) -> list[HostLine]:
    """Ask each host of ``config`` once for its leases and tickets."""
    hosts: dict[str, int] = {}
    for k, node in enumerate(config.nodes):
        hosts.setdefault(node.login, k)
    connections = connect_all(config)

    def ask(k: int) -> tuple[list[Mapping[str, Any]], float]:
        connection = connections[k]
        if isinstance(connection, TransportError):
            raise connection
        nothing = dict.fromkeys(("address", "peer", "run_dir", "session", "manifest"), "")
        with NodeAgent(connection, interpreter(config, k)) as agent:
            reply = agent.call("probe", {**nothing, "ports": [], "workdir": node_workdir(config.nodes[k], k)}, _TIMEOUT)
            if reply["lease_error"]:
                raise FleetError(str(reply["lease_error"]))
            return reply["leases"], agent.clock_offset(_TIMEOUT)

    try:
        answers = on_nodes(hosts.values(), ask)
    finally:
        close_all(connections)
    lines = []
    for login, k in hosts.items():
        if k in answers.errors:
            lines.append(HostLine(login, error=reason_of(answers.errors[k])))
            continue
        replies, offset = answers.values[k]  # offset: the node's clock minus this machine's, seconds
        found = []
        for values in replies:
            one = Lease(**{name: values[name] for name in Lease._fields})
            ends = one.ends and one.ends - offset
            found.append(one._replace(since=one.since - offset, ends=ends, wants=tuple(one.wants)))
        tickets = sorted((one for one in found if one.waits), key=lambda one: one.order)
        lines.append(HostLine(login, tuple(one for one in found if not one.waits), tuple(tickets)))
    return lines


def starts(ticket: Lease, lines: Sequence[HostLine]) -> float | None:
    """Estimate when the waiting run of ``ticket`` can start on all its hosts; None if unknown, 0 if nothing is known to
    be in its way.

    Unknown behind another waiting run, as nobody knows how long that will take.
    """
    ends = [0.0]
    for line in lines:
        for own in line.tickets:
            if own.order == ticket.order:
                before = in_the_way(own, [*line.leases, *line.tickets])
                if any(one.waits or not one.ends for one in before):
                    return None
                ends += [one.ends for one in before]
    return max(ends)


def _entries(line: HostLine, lines: Sequence[HostLine]) -> Iterator[dict[str, Any]]:
    """Yield what runs on a host, one entry per run, then who waits, in order."""
    runs: dict[tuple[str, str], list[Lease]] = {}
    for lease in line.leases:
        runs.setdefault((lease.run_id, lease.user), []).append(lease)
    waiting = {(one.run_id, one.user) for one in line.tickets}
    for (run_id, user), held in runs.items():
        if (run_id, user) in waiting and all(one.resource.startswith("port:") for one in held):
            continue  # a run that waits has its ports already
        names = sorted({resource_label(one.resource) for one in held if not one.resource.startswith("port:")})
        ends = max(one.ends for one in held) or None
        about = {"run_id": run_id, "user": user, "launched_by": held[0].host, "since": min(one.since for one in held)}
        yield {"state": "runs", **about, "resources": names or ["ports"], "ends": ends}
    places = {order: place for place, order in enumerate(dict.fromkeys(one.order for one in line.tickets), 1)}
    for ticket in line.tickets:
        names = sorted({resource_label(name) for name in ticket.wants})
        about = {"run_id": ticket.run_id, "user": ticket.user, "launched_by": ticket.host, "since": ticket.since}
        yield {
            "state": "waits",
            **about,
            "resources": names,
            "place": places[ticket.order],
            "starts": starts(ticket, lines),
        }


def to_json(lines: Sequence[HostLine]) -> list[dict[str, Any]]:
    return [{"host": line.host, "error": line.error, "runs": [*_entries(line, lines)]} for line in lines]


def show(lines: Sequence[HostLine], console: Console) -> None:
    """Print a row for each run on each host, and one for each free host."""
    now = time.time()
    rows: list[tuple[Cell, ...]] = []
    for line in lines:
        entries = [*_entries(line, lines)]
        for i, one in enumerate(entries):
            waits = one["state"] == "waits"
            when = one["starts"] if waits else one["ends"]
            due = "unknown" if when is None else "any moment" if when < now else f"in about {seconds_words(when - now)}"
            state = Text(f"{ordinal(one['place'])} in line", "yellow") if waits else Text("runs", "green")
            who = one["user"] if one["launched_by"].rpartition("@")[0] in ("", one["user"]) else one["launched_by"]
            names = ", ".join(one["resources"])
            host = line.host if i == 0 else ""
            rows.append((host, state, one["run_id"], who, names, clock_time(one["since"]), due))
        if line.error:
            rows.append((line.host, Text("unknown", "red"), *[""] * 5))
        elif not entries:
            rows.append((line.host, "free", *[""] * 5))
    console.print(FittedTable(_COLUMNS, rows))
    for line in lines:
        if line.error:
            console.print(Text(f"{line.host}: {line.error}", "red"), soft_wrap=True)
