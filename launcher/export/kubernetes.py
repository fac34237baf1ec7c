"""Writes a run as Kubernetes manifests: a JobSet, or Indexed Jobs with a headless service, whose pods run the same
supervisors as hosts behind SSH (``launcher/node/pods/pod.py``).

Reference: jobset.x-k8s.io/v1alpha2.
"""

from __future__ import annotations

import hashlib
import json
import os
import posixpath
import re
import secrets
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import yaml

from launcher.command import Secret
from launcher.config.resolve import ResolvedConfig
from launcher.errors import UsageError
from launcher.export.placed_plan import (
    ExportRequest,
    Place,
    check_exportable,
    parts_name,
    placed_plan,
    without_credentials,
)
from launcher.export.pods import HOME, PARTS, Cluster, Manifest, claimed, config_map, job_spec, metadata_of
from launcher.node.pods import exported_run
from launcher.node.remote_folder import scheme_of
from launcher.plan.files import code_digest
from launcher.plan.model import LaunchPlan
from launcher.plan.partition import partitioning
from launcher.plan.service_key import new_key_pair

_MOST_NAME = 40  # characters of the run's name in names of pods, which have at most 63

_LOCAL_FILES = ("file", "tables", "partition")  # datasets that are files on the launching machine


@dataclass(frozen=True)
class Exported:
    manifests: tuple[Manifest, ...]
    secret: Manifest
    notes: tuple[str, ...]

    def text(self) -> str:
        return _to_yaml(*self.manifests)

    def secret_text(self) -> str:
        return _to_yaml(self.secret)


def export_kubernetes(request: ExportRequest, cluster: Cluster) -> Exported:
    """Return the manifests of a run. Raises UsageError if the run cannot work in the cluster."""
    config, left_out = without_credentials(request.config)
    check_exportable(config, "Kubernetes")
    if inside := [k for k, node in enumerate(config.nodes) if node.wrap]:
        raise UsageError(f"nodes.{inside[0]}.wrap: pods are containers already, of the image in --image; remove wrap")
    if cluster.store_secret and config.data.store is None:
        raise UsageError("--store-secret is for a config with data.store, from which the pods fetch their parts")
    name = resource_name(request.run_id)
    # The name of each node's group: consecutive nodes whose pods are equal belong to one group.
    groups: list[str] = []
    for _, members in groupby(config.nodes, key=lambda node: (node.role, len(node.devices), node.cpus, node.memory)):
        nodes = list(members)
        role = f"{nodes[0].role}s"
        others = sum(1 for group in dict.fromkeys(groups) if group.startswith(role))
        groups += [f"{role}-{others}" if others else role] * len(nodes)
    data = config.data
    if data.store is not None and scheme_of(data.store) in ("file", "local"):
        _check_mounted("data.store", data.store.partition("://")[2], cluster)
    if data.mode == "sync":
        folder = f"{HOME if data.store is None else ''}{PARTS}/{parts_name(config)}"
    else:
        _check_mounted("data.folder", data.folder, cluster)
        folder = data.folder
    # The host name of each pod, as given by an Indexed Job or by a JobSet with one replica of each Job.
    job = {group: f"{name}-{group}-0" if cluster.kind == "jobset" else f"{name}-{group}" for group in groups}
    hosts = [f"{job[group]}-{groups[:k].count(group)}" for k, group in enumerate(groups)]
    places = [Place(f"{host}.{name}", "0.0.0.0", HOME, exported_run.PYTHON, folder) for host in hosts]
    digest = code_digest()
    request = replace(request, config=config, run_id=name)
    plan = placed_plan(request, places, Secret(exported_run.TOKEN), digest)
    jobs = {
        group: job_spec(plan, [plan.nodes[k] for k, other in enumerate(groups) if other == group], request, cluster)
        for group in dict.fromkeys(groups)
    }

    # The manifests: volume, ConfigMap, and the Jobs of all groups after the one that makes the parts.
    label = metadata_of(name)
    manifests: list[Manifest] = []
    if not any(path == HOME for _, path in cluster.claims):
        claim = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": cluster.storage}}}
        manifests.append({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": label, "spec": claim})
    manifests.append(config_map(plan, request, f"{HOME}/code/{digest[:16]}"))
    partition = _partition_job(config, name, folder, cluster)
    if cluster.kind == "jobset":
        after = {"dependsOn": [{"name": "partition", "status": "Complete"}]} if partition else {}
        replicated = [{"name": "partition", "replicas": 1, "template": {"spec": partition}}] if partition else []
        replicated += [
            {"name": group, "replicas": 1, **after, "template": {"spec": spec}} for group, spec in jobs.items()
        ]
        jobset = {
            "network": {"enableDNSHostnames": True, "subdomain": name, "publishNotReadyAddresses": True},
            "failurePolicy": {"maxRestarts": 0},  # the Jobs start failed pods again
            "replicatedJobs": replicated,
        }
        kind = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet"}
        manifests.append({**kind, "metadata": label, "spec": jobset})
    else:
        headless = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"gnnfleet/run": name}}
        manifests.append({"apiVersion": "v1", "kind": "Service", "metadata": label, "spec": headless})
        for spec in jobs.values():
            spec["template"]["spec"]["subdomain"] = name
        for job_name, spec in {**({"partition": partition} if partition else {}), **jobs}.items():
            metadata = {**label, "name": f"{name}-{job_name}"}
            manifests.append({"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec})
    values = {"token": secrets.token_hex(16)}
    if plan.encrypted:
        values["service.key"] = json.dumps(new_key_pair())
    secret: Manifest = {"apiVersion": "v1", "kind": "Secret", "metadata": label, "type": "Opaque", "stringData": values}
    if cluster.namespace:
        for manifest in (*manifests, secret):
            manifest["metadata"] = {**manifest["metadata"], "namespace": cluster.namespace}
    notes = _notes(request, plan, folder, partition is not None, cluster, left_out)
    return Exported(tuple(manifests), secret, notes)


def resource_name(text: str) -> str:
    """Return ``text`` as a name of Kubernetes resources: lower-case letters, digits and -, at most 40 characters."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    name = name if name[:1].isalpha() else f"run-{name}"
    if len(name) > _MOST_NAME:
        name = f"{name[: _MOST_NAME - 9].rstrip('-')}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    return name.strip("-")


def _to_yaml(*documents: Manifest) -> str:
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=1000, explicit_start=True)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def _check_mounted(key: str, folder: str, cluster: Cluster) -> None:
    """Raise UsageError if ``folder``, the value of ``key``, is on none of the pods' volumes."""
    mounts = [HOME, *(path for _, path in cluster.claims)]
    if not any(posixpath.commonpath([folder, path]) == path for path in mounts if folder.startswith("/")):
        raise UsageError(
            f"{key}: {folder} is on no volume of the pods ({', '.join(mounts)}); mount the claim that has the "
            f"parts with --claim NAME={posixpath.dirname(folder) if folder.startswith('/') else '/PATH'}"
        )


def _partition_job(config: ResolvedConfig, name: str, folder: str, cluster: Cluster) -> Manifest | None:
    """Return the specification of the Job that makes the parts.

    None if the parts exist, or if the graph is not available in the cluster.
    """
    if config.data.mode != "sync" or config.data.store is not None or config.data.dataset in _LOCAL_FILES:
        return None
    source = None if config.data.dataset == "synthetic" else f"{HOME}/datasets"
    there = replace(config, data=replace(config.data, folder=folder, source=source))
    argv = partitioning(there).command.argv
    mounts, volumes = claimed(name, cluster)
    container = {
        "name": "partition",
        "image": cluster.image,
        "command": ["python3", *(word.replace("$(", "$$(") for word in argv[1:])],  # else Kubernetes expands $(NAME)
        "env": [{"name": "GNNFLEET_KERNELS", "value": f"{HOME}/kernels"}],
        "volumeMounts": mounts,
    }
    spec = {
        "restartPolicy": "Never",
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
        "containers": [container],
        "volumes": volumes,
    }
    return {"completions": 1, "backoffLimit": 2, "template": {"spec": spec}}


def _notes(
    request: ExportRequest, plan: LaunchPlan, folder: str, made: bool, cluster: Cluster, left_out: Sequence[str]
) -> tuple[str, ...]:  # fmt: skip
    """Return notes for the user. ``left_out``: variables with credentials that the nodes had."""
    notes, config = [], request.config
    if left_out:
        notes.append(f"credentials are left out ({', '.join(left_out)}), as manifests are not secret")
    if (store := config.data.store) is not None:
        notes.append(
            f"each pod fetches its parts from {store}; before the pods start, upload them: gnnfleet partition push "
            "--config FILE"
        )
        if not cluster.store_secret and scheme_of(store) != "file":
            notes.append(
                "give --store-secret NAME, a Secret with variables such as AWS_ACCESS_KEY_ID, unless the pods may read "
                "the store without credentials"
            )
    if config.data.mode == "sync" and config.data.store is None and not made:
        kubectl = f"kubectl -n {cluster.namespace}" if cluster.namespace else "kubectl"
        new = f"{folder}.new"
        running = f"get pods -l gnnfleet/run={plan.run_id} --field-selector=status.phase=Running -o name"
        source = shlex.quote(os.path.expanduser(config.data.folder))
        copy = (  # the folder gets its name when it is complete, and no folder is replaced
            f"(set -o pipefail; P=$({kubectl} {running} | head -n 1) && tar -C {source} -cf - . | {kubectl} exec -i $P "
            f"-- sh -c 'rm -rf {new} && mkdir -p {new} && tar -C {new} -xf -' && "
            f"{kubectl} exec $P -- mv -T {new} {folder})"
        )
        notes.append(
            "the graph is in files of this machine, which pods do not see. Give `data.store`, from which each pod "
            "fetches its parts; or name a claim that has them (--claim NAME=/data with `data.mode: verify`); or copy "
            f"them while the pods wait, with bash: {copy}"
            + ("" if request.parts else "; before that, make them: gnnfleet partition make --config FILE")
        )
    in_pods = made or config.data.store is not None
    if in_pods and config.data.topology == "auto" and plan.topology.choice == "partitioned":
        notes.append(
            "data.topology: the size of the graph is not known yet, so each node gets the edges of its own parts; "
            "--set data.topology=replicated saves traffic where the edges fit into memory"
        )
    if any(node.setup or node.venv or node.conda for node in config.nodes):
        notes.append("setup, venv and conda of the nodes are left out: the image has the environment")
    if not request.parts and any(node.memory is None for node in config.nodes):
        notes.append(
            "the pods request no memory, as the parts are not on this machine: give `memory` of the nodes in "
            "cluster.yml, such as --set defaults.memory=16GB"
        )
    return tuple(notes)
