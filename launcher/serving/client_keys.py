"""Client keys of a serving cluster: one for each run and notebook; the public key lies beside the servers' key."""

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
from launcher.plan.service_key import new_key_pair
from launcher.report.run_folder import user_name
from launcher.serving.cluster_state import FILES, ServerState, newest, on_lines, remove_files, server_states
from launcher.transport.base import Transport


@dataclass(frozen=True)
class MadeKey:
    """A key file that was made."""

    told: str
    notes: tuple[str, ...]


def make_key(run: OpenRun, output: Path, person: str | None) -> MadeKey:
    """A new key file at ``output``, admitted by all servers in reach; raises FleetError when it cannot be made."""
    if output.exists():
        raise UsageError(f"{output} exists already; choose another file, or delete it")
    name = run.found.run_id
    there = server_states(run, (*FILES, "service.key"))
    cluster = newest(there, name)
    server = server_key(there)
    endpoints = [place.endpoint for place in cluster.servers]
    if server is None:
        raise UsageError(
            f"serving cluster {name} is not encrypted (run.encrypt), so it asks for no key: "
            f"gnnfleet.connect({json.dumps(endpoints)})"
        )
    pair = new_key_pair()
    guest = _guest_name(person or user_name())
    notes = admit(run, guest, pair["public"])
    values = {**pair, "server": server, "endpoints": endpoints, "name": name}
    write_whole(output, json.dumps(values, indent=1) + "\n", private=True)
    told = f'{output}: lets in whoever has it. In Python: graph = gnnfleet.connect(key="{output}")\n'
    return MadeKey(told + f"to take it back: delete clients/{guest}.key in the run folders of {name}", tuple(notes))


def server_key(there: Mapping[int, ServerState]) -> str | None:
    """The servers' public key; None where they are not encrypted."""
    for one in there.values():
        if "service.key" in one.files:
            return str(json.loads(one.files["service.key"])["public"])
    return None


def admit(run: OpenRun, guest: str, public: str) -> list[str]:
    """Have all servers admit ``public`` from now on; those that were not told, with why.

    Raises FleetError when none was.
    """
    holders = {k: node for k, node in run.nodes.items() if node.parts}

    def put(k: int, line: Transport) -> None:
        line.write(f"{public}\n".encode(), f"{holders[k].run_dir}/clients/{guest}.key", mode=0o600)

    errors = on_lines({k: run.attempts[k] for k in holders}, put)
    notes = [f"{holders[k].label} does not admit this key: {error}" for k, error in sorted(errors.items())]
    if len(errors) == len(holders):
        raise FleetError(f"no server of {run.found.run_id} could be given the key:\n  " + "\n  ".join(notes))
    return notes


def withdraw(run: OpenRun, guest: str) -> list[str]:
    """Have no server admit that guest any more; those that were not told, with why."""
    holders = {k: node for k, node in run.nodes.items() if node.parts}
    errors = on_lines(
        {k: run.attempts[k] for k in holders},
        lambda k, line: remove_files(line, [f"{holders[k].run_dir}/clients/{guest}.key"]),
    )
    return [f"{holders[k].label} still admits key {guest}: {error}" for k, error in sorted(errors.items())]


def _guest_name(person: str) -> str:
    """File name of a key; no two are the same."""
    return f"{re.sub(r'[^A-Za-z0-9_-]+', '-', person)[:40] or 'guest'}-{secrets.token_hex(3)}"
