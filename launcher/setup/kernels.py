"""Chooses the packages with which the bundled trainer compiles kernels for GPUs, so that they fit torch's CUDA."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from launcher.config.roles import kernel_requirement
from launcher.setup.requirements import Target

_COMPILER = "numba-cuda"

_RUNTIME = "nvidia-cuda-runtime"  # required by torch; its version begins with that of CUDA


def cuda_version(versions: Mapping[str, str], target: Target) -> str:
    """Return the CUDA version for which torch is built, as "12.6"; '' if it is unknown, or for a CPU build.

    ``versions``: those of the chosen wheels, by canonical name.
    """
    if target.build.startswith("cu"):
        return f"{target.build[2:-1]}.{target.build[-1]}"
    found = next((version for name, version in versions.items() if name.startswith(_RUNTIME)), "")
    return ".".join(found.split(".")[:2])


def kernel_roots(cuda: str) -> tuple[str, ...]:
    """Return what kernels need beside a torch for CUDA version ``cuda``, as requirements; () if none fit.

    The limit on cuda-toolkit gives the compiler that minor version of CUDA whose libraries torch brings.
    """
    requirement = kernel_requirement(cuda)
    return (requirement, f"cuda-toolkit=={cuda}.*") if requirement else ()


def conflict(found: Mapping[str, Mapping[str, Any]], target: Target) -> str:
    """Return which requirement of numba-cuda the chosen packages do not meet; '' if they meet all.

    ``found``: metadata of the packages (of pip's report) by canonical name.
    """
    about = found[_COMPILER]
    for text in about.get("requires_dist", ()):
        one = Requirement(text)
        if one.marker and not one.marker.evaluate({**target.markers, "extra": ""}):
            continue
        version = found[canonicalize_name(one.name)]["version"]
        if not one.specifier.contains(version, prereleases=True):
            return f"{_COMPILER} {about['version']} needs {one.name}{one.specifier}, but this machine has {version}"
    return ""
