"""Node program: examines folders and file systems, and tests whether a folder is shared with other nodes.

Writes small test files and removes them. Python 3.8; imports few modules of the standard library, because
node/programs/probe.py imports this module and must start fast.

``main`` tests for a shared folder: ``{"op": "write", "folder", "name"}`` creates an empty file and replies {"written",
"identity"}; ``{"op": "look", "folder", "name"}`` replies {"seen", "identity"}; ``{"op": "remove", …}`` removes the
files, as does the end of the process. ``identity`` is the size, inode and mtime of the folder's manifest.json. It shows
whether nodes share a folder in which they cannot create files.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False  # typing takes a fifth of the time that Python takes to start
if TYPE_CHECKING:
    from typing import Any

_BLOCK = bytes(65536)  # large enough to fail on an exceeded quota or a full disk


def folders(workdir: str, code: str) -> dict[str, Any]:
    """Return facts about the work folder (or the nearest existing folder above it), /tmp and /dev/shm.

    code: digest of gnnfleet's code, to find a copy of it in the work folder.
    """
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
    """Return the total size in bytes of all files below ``folder``."""
    found = 0
    for top, _, names in os.walk(folder) if folder else ():
        for name in names:
            try:
                found += os.lstat(os.path.join(top, name)).st_size
            except OSError:  # renamed meanwhile
                continue
    return found


def space(path: str) -> dict[str, Any]:
    """Return the free space of the file system of ``path``.

    {"free": bytes for this user, "size": bytes, "files": free files (-1: unlimited), "device": st_dev}. When it cannot
    be examined, all are 0 and "files" is -1.
    """
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
    """Return why ``path`` is not a writable folder; '' if it is. Writes a test file, to detect an exhausted quota."""
    if not os.path.isdir(path):
        return "it is not a folder" if os.path.exists(path) else "the folder does not exist"
    name = os.path.join(path, ".gnnfleet-%d-%s" % (os.getpid(), os.urandom(4).hex()))
    try:
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        return (error.strerror or str(error)).lower()
    try:
        wrote = os.write(descriptor, _BLOCK)
    except OSError as error:
        return (error.strerror or str(error)).lower()
    finally:
        os.unlink(name)
        os.close(descriptor)
    return "" if wrote == len(_BLOCK) else "no space left on device"


def state_of(folder: str) -> dict[str, Any]:
    """Return the content of state.json in ``folder``; {} when it is missing or damaged."""
    import json  # needed on few machines

    from launcher.node.regular_file import open_regular

    try:
        with open_regular(os.path.join(folder, "state.json")) as file:
            state = json.load(file)
    except (OSError, ValueError, RecursionError):
        return {}
    return state if isinstance(state, dict) else {}


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
    """Create an empty file, which ``leave`` removes later. Returns whether it was created."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
    except OSError:
        return False
    _written.append(path)
    return True


def leave() -> None:
    """Remove the files created by ``write``."""
    while _written:
        try:
            os.unlink(_written.pop())
        except FileNotFoundError:
            pass  # removed meanwhile


def identity(folder: str) -> list[int]:
    """Return [size, inode, mtime in ns] of the folder's manifest.json; [] if it does not exist."""
    try:
        status = os.stat(os.path.join(folder, "manifest.json"))
    except OSError:
        return []
    return [status.st_size, status.st_ino, status.st_mtime_ns]
