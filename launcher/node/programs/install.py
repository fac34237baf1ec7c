"""Node program: downloads wheels, and makes or repairs a Python environment with them. Standard library only.

``main(request)`` answers one request, by its "op":

- ``installed``: the environment of the Python that runs this program, as returned by ``installed``
- ``reach``: {"reached": [whether this host can download from each of ``urls``]}
- ``fetch``: starts to download the ``wheels`` ({"file", "url", "sha256"}) to ``folder``
- ``fetched``: {"bytes", "total", "done", "error"} of these downloads
- ``install``: makes or repairs an environment, as described at ``install``

A new environment is made in ``<environment>.setup/env`` and renamed when it is complete and imports its packages. While
packages of an existing environment are replaced, ``UNFINISHED`` in it lists them.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

from launcher.node.programs import packages

UNFINISHED = ".gnnfleet-setup.json"

REACH_SECONDS = 5.0  # timeout of a request that tests whether a server can be reached

STALL_SECONDS = 60.0  # a download that receives nothing for so long has failed

INSTALL_SECONDS = 3600.0

IMPORT_SECONDS = 600.0  # the first import compiles modules, perhaps on a slow disk

AT_ONCE = 4  # downloads at a time

CHUNK = 1 << 18  # bytes


def main(request: dict[str, Any]) -> dict[str, Any]:
    """Answer one request; the docstring of the module lists them."""
    operation = request["op"]
    if operation == "installed":
        return installed()
    if operation == "reach":
        with ThreadPoolExecutor(max_workers=8) as pool:
            return {"reached": list(pool.map(reach, request["urls"]))}
    if operation == "fetch":
        DOWNLOADS.start(os.path.expanduser(request["folder"]), request["wheels"])
        return {}
    if operation == "fetched":
        return DOWNLOADS.state(request["seconds"])
    return install(request)


def installed() -> dict[str, Any]:
    """The environment of this Python: {"kind": venv, conda or python, "prefix", "python": version, "versions" by
    package, "unfinished": [packages whose installation was interrupted], "cuda": that torch is built for}."""
    facts = packages.versions()  # adds folders of .pth files to sys.path if needed
    there = packages.installed()
    prefix = os.path.dirname(os.path.dirname(sys.executable))
    return {
        "kind": kind_of(prefix),
        "prefix": prefix,
        "python": facts["python"],
        "versions": there,
        "unfinished": unfinished(prefix),
        "cuda": facts["cuda"],
    }


def kind_of(prefix: str) -> str:
    if os.path.isfile(os.path.join(prefix, "pyvenv.cfg")):
        return "venv"
    return "conda" if os.path.isdir(os.path.join(prefix, "conda-meta")) else "python"


def unfinished(prefix: str) -> list[str]:
    """Packages whose installation in this environment was interrupted."""
    try:
        with open(os.path.join(prefix, UNFINISHED)) as file:
            return [str(name) for name in json.load(file)]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError):
        return ["?"]


# -- downloads -----------------------------------------------------------


def reach(url: str) -> bool:
    """Whether a download from ``url`` would begin."""
    try:
        with urlopen(Request(url, method="HEAD"), timeout=REACH_SECONDS) as answer:
            return bool(answer.status == 200)
    except (OSError, ValueError):  # URLError and SSL errors are OSErrors
        return False


class Downloads:
    """Downloads in the background. A file is complete when it has its final name; cut ones are resumed."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.waiting: list[dict[str, Any]] = []
        self.threads: list[threading.Thread] = []
        self.bytes = self.total = 0
        self.error = ""

    def start(self, folder: str, wheels: list[dict[str, Any]]) -> None:
        """Begin to download ``wheels`` to ``folder``."""
        os.makedirs(folder, exist_ok=True)
        self.bytes, self.total, self.error = 0, 0, ""
        self.waiting = [dict(one, path=os.path.join(folder, one["file"])) for one in reversed(wheels)]
        self.threads = [threading.Thread(target=self.work, daemon=True) for _ in range(AT_ONCE)]
        for thread in self.threads:
            thread.start()

    def state(self, seconds: float) -> dict[str, Any]:
        """Progress, when all downloads have ended or after ``seconds``."""
        deadline = time.monotonic() + seconds
        for thread in self.threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        done = not any(thread.is_alive() for thread in self.threads)
        return {"bytes": self.bytes, "total": self.total, "done": done, "error": self.error}

    def work(self) -> None:
        while not self.error:
            with self.lock:
                if not self.waiting:
                    return
                one = self.waiting.pop()
            try:
                self.download(one)
            except (OSError, ValueError) as error:
                reason = error.reason if isinstance(error, URLError) else error
                self.error = "%s: %s" % (one["url"], reason)

    def download(self, one: dict[str, Any]) -> None:
        """Download a wheel, compare its digest and give it its final name. Raises OSError and ValueError."""
        path, part = one["path"], one["path"] + ".part"
        if os.path.exists(path) and sha256_of(path) == one["sha256"]:
            return
        have = os.path.getsize(part) if os.path.exists(part) else 0
        headers = {"Range": "bytes=%d-" % have} if have else {}
        try:
            answer = urlopen(Request(one["url"], headers=headers), timeout=STALL_SECONDS)
        except URLError as error:
            if getattr(error, "code", 0) != 416:  # 416: the file is complete, or longer than the original
                raise
            os.unlink(part)
            answer = urlopen(Request(one["url"]), timeout=STALL_SECONDS)
        with answer, open(part, "ab" if answer.status == 206 else "wb") as out:
            expected = int(answer.headers.get("Content-Length") or 0)
            self.count(total=expected)
            while True:
                data = answer.read(CHUNK)
                if not data:
                    break
                out.write(data)
                expected -= len(data)
                self.count(len(data))
        if expected > 0:
            raise ValueError("the connection was closed %d bytes before the end" % expected)
        if sha256_of(part) != one["sha256"]:
            os.unlink(part)
            raise ValueError("the downloaded file has another digest than the one that was resolved")
        os.replace(part, path)

    def count(self, received: int = 0, total: int = 0) -> None:
        with self.lock:
            self.bytes += received
            self.total += total


DOWNLOADS = Downloads()


def sha256_of(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while True:
            piece = stream.read(1 << 20)
            if not piece:
                return digest.hexdigest()
            digest.update(piece)


# -- installation --------------------------------------------------------


class Failed(Exception):
    """The installation failed; the text says why."""


def install(request: dict[str, Any]) -> dict[str, Any]:
    """Make or repair an environment from wheels; {"error": text or '', "tool": uv or pip, "seconds", "cuda"}.

    request: "environment": its folder; "base": the Python that makes a new one, '' to repair; "folder": temporary
    folder with the wheels in ``wheels/``; "requirements": as ["torch==2.13.0"]; "uv": path of uv on this host, or
    "tool": file name of uv's wheel, or neither; "pip": file name of pip's wheel; "imports": modules that must be
    importable afterwards.
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
    """Make a new environment beside its final place, then rename it. Returns (tool, whether torch can use CUDA)."""
    if os.path.lexists(environment):
        raise Failed("%s exists by now; run gnnfleet setup again" % environment)
    new = os.path.join(folder, "env")
    shutil.rmtree(new, ignore_errors=True)
    run([request["base"], "-m", "venv", "--without-pip", new], INSTALL_SECONDS)
    tool = add_packages(new, folder, request)
    cuda = importable(new, request["imports"])
    move_paths(new, environment)
    os.makedirs(os.path.dirname(environment), exist_ok=True)
    os.rename(new, environment)
    return tool, cuda


def repair(environment: str, folder: str, request: dict[str, Any]) -> tuple[str, bool]:
    """Replace packages of an environment; ``UNFINISHED`` in it lists them meanwhile. Returns as ``make``."""
    names = [word.partition("=")[0] for word in request["requirements"]]
    marker = os.path.join(environment, UNFINISHED)
    with open(marker, "w") as file:
        json.dump(sorted({*names, *unfinished(environment)} - {"?"}), file)
    tool = add_packages(environment, folder, request)
    cuda = importable(environment, request["imports"])
    os.unlink(marker)
    return tool, cuda


def add_packages(environment: str, folder: str, request: dict[str, Any]) -> str:
    """Install the wheels of ``folder`` with uv, or with pip where uv cannot run. Returns which one did it."""
    wheels = os.path.join(folder, "wheels")
    check_room(environment, wheels)
    listed = os.path.join(folder, "requirements.txt")
    with open(listed, "w") as file:
        file.write("\n".join(request["requirements"]) + "\n")
    python = os.path.join(environment, "bin", "python")
    common = ["--no-deps", "--no-index", "--find-links", wheels, "-r", listed]
    uv = request["uv"] or unpacked_uv(folder, request["tool"])
    if uv:
        cache = ["--cache-dir", os.path.join(folder, "cache")]  # on the same disk, so that files are linked, not copied
        try:
            run(
                [uv, "pip", "install", "--no-config", "--python", python, "--reinstall", *cache, *common],
                INSTALL_SECONDS,
            )
            return "uv"
        except Failed as error:
            print(
                error, file=sys.stderr
            )  # an old uv may not know an option; if pip fails as well, its error is reported
    pip = os.path.join(wheels, request["pip"], "pip")
    words = ["--isolated", "--disable-pip-version-check", "--no-warn-script-location", "--no-cache-dir", "--no-compile"]
    run([python, pip, "install", *words, "--force-reinstall", *common], INSTALL_SECONDS)
    return "pip"


def check_room(environment: str, wheels: str) -> None:
    """Raise Failed if the unpacked wheels would fill the disk."""
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


def unpacked_uv(folder: str, wheel: str) -> str:
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
    printed = run([os.path.join(environment, "bin", "python"), "-c", code], IMPORT_SECONDS)
    return printed.split()[-1:] == ["True"]


def move_paths(new: str, final: str) -> None:
    """Write the final folder in place of ``new`` into pyvenv.cfg and the scripts of a new environment."""
    programs = os.path.join(new, "bin")
    for path in [os.path.join(new, "pyvenv.cfg"), *(os.path.join(programs, name) for name in os.listdir(programs))]:
        if os.path.islink(path) or not os.path.isfile(path):
            continue
        with open(path, "rb") as file:
            data = file.read()
        if new.encode() in data and b"\0" not in data:  # programs in machine code have zero bytes
            with open(path, "wb") as file:
                file.write(data.replace(new.encode(), final.encode()))


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
