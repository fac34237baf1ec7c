"""``ForeignGraph``: a graph as read from the partition folder of another program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trainer.core.arrays import Array
from trainer.core.errors import DataError
from trainer.core.schema import HOMO_EDGE, HOMO_NODE, EdgeType, NodeType, type_name
from trainer.data.raw_arrays import RawGraph
from trainer.data.work_arrays import WorkArrays


@dataclass(frozen=True)
class ForeignGraph:
    """A graph in its original order, and the part of each of its nodes."""

    raw: RawGraph  #: arrays by node and edge type; ``num_nodes`` has every node type
    parts: Mapping[NodeType, npt.NDArray[np.int32]]  #: type -> [num_nodes]; empty: the nodes are not assigned to parts
    num_parts: int  #: 0: the nodes are not assigned to parts


@dataclass(frozen=True)
class ForeignFormat:
    """A partition format of another program: functions that recognise and read its folders."""

    key: str  #: name in manifests, such as ``glt``
    title: str  #: name in messages
    found: Callable[[Path], bool]  #: whether a folder has this format; reads little
    count: Callable[[Path], int]  #: number of parts, 0 if it has none; raises ``DataError``
    read: Callable[[Path, WorkArrays], ForeignGraph]  #: raises ``DataError``


def graph_name(folder: Path) -> str:
    """Return the name of the graph in a folder `NAME-partitions`, or the name of the folder."""
    return folder.resolve().name.removesuffix("-partitions") or "graph"


def of_type(of: NodeType | EdgeType) -> str:
    """Return `` of type <type>`` for messages, or '' for the types of a homogeneous graph."""
    return "" if of in (HOMO_NODE, HOMO_EDGE) else f" of type {type_name(of)}"


def part_numbers(parts: Array, count: int, num_parts: int, place: str) -> npt.NDArray[np.int32]:
    """Return the part of each node as int32. Raises ``DataError`` unless ``parts`` has ``count`` valid numbers."""
    if parts.shape != (count,) or parts.dtype.kind not in "iu":
        raise DataError(f"{place}: holds {parts.dtype} {list(parts.shape)}, expected the part of each of {count} nodes")
    wrong = np.flatnonzero((parts < 0) | (parts >= num_parts))
    if len(wrong):
        raise DataError(
            f"{place}: node {wrong[0]} is in part {parts[wrong[0]]}, but parts go from 0 to {num_parts - 1}"
        )
    return parts.astype(np.int32)
