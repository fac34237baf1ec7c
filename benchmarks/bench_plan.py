"""Measures the seconds from reading a config to the plan of every node, and compares them with a limit."""

from __future__ import annotations

import tempfile
from pathlib import Path

from launcher.config.host_filter import filtered
from launcher.config.loader import load_config
from launcher.config.resolve import resolve_run
from launcher.config.schema import ClusterConfig
from launcher.plan.build import make_plan
from launcher.plan.files import code_digest
from launcher.plan.model import NodeFacts
from launcher.plan.partition import PartFile, PartitionFiles
from table import Row, median_seconds

GOAL = 1.0  # seconds for 1,000 nodes


def run(small: bool) -> list[Row]:
    counts = (16, 64) if small else (64, 250, 1000)
    with tempfile.TemporaryDirectory() as folder:
        return [row for count in counts for row in stages(Path(folder), count)]


def stages(folder: Path, count: int) -> list[Row]:
    path = folder / "cluster.yml"
    path.write_text(
        "defaults: {venv: ~/venv, env: {A: b}, devices: [0, 1, 2, 3]}\n"
        f"nodes: n[0001-{count:04}].lab\n"
        f"train: {{batch_size: {count * 8}}}\ndata: {{dataset: synthetic}}\n"
    )
    parts, facts, digest = parts_of(count), {k: facts_of(k) for k in range(count)}, code_digest()

    def choose(config: ClusterConfig) -> ClusterConfig:
        return filtered(config, ["n*"], ["n*:3", "n0001:0,2"])

    def whole() -> None:
        config = resolve_run(load_config(path, choose=choose))
        plan = make_plan(config, run_id="bench", code_digest=digest, facts=facts, manifest=parts)
        assert plan.final and plan.world_size == count * 3 - 2

    config = load_config(path)
    return [
        Row(f"read config, {count} nodes", median_seconds(lambda: load_config(path), repeats=3), "s"),
        Row(f"filter it, {count} nodes", median_seconds(lambda: choose(config), repeats=3), "s"),
        Row(f"config to plan, {count} nodes", median_seconds(whole, repeats=3), "s", "goal", GOAL * count / 1000),
    ]


def parts_of(count: int) -> PartitionFiles:
    names = [f"part{part}/nodes/node/attrs/a{i}.npy" for part in range(count) for i in range(12)]
    files = [PartFile(name, 10**6, "0" * 64) for name in [*names, "shared/seeds.npy", "manifest.json"]]
    return PartitionFiles("parts", "synthetic", "f1", count, tuple(files))


def facts_of(k: int) -> NodeFacts:
    return NodeFacts(
        node_rank=k,
        hostname=f"n{k}",
        home="/home/alice",
        address=f"10.0.{k // 250}.{k % 250 + 1}",
        interface="eth0",
        python="/home/alice/venv/bin/python",
        versions={"python": "3.11.2"},
        tmux="3.3a",
        devices=("GPU",) * 4,
        disk_free=10**12,
        memory=10**11,
        cpus=16,
        clock_offset=0.0,
        free_ports=(29400, 29500, 29600 + k),
    )
