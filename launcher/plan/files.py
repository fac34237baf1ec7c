"""Lists the files that a node gets: gnnfleet's code, parts, the user's files, and files generated for the run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from launcher.command import Command, Secret, render
from launcher.files import CODE_ROOT, file_sha256
from launcher.node.spec import NodeSpec, RunNode
from launcher.plan.commands import PlanContext, tracker_command
from launcher.plan.model import NodePlan, PlannedFile, copied, generated
from launcher.plan.partition import PartitionFiles
from launcher.plan.placement import endpoint
from trainer.core.remote_settings import parse_bytes

FETCH_SPEC = "fetch.json"  #: file of a run folder: what ``launcher/node/store/fetch_parts.py`` fetches


def code_files() -> list[Path]:
    """Return the code that every node gets, as sorted absolute paths: ``launcher/node``, ``trainer``, ``gnnfleet``."""
    code = [CODE_ROOT / "launcher" / "__init__.py", *(CODE_ROOT / "launcher" / "node").rglob("*.py")]
    for package in ("gnnfleet", "trainer"):
        for path in (CODE_ROOT / package).rglob("*"):
            below = path.parts[len(CODE_ROOT.parts) :]
            if path.is_file() and not any(part == "__pycache__" or part.startswith(".") for part in below):
                code.append(path)
    return sorted(code)


def code_digest() -> str:
    """Return the SHA-256 over relative path and content of each file in :func:`code_files`."""
    digest = hashlib.sha256()
    for path in code_files():
        digest.update(f"{_relative(path)}\0{file_sha256(path)}\n".encode())
    return digest.hexdigest()


def _relative(path: Path) -> str:
    """Return the path of a code file relative to gnnfleet's code folder; this path is the same on all machines."""
    return path.relative_to(CODE_ROOT).as_posix()


@dataclass(frozen=True)
class _SharedFiles:
    """Files and text of a run that are the same for all nodes, created once."""

    code: tuple[PlannedFile, ...]  #: dest relative to the code folder
    cluster: PlannedFile  #: cluster.json; dest relative to the run folder
    nodes: str  #: member ``nodes`` of every node.json


def shared_files(context: PlanContext) -> _SharedFiles:
    """Return the files that are equal on all nodes of a run: code, cluster.json and the list of nodes in node.json."""
    code = tuple(copied(_relative(path), path) for path in code_files())
    known = [
        {
            field.name: value
            for field in fields(RunNode)
            if (value := getattr(node, field.name)) != field.default
            # only addresses of nodes that may lead are needed
            and (field.name not in ("address", "bind") or node.control_port or node.master_port)
        }
        for node in context.nodes
    ]
    nodes = [
        {
            "node_rank": node.node_rank,
            "host": config.host,
            "role": node.role,
            "endpoint": endpoint(node.address, node.service_port) if node.service_port else None,
            "parts": node.parts,
            "ranks": node.ranks,
        }
        for node, config in zip(context.nodes, context.config.nodes, strict=True)
    ]
    head = {"run_id": context.run_id, "num_parts": context.num_parts, "version": context.version}
    cluster = context.serving
    serving = {"name": cluster.name, "servers": [asdict(server) for server in cluster.servers]} if cluster else None
    described = {**head, "nodes": nodes, "serving": serving}
    return _SharedFiles(
        code,
        generated("cluster.json", json.dumps(described, indent=1)),
        json.dumps(known, separators=(",", ":")),
    )


def node_files(
    context: PlanContext, node: NodePlan, shared: _SharedFiles, manifest: PartitionFiles | None
) -> tuple[PlannedFile, ...]:
    """Return the files that a node needs before its processes start, except gnnfleet's code.

    ``manifest``: files of the parts to send; None if no parts are sent, or they do not exist yet.
    """
    data, files = context.config.data, list[PlannedFile]()
    if manifest and node.parts:
        parts = manifest.of_parts(node.parts, replicated=context.topology.replicated)
        if data.store is None:
            files += [
                PlannedFile(
                    f"{node.data_dir}/{file.path}", file.bytes, f"{manifest.folder}/{file.path}", "", file.sha256
                )
                for file in parts
            ]
        else:  # the node fetches them, as fetch.json says
            url = data.store.rstrip("/")
            files += [
                PlannedFile(f"{node.data_dir}/{file.path}", file.bytes, sha256=file.sha256, url=f"{url}/{file.path}")
                for file in parts
            ]
            wanted = json.dumps(
                {
                    "url": url,
                    "options": data.store_options,
                    "folder": node.data_dir,
                    "files": [[file.path, file.bytes, file.sha256] for file in parts],
                    "run_dir": node.run_dir,
                    "limit": None if data.store_limit is None else parse_bytes(data.store_limit),
                }
            )
            files.append(generated(f"{node.run_dir}/{FETCH_SPEC}", wanted, mode=0o600))
    if node.ranks and (own := context.own or context.model):
        files += [_below(f"{node.run_dir}/files", file) for file in own.files]
    files += [_below(node.run_dir, file) for file in (context.resume, context.start) if file and node.ranks]
    if node.node_rank == context.lead or (node.ranks and context.config.run.restarts):
        files += [_below(node.run_dir, file) for file in context.tracked]

    # Files generated for the run.
    start = f"#!/usr/bin/env bash\n{render(replace(node.start, argv=(*node.wrap, *node.start.argv)))}\n"
    spec = json.dumps({name: value for name, value in vars(_node_spec(context, node)).items() if name != "nodes"})
    spec = f'{spec[:-1]}, "nodes": {shared.nodes}}}'
    files += [
        _below(node.run_dir, shared.cluster),
        generated(f"{node.run_dir}/start.sh", start, mode=0o700),  # contains the user's env
        generated(f"{node.run_dir}/node.json", Secret(spec), mode=0o600, secret=True),
        PlannedFile(f"{node.run_dir}/run.json", 0, mode=0o600),  # created at launch by launcher.plan.serialize
    ]
    if context.encrypted:
        files.append(PlannedFile(f"{node.run_dir}/service.key", 0, mode=0o600, secret=True))
    return tuple(files)


def _below(folder: str, file: PlannedFile) -> PlannedFile:
    dest = f"{folder}/{file.dest}"  # the call below is three times as fast as dataclasses.replace
    return PlannedFile(dest, file.bytes, file.source, file.content, file.sha256, file.mode, file.secret, file.url)


def _node_spec(context: PlanContext, node: NodePlan) -> NodeSpec:
    """Return the content of the node's node.json, without the list of nodes."""
    run, config = context.config.run, context.config
    restarts = run.restarts if context.world.size else 0
    tracker, command = None, tracker_command(context, node)
    if command:
        from launcher.plan.tracking import tracking_job

        tracker = {**_process(command), "job": tracking_job(context)}
    devices = sorted({str(device).replace("/", "_") for device in node.devices})
    ports = (node.master_port, node.control_port, node.service_port)
    taken = [*(f"cuda:{device}" for device in devices), *(f"port:{port}" for port in ports if port)]
    if not devices and (context.world.size or not taken):  # not of lasting graph servers, for which nobody can wait
        taken.append(f"cpu:{context.run_id}-node{node.node_rank}")
    return NodeSpec(
        run_id=context.run_id,
        token=context.token.reveal(),
        node_rank=node.node_rank,
        run_dir=node.run_dir,
        nodes=(),
        server=_process(node.server) if node.server else None,
        trainer=_process(node.trainer) if node.trainer else None,
        start_timeout=run.start_timeout,
        grace=run.grace,
        hub=context.lead,
        master_addr=context.fixed_master_addr,
        peer_timeout=run.peer_timeout,
        leases=tuple(taken),
        operator=context.operator,
        on_stall=run.on_stall,
        stall_after=run.stall_after,
        on_nan=run.on_nan,
        server_restarts=run.server_restarts,
        restarts=restarts,
        min_nodes=run.min_nodes,
        lost_after=run.lost_after,
        notify=run.notify if context.world.size else (),
        notify_on=run.notify_on,
        prometheus=run.prometheus or "",
        data_dir=node.data_dir if restarts and config.data.mode == "verify" else "",
        tracker=tracker,
        queued_at=context.queued_at,
        wait_limit=context.wait_limit,
        epochs=config.train.epochs if context.own is None and context.world.size else 0,
    )


def _process(command: Command) -> Mapping[str, Any]:
    env = {name: value.reveal() if isinstance(value, Secret) else value for name, value in command.env.items()}
    return {"argv": command.argv, "env": env, "cwd": command.cwd}
