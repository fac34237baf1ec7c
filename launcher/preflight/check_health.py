"""Preflight checks of the health of hosts: faults of GPUs, and hosts that are slower than the others.

Faults warn: whether a run can bear them is for the user to decide.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

from launcher.preflight.finding import Finding
from launcher.preflight.survey import Survey
from launcher.text import count
from launcher.transport.fanout import on_nodes
from launcher.transport.rpc import NodeAgent

_HOT = 87  # °C from which GPUs of data centres lower their clocks

_SLOW = 0.7  #: share of the median below which a host counts as slow

_SECONDS = 0.6  # for each of three measurements

_TIMEOUT = 120.0  # seconds; importing torch from a shared disk is slow

_XIDS = {
    48: "an uncorrectable memory error",
    61: "its microcontroller failed",
    62: "its microcontroller failed",
    63: "a row of memory was replaced",
    64: "a row of memory could not be replaced",
    74: "an NVLink failed",
    79: "the GPU has fallen off the bus",
    94: "an uncorrectable memory error",
    95: "an uncorrectable memory error",
    119: "its GSP firmware does not answer",
    120: "its GSP firmware failed",
}

_FIGURES = (("product", "multiplies matrices", "GFLOP/s"), ("copy", "copies memory", "GB/s"), ("disk", "reads", "MB/s"))


def gpu_faults(name: str, gpu: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (message, remedy) for each fault that nvidia-smi shows of a GPU, whose facts are those of the probe."""
    if gpu["ecc"]:
        message = f"{name} has had {gpu['ecc']} uncorrectable memory errors since the driver was loaded"
        yield message, "reset or replace it; results may be wrong"
    if gpu.get("rows") == "failure":
        yield f"{name} has no spare row left for a damaged row of its memory", "replace it; results may be wrong"
    elif gpu.get("rows") == "pending":
        yield f"{name} replaces a damaged row of its memory at its next reset", "reset it: `nvidia-smi -r`, or a reboot"
    heat = f"{gpu['temperature']} °C" if gpu.get("temperature") else ""
    if gpu.get("slowed"):
        message = f"{name} has lowered its clocks because of {gpu['slowed']}" + (f" (it has {heat})" if heat else "")
        yield message, "check fans, air and power of the host; every other process waits for the slowest"
    elif gpu.get("temperature", 0) >= _HOT:
        yield f"{name} has {heat}", "check fans and air of the host before it lowers its clocks"
    if 0 < gpu.get("width", 0) < gpu["width_max"]:
        message = f"{name} uses {gpu['width']} of {gpu['width_max']} PCIe lanes"
        yield message, "seat the card again, and check its slot and riser; copies to it are slow"


def logged_faults(probe: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (message, remedy) for each fault of GPUs that a host's kernel log names."""
    for fault in probe.get("faults", ()):
        unlisted = f"the GPU at PCI {fault['pci']}, which nvidia-smi does not list,"
        name = unlisted if fault["index"] is None else f"CUDA device {fault['index']}"
        what = f" ({_XIDS[fault['code']]})" if fault["code"] in _XIDS else ""
        times = f", {count(fault['count'], 'time')}" if fault["count"] > 1 else ""
        message = f"{name} has reported Xid {fault['code']}{what} since the host was booted{times}"
        yield message, "`dmesg` has the time; reset the GPU or reboot the host, and replace the GPU if it comes again"


def measured(agents: Mapping[int, NodeAgent], folders: Mapping[int, str]) -> dict[int, Mapping[str, Any]]:
    """Return the figures of ``node/programs/speed.py``, measured at the same time, by node_rank of nodes that answer.

    agents: of one node of each host, with the trainer's Python. folders: where a file is written and read.
    """
    request = {k: {"folder": folders[k], "seconds": _SECONDS} for k in agents}
    return on_nodes(agents, lambda k: agents[k].call("speed", request[k], _TIMEOUT), timeout=_TIMEOUT).values


def slow_hosts(
    figures: Mapping[int, Mapping[str, Any]], probes: Mapping[int, Mapping[str, Any]]
) -> dict[int, list[str]]:
    """Return what is slow on each host, by node_rank: figures below ``_SLOW`` of the median of hosts alike.

    Hosts with the same number of processors are alike.
    """
    found: dict[int, list[str]] = {k: [] for k in figures}
    for k, own in figures.items():
        alike = [one for j, one in figures.items() if probes[j]["cpus"] == probes[k]["cpus"] and one["by"] == own["by"]]
        for name, verb, unit in _FIGURES:
            usual = median(one[name] for one in alike)
            if len(alike) > 1 and own[name] < _SLOW * usual:
                pool = f"the median of the {len(alike)} hosts with {count(probes[k]['cpus'], 'processor')}"
                share = f"{own[name] / usual:.0%}".replace("%", " %")
                found[k].append(f"{verb} at {share} of {pool} ({_short(own[name])} of {_short(usual)} {unit})")
    return found


def figures_text(own: Mapping[str, Any]) -> str:
    """Return ``380 GFLOP/s, memory 12 GB/s, disk 540 MB/s``; figures that could not be measured are left out."""
    named = {"product": "", "copy": "memory ", "disk": "disk "}
    return ", ".join(f"{named[name]}{_short(own[name])} {unit}" for name, _, unit in _FIGURES if own[name])


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def users_of(probe: Mapping[str, Any]) -> dict[str, str]:
    """Return the runs that use a host, as ``run X of alice``, by run id."""
    held = (lease for lease in probe["leases"] if not lease["resource"].startswith("ticket:"))
    return {lease["run_id"]: f"run {lease['run_id']} of {lease['user']}" for lease in held}


def speed_findings(survey: Survey, agents: Mapping[int, NodeAgent]) -> Iterator[Finding]:
    """Measure each host once, and yield a finding for it."""
    first = [k for k in sorted(agents) if k == min(survey.same_machine(k))]
    folders = {k: survey.probes[k]["workdir"] for k in first}
    figures = measured({k: agents[k] for k in first}, folders)
    slow = slow_hosts(figures, survey.probes)
    for k in first:
        busy = ", ".join(users_of(survey.probes[k]).values())
        if k not in figures:
            yield survey.finding(k, "warn", "speed", "its speed could not be measured", "look at its log: `dmesg`")
        elif slow[k]:
            remedy = "look for other processes (`top`), heat, and power settings; all hosts wait for the slowest"
            remedy = f"{busy} uses the host: measure again when it is free" if busy else remedy
            yield survey.finding(k, "warn", "speed", f"the host {'; '.join(slow[k])}", remedy)
        else:
            yield survey.finding(
                k, "ok", "speed", figures_text(figures[k]) + (f", while {busy} uses it" if busy else "")
            )
