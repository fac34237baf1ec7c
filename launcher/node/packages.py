"""Which versions of what a Python has, found without importing any of it (importing torch takes seconds).

Part of node/probe.py: Python 3.8, standard library only, and little of that.
"""

from __future__ import annotations

import json
import os
import re
import sys
from typing import Any

PACKAGES = ("torch", "torch_geometric", "numba", "numpy", "pyzmq")
NCCL = ("nvidia_nccl_cu11", "nvidia_nccl_cu12", "nvidia_nccl_cu13")


def versions() -> dict[str, str]:
    """Of python and PACKAGES, and "cuda" (what torch was built for), "nccl", "glibc", "arch"; '' when there is none."""
    there = installed()
    found = {"python": "%d.%d.%d" % sys.version_info[:3]}
    for package in PACKAGES:
        found[package] = there.get(package) or by_metadata(package)
    cuda = torch_cuda() if found["torch"] else ""
    major = "nvidia_nccl_cu%s" % cuda.split(".")[0]
    found["cuda"] = cuda
    found["nccl"] = there.get(major) or next((there[name] for name in NCCL if name in there), "") if cuda else ""
    found["glibc"] = glibc()
    found["arch"] = os.uname().machine
    return found


def installed() -> dict[str, str]:
    """{package: version} from the names of dist-info and egg-info folders; importlib.metadata takes 20 ms to load."""
    found: dict[str, str] = {}
    for folder in sys.path:
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


def by_metadata(package: str) -> str:
    """For what is installed in a rarer way: eggs, develop links, zip files."""
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def torch_cuda() -> str:
    """``torch.version.cuda``, as 12.6; '' for a CPU build."""
    for folder in sys.path:
        try:
            with open(os.path.join(folder, "torch", "version.py")) as file:
                match = re.search(r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)", file.read(), re.MULTILINE)
        except OSError:
            continue
        return match.group(1) if match else ""
    return ""


def glibc() -> str:
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")[2]
    except (ValueError, OSError):  # another C library
        return ""


def graph_size(manifest: str) -> dict[str, Any]:
    """Of a partition folder on this node: {"nodes", "row_bytes"}; {} without one that can be read."""
    if not manifest:
        return {}
    try:
        with open(os.path.expanduser(manifest)) as file:
            return size_of(json.load(file))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}  # what is wrong with it, the check of the data says


def size_of(manifest: dict[str, Any]) -> dict[str, Any]:
    """Vertices of all types, and bytes of their attributes for each on the average."""
    nodes = sum(kind["num_nodes"] for kind in manifest["nodes"].values())
    rows = sum(file["bytes"] for file in manifest["files"] if "/nodes/" in file["path"] and "/attrs/" in file["path"])
    return {"nodes": nodes, "row_bytes": rows / max(1, nodes)}
