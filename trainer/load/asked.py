"""What batches ask other hosts for, and its bytes, here and as it travels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from trainer import rounding
from trainer.load.hot import BatchPlan
from trainer.reach import WireRows
from trainer.sample.specs import row_spec
from trainer.schema import AnyType, NodeType
from trainer.store.part import PartStore


@dataclass(frozen=True)
class AskedColumns:
    """What is asked of other hosts, by node type."""

    names: Mapping[NodeType, tuple[str, ...]]
    row_bytes: Mapping[NodeType, int]  #: as they are kept here
    wire_bytes: Mapping[NodeType, int]  #: as they travel
    wide: frozenset[NodeType]  #: types with columns of several dimensions: only their rows are kept and held
    label_bytes: int  #: of a seed, as they travel

    @classmethod
    def of(cls, plan: BatchPlan, store: PartStore, wire_rows: WireRows) -> AskedColumns:
        """With replicated topology columns of one dimension are here."""
        shapes = {of: {name: row_spec(store, of, name)[1] for name in names} for of, names in plan.columns.items()}
        light = store.whole_topology
        asked = {of: tuple(name for name, shape in s.items() if shape or not light) for of, s in shapes.items()}
        asked = {of: names for of, names in asked.items() if names}
        labels = [name for name in plan.labels if row_spec(store, plan.target, name)[1] or not light]
        return cls(
            asked,
            {of: sum(_stored(store, of, name) for name in names) for of, names in asked.items()},
            {of: sum(wire_bytes(store, of, name, wire_rows) for name in names) for of, names in asked.items()},
            frozenset(of for of, names in asked.items() if any(shapes[of][name] for name in names)),
            sum(wire_bytes(store, plan.target, name, wire_rows) for name in labels),
        )


def wire_bytes(store: PartStore, of: AnyType, name: str, wire_rows: WireRows) -> int:
    """Bytes of a row of what can be gathered, as it travels."""
    spec = store.manifest.attrs_of(of).get(name)
    if spec is None:
        return _stored(store, of, name)
    return rounding.row_bytes(name, spec.stored, spec.shape, spec.travels_as(wire_rows))


def _stored(store: PartStore, of: AnyType, name: str) -> int:
    dtype, shape = row_spec(store, of, name)
    return dtype.itemsize * math.prod(shape)
