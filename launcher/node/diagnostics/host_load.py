"""How busy this machine is, for the trackers of a run: processors, memory, disk and network. Standard library only."""

from __future__ import annotations

import os
import time


class HostLoad:
    """Reads /proc; figures that it does not have are left out."""

    def __init__(self, folder: str) -> None:
        """folder: on the disk whose free space is meant."""
        self._folder = folder
        self._before: dict[str, float] = {}

    def look(self) -> dict[str, float]:
        """Return ``cpu_share`` (0 to 1) and ``received_bytes_s``, ``sent_bytes_s`` (without loopback) since the call
        before, ``memory_bytes`` in use and ``disk_free_bytes``."""
        found: dict[str, float] = {}
        now: dict[str, float] = {"time": time.monotonic()}
        try:
            with open("/proc/stat") as file:
                ticks = [int(word) for word in file.readline().split()[1:9]]
            now |= {"all": sum(ticks), "idle": ticks[3] + ticks[4]}
            with open("/proc/net/dev") as file:
                counts = [line.split(":")[1].split() for line in list(file)[2:] if line.split(":")[0].strip() != "lo"]
            now |= {"received": sum(int(one[0]) for one in counts), "sent": sum(int(one[8]) for one in counts)}
            with open("/proc/meminfo") as file:
                sizes = {line.split(":")[0]: 1024 * int(line.split()[1]) for line in file}
            found["memory_bytes"] = sizes["MemTotal"] - sizes["MemAvailable"]
            disk = os.statvfs(self._folder)
            found["disk_free_bytes"] = disk.f_bavail * disk.f_frsize
        except (OSError, ValueError, LookupError):  # another kernel, or a container without these files
            return found
        before, self._before = self._before, now
        if before and now["all"] > before["all"] and now["time"] > before["time"]:
            found["cpu_share"] = round(1 - (now["idle"] - before["idle"]) / (now["all"] - before["all"]), 3)
            for name in ("received", "sent"):
                found[f"{name}_bytes_s"] = round((now[name] - before[name]) / (now["time"] - before["time"]))
        return found
