"""Preflight checks of CUDA devices: whether they exist, can be used, and are free."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.config.roles import kernel_requirement
from launcher.node.exit_description import size
from launcher.preflight.check_health import gpu_faults, logged_faults
from launcher.preflight.finding import Finding, Severity
from launcher.preflight.survey import Survey
from launcher.text import count

MOST_USED = 0.1  #: maximum fraction of a free device's memory that other processes may use

_IDLE = 16  # MiB that nvidia-smi may show as used on an idle device

_MIB = 1 << 20

#: Oldest driver for each major version of CUDA (NVIDIA's table of minor version compatibility).
OLDEST_DRIVER = {"11": 450, "12": 525, "13": 580}


@dataclass(frozen=True)
class _Device:
    """A device in the config, and its GPU: the device itself or, for a MIG instance, the GPU that contains it."""

    given: int | str  #: id or UUID, as in the config
    gpu: Mapping[str, Any]  #: the probe's facts
    instance: str = ""  #: UUID of a MIG instance; '' for a whole GPU

    @property
    def name(self) -> str:
        return f"CUDA device {self.given}"

    @property
    def key(self) -> tuple[str, str]:
        """UUID of the GPU (its index if the UUID is unknown), and UUID of the MIG instance ('' for a whole GPU)."""
        return self.gpu["uuid"] or str(self.gpu["index"]), self.instance

    @property
    def leases(self) -> set[str]:
        """Names of the leases that reserve the device, or the whole GPU that contains it."""
        names = (self.given, self.gpu["index"], self.gpu["uuid"], self.instance)
        return {f"cuda:{name}".replace("/", "_") for name in names if name != ""}


def _find(device: int | str, gpus: Sequence[Mapping[str, Any]]) -> _Device | None:
    """Find a device of the config among the GPUs of a host. Returns None if the host lacks it.

    device: the index in ``gpus``, or the first characters of the UUID of a GPU or MIG instance.
    """
    if isinstance(device, int):
        return _Device(device, gpus[device]) if device < len(gpus) else None
    for gpu in gpus:
        if gpu["uuid"].startswith(device):
            return _Device(device, gpu)
        for instance in gpu.get("instances", ()):
            if instance.startswith(device):
                return _Device(device, gpu, instance)
    return None


def is_free(gpu: Mapping[str, Any], leases: Sequence[Mapping[str, Any]]) -> bool:
    """Whether no run has leased a GPU or one of its MIG instances, and no process uses much of its memory."""
    taken = {lease["resource"] for lease in leases}
    parts = [_Device(gpu["index"], gpu), *(_Device(one, gpu, one) for one in gpu.get("instances", ()))]
    return not any(taken & part.leases for part in parts) and gpu["used"] <= max(_IDLE, MOST_USED * gpu["memory"])


def device_findings(survey: Survey, k: int) -> Iterator[Finding]:
    wanted, gpus = survey.config.nodes[k].devices, survey.probes[k]["gpus"]
    if not wanted:
        if survey.config.nodes[k].trains and not survey.own_command and survey.devices_take_equal_shares:
            message = "trains on its CPU as many seeds per step as the nodes with devices, which wait for it"
            yield survey.finding(k, "warn", "devices", message, "set a smaller `batch_share`, or leave the node out")
        return
    for message, remedy in logged_faults(survey.probes[k]):
        yield survey.finding(k, "warn", "devices", message, remedy, code="gpu-fault")
    devices = [_find(device, gpus) for device in wanted]
    there = [device for device in devices if device is not None]
    if not gpus:
        message, remedy = (
            "`devices` is set, but nvidia-smi lists no device",
            "install the NVIDIA driver, or remove `devices`",
        )
        yield survey.finding(k, "block", "devices", message, remedy)
    elif len(there) < len(devices):
        missing = [str(given) for given, device in zip(wanted, devices, strict=True) if device is None]
        message = f"no CUDA device {', '.join(missing)}; the host has {len(gpus)}, numbered from 0"
        yield survey.finding(k, "block", "devices", message, "correct `devices`; `nvidia-smi -L` lists them")
    else:
        found: list[Finding] = []
        cuda, driver = survey.version(k, "cuda"), str(survey.probes[k]["driver"])
        oldest = OLDEST_DRIVER.get(cuda.split(".")[0], 0)
        if driver.split(".")[0].isdigit() and int(driver.split(".")[0]) < oldest:
            message = f"driver {driver} is too old for torch's CUDA {cuda}, which needs {oldest} or newer"
            remedy = "update the driver, or install torch for an older CUDA"
            found.append(survey.finding(k, "block", "devices", message, remedy))
        found += _kernels(survey, k)

        # NCCL would refuse a device that two nodes share.
        for j in survey.same_machine(k):
            theirs = [_find(device, survey.probes[j]["gpus"]) for device in survey.config.nodes[j].devices]
            keys = {device.key for device in theirs if device is not None}
            both = [str(device.given) for device in there if device.key in keys]
            if j < k and both:
                message = f"CUDA device {', '.join(both)} is also used by {survey.labels([j])} on the same machine"
                found.append(survey.finding(k, "block", "devices", message, "give each node `devices` of its own"))
        found += [finding for device in there for finding in _device(survey, k, device)]
        yield from found
        if not any(finding.severity == "block" for finding in found):
            names = sorted({device.gpu["name"] + (" (MIG)" if device.instance else "") for device in there})
            yield survey.finding(k, "ok", "devices", f"{len(wanted)} × {', '.join(names)}")


def _kernels(survey: Survey, k: int) -> Iterator[Finding]:
    """Yield a finding if the bundled trainer cannot compile kernels on the node."""
    probe, node, sampling = survey.probes[k], survey.config.nodes[k], survey.config.train.sampling
    if survey.own_command or not node.trains or probe["versions"].get("numba_cuda") != "":
        return
    cuda = survey.version(k, "cuda")
    if not cuda:
        return  # torch must be replaced first
    by_cpu = "" if sampling == "cpu" else "CPUs sample, and "
    effect = "train.sampling: cuda needs it" if sampling == "cuda" else f"{by_cpu}layers use slower torch operations"
    message = f"numba-cuda is not installed for {survey.python(k)}: {effect}"
    severity: Severity = "block" if sampling == "cuda" else "warn"
    if not (requirement := kernel_requirement(cuda)):
        remedy = f"install torch for CUDA 12 or 13; numba-cuda does not support CUDA {cuda}"
        yield survey.finding(k, severity, "packages", message, remedy)
        return
    if node.wrap:
        yield survey.finding(k, severity, "container", message, f"add '{requirement}' to the container's image")
        return
    pip = f"{shlex.quote(probe['python'])} -m pip install '{requirement}'"
    yield survey.finding(k, severity, "packages", message, command="; ".join([*node.setup, pip]))


def _device(survey: Survey, k: int, device: _Device) -> Iterator[Finding]:
    leases = [lease for lease in survey.probes[k]["leases"] if device.leases.intersection(lease["needs"])]
    for lease in leases:
        run_id = lease["run_id"]
        remedy = f"wait for that run by --wait, stop it by `gnnfleet stop {run_id}`, or use other `devices`"
        yield survey.finding(k, "block", "devices", f"{device.name} is {lease['words']}", remedy, held_by=run_id)
    if not leases and not device.instance:  # nvidia-smi reports the memory of whole GPUs
        memory = f"{size(device.gpu['used'] * _MIB)} of {size(device.gpu['memory'] * _MIB)} used"
        holders = []
        for holder in device.gpu["holders"]:
            user = f" of {holder['user']}" if holder.get("user") else ""
            since = holder.get("since")
            began = time.strftime(" since %Y-%m-%d %H:%M UTC", time.gmtime(since)) if since else ""
            used = size(holder["memory"] * _MIB)
            holders.append(f"{used} by pid {holder['pid']}{user}{began}: {holder['command']}")
        who = "; ".join(holders) or "by processes that are not visible to your login"
        remedy = "wait, end the processes that use it, or use other `devices`"
        if not is_free(device.gpu, ()):
            yield survey.finding(k, "block", "devices", f"{device.name} is not free: {memory}, {who}", remedy)
        elif device.gpu["holders"]:
            yield survey.finding(k, "warn", "devices", f"{device.name} is shared: {memory}, {who}", remedy)

    # Its state.
    node, name, gpu = survey.config.nodes[k], device.name, device.gpu
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
    if gpu["mig"] and not device.instance:
        message = f"{name} is divided into MIG instances: a process uses the first one only"
        remedy = "list the UUIDs of its instances in `devices`; `nvidia-smi -L` shows them"
        yield survey.finding(k, "warn", "devices", message, remedy)
    for message, remedy in gpu_faults(name, gpu):
        yield survey.finding(k, "warn", "devices", message, remedy, code="gpu-fault")
