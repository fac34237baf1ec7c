"""Assigns each node to a part by one of several methods."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.core.arrays import Array
from trainer.core.compiled import njit
from trainer.core.errors import PartitionError
from trainer.core.files import write_whole
from trainer.core.memory import size_text
from trainer.core.rng import GOLDEN, hashed
from trainer.core.row_sort import Scratch
from trainer.core.schema import EdgeType, NodeType, type_name, type_of
from trainer.data.dataset import Dataset
from trainer.partition.methods.balance import JoinedNodes, Part
from trainer.partition.methods.frequency import Fanouts, frequency_assignment
from trainer.partition.methods.metis import metis_assignment, metis_memory
from trainer.partition.methods.streaming import streaming_assignment
from trainer.store.manifest import Manifest

METHODS = ("auto", "metis", "streaming", "frequency", "random", "hash")

KEEP = "keep"  #: the method of a partition whose parts are those of the partition folder that it was made from

#: What is balanced: the number of all nodes in each part (nodes), and in addition the number of nodes of each type
#: (types), of train seeds of each type (seeds), or both.
BALANCES = ("nodes", "types", "seeds", "types+seeds")

CHOSEN_BY = "chosen_by"  #: option in the manifest of a partition whose method was chosen by `auto`

_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "auto": {"balance": "types+seeds", CHOSEN_BY: "auto"},
    "metis": {"balance": "types+seeds"},
    "streaming": {"balance": "types+seeds"},
    "random": {},
    "hash": {},
    "frequency": {"balance": "types+seeds", "fanouts": (15, 10, 5)},
}


def method_options(method: str, **given: Any) -> dict[str, Any]:
    """Return the value of each option of ``method``, as JSON values.

    ``given``: options by name. An option that is missing or None gets its default. An option that ``method`` does not
    use is left out. Raises ``PartitionError`` for an unknown method, option or value.
    """
    if method not in METHODS:
        raise PartitionError(f"unknown partition method {method!r}; choose one of {', '.join(METHODS)}")
    known = sorted({name for options in _DEFAULTS.values() for name in options} - {CHOSEN_BY})
    for name in given:
        if name not in known:
            raise PartitionError(f"unknown partition option {name!r}; the options are {', '.join(known)}")
    options = {name: default if given.get(name) is None else given[name] for name, default in _DEFAULTS[method].items()}
    if "balance" in options and options["balance"] not in BALANCES:
        raise PartitionError(f"unknown balance {options['balance']!r}; choose one of {', '.join(BALANCES)}")
    if isinstance(fanouts := options.get("fanouts"), Mapping):
        named = {type_name(of): hops for of, hops in fanouts.items()}
        options["fanouts"] = {name: _plain_hops(hops) for name, hops in sorted(named.items())}
    elif "fanouts" in options:
        options["fanouts"] = _plain_hops(fanouts)
    return options


def made_by(manifest: Manifest) -> str:
    """Return the method that the user requested: `auto` if it chose the algorithm, else the algorithm itself."""
    return str(manifest.options.get(CHOSEN_BY, manifest.algorithm))


def fanouts_of(plain: Any) -> Fanouts:
    if not isinstance(plain, Mapping):
        return tuple(plain)
    return {_edge_type(name): tuple(hops) for name, hops in plain.items()}


def _plain_hops(hops: Any) -> list[int]:
    numbers = list(hops) if isinstance(hops, (list, tuple)) else [hops]
    if not numbers or not all(isinstance(hop, int) and hop >= -1 for hop in numbers):
        raise PartitionError(f"fanouts {hops!r}: expected whole numbers, one per hop, -1 for all neighbours")
    return numbers


def _edge_type(name: str) -> EdgeType:
    of = type_of(name)
    if isinstance(of, str):
        raise PartitionError(f"fanouts: {name!r} is not an edge type; write source__relation__target")
    return of


_AT_ONCE = 1 << 20


def hash_part(node_type: NodeType, orig_ids: Array, num_parts: int, seed: int) -> Part:
    """Return the part of each node, int32 [n]: a hash of type, original id and seed."""
    part = np.empty(len(orig_ids), np.int32)
    for start in range(0, len(orig_ids), _AT_ONCE):
        keys = _keys(node_type, orig_ids[start : start + _AT_ONCE], seed)
        part[start : start + _AT_ONCE] = ((keys >> np.uint64(32)) * np.uint64(num_parts)) >> np.uint64(32)
    return part


def _keys(node_type: NodeType, ids: Array, seed: int) -> Array:
    salt = int.from_bytes(hashlib.sha256(node_type.encode()).digest()[:8], "little")
    start = np.uint64((salt ^ ((seed + 1) * int(GOLDEN))) % 2**64)
    return hashed(ids.astype(np.uint64) * GOLDEN + hashed(start))


@dataclass(frozen=True)
class PartitionAssignment:
    """The part of every node, and the quality of the partition."""

    algorithm: str  #: one of ``METHODS``, or ``KEEP``
    seed: int
    num_parts: int
    parts: Mapping[NodeType, npt.NDArray[np.int32]]  #: type -> [num_nodes], the part of each node
    edge_cuts: Mapping[EdgeType, float]  #: share of the edges of each type whose ends are in different parts, 0 to 1
    edge_cut: float  #: the same over all edge types
    balance: float  #: nodes of the largest part / mean nodes of a part, over all types
    options: Mapping[str, Any] = field(default_factory=dict)  #: further options of the method


def choose_method(dataset: Dataset, memory: int) -> tuple[str, str]:
    """Choose `metis` if it needs at most ``memory`` bytes, else `streaming`. Returns the method and the reason."""
    needed = metis_memory(dataset.num_nodes, dataset.num_edges)
    method, than = ("metis", "within") if needed <= memory else ("streaming", "more than")
    return method, f"METIS needs about {size_text(needed)}, {than} the {size_text(memory)} of memory"


def assign_parts(
    dataset: Dataset, num_parts: int, method: str = "metis", seed: int = 0, scratch: Scratch | None = None,
    **options: Any,
) -> PartitionAssignment:  # fmt: skip
    """Divide the nodes into parts of about equal size. Equal arguments give the same parts.

    Args:
        num_parts: number of parts, at most the number of nodes.
        method: `metis` cuts few edges; `streaming` cuts few edges and keeps the edges on disk; `frequency` assigns
            nodes to the part whose seeds sample them most often; `random` balances exactly; `hash` hashes type, id and
            seed, so a part may be empty.
        seed: random seed of the method.
        scratch: for method `streaming`: folder for its files, and the memory that it may use.
        options: options of the method, see ``method_options``.

    Raises:
        PartitionError: for an unknown method or option, and for more parts than nodes.
    """
    resolved = method_options(method, **options)
    if not 1 <= num_parts <= dataset.num_nodes:
        raise PartitionError(
            f"dataset {dataset.name}: {dataset.num_nodes} nodes cannot be divided into {num_parts} non-empty parts; "
            f"num_parts must be from 1 to the number of nodes"
        )
    joined = JoinedNodes.of(dataset)
    if num_parts == 1:
        part = np.zeros(joined.total, np.int32)
    elif method == "auto":
        raise ValueError("method auto: call choose_method first, and pass the method that it returns")
    elif method == "streaming":
        if scratch is None:
            raise ValueError("method streaming needs a scratch folder")
        part = streaming_assignment(dataset, joined, num_parts, seed, resolved["balance"], scratch)
    elif method == "metis":
        part = metis_assignment(dataset, joined, num_parts, seed, resolved["balance"])
    elif method == "frequency":
        fanouts = fanouts_of(resolved["fanouts"])
        part = frequency_assignment(dataset, joined, num_parts, seed, fanouts, resolved["balance"])
    elif method == "random":
        # The sizes of parts differ by at most one node, over all types and within each type.
        part = np.empty(joined.total, np.int32)
        for (node_type, start), own in zip(joined.starts.items(), joined.split(part).values(), strict=True):
            order = np.argsort(_keys(node_type, np.arange(len(own)), seed), kind="stable")
            own[order] = (start + np.arange(len(own))) % num_parts
    else:
        by_type = [hash_part(of, np.arange(nodes.num_nodes), num_parts, seed) for of, nodes in dataset.nodes.items()]
        part = np.concatenate(by_type)
    return given_assignment(dataset, joined.split(part), num_parts, method, seed, resolved)


def given_assignment(
    dataset: Dataset,
    parts: Mapping[NodeType, Part],
    num_parts: int,
    method: str,
    seed: int,
    options: Mapping[str, Any],
) -> PartitionAssignment:
    """Return the assignment of nodes to given ``parts``, int32 [num_nodes] for each node type.

    ``method``, ``seed`` and ``options`` are recorded in the result, and have no other effect.
    """
    cut = {
        of: _count_cut(edges.edge_index[0], edges.edge_index[1], parts[of[0]], parts[of[2]])
        for of, edges in dataset.edges.items()
    }
    sizes = sum(np.bincount(part, minlength=num_parts) for part in parts.values())
    return PartitionAssignment(
        algorithm=method,
        seed=seed,
        num_parts=num_parts,
        parts=parts,
        edge_cuts={of: count / max(dataset.edges[of].num_edges, 1) for of, count in cut.items()},
        edge_cut=sum(cut.values()) / max(dataset.num_edges, 1),
        balance=float(np.max(sizes)) * num_parts / max(dataset.num_nodes, 1),
        options=options,
    )


@njit()
def _count_cut(sources: Array, targets: Array, source_part: Array, target_part: Array) -> int:
    cut = 0
    for edge in range(len(sources)):
        cut += source_part[sources[edge]] != target_part[targets[edge]]
    return cut


def store_assignment(assignment: PartitionAssignment, folder: Path) -> None:
    for of, part in assignment.parts.items():
        np.save(folder / f"{of}.npy", part)
    cuts = {type_name(of): cut for of, cut in assignment.edge_cuts.items()}
    record = {**vars(assignment), "parts": list(assignment.parts), "edge_cuts": cuts}
    write_whole(folder / "assignment.json", json.dumps(record), sync=True)


def read_assignment(folder: Path) -> PartitionAssignment:
    record = json.loads((folder / "assignment.json").read_text())
    parts = {of: np.load(folder / f"{of}.npy") for of in record.pop("parts")}
    cuts = {_edge_type(name): cut for name, cut in record.pop("edge_cuts").items()}
    return PartitionAssignment(parts=parts, edge_cuts=cuts, **record)
