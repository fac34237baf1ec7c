"""Attaches a run to a serving cluster: finds it by name and has its servers admit a key of the run."""

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
from launcher.plan.model import LaunchPlan, NodePlan
from launcher.plan.placement import endpoint
from launcher.plan.serialize import read_run
from launcher.plan.service_key import new_key_pair
from launcher.report.run_folder import FoundRun, known_here, read_folder
from launcher.run.launch import Attach, Attachment
from launcher.serving.client_keys import admit, server_key, withdraw
from launcher.serving.cluster_state import (
    FILES,
    ClusterDescription,
    ServerState,
    newest,
    open_serving,
    server_lines,
    server_states,
)
from launcher.serving.serve_status import ServeStatus
from launcher.transport.base import Transport
from launcher.transport.fanout import on_nodes

_TIMEOUT = 30.0

#: $@: host and port pairs; prints the place in the list of each that cannot be connected to within 5 s.
_UNREACHED = """
place=0
while [ $# -gt 0 ]; do
  (timeout 5 bash -c 'exec 3<>"/dev/tcp/$0/$1"' "$1" "$2" 2>/dev/null || echo "unreached $place") &
  place=$((place + 1)); shift 2
done
wait
"""


def attach_of(config: ClusterConfig, given: Path, console: Console) -> Attach | None:
    """Attaches a run to the serving cluster that ``config`` (of file ``given``) names; None where it names none."""
    name = config.data.serving
    return None if name is None else lambda run_id: attachment(name, config, given, run_id, console)


@contextmanager
def attachment(name: str, config: ClusterConfig, given: Path, run_id: str, console: Console) -> Iterator[Attachment]:
    """Serving cluster ``name``, open to run ``run_id``.

    The run's key is taken back in the end, unless the run goes on. Raises UsageError and FleetError when there is no
    such cluster, or nothing of it serves.
    """
    made = _attach(name, config, given, run_id, console)
    try:
        yield made
    except OutOfReach:
        made.run_continues = True
        raise
    finally:
        if made.key and not made.run_continues:
            for note in detach(name, config, given, run_id):
                _say(console, f"note: {note}")


def _attach(name: str, config: ClusterConfig, given: Path, run_id: str, console: Console) -> Attachment:
    with open_serving(name, config, given) as run:
        there = server_states(run, (*FILES, "service.key", "run.json"))
        cluster = newest(there, name)
        status = ServeStatus(cluster, tuple(one for one in there.values() if one.view.node.parts))
        if len(status.down) == len(status.nodes):
            why = "\n  ".join([status.sentence, *status.notes])
            raise FleetError(f"the run cannot attach: {why}")
        _check_dataset(config, run.found, name)
        notes = [
            *filter(None, [resolve_run(config).left_out]),
            *(status.notes if status.down else ()),
            *_other_code(there, name),
        ]
        server, key = server_key(there), Secret()
        if server is not None:
            pair = new_key_pair()
            key = Secret(json.dumps({**pair, "server": server}))
            notes += admit(run, run_id, pair["public"])
    console.print(f"attached to serving cluster {name}: {cluster.words}", soft_wrap=True, markup=False)
    for line in server_lines(cluster):
        console.print(line, soft_wrap=True, markup=False)
    for note in notes:
        _say(console, f"note: {note}")
    serving = _for_run(cluster, server is not None)
    return Attachment(serving, key, partial(check_ways, serving))


def detach(name: str, config: ClusterConfig, given: Path, run_id: str) -> list[str]:
    """Have the servers admit the run no more; those that still do, with why."""
    try:
        with open_serving(name, config, given) as run:
            return withdraw(run, run_id)
    except FleetError as error:
        return [f"the key of {run_id} was not taken back from serving cluster {name}: {error}"]


def _say(console: Console, text: str) -> None:
    console.print(text, style="yellow", soft_wrap=True, markup=False)


def _for_run(cluster: ClusterDescription, encrypted: bool) -> ServingCluster:
    return ServingCluster(cluster.name, cluster.num_parts, cluster.servers, encrypted)


def _check_dataset(config: ClusterConfig, found: FoundRun, name: str) -> None:
    """Raises UsageError when the config names another dataset than the one that is served."""
    served = found.plan.dataset if found.plan and found.plan.partition else ""  # else the parts were made elsewhere
    wanted = config.data.dataset
    if served and wanted and served != wanted:
        raise UsageError(f"data.dataset: {wanted}, but serving cluster {name} serves {served}; leave data.dataset out")


def _other_code(there: Mapping[int, ServerState], name: str) -> list[str]:
    """That the servers run another version of this program; those of one wire version still talk."""
    texts = (one.files["run.json"] for one in there.values() if "run.json" in one.files)
    plan = next(map(read_run, texts), None)
    if plan is None or plan.code_digest == code_digest():
        return []
    return [
        f"serving cluster {name} runs other code than this (digest {plan.code_digest[:16]}, here "
        f"{code_digest()[:16]}); should they not understand each other: gnnfleet serve stop {name}, and serve again"
    ]


# -- before a launch ----------------------------------------------------------------------------


def known_serving(config: ClusterConfig) -> ServingCluster | None:
    """The serving cluster as this machine last knew it, for a plan that connects to nothing."""
    if config.data.serving is None:
        return None
    folder = known_here(config.data.serving, [Path(config.run.runs_dir).expanduser()])
    found = read_folder(folder) if folder is not None else None
    if found is None or found.plan is None or found.config is None or not found.plan.serve_only:
        return None
    plan, nodes = found.plan, found.config.nodes
    servers = tuple(_planned(node, nodes[node.node_rank].host) for node in plan.nodes if node.parts)
    return ServingCluster(plan.run_id, plan.num_parts, servers, plan.encrypted)


def _planned(node: NodePlan, host: str) -> GraphServer:
    return GraphServer(node.node_rank, host, endpoint(node.address, node.service_port), node.parts)


def check_ways(serving: ServingCluster, plan: LaunchPlan, lines: Mapping[int, Transport]) -> list[str]:
    """Try the way from each node of a run to each server; notes on those that are closed.

    Raises PreflightRefused when a node reaches no server at all.
    """
    places = [place for server in serving.servers for place in _host_and_port(server.endpoint)]
    command = Command(("bash", "-c", _UNREACHED, "bash", *places))
    answers = on_nodes(
        lines, lambda k: lines[k].run(command, timeout=_TIMEOUT).stdout.decode("utf-8", "replace")
    ).or_raise()
    closed = {k: [serving.servers[i] for i in _places(told) if i < len(serving.servers)] for k, told in answers.items()}
    labels = {node.node_rank: node.label for node in plan.nodes}
    cut_off = [labels[k] for k in sorted(closed) if len(closed[k]) == len(serving.servers)]
    if cut_off:
        ends = ", ".join(server.endpoint for server in serving.servers)
        raise PreflightRefused(
            f"{', '.join(cut_off)}: no graph server of {serving.name} can be reached from there ({ends}); open the "
            "way in the firewall between them, and launch again"
        )
    return [
        f"{labels[k]} does not reach {serving.label(server)} at {server.endpoint}; it will ask the others"
        for k in sorted(closed)
        for server in closed[k]
    ]


def _host_and_port(place: str) -> tuple[str, str]:
    host, _, port = place.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), port


def _places(told: str) -> list[int]:
    return sorted(int(place) for place in re.findall(r"unreached (\d{1,6})$", told, re.MULTILINE))


def leave(found: FoundRun) -> list[str]:
    """A run that its launcher had left has ended: take back the key that let it in; what stands against it."""
    plan, config = found.plan, found.config
    if plan is None or config is None or not plan.serving or not plan.encrypted:
        return []
    if found.launch is not None and found.launch.stage == "end" and not found.launch.detached:
        return []  # its launcher has taken it back
    return detach(plan.serving, config, found.config_given or Path("its cluster file"), found.run_id)
