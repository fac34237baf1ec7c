"""Resolves the packages of a target to wheels with pip, and downloads wheels to this machine.

Resolved locks and downloaded wheels are kept in ``cache_folder()``: a second ``gnnfleet setup`` needs no network.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from packaging.utils import canonicalize_name

from launcher.errors import FleetError
from launcher.files import file_sha256, write_whole
from launcher.setup.requirements import Requirements, Target, closure

_ROUNDS = 8  # times that newly found requirements are resolved

_TIMEOUT = 1800.0  # seconds of one pip

_PIP = ("--disable-pip-version-check", "--no-input", "--quiet", "--retries", "1")

_FORMAT = 1  # of stored locks


class SetupError(FleetError):
    """Packages could not be resolved or downloaded, or an environment could not be made."""


class NoWheels(SetupError):
    """pip found no wheels for a target, or did not reach the package index."""


@dataclass(frozen=True)
class Wheel:
    """One wheel of a package."""

    name: str  #: canonical name
    version: str
    url: str
    sha256: str

    @property
    def file(self) -> str:
        """The name of the wheel file."""
        return unquote(urlsplit(self.url).path.rpartition("/")[2])

    @property
    def server(self) -> str:
        """Scheme and host of the URL; '' for a file on this machine."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc}" if parts.scheme in ("http", "https") else ""

    @property
    def pin(self) -> str:
        return f"{self.name}=={self.version}"


@dataclass(frozen=True)
class WheelLock:
    """The wheels of all packages that environments of one target need."""

    target: Target
    wheels: tuple[Wheel, ...]  #: by name
    uv: Wheel | None  #: uv, which installs faster than pip; None if the package index does not have it

    @property
    def versions(self) -> dict[str, str]:
        return {wheel.name: wheel.version for wheel in self.wheels}

    @property
    def pip(self) -> Wheel:
        return next(wheel for wheel in self.wheels if wheel.name == "pip")

    @property
    def cuda(self) -> str:
        """Major version of CUDA for which torch is built, as "13"; '' without CUDA."""
        names = [wheel.name.rpartition("-cu")[2] for wheel in self.wheels if wheel.name.startswith("nvidia-")]
        return next((number for number in names if number.isdecimal()), "")


def cache_folder() -> Path:
    """Return the folder of locks and wheels: ``${XDG_CACHE_HOME:-~/.cache}/gnnfleet/setup``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "gnnfleet/setup"


# -- resolving -----------------------------------------------------------


def lock_of(requirements: Requirements, target: Target) -> WheelLock:
    """Return the wheels for ``target``, from the cache or from the package index that pip uses here.

    Raises NoWheels if the index cannot be reached or lacks a package in this version for the target.
    """
    path = _lock_file(requirements, target)
    with suppress(OSError, ValueError, KeyError, TypeError):
        return _read(path, target)
    lock = WheelLock(target, _resolve(requirements, target), _find_uv(requirements, target))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps({"wheels": [asdict(one) for one in lock.wheels], "uv": lock.uv and asdict(lock.uv)}))
    return lock


def forget(requirements: Requirements, target: Target) -> None:
    """Delete the lock of ``target`` from the cache; the next ``lock_of`` asks the package index."""
    _lock_file(requirements, target).unlink(missing_ok=True)


def _lock_file(requirements: Requirements, target: Target) -> Path:
    settings = sorted((name, value) for name, value in os.environ.items() if name.startswith("PIP_"))
    key = json.dumps([_FORMAT, asdict(target), requirements.roots, sorted(requirements.pins.items()), settings])
    return cache_folder() / "locks" / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"


def _read(path: Path, target: Target) -> WheelLock:
    found = json.loads(path.read_text())
    wheels = tuple(Wheel(**one) for one in found["wheels"])
    return WheelLock(target, wheels, Wheel(**found["uv"]) if found["uv"] else None)


def _resolve(requirements: Requirements, target: Target) -> tuple[Wheel, ...]:
    """Resolve the roots and all packages that they require on ``target``.

    pip evaluates markers for the Python that runs it, even with --python-version, so it cannot resolve dependencies for
    ``target``. Instead, pip finds the wheels of a list of packages, without dependencies. The metadata of these wheels
    give the list for the next round. The last round is the one that does not change the list.
    """
    lines = _lines(requirements, closure(requirements.roots, requirements.requires, target), target)
    for _ in range(_ROUNDS):
        found = _report(lines, target)
        needed = _lines(requirements, closure(requirements.roots, _requires(found), target), target)
        if needed == lines:
            return tuple(sorted(map(_wheel, found), key=lambda wheel: wheel.name))
        lines = needed
    roots = ", ".join(requirements.roots)
    raise SetupError(f"the requirements of {roots} for {target} still change after {_ROUNDS} rounds of pip")


def _lines(requirements: Requirements, wanted: Mapping[str, str], target: Target) -> list[str]:
    return sorted(requirements.line(name, target, wanted[name]) for name in wanted)


def _requires(found: Sequence[Mapping[str, Any]]) -> Any:
    requires = {canonicalize_name(one["metadata"]["name"]): one["metadata"].get("requires_dist", ()) for one in found}
    return lambda name: requires.get(name, ())


def _find_uv(requirements: Requirements, target: Target) -> Wheel | None:
    try:
        [found] = _report([requirements.line("uv", target)], target)
    except SetupError:
        return None  # pip does without it, more slowly
    return _wheel(found)


def _report(lines: Sequence[str], target: Target) -> list[dict[str, Any]]:
    """Return pip's report on the wheels that satisfy ``lines``; nothing is installed. Raises SetupError."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        words = ["--dry-run", "--no-deps", "--report", str(report), "--target", folder]
        failed = _pip("install", *words, *target.pip_words, *lines)
        if failed:
            raise NoWheels(
                f"no wheels for {target} in the versions of this machine: {failed}. Check that pip on this machine "
                "reaches the package index. If it does, use another Python version on the host, or install other "
                "package versions on this machine"
            )
        found: list[dict[str, Any]] = json.loads(report.read_text())["install"]
        return found


def _wheel(found: Mapping[str, Any]) -> Wheel:
    about, download = found["metadata"], found["download_info"]
    return Wheel(
        canonicalize_name(about["name"]),
        about["version"],
        download["url"],
        download["archive_info"]["hashes"]["sha256"],
    )


# -- downloading ---------------------------------------------------------


def download(wheels: Iterable[Wheel], target: Target) -> dict[Wheel, Path]:
    """Return the path of each wheel on this machine; downloads those that are not in the cache. Raises SetupError."""
    folder = cache_folder() / "wheels"
    folder.mkdir(parents=True, exist_ok=True)
    paths = {wheel: folder / wheel.file for wheel in wheels}
    missing = [wheel for wheel, path in paths.items() if not (path.exists() and file_sha256(path) == wheel.sha256)]
    if missing:
        # pip chooses by name and digest, because URLs in its report lack the password of a private index
        lines = "".join(f"{wheel.pin} --hash=sha256:{wheel.sha256}\n" for wheel in missing)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".new-") as new:
            listed = Path(new) / "requirements.txt"
            listed.write_text(lines)
            failed = _pip("download", "--no-deps", "--dest", new, *target.pip_words, "-r", str(listed))
            if failed:
                raise SetupError(f"wheels for {target} could not be downloaded: {failed}. Run gnnfleet setup again")
            for wheel in missing:
                os.replace(Path(new) / wheel.file, paths[wheel])
    return paths


def _pip(*words: str) -> str:
    """Run pip. Returns '', or the reason if pip fails."""
    done = subprocess.run(
        [*_pip_command(), *words[:1], *_PIP, *words[1:]],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_TIMEOUT,
    )
    if done.returncode == 0:
        return ""
    said = re.sub(r" \(from versions: [^)]*\)", "", done.stderr)
    errors = [line.removeprefix("ERROR: ") for line in said.splitlines() if line.startswith("ERROR: ")]
    return "; ".join(errors[-2:]) or done.stderr.strip()[-500:] or f"pip ended with status {done.returncode}"


@cache
def _pip_command() -> tuple[str, ...]:
    """Return the command that starts pip.

    It starts the pip installed for this Python; else the pip bundled with ``ensurepip``; else ``uv tool run pip``.
    """
    from importlib.util import find_spec
    from shutil import which

    if find_spec("pip"):
        return (sys.executable, "-m", "pip")
    with suppress(ImportError):
        import ensurepip

        bundled = sorted(Path(ensurepip.__file__).parent.glob("_bundled/pip-*.whl"))
        if bundled:
            return (sys.executable, f"{bundled[-1]}/pip")
    if uv := which("uv"):
        return (uv, "tool", "run", "--python", sys.executable, "pip")
    raise SetupError(
        f"{sys.executable} has no pip, which resolves the versions for the hosts: install it, then try again"
    )
