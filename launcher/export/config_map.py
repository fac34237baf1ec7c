"""The ConfigMap of an exported Kubernetes run, which ``launcher/node/pods/exported_run.py`` reads in the pods."""

from __future__ import annotations

import base64
import json
import posixpath
from pathlib import Path
from typing import Any

from launcher import __version__
from launcher.command import Secret
from launcher.config.cache_size import parse_bytes
from launcher.errors import UsageError
from launcher.export.placed_plan import ExportRequest
from launcher.export.pods import WAIT, Manifest, metadata_of
from launcher.node.pods import exported_run
from launcher.plan.model import LaunchPlan, NodePlan
from launcher.plan.serialize import run_json

_MOST_CONFIG = 1 << 20  # bytes of a ConfigMap


def config_map(plan: LaunchPlan, request: ExportRequest, code_dir: str) -> Manifest:
    """Return the ConfigMap. ``code_dir``: folder of gnnfleet's code in ``plan``, for which the pods have their own.

    Raises UsageError if it is too large.
    """
    indent = 1 if len(plan.nodes) <= 16 else None
    data: dict[str, str] = {}
    binary: dict[str, str] = {}
    files: list[Manifest] = []
    for node in plan.nodes:
        contents = {posixpath.basename(file.dest): file for file in node.files if not file.source}
        text = contents["node.json"].content
        spec = json.loads(text.reveal() if isinstance(text, Secret) else text)  # the plan's token is a placeholder
        config = request.config.nodes[node.node_rank]
        if spec["trainer"] and "OMP_NUM_THREADS" not in config.env and config.cpus is None:
            del spec["trainer"]["env"]["OMP_NUM_THREADS"]
        content = {"env": dict(node.start.env), "fetch": _fetch_spec(node, plan, request), "spec": spec}
        data[f"node{node.node_rank}.json"] = json.dumps(content, indent=indent)
        data["cluster.json"] = contents["cluster.json"].content
        if node.ranks and not files:
            own = [file for file in node.files if file.source and file.dest.startswith(f"{node.run_dir}/files/")]
            files = [_own_file(k, file, node, data, binary) for k, file in enumerate(own)]
    values = {
        "format": exported_run.FORMAT,
        "version": exported_run.VERSION,
        "gnnfleet": __version__,
        "lead": plan.lead,
        "wait": WAIT,
        "encrypted": plan.encrypted,
        "addresses": [node.address for node in plan.nodes],
        "run_dirs": [node.run_dir for node in plan.nodes],
        "data_dirs": [node.data_dir for node in plan.nodes],
        "files": files,
    }
    data = {"export.json": json.dumps(values, indent=indent), **data, "run.json": run_json(plan)}
    data = {key: text.replace(code_dir, exported_run.CODE) for key, text in data.items()}
    size = sum(map(len, (*data.values(), *binary.values())))
    if size > _MOST_CONFIG:
        raise UsageError(
            f"the files of this run take {size:,} bytes, but a ConfigMap of Kubernetes holds {_MOST_CONFIG:,}; put the "
            "files of run.files into the image, or use fewer nodes"
        )
    manifest = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata_of(plan.run_id), "data": data}
    return {**manifest, "binaryData": binary} if binary else manifest


def _fetch_spec(node: NodePlan, plan: LaunchPlan, request: ExportRequest) -> Manifest | None:
    """Return what ``launcher/node/pods/fetch_in_pod.py`` fetches; None for a node without parts of a store."""
    data, parts = request.config.data, request.parts
    if data.store is None or not node.parts:
        return None
    return {
        "url": data.store,
        "options": data.store_options,
        "folder": node.data_dir,
        "parts": node.parts,
        "replicated": plan.topology.replicated,
        "manifest": parts.files[-1].sha256 if parts else "",
        "limit": None if data.store_limit is None else parse_bytes(data.store_limit),
    }


def _own_file(k: int, file: Any, node: NodePlan, data: dict[str, str], binary: dict[str, str]) -> Manifest:
    """Add file ``k`` of the user's command to the ConfigMap; return its key there, its path below ``files/`` and mode.

    ``data`` and ``binary``: the ConfigMap's entries for UTF-8 files and for other files.
    """
    key, raw = f"file{k}", Path(file.source).read_bytes()
    try:
        data[key] = raw.decode()
    except UnicodeDecodeError:
        binary[key] = base64.b64encode(raw).decode()
    return {"key": key, "path": posixpath.relpath(file.dest, f"{node.run_dir}/files"), "mode": file.mode}
