"""CUDA devices by nvidia-smi: what they are, and who uses them.

Part of node/programs/probe.py, loaded only where devices are wanted.
"""

from __future__ import annotations

import os
import pwd
import time
from typing import Any

from launcher.node.programs import machine

IDLE = 16  # MiB that a device may show as used though nobody uses it

APPS = ["nvidia-smi", "--query-compute-apps=gpu_uuid,pid,process_name,used_gpu_memory", "--format=csv,noheader,nounits"]

SHORT = [
    "nvidia-smi",
    "--query-gpu=index,uuid,name,memory.total,memory.used,driver_version",
    "--format=csv,noheader,nounits",
]


def look(listed: str) -> dict[str, Any]:
    """{"devices": names, "gpus": [...], "driver"} from what ``machine.commands`` asked nvidia-smi for."""
    rows = table(listed, 9)
    if not rows:  # an old driver does not know each of the fields, and then says nothing at all
        rows = [[*row[:5], "", "", "", row[5]] for row in table(machine.output(SHORT), 6)]
    found = [gpu(row) for row in rows]
    if any(one["used"] > IDLE for one in found):
        for holder in holders(machine.output(APPS)):
            for one in found:
                if one["uuid"] == holder["uuid"]:
                    one["holders"].append(holder)
    return {"devices": [one["name"] for one in found], "gpus": found, "driver": rows[0][8] if rows else ""}


def table(text: str, columns: int) -> list[list[str]]:
    rows = [[word.strip() for word in line.split(",")] for line in text.splitlines()]
    return [row for row in rows if len(row) == columns]


def gpu(row: list[str]) -> dict[str, Any]:
    """Memory in MiB. Fields that a device does not have are '[N/A]' or the like."""
    index, uuid, name, memory, used, mode, mig, ecc, _ = row
    return {
        "index": number(index), "uuid": uuid, "name": name, "memory": number(memory), "used": number(used),
        "mode": mode, "mig": mig == "Enabled", "ecc": number(ecc), "holders": [],
    }  # fmt: skip


def holders(text: str) -> list[dict[str, Any]]:
    """Processes with memory on a device."""
    found = []
    for line in text.splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) >= 4 and words[1].isdigit():
            pid = int(words[1])
            held = {"uuid": words[0], "pid": pid, "memory": number(words[-1])}
            found.append(dict(held, command=command(pid) or ",".join(words[2:-1]), **process(pid)))
    return found


def number(text: str) -> int:
    return int(text) if text.isdigit() else 0


def command(pid: int) -> str:
    return machine.read("/proc/%d/cmdline" % pid).replace("\0", " ").strip()[:80]


def process(pid: int) -> dict[str, Any]:
    """Whose it is and since when (seconds since 1970); in a container neither may be seen."""
    try:
        uid = os.stat("/proc/%d" % pid).st_uid
        fields = machine.read("/proc/%d/stat" % pid).rpartition(")")[2].split()
        uptime = float(machine.read("/proc/uptime").split()[0])
        return {"user": name(uid), "since": time.time() - uptime + int(fields[19]) / os.sysconf("SC_CLK_TCK")}
    except (OSError, IndexError):
        return {"user": "", "since": 0}


def name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return "uid %d" % uid
