"""Test kit for tests of sync, of following a run and of reports: small plans and folders of parts."""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import replace
from pathlib import Path

from launcher.command import Command, Secret
from launcher.errors import node_label
from launcher.plan.model import LaunchPlan, Login, NodePlan, PlannedFile, copied, generated, target_text


def make_parts(folder: Path, num_parts: int = 2, size: int = 50_000) -> Path:
    """Create parts with files of about ``size`` bytes, and a manifest with their digests."""
    files = []
    for name in [
        "shared/nodes/node/seeds/train.npy",
        *(f"part{p}/nodes/node/attrs/{x}.npy" for p in range(num_parts) for x in "xy"),
    ]:
        data = hashlib.sha256(name.encode()).digest() * (size // 32)
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        files.append({"path": name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()})
    manifest = {"format": "gnnfleet-partition", "version": 3, "dataset": "toy", "fingerprint": "f00d"}
    (folder / "manifest.json").write_text(json.dumps({**manifest, "num_parts": num_parts, "files": files}))
    return folder


def part_files(folder: Path, node_rank: int, dest: str) -> list[PlannedFile]:
    """Return the files of ``make_parts`` for a node: one part, the shared files and the manifest."""
    tops = (f"part{node_rank}", "shared", "manifest.json")
    names = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
    return [copied(f"{dest}/{name}", folder / name) for name in names if name.split("/")[0] in tops]


def make_node(
    top: Path, node_rank: int, files: list[PlannedFile], data_dir: Path | None = None, login: Login | None = None
) -> NodePlan:
    work = top / f"node{node_rank}"
    run_dir = f"{work}/runs/r1/node{node_rank}"
    return NodePlan(
        label=node_label(node_rank, target_text(login)),
        node_rank=node_rank,
        login=login,
        ranks=(node_rank,),
        devices=(),
        parts=(node_rank,),
        address="127.0.0.1",
        workdir=str(work),
        code_dir=f"{work}/code/abc",
        data_dir=str(data_dir or work / "data"),
        run_dir=run_dir,
        master_port=1,
        service_port=2,
        session=f"gnnfleet-r1-node{node_rank}",
        start=Command((sys.executable, "supervisor.py")),
        server=None,
        trainer=Command(("true",)),
        files=tuple(files),
    )


def make_launch(nodes: list[NodePlan]) -> LaunchPlan:
    return LaunchPlan(
        run_id="r1",
        name="toy",
        world_size=len(nodes),
        num_parts=len(nodes),
        master_addr="127.0.0.1",
        master_port=1,
        nodes=tuple(nodes),
        partition=None,
        runs_dir="runs",
        code_digest="abc",
        final=True,
    )


def sync_plan(top: Path, num_nodes: int = 2, size: int = 50_000) -> LaunchPlan:
    """Return a plan of local nodes below ``top``. Each gets code, one part, a generated file and a secret file."""
    parts = make_parts(top / "parts", num_nodes, size)
    code = top / "code.py"
    code.write_text("print('hello')\n")
    nodes = []
    for k in range(num_nodes):
        node = make_node(top, k, [])
        files = part_files(parts, k, node.data_dir)
        files.append(generated(f"{node.run_dir}/cluster.json", "{}"))
        files.append(generated(f"{node.run_dir}/service.key", Secret("hush"), mode=0o600, secret=True))
        nodes.append(make_node(top, k, files))
    return replace(make_launch(nodes), code=(copied("trainer/code.py", code),))
