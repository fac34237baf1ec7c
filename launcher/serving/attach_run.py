"""Attaches a run to a serving cluster: finds the cluster by name and adds a client key for the run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from rich.console import Console

from launcher.command import Command, Secret
from launcher.config.resolve import resolve_run
from launcher.config.roles import GraphServer, ServingCluster
from launcher.config.schema import ClusterConfig
from launcher.errors import FleetError, OutOfReach, PreflightRefused, UsageError
from launcher.plan.files import code_digest
from launcher.plan.model import LaunchPlan
from launcher.plan.placement import endpoint
from launcher.plan.serialize import read_run
from launcher.plan.service_key import new_key_pair
from launcher.report.run_folder import FoundRun, known_here, read_folder
from launcher.run.launch import Attach, Attachment
from launcher.serving.client_keys import admit, server_key
from launcher.serving.cluster_state import (
    FILES,
    newest_description,
    on_connections,
    open_serving,
    remove_files,
    server_rows,
    server_states,
)
from launcher.serving.serve_status import ServeStatus
from launcher.transport.base import Transport
from launcher.transport.fanout import on_nodes

_TIMEOUT = 30.0

#: $@: host and port pairs. Prints the index of each pair to which no connection is made within 5 s.
_UNREACHED = """
index=0
while [ $# -gt 0 ]; do
  (timeout 5 bash -c 'exec 3<>"/dev/tcp/$0/$1"' "$1" "$2" 2>/dev/null || echo "unreached $index") &
  index=$((index + 1)); shift 2
done
wait
"""


def attach_of(config: ClusterConfig, config_path: Path, console: Console) -> Attach | None:
    """Return a function that attaches a run to the serving cluster ``data.serving``; None if the config names none.

    ``config_path``: the file from which ``config`` was read.
    """
    name = config.data.serving
    return None if name is None else lambda run_id: _attachment(name, config, config_path, run_id, console)


@contextmanager
def _attachment(
    name: str, config: ClusterConfig, config_path: Path, run_id: str, console: Console
) -> Iterator[Attachment]:
    """Within the block, the servers of serving cluster ``name`` accept the key of run ``run_id``.

    On exit the key is revoked, unless the run continues detached. Raises UsageError or FleetError if the cluster does
    not exist or no server is running.
    """
    with open_serving(name, config, config_path) as run:
        states = server_states(run, (*FILES, "service.key", "run.json"))
        cluster = newest_description(states, name)
        status = ServeStatus(cluster, tuple(one for one in states.values() if one.view.node.parts))
        if len(status.down) == len(status.nodes):
            why = "\n  ".join([status.sentence, *status.notes])
            raise FleetError(f"the run cannot attach: {why}")
        plan, wanted = run.found.plan, config.data.dataset
        served = plan.dataset if plan and plan.partition else ""  # '': partitioned by another command
        if served and wanted and served != wanted:
            raise UsageError(
                f"data.dataset: {wanted}, but serving cluster {name} serves {served}; leave data.dataset out"
            )
        notes = [*filter(None, [resolve_run(config).left_out]), *(status.notes if status.down else ())]
        # Different versions work together if they use the same protocol version.
        texts = (one.files["run.json"] for one in states.values() if "run.json" in one.files)
        running = next(map(read_run, texts), None)
        if running is not None and running.code_digest != code_digest():
            notes.append(
                f"serving cluster {name} runs another version of gnnfleet (code digest {running.code_digest[:16]}, "
                f"here {code_digest()[:16]}). If requests fail: gnnfleet serve stop {name}, then serve again"
            )
        server, key = server_key(states), Secret()
        if server is not None:
            pair = new_key_pair()
            key = Secret(json.dumps({**pair, "server": server}))
            notes += admit(run, run_id, pair["public"])
    console.print(f"attached to serving cluster {name}: {cluster.words}", soft_wrap=True, markup=False)
    for text in server_rows(cluster):
        console.print(text, soft_wrap=True, markup=False)
    for note in notes:
        _say(console, f"note: {note}")
    serving = ServingCluster(cluster.name, cluster.num_parts, cluster.servers, server is not None)
    attached = Attachment(serving, key, partial(_check_routes, serving))
    try:
        yield attached
    except OutOfReach:
        attached.run_continues = True
        raise
    finally:
        if attached.key and not attached.run_continues:
            for note in _detach(name, config, config_path, run_id):
                _say(console, f"note: {note}")


def _detach(name: str, config: ClusterConfig, config_path: Path, run_id: str) -> list[str]:
    """Revoke the key of run ``run_id`` on all servers of the serving cluster; return a note for each failure."""
    try:
        with open_serving(name, config, config_path) as run:
            holders = {k: node for k, node in run.nodes.items() if node.parts}
            errors = on_connections(
                {k: run.connections[k] for k in holders},
                lambda k, transport: remove_files(transport, [f"{holders[k].run_dir}/clients/{run_id}.key"]),
            )
            return [f"{holders[k].label} still admits key {run_id}: {error}" for k, error in sorted(errors.items())]
    except FleetError as error:
        return [f"the key of {run_id} could not be revoked in serving cluster {name}: {error}"]


def _say(console: Console, text: str) -> None:
    console.print(text, style="yellow", soft_wrap=True, markup=False)


# -- before a launch ----------------------------------------------------------------------------


def known_serving(config: ClusterConfig) -> ServingCluster | None:
    """Return the serving cluster that ``config`` names; None if it names none or this machine has no folder of it."""
    if config.data.serving is None:
        return None
    folder = known_here(config.data.serving, [Path(config.run.runs_dir).expanduser()])
    found = read_folder(folder) if folder is not None else None
    if found is None or found.plan is None or found.config is None or not found.plan.serve_only:
        return None
    plan, nodes = found.plan, found.config.nodes
    servers = tuple(
        GraphServer(k, nodes[k].host, endpoint(node.address, node.service_port), node.parts)
        for k, node in enumerate(plan.nodes)
        if node.parts
    )
    return ServingCluster(plan.run_id, plan.num_parts, servers, plan.encrypted)


def _check_routes(serving: ServingCluster, plan: LaunchPlan, transports: Mapping[int, Transport]) -> list[str]:
    """Test the connection from each node to each graph server; return a note for each that fails.

    Raises PreflightRefused if a node reaches no server.
    """
    pairs: list[str] = []
    for server in serving.servers:
        host, _, port = server.endpoint.removeprefix("tcp://").rpartition(":")
        pairs += [host.strip("[]"), port]
    command = Command(("bash", "-c", _UNREACHED, "bash", *pairs))
    answers = on_nodes(
        transports, lambda k: transports[k].run(command, timeout=_TIMEOUT).stdout.decode("utf-8", "replace")
    ).or_raise()
    failed = {}
    for k, output in answers.items():
        indices = sorted(map(int, re.findall(r"unreached (\d{1,6})$", output, re.MULTILINE)))
        failed[k] = [serving.servers[i] for i in indices if i < len(serving.servers)]
    labels = {node.node_rank: node.label for node in plan.nodes}
    cut_off = [labels[k] for k in sorted(failed) if len(failed[k]) == len(serving.servers)]
    if cut_off:
        endpoints = ", ".join(server.endpoint for server in serving.servers)
        raise PreflightRefused(
            f"{', '.join(cut_off)}: no graph server of {serving.name} can be reached from there ({endpoints}); open "
            "these ports in the firewall and launch again"
        )
    return [
        f"{labels[k]} cannot reach {serving.label(server)} at {server.endpoint}; it will use the other servers"
        for k in sorted(failed)
        for server in failed[k]
    ]


def leave(found: FoundRun) -> list[str]:
    """Revoke the key of a detached run that has ended; return a note for each server where that failed."""
    plan, config = found.plan, found.config
    if plan is None or config is None or not plan.serving or not plan.encrypted:
        return []
    if found.launch is not None and found.launch.stage == "end" and not found.launch.detached:
        return []  # its launcher has revoked the key
    return _detach(plan.serving, config, found.config_given or Path("its cluster file"), found.run_id)
