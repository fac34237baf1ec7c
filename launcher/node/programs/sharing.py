"""Node program: is a folder the same one as on other nodes? Python 3.8, standard library only.

``{"op": "write", "folder", "name"}`` makes an empty file there; replies {"written", "identity"}. ``{"op": "look", …}``
replies {"seen", "identity"}. ``{"op": "remove", …}`` takes the file away, as does the end of this process.
``identity`` describes the folder's manifest, for folders that cannot be written to: equal for one file seen twice.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False  # typing takes a fifth of the time that Python takes to start
if TYPE_CHECKING:
    from typing import Any

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
