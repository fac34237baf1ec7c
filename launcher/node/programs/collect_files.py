"""Node program: packs the wanted files of a run folder into one reply, and lists large ones. Standard library only.

``main({"path", "wanted": regular expression, "have": {path: [bytes, mtime_ns]}, "small": bytes, "room": bytes})``
replies ``{"files": {path: {"bytes", "mtime_ns", "data": base64 of zlib, or null}}, "errors": {path: why}, "same":
[path]}``. Files whose size and mtime are as in ``have`` are only named, in ``same``. ``data`` is null for files larger
than ``small``, and for files that would bring the sum of all packed files above ``room``.
"""

from __future__ import annotations

import base64
import os
import re
import zlib
from typing import Any


def main(request: dict[str, Any]) -> dict[str, Any]:
    """Return the files that a request asks for (format: docstring of the module)."""
    top = os.path.expanduser(request["path"])
    wanted = re.compile(request["wanted"])
    files: dict[str, Any] = {}
    errors: dict[str, str] = {}
    same: list[str] = []
    room = request["room"]
    there = [os.path.join(folder, name) for folder, _, names in os.walk(top) for name in names]
    for path in sorted(os.path.relpath(path, top) for path in there if os.path.isfile(path)):
        if not wanted.fullmatch(path):
            continue
        try:
            found = os.stat(os.path.join(top, path))
            if request["have"].get(path) == [found.st_size, found.st_mtime_ns]:
                same.append(path)
                continue
            small = found.st_size <= min(request["small"], room)
            data = None
            if small:
                with open(os.path.join(top, path), "rb") as file:  # a log may have grown since its size was read
                    data = base64.b64encode(zlib.compress(file.read(found.st_size), 1)).decode()
                room -= found.st_size
            files[path] = {"bytes": found.st_size, "mtime_ns": found.st_mtime_ns, "data": data}
        except OSError as error:
            errors[path] = error.strerror or str(error)
    return {"files": files, "errors": errors, "same": same}
