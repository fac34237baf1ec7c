"""Node program: finds out what ``gnnfleet setup`` needs to know about a host. Python 3.8, standard library only.

``main(request)`` answers one request, by its "op":

- ``survey``: facts about the host and about the folder ``environment``, as returned by ``survey``
- ``mark``: creates the empty file ``name`` in the nearest existing folder above ``environment``
- ``marks``: returns as "names" the files in that folder that begin with ``prefix``; hosts that share the folder return
  the same names
- ``unmark``: removes the files that ``mark`` created; the end of the process removes them, too
"""

from __future__ import annotations

import os
import subprocess
import sys

from launcher.node.programs import environments, machine, packages

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_ABOUT = "import sys, venv; print('%d.%d.%d' % sys.version_info[:3])"

# Package manager → command that installs tmux, for root; others need sudo
_TMUX = {
    "apt-get": "apt-get install -y tmux",
    "dnf": "dnf install -y tmux",
    "yum": "yum install -y tmux",
    "zypper": "zypper install -y tmux",
    "pacman": "pacman -S --noconfirm tmux",
    "apk": "apk add tmux",
}

_AGENT = ["-S", "-c"]  # first arguments of node/programs/agent.py, whose processes end within seconds

_MARKS = []  # type: list[str]  # files that ``mark`` created


def main(request: dict[str, Any]) -> dict[str, Any]:
    """Answer one request; the docstring of the module lists them."""
    operation = request["op"]
    if operation == "survey":
        return survey(os.path.expanduser(request["environment"]))
    if operation == "mark":
        return mark(nearest(os.path.dirname(request["environment"])), request["name"])
    if operation == "marks":
        return marks(nearest(os.path.dirname(request["environment"])), request["prefix"])
    leave()
    return {}


def survey(environment: str) -> dict[str, Any]:
    """Return facts about this host. environment: folder of the environment, or '' if the cluster file names none."""
    usable = bool(environment) and os.access(os.path.join(environment, "bin", "python"), os.X_OK)
    gpus = machine.output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]).split()
    return {
        "home": os.path.expanduser("~"),
        "arch": os.uname().machine,
        "glibc": packages.glibc(),
        "pythons": [] if usable else pythons(),
        "uv": uv(),
        "gpus": len(gpus),
        "driver": gpus[0] if gpus else "",
        "tmux": machine.on_path("tmux"),
        "tmux_line": tmux_line(),
        "path": os.path.abspath(environment) if environment else "",
        "exists": bool(environment) and os.path.lexists(environment),
        "usable": usable,
        "error": why_not_writable(environment),
        "in_use": in_use(environment),
    }


def pythons() -> list[dict[str, str]]:
    """Return the Pythons that can make virtual environments, as {"program", "version"}, each version once.

    Those on PATH come first, then those of pyenv, uv and conda.
    """
    found: dict[str, str] = {}
    for name in environments.PYTHONS:
        for program in on_path(name):
            version = _version_of(program)
            if version:
                found.setdefault(version, program)
                break
    home = os.path.expanduser("~")
    tops = [
        os.path.join(os.environ.get("PYENV_ROOT") or os.path.join(home, ".pyenv"), "versions"),
        os.environ.get("UV_PYTHON_INSTALL_DIR") or os.path.join(home, ".local", "share", "uv", "python"),
    ]
    prefixes = [os.path.join(top, name) for top in tops for name in reversed(environments.entries(top))]
    prefixes += [os.path.join(top, name) for top in (home, "/opt", "/usr/local") for name in environments.CONDA_ROOTS]
    for folder in list({os.path.realpath(prefix): prefix for prefix in reversed(prefixes)}.values())[::-1]:
        program = os.path.join(folder, "bin", "python3")
        version = _version_of(program) if os.access(program, os.X_OK) else ""
        if version:
            found.setdefault(version, program)
    return [{"program": program, "version": version} for version, program in found.items()]


def on_path(name: str) -> list[str]:
    folders = [folder for folder in os.environ.get("PATH", os.defpath).split(os.pathsep) if folder.startswith("/")]
    return [path for path in (os.path.join(folder, name) for folder in folders) if os.access(path, os.X_OK)]


def _version_of(program: str) -> str:
    """The version of a Python; '' if it does not run or has no module venv."""
    try:
        done = subprocess.run(
            [program, "-c", _ABOUT],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=environments.SECONDS,
            cwd="/",
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode().strip() if done.returncode == 0 else ""


def uv() -> str:
    """Return the path of uv, from PATH, ~/.local/bin or ~/.cargo/bin; '' if uv is in none of them."""
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    for folder in [*folders, os.path.expanduser("~/.local/bin"), os.path.expanduser("~/.cargo/bin")]:
        if folder.startswith("/") and os.access(os.path.join(folder, "uv"), os.X_OK):
            return os.path.join(folder, "uv")
    return ""


def tmux_line() -> str:
    """The command that installs tmux with the package manager of this host; '' if none is known."""
    for manager, line in _TMUX.items():
        if machine.on_path(manager):
            return line if os.getuid() == 0 else "sudo " + line
    return "conda install -y -c conda-forge tmux" if machine.on_path("conda") else ""


def why_not_writable(environment: str) -> str:
    """Return why the folder, or the nearest existing folder above it, is not writable; '' if it is writable."""
    if not environment:
        return ""
    if os.path.lexists(environment) and not os.path.isdir(environment):
        return "%s is no folder" % environment
    folder = nearest(environment)
    return "" if os.access(folder, os.W_OK) else "%s is not writable" % folder


def nearest(path: str) -> str:
    """The folder ``path``, or the nearest one above it that exists."""
    folder = os.path.abspath(path)
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    return folder


def in_use(environment: str) -> list[str]:
    """Processes that run a Python of the environment, each as its pid and the start of its command."""
    programs = os.path.join(os.path.abspath(environment), "bin") + os.sep if environment else ""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc") if programs else []):
        words = machine.read("/proc/%s/cmdline" % pid).split("\0")
        if words[0].startswith(programs) and int(pid) != os.getpid() and words[1:3] != _AGENT:
            found.append("pid %s: %s" % (pid, " ".join(words).strip()[:60]))
    return found


def mark(folder: str, name: str) -> dict[str, Any]:
    """Create an empty file; {"marked": whether that worked}."""
    path = os.path.join(folder, name)
    try:
        with open(path, "x"):
            _MARKS.append(path)
    except OSError:
        return {"marked": False}
    return {"marked": True}


def marks(folder: str, prefix: str) -> dict[str, Any]:
    """{"names": the files in ``folder`` that begin with ``prefix``}."""
    try:
        return {"names": sorted(name for name in os.listdir(folder) if name.startswith(prefix))}
    except OSError:
        return {"names": []}


def leave() -> None:
    """Remove the files that ``mark`` created; also called when the process ends."""
    while _MARKS:
        try:
            os.unlink(_MARKS.pop())
        except OSError as error:
            print(error, file=sys.stderr)
