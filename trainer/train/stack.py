"""A model cut between its layers, so that one layer can run for all nodes before the next one does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor, nn

from trainer.core.batch import Block, HeteroBatch
from trainer.core.errors import SettingsError
from trainer.core.schema import HOMO_EDGE, HOMO_NODE, EdgeType, NodeType
from trainer.nn.graph_facts import GraphFacts, LayerNeed, layer_needs
from trainer.nn.hetero_models import HeteroModel
from trainer.nn.models import BlockModel

Rows = Mapping[NodeType, Tensor]

Blocks = Mapping[EdgeType, Block]


class LayerStack(Protocol):
    """The layers of a model in evaluation. Give your own model one to infer with it over a whole graph."""

    @property
    def needs(self) -> tuple[LayerNeed, ...]:
        """What each layer reads and writes, first layer first."""

    @property
    def needs_degree(self) -> bool:
        """Whether layers want whole-graph in-degrees."""

    def begin(self, batch: HeteroBatch) -> Rows:
        """What the first layer reads, of each of its source types: [n, f], from features and ids."""

    def layer(
        self, number: int, blocks: Blocks, rows: Rows, num_dst: Mapping[NodeType, int], degree: Tensor | None
    ) -> Rows:
        """What the layer after ``number`` (from 0) reads of each target type; logits after the last one."""


class BlockStack:
    """A model of a homogeneous graph."""

    def __init__(self, model: BlockModel):
        self.model, self.needs_degree = model, model.needs_degree
        self.needs = (LayerNeed((HOMO_NODE,), (HOMO_NODE,), (HOMO_EDGE,)),) * len(model.layers)

    def begin(self, batch: HeteroBatch) -> Rows:
        return {HOMO_NODE: batch.x[HOMO_NODE]}

    def layer(
        self, number: int, blocks: Blocks, rows: Rows, num_dst: Mapping[NodeType, int], degree: Tensor | None
    ) -> Rows:
        h = self.model.layers[number](blocks[HOMO_EDGE], rows[HOMO_NODE], degree)
        return {HOMO_NODE: h if number + 1 == len(self.model.layers) else h.relu()}


class HeteroStack:
    """A ``HeteroModel``."""

    needs_degree = False

    def __init__(self, model: HeteroModel, facts: GraphFacts):
        self.model = model
        needs = layer_needs(facts.node_types, facts.edge_types, facts.target, model.shape.num_layers)
        alone = LayerNeed((facts.target,), (facts.target,), ())  # where no edge type ends in the target
        self.needs = tuple(need for need in needs if need.edge_types) or (alone,)

    def begin(self, batch: HeteroBatch) -> Rows:
        return self.model.inputs(batch)  # type: ignore[no-any-return]

    def layer(
        self, number: int, blocks: Blocks, rows: Rows, num_dst: Mapping[NodeType, int], degree: Tensor | None
    ) -> Rows:
        if number < len(self.model.layers):
            rows = self.model.layers[number](blocks, rows, num_dst)
            rows = {of: h.relu() if self.model.shape.relu else h for of, h in rows.items()}
        if number + 1 < len(self.needs):
            return rows
        return {self.model.target: self.model.head(rows[self.model.target])}


def stack_of(model: nn.Module, facts: GraphFacts) -> LayerStack:
    """The layers of a bundled model. Raises ``SettingsError`` for any other."""
    if isinstance(model, BlockModel):
        return BlockStack(model)
    if isinstance(model, HeteroModel):
        return HeteroStack(model, facts)
    raise SettingsError(f"{type(model).__name__} is no bundled model; give a LayerStack of it (trainer/train/stack.py)")
