"""Tests of the plan's line about sampling on GPUs: where they read the edges from."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from launcher.config.schema import ClusterConfig, NodeConfig
from launcher.plan.model import LaunchPlan
from launcher.plan.partition import PartFile, PartitionFiles
from launcher.plan.render import print_placement, print_plan
from launcher.plan.serialize import read_run, run_json
from plan_kit import cluster, facts_of, plan_of

GB = 10**9
UUID = "GPU-5f1a77d0"


def parts_of(num_parts: int, edge_bytes: int) -> PartitionFiles:
    files = [PartFile(f"part{p}/edges/e/indices.npy", edge_bytes // num_parts, "d", (9,)) for p in range(num_parts)]
    return PartitionFiles("parts", "synthetic", "f1", num_parts, (*files, PartFile("manifest.json", 9, "d")))


def on_gpus(nodes: int, *devices: int | str, **train: Any) -> ClusterConfig:
    config = cluster(*(NodeConfig(f"h{k}", devices=devices) for k in range(nodes)))
    return replace(config, train=replace(config.train, **train))


def known(nodes: int, device: int, memory: int = 256 * GB, **more: Any) -> dict[int, Any]:
    return facts_of(nodes, device_memory=((UUID, device), ("GPU-0", device)), memory=memory, **more)


HALF = "edges (about 4.0 GB) are more than half of a GPU's 7.9 GB"
CASES: dict[str, tuple[ClusterConfig, dict[str, Any], str]] = {
    "on CPUs": (cluster(), {"manifest": parts_of(2, GB), "facts": known(2, 80 * GB)}, ""),
    "sampling: cpu": (on_gpus(1, 0, sampling="cpu"), {"manifest": parts_of(1, GB), "facts": known(1, 80 * GB)}, ""),
    "no parts yet": (
        on_gpus(2, 0),
        {},
        "on the GPUs if numba-cuda is installed; edges in device memory if they take at most half of it, else in "
        "page-locked memory of the host",
    ),
    "device memory": (
        on_gpus(1, 0, 1),
        {"manifest": parts_of(1, GB), "facts": known(1, 8 * GB)},
        "on the GPUs if numba-cuda is installed; edges (about 1.0 GB) in device memory, at most half of 8.0 GB",
    ),
    "numba-cuda is there": (
        on_gpus(1, 0),
        {"manifest": parts_of(1, GB), "facts": known(1, 8 * GB, versions={"numba_cuda": "0.30.4"})},
        "on the GPUs; edges (about 1.0 GB) in device memory, at most half of 8.0 GB",
    ),
    "numba-cuda is missing": (
        on_gpus(1, 0),
        {"manifest": parts_of(1, GB), "facts": known(1, 8 * GB, versions={"numba_cuda": ""})},
        "on the CPUs: numba-cuda is not installed",
    ),
    "given by UUID": (
        on_gpus(1, UUID[:9]),
        {"manifest": parts_of(1, GB), "facts": known(1, 8 * GB)},
        "on the GPUs if numba-cuda is installed; edges (about 1.0 GB) in device memory, at most half of 8.0 GB",
    ),
    "host memory": (
        on_gpus(1, 0, 1),
        {"manifest": parts_of(1, 4 * GB), "facts": known(1, 79 * GB // 10)},
        "on the GPUs if numba-cuda is installed; edges (about 4.0 GB) in page-locked memory of the host, as they are "
        "more than half of a GPU's 7.9 GB",
    ),
    "neither": (
        on_gpus(1, 0, 1),
        {"manifest": parts_of(1, 4 * GB), "facts": known(1, 79 * GB // 10, 6 * GB)},
        f"on the CPUs: {HALF}, and more than the 3.0 GB of page-locked memory that may be used",
    ),
    "neither, sampling: cuda": (
        on_gpus(1, 0, 1, sampling="cuda"),
        {"manifest": parts_of(1, 4 * GB), "facts": known(1, 79 * GB // 10, 6 * GB)},
        f"train.sampling: cuda is not possible: {HALF}, and more than the 3.0 GB of page-locked memory that may "
        "be used",
    ),
    "edges of own parts only": (
        on_gpus(2, 0),
        {"manifest": parts_of(2, 8 * GB), "facts": known(2, 80 * GB)},
        "on the CPUs: GPUs need the edges of all parts on their node",
    ),
    "different nodes": (
        on_gpus(3, 0),
        {"manifest": parts_of(3, 3 * GB), "facts": {**known(3, 80 * GB), 1: known(2, GB)[1]}},
        "node0, node2 on the GPUs if numba-cuda is installed; edges (about 3.0 GB) in device memory, at most half of "
        "80.0 GB; node1 on the GPUs if numba-cuda is installed; edges (about 3.0 GB) in page-locked memory of the "
        "host, as they are more than half of a GPU's 1.0 GB",
    ),
}


def rows_of(plan: LaunchPlan, show: Any) -> list[str]:
    console = Console(file=io.StringIO(), width=300)
    show(plan, console)
    assert isinstance(console.file, io.StringIO)
    return [line.split(None, 1)[1] for line in console.file.getvalue().splitlines() if line.startswith("  sampling ")]


@pytest.mark.parametrize("name", CASES)
def test_the_plan_says_where_gpus_read_the_edges(name: str) -> None:
    config, more, text = CASES[name]
    plan = plan_of(config, **more)
    assert plan.sampling == text
    assert rows_of(plan, print_plan) == rows_of(plan, print_placement) == ([text] if text else [])
    assert read_run(run_json(plan)).sampling == text


def test_a_script_has_no_such_line() -> None:
    config = on_gpus(1, 0)
    assert plan_of(config, manifest=parts_of(1, GB), facts=known(1, 80 * GB), own_command=("true",)).sampling == ""


def test_sizes_of_mig_instances_are_unknown() -> None:
    (fact,) = known(1, GB).values()
    assert [fact.device_bytes(each) for each in (1, 2, "MIG-7", UUID)] == [GB, 0, 0, GB]
