"""Test kit for ``gnnfleet setup``: tiny wheels, a package index in a folder, and states of hosts."""

from __future__ import annotations

import base64
import hashlib
import threading
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path
from typing import Any

from launcher.setup.requirements import Requirements, Target
from launcher.setup.survey import HostState, Installed, Interpreter
from launcher.setup.wheels import Wheel, WheelLock

TORCH, OTHER = "9.1.0", "1.2.0"
#: What the hosts get in tests: torch, which requires `graphdep`, and pip.
REQUIREMENTS = Requirements(
    ("torch", "pip"),
    {"torch": f"{TORCH}+cpu", "graphdep": OTHER, "pip": metadata.version("pip")},
    requires=lambda name: (),
)


def make_wheel(
    folder: Path,
    name: str,
    version: str,
    *,
    requires: Sequence[str] = (),
    code: str = "",
    script: str = "",
    module: str = "",
) -> Path:
    """Write a wheel with one module, and return its path. ``script``: name of a console script that runs the module.

    ``module``: file of the module; by default it has the name of the package.
    """
    about = f"{name}-{version}.dist-info"
    texts = {
        module or f"{name}.py": code or f"__version__ = {version!r}\ndef main(): print(__version__)\n",
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        + "".join(f"Requires-Dist: {one}\n" for one in requires),
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    if script:
        texts[f"{about}/entry_points.txt"] = f"[console_scripts]\n{script} = {name}:main\n"
    return _zipped(folder / f"{name}-{version}-py3-none-any.whl", {path: text.encode() for path, text in texts.items()})


def pip_wheel(folder: Path) -> Path:
    """Write the pip of this Python as a wheel, and return its path."""
    files = metadata.files("pip") or []
    kept = [each for each in files if ".." not in each.parts and each.suffix != ".pyc" and each.name != "RECORD"]
    kept = [each for each in kept if each.name not in ("INSTALLER", "REQUESTED", "direct_url.json")]
    contents = {str(each): Path(str(each.locate())).read_bytes() for each in kept}
    return _zipped(folder / f"pip-{metadata.version('pip')}-py3-none-any.whl", contents)


def _zipped(path: Path, files: dict[str, bytes]) -> Path:
    about = next(name for name in files if name.endswith(".dist-info/METADATA")).rpartition("/")[0]
    record = "".join(f"{name},sha256={_digest(data)},{len(data)}\n" for name, data in files.items())
    files[f"{about}/RECORD"] = (record + f"{about}/RECORD,,\n").encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def make_index(folder: Path, *, torch: str = "") -> Path:
    """Write the wheels of ``REQUIREMENTS`` to ``folder``. ``torch``: source of the module torch."""
    folder.mkdir(parents=True, exist_ok=True)
    make_wheel(folder, "torch", f"{TORCH}+cpu", requires=["graphdep>=1"], code=torch, script="torchrun")
    for version in (OTHER, "1.3.0"):
        make_wheel(folder, "graphdep", version)
    pip_wheel(folder)
    return folder


_TOOLS = ("nvidia-cuda-runtime-cu12", "nvidia-cuda-nvcc-cu12")

#: What packages of ``add_cuda_wheels`` require. As in real wheels, torch and the toolkit of its CUDA require different
#: patch releases of the runtime.
CUDA_REQUIRES = {
    "torch": ["graphdep>=1", f"{_TOOLS[0]}==12.6.77"],
    "cuda-toolkit": [f"{name}==12.6.85.*; extra == '{name.split('-')[2]}'" for name in _TOOLS],
    "numba-cuda": ["graphdep>=1", "cuda-toolkit[nvcc,runtime]==12.*; extra == 'cu12'"],
}


def add_cuda_wheels(folder: Path) -> None:
    """Write wheels for hosts with GPUs: a torch for CUDA 12.6, numba-cuda, and tools of CUDA 12.6 and 12.9."""
    built = "cuda = '12.6'\n"
    make_wheel(folder, "torch", TORCH, requires=CUDA_REQUIRES["torch"], module="torch/version.py", code=built)
    make_wheel(folder, "cuda_toolkit", "12.6.3", requires=CUDA_REQUIRES["cuda-toolkit"])
    make_wheel(folder, "cuda_toolkit", "12.9.1")
    make_wheel(folder, "numba_cuda", "0.30.4", requires=CUDA_REQUIRES["numba-cuda"], module="numba/cuda.py")
    for name in _TOOLS:
        make_wheel(folder, name.replace("-", "_"), "12.6.85")
    make_wheel(folder, _TOOLS[0].replace("-", "_"), "12.6.77")


class CutServer(SimpleHTTPRequestHandler):
    """Serves files and ranges of files. The first response for each file ends in the middle of the file."""

    cut: set[str] = set()
    ranges: list[str] = []

    def do_GET(self) -> None:
        data = Path(self.translate_path(self.path)).read_bytes()
        asked = self.headers.get("Range", "")
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
        self.ranges.append(asked)
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        first = self.path not in self.cut
        self.cut.add(self.path)
        self.wfile.write(data[start : len(data) // 2] if first else data[start:])

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


class QuietServer(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


@contextmanager
def served(
    folder: Path, handler: type[SimpleHTTPRequestHandler] = QuietServer, *, address: str = "127.0.0.1"
) -> Iterator[str]:
    """Serve a folder over HTTP on a free port of an address of this machine; yields the URL."""
    server = ThreadingHTTPServer((address, 0), partial(handler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://{address}:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def host_state(k: int = 0, **changes: Any) -> HostState:
    """Return the state of a host with Python 3.11 and 3.12. Its environment does not exist yet."""
    state = HostState(
        node_rank=k,
        label=f"node{k} (gnn{k})",
        environment="~/env",
        home="/home/me",
        arch="x86_64",
        glibc="2.36",
        pythons=(Interpreter("/usr/bin/python3", "3.11.2"), Interpreter("/usr/bin/python3.12", "3.12.1")),
        uv="",
        gpus=0,
        driver="",
        tmux=True,
        tmux_line="apt-get install -y tmux",
        exists=False,
        error="",
        in_use=(),
        installed=None,
        builder=k,
    )
    return replace(state, **changes)


def installed(**changes: Any) -> Installed:
    """Return an environment that has the packages of ``lock_for``."""
    versions = {"torch": f"{TORCH}+cpu", "graphdep": OTHER}
    return replace(Installed("venv", "/home/me/env", "3.11.2", versions, (), ""), **changes)


def lock_for(target: Target) -> WheelLock:
    """Return a lock with tiny packages; with a package of CUDA and numba-cuda if the target needs them."""
    cuda = target.build != "cpu"
    versions = {"graphdep": OTHER, "pip": "23.0", "torch": TORCH + (f"+{target.build}" if target.build else "")}
    versions |= {f"nvidia-cudnn-{(target.build or 'cu13')[:4]}": "9.0"} if cuda else {}
    versions |= {"numba-cuda": "0.30.4"} if target.kernels else {}
    wheels = [Wheel(name, version, f"https://files/{name}.whl", "00") for name, version in versions.items()]
    return WheelLock(target, tuple(wheels), None)
