"""How well NVIDIA GPUs are: temperature, slowed clocks, PCIe lanes, rows of memory, and errors in the kernel log.

Python 3.8, standard library only. Used by node/programs/probe.py, with whose other queries these run at the same time,
and a program of its own: ``main({})`` returns {"gpus": facts about each, "faults": those in the kernel log}.
"""

from __future__ import annotations

import re

from launcher.node.programs import machine

TYPE_CHECKING = False  # typing takes a fifth of the time that Python takes to start
if TYPE_CHECKING:
    from typing import Any

_FORMAT = "--format=csv,noheader,nounits"

_FIELDS = (
    "--query-gpu=uuid,pci.bus_id,temperature.gpu,pcie.link.width.current,pcie.link.width.max,clocks_%s_reasons.active"
)

# Bits of the reasons for lower clocks that mean a fault. Idle GPUs and limits that are set have others.
_REASONS = ((0x40, "heat"), (0x20, "heat"), (0x80, "its power supply (power brake)"), (0x08, "heat or power"))

# Xids of programs that used a GPU wrongly, not of the GPU: exceptions, page faults, stopped programs.
_OF_PROGRAMS = frozenset((13, 31, 43, 45))

_XID = re.compile(r"NVRM: Xid \(PCI:([0-9A-Fa-f:.]+)\): (\d+)")


def main(request: dict[str, Any]) -> dict[str, Any]:
    asked = machine.commands(True)
    if "nvidia-smi" not in asked:
        return {"gpus": [], "faults": []}
    health = start()
    gpus = machine.look(machine.finish(asked["nvidia-smi"]))["gpus"]
    return {"gpus": gpus, "faults": add(gpus, health)}


def start() -> dict[str, Any]:
    """Start the queries in the background; return {name: running command}."""
    wanted = {
        "health": ["nvidia-smi", _FIELDS % "event", _FORMAT],
        "rows": ["nvidia-smi", "--query-remapped-rows=gpu_uuid,remapped_rows.pending,remapped_rows.failure", _FORMAT],
        "dmesg": ["dmesg"],
    }
    return {name: machine.started(argv) for name, argv in wanted.items() if machine.on_path(argv[0])}


def add(gpus: list[dict[str, Any]], started: dict[str, Any]) -> list[dict[str, Any]]:
    """Add health to the facts of each GPU; return the faults that the kernel log names, one per GPU and code.

    Added are "temperature" (°C), "width" and "width_max" (PCIe lanes), each 0 if unknown, "slowed" (why the clocks are
    low, '' if they are not), and "rows" ('', 'pending' or 'failure'). A fault is {"pci", "index" (None: a GPU that
    nvidia-smi does not list), "code", "count"}.
    """
    listed = machine.finish(started["health"])
    old = [] if listed else ["nvidia-smi", _FIELDS % "throttle", _FORMAT]  # before driver 535
    facts = {row[0]: row for row in machine.table(listed or (machine.output(old) if old else ""), 6)}
    rows = {row[0]: row for row in machine.table(machine.finish(started["rows"]), 3)}
    places: dict[str, int] = {}
    for gpu in gpus:
        _, place, temperature, width, most, reasons = facts.get(gpu["uuid"], [""] * 6)
        _, pending, failure = rows.get(gpu["uuid"], [""] * 3)
        places[address(place)] = gpu["index"]
        gpu["temperature"] = machine.number(temperature)
        gpu["width"], gpu["width_max"] = machine.number(width), machine.number(most)
        gpu["slowed"] = slowed(reasons)
        gpu["rows"] = "failure" if said(failure) else "pending" if said(pending) else ""
    # the kernel's messages since boot, as far as this user may read them
    log = machine.finish(started["dmesg"]) if "dmesg" in started else ""
    return faults(log or machine.output(["journalctl", "--dmesg", "--quiet", "--no-pager", "--lines=5000"]), places)


def slowed(reasons: str) -> str:
    """Return why the clocks are low, from a number such as 0x0000000000000040."""
    try:
        bits = int(reasons, 16)
    except ValueError:  # [N/A]
        return ""
    return next((why for bit, why in _REASONS if bits & bit), "")


def said(word: str) -> bool:
    """Whether a field says that something happened: as Yes or, by other drivers, as a number."""
    return word == "Yes" or machine.number(word) > 0


def address(place: str) -> str:
    """Return a PCI address as ``3b:00``, with its domain if that is not 0; '' for none."""
    words = place.lower().split(".")[0].split(":")
    if len(words) < 3:
        return ":".join(words)
    domain = words[0].lstrip("0")
    return ":".join([domain, *words[1:]] if domain else words[1:])


def faults(log: str, places: dict[str, int]) -> list[dict[str, Any]]:
    counts: dict[tuple[str, int], int] = {}
    for place, code in _XID.findall(log):
        if int(code) not in _OF_PROGRAMS:
            key = address(place), int(code)
            counts[key] = counts.get(key, 0) + 1
    return [
        {"pci": place, "index": places.get(place), "code": code, "count": number}
        for (place, code), number in sorted(counts.items())
    ]
