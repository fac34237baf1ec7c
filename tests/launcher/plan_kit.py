"""Test kit for plans: configs, facts about nodes, and folders of parts."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from launcher.command import Secret
from launcher.config.resolve import resolve_run, resolve_serving
from launcher.config.roles import GraphServer, ServingCluster
from launcher.config.schema import ClusterConfig, DataConfig, NodeConfig
from launcher.plan.build import make_plan
from launcher.plan.model import LaunchPlan, NodeFacts
from launcher.plan.partition import PartitionFiles, read_partition_files

TOKEN = Secret("5ecret5ecret")
PRODUCTS = ServingCluster(
    "products",
    4,
    (
        GraphServer(0, "g1", "tcp://10.1.0.1:29600", (0, 1, 2)),
        GraphServer(1, "g2", "tcp://10.1.0.2:29601", (2, 3)),
    ),
    encrypted=True,
)


def facts_of(count: int, **changes: Any) -> dict[int, NodeFacts]:
    return {k: dataclasses.replace(_fact(k), **changes) for k in range(count)}


def _fact(k: int) -> NodeFacts:
    return NodeFacts(
        node_rank=k,
        hostname=f"h{k}",
        home=f"/home/user{k}",
        address=f"10.0.0.{k + 1}",
        interface="eth0",
        python=f"/home/user{k}/venv/bin/python",
        versions={"python": "3.11.2"},
        tmux="3.3a",
        devices=(),
        disk_free=10**11,
        memory=10**10,
        cpus=16,
        clock_offset=0.0,
        free_ports=(29501, 29502, 29600 + k, 29602 + k),
    )


def cluster(*nodes: NodeConfig, **more: Any) -> ClusterConfig:
    more.setdefault("data", DataConfig(dataset="synthetic"))
    return ClusterConfig(nodes=nodes or (NodeConfig("a"), NodeConfig("b")), **more)


def plan_of(config: ClusterConfig, *, serve_only: bool = False, **more: Any) -> LaunchPlan:
    resolved = resolve_serving(config) if serve_only else resolve_run(config)
    return make_plan(resolved, **{"run_id": "r1", "code_digest": "c0de" * 16, "token": TOKEN, **more})


def parts_folder(folder: Path, num_parts: int) -> PartitionFiles:
    shapes = {"shared/nodes/node/seeds/train.npy": [4]}
    for p in range(num_parts):
        shapes |= {f"part{p}/edges/node__to__node/indptr.npy": [5], f"part{p}/nodes/node/attrs/x.npy": [4, 2]}
    files = []
    for name, shape in shapes.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
        digest = hashlib.sha256(name.encode()).hexdigest()
        files.append({"path": name, "bytes": len(name), "sha256": digest, "dtype": "float32", "shape": shape})
    manifest = {"format": "gnnfleet-partition", "version": 3, "dataset": "synthetic", "fingerprint": "f1"}
    (folder / "manifest.json").write_text(json.dumps({**manifest, "num_parts": num_parts, "files": files}))
    found = read_partition_files(folder)
    assert found is not None
    return found
