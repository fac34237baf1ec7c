"""What the pods of an exported Kubernetes run are made from: their Jobs, and the ConfigMap that they read.

References: batch/v1 Job (Indexed completion mode, podFailurePolicy, backoffLimitPerIndex).
``launcher/node/pods/exported_run.py`` reads the ConfigMap.
"""

from __future__ import annotations

import base64
import json
import math
import posixpath
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from launcher import __version__
from launcher.command import Secret
from launcher.errors import UsageError
from launcher.export.placed_plan import ExportRequest, cpus_of, memory_of
from launcher.node.pods import exported_run
from launcher.plan.model import LaunchPlan, NodePlan
from launcher.plan.serialize import run_json
from trainer.core.remote_settings import parse_bytes

HOME = "/gnnfleet"  #: mount path of the volume with runs, parts and compiled kernels

PARTS = "/parts"  #: mount path of the volume for parts that are fetched from ``data.store``

_RUN, _SECRETS = "/etc/gnnfleet/run", "/etc/gnnfleet/secrets"  #: mount paths of ConfigMap and Secret

_WAIT = 1800  #: seconds that a pod waits for the parts and for the other pods

_MOST_CONFIG = 1 << 20  # bytes of a ConfigMap

Manifest = dict[str, Any]


@dataclass(frozen=True)
class Cluster:
    """Settings of the Kubernetes cluster that cluster.yml does not have."""

    image: str  #: container image with gnnfleet and its packages
    kind: Literal["jobset", "job"] = "jobset"
    claims: tuple[tuple[str, str], ...] = ()  #: existing PersistentVolumeClaims: name and mount path
    storage: str = "50Gi"  #: size of the claim that is created if none is mounted at ``HOME``
    namespace: str = ""
    store_secret: str = ""  #: Secret with the variables by which pods log in to ``data.store``; '' for none


def metadata_of(name: str) -> Manifest:
    return {"name": name, "labels": {"app.kubernetes.io/name": "gnnfleet", "gnnfleet/run": name}}


def claimed(name: str, cluster: Cluster) -> tuple[list[Manifest], list[Manifest]]:
    """Return the mounts of a container, and the volumes of its pod, for the claims of the run ``name``."""
    own = [] if any(path == HOME for _, path in cluster.claims) else [(name, HOME)]
    claims = [*own, *cluster.claims]
    return (
        [{"name": f"data{k}", "mountPath": path} for k, (_, path) in enumerate(claims)],
        [{"name": f"data{k}", "persistentVolumeClaim": {"claimName": claim}} for k, (claim, _) in enumerate(claims)],
    )


def job_spec(plan: LaunchPlan, nodes: Sequence[NodePlan], request: ExportRequest, cluster: Cluster) -> Manifest:
    """Return the specification of the Indexed Job of consecutive ``nodes`` with equal pods."""
    config, first = request.config, request.config.nodes[nodes[0].node_rank]
    fetches = config.data.store is not None
    mounts, volumes = claimed(plan.run_id, cluster)
    mounts = [{"name": "run", "mountPath": _RUN, "readOnly": True}, *mounts]
    volumes = [{"name": "run", "configMap": {"name": plan.run_id}}, *volumes]
    if fetches and not any(path == PARTS for _, path in cluster.claims):
        mounts.append({"name": "parts", "mountPath": PARTS})
        volumes.append({"name": "parts", "emptyDir": {}})
    # python -m imports modules of the working folder first, which the image may have set.
    common: Manifest = {"image": cluster.image, "workingDir": "/"}
    env = [{"name": "GNNFLEET_FIRST_NODE", "value": str(nodes[0].node_rank)}]

    # The init container fetches the node's parts; it alone gets the credentials of the store.
    secret = {"envFrom": [{"secretRef": {"name": cluster.store_secret}}]} if cluster.store_secret else {}
    command = ["python3", "-m", "launcher.node.pods.fetch_in_pod", _RUN]
    fetch = {"name": "fetch", **common, "command": command, "env": env, **secret, "volumeMounts": list(mounts)}

    # The container runs the supervisor. Processors are not limited, and memory only as ``memory`` of the node says.
    program = ["python3", "-m", "launcher.node.pods.pod"]
    alive = {"exec": {"command": [*program, "--alive", _RUN]}, "timeoutSeconds": 15}
    ports = {f"graph-{node.node_rank}"[:15]: node.service_port for node in nodes if node.server}
    if plan.nodes[plan.lead] in nodes:
        ports |= {"master": plan.master_port}
        ports |= {"control": plan.control_port} if plan.control_port else {}
    mounts.append({"name": "secrets", "mountPath": _SECRETS, "readOnly": True})
    volumes.append({"name": "secrets", "secret": {"secretName": plan.run_id, "defaultMode": 0o440}})
    if first.devices:
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})  # NCCL needs more than 64 MiB
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory"}})
    memory = max(memory_of(one.node_rank, config, request.parts, plan) for one in nodes)
    size: Manifest = {"memory": f"{memory}Mi"} if memory else {}
    limits = {**(size if first.memory else {}), **({"nvidia.com/gpu": len(first.devices)} if first.devices else {})}
    node = {
        "name": "node",
        **common,
        "command": [*program, _RUN, _SECRETS],
        "env": [*env, {"name": "GNNFLEET_KERNELS", "value": f"{HOME}/kernels"}],
        "ports": [{"name": name, "containerPort": port, "protocol": "TCP"} for name, port in ports.items()],
        "startupProbe": {**alive, "periodSeconds": 10, "failureThreshold": math.ceil((_WAIT * 3 + 60) / 10)},
        "livenessProbe": {**alive, "periodSeconds": 30, "failureThreshold": 4},
        "resources": {"requests": {"cpu": cpus_of(first, config), **size}, **({"limits": limits} if limits else {})},
        "volumeMounts": mounts,
    }
    pod = {
        "restartPolicy": "Never",
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": math.ceil(config.run.grace) + 30,
        **({"initContainers": [fetch]} if fetches else {}),
        "containers": [node],
        "volumes": volumes,
    }
    # A run that cannot work as it was exported is not tried again; a pod that was evicted or drained does not count.
    hopeless = [
        {"action": "FailJob", "onExitCodes": {"containerName": name, "operator": "In", "values": [2]}}
        for name in (["fetch", "node"] if fetches else ["node"])
    ]
    disrupted = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    return {
        "completionMode": "Indexed",
        "completions": len(nodes),
        "parallelism": len(nodes),
        "backoffLimitPerIndex": config.run.restarts,
        "maxFailedIndexes": 0,
        "podFailurePolicy": {"rules": [*hopeless, disrupted]},
        "template": {"metadata": {"labels": metadata_of(plan.run_id)["labels"]}, "spec": pod},
    }


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
        store, fetch = request.config.data, None
        if store.store is not None and node.parts:
            fetch = {
                "url": store.store,
                "options": store.store_options,
                "folder": node.data_dir,
                "parts": node.parts,
                "replicated": plan.topology.replicated,
                "manifest": request.parts.files[-1].sha256 if request.parts else "",
                "limit": None if store.store_limit is None else parse_bytes(store.store_limit),
            }
        content = {"env": dict(node.start.env), "fetch": fetch, "spec": spec}
        data[f"node{node.node_rank}.json"] = json.dumps(content, indent=indent)
        data["cluster.json"] = contents["cluster.json"].content
        if node.ranks and not files:
            top = f"{node.run_dir}/files"  # of the files of the user's command
            for file in (file for file in node.files if file.source and file.dest.startswith(f"{top}/")):
                key, raw = f"file{len(files)}", Path(file.source).read_bytes()
                try:
                    data[key] = raw.decode()
                except UnicodeDecodeError:
                    binary[key] = base64.b64encode(raw).decode()
                files.append({"key": key, "path": posixpath.relpath(file.dest, top), "mode": file.mode})
    values = {
        "format": exported_run.FORMAT,
        "version": exported_run.VERSION,
        "gnnfleet": __version__,
        "lead": plan.lead,
        "wait": _WAIT,
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
