"""Node program: folders and file systems of a node; is a folder the same one as on other nodes?

Writes small files to test what a folder allows, and removes them. Python 3.8, standard library only, and little of
that: node/programs/probe.py uses it too.

``{"op": "write", "folder", "name"}`` makes an empty file there; replies {"written", "identity"}. ``{"op": "look", …}``
replies {"seen", "identity"}. ``{"op": "remove", …}`` takes the file away, as does the end of this process.
``identity`` describes the folder's manifest, for folders that cannot be written to: equal for one file seen twice.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False  # typing takes a fifth of the time that Python takes to start
if TYPE_CHECKING:
    from typing import Any

BLOCK = bytes(65536)  # enough that a quota or a full disk shows

RUNS = 1000  # folders of runs that are looked at, newest first


def folders(workdir: str, code: str) -> dict[str, Any]:
    """Facts about the work folder, or of the nearest folder above it that exists, about /tmp and /dev/shm."""
    real = os.path.realpath(workdir)
    there = real
    while not os.path.exists(there):
        there = os.path.dirname(there)
    status = os.stat(there)
    return {
        "workdir": real,
        "workdir_base": there,
        "workdir_error": why_not_writable(there),
        "workdir_id": "%d:%d" % (status.st_dev, status.st_ino),
        "noexec": bool(os.statvfs(there).f_flag & os.ST_NOEXEC),
        "disk_free": space(there)["free"],
        "disk": space(there),
        "tmp": dict(space("/tmp"), error=why_not_writable("/tmp")),
        "shm": space("/dev/shm"),
        "code": bool(code) and os.path.isdir(os.path.join(real, "code", code[:16])),
    }


def stored(folder: str) -> int:
    """Bytes of all files below; of parts that were sent before."""
    found = 0
    for top, _, names in os.walk(folder) if folder else ():
        for name in names:
            try:
                found += os.lstat(os.path.join(top, name)).st_size
            except OSError:  # renamed meanwhile
                continue
    return found


def space(path: str) -> dict[str, Any]:
    """Free bytes and files (-1: not limited) for this user, and which file system that is; {} when there is none."""
    try:
        found = os.statvfs(path)
        return {
            "free": found.f_bavail * found.f_frsize,
            "size": found.f_blocks * found.f_frsize,
            "files": found.f_favail if found.f_files else -1,
            "device": os.stat(path).st_dev,
        }
    except OSError:
        return {"free": 0, "size": 0, "files": -1, "device": 0}


def why_not_writable(path: str) -> str:
    """'' when a file can be made and written there; else the system's word: quotas show only so."""
    if not os.path.isdir(path):
        return "it is not a folder" if os.path.exists(path) else "there is no such folder"
    name = os.path.join(path, ".gnnfleet-%d-%s" % (os.getpid(), os.urandom(4).hex()))
    try:
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        return (error.strerror or str(error)).lower()
    try:
        wrote = os.write(descriptor, BLOCK)
    except OSError as error:
        return (error.strerror or str(error)).lower()
    finally:
        os.unlink(name)
        os.close(descriptor)
    return "" if wrote == len(BLOCK) else "no space left on device"


class Suspect:
    """A run folder of a node whose supervisor has gone without a result."""

    def __init__(self, run_id: str, run_dir: str, processes: list[dict[str, Any]]) -> None:
        self.run_id, self.run_dir, self.processes = run_id, run_dir, processes


def ended_without_result(workdir: str) -> list[Suspect]:
    """Those below ``workdir``; the run folders of supervisors that live are passed over."""
    runs = os.path.join(workdir, "runs")
    try:
        names = sorted(os.listdir(runs))[-RUNS:]
    except OSError:
        return []
    found = []
    for name in names:
        for node in nodes_of(os.path.join(runs, name)):
            folder = os.path.join(runs, name, node)
            if not os.path.exists(os.path.join(folder, "result.json")):
                state = state_of(folder)
                if state and not lives(state.get("pid"), state.get("start_ticks")):
                    found.append(Suspect(name, folder, state.get("processes", [])))
    return found


def nodes_of(run: str) -> list[str]:
    try:
        return [name for name in os.listdir(run) if name.startswith("node")]
    except OSError:
        return []


def state_of(folder: str) -> dict[str, Any]:
    import json  # most machines have no such folder

    try:
        with open(os.path.join(folder, "state.json")) as file:
            state = json.load(file)
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def lives(pid: Any, start_ticks: Any) -> bool:
    """Whether that very process still runs."""
    try:
        with open("/proc/%d/stat" % pid, "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except (OSError, TypeError):
        return False
    return fields[0] not in (b"Z", b"X") and int(fields[19]) == start_ticks


_written = []  # type: list[str]


def main(request: dict[str, Any]) -> dict[str, Any]:
    folder = os.path.expanduser(request["folder"])
    path = os.path.join(folder, request["name"])
    if request["op"] == "look":
        return {"seen": os.path.exists(path), "identity": identity(folder)}
    if request["op"] == "remove":
        leave()
        return {}
    return {"written": write(path), "identity": identity(folder)}


def write(path: str) -> bool:
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
    except OSError:
        return False
    _written.append(path)
    return True


def leave() -> None:
    while _written:
        try:
            os.unlink(_written.pop())
        except FileNotFoundError:
            pass  # the folder was cleared meanwhile


def identity(folder: str) -> list[int]:
    """Size, inode and time of the manifest; a copy differs in one of them."""
    try:
        status = os.stat(os.path.join(folder, "manifest.json"))
    except OSError:
        return []
    return [status.st_size, status.st_ino, status.st_mtime_ns]
