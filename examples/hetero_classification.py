"""Node classification on a heterogeneous graph: torch_geometric's HeteroConv, and rows for nodes without features.

    python -m trainer partition make --dataset synthetic-hetero --out parts/papers
    python examples/hetero_classification.py --parts parts/papers
    python launch.py --config templates/heterogeneous.yml -- python examples/hetero_classification.py

Nodes without features get trainable rows. The rows are sharded over the ranks: each step fetches the rows of its batch
and sends their gradients back. All other parameters are in the model.
"""

from __future__ import annotations

import warnings

import torch
from common import arguments, numbers
from torch import nn
from torch.nn.functional import cross_entropy
from torch_geometric.nn import HeteroConv, SAGEConv
from torch_geometric.nn.module_dict import ModuleDict

import gnnfleet as gf


class Model(nn.Module):
    """A linear layer per node type with features, a HeteroConv per hop, and a linear output layer."""

    def __init__(self, facts, needs, hidden, dropout):
        super().__init__()
        self.target = facts.target
        self.lins = ModuleDict({of: nn.Linear(width, hidden) for of, width in facts.in_dims.items()})
        warnings.filterwarnings("ignore", "There exist node types")  # the last layers do not update all types
        convs = [HeteroConv({of: SAGEConv(hidden, hidden) for of in need.edge_types}) for need in needs]
        self.gnn = gf.nn.TrimmedHetero(convs, facts.target, dropout=dropout)
        self.head = nn.Linear(hidden, facts.num_classes)

    def forward(self, batch, rows):
        x = {of: lin(batch[of].x.float()).relu() for of, lin in self.lins.items()} | rows
        return self.head(self.gnn(batch, x)[self.target].relu())


def main() -> None:
    options = arguments(__doc__, target="", embedding_lr=0.02).parse_args()
    with gf.run(options.parts) as run:
        train(run, options)


def train(run, options) -> None:
    nodes = run.graph.manifest.nodes
    target = options.target or next(of for of, spec in nodes.items() if spec.splits.get("train"))
    fanouts, facts = numbers(options.fanouts), gf.nn.facts_of(run.graph.manifest, target)
    needs = gf.nn.layer_needs(facts.node_types, facts.edge_types, target, len(fanouts))  # types per layer
    bare = {of: nodes[of].num_nodes for of in needs[0].sources if "x" not in nodes[of].attrs}
    model = run.model(Model(facts, needs, options.hidden, options.dropout))
    embedding = gf.nn.ShardedEmbedding(bare, options.hidden, device=run.device)
    optimizers = {"optimizer": torch.optim.Adam(model.parameters(), lr=options.lr)}
    if bare:
        optimizers["row_optimizer"] = torch.optim.SparseAdam([embedding.weight], lr=options.embedding_lr)
    loaders = {
        split: gf.DistNeighborLoader(
            run.graph, fanouts, (target, split), batch_size=options.batch_size, shuffle=split == "train"
        )
        for split in ("train", "val", "test")
    }

    def logits(batch):
        rows = embedding.lookup({of: batch[of].n_id for of in bare})
        own = batch[target].batch_size
        return model(batch, rows)[:own], batch[target].y[:own]

    def score(split):
        for batch in run.evaluate(loaders[split]):
            out, y = logits(batch)
            run.score(**{split: out.argmax(1) == y})

    for _ in run.epochs(options.epochs, embedding=embedding, **optimizers):
        for batch in run.train(loaders["train"]):
            loss = cross_entropy(*logits(batch))
            for optimizer in optimizers.values():
                optimizer.zero_grad()
            run.backward(loss)
            for optimizer in optimizers.values():
                optimizer.step()
        score("val")
    score("test")


if __name__ == "__main__":
    main()
