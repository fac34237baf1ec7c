"""The environment of graphlearn-torch 0.2.4: its wheel needs torch 2.4 with CUDA libraries (none is used), torch-sparse
built from source for that torch, and Python 3.11."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

FOLDER = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gnnfleet-bench/glt"

#: One pip call each. Torch 2.1 lacks symbols of the wheel, 2.5 refuses its ``torch.device(0)`` where no GPU is.
#: Wheels of torch-sparse that pip has kept may be of another torch, hence no cache.
STEPS = (
    ("torch==2.4.1", "graphlearn-torch==0.2.4", "numpy<2.3", "torch-geometric", "setuptools<81", "wheel", "ninja"),
    ("--no-cache-dir", "--no-build-isolation", "--no-binary", "torch-scatter,torch-sparse", "torch-scatter==2.1.2",
     "torch-sparse==0.6.18"),
)  # fmt: skip


def glt_python() -> Path | None:
    """A Python that has graphlearn-torch, made once (5 GB, up to 20 minutes on 2 cores); None where that fails."""
    python, ready = FOLDER / "bin/python", FOLDER / "ready"
    if ready.exists():
        return python
    interpreter = shutil.which("python3.11")
    if interpreter is None:
        print("serving: without graphlearn-torch, whose newest wheel is for Python 3.11, which is not here")
        return None
    print(f"serving: making {FOLDER}: torch 2.4.1, graphlearn-torch 0.2.4, torch-sparse from source", flush=True)
    try:
        _call([interpreter, "-m", "venv", "--clear", FOLDER])
        for step in STEPS:
            print(f"serving: pip install {' '.join(step)}", flush=True)
            _call([python, "-m", "pip", "install", "--quiet", *step])
        _call([python, "-c", "import graphlearn_torch"])
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or "")[-2000:]
        print(f"serving: without graphlearn-torch, which cannot be installed: {error}\n{said}")
        return None
    ready.touch()
    return python


def _call(argv: list[str | Path]) -> None:
    environment = {**os.environ, "FORCE_ONLY_CPU": "1", "MAX_JOBS": str(os.cpu_count() or 1)}
    subprocess.run(argv, check=True, timeout=3600, env=environment, capture_output=True, text=True)
