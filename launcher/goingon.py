"""The command that goes on from a run, as messages give it: without the hosts that were lost."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping


def host_of(target: str) -> str:
    """The host of ``user@host:port`` or ``user@[v6]:port``."""
    name = target.rpartition("@")[2]
    bracketed = re.fullmatch(r"\[(.+)\](:\d+)?", name)
    return bracketed[1] if bracketed else re.sub(r"^([^:]+):\d+$", r"\1", name)


def excluded_names(targets: Mapping[int, str], away: Collection[int]) -> tuple[str, ...]:
    """What ``--exclude`` takes for the nodes ``away``: their hosts, or logins where a host has other nodes too; () when
    nobody would be left. ``targets``: logins of all nodes by node_rank."""
    others = {k: target for k, target in targets.items() if k not in away}
    if not others:
        return ()
    staying = set(map(host_of, others.values()))
    names = (host if (host := host_of(targets[k])) not in staying else targets[k] for k in sorted(away))
    return tuple(name for name in dict.fromkeys(names) if name not in others.values())


def resume_command(run: str, exclude: Collection[str] = ()) -> str:
    """``gnnfleet resume RUN --exclude HOST``."""
    return " ".join([f"gnnfleet resume {run}", *(f"--exclude {name}" for name in exclude)])
