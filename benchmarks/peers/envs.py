"""Makes Python 3.11 environments for DGL and graphlearn-torch (glt) with pip, once, under ``~/.cache/gnnfleet-bench``.

python benchmarks/peers/envs.py dgl glt      make these environments now
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gnnfleet-bench"


@dataclass(frozen=True)
class PeerEnv:
    name: str  #: name of the environment's folder
    title: str
    steps: tuple[tuple[str, ...], ...]  #: arguments of each call of ``pip install``
    proof: str  #: Python code that succeeds if the system is installed

    @property
    def folder(self) -> Path:
        return ROOT / self.name


#: The wheel needs symbols that torch 2.1 lacks, and calls ``torch.device(0)``, which torch 2.5 refuses without a GPU.
#: ``--no-cache-dir`` because a wheel of torch-sparse in pip's cache may have been built for another torch.
GLT = PeerEnv(
    "glt",
    "graphlearn-torch 0.2.4",
    (
        ("torch==2.4.1", "graphlearn-torch==0.2.4", "numpy<2.3", "torch-geometric", "setuptools<81", "wheel", "ninja"),
        ("--no-cache-dir", "--no-build-isolation", "--no-binary", "torch-scatter,torch-sparse", "torch-scatter==2.1.2",
         "torch-sparse==0.6.18"),
    ),
    "import graphlearn_torch",
)  # fmt: skip

#: The wheel has libraries for torch 2.0.0 to 2.2.1, and imports parts of ``torchdata.datapipes`` that 0.8 removed.
DGL = PeerEnv(
    "dgl",
    "DGL 2.1.0",
    (
        ("torch==2.2.1", "torchdata==0.7.1", "dgl==2.1.0", "numpy<2", "setuptools<81", "pandas", "pydantic", "pyyaml",
         "pyarrow"),
    ),
    "import dgl, dgl.graphbolt, dgl.distributed",
)  # fmt: skip

PEERS = {env.name: env for env in (DGL, GLT)}


def peer_python(env: PeerEnv) -> Path | None:
    """Return the Python of an environment. The first call makes it; if that fails, prints why and returns None.

    Takes up to 20 minutes and 5 GB. After a failure, later calls fail at once until ``<folder>.failed`` is deleted.
    """
    ROOT.mkdir(parents=True, exist_ok=True)
    with env.folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _found_or_made(env)


def _found_or_made(env: PeerEnv) -> Path | None:
    python, ready, failed = env.folder / "bin/python", env.folder / "ready", env.folder.with_suffix(".failed")
    if ready.exists():
        return python
    if failed.exists():
        return _without(env, f"an earlier attempt failed; remove {failed} to try again")
    interpreter = shutil.which("python3.11")
    if interpreter is None:
        return _without(env, "its wheel needs Python 3.11, which is not installed")
    try:
        _make(env, interpreter)
    except (OSError, subprocess.SubprocessError) as error:
        failed.write_text(f"{error}\n{getattr(error, 'stderr', None) or ''}")
        return _without(env, f"it cannot be installed: {failed}")
    ready.touch()
    return python


def _make(env: PeerEnv, interpreter: str) -> None:
    python = env.folder / "bin/python"
    print(f"peers: making {env.folder} for {env.title}", flush=True)
    _call([interpreter, "-m", "venv", "--clear", env.folder])
    for step in env.steps:
        print(f"peers: pip install {' '.join(step)}", flush=True)
        _call([python, "-m", "pip", "install", "--quiet", *step])
    _call([python, "-c", env.proof])


def _without(env: PeerEnv, why: str) -> None:
    print(f"peers: without {env.title}: {why}", flush=True)


def _call(argv: list[str | Path]) -> None:
    environment = {"MAX_JOBS": str(os.cpu_count() or 1), **os.environ, "FORCE_ONLY_CPU": "1"}
    subprocess.run(argv, check=True, timeout=4 * 3600, env=environment, capture_output=True, text=True)


if __name__ == "__main__":
    for name in sys.argv[1:] or PEERS:
        print(peer_python(PEERS[name]))
