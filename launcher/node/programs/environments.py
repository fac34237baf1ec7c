"""Node program: finds Pythons that have torch, and folders that may be shared with other nodes.

Python 3.8, standard library only. ``main({"packages": source of node/programs/packages.py, "given": [folders and
programs to look at besides], "shared": [folders that are said to be shared]})`` replies ``{"environments": [{"key":
venv, conda or python, "path": as a cluster.yml names it, ~/ for the home folder, "versions": reply of
packages.versions}], "shares": [folders of network file systems, and those of "shared", that can be written to]}``.
"""

from __future__ import annotations

import ast
import os
import subprocess
import threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Iterator

MARK = "gnnfleet-versions:"

ENDING = "\nprint('%s' + repr(versions()))\n" % MARK

SECONDS = 20.0  # a Python on a network disk that sleeps

AT_ONCE = 4

MOST = 40  #: Pythons that are started

ENTRIES = 500  #: of one folder that are looked at

CONDA_ROOTS = (
    "miniconda3", "miniconda", "anaconda3", "anaconda", "miniforge3", "mambaforge", "micromamba", "conda",
)  # fmt: skip

VENV_NAMES = (".venv", "venv", ".env", "env")

VENV_FOLDERS = (
    "~",
    "~/venvs",
    "~/.venvs",
    "~/envs",
    "~/.virtualenvs",
    "~/.local/share/virtualenvs",
    "/opt",
    "/opt/venvs",
)

NETWORK = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "cifs", "orangefs", "virtiofs", "9p")

SHARES = 8


def main(request: dict[str, Any]) -> dict[str, Any]:
    found = list(candidates(request["given"]))[:MOST]
    versions: dict[int, dict[str, str]] = {}
    waiting = list(enumerate(found))
    threads = [threading.Thread(target=worker, args=(waiting, versions, request["packages"])) for _ in range(AT_ONCE)]
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
    while True:
        try:
            index, one = waiting.pop()
        except IndexError:
            return
        versions[index] = ask(one["program"], source)


def ask(program: str, source: str) -> dict[str, str]:
    """Versions of a Python as preflight would find them; {} for one that does not work."""
    try:
        done = subprocess.run(
            [program, "-c", source + ENDING],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=SECONDS, cwd="/",
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return {}
    for line in done.stdout.decode("utf-8", "replace").splitlines():
        if line.startswith(MARK):
            return dict(ast.literal_eval(line[len(MARK) :]))
    return {}


# -- Pythons -------------------------------------------------------------


def candidates(given: list[str]) -> Iterator[dict[str, str]]:
    """Each Python once: {"key", "path", "program"}; those that were named, then those that may have torch."""
    seen: set[str] = set()
    for one in [*named(given), *conda_environments(), *virtual_environments(), *interpreters()]:
        place = os.path.realpath(one["program"] if one["key"] == "python" else one["path"])
        if place not in seen and os.access(one["program"], os.X_OK):
            seen.add(place)
            yield one


def named(given: list[str]) -> Iterator[dict[str, str]]:
    for text in given:
        path = os.path.expanduser(text)
        if os.path.isdir(path):
            yield of_prefix("conda" if is_conda(path) else "venv", path)
        elif os.path.isfile(path):
            yield {"key": "python", "path": path, "program": path}


def of_prefix(key: str, prefix: str) -> dict[str, str]:
    return {"key": key, "path": prefix, "program": os.path.join(prefix, "bin", "python")}


def conda_environments() -> Iterator[dict[str, str]]:
    """Those that conda has written down, and those below the usual roots."""
    prefixes = [line.strip() for line in lines_of(os.path.expanduser("~/.conda/environments.txt"))]
    tops = [os.path.expanduser("~"), "/opt", "/usr/local"]
    for root in (os.path.join(top, name) for top in tops for name in CONDA_ROOTS):
        prefixes += [os.path.join(root, "envs", name) for name in entries(os.path.join(root, "envs"))] + [root]
    for prefix in prefixes:
        if is_conda(prefix) and has_torch(prefix):
            yield of_prefix("conda", prefix)


def is_conda(prefix: str) -> bool:
    return os.path.isdir(os.path.join(prefix, "conda-meta"))


def virtual_environments() -> Iterator[dict[str, str]]:
    """In the home folder and where tools keep them; one level deeper only under the usual names."""
    for folder in VENV_FOLDERS:
        top = os.path.expanduser(folder)
        for name in entries(top):
            beside = [os.path.join(top, name, usual) for usual in VENV_NAMES] if folder == "~" else []
            for prefix in [os.path.join(top, name), *beside]:
                if os.path.isfile(os.path.join(prefix, "pyvenv.cfg")) and has_torch(prefix):
                    yield of_prefix("venv", prefix)


def interpreters() -> Iterator[dict[str, str]]:
    """Those of PATH, as the environment that they belong to if there is one, and of pyenv."""
    folders = [folder for folder in os.environ.get("PATH", os.defpath).split(os.pathsep) if folder.startswith("/")]
    for folder in folders:
        prefix = os.path.dirname(folder.rstrip("/"))
        if os.path.isfile(os.path.join(prefix, "pyvenv.cfg")) or is_conda(prefix):
            yield of_prefix("conda" if is_conda(prefix) else "venv", prefix)
            continue
        for name in ("python3", "python3.10", "python3.11", "python3.12", "python3.13"):
            program = os.path.join(folder, name)
            if os.access(program, os.X_OK):
                yield {"key": "python", "path": program, "program": program}
    versions = os.path.expanduser("~/.pyenv/versions")
    for name in entries(versions):
        program = os.path.join(versions, name, "bin", "python")
        if has_torch(os.path.join(versions, name)):
            yield {"key": "python", "path": program, "program": program}


def has_torch(prefix: str) -> bool:
    """Whether it is worth starting; one that sees the system's packages may have torch from there."""
    if any("true" in line for line in lines_of(os.path.join(prefix, "pyvenv.cfg")) if "system-site" in line):
        return True
    libraries = os.path.join(prefix, "lib")
    return any(
        os.path.isdir(os.path.join(libraries, name, "site-packages", "torch"))
        for name in entries(libraries)
        if name.startswith("python3")
    )


def entries(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))[:ENTRIES]
    except OSError:
        return []


def lines_of(path: str) -> list[str]:
    try:
        with open(path, errors="replace") as file:
            return file.read().splitlines()
    except OSError:
        return []


def short(path: str) -> str:
    """With ``~/`` for the home folder, so that it names the same place for every user."""
    home = os.path.expanduser("~").rstrip("/")
    return "~" + path[len(home) :] if home and path.startswith(home + "/") else path


# -- folders that may be shared ------------------------------------------


def shares(said: list[str]) -> list[str]:
    """Absolute; the home folder counts, since it often is."""
    mounts = [words[1] for words in map(str.split, lines_of("/proc/mounts")) if len(words) > 2 and words[2] in NETWORK]
    home = os.path.expanduser("~")
    own = [os.path.join(mount, os.path.basename(home)) for mount in mounts]
    wanted = [os.path.expanduser(path) for path in said] + [home, *own, *mounts]
    return [path for path in dict.fromkeys(wanted) if os.path.isdir(path) and os.access(path, os.W_OK)][:SHARES]
