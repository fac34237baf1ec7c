"""Node program: makes or repairs a Python environment with wheels that are on the node. Standard library only.

``main(request)`` answers one request, by its "op":

- ``installed``: the environment of the Python that runs this program, as returned by ``installed``
- ``install``: makes or repairs an environment, as described at ``install``

A new environment is made in ``<environment>.setup/env`` and renamed when it is complete and imports its packages. While
packages of an existing environment are replaced, its file ``UNFINISHED`` lists these packages.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from typing import Any

from launcher.node.programs import packages

UNFINISHED = ".gnnfleet-setup.json"

_INSTALL_SECONDS = 3600.0

_IMPORT_SECONDS = 600.0  # the first import compiles modules, perhaps on a slow disk


def main(request: dict[str, Any]) -> dict[str, Any]:
    """Answer one request; the docstring of the module lists them."""
    return installed() if request["op"] == "installed" else install(request)


def installed() -> dict[str, Any]:
    """Return the environment of this Python.

    {"kind": venv, conda or python, "prefix": its folder, "python": version, "versions": {package: version},
    "unfinished": [packages whose installation was interrupted], "cuda": CUDA version for which torch was built, or ''}
    """
    facts = packages.versions()  # adds folders of .pth files to sys.path if needed
    there = packages.installed()
    prefix = os.path.dirname(os.path.dirname(sys.executable))
    kind = "conda" if os.path.isdir(os.path.join(prefix, "conda-meta")) else "python"
    if os.path.isfile(os.path.join(prefix, "pyvenv.cfg")):
        kind = "venv"
    return {
        "kind": kind,
        "prefix": prefix,
        "python": facts["python"],
        "versions": there,
        "unfinished": unfinished(prefix),
        "cuda": facts["cuda"],
    }


def unfinished(prefix: str) -> list[str]:
    """Return the packages whose installation in this environment was interrupted; ["?"] if they are unknown."""
    try:
        with open(os.path.join(prefix, UNFINISHED)) as file:
            return [str(name) for name in json.load(file)]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, RecursionError):
        return ["?"]


class Failed(Exception):
    """The installation failed; the text says why."""


def install(request: dict[str, Any]) -> dict[str, Any]:
    """Make or repair an environment from wheels.

    Returns {"error": text} or, on success, {"error": '', "tool": uv or pip, "seconds", "cuda": whether torch can use
    CUDA}. Fields of ``request``:

    - "environment": folder of the environment
    - "base": the Python that makes a new environment; '' to repair an environment
    - "folder": temporary folder with the wheels in ``wheels/``
    - "requirements": list such as ["torch==2.13.0"]
    - "uv": path of uv on this host; '' if uv is not installed
    - "tool": file name of uv's wheel, used if "uv" is ''; '' for none
    - "pip": file name of pip's wheel, used if uv cannot run
    - "imports": modules that must be importable afterwards
    """
    started = time.monotonic()
    environment, folder = os.path.expanduser(request["environment"]), os.path.expanduser(request["folder"])
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "lock"), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return {"error": "another gnnfleet setup is at work in %s; wait for its end" % folder}
        try:
            tool, cuda = make(environment, folder, request) if request["base"] else repair(environment, folder, request)
        except (Failed, OSError, subprocess.TimeoutExpired, zipfile.BadZipFile) as error:
            return {"error": str(error)}
        shutil.rmtree(folder, ignore_errors=True)
    return {"error": "", "tool": tool, "cuda": cuda, "seconds": time.monotonic() - started}


def make(environment: str, folder: str, request: dict[str, Any]) -> tuple[str, bool]:
    """Make an environment in a temporary folder, then rename it to ``environment``.

    Returns ("uv" or "pip", whether torch can use CUDA).
    """
    if os.path.lexists(environment):
        raise Failed("%s exists by now; run gnnfleet setup again" % environment)
    new = os.path.join(folder, "env")
    shutil.rmtree(new, ignore_errors=True)
    run([request["base"], "-m", "venv", "--without-pip", new], _INSTALL_SECONDS)
    tool = _add_packages(new, folder, request)
    cuda = importable(new, request["imports"])
    # Replace the path ``new`` by ``final`` in pyvenv.cfg and the scripts of the environment in ``new``.
    programs = os.path.join(new, "bin")
    for path in [os.path.join(new, "pyvenv.cfg"), *(os.path.join(programs, name) for name in os.listdir(programs))]:
        if os.path.islink(path) or not os.path.isfile(path):
            continue
        with open(path, "rb") as file:
            data = file.read()
        if new.encode() in data and b"\0" not in data:  # programs in machine code have zero bytes
            with open(path, "wb") as file:
                file.write(data.replace(new.encode(), environment.encode()))
    os.makedirs(os.path.dirname(environment), exist_ok=True)
    os.rename(new, environment)
    return tool, cuda


def repair(environment: str, folder: str, request: dict[str, Any]) -> tuple[str, bool]:
    """Replace packages of an environment; return the same as ``make``.

    Until all packages are replaced and importable, the file ``UNFINISHED`` in the environment lists them.
    """
    names = [word.partition("=")[0] for word in request["requirements"]]
    marker = os.path.join(environment, UNFINISHED)
    with open(marker, "w") as file:
        json.dump(sorted({*names, *unfinished(environment)} - {"?"}), file)
    tool = _add_packages(environment, folder, request)
    cuda = importable(environment, request["imports"])
    os.unlink(marker)
    return tool, cuda


def _add_packages(environment: str, folder: str, request: dict[str, Any]) -> str:
    """Install the wheels of ``folder`` with uv, or with pip where uv cannot run. Returns "uv" or "pip"."""
    wheels = os.path.join(folder, "wheels")
    need = 0
    for name in os.listdir(wheels):
        if name.endswith(".whl"):
            with zipfile.ZipFile(os.path.join(wheels, name)) as wheel:
                need += sum(entry.file_size for entry in wheel.infolist())
    free = shutil.disk_usage(wheels).free
    if free < need:
        raise Failed(
            "disk full: %.1f GB are needed beside %s, %.1f GB are free" % (need / 1e9, environment, free / 1e9)
        )
    listed = os.path.join(folder, "requirements.txt")
    with open(listed, "w") as file:
        file.write("\n".join(request["requirements"]) + "\n")
    python = os.path.join(environment, "bin", "python")
    common = ["--no-deps", "--no-index", "--find-links", wheels, "-r", listed]
    uv = request["uv"] or _unpacked_uv(folder, request["tool"])
    if uv:
        cache = ["--cache-dir", os.path.join(folder, "cache")]  # on the same disk, so that files are linked, not copied
        try:
            run(
                [uv, "pip", "install", "--no-config", "--python", python, "--reinstall", *cache, *common],
                _INSTALL_SECONDS,
            )
            return "uv"
        except Failed as error:
            print(
                error, file=sys.stderr
            )  # an old uv may not know an option; if pip fails as well, its error is reported
    pip = os.path.join(wheels, request["pip"], "pip")
    words = ["--isolated", "--disable-pip-version-check", "--no-warn-script-location", "--no-cache-dir", "--no-compile"]
    run([python, pip, "install", *words, "--force-reinstall", *common], _INSTALL_SECONDS)
    return "pip"


def _unpacked_uv(folder: str, wheel: str) -> str:
    """Unpack the program uv from its wheel and return its path; '' without a wheel, or if uv does not run here."""
    if not wheel:
        return ""
    with zipfile.ZipFile(os.path.join(folder, "wheels", wheel)) as archive:
        inside = [name for name in archive.namelist() if name.endswith(".data/scripts/uv")]
        if not inside:
            return ""
        path = archive.extract(inside[0], os.path.join(folder, "tool"))
    os.chmod(path, 0o755)
    try:
        run([path, "--version"], 60.0)
    except (Failed, OSError):
        return ""
    return path


def importable(environment: str, modules: list[str]) -> bool:
    """Import ``modules`` in the environment; returns whether torch can use CUDA. Raises Failed."""
    code = "import %s\n" % ", ".join(modules) if modules else ""
    code += (
        "import sys\ncuda = getattr(sys.modules.get('torch'), 'cuda', None)\nprint(bool(cuda and cuda.is_available()))"
    )
    printed = run([os.path.join(environment, "bin", "python"), "-c", code], _IMPORT_SECONDS)
    return printed.split()[-1:] == ["True"]


def run(argv: list[str], seconds: float) -> str:
    """Run a command and return its stdout. Raises Failed with the end of its output if it fails."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=seconds, cwd="/",
        env=environment, check=False,
    )  # fmt: skip
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).decode("utf-8", "replace").splitlines()[-6:]
        raise Failed(
            "%s failed with status %d:\n    %s"
            % (" ".join(argv[:4]).partition("\n")[0], done.returncode, "\n    ".join(last))
        )
    return done.stdout.decode("utf-8", "replace")
