"""Tells which GPUs of a host can read each other's memory. Does not import numba-cuda."""

from __future__ import annotations

from typing import Literal

import torch

from trainer.cuda.availability import simulator_wanted
from trainer.cuda.nvml import NVLINK, READ, Nvml, uuid_of

MOST_DEVICES = 8  #: most devices that share cached rows

Link = Literal["nvlink", "pcie", ""]  #: how a GPU reads another one's memory; '' if it cannot


def device_name(device: torch.device) -> str:
    """Return the name by which ``link_between`` knows a device: its UUID. '' if torch does not know it."""
    return "simulated" if simulator_wanted() else uuid_of(device)


def link_between(one: str, other: str) -> Link:
    """Return how device ``one`` reads the memory of device ``other``. The names are from ``device_name``.

    Raises ``RuntimeError`` if NVML does not tell.
    """
    if simulator_wanted():
        return "nvlink"
    nvml = Nvml()
    if not nvml.has_access(READ, one, other):
        return ""
    return "nvlink" if nvml.has_access(NVLINK, one, other) else "pcie"
