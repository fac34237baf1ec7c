"""The plan of a serving cluster as it will be: nodes that run as they were planned, those to start made anew."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from launcher.command import Secret
from launcher.config.roles import Standing
from launcher.config.schema import ClusterConfig
from launcher.plan.build import LaunchPlan, NodeFacts, NodePlan, make_plan
from launcher.plan.codefiles import code_digest
from launcher.plan.model import PlannedFile, generated
from launcher.plan.partition import ensure_parts
from launcher.plan.serialize import with_run_file
from launcher.report.run_folder import user_at_host
from launcher.run.launch import new_token, with_service_key
from launcher.serving.described import read_described
from launcher.serving.job import ServeJob
from launcher.serving.reconcile import Standings


def final_plan(
    job: ServeJob, found: Standings, held: Mapping[int, tuple[int, ...]], facts: Mapping[int, NodeFacts]
) -> LaunchPlan:
    """The whole cluster: nodes that run as they were planned, those to start made anew."""
    job.at("partition")
    config = found.roster.config
    manifest = ensure_parts(config, job.console) if config.makes_parts else None
    plan = make_plan(
        _addressed(found, facts),
        run_id=job.run_id,
        code_digest=code_digest(),
        facts=facts,
        manifest=manifest,
        token=new_token(),
        operator=user_at_host(),
        serve_only=True,
        standing=_standing(found, held),
    )
    return with_run_file(with_service_key(_with_kept(plan, found, facts), service_key(found)))


def _with_kept(plan: LaunchPlan, found: Standings, facts: Mapping[int, NodeFacts]) -> LaunchPlan:
    """``plan`` with the nodes that are not started now as they are; they get to know of the others."""
    old = {node.node_rank: node for node in found.plan.nodes if node.node_rank not in facts} if found.plan else {}
    cluster = text_of(plan, "cluster.json")
    nodes = [_kept(old[node.node_rank], node.parts, cluster) if node.node_rank in old else node for node in plan.nodes]
    return replace(plan, nodes=tuple(nodes))


def _kept(node: NodePlan, parts: tuple[int, ...], cluster: str) -> NodePlan:
    files = generated(f"{node.run_dir}/cluster.json", cluster), PlannedFile(f"{node.run_dir}/run.json", 0, mode=0o600)
    return replace(node, parts=parts, files=files)


def _standing(found: Standings, held: Mapping[int, tuple[int, ...]]) -> Standing | None:
    """What stays as it is."""
    if found.plan is None:
        return None
    versions = [found.plan.version]
    for one in found.seen.values():
        if "cluster.json" in one.files:
            versions.append(read_described(one.files["cluster.json"], one.view.node.label).version)
    ports = {node.node_rank: node.service_port for node in found.plan.nodes if node.parts and node.service_port}
    parts = {k: () if k in found.roster.gone else parts for k, parts in held.items()}
    return Standing(max(versions) + 1, parts, ports)


def _addressed(found: Standings, facts: Mapping[int, NodeFacts]) -> ClusterConfig:
    """The config with the addresses that preflight once found for nodes that are not looked at now."""
    if found.plan is None:
        return found.roster.config
    known = {node.node_rank: node.address for node in found.plan.nodes if node.node_rank not in facts}
    nodes = [replace(node, address=known.get(k, node.address)) for k, node in enumerate(found.roster.config.nodes)]
    return replace(found.roster.config, nodes=tuple(nodes))


def service_key(found: Standings) -> Secret:
    """The cluster's key pair, which all its servers share; '' when there is none yet."""
    return Secret(next((one.files["service.key"] for one in found.seen.values() if "service.key" in one.files), ""))


def text_of(plan: LaunchPlan, name: str) -> str:
    """A file that is the same on all nodes, as the plan has it."""
    return next(file.content for file in plan.nodes[0].files if file.dest.endswith(f"/{name}"))
