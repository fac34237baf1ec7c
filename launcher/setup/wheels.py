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
from pathlib import Path
from urllib.parse import unquote, urlsplit

from launcher.errors import FleetError
from launcher.files import file_sha256
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


def cache_folder() -> Path:
    """Return the folder of locks and wheels: ``${XDG_CACHE_HOME:-~/.cache}/gnnfleet/setup``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "gnnfleet/setup"


def download(wheels: Iterable[Wheel], target: Target) -> dict[Wheel, Path]:
    """Return the path of each wheel on this machine; downloads those that are not in the cache. Raises SetupError."""
    folder = cache_folder() / "wheels"
    folder.mkdir(parents=True, exist_ok=True)
    paths = {wheel: folder / wheel.file for wheel in wheels}
    missing = [wheel for wheel, path in paths.items() if not (path.exists() and file_sha256(path) == wheel.sha256)]
    if missing:
        # pip chooses by name and digest, because URLs in its report lack the password of a private index
        lines = "".join(f"{_exact_pin(wheel)} --hash=sha256:{wheel.sha256}\n" for wheel in missing)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".new-") as new:
            listed = Path(new) / "requirements.txt"
            listed.write_text(lines)
            failed = run_pip("download", "--no-deps", "--dest", new, *target.pip_words, "-r", str(listed))
            if failed:
                raise SetupError(f"wheels for {target} could not be downloaded: {failed}. Run gnnfleet setup again")
            for wheel in missing:
                os.replace(Path(new) / wheel.file, paths[wheel])
    return paths


def _exact_pin(wheel: Wheel) -> str:
    # `torch==2.13.0` would also match the build 2.13.0+cpu
    return f"torch==={wheel.version}" if wheel.name == "torch" else wheel.pin


def run_pip(*words: str) -> str:
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
