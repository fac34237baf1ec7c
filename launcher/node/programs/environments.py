"""Node program: finds Pythons that have torch, and folders that may be shared with other nodes.

Python 3.8, standard library only. ``main(request)`` takes {"packages": source of node/programs/packages.py, "given":
[additional environments and interpreters to examine], "shared": [folders that the user declares as shared]} and replies

- "environments": [{"key": venv, conda or python, "path": value of that key in cluster.yml, with ~/ for the home
  folder, "versions": as from ``packages.versions``}]
- "shares": [writable folders on network file systems, the home folder, and the folders in "shared"]
"""

from __future__ import annotations

import ast
import os
import subprocess
import threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Iterator

_MARK = "gnnfleet-versions:"

_ENDING = "\nprint('%s' + repr(versions()))\n" % _MARK

SECONDS = 20.0  # timeout of one Python; it may be on a slow network disk

PYTHONS = ("python3", "python3.10", "python3.11", "python3.12", "python3.13", "python3.14")

_AT_ONCE = 4  # Pythons started concurrently

_MOST = 40  # Pythons started in total

_ENTRIES = 500  # entries of a folder that are examined

CONDA_ROOTS = (
    "miniconda3", "miniconda", "anaconda3", "anaconda", "miniforge3", "mambaforge", "micromamba", "conda",
)  # fmt: skip

_VENV_NAMES = (".venv", "venv", ".env", "env")

_VENV_FOLDERS = (
    "~",
    "~/venvs",
    "~/.venvs",
    "~/envs",
    "~/.virtualenvs",
    "~/.local/share/virtualenvs",
    "/opt",
    "/opt/venvs",
)

_NETWORK = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "cifs", "orangefs", "virtiofs", "9p")

_SHARES = 8  # folders in the reply


def main(request: dict[str, Any]) -> dict[str, Any]:
    """List Pythons that have torch, and folders that may be shared (format: docstring of the module)."""
    found = list(candidates(request["given"]))[:_MOST]
    versions: dict[int, dict[str, str]] = {}
    waiting = list(enumerate(found))
    threads = [threading.Thread(target=worker, args=(waiting, versions, request["packages"])) for _ in range(_AT_ONCE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    named = [dict(one, path=short(one["path"]), versions=versions[i]) for i, one in enumerate(found) if versions[i]]
    return {
        "environments": [{name: one[name] for name in ("key", "path", "versions")} for one in named],
        "shares": shares(request["shared"]),
    }


def worker(waiting: list[tuple[int, dict[str, str]]], versions: dict[int, dict[str, str]], source: str) -> None:
    """Take (index, environment) from ``waiting`` until it is empty; store package versions as ``versions[index]``.

    They are what ``packages.versions`` returns in that Python; {} when it fails. source: text of packages.py.
    """
    while True:
        try:
            index, one = waiting.pop()
        except IndexError:
            return
        versions[index] = {}
        try:
            done = subprocess.run(
                [one["program"], "-c", source + _ENDING],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=SECONDS, cwd="/",
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired):
            continue
        for line in done.stdout.decode("utf-8", "replace").splitlines():
            if line.startswith(_MARK):
                versions[index] = dict(ast.literal_eval(line[len(_MARK) :]))
                break


# -- Pythons -------------------------------------------------------------


def candidates(given: list[str]) -> Iterator[dict[str, str]]:
    """Yield each Python once, as {"key", "path", "program"}: those of ``given`` first."""
    seen: set[str] = set()
    for one in [*named(given), *_conda_environments(), *_virtual_environments(), *interpreters()]:
        real = os.path.realpath(one["program"] if one["key"] == "python" else one["path"])
        if real not in seen and os.access(one["program"], os.X_OK):
            seen.add(real)
            yield one


def named(given: list[str]) -> Iterator[dict[str, str]]:
    """Yield the environment (a folder) or interpreter (a file) at each of the paths ``given``; skip missing ones."""
    for text in given:
        path = os.path.expanduser(text)
        if os.path.isdir(path):
            yield _of_prefix("conda" if _is_conda(path) else "venv", path)
        elif os.path.isfile(path):
            yield {"key": "python", "path": path, "program": path}


def _of_prefix(key: str, prefix: str) -> dict[str, str]:
    """Return the environment in the folder ``prefix``, as {"key", "path", "program"}."""
    return {"key": key, "path": prefix, "program": os.path.join(prefix, "bin", "python")}


def _conda_environments() -> Iterator[dict[str, str]]:
    """Yield conda environments with torch: those in ~/.conda/environments.txt, and in folders such as ~/miniconda3."""
    prefixes = [line.strip() for line in lines_of(os.path.expanduser("~/.conda/environments.txt"))]
    tops = [os.path.expanduser("~"), "/opt", "/usr/local"]
    for root in (os.path.join(top, name) for top in tops for name in CONDA_ROOTS):
        prefixes += [os.path.join(root, "envs", name) for name in entries(os.path.join(root, "envs"))] + [root]
    for prefix in prefixes:
        if _is_conda(prefix) and _has_torch(prefix):
            yield _of_prefix("conda", prefix)


def _is_conda(prefix: str) -> bool:
    return os.path.isdir(os.path.join(prefix, "conda-meta"))


def _virtual_environments() -> Iterator[dict[str, str]]:
    """Yield virtual environments with torch: subfolders of ``_VENV_FOLDERS``, and folders such as ~/project/.venv."""
    for folder in _VENV_FOLDERS:
        top = os.path.expanduser(folder)
        for name in entries(top):
            beside = [os.path.join(top, name, usual) for usual in _VENV_NAMES] if folder == "~" else []
            for prefix in [os.path.join(top, name), *beside]:
                if os.path.isfile(os.path.join(prefix, "pyvenv.cfg")) and _has_torch(prefix):
                    yield _of_prefix("venv", prefix)


def interpreters() -> Iterator[dict[str, str]]:
    """Yield the Pythons on PATH, and pyenv's Pythons with torch.

    For a folder on PATH that belongs to a conda or virtual environment, yields the environment.
    """
    folders = [folder for folder in os.environ.get("PATH", os.defpath).split(os.pathsep) if folder.startswith("/")]
    for folder in folders:
        prefix = os.path.dirname(folder.rstrip("/"))
        if os.path.isfile(os.path.join(prefix, "pyvenv.cfg")) or _is_conda(prefix):
            yield _of_prefix("conda" if _is_conda(prefix) else "venv", prefix)
            continue
        for name in PYTHONS:
            program = os.path.join(folder, name)
            if os.access(program, os.X_OK):
                yield {"key": "python", "path": program, "program": program}
    versions = os.path.expanduser("~/.pyenv/versions")
    for name in entries(versions):
        program = os.path.join(versions, name, "bin", "python")
        if _has_torch(os.path.join(versions, name)):
            yield {"key": "python", "path": program, "program": program}


def _has_torch(prefix: str) -> bool:
    """Whether the environment in ``prefix`` has torch, or includes the system's packages, which may contain torch."""
    if any("true" in line for line in lines_of(os.path.join(prefix, "pyvenv.cfg")) if "system-site" in line):
        return True
    libraries = os.path.join(prefix, "lib")
    return any(
        os.path.isdir(os.path.join(libraries, name, "site-packages", "torch"))
        for name in entries(libraries)
        if name.startswith("python3")
    )


def entries(folder: str) -> list[str]:
    """Return the first ``_ENTRIES`` names in a folder, sorted; [] when it cannot be read."""
    try:
        return sorted(os.listdir(folder))[:_ENTRIES]
    except OSError:
        return []


def lines_of(path: str) -> list[str]:
    """Return the lines of a text file; [] when it cannot be read."""
    try:
        with open(path, errors="replace") as file:
            return file.read().splitlines()
    except OSError:
        return []


def short(path: str) -> str:
    """Return ``path`` with ``~/`` in place of the home folder."""
    home = os.path.expanduser("~").rstrip("/")
    return "~" + path[len(home) :] if home and path.startswith(home + "/") else path


# -- folders that may be shared ------------------------------------------


def shares(declared: list[str]) -> list[str]:
    """Return at most ``_SHARES`` writable folders: ``declared``, the home folder, those of network file systems."""
    mounts = [words[1] for words in map(str.split, lines_of("/proc/mounts")) if len(words) > 2 and words[2] in _NETWORK]
    home = os.path.expanduser("~")
    own = [os.path.join(mount, os.path.basename(home)) for mount in mounts]
    wanted = [os.path.expanduser(path) for path in declared] + [home, *own, *mounts]
    return [path for path in dict.fromkeys(wanted) if os.path.isdir(path) and os.access(path, os.W_OK)][:_SHARES]
