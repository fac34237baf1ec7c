"""What earlier tests of the wire have shown, kept for an hour for nodes that are as they were.

``${XDG_CACHE_HOME:-~/.cache}/gnnfleet/preflight.json``: ``{"version": 1, "entries": [{"time", "nodes": {identity:
address}}]}``, one entry for each test: all of its nodes reached each other, each at the address given. A node's
identity is a digest of everything that decides on that: boot, host name, login, addresses, routes, configured
address and interface, and the ports that training may take. So a node that was rebooted, moved, renumbered or
rerouted, or is asked for other ports, is a new one. What no identity can show, a firewall that was changed, is
found by the few pairs that are tested each time (``Wiring.connect``).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.config import ClusterConfig
from launcher.placement import candidate_ports
from launcher.roles import lead
from launcher.wholefile import write_whole
from launcher.wiring import Pair, Wired, Wiring

_VERSION = 1
_LIFETIME = 3600.0
_ENTRIES = 64


@dataclass(frozen=True)
class Known:
    """What the cache says of one cluster."""

    pairs: frozenset[Pair] = frozenset()  #: reached each other
    addresses: Mapping[int, str] = field(default_factory=dict)  #: at these, by node_rank of the target
    since: float = 0.0  #: when the oldest of them was tested; seconds since 1970


def cache_file() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "gnnfleet/preflight.json"


def identities(config: ClusterConfig, wiring: Wiring) -> dict[int, str]:
    """One digest for each node that listens."""
    return {k: _identity(config, k, wiring.probes[k], wiring.listening[k].routes) for k in wiring.listening}


def _identity(config: ClusterConfig, k: int, probe: Mapping[str, Any], routes: Sequence[str]) -> str:
    node = config.nodes[k]
    ports = [candidate_ports(config, k), config.run.master_addr if k == lead(config) else ""]
    roles = {one.role for one in config.nodes}  # who must reach whom goes by role
    ports += [node.role, *sorted(roles)] if len(roles) > 1 else []
    here = [probe[name] for name in ("boot_id", "hostname", "address", "addresses")]
    words = [node.login, node.address, node.interface, *ports, *here, *routes]
    return hashlib.sha256(json.dumps(words).encode()).hexdigest()[:24]


def known(names: Mapping[int, str], now: float | None = None) -> Known:
    """Of the newest entry that knows most of the nodes: the pairs among them."""
    now = time.time() if now is None else now
    entries = [entry for entry in _read() if 0 <= now - entry["time"] < _LIFETIME]
    best: dict[str, Any] = max(
        entries, key=lambda entry: (len(entry["nodes"].keys() & set(names.values())), entry["time"]), default={}
    )
    if not best:
        return Known()
    there = {k: best["nodes"][name] for k, name in names.items() if name in best["nodes"]}
    return Known(frozenset((i, j) for i in there for j in there if i != j), there, best["time"])


def remember(names: Mapping[int, str], wired: Wired, since: float) -> None:
    """Keep what a test has shown of the nodes with all ways open; ``since``: when the oldest pair was tested.
    What was known of the others is forgotten."""
    trouble = {k for one in wired.blocked for k in (one.source, one.door.node_rank)} | wired.errors.keys()
    fine = {names[k]: wired.address[k] for k in names if k not in trouble}
    bad = {names[k] for k in names if k in trouble}
    with suppress(OSError), _locked():  # a cache that cannot be written costs a second at the next launch
        entries: list[dict[str, Any]] = [{"time": since, "nodes": fine}]
        for entry in _read():
            nodes = {name: address for name, address in entry["nodes"].items() if name not in bad}
            if time.time() - entry["time"] < _LIFETIME and not nodes.keys() <= fine.keys():
                entries.append({"time": entry["time"], "nodes": nodes})
        entries = [entry for entry in entries if len(entry["nodes"]) > 1][:_ENTRIES]
        write_whole(cache_file(), json.dumps({"version": _VERSION, "entries": entries}))


def _read() -> list[dict[str, Any]]:
    """Entries of the file; none where it is missing, damaged, or of another version."""
    try:
        kept = json.loads(cache_file().read_text())
        entries = kept["entries"] if kept["version"] == _VERSION else []
        return [{"time": float(one["time"]), "nodes": dict(one["nodes"])} for one in entries]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


@contextmanager
def _locked() -> Iterator[None]:
    lock = cache_file().with_suffix(".lock")
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
