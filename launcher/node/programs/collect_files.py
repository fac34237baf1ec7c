"""Node program: packs the wanted files of a run folder into one reply; large ones are listed. Standard library only.

``main({"path", "wanted": regex, "have": {path: [bytes, mtime_ns]}, "small": bytes, "room": bytes})`` answers
``{"files": {path: {"bytes", "mtime_ns", "data": base64 of zlib, or null when large}}, "errors": {path: why}}``;
files that are here already, as ``have`` says by size and time, are left out.
"""

from __future__ import annotations

import base64
import os
import re
import zlib
from typing import Any


def main(request: dict[str, Any]) -> dict[str, Any]:
    """Answer one request; ``room`` bounds what is read into memory."""
    top = os.path.expanduser(request["path"])
    wanted = re.compile(request["wanted"])
    files: dict[str, Any] = {}
    errors: dict[str, str] = {}
    room = request["room"]
    for path in sorted(_walk(top)):
        if not wanted.fullmatch(path):
            continue
        try:
            found = os.stat(os.path.join(top, path))
            if request["have"].get(path) == [found.st_size, found.st_mtime_ns]:
                continue
            small = found.st_size <= min(request["small"], room)
            data = _packed(os.path.join(top, path), found.st_size) if small else None
            room -= found.st_size if small else 0
            files[path] = {"bytes": found.st_size, "mtime_ns": found.st_mtime_ns, "data": data}
        except OSError as error:
            errors[path] = error.strerror or str(error)
    return {"files": files, "errors": errors}


def _walk(top: str) -> list[str]:
    return [
        os.path.relpath(os.path.join(folder, name), top)
        for folder, _, names in os.walk(top)
        for name in names
        if os.path.isfile(os.path.join(folder, name))
    ]


def _packed(path: str, size: int) -> str:
    """The first ``size`` bytes: a log may have grown since it was looked at."""
    with open(path, "rb") as file:
        return base64.b64encode(zlib.compress(file.read(size), 1)).decode()
