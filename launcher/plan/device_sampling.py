"""Says in one line of the plan where batches are sampled (``train.sampling``), and where GPUs read the edges from.

Each process decides when it starts, by the memory that is free then (``trainer/cuda/topology.py``). The line of the
plan is the decision for idle GPUs and hosts, and for the sizes of the files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.filesize import decimal

from launcher.config.schema import ClusterConfig
from launcher.plan.model import NodeFacts, NodePlan, Topology
from launcher.plan.partition import PartitionFiles
from launcher.text import spans

_SHARE = 2  #: edges take at most 1/_SHARE of a GPU's memory, else of the host's memory

_BY_CPU = "on the CPUs"

_RULE = "edges in device memory if they take at most half of it, else in page-locked memory of the host"


def sampling_line(
    config: ClusterConfig, nodes: Sequence[NodePlan], topology: Topology, manifest: PartitionFiles | None,
    facts: Mapping[int, NodeFacts],
) -> str:  # fmt: skip
    """Return where the bundled trainer's processes with GPUs will sample; '' if only CPUs can.

    ``manifest``: files of the parts on the launching machine, or None.
    """
    sampling = [node for node in nodes if node.devices and node.ranks and node.parts]
    if not sampling or config.train.sampling == "cpu":
        return ""
    if config.train.neighbors is not None and config.train.neighbors.name in ("ppr", "walks"):
        return f"{_BY_CPU}, which choose neighbours by {config.train.neighbors.name}"
    found: dict[str, list[int]] = {}
    for node in sampling:
        known = manifest or facts.get(node.node_rank)
        size = topology.bytes or (known.topology_bytes if known else 0)  # of the edges of all parts; 0 if unknown
        text = _where(node, topology, config.num_parts, size, facts)
        if config.train.sampling == "cuda":
            text = text.replace(_BY_CPU, "train.sampling: cuda is not possible")
        found.setdefault(text, []).append(node.node_rank)
    if len(found) == 1:
        return next(iter(found))
    return "; ".join(f"{spans(nodes, 'node')} {text}" for text, nodes in found.items())


def _where(node: NodePlan, topology: Topology, num_parts: int, size: int, facts: Mapping[int, NodeFacts]) -> str:
    if topology.choice == "partitioned" and len(node.parts) < num_parts:
        return f"{_BY_CPU}: GPUs need the edges of all parts on their node"
    known = facts.get(node.node_rank)
    installed = known.versions.get("numba_cuda") if known else None
    if installed == "":
        return f"{_BY_CPU}: numba-cuda is not installed"
    on_gpus = "on the GPUs" if installed else "on the GPUs if numba-cuda is installed"
    device = min((known.device_bytes(given) for given in node.devices), default=0) if known else 0
    if known is None or not (size and device):
        return f"{on_gpus}; {_RULE}"
    edges = f"edges (about {decimal(size)})"
    if size <= device // _SHARE:
        return f"{on_gpus}; {edges} in device memory, at most half of {decimal(device)}"
    limit = known.memory // _SHARE
    if not known.memory or size <= limit:
        return (
            f"{on_gpus}; {edges} in page-locked memory of the host, as they are more than half of a "
            f"GPU's {decimal(device)}"
        )
    return (
        f"{_BY_CPU}: {edges} are more than half of a GPU's {decimal(device)}, and more than the {decimal(limit)} of "
        "page-locked memory that may be used"
    )
