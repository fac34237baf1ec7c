"""Measures the seconds from `launch` to the first training step, by phase, on nodes that have code and parts.

Uses two local nodes, and two sshd hosts in network namespaces if the machine allows them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from netns import DISK, NetCluster, unavailable
from table import Row

LAUNCH = Path(__file__).resolve().parents[1] / "launch.py"
GRAPH = {"num_nodes": 20_000, "avg_degree": 10, "num_classes": 5, "num_features": 16}
TRAIN = {"hidden": 32, "fanouts": [5, 5], "batch_size": 512, "epochs": 1, "seed": 3}
LIMIT = 600.0  # seconds of a launch

#: The end of each phase, as kind and name of an event or metrics line; the last node or rank counts.
ENDS = (
    ("connect", "stage", "preflight"), ("preflight", "stage", "partition"), ("partition", "stage", "sync"),
    ("sync", "stage", "start"), ("supervisors up", "supervisor-start", ""), ("server ready", "server-ready", ""),
    ("ranks started", "process-start", "rank"), ("ranks met, graph open", "start", ""), ("first step", "step", ""),
)  # fmt: skip


def run(small: bool) -> list[Row]:
    torch = importing_torch()
    with tempfile.TemporaryDirectory() as folder:
        local = [{"host": "localhost", "workdir": f"{folder}/node{k}", "python": sys.executable} for k in range(2)]
        rows = phases("local", Path(folder), local, {"transport": "local"}, os.environ, torch)
    if small or unavailable():
        return rows
    with NetCluster(2) as cluster, tempfile.TemporaryDirectory() as folder:
        common = {"user": "root", "workdir": DISK, "python": sys.executable}
        nodes = [{"host": host.address, **common} for host in cluster.hosts]
        return rows + phases("ssh", Path(folder), nodes, {}, cluster.environment(), torch)


def importing_torch() -> float:
    # the smaller of two measurements
    found = []
    for _ in range(2):
        begun = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import torch"], check=True, timeout=LIMIT)
        found.append(time.perf_counter() - begun)
    return min(found)


def phases(
    name: str, folder: Path, nodes: list[dict[str, Any]], more: Mapping[str, Any], env: Mapping[str, str], torch: float
) -> list[Row]:
    """Launch twice. Return the seconds of each phase of the second launch, and of all phases together.

    nodes, more: ``nodes`` and further sections of cluster.yml. torch: seconds of `import torch`, for comparison.
    """
    config = folder / "cluster.yml"
    data = {"dataset": "synthetic", "options": GRAPH, "folder": "parts"}
    config.write_text(yaml.safe_dump({"nodes": nodes, "data": data, "train": TRAIN, **more}))
    for _ in range(2):
        begun = time.time()
        command = [sys.executable, str(LAUNCH), "--config", str(config)]
        subprocess.run(
            command, cwd=folder, env=dict(env), check=True, timeout=LIMIT, stdin=subprocess.DEVNULL, capture_output=True
        )
    newest = max((folder / "runs").iterdir(), key=lambda path: path.stat().st_mtime)
    rows, last = [], begun
    for phase, end in phase_ends(newest):
        rows.append(Row(f"{name}: {phase}", max(end - last, 0.0), "s"))
        last = max(end, last)
    return [*rows, Row(f"{name}: launch to first step", last - begun, "s", "import torch", torch, "equal")]


def phase_ends(run_dir: Path) -> list[tuple[str, float]]:
    """Return the phases of ``ENDS`` with the Unix time at which each ended."""
    lines = [json.loads(line) for name in ("events.jsonl", "metrics.jsonl") for line in (run_dir / name).open()]
    return [(phase, max(line["t"] for line in lines if marks_end(line, kind, name))) for phase, kind, name in ENDS]


def marks_end(line: Mapping[str, Any], kind: str, name: str) -> bool:
    called = str(line.get("stage") or line.get("name") or "")
    return line["kind"] == kind and called.startswith(name) and not line.get("step")
