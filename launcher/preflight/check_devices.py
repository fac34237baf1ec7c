"""Preflight checks of CUDA devices: whether they exist, can be used, and are free."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from launcher.node.exit_description import size
from launcher.preflight.finding import Finding, Survey, listed
from launcher.text import count

MOST_USED = 0.1  #: maximum fraction of a free device's memory that other processes may use

_IDLE = 16  # MiB that nvidia-smi may show as used on an idle device

_MIB = 1 << 20

#: Oldest driver for each major version of CUDA (NVIDIA's table of minor version compatibility).
OLDEST_DRIVER = {"11": 450, "12": 525, "13": 580}


def device_findings(survey: Survey, k: int) -> Iterator[Finding]:
    wanted, gpus = survey.config.nodes[k].devices, survey.probes[k]["gpus"]
    if not wanted:
        return
    missing = [number for number in wanted if number >= len(gpus)]
    if not gpus:
        message, remedy = (
            "`devices` is set, but nvidia-smi lists no device",
            "install the NVIDIA driver, or remove `devices`",
        )
        yield survey.finding(k, "block", "devices", message, remedy)
    elif missing:
        message = f"no CUDA device {listed(map(str, missing))}; the host has {len(gpus)}, numbered from 0"
        yield survey.finding(k, "block", "devices", message, "correct `devices`")
    else:
        found = [*_driver(survey, k), *_shared(survey, k)]
        found += [finding for number in wanted for finding in _device(survey, k, number)]
        yield from found
        if not any(finding.severity == "block" for finding in found):
            names = sorted({gpus[number]["name"] for number in wanted})
            yield survey.finding(k, "ok", "devices", f"{len(wanted)} × {listed(names)}")


def _driver(survey: Survey, k: int) -> Iterator[Finding]:
    cuda, driver = survey.version(k, "cuda"), str(survey.probes[k]["driver"])
    oldest = OLDEST_DRIVER.get(cuda.split(".")[0], 0)
    if driver.split(".")[0].isdigit() and int(driver.split(".")[0]) < oldest:
        message = f"driver {driver} is too old for torch's CUDA {cuda}, which needs {oldest} or newer"
        yield survey.finding(k, "block", "devices", message, "update the driver, or install torch for an older CUDA")


def _shared(survey: Survey, k: int) -> Iterator[Finding]:
    # NCCL would refuse a device that two nodes share.
    for j in survey.same_machine(k):
        both = sorted(set(survey.config.nodes[j].devices) & set(survey.config.nodes[k].devices))
        if j < k and both:
            message = f"CUDA device {listed(map(str, both))} is also used by {survey.labels([j])} on the same machine"
            yield survey.finding(k, "block", "devices", message, "give each node `devices` of its own")


def _device(survey: Survey, k: int, number: int) -> Iterator[Finding]:
    gpu, name = survey.probes[k]["gpus"][number], f"CUDA device {number}"
    leases = [lease for lease in survey.probes[k]["leases"] if lease["resource"] == f"cuda:{number}"]
    for lease in leases:
        remedy = f"wait for that run, stop it by `gnnfleet stop {lease['run_id']}`, or use other `devices`"
        yield survey.finding(k, "block", "devices", f"{name} is {lease['words']}", remedy)
    if not leases:
        yield from _used(survey, k, name, gpu)
    yield from _state(survey, k, name, gpu)


def _used(survey: Survey, k: int, name: str, gpu: Mapping[str, Any]) -> Iterator[Finding]:
    memory = f"{size(gpu['used'] * _MIB)} of {size(gpu['memory'] * _MIB)} used"
    who = "; ".join(_holder(holder) for holder in gpu["holders"]) or "by processes that are not visible to your login"
    remedy = "wait, end the processes that use it, or use other `devices`"
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
        remedy = "run `sudo nvidia-smi -c DEFAULT` on the host"
        yield survey.finding(k, "block", "devices", f"{name} is in compute mode Prohibited", remedy)
    elif gpu["mode"] == "Exclusive_Process" and node.nproc > len(node.devices):
        message = (
            f"{name} accepts one process only (Exclusive_Process), "
            f"but the node starts {node.nproc} processes on {count(len(node.devices), 'device')}"
        )
        remedy = "run `sudo nvidia-smi -c DEFAULT` on the host, or set fewer `procs`"
        yield survey.finding(k, "block", "devices", message, remedy)
    if gpu["mig"]:
        message = f"{name} is divided into MIG instances: a process uses the first one only"
        yield survey.finding(k, "warn", "devices", message, "")
    if gpu["ecc"]:
        message = f"{name} has had {gpu['ecc']} uncorrectable memory errors since the driver was loaded"
        yield survey.finding(k, "warn", "devices", message, "reset or replace it; results may be wrong")
