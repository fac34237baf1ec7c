"""Job specifications and pod templates of an exported Kubernetes run.

References: batch/v1 Job (Indexed completion mode, podFailurePolicy, backoffLimitPerIndex).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from launcher.export.placed_plan import ExportRequest, cpus_of, memory_of
from launcher.plan.model import LaunchPlan, NodePlan

HOME = "/gnnfleet"  #: mount path of the volume with runs, parts and compiled kernels

PARTS = "/parts"  #: mount path of the volume for parts that are fetched from ``data.store``

RUN, SECRETS = "/etc/gnnfleet/run", "/etc/gnnfleet/secrets"  #: mount paths of ConfigMap and Secret

WAIT = 1800  #: seconds that a pod waits for the parts and for the other pods

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


@dataclass(frozen=True)
class Group:
    """Consecutive nodes with equal pods: one Indexed Job."""

    name: str
    nodes: tuple[NodePlan, ...]

    @property
    def first(self) -> NodePlan:
        return self.nodes[0]


def metadata_of(name: str, **more: Any) -> Manifest:
    return {"name": name, "labels": {"app.kubernetes.io/name": "gnnfleet", "gnnfleet/run": name}, **more}


def job_spec(plan: LaunchPlan, group: Group, request: ExportRequest, cluster: Cluster) -> Manifest:
    config = request.config
    return {
        "completionMode": "Indexed",
        "completions": len(group.nodes),
        "parallelism": len(group.nodes),
        "backoffLimitPerIndex": config.run.restarts,
        "maxFailedIndexes": 0,
        "podFailurePolicy": {
            "rules": [
                # a run that cannot work as it was exported is not tried again
                *(
                    {"action": "FailJob", "onExitCodes": {"containerName": name, "operator": "In", "values": [2]}}
                    for name in (["fetch", "node"] if config.data.store else ["node"])
                ),
                # an evicted pod, or one on a drained node, does not count
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": {
            "metadata": {"labels": metadata_of(plan.run_id)["labels"]},
            "spec": _pod_spec(plan, group, request, cluster),
        },
    }


def _pod_spec(plan: LaunchPlan, group: Group, request: ExportRequest, cluster: Cluster) -> Manifest:
    config, devices = request.config, len(group.first.devices)
    program = ["python3", "-m", "launcher.node.pods.pod"]
    alive = {"exec": {"command": [*program, "--alive", RUN]}, "timeoutSeconds": 15}
    found = {f"graph-{node.node_rank}"[:15]: node.service_port for node in group.nodes if node.server}
    if plan.nodes[plan.lead] in group.nodes:
        found |= {"master": plan.master_port}
        found |= {"control": plan.control_port} if plan.control_port else {}
    container: Manifest = {
        "name": "node",
        "image": cluster.image,
        "command": [*program, RUN, SECRETS],
        "workingDir": "/",  # python -m imports modules of the working folder first, which the image may have set
        "env": [_first_node(group), {"name": "GNNFLEET_KERNELS", "value": f"{HOME}/kernels"}],
        "ports": [{"name": name, "containerPort": port, "protocol": "TCP"} for name, port in found.items()],
        "startupProbe": {**alive, "periodSeconds": 10, "failureThreshold": math.ceil((WAIT * 3 + 60) / 10)},
        "livenessProbe": {**alive, "periodSeconds": 30, "failureThreshold": 4},
        "volumeMounts": [
            {"name": "run", "mountPath": RUN, "readOnly": True},
            {"name": "secrets", "mountPath": SECRETS, "readOnly": True},
            *claim_mounts(plan.run_id, cluster),
        ],
    }
    volumes: list[Manifest] = [
        {"name": "run", "configMap": {"name": plan.run_id}},
        {"name": "secrets", "secret": {"secretName": plan.run_id, "defaultMode": 0o440}},
        *claim_volumes(plan.run_id, cluster),
    ]
    container["resources"] = _resources(plan, group, request)
    if devices:
        container["volumeMounts"].append({"name": "shm", "mountPath": "/dev/shm"})  # NCCL needs more than 64 MiB
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory"}})
    fetches = config.data.store is not None
    if fetches and not _has_claim(cluster, PARTS):
        container["volumeMounts"].append({"name": "parts", "mountPath": PARTS})
        volumes.append({"name": "parts", "emptyDir": {}})
    return {
        "restartPolicy": "Never",
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": math.ceil(config.run.grace) + 30,
        **({"initContainers": [_fetch(group, cluster, container["volumeMounts"])]} if fetches else {}),
        "containers": [container],
        "volumes": volumes,
    }


def _resources(plan: LaunchPlan, group: Group, request: ExportRequest) -> Manifest:
    """Return requests and limits of the container: processors are not limited, and memory only as ``memory`` says."""
    node, config = request.config.nodes[group.first.node_rank], request.config
    memory = max(memory_of(one.node_rank, config, request.parts, plan) for one in group.nodes)
    size: Manifest = {"memory": f"{memory}Mi"} if memory else {}
    limits = {**(size if node.memory else {}), **({"nvidia.com/gpu": len(node.devices)} if node.devices else {})}
    requests = {"cpu": cpus_of(node, config), **size}
    return {"requests": requests, **({"limits": limits} if limits else {})}


def _fetch(group: Group, cluster: Cluster, mounts: list[Manifest]) -> Manifest:
    """Return the init container that fetches a node's parts; it alone gets the credentials of the store."""
    secret = {"envFrom": [{"secretRef": {"name": cluster.store_secret}}]} if cluster.store_secret else {}
    return {
        "name": "fetch",
        "image": cluster.image,
        "command": ["python3", "-m", "launcher.node.pods.fetch_in_pod", RUN],
        "workingDir": "/",
        "env": [_first_node(group)],
        **secret,
        "volumeMounts": [mount for mount in mounts if mount["name"] not in ("secrets", "shm")],
    }


def _first_node(group: Group) -> Manifest:
    return {"name": "GNNFLEET_FIRST_NODE", "value": str(group.first.node_rank)}


def _has_claim(cluster: Cluster, mount_path: str) -> bool:
    return any(path == mount_path for _, path in cluster.claims)


def _claims(name: str, cluster: Cluster) -> list[tuple[str, str]]:
    own = [] if _has_claim(cluster, HOME) else [(name, HOME)]
    return [*own, *cluster.claims]


def claim_mounts(name: str, cluster: Cluster) -> list[Manifest]:
    return [{"name": f"data{k}", "mountPath": path} for k, (_, path) in enumerate(_claims(name, cluster))]


def claim_volumes(name: str, cluster: Cluster) -> list[Manifest]:
    return [
        {"name": f"data{k}", "persistentVolumeClaim": {"claimName": claim}}
        for k, (claim, _) in enumerate(_claims(name, cluster))
    ]
