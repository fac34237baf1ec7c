"""Measures a training step of heterogeneous models on blocks, compared with torch_geometric's layers."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.data import HeteroData

from table import Row
from trainer.core.batch import HeteroBatch
from trainer.core.schema import EdgeType
from trainer.graph.in_memory import as_graph
from trainer.graph.seed_order import RankLayout
from trainer.loader.block_loader import BatchLoader, LoaderSettings
from trainer.nn.graph_facts import GraphFacts, facts_of
from trainer.nn.hetero_layers import NodeTensors
from trainer.nn.kernels.spmm import edge_targets
from trainer.nn.models import build_model
from trainer.train.settings import TrainSettings

WIDTH, HIDDEN, HEADS, CLASSES = 64, 128, 4, 16
FANOUTS = (6, 4)
RELATIONS = (
    ("author", "writes", "paper"), ("paper", "by", "author"), ("paper", "cites", "paper"), ("paper", "cited", "paper"),
    ("topic", "of", "paper"), ("paper", "in", "topic"), ("school", "has", "author"), ("author", "at", "school"),
)  # fmt: skip


def typed_step(model: str, small: bool) -> Row:
    facts, batch = typed_batch(4_000 if small else 200_000, 32 if small else 512)
    settings = TrainSettings(model=model, hidden=HIDDEN, heads=HEADS, fanouts=FANOUTS, dropout=0.0)  # type: ignore[arg-type]
    ours, theirs = least(build_model(settings, facts), batch), least(Reference(model, facts), batch)
    return Row(f"{model}: step on blocks", ours, "s", "torch_geometric's layer, same batch", theirs)


def typed_batch(num_papers: int, seeds: int) -> tuple[GraphFacts, HeteroBatch]:
    counts = {"paper": num_papers, "author": num_papers * 3 // 4, "topic": num_papers // 40, "school": num_papers // 40}
    data, rng = HeteroData(), torch.Generator().manual_seed(0)
    for of, count in counts.items():
        data[of].x = torch.randn(count, WIDTH, generator=rng)
    for of in RELATIONS:
        ends = [torch.randint(0, counts[end], (8 * counts[of[2]],), generator=rng) for end in of[::2]]
        data[of].edge_index = torch.stack(ends)
    data["paper"].y = torch.randint(0, CLASSES, (num_papers,), generator=rng)
    data["paper"].train_mask = torch.arange(num_papers) < seeds
    graph = as_graph(data)
    loader = BatchLoader(graph, LoaderSettings("train", FANOUTS, seeds, target="paper"), 0, RankLayout.single(1))
    (batch,) = loader.epoch(1)
    return facts_of(graph.manifest, "paper"), batch


class Reference(nn.Module):
    """A model of torch_geometric's layers, each applied to all edges of the batch."""

    def __init__(self, name: str, facts: GraphFacts):
        super().__init__()
        self.name, self.facts = name, facts
        self.lins = nn.ModuleDict({of: nn.Linear(dim, HIDDEN) for of, dim in facts.in_dims.items()})
        self.convs = nn.ModuleList(self._conv() for _ in FANOUTS)
        self.head = nn.Linear(HIDDEN, facts.num_classes)

    def _conv(self) -> nn.Module:
        edge_types = list(self.facts.edge_types)
        make: dict[str, Callable[[], nn.Module]] = {
            "rgcn": lambda: pyg.RGCNConv(HIDDEN, HIDDEN, len(edge_types)),
            "rsage": lambda: pyg.HeteroConv({of: pyg.SAGEConv(HIDDEN, HIDDEN) for of in edge_types}),
            "hgt": lambda: pyg.HGTConv(HIDDEN, HIDDEN, (list(self.facts.node_types), edge_types), HEADS),
        }
        return make[self.name]()

    def forward(self, batch: HeteroBatch) -> Tensor:
        rows = {of: lin(batch.x[of]).relu() for of, lin in self.lins.items()}
        edges = {of: torch.stack([block.indices.long(), edge_targets(block)]) for of, block in batch.blocks[0].items()}
        for conv in self.convs:
            rows = self._joined(conv, rows, edges) if self.name == "rgcn" else conv(rows, edges)
            rows = rows if self.name == "hgt" else {of: h.relu() for of, h in rows.items()}
        return self.head(rows[batch.target][: batch.num_seeds])  # type: ignore[no-any-return]

    def _joined(self, conv: nn.Module, rows: NodeTensors, edges: dict[EdgeType, Tensor]) -> NodeTensors:
        # ``RGCNConv`` accepts only one array, so the rows of all node types are joined
        sizes = [len(h) for h in rows.values()]
        first = dict(zip(rows, [0, *torch.tensor(sizes).cumsum(0).tolist()], strict=False))
        index = [edge + torch.tensor([[first[of[0]]], [first[of[2]]]]) for of, edge in edges.items()]
        number = [torch.full((edge.shape[1],), place) for place, edge in enumerate(edges.values())]
        out = conv(torch.cat(list(rows.values())), torch.cat(index, 1), torch.cat(number))
        return dict(zip(rows, out.split(sizes), strict=True))


def least(model: nn.Module, batch: HeteroBatch, repeats: int = 4) -> float:
    optimizer = torch.optim.Adam(model.parameters())
    seconds = []
    for _ in range(repeats):
        begun = time.perf_counter()
        loss = functional.cross_entropy(model(batch), batch.y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - begun)
    return min(seconds)
