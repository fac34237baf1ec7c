"""Arrays as a source gave them, before they are checked and sorted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from trainer.core.arrays import Array
from trainer.core.errors import DataError
from trainer.core.schema import EdgeType, NodeType

SPLIT_SUFFIXES = ("_idx", "_mask")


@dataclass(frozen=True)
class RawArray:
    """One array as it was found."""

    values: Array
    place: str  #: file, or name in a file, for messages
    bfloat16: bool = False  #: ``values`` are uint16 with the bits of bfloat16

    @property
    def rows(self) -> int:
        return len(self.values) if self.values.ndim else 0

    @property
    def what(self) -> str:
        return f"{'bfloat16' if self.bfloat16 else self.values.dtype} {list(self.values.shape)}"


RawArrays = Mapping[str, RawArray]


@dataclass(frozen=True)
class RawGraph:
    """A graph as it was found: arrays whose names say the type, and plain ones."""

    name: str
    plain: RawArrays = field(default_factory=dict)  #: a homogeneous graph's arrays; else those without a type
    nodes: Mapping[NodeType, RawArrays] = field(default_factory=dict)
    edges: Mapping[EdgeType, RawArrays] = field(default_factory=dict)  #: ``edge_index`` is one of them
    num_nodes: Mapping[NodeType, int] = field(default_factory=dict)  #: where the source tells
    hetero: bool = False
    notes: tuple[str, ...] = ()

    @property
    def node_types(self) -> tuple[NodeType, ...]:
        """Every type that has attributes, a count or edges, in the order found."""
        ends = [end for source, _, target in self.edges for end in (source, target)]
        return tuple(dict.fromkeys([*self.num_nodes, *self.nodes, *ends]))


def split_prefix(name: str) -> str | None:
    """``train`` of ``train_idx`` and ``train_mask``; None for other names."""
    suffix = next((suffix for suffix in SPLIT_SUFFIXES if name.endswith(suffix)), None)
    return name.removesuffix(suffix) if suffix else None


def named(found: Iterable[tuple[str, RawArray]]) -> dict[str, RawArray]:
    """By name. Raises ``DataError`` for a name found twice."""
    arrays: dict[str, RawArray] = {}
    for name, array in found:
        if name in arrays:
            raise DataError(f"{array.place}: {name} is also in {arrays[name].place}; remove one")
        arrays[name] = array
    return arrays
