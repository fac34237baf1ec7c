"""``gnnfleet clean``: shows what old runs left on the hosts, asks, and deletes it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.filesize import decimal

from launcher.command import Command
from launcher.config.resolve import ResolvedConfig
from launcher.errors import FleetError, TransportError, UsageError, reason_of
from launcher.plan.placement import ANY_PYTHON
from launcher.text import UNITS, count, duration
from launcher.transport import close_all, connect_all
from launcher.transport.fanout import on_nodes
from launcher.transport.rpc import call
from trainer.core.typed import convert

KINDS = ("runs", "code", "parts", "kernels")

_TIMEOUT = 600.0  # seconds to count or delete the files of one host


class Item(msgspec.Struct, frozen=True):
    """A folder on a host that gnnfleet made."""

    kind: str
    path: str
    bytes: int
    age: float  #: seconds since a run last used it
    used: str  #: what uses it now; '' for nothing


@dataclass(frozen=True)
class CleanOptions:
    kinds: tuple[str, ...] = KINDS
    older_than: float = 7 * 86400.0  #: seconds
    keep: int = 0  #: number of the newest folders of each kind that stay on each host
    dry_run: bool = False
    ask: bool = True


def seconds_of(text: str) -> float:
    """Return a duration such as ``7d``, ``12h`` or ``0`` in seconds. Raises UsageError."""
    seconds = duration(text)
    if seconds is None:
        raise UsageError(f"--older-than {text}: expected a number with m, h, d or w, such as 7d; or 0")
    return seconds


def chosen(items: Sequence[Item], options: CleanOptions) -> list[Item]:
    """Return the folders of one host to delete: of the wanted kinds, unused, old enough, and not among the newest."""
    found: list[Item] = []
    for kind in options.kinds:
        newest_first = sorted((item for item in items if item.kind == kind), key=lambda item: item.age)
        found += [item for item in newest_first[options.keep :] if not item.used and item.age >= options.older_than]
    return found


def clean(config: ResolvedConfig, options: CleanOptions, console: Console) -> int:
    """Show what can be deleted on each host, ask, and delete it; return the exit status: 1 if a host failed."""
    connections = connect_all(config)
    # The patterns of the work folders of each host, by the first of its nodes.
    by_login: dict[str, tuple[int, dict[str, None]]] = {}
    for k in sorted(connections):
        node = config.nodes[k]
        by_login.setdefault(node.login, (k, {}))[1][node.workdir.replace("{node_rank}", "*")] = None
    hosts = {k: tuple(folders) for k, folders in by_login.values()}

    def ask(k: int, request: dict[str, Any]) -> Any:
        connection = connections[k]
        if isinstance(connection, TransportError):
            raise connection
        here = config.local
        python = Command((sys.executable,)) if here else Command(ANY_PYTHON, setup=config.nodes[k].setup)
        return call(connection, python, "clean", {**request, "workdirs": list(hosts[k])}, _TIMEOUT)

    def delete(k: int) -> tuple[dict[str, int], dict[str, str]]:
        """Delete folders on a host; return the bytes of those that are gone, and why others are not."""
        reply = ask(k, {"op": "delete", "paths": [item.path for item in wanted[k]]})
        return convert(reply["deleted"], dict[str, int]), convert(reply["errors"], dict[str, str])

    try:
        answers = on_nodes(hosts, lambda k: convert(ask(k, {"op": "list"})["items"], list[Item]))
        errors: dict[int, Exception] = dict(answers.errors)
        wanted = {k: chosen(items, options) for k, items in answers.values.items()}
        for k in sorted(answers.values):
            whole = decimal(sum(item.bytes for item in wanted[k]))
            console.print(f"{config.nodes[k].login}: {whole} to delete", style="bold", highlight=False)
            for item in wanted[k]:
                unit = next((name for name in "wdhm" if item.age >= 2 * UNITS[name]), "m")
                age = f"{int(item.age // UNITS[unit])} {unit}"
                words = f"  {item.kind:8} {decimal(item.bytes):>10}  {age:>8}  {item.path}"
                console.print(words, soft_wrap=True, markup=False, highlight=False)
            used = [item for item in answers.values[k] if item.used]
            stays = [item for item in answers.values[k] if item not in wanted[k] and not item.used]
            for text, some in (("in use", used), ("newer or kept", stays)):
                if some:
                    size = decimal(sum(item.bytes for item in some))
                    words = f"  {count(len(some), 'folder')} of {size} stay: {text}"
                    console.print(words, style="dim", highlight=False)
        whole = decimal(sum(item.bytes for items in wanted.values() for item in items))
        number = sum(map(len, wanted.values()))
        question = f"Delete {count(number, 'folder')}, {whole}?"
        if number and not options.dry_run and (not options.ask or click.confirm(question, default=False)):
            done = on_nodes([k for k in wanted if wanted[k]], delete)
            errors |= done.errors
            freed = sum(sum(freed.values()) for freed, _ in done.values.values())
            console.print(f"freed {decimal(freed)} on {count(len(done.values), 'host')}", highlight=False)
            for k, (_, kept) in sorted(done.values.items()):
                for path, why in kept.items():
                    errors.setdefault(k, FleetError(f"{path} stays: {why}"))
        elif number:
            console.print(f"nothing was deleted; {count(number, 'folder')} of {whole} can be", highlight=False)
        else:
            console.print("nothing to delete", highlight=False)
        for k, error in sorted(errors.items()):
            text = f"{config.nodes[k].login}: {reason_of(error)}"
            console.print(text, style="red", soft_wrap=True, markup=False, highlight=False)
        return 1 if errors else 0
    finally:
        close_all(connections)
