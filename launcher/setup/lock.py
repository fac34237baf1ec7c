"""Resolves the packages of a target to wheels with pip: requirements → ``WheelLock``.

Resolved locks are kept in ``cache_folder()``: a second ``gnnfleet setup`` needs no network.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from launcher.config.roles import kernel_requirement
from launcher.files import write_whole
from launcher.setup.own_wheel import NAME, cache_folder, own_wheel
from launcher.setup.requirements import Requirements, Target, closure
from launcher.setup.wheels import NoWheels, SetupError, Wheel, WheelLock, run_pip

_ROUNDS = 8  # times that newly found requirements are resolved

_FORMAT = 1  # of stored locks


def lock_of(requirements: Requirements, target: Target) -> WheelLock:
    """Return the wheels for ``target``, from the cache or from the package index that pip uses here.

    Raises NoWheels if the index cannot be reached or lacks a package in this version for the target. A lock without
    numba-cuda, for which ``WheelLock.no_kernels`` gives a reason, is not kept.
    """
    path = _lock_file(requirements, target)
    with suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads(path.read_text())
        wheels = tuple(Wheel(**one) for one in found["wheels"])
        return WheelLock(target, wheels, Wheel(**found["uv"]) if found["uv"] else None)
    # Resolve the roots and all packages that they require on ``target``; then numba-cuda, if the target needs it.
    chosen, why = _settled(requirements, target, {}), ""
    if target.kernels:
        chosen, why = _with_kernels(requirements, target, chosen)
    wheels = tuple(sorted((_wheel(one.found) for one in chosen.values()), key=lambda wheel: wheel.name))
    uv = None  # pip does without it, more slowly
    with suppress(SetupError):
        uv = _wheel(_report({"uv": requirements.line("uv", target)}, target)["uv"])
    lock = WheelLock(target, wheels, uv, why)
    if not why:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = {"wheels": [asdict(one) for one in lock.wheels], "uv": lock.uv and asdict(lock.uv)}
        write_whole(path, json.dumps(kept))
    return lock


def forget(requirements: Requirements, target: Target) -> None:
    """Delete the lock of ``target`` from the cache; the next ``lock_of`` asks the package index."""
    _lock_file(requirements, target).unlink(missing_ok=True)


def _lock_file(requirements: Requirements, target: Target) -> Path:
    settings = sorted((name, value) for name, value in os.environ.items() if name.startswith("PIP_"))
    key = json.dumps([_FORMAT, asdict(target), requirements.roots, sorted(requirements.pins.items()), settings])
    return cache_folder() / "locks" / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"


@dataclass(frozen=True)
class _Choice:
    """A line for pip, such as ``numpy==2.1.0``, and pip's report on the wheel that it found for the line."""

    line: str
    found: Mapping[str, Any]

    @property
    def requires(self) -> Iterable[str]:
        requires: Iterable[str] = self.found["metadata"].get("requires_dist", ())
        return requires


def _with_kernels(
    requirements: Requirements, target: Target, chosen: dict[str, _Choice]
) -> tuple[dict[str, _Choice], str]:
    """Return ``chosen`` with numba-cuda and what it requires, and ''; or ``chosen``, and why it stays without them."""
    cuda = cuda_version({name: one.found["metadata"]["version"] for name, one in chosen.items()}, target)
    roots = kernel_roots(cuda)
    if not roots:
        return chosen, f"numba-cuda does not support {f'CUDA {cuda}' if cuda else 'a torch without CUDA'}"
    try:
        more = _settled(replace(requirements, roots=(*requirements.roots, *roots)), target, chosen)
    except NoWheels as error:
        return chosen, str(error)
    why = conflict({name: one.found["metadata"] for name, one in more.items()}, target)
    return (chosen, why) if why else (more, "")


def _settled(requirements: Requirements, target: Target, fixed: Mapping[str, _Choice]) -> dict[str, _Choice]:
    """Resolve the roots and all packages that they require on ``target``. Returns the choices by name.

    ``fixed``: choices that stay as they are.

    pip evaluates markers for the Python that runs it, even with --python-version, so it cannot resolve dependencies for
    ``target``. Instead, pip finds the wheels of a list of packages, without dependencies. The metadata of these wheels
    give the list for the next round, of which pip resolves what has changed. The last round changes nothing.
    """
    chosen = dict(fixed)

    def requires(name: str) -> Iterable[str]:
        return chosen[name].requires if name in chosen else requirements.requires(name)

    for _ in range(_ROUNDS):
        wanted = closure(requirements.roots, requires, target)
        lines = {name: requirements.line(name, target, wanted[name]) for name in wanted if name not in fixed}
        new = {name: line for name, line in lines.items() if name not in chosen or chosen[name].line != line}
        chosen = {name: one for name, one in chosen.items() if name in wanted}
        if not new:
            return chosen
        if own := new.pop(NAME, ""):
            chosen[NAME] = _Choice(own, own_wheel(cache_folder() / "wheels"))
            continue
        chosen |= {name: _Choice(new[name], found) for name, found in _report(new, target).items()}
    roots = ", ".join(requirements.roots)
    raise SetupError(f"the requirements of {roots} for {target} still change after {_ROUNDS} rounds of pip")


def _report(lines: Mapping[str, str], target: Target) -> dict[str, dict[str, Any]]:
    """Return pip's report on the wheels that satisfy ``lines``, by name; nothing is installed. Raises SetupError."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        words = ["--dry-run", "--no-deps", "--report", str(report), "--target", folder]
        failed = run_pip("install", *words, *target.pip_words, *sorted(lines.values()))
        if failed:
            raise NoWheels(
                f"no wheels for {target} in the versions of this machine: {failed}. Check that pip on this machine "
                "reaches the package index. If it does, use another Python version on the host, or install other "
                "package versions on this machine"
            )
        found: list[dict[str, Any]] = json.loads(report.read_text())["install"]
        return {canonicalize_name(one["metadata"]["name"]): one for one in found}


def _wheel(found: Mapping[str, Any]) -> Wheel:
    about, url, archive = found["metadata"], found["download_info"]["url"], found["download_info"]["archive_info"]
    digest = archive.get("hashes", {}).get("sha256") or archive.get("hash", "").removeprefix("sha256=")  # pip < 23.1
    if not re.fullmatch("[0-9a-f]{64}", digest):
        raise SetupError(f"{url}: the package index gives no SHA-256 of this file; use another index")
    return Wheel(canonicalize_name(about["name"]), about["version"], url, digest)


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
