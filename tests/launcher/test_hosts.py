"""Tests of ``gnnfleet hosts`` and ``check --speed`` on this machine."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from launcher.cli.main import run
from launcher.command import Command
from launcher.errors import UnreachableError
from launcher.manage.status import _gpu_faults as gpu_faults_of
from launcher.node import leases
from launcher.preflight import check_health
from launcher.transport.local import LocalTransport

SMI = """#!/bin/sh
case "$1" in
  *event_reasons*) echo "GPU-a, 00000000:3B:00.0, 60, 8, 16, 0x1"; echo "GPU-b, 00000000:5E:00.0, 50, 16, 16, 0x1";;
  *mig.mode*) for gpu in "0, GPU-a" "1, GPU-b"; do
    echo "$gpu, NVIDIA H200, 143771, 0, Default, Disabled, 0, 570.86"
  done;;
esac
"""


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a cluster file of two nodes on this machine, which has two GPUs. A run uses one of them."""
    monkeypatch.setenv("GNNFLEET_LEASES", str(tmp_path / "leases"))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/nvidia-smi").write_text(SMI)
    (tmp_path / "bin/nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    file = tmp_path / "cluster.yml"
    file.write_text(
        f"transport: local\nnodes: 2\ndefaults: {{workdir: '{tmp_path}/work{{node_rank}}'}}\n"
        "data: {dataset: synthetic}\n"
    )
    leases.take(["cuda:1", "port:29500"], leases.this_process("busy", 0))
    yield file
    leases.release("busy", 0)


def test_a_line_for_each_host(pool: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert run(["hosts", "--config", str(pool)]) == 0
    titles, *lines = capfd.readouterr().out.splitlines()
    assert titles.split() == "host nodes processors free memory GPUs free disk in use by".split()
    assert lines[0].startswith("localhost") and "0–1" in lines[0] and "2 × H200, 1 free" in lines[0]
    assert "run busy of " in lines[0] and lines[0].rstrip().endswith(", CUDA 1")
    (fault,) = [line for line in lines[1:] if "PCIe" in line]
    assert fault.startswith("localhost: CUDA device 0 uses 8 of 16 PCIe lanes – ")


@pytest.mark.slow
def test_figures_of_hosts_as_json(pool: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["hosts", "--config", str(pool), "--speed", "--json"]) == 0
    (host,) = json.loads(capfd.readouterr().out)["hosts"]
    assert host["nodes"] == [0, 1] and host["error"] == "" and host["processors"] >= 1
    assert 0 < host["free_memory"] <= host["memory"] and 0 < host["free_disk"] <= host["disk"]
    assert [(gpu["uuid"], gpu["free"], gpu["temperature"]) for gpu in host["gpus"]] == [
        ("GPU-a", True, 60),
        ("GPU-b", False, 50),
    ]
    assert [(one["run_id"], one["resources"]) for one in host["runs"]] == [("busy", ["cuda:1", "port:29500"])]
    assert min(host["speed"][name] for name in ("product", "copy", "disk")) > 0


def test_a_host_that_does_not_answer_is_a_line_with_the_reason(
    pool: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pool.write_text("nodes: [a, b]\ndata: {dataset: synthetic}\n")
    lost = UnreachableError("no answer", host="b", node_rank=1, remedy="switch it on")
    monkeypatch.setattr("launcher.manage.hosts.connect_all", lambda config: {0: LocalTransport(0), 1: lost})
    assert run(["hosts", "--config", str(pool)]) == 1
    out = capfd.readouterr().out
    assert "not reached" in out and "b: no answer – switch it on" in " ".join(out.split())
    assert run(["hosts"]) == 2


def test_check_measures_the_speed_of_each_host_once(
    pool: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    asked: list[int] = []
    figures = {"product": 1e11, "copy": 1e10, "disk": 1e9, "seconds": 0.1, "by": "torch"}

    def measured(agents: dict[int, object], folders: dict[int, str]) -> dict[int, dict[str, object]]:
        asked.extend(agents)
        return dict.fromkeys(agents, figures)

    monkeypatch.setattr(check_health, "measured", measured)
    words = ["check", "--config", str(pool), "--speed", "--set", "run.master_port=auto"]
    run(words)
    said = " ".join(capfd.readouterr().out.split())
    assert asked == [0] and said.count(" speed ") == 1 and "GFLOP/s, memory " in said and "while run busy of " in said


def test_status_names_faults_of_gpus_on_the_hosts_of_nodes_that_use_some(pool: Path) -> None:
    python = Command((sys.executable,))
    nodes = {k: SimpleNamespace(devices=(k,) * k, python=python, label=f"node{k}") for k in (0, 1)}
    opened = SimpleNamespace(nodes=nodes, transports={k: LocalTransport(k) for k in nodes})
    (fault,) = gpu_faults_of(opened)  # type: ignore[arg-type]
    assert fault.startswith("node1: CUDA device 0 uses 8 of 16 PCIe lanes; ")
