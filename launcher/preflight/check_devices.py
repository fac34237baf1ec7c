"""Findings about CUDA devices: whether they exist, can be used, and are free."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from launcher.node.exit_description import size
from launcher.preflight.finding import Finding, Survey, listed

MOST_USED = 0.1  #: share of a device's memory that others may hold

_IDLE = 16  # MiB that a device may show as used though nobody uses it

_MIB = 1 << 20

#: The oldest driver that runs each major version of CUDA (NVIDIA's table of minor version compatibility).
_OLDEST_DRIVER = {"11": 450, "12": 525, "13": 580}


def device_findings(survey: Survey, k: int) -> Iterator[Finding]:
    """Of the devices node ``k`` is to use."""
    wanted, there = survey.config.nodes[k].devices, survey.probes[k]["gpus"]
    if not wanted:
        return
    lacking = [number for number in wanted if number >= len(there)]
    if not there:
        message, remedy = "devices are asked for, but nvidia-smi shows none", "install the driver, or drop `devices`"
        yield survey.finding(k, "block", "devices", message, remedy)
    elif lacking:
        message = f"no CUDA device {listed(map(str, lacking))}; there are {len(there)}, counted from 0"
        yield survey.finding(k, "block", "devices", message, "correct `devices`")
    else:
        found = [*_driver(survey, k), *_shared(survey, k)]
        found += [finding for number in wanted for finding in _device(survey, k, number)]
        yield from found
        if not any(finding.severity == "block" for finding in found):
            names = sorted({there[number]["name"] for number in wanted})
            yield survey.finding(k, "ok", "devices", f"{len(wanted)} × {listed(names)}")


def _driver(survey: Survey, k: int) -> Iterator[Finding]:
    cuda, driver = survey.version(k, "cuda"), str(survey.probes[k]["driver"])
    oldest = _OLDEST_DRIVER.get(cuda.split(".")[0], 0)
    if driver.split(".")[0].isdigit() and int(driver.split(".")[0]) < oldest:
        message = f"driver {driver} is too old for torch's CUDA {cuda}, which needs {oldest} or newer"
        yield survey.finding(k, "block", "devices", message, "update the driver, or install a torch for an older CUDA")


def _shared(survey: Survey, k: int) -> Iterator[Finding]:
    """Two nodes of one machine never share a device: leases and NCCL both refuse it."""
    for j in survey.housemates(k):
        both = sorted(set(survey.config.nodes[j].devices) & set(survey.config.nodes[k].devices))
        if j < k and both:
            message = f"CUDA device {listed(map(str, both))} is also {survey.labels([j])}'s, on the same machine"
            yield survey.finding(k, "block", "devices", message, "give each node `devices` of its own")


def _device(survey: Survey, k: int, number: int) -> Iterator[Finding]:
    gpu, name = survey.probes[k]["gpus"][number], f"CUDA device {number}"
    leases = [lease for lease in survey.probes[k]["leases"] if lease["resource"] == f"cuda:{number}"]
    for lease in leases:
        remedy = f"wait for it, end it with `gnnfleet stop {lease['run_id']}`, or take other `devices`"
        yield survey.finding(k, "block", "devices", f"{name} is {lease['words']}", remedy)
    if not leases:
        yield from _used(survey, k, name, gpu)
    yield from _state(survey, k, name, gpu)


def _used(survey: Survey, k: int, name: str, gpu: Mapping[str, Any]) -> Iterator[Finding]:
    memory = f"{size(gpu['used'] * _MIB)} of {size(gpu['memory'] * _MIB)} used"
    who = "; ".join(_holder(holder) for holder in gpu["holders"]) or "by whom cannot be seen from here"
    remedy = "wait, end what uses it, or take other `devices`"
    if gpu["used"] > max(_IDLE, MOST_USED * gpu["memory"]):
        yield survey.finding(k, "block", "devices", f"{name} is not free: {memory}, {who}", remedy)
    elif gpu["holders"]:
        yield survey.finding(k, "warn", "devices", f"{name} is shared: {memory}, {who}", remedy)


def _holder(holder: Mapping[str, Any]) -> str:
    user = f" of {holder['user']}" if holder.get("user") else ""
    since = holder.get("since")
    began = time.strftime(" since %Y-%m-%d %H:%M UTC", time.gmtime(since)) if since else ""
    return f"{size(holder['memory'] * _MIB)} by pid {holder['pid']}{user}{began}: {holder['command']}"


def _state(survey: Survey, k: int, name: str, gpu: Mapping[str, Any]) -> Iterator[Finding]:
    node = survey.config.nodes[k]
    if gpu["mode"] == "Prohibited":
        remedy = "`sudo nvidia-smi -c DEFAULT` there"
        yield survey.finding(k, "block", "devices", f"{name} is in compute mode Prohibited", remedy)
    elif gpu["mode"] == "Exclusive_Process" and node.nproc > len(node.devices):
        message = f"{name} takes one process only (Exclusive_Process), and {node.nproc} share {len(node.devices)}"
        yield survey.finding(k, "block", "devices", message, "`sudo nvidia-smi -c DEFAULT` there, or fewer `procs`")
    if gpu["mig"]:
        message = f"{name} is divided (MIG): a process sees its first instance only"
        yield survey.finding(k, "warn", "devices", message, "")
    if gpu["ecc"]:
        message = f"{name} has had {gpu['ecc']} memory errors that could not be corrected since the driver was loaded"
        yield survey.finding(k, "warn", "devices", message, "reset it, or take another; results may be wrong")
