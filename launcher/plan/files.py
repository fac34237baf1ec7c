"""Lists the files that a node gets: gnnfleet's code, parts, the user's files, and files generated for the run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from launcher.command import Command, Secret, render
from launcher.config.cache_size import parse_bytes
from launcher.errors import node_label
from launcher.files import CODE_ROOT, file_sha256
from launcher.plan.commands import NodeCommands, PlanContext
from launcher.plan.model import PlannedFile, copied, generated, target_text
from launcher.plan.partition import PartFile, PartitionFiles
from launcher.plan.placement import Site, endpoint, node_login

FETCH_SPEC = "fetch.json"  #: file of a run folder: what ``launcher/node/store/fetch_parts.py`` fetches


def code_files() -> list[Path]:
    """Return the code that every node gets, as sorted absolute paths: ``launcher/node``, ``trainer``, ``gnnfleet``."""
    own = [CODE_ROOT / "launcher" / "__init__.py", *(CODE_ROOT / "launcher" / "node").rglob("*.py")]
    packages = (path for package in ("gnnfleet", "trainer") for path in (CODE_ROOT / package).rglob("*"))
    return sorted([*own, *(path for path in packages if _is_code(path))])


def code_digest() -> str:
    """Return the SHA-256 over relative path and content of each file in :func:`code_files`."""
    digest = hashlib.sha256()
    for path in code_files():
        digest.update(f"{relative(path)}\0{file_sha256(path)}\n".encode())
    return digest.hexdigest()


def relative(path: Path) -> str:
    """Return the path of a code file relative to gnnfleet's code folder; this path is the same on all machines."""
    return path.relative_to(CODE_ROOT).as_posix()


def _is_code(path: Path) -> bool:
    hidden = any(part == "__pycache__" or part.startswith(".") for part in path.parts[len(CODE_ROOT.parts) :])
    return path.is_file() and not hidden


@dataclass(frozen=True)
class SharedFiles:
    """Files and text of a run that are the same for all nodes, created once."""

    code: tuple[PlannedFile, ...]  #: dest relative to the code folder
    cluster: PlannedFile  #: cluster.json; dest relative to the run folder
    common: (
        str  #: members of the JSON object in every node.json: labels, roles, parts and (restarts) sites of all nodes
    )


def shared_files(context: PlanContext) -> SharedFiles:
    """Return the files that are equal on all nodes of a run: code, cluster.json and the common part of node.json."""
    code = tuple(copied(relative(path), path) for path in code_files())
    targets = (target_text(node_login(context.config, site.node)) for site in context.sites)
    labels = tuple(node_label(site.node_rank, target) for site, target in zip(context.sites, targets, strict=True))
    roles, parts = [site.node.role for site in context.sites], [site.parts for site in context.sites]
    common = json.dumps({"labels": labels, "roles": roles, "parts": parts, **_restart_sites(context)})[1:]
    return SharedFiles(code, generated("cluster.json", json.dumps(_cluster(context), indent=1)), common)


def node_files(
    context: PlanContext, site: Site, commands: NodeCommands, shared: SharedFiles, manifest: PartitionFiles | None
) -> tuple[PlannedFile, ...]:
    """Return the files that a node needs before its processes start, except gnnfleet's code.

    ``manifest``: files of the parts to send; None if no parts are sent, or they do not exist yet.
    """
    files: list[PlannedFile] = []
    if manifest and site.parts:
        parts = manifest.of_parts(site.parts, replicated=context.topology.replicated)
        files += _part_files(context, site, manifest.folder, parts)
    if context.own and site.ranks:
        files += [_below(f"{site.run_dir}/files", file) for file in context.own.files]
    if context.resume and site.ranks:
        files.append(_below(site.run_dir, context.resume))
    return (*files, *_generated(context, site, commands, shared))


def _below(folder: str, file: PlannedFile) -> PlannedFile:
    dest = f"{folder}/{file.dest}"  # the call below is three times as fast as dataclasses.replace
    return PlannedFile(dest, file.bytes, file.source, file.content, file.sha256, file.mode, file.secret, file.url)


def _part_files(context: PlanContext, site: Site, folder: str, files: tuple[PartFile, ...]) -> list[PlannedFile]:
    """Return the files of a node's parts, which are sent from ``folder``.

    With ``data.store``, the node fetches the files instead; the result then includes ``fetch.json``, which lists them.
    """
    url = context.config.data.store
    if url is None:
        return [
            PlannedFile(f"{site.data_dir}/{file.path}", file.bytes, f"{folder}/{file.path}", "", file.sha256)
            for file in files
        ]
    url = url.rstrip("/")
    fetched = [
        PlannedFile(f"{site.data_dir}/{file.path}", file.bytes, sha256=file.sha256, url=f"{url}/{file.path}")
        for file in files
    ]
    spec = json.dumps(_fetch_spec(context, site, url, files))
    return [*fetched, generated(f"{site.run_dir}/{FETCH_SPEC}", spec, mode=0o600)]


def _fetch_spec(context: PlanContext, site: Site, url: str, files: tuple[PartFile, ...]) -> Mapping[str, Any]:
    data = context.config.data
    return {
        "url": url,
        "options": data.store_options,
        "folder": site.data_dir,
        "files": [[file.path, file.bytes, file.sha256] for file in files],
        "run_dir": site.run_dir,
        "limit": None if data.store_limit is None else parse_bytes(data.store_limit),
    }


def _generated(context: PlanContext, site: Site, commands: NodeCommands, shared: SharedFiles) -> list[PlannedFile]:
    start = f"#!/usr/bin/env bash\n{render(commands.start)}\n"
    spec = Secret(f"{json.dumps(_node_spec(context, site, commands))[:-1]}, {shared.common}")
    files = [
        _below(site.run_dir, shared.cluster),
        generated(f"{site.run_dir}/start.sh", start, mode=0o700),  # contains the user's env
        generated(f"{site.run_dir}/node.json", spec, mode=0o600, secret=True),
        PlannedFile(f"{site.run_dir}/run.json", 0, mode=0o600),  # created at launch by launcher.plan.serialize
    ]
    if context.encrypted:
        files.append(PlannedFile(f"{site.run_dir}/service.key", 0, mode=0o600, secret=True))
    return files


def _cluster(context: PlanContext) -> Mapping[str, Any]:
    nodes = [
        {
            "node_rank": site.node_rank,
            "host": site.node.host,
            "role": site.node.role,
            "endpoint": endpoint(site.address, site.service_port) if site.serves else None,
            "parts": site.parts,
            "ranks": site.ranks,
        }
        for site in context.sites
    ]
    head = {"run_id": context.run_id, "num_parts": context.num_parts, "version": context.version}
    cluster = context.serving
    serving = {"name": cluster.name, "servers": [asdict(server) for server in cluster.servers]} if cluster else None
    return {**head, "nodes": nodes, "serving": serving}


def _node_spec(context: PlanContext, site: Site, commands: NodeCommands) -> Mapping[str, Any]:
    run = context.config.run
    return {
        "run_id": context.run_id,
        "token": context.token.reveal(),
        "node_rank": site.node_rank,
        "num_nodes": len(context.sites),
        "run_dir": site.run_dir,
        "ranks": site.ranks,
        "server": _process(commands.server) if commands.server else None,
        "trainer": _process(commands.trainer) if commands.trainer else None,
        "ready_file": f"{site.run_dir}/server.ready",
        "start_timeout": run.start_timeout,
        "grace": run.grace,
        "control": _control(context),
        "peer_timeout": run.peer_timeout,
        "leases": _leases(context, site),
        "operator": context.operator,
        "on_stall": run.on_stall,
        "stall_after": run.stall_after,
        "on_nan": run.on_nan,
        "role": site.node.role,
        "server_restarts": run.server_restarts,
        **_restarts(context, site),
    }


def _restarts(context: PlanContext, site: Site) -> Mapping[str, Any]:
    config = context.config
    if not config.run.restarts or config.serve_only:
        return {}
    folder = "" if config.data.mode == "sync" else site.data_dir  # may also have parts of other nodes
    more = {"lost_after": config.run.lost_after, "data_dir": folder}
    return {"restarts": config.run.restarts, "min_nodes": config.run.min_nodes, **more}


def _restart_sites(context: PlanContext) -> Mapping[str, Any]:
    # Needed if a restart changes the lead node.
    if not context.config.run.restarts or context.config.serve_only:
        return {}
    sites = [
        {
            "address": site.address,
            "bind": site.bind,
            "control_port": site.control_port,
            "master_port": site.master_port,
            "nproc": len(site.ranks),
        }
        for site in context.sites
    ]
    return {"sites": sites}


def _control(context: PlanContext) -> Mapping[str, Any] | None:
    # The other supervisors connect here. None without control port.
    if context.control_port is None:
        return None
    site = context.sites[context.lead]
    return {"node_rank": context.lead, "address": site.address, "bind": site.bind, "port": context.control_port}


def _leases(context: PlanContext, site: Site) -> list[str]:
    devices = sorted({str(device).replace("/", "_") for device in site.node.devices})
    leads = site.node_rank == context.lead and site.ranks
    ports = [context.master_port, *([context.control_port] if context.control_port else [])] if leads else []
    ports += [port for port in (site.master_port, site.control_port) if port and not leads]  # for restarts
    ports += [site.service_port] if site.serves else []
    taken = [*(f"cuda:{device}" for device in devices), *(f"port:{port}" for port in ports)]
    return taken or [f"cpu:{context.run_id}-node{site.node_rank}"]  # nobody else's: shows that a run uses this host


def _process(command: Command) -> Mapping[str, Any]:
    env = {name: value.reveal() if isinstance(value, Secret) else value for name, value in command.env.items()}
    return {"argv": command.argv, "env": env, "cwd": command.cwd}
