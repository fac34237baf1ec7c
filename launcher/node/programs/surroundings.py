"""Node program: what a process sees of this machine, and the packages of its Python. Python 3.8, standard library only.

``main`` is called in a container and outside of it, with the same request: "packages" (further packages to look for),
"folders" (paths), "variable" (name). It replies {"python": path of this interpreter, "versions", "namespaces": {name:
identity}, "folders": {path: identity, '' if it is missing}, "variable": its value}.
"""

from __future__ import annotations

import os
import sys

from launcher.node.programs import packages

TYPE_CHECKING = False  # typing takes a fifth of the time that Python takes to start
if TYPE_CHECKING:
    from typing import Any


def main(request: dict[str, Any]) -> dict[str, Any]:
    return {
        "python": sys.executable,
        "versions": packages.versions(request["packages"]),
        "namespaces": {name: namespace(name) for name in ("pid", "net")},
        "folders": {path: identity(os.path.expanduser(path)) for path in request["folders"]},
        "variable": os.environ.get(request["variable"], ""),
    }


def namespace(name: str) -> str:
    try:
        return os.readlink("/proc/self/ns/" + name)
    except OSError:  # /proc is missing, or the kernel has no such namespaces
        return ""


def identity(path: str) -> str:
    try:
        found = os.stat(path)
    except OSError:
        return ""
    return "%d:%d" % (found.st_dev, found.st_ino)
