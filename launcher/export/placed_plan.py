"""Builds the plan of an exported run, without preflight, and what it asks for on each node.

The caller gives the addresses, folders and interpreter.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.command import Secret, is_secret
from launcher.config.resolve import ResolvedConfig
from launcher.config.schema import NodeConfig
from launcher.errors import UsageError
from launcher.plan.build import make_plan
from launcher.plan.model import LaunchPlan, NodeFacts
from launcher.plan.partition import PartitionFiles, partitioning, read_partition_files
from trainer.core.remote_settings import parse_bytes


@dataclass(frozen=True)
class Place:
    """Addresses, folders and interpreter of one node of an exported run."""

    address: str  #: host name or address at which the other nodes reach it
    bind: str  #: address on which its services listen
    workdir: str
    python: str  #: interpreter, or a placeholder for it
    data_folder: str  #: partition folder on the node


@dataclass(frozen=True)
class ExportRequest:
    """What ``gnnfleet export`` writes, for every kind of launcher."""

    config: ResolvedConfig
    run_id: str
    own_command: tuple[str, ...] = ()
    cwd: Path = Path()

    @property
    def parts(self) -> PartitionFiles | None:
        """The parts on this machine, if they have been made; their sizes decide ``data.topology: auto``."""
        if not self.config.makes_parts:
            return None
        parts = read_partition_files(Path(self.config.data.folder).expanduser())
        return parts if parts is not None and parts.num_parts == self.config.num_parts else None


def check_exportable(config: ResolvedConfig, kind: str) -> None:
    """Raise UsageError if the config has what exported runs do not support.

    That is ``data.serving``, ``train.resume`` or ``train.start``.
    """
    if config.data.serving:
        raise UsageError(
            f"data.serving: an exported run ({kind}) cannot attach to serving cluster {config.data.serving}, whose "
            "addresses and keys are looked up at launch; give data.dataset, or launch with gnnfleet"
        )
    for name in ("resume", "start"):
        if getattr(config.train, name):
            raise UsageError(
                f"train.{name}: an exported run ({kind}) gets no checkpoint of this machine; remove this key. The "
                "exported run resumes from its own checkpoints"
            )


def without_credentials(config: ResolvedConfig) -> tuple[ResolvedConfig, tuple[str, ...]]:
    """Return (the config without what is or may be secret, the names of what was left out).

    That are variables in ``env`` whose names say so, and addresses in ``run.notify`` that are no variables.
    """
    found = sorted({name for node in config.nodes for name, text in node.env.items() if is_secret(name, text)})
    told = tuple(target for target in config.run.notify if "://" not in target)
    nodes = (
        replace(node, env={name: text for name, text in node.env.items() if name not in found}) for node in config.nodes
    )
    addresses = ("run.notify",) if told != config.run.notify else ()
    return replace(config, nodes=tuple(nodes), run=replace(config.run, notify=told)), (*found, *addresses)


def parts_name(config: ResolvedConfig) -> str:
    """Return the name of the partition folder on nodes that get their own: dataset and a digest of how it is cut."""
    words = "\0".join((config.data.dataset, *partitioning(config).graph))
    dataset = re.sub(r"[^\w.-]+", "-", config.data.dataset)
    return f"{dataset}-{hashlib.sha256(words.encode()).hexdigest()[:12]}"


def placed_plan(request: ExportRequest, places: Sequence[Place], token: Secret, digest: str = "") -> LaunchPlan:
    """Return the plan of a run whose node k is at ``places[k]``. The preferred ports are used, even if they are busy.

    Parts are expected in each node's ``data_folder``. Node keys that describe the hosts of the config (user, port,
    venv, conda, setup, address, …) are dropped. OMP_NUM_THREADS of the processes is as ``cpus`` of the
    node says, else 1. ``digest``: the digest of
    gnnfleet's code; computed if ''. Raises UsageError if a file of the user's command is missing.
    """
    config, parts = request.config, request.parts
    nodes, facts = [], {}
    for k, (node, place) in enumerate(zip(config.nodes, places, strict=True)):
        nodes.append(
            NodeConfig(
                host=place.address,
                python=place.python,
                workdir=place.workdir,
                data_folder=place.data_folder,
                role=node.role,
                devices=tuple(range(len(node.devices))),
                procs=node.procs,
                address=place.address,
                interface=node.interface,
                env=node.env,
            )
        )
        facts[k] = NodeFacts(
            node_rank=k,
            hostname=place.address,
            home="~",
            address=place.bind,
            interface="",
            python=place.python,
            versions={},
            tmux="",
            devices=(),
            disk_free=0,
            memory=0,
            cpus=node.cpus or 0,
            clock_offset=0.0,
            free_ports=(),
            topology_bytes=parts.topology_bytes if parts else 0,
        )
    run = replace(config.run, restarts=0, master_addr="auto")
    data = replace(config.data, mode="verify")
    placed = replace(config, nodes=tuple(nodes), run=run, data=data, transport="ssh")
    return make_plan(
        placed,
        run_id=request.run_id,
        code_digest=digest,
        facts=facts,
        own_command=request.own_command,
        token=token,
        cwd=request.cwd,
    )


_OF_RANK = 4 << 30  # bytes of a trainer process beside its parts: torch, its model, batches in flight

_OF_SERVER = 1 << 30


def cpus_of(node: NodeConfig, config: ResolvedConfig) -> int:
    """Return ``cpus`` of the node; by default the processes with their sampler threads, and two for a graph server."""
    return node.cpus or node.nproc * (config.train.sampler_threads + 1) + 2 * node.holds


def memory_of(k: int, config: ResolvedConfig, parts: PartitionFiles | None, plan: LaunchPlan) -> int:
    """Return the MiB that node ``k`` needs: ``memory`` of the node, else an estimate; 0 without known parts.

    The estimate counts the files of its parts, once, as the processes of a host share them, and its processes.
    """
    node = config.nodes[k]
    if node.memory is not None:
        return -(-parse_bytes(node.memory) >> 20)
    if parts is None:
        return 0
    files = parts.of_parts(plan.nodes[k].parts, replicated=plan.topology.replicated) if node.holds else ()
    used = sum(file.bytes for file in files) + node.nproc * _OF_RANK + node.holds * _OF_SERVER
    return -(-used >> 20)
