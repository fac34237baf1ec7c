"""Wheels and locks of a target; downloads wheels to this machine, where they are kept; runs pip."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from shutil import which
from urllib.parse import unquote, urlsplit

from packaging.version import Version

from launcher.errors import FleetError
from launcher.files import file_sha256
from launcher.setup.own_wheel import cache_folder
from launcher.setup.requirements import Target

_TIMEOUT = 1800.0  # seconds of one pip

_PIP = ("--disable-pip-version-check", "--no-input", "--quiet", "--retries", "1")


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
    no_kernels: str = ""  #: why numba-cuda is not among the wheels although ``target.kernels`` asks for it; ''

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


def download(wheels: Iterable[Wheel], target: Target) -> dict[Wheel, Path]:
    """Return the path of each wheel on this machine; downloads those that are not in the cache. Raises SetupError."""
    folder = cache_folder() / "wheels"
    folder.mkdir(parents=True, exist_ok=True)
    paths = {wheel: folder / wheel.file for wheel in wheels}
    missing = [wheel for wheel, path in paths.items() if not (path.exists() and file_sha256(path) == wheel.sha256)]
    if missing:
        # pip chooses by name and digest, because URLs in its report lack the password of a private index
        lines = ""
        for wheel in missing:
            # `torch==2.13.0` would also match the build 2.13.0+cpu
            pin = f"torch==={wheel.version}" if wheel.name == "torch" else wheel.pin
            lines += f"{pin} --hash=sha256:{wheel.sha256}\n"
        with tempfile.TemporaryDirectory(dir=folder, prefix=".new-") as new:
            listed = Path(new) / "requirements.txt"
            listed.write_text(lines)
            failed = run_pip("download", "--no-deps", "--dest", new, *target.pip_words, "-r", str(listed))
            if failed:
                raise SetupError(f"wheels for {target} could not be downloaded: {failed}. Run gnnfleet setup again")
            for wheel in missing:
                os.replace(Path(new) / wheel.file, paths[wheel])
    return paths


#: Settings of pip that would change what the calls below mean; index, proxy and folders of wheels stay the user's.
_PIP_ENV = {"PIP_USER": "0", "PIP_REQUIRE_VIRTUALENV": "0", "PIP_REQUIRE_HASHES": "0"}


def run_pip(*words: str, command: tuple[str, ...] = ()) -> str:
    """Run pip. Returns '', or the reason if pip fails. ``command``: how to start it; default: ``_pip_command()``."""
    argv = [*(command or _pip_command()), *words[:1], *_PIP, *words[1:]]
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT,
            env={**os.environ, **_PIP_ENV},
        )
    except subprocess.TimeoutExpired:
        return f"pip did not end within {_TIMEOUT / 60:g} minutes"
    if done.returncode == 0:
        return ""
    said = re.sub(r" \(from versions: [^)]*\)", "", done.stderr)
    errors = [line.removeprefix("ERROR: ") for line in said.splitlines() if line.startswith("ERROR: ")]
    return "; ".join(errors[-2:]) or done.stderr.strip()[-500:] or f"pip ended with status {done.returncode}"


_OLDEST_PIP = Version("22.2")  #: the first that reports which wheels it would install


@cache
def _pip_command() -> tuple[str, ...]:
    """Return the command that starts a pip of version ``_OLDEST_PIP`` or newer.

    It starts the pip installed for this Python; else the pip bundled with ``ensurepip``; else ``uv tool run pip``; else
    a newer pip that one of these downloads, which is kept in the cache. Raises SetupError.
    """
    found: list[tuple[Version, tuple[str, ...]]] = []
    with suppress(metadata.PackageNotFoundError):
        # by its path: -m would run a pip.py of the current folder
        path = metadata.distribution("pip").locate_file("pip")
        found.append((Version(metadata.version("pip")), (sys.executable, str(path))))
    with suppress(ImportError):
        import ensurepip

        found += _pip_wheels(Path(ensurepip.__file__).parent / "_bundled")
    kept = cache_folder() / "pip"
    for version, command in (*found, *_pip_wheels(kept)):
        if version >= _OLDEST_PIP:
            return command
    if uv := which("uv"):
        return (uv, "tool", "run", "--python", sys.executable, "pip")
    if not found:
        raise SetupError(
            f"{sys.executable} has no pip, which resolves the versions for the hosts: install it, then try again"
        )
    words = ("--no-deps", "--only-binary=:all:", "--dest", str(kept), f"pip>={_OLDEST_PIP}")
    failed = run_pip("download", *words, command=found[0][1])
    if made := _pip_wheels(kept):
        return made[-1][1]
    raise SetupError(
        f"pip {found[0][0]} of {sys.executable} is too old to resolve the versions for the hosts, and it could not "
        f"download a newer one ({failed}); install pip {_OLDEST_PIP} or newer: {sys.executable} -m pip install -U pip"
    )


def _pip_wheels(folder: Path) -> list[tuple[Version, tuple[str, ...]]]:
    """Return the versions of the wheels of pip in ``folder``, oldest first, and how to start each."""
    names = ((Version(path.name.split("-")[1]), path) for path in folder.glob("pip-*.whl"))
    return [(version, (sys.executable, f"{path}/pip")) for version, path in sorted(names)]
