"""Preflight checks of a machine: tmux, run id, limits, clock, names, ports, leases, leftover processes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from launcher.config.roles import lead, serves
from launcher.errors import node_label
from launcher.plan.ports import master_candidates, service_candidates
from launcher.preflight.finding import Finding
from launcher.preflight.survey import Survey

_MAX_CLOCK_OFFSET = 5.0  # seconds

_OLDEST_TMUX = (2, 1)  # supports ``=name`` for an exact session name

_FILES_BASE, _FILES_PER_RANK = 256, 4  # open files of a process: base, and per rank of the run


def machine_findings(survey: Survey, k: int) -> Iterator[Finding]:
    config, probe = survey.config, survey.probes[k]
    yield from _tmux(survey, k)
    if existing := probe["taken"]:
        message = f"the run id is already in use: {existing} exists"
        remedy = "choose another --run-id, or stop that run and remove its folder"
        yield survey.finding(k, "block", "run id", message, remedy)

    # A rank has a connection to each other rank and graph server.
    needed = _FILES_BASE + _FILES_PER_RANK * survey.world_size
    now, most = probe["open_files"], probe["open_files_most"]
    if now < needed:
        remedy = f"raise `nofile` in /etc/security/limits.conf of the host (its hard limit is {most}) and log in again"
        if most >= needed:
            remedy = f"add `ulimit -n {needed}` to `setup` of this node"
        message = f"{now} open files allowed (ulimit -n), {needed} needed for {survey.world_size} processes"
        yield survey.finding(k, "block", "open files", message, remedy)

    offset = survey.clock_offsets[k]
    if abs(offset) > _MAX_CLOCK_OFFSET:
        side = "ahead of" if offset > 0 else "behind"
        message = f"clock is {abs(offset):.0f} s {side} the launching machine's"
        remedy = "no action needed: gnnfleet corrects times in logs; NTP would synchronise the clock"
        yield survey.finding(k, "warn", "clock", message, remedy)
    else:
        yield survey.finding(k, "ok", "clock", "clock agrees with the launching machine's")

    yield from _names(survey, k)
    if serves(config, k):
        yield _ports_finding(survey, k, "service port", service_candidates(config, k), "run.service_port")
    if k == lead(config) and config.world_size:
        yield _ports_finding(survey, k, "master port", master_candidates(config), "run.master_port")
    if error := probe["lease_error"]:
        message = f"leases of devices and ports cannot be checked: {error}"
        yield survey.finding(k, "warn", "leases", message, "the run starts anyway")

    # Another run uses the CPUs on which this node would train or serve.
    leases = probe["leases"] if not config.nodes[k].devices else ()
    on_gpus = {lease["run_id"] for lease in leases if any(need.startswith("cuda:") for need in lease["needs"])}
    others = {lease["run_id"]: lease["words"] for lease in leases if lease["run_id"] not in on_gpus}
    waited_for = {lease["run_id"] for lease in leases if "cpu" in lease["needs"]}
    for run_id, words in others.items():
        held_by = run_id if run_id in waited_for else ""  # not lasting graph servers
        wait = "wait for that run by --wait" if held_by else "wait for that run"
        remedy = f"both runs get slower: {wait}, or stop it by `gnnfleet stop {run_id}`"
        yield survey.finding(k, "warn", "other runs", f"its CPUs are {words}", remedy, held_by=held_by)

    for run in probe["leftovers"]:
        pids: list[Any] = run["pids"]
        what = "a process" if len(pids) == 1 else f"{len(pids)} processes"
        message = f"{what} of run {run['run_id']} still running without a supervisor: {', '.join(run['commands'])}"
        yield survey.finding(k, "warn", "leftovers", message, "", f"kill -KILL {' '.join(map(str, pids))}")


def _tmux(survey: Survey, k: int) -> Iterator[Finding]:
    version = survey.probes[k]["tmux"]
    if survey.config.in_job_steps:
        return
    numbers = tuple(map(int, re.findall(r"\d+", version)[:2]))
    if not version:
        remedy = "`sudo apt-get install -y tmux` (or dnf, conda)"
        yield survey.finding(k, "block", "tmux", "tmux is not installed", remedy)
    elif numbers and numbers < _OLDEST_TMUX:
        oldest = ".".join(map(str, _OLDEST_TMUX))
        message = f"tmux {version} is too old; {oldest} or newer is needed"
        remedy = "install a newer version (apt, dnf, or `conda install tmux`)"
        yield survey.finding(k, "block", "tmux", message, remedy)
    elif why := survey.probes[k]["tmux_error"]:
        remedy = "have it removed by its owner or an administrator; tmux creates it again, for this user alone"
        yield survey.finding(k, "block", "tmux", f"tmux refuses the folder of its sockets: {why}", remedy)
    else:
        yield survey.finding(k, "ok", "tmux", f"tmux {version}")


def _names(survey: Survey, k: int) -> Iterator[Finding]:
    # The name of another machine must not resolve to a loopback address.
    for name, address in survey.probes[k]["names"].items():
        whose = [j for j, node in enumerate(survey.config.nodes) if node.address == name]
        owner = whose[0] if whose else lead(survey.config)
        setting = f"`address` of node{owner}" if whose else "`run.master_addr`"
        remedy = f"set {setting} to an IP address, or add the name to /etc/hosts on this node"
        if not address:
            message = f"cannot resolve {name}, the address of {node_label(owner, survey.host(owner))}"
            yield survey.finding(k, "block", "names", message, remedy, code="peer-name")
        elif address.startswith("127.") and survey.machine(k) != survey.machine(owner) and name != "localhost":
            message = (
                f"{name}, the address of {node_label(owner, survey.host(owner))}, "
                f"resolves to {address}, which is this node itself"
            )
            yield survey.finding(k, "block", "names", message, remedy, code="peer-name")


def _ports_finding(survey: Survey, k: int, check: str, candidates: tuple[int, ...], setting: str) -> Finding:
    """Return a finding about a port of node ``k``, which blocks the run if no port in ``candidates`` is free.

    ``setting``: the config key of the port.
    """
    busy: Mapping[str, str] = survey.probes[k]["busy_ports"]
    if any(str(port) not in busy for port in candidates):
        return survey.finding(k, "ok", check, f"{check} free")
    ports = str(candidates[0]) if len(candidates) == 1 else f"{candidates[0]}–{candidates[-1]}"
    remedy = f"end that process, or set `{setting}` to another port"
    return survey.finding(k, "block", check, f"port {ports} is {busy[str(candidates[0])]}", remedy)


def same_machine(survey: Survey) -> Iterator[Finding]:
    """Yield a blocking finding for each node that has the same machine and work folder as an earlier node."""
    first: dict[tuple[Any, ...], int] = {}
    for k in sorted(survey.probes):
        probe = survey.probes[k]
        place = tuple(probe[name] for name in ("hostname", "boot_id", "workdir", "workdir_id"))
        j = first.setdefault(place, k)
        if j != k:
            other = node_label(j, survey.host(j))
            message = f"same machine ({probe['hostname']}) and work folder {probe['workdir']} as {other}"
            remedy = "give each node its own `workdir`, or remove one of the nodes"
            yield survey.finding(k, "block", "same machine", message, remedy)
