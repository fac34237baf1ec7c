"""``gnnfleet hosts``: the machines of a cluster file at a glance, with what uses them and what is wrong with them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import click
from rich.console import Console
from rich.filesize import decimal
from rich.text import Text

from launcher.config.resolve import ResolvedConfig
from launcher.errors import NodeError, reason_of
from launcher.preflight.check_devices import is_free
from launcher.preflight.check_health import figures_text, gpu_faults, logged_faults, measured, slow_hosts, users_of
from launcher.preflight.preflight import open_agents, probe_all
from launcher.preflight.survey import Inquiry
from launcher.text import Column, FittedTable, clock_time, spans
from launcher.transport import close_all, connect_all
from launcher.transport.base import Transport

_COLUMNS = (
    Column("host", 9, cut_to=12),
    Column("nodes", 1),
    Column("processors", 5, right=True),
    Column("free memory", 6, right=True),
    Column("GPUs", 7, optional=True),
    Column("free disk", 4, right=True),
    Column("speed", 3, optional=True),
    Column("in use by", 8, cut_to=20),
)

_LITTLE = 0.03  #: share of a disk that should be free


@dataclass
class _Host:
    """One machine. Bytes; times in seconds since 1970."""

    host: str
    nodes: tuple[int, ...]  #: its node_ranks
    error: str = ""  #: why it could not be asked; the rest is then empty
    processors: int = 0
    memory: int = 0
    free_memory: int = 0
    disk: int = 0  #: of the work folder's file system
    free_disk: int = 0
    gpus: Sequence[Mapping[str, Any]] = ()  #: name, uuid, free, memory, used, temperature (0: unknown)
    runs: Sequence[Mapping[str, Any]] = ()  #: run_id, user, since, resources
    speed: Mapping[str, Any] = field(default_factory=dict)  #: the reply of ``speed.py``; {} if not measured
    findings: Sequence[str] = ()  #: what is wrong, with a remedy


def show_hosts(config: ResolvedConfig, console: Console, *, speed: bool = False, as_json: bool = False) -> int:
    """Print a line per host, and what is wrong; return the exit status: 0, or 1 if a host could not be asked.

    speed: also measure the hosts, all at the same time.
    """
    connections = connect_all(config)
    try:
        opened = {k: one for k, one in connections.items() if isinstance(one, Transport)}
        with open_agents() as agents, open_agents() as inside:
            answers = probe_all(replace(Inquiry.about(config), all_devices=True), opened, agents, inside)
            failed = {k: one for k, one in connections.items() if isinstance(one, Exception)} | answers.errors
            probes = {k: probe for k, (probe, _) in sorted(answers.values.items())}
            # The node_ranks of each machine; of one that did not answer, those of equal logins.
            found: dict[tuple[str, ...], list[int]] = {}
            for k in sorted([*probes, *failed]):
                known = k in probes
                key = (probes[k]["hostname"], probes[k]["boot_id"]) if known else (config.nodes[k].login,)
                found.setdefault(key, []).append(k)
            groups = list(found.values())
            first = [group[0] for group in groups if group[0] in probes] if speed else []
            trainers = {**agents, **inside}
            folders = {k: probes[k]["workdir"] for k in first}
            figures = measured({k: trainers[k] for k in first}, folders) if first else {}
    finally:
        close_all(connections)
    slow = slow_hosts(figures, probes)
    hosts = [_host(config, group, probes, failed, figures, slow) for group in groups]
    if as_json:
        click.echo(json.dumps({"hosts": [asdict(host) for host in hosts]}, indent=1))
    else:
        rows: list[tuple[str, ...]] = []
        for host in hosts:
            nodes = spans(host.nodes)
            if host.error:
                rows.append((host.host, nodes, "–", "–", "", "–", "", "not reached"))
                continue
            runs = []
            for run in host.runs:
                devices = [name.partition(":")[2] for name in run["resources"] if name.startswith("cuda:")]
                cuda = f", CUDA {', '.join(devices)}" if devices else ""
                runs.append(f"run {run['run_id']} of {run['user']} since {clock_time(run['since'])}{cuda}")
            memory = f"{decimal(host.free_memory)} of {decimal(host.memory)}"
            models = Counter(gpu["name"].removeprefix("NVIDIA ") for gpu in host.gpus)
            gpus = ", ".join(f"{number} × {name}" for name, number in models.items())
            gpus += f", {sum(gpu['free'] for gpu in host.gpus)} free" if models else ""
            measures = figures_text(host.speed) if host.speed else ""
            disk, used = decimal(host.free_disk), "; ".join(runs) or "–"
            rows.append((host.host, nodes, str(host.processors), memory, gpus, disk, measures, used))
        console.print(FittedTable(_COLUMNS, rows))
        for host in hosts:
            if host.error:
                console.print(Text(f"{host.host}: {host.error}", "red"))
            for finding in host.findings:
                console.print(Text(f"{host.host}: {finding}", "yellow"))
    return 1 if failed else 0


def _host(
    config: ResolvedConfig,
    group: Sequence[int],
    probes: Mapping[int, Mapping[str, Any]],
    failed: Mapping[int, Exception],
    figures: Mapping[int, Mapping[str, Any]],
    slow: Mapping[int, Sequence[str]],
) -> _Host:
    k = group[0]
    if k in failed:
        why = failed[k]
        remedy = f" – {why.remedy}" if isinstance(why, NodeError) and why.remedy else ""
        return _Host(config.nodes[k].login, tuple(group), reason_of(why) + remedy)
    probe = probes[k]
    leases = [lease for lease in probe["leases"] if not lease["resource"].startswith("ticket:")]
    runs: dict[str, dict[str, Any]] = {}
    for lease in leases:
        own = {"run_id": lease["run_id"], "user": lease["user"], "since": lease["since"], "resources": []}
        run = runs.setdefault(lease["run_id"], own)
        run["since"] = min(run["since"], lease["since"])
        run["resources"].append(lease["resource"])
    names = ("name", "uuid", "memory", "used", "temperature")
    gpus = [{**{name: gpu[name] for name in names}, "free": is_free(gpu, leases)} for gpu in probe["gpus"]]

    # What is wrong.
    faults = [fault for gpu in probe["gpus"] for fault in gpu_faults(f"CUDA device {gpu['index']}", gpu)]
    findings = [f"{message} – {remedy}" for message, remedy in [*faults, *logged_faults(probe)]]
    if not probe["tmux"] and not config.in_job_steps:
        findings.append("tmux is not installed – `sudo apt-get install -y tmux` (or dnf, conda)")
    for node_rank in group:
        if error := probes[node_rank]["workdir_error"]:
            findings.append(f"the work folder {probes[node_rank]['workdir']} cannot be used: {error}")
    if probe["disk_free"] < _LITTLE * probe["disk"]["size"]:
        free = decimal(probe["disk_free"])
        findings.append(f"only {free} of its disk are free – gnnfleet clean deletes what old runs left")
    left = {run["run_id"]: run["pids"] for node_rank in group for run in probes[node_rank]["leftovers"]}
    for run_id, pids in left.items():
        numbers = " ".join(map(str, pids))
        findings.append(f"processes of run {run_id} still run without a supervisor – kill -KILL {numbers}")
    if slow.get(k):
        busy = ", ".join(users_of(probe).values())
        remedy = f"{busy} uses it: measure again when it is free" if busy else "look for other processes (`top`), heat"
        findings.append(f"it {'; '.join(slow[k])} – {remedy}")
    return _Host(
        host=config.nodes[k].login,
        nodes=tuple(group),
        processors=probe["cpus"],
        memory=probe["memory_limit"],
        free_memory=probe["memory_free"],
        disk=probe["disk"]["size"],
        free_disk=probe["disk_free"],
        gpus=gpus,
        runs=list(runs.values()),
        speed=figures.get(k, {}),
        findings=findings,
    )
