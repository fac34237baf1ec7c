"""Creates client keys of a serving cluster, and adds them to its servers: one for each run or notebook."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import FleetError, UsageError
from launcher.files import write_whole
from launcher.manage.node_views import OpenRun
from launcher.node.json_reader import json_object, text
from launcher.plan.service_key import new_key_pair
from launcher.report.launch_file import user_name
from launcher.serving.cluster_state import (
    FILES,
    ServerState,
    newest_description,
    on_connections,
    server_states,
)
from launcher.transport.base import Transport


@dataclass(frozen=True)
class _MadeKey:
    message: str  #: for the user: how to use and to revoke the key
    notes: tuple[str, ...]  #: servers that did not get the key, and why


def make_key(run: OpenRun, output: Path, person: str | None) -> _MadeKey:
    """Create a key file at ``output`` and add its public key on all reachable servers.

    ``person``: first part of the key's name; None: the user's name. Raises UsageError or FleetError.
    """
    if output.exists():
        raise UsageError(f"{output} exists already; choose another file, or delete it")
    name = run.found.run_id
    states = server_states(run, (*FILES, "service.key"))
    cluster = newest_description(states, name)
    public = server_key(states)
    endpoints = [server.endpoint for server in cluster.servers]
    if public is None:
        raise UsageError(
            f"serving cluster {name} is not encrypted (run.encrypt), so clients need no key: "
            f"gnnfleet.connect({json.dumps(endpoints)})"
        )
    pair = new_key_pair()
    prefix = re.sub(r"[^A-Za-z0-9_-]+", "-", person or user_name())[:40] or "guest"
    client = f"{prefix}-{secrets.token_hex(3)}"
    notes = admit(run, client, pair["public"])
    values = {**pair, "server": public, "endpoints": endpoints, "name": name}
    write_whole(output, json.dumps(values, indent=1) + "\n", private=True)
    message = f'{output}: anyone with this file can connect. In Python: graph = gnnfleet.connect(key="{output}")\n'
    return _MadeKey(message + f"to revoke it: delete clients/{client}.key in the run folders of {name}", tuple(notes))


def server_key(states: Mapping[int, ServerState]) -> str | None:
    """Return the public key that all graph servers share; None if the cluster is not encrypted."""
    keys = [one.files["service.key"] for one in states.values() if "service.key" in one.files]
    if not keys:
        return None
    try:
        return next(text(found["public"]) for found in map(json_object, keys) if found and "public" in found)
    except (StopIteration, ValueError):
        raise FleetError(
            "service.key in the run folders of the servers is damaged; stop and start the serving cluster"
        ) from None


def admit(run: OpenRun, client: str, public: str) -> list[str]:
    """Make all servers accept ``public``, the public key of ``client``; return a note for each failure.

    Raises FleetError if it failed on all servers.
    """
    holders = {k: node for k, node in run.nodes.items() if node.parts}

    def put(k: int, transport: Transport) -> None:
        transport.write(f"{public}\n".encode(), f"{holders[k].run_dir}/clients/{client}.key", mode=0o600)

    errors = on_connections({k: run.connections[k] for k in holders}, put)
    notes = [f"{holders[k].label} does not admit this key: {error}" for k, error in sorted(errors.items())]
    if len(errors) == len(holders):
        raise FleetError(f"the key could not be added on any server of {run.found.run_id}:\n  " + "\n  ".join(notes))
    return notes
