"""Tells which GPUs of a host can read each other's memory. Does not import numba-cuda."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Literal

import torch

from trainer.cuda.availability import simulator_wanted

MOST_DEVICES = 8  #: most devices that share cached rows

Link = Literal["nvlink", "pcie", ""]  #: how a GPU reads another one's memory; '' if it cannot


def device_name(device: torch.device) -> str:
    """Return the name by which ``link_between`` knows a device: its UUID. '' if its memory cannot be shared."""
    if simulator_wanted():
        return "simulated"
    uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    return f"GPU-{uuid}" if uuid else ""


def link_between(one: str, other: str) -> Link:
    """Return how device ``one`` reads the memory of device ``other``, by NVML. The names are from ``device_name``."""
    if simulator_wanted():
        return "nvlink"
    try:
        nvml: Any = import_module("cuda.bindings.nvml")
        nvml.init_v2()
        devices = [nvml.device_get_handle_by_uuid(name) for name in (one, other)]
        kinds, works = nvml.GpuP2PCapsIndex, int(nvml.GpuP2PStatus.OK)
        if nvml.device_get_p2p_status(*devices, int(kinds.READ)) != works:
            return ""
        return "nvlink" if nvml.device_get_p2p_status(*devices, int(kinds.NVLINK)) == works else "pcie"
    except Exception:  # no NVML, an old one, a device that it does not know; of many types
        return ""
