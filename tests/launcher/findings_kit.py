"""Test kit for preflight: builds probe results of nodes, and returns the findings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from launcher.config.schema import ClusterConfig, DataConfig, NodeConfig
from launcher.preflight.finding import Finding
from launcher.preflight.preflight import all_findings
from launcher.preflight.preflight_report import PreflightReport
from launcher.preflight.survey import Survey

VERSIONS = {
    "python": "3.11.2", "torch": "2.13.0+cpu", "torch_geometric": "2.8.1", "numba": "0.68.1", "numpy": "2.4.6",
    "msgspec": "0.22.0", "click": "8.5.1", "rich": "15.0.0", "cuda": "", "nccl": "", "glibc": "2.36", "arch": "x86_64",
}  # fmt: skip
GB = 10**9
HEALTHY: dict[str, Any] = {
    "home": "/home/ann",
    "python": "/usr/bin/python3",
    "versions": VERSIONS,
    "tmux": "3.3a",
    "tmux_error": "",
    "devices": [],
    "gpus": [],
    "driver": "",
    "memory": 16 * GB,
    "memory_limit": 16 * GB,
    "memory_free": 12 * GB,
    "cpus": 8,
    "boot_id": "b",
    "addresses": [],
    "busy_ports": {},
    "leases": [],
    "lease_error": "",
    "leftovers": [],
    "names": {},
    "manifest": False,
    "graph": {},
    "taken": "",
    "open_files": 1024,
    "open_files_most": 1 << 20,
    "workdir_base": "/home/ann",
    "workdir_error": "",
    "workdir_id": "1:2",
    "noexec": False,
    "code": False,
    "stored": 0,
    "disk_free": 10 * GB,
    "disk": {"free": 10 * GB, "size": 100 * GB, "files": -1, "device": 1},
    "tmp": {"free": GB, "size": GB, "files": -1, "device": 2, "error": ""},
    "shm": {"free": GB, "size": GB, "files": -1, "device": 3},
}


def cluster(count: int, **changes: Any) -> ClusterConfig:
    config = ClusterConfig(
        nodes=tuple(NodeConfig(host=f"host{k}") for k in range(count)), data=DataConfig(dataset="synthetic")
    )
    return replace(config, **changes)


def probe_of(k: int, **facts: Any) -> dict[str, Any]:
    own = {"hostname": f"box{k}", "address": f"10.0.0.{k}", "interface": "eth0", "workdir": f"/w/{k}"}
    return {**HEALTHY, **own, **facts}


def versions(**changes: str) -> dict[str, Any]:
    return {"versions": {**VERSIONS, **changes}}


def gpu(index: int = 0, name: str = "H200", **changes: Any) -> dict[str, Any]:
    healthy = {"memory": 80_000, "used": 0, "mode": "Default", "mig": False, "ecc": 0, "holders": []}
    return {"index": index, "uuid": f"GPU-{index}", "name": name, **healthy, **changes}


def with_gpus(*gpus: dict[str, Any], cuda: str = "12.6", driver: str = "560.35.03", **more: Any) -> dict[str, Any]:
    """Return probe facts of a node with the GPUs ``gpus`` and a torch build that supports them."""
    own = versions(torch="2.13.0", cuda=cuda, nccl="2.27.5", **more)
    return {"gpus": list(gpus), "devices": [one["name"] for one in gpus], "driver": driver, **own}


def survey_of(config: ClusterConfig, odd: Mapping[int, Mapping[str, Any]], **more: Any) -> Survey:
    """Return a survey of the nodes of ``config``. Nodes are healthy except for the facts ``odd``.

    odd: changed probe facts, by node rank. more: further fields of ``Survey``.
    """
    count = range(len(config.nodes))
    probes = {k: probe_of(k, **odd.get(k, {})) for k in count}
    return Survey(config, probes, more.pop("clock_offsets", dict.fromkeys(count, 0.0)), **more)


def found(
    count: int, odd: Mapping[int, Mapping[str, Any]] | None = None, *, config: ClusterConfig | None = None, **more: Any
) -> list[Finding]:
    """Return the findings of preflight on ``count`` nodes, except those of severity "ok".

    Nodes are healthy except for the facts ``odd``, by node rank. more: further fields of ``Survey``.
    """
    survey = survey_of(config or cluster(count), odd or {}, **more)
    return [finding for finding in all_findings(survey) if finding.severity != "ok"]


def report_of(survey: Survey) -> PreflightReport:
    findings = sorted(all_findings(survey), key=lambda finding: finding.node_rank)
    return PreflightReport({}, tuple(findings))
