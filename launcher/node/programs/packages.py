"""Finds the versions of installed packages without importing them, and the sizes of a partitioned graph.

Importing torch would take seconds. Python 3.8, standard library only. Imports few modules, as node/programs/probe.py
imports this one and must start fast.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # typing takes a fifth of the time that Python takes to start
if TYPE_CHECKING:
    from typing import Any, Sequence

PACKAGES = ("torch", "torch_geometric", "numba", "numpy", "msgspec", "click", "rich")

NCCL = ("nvidia_nccl_cu11", "nvidia_nccl_cu12", "nvidia_nccl_cu13")


def versions(more: Sequence[str] = ()) -> dict[str, str]:
    """Return versions by name; '' for a package that is absent.

    The names are "python", the packages in PACKAGES and ``more``, "cuda" (for which torch was built), "nccl", "glibc",
    and "arch" (the architecture).
    """
    there, wanted = installed(), (*PACKAGES, *more)
    if sys.flags.no_site and not all(map(there.get, wanted)):
        import site  # .pth files may add folders with the missing packages

        site.main()
        there = installed()
    found = {"python": "%d.%d.%d" % sys.version_info[:3]}
    for package in wanted:
        found[package] = there.get(package, "")
        if not found[package]:  # it may be an egg, a develop link or a zip file
            from importlib import metadata

            try:
                found[package] = metadata.version(package)
            except metadata.PackageNotFoundError:
                pass
    cuda = _torch_cuda() if found["torch"] else ""
    major = "nvidia_nccl_cu%s" % cuda.split(".")[0]
    found["cuda"] = cuda
    found["nccl"] = there.get(major) or next((there[name] for name in NCCL if name in there), "") if cuda else ""
    found["glibc"] = glibc()
    found["arch"] = os.uname().machine
    return found


def installed() -> dict[str, str]:
    """Return {package: version}, from the names of dist-info and egg-info folders.

    importlib.metadata is not used, as its import takes 20 ms.
    """
    found: dict[str, str] = {}
    for folder in folders():
        try:
            names = os.listdir(folder) if folder else []
        except OSError:
            continue
        for name in names:
            if name.endswith((".dist-info", ".egg-info")):
                words = name.rpartition(".")[0].split("-")
                if len(words) > 1:
                    found.setdefault(words[0].lower().replace(".", "_"), words[1])
    return found


def folders() -> list[str]:
    """Return the folders that contain packages: sys.path and, under ``python -S``, those that ``site`` would add.

    .pth files are ignored.
    """
    if not sys.flags.no_site:
        return sys.path
    top = os.path.dirname(os.path.dirname(sys.executable))
    found = [*sys.path, os.path.join(top, "lib", "python%d.%d" % sys.version_info[:2], "site-packages")]
    try:
        with open(os.path.join(top, "pyvenv.cfg")) as file:
            if "include-system-site-packages = true" not in file.read().lower():
                return found
    except OSError:
        pass  # not a virtual environment
    import site

    return [*found, *site.getsitepackages(), site.getusersitepackages()]


def _torch_cuda() -> str:
    """Return ``torch.version.cuda``, e.g. 12.6, without importing torch; '' for a CPU build, or without torch."""
    for folder in folders():
        try:
            with open(os.path.join(folder, "torch", "version.py")) as file:
                lines = [line.partition("=") for line in file if line.startswith(("cuda:", "cuda ", "cuda="))]
        except OSError:
            continue
        value = lines[0][2].strip().strip("'\"") if lines else ""
        return value if value[:1].isdigit() else ""
    return ""


def glibc() -> str:
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")[2]
    except (ValueError, OSError):  # another C library
        return ""


def graph_size(manifest: str) -> dict[str, Any]:
    """Return sizes of the graph with this manifest.json; {} if the file cannot be read.

    "nodes" and "row_bytes" are those of ``size_of``, "topology_bytes" is the result of ``_topology_of``.
    """
    if not manifest:
        return {}
    import json

    from launcher.node.regular_file import open_regular

    try:
        with open_regular(os.path.expanduser(manifest)) as file:
            found = json.load(file)
        return {**size_of(found), "topology_bytes": _topology_of(found, os.path.dirname(os.path.expanduser(manifest)))}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return {}  # the data check of preflight reports the error


def size_of(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return {"nodes": number of graph nodes of all types, "row_bytes": mean bytes of attributes per graph node}."""
    nodes = sum(kind["num_nodes"] for kind in manifest["nodes"].values())
    rows = sum(file["bytes"] for file in manifest["files"] if "/nodes/" in file["path"] and "/attrs/" in file["path"])
    return {"nodes": nodes, "row_bytes": rows / max(1, nodes)}


def _topology_of(manifest: dict[str, Any], folder: str) -> int:
    """Return the size in bytes of the topology (all files with 1-d arrays) of all parts; 0 if a file is missing.

    A file whose size differs from its size in the manifest counts as missing.
    """
    files = [file for file in manifest["files"] if file["path"].startswith("part") and len(file.get("shape", ())) == 1]
    for file in files:
        try:
            size = os.stat(os.path.join(folder, file["path"])).st_size
        except OSError:
            return 0
        if size != file["bytes"]:
            return 0
    return sum(file["bytes"] for file in files)
