"""Facts about a machine: CPUs, memory, limits, tmux and NVIDIA GPUs.

Python 3.8, standard library only. Imports few modules, as node/programs/probe.py imports this one and must start fast.
"""

from __future__ import annotations

import os
import pwd
import resource
import select
import stat
import time

TYPE_CHECKING = False  # typing takes a fifth of the time that Python takes to start
if TYPE_CHECKING:
    from typing import Any

_GPU_FIELDS = (
    "index,uuid,name,memory.total,memory.used,compute_mode,mig.mode.current,ecc.errors.uncorrected.volatile.total"
)

SECONDS = 30.0  # timeout of a command; without persistence mode nvidia-smi first loads the driver


def commands(want_devices: bool) -> dict[str, Any]:
    """Start ``tmux -V`` and, if wanted, nvidia-smi, in the background; return {name: running command}."""
    wanted = {"tmux": ["tmux", "-V"]}
    if want_devices:
        fields = "--query-gpu=%s,driver_version" % _GPU_FIELDS
        wanted["nvidia-smi"] = ["nvidia-smi", fields, "--format=csv,noheader,nounits"]
    return {name: started(argv) for name, argv in wanted.items() if on_path(name)}


def on_path(name: str) -> bool:
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    return any(os.access(os.path.join(folder or ".", name), os.X_OK) for folder in folders)


class _Started:
    """A running command with stdin and stderr at /dev/null. Used in place of subprocess, whose import takes 7 ms."""

    def __init__(self, argv: list[str]) -> None:
        self.stdout, theirs = os.pipe()
        nowhere = os.open(os.devnull, os.O_RDWR)
        actions = [(os.POSIX_SPAWN_DUP2, *pair) for pair in ((nowhere, 0), (theirs, 1), (nowhere, 2))]
        try:
            self.pid = os.posix_spawnp(argv[0], argv, os.environ, file_actions=actions)
        finally:
            os.close(theirs)
            os.close(nowhere)


def started(argv: list[str]) -> _Started:
    return _Started(argv)


def finish(process: _Started) -> str:
    """Wait for a command and return its output; '' when it fails or runs longer than ``SECONDS``."""
    deadline, printed = time.monotonic() + SECONDS, b""
    poll = select.poll()  # select() takes no file descriptor above 1,023
    poll.register(process.stdout, select.POLLIN)
    while True:
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            os.kill(process.pid, 9)
            break
        data = os.read(process.stdout, 65536)
        if not data:
            break
        printed += data
    os.close(process.stdout)
    status = os.waitpid(process.pid, 0)[1]
    return printed.decode("utf-8", "replace") if status == 0 else ""


def output(argv: list[str]) -> str:
    """Run a command and return its output; '' when it is not installed, fails or hangs."""
    return finish(started(argv)) if on_path(argv[0]) else ""


def tmux_version(started: dict[str, Any]) -> str:
    """Return the version of tmux; '' when tmux is not installed, '?' when it prints none."""
    if "tmux" not in started:
        return ""
    words = finish(started["tmux"]).split()
    return words[1] if len(words) > 1 else "?"


def _tmux_folder() -> str:
    return "%s/tmux-%d" % (os.environ.get("TMUX_TMPDIR") or "/tmp", os.getuid())


def tmux_folder_error() -> str:
    """Return why tmux refuses the folder of this user's sockets; '' if it is usable or does not exist."""
    folder = _tmux_folder()
    try:
        found = os.lstat(folder)
    except OSError:
        return ""
    if not stat.S_ISDIR(found.st_mode):
        return "%s is not a folder" % folder
    if found.st_uid != os.getuid():
        return "%s belongs to another user (uid %d)" % (folder, found.st_uid)
    return "%s is open to all users (mode %o)" % (folder, stat.S_IMODE(found.st_mode)) if found.st_mode & 0o007 else ""


def tmux_has(session: str) -> bool:
    """Whether this user's tmux server has a session of that name. Runs tmux only if its socket exists."""
    if not os.path.exists(os.path.join(_tmux_folder(), "default")):
        return False
    return session in output(["tmux", "list-sessions", "-F", "#S"]).splitlines()


def read(path: str, most: int = -1) -> str:
    """Return the content of a text file, at most ``most`` characters; '' when it cannot be read."""
    try:
        with open(path, errors="replace") as file:
            return file.read(most)
    except OSError:
        return ""


def capacity() -> dict[str, Any]:
    """Return the CPUs, memory in bytes and open-file limits of this process.

    "memory_limit", "memory_free" and "cpus" respect the limits of the cgroup; "memory" is that of the whole machine.
    """
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    words = read("/proc/meminfo").partition("MemAvailable:")[2].split()
    # The smallest memory limit and the smallest free memory among the cgroups of this process, in bytes.
    found = []
    for line in read("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            found += group_limits("/sys/fs/cgroup", path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            found += group_limits("/sys/fs/cgroup/memory", path, *names)
    limit, room = (min(one for one, _ in found), min(room for _, room in found)) if found else (0, 0)
    open_files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    return {
        "memory": total,
        "memory_limit": min(total, limit) if limit else total,
        "memory_free": min(int(words[0]) * 1024 if words else total, room if limit else total),
        "cpus": cpus(),
        "bfloat16": bfloat16(read("/proc/cpuinfo", 1 << 14)),  # the first processor; the file lists all
        "open_files": open_files if open_files >= 0 else 1 << 30,  # RLIM_INFINITY
        "open_files_most": most if most >= 0 else 1 << 30,
    }


def bfloat16(cpuinfo: str) -> str:
    """Return the flag of the fastest instructions for bfloat16 in /proc/cpuinfo; '' without any. ``bf16`` is Arm's."""
    words = set(cpuinfo.split())
    return next((flag for flag in ("amx_bf16", "avx512_bf16", "bf16") if flag in words), "")


def cpus() -> int:
    """Return the number of CPUs that this process may use, at least 1.

    This is the minimum of its CPU affinity, the limits of its cgroups, and the CPUs of its Slurm job on this host.
    """
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    shares = [float(own)]
    allocated = os.environ.get("SLURM_CPUS_ON_NODE", "")
    shares += [float(allocated)] if allocated.isdigit() else []
    for line in read("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            shares += group_cpus("/sys/fs/cgroup", path)
        elif "cpu" in controllers.split(","):
            shares += group_cpus("/sys/fs/cgroup/cpu", path)
    return max(1, int(min(shares)))


def group_cpus(root: str, path: str) -> list[float]:
    """Return the CPU limits of a cgroup and its ancestors, as numbers of CPUs."""
    found = []
    while True:
        folder = root + path.rstrip("/")
        words = read(folder + "/cpu.max").split() or [  # v2: "200000 100000", or "max 100000" without a limit
            read("%s/cpu.cfs_%s_us" % (folder, name)).strip() for name in ("quota", "period")
        ]
        if len(words) == 2 and all(word.isdigit() and int(word) for word in words):  # v1: -1 means no limit
            found.append(int(words[0]) / int(words[1]))
        if path in ("", "/"):
            return found
        path = os.path.dirname(path)


def group_limits(root: str, path: str, most: str, used: str, cache: str) -> list[tuple[int, int]]:
    """Return (memory limit, free memory) in bytes for a cgroup and each of its ancestors that has a limit.

    Inactive page cache counts as free. root: where the cgroups are mounted. path: the cgroup, below root. most, used:
    names of the files with the limit and the usage. cache: name of the inactive page cache in memory.stat.
    """
    found = []
    while True:
        folder = root + path.rstrip("/")
        limit = read(os.path.join(folder, most)).strip()
        if limit.isdigit() and int(limit) < 1 << 60:  # v1 writes "no limit" as a huge number
            idle = [line.split()[1] for line in read(folder + "/memory.stat").splitlines() if line.split()[0] == cache]
            taken = int(read(os.path.join(folder, used)).strip() or 0) - int(idle[0] if idle else 0)
            found.append((int(limit), max(0, int(limit) - taken)))
        if path in ("", "/"):
            return found
        path = os.path.dirname(path)


IDLE = 16  # MiB that an idle device may report as used

_APPS = [
    "nvidia-smi",
    "--query-compute-apps=gpu_uuid,pid,process_name,used_gpu_memory",
    "--format=csv,noheader,nounits",
]

_SHORT = [
    "nvidia-smi",
    "--query-gpu=index,uuid,name,memory.total,memory.used,driver_version",
    "--format=csv,noheader,nounits",
]


def look(listed: str) -> dict[str, Any]:
    """Parse nvidia-smi's output for the query ``_GPU_FIELDS``.

    Returns {"devices": models of the GPUs, "gpus": facts of each GPU (``gpu``), "driver": version}.
    """
    rows = table(listed, 9)
    if not rows:  # an old driver that does not know all fields prints nothing
        rows = [[*row[:5], "", "", "", row[5]] for row in table(output(_SHORT), 6)]
    found = [gpu(row) for row in rows]
    if any(one["used"] > IDLE for one in found):
        for holder in holders(output(_APPS)):
            for one in found:
                if one["uuid"] == holder["uuid"]:
                    one["holders"].append(holder)
    if any(one["mig"] for one in found):
        add_instances(found, output(["nvidia-smi", "-L"]))
    return {"devices": [one["name"] for one in found], "gpus": found, "driver": rows[0][8] if rows else ""}


def add_instances(gpus: list[dict[str, Any]], listed: str) -> None:
    """Add the UUIDs of each GPU's MIG instances to its "instances". listed: output of ``nvidia-smi -L``."""
    own: list[str] = []
    for line in listed.splitlines():
        uuid = line.rpartition("UUID: ")[2].rstrip(") ")
        if line.startswith("GPU "):
            own = next((gpu["instances"] for gpu in gpus if gpu["uuid"] == uuid), [])
        elif uuid.startswith("MIG-"):
            own.append(uuid)


def table(text: str, columns: int) -> list[list[str]]:
    """Return the rows of a CSV text that have exactly ``columns`` columns."""
    rows = [[word.strip() for word in line.split(",")] for line in text.splitlines()]
    return [row for row in rows if len(row) == columns]


def gpu(row: list[str]) -> dict[str, Any]:
    """Return one GPU as a dict, from a row that nvidia-smi printed; memory in MiB.

    Numbers that the GPU does not support, printed as '[N/A]', become 0.
    """
    index, uuid, name, memory, used, mode, mig, ecc, _ = row
    return {
        "index": number(index), "uuid": uuid, "name": name, "memory": number(memory), "used": number(used),
        "mode": mode, "mig": mig == "Enabled", "ecc": number(ecc), "holders": [], "instances": [],
    }  # fmt: skip


def holders(text: str) -> list[dict[str, Any]]:
    """Return the processes that use memory of a GPU, from the output of nvidia-smi (``_APPS``); memory in MiB."""
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
    return read("/proc/%d/cmdline" % pid).replace("\0", " ").strip()[:80]


def process(pid: int) -> dict[str, Any]:
    """Return {"user", "since": start time in seconds since the epoch} of a process; '' and 0 when /proc hides it."""
    try:
        uid = os.stat("/proc/%d" % pid).st_uid
        fields = read("/proc/%d/stat" % pid).rpartition(")")[2].split()
        uptime = float(read("/proc/uptime").split()[0])
        return {"user": name(uid), "since": time.time() - uptime + int(fields[19]) / os.sysconf("SC_CLK_TCK")}
    except (OSError, IndexError):
        return {"user": "", "since": 0}


def name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return "uid %d" % uid
