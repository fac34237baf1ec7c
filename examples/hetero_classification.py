"""Node classification on a heterogeneous graph: torch_geometric's HeteroConv, and rows for nodes without features.

    python -m trainer partition make --dataset synthetic-hetero --out parts/papers
    python examples/hetero_classification.py --parts parts/papers
    python launch.py --config templates/heterogeneous.yml -- python examples/hetero_classification.py

Nodes without features get trainable rows. The rows are sharded over the ranks: each step fetches the rows of its batch
and sends their gradients back. All other parameters are in the model; DistributedDataParallel averages their gradients.
"""

from __future__ import annotations

import time
import warnings

import torch
from common import arguments, divisor, numbers, opened, say, total
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
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
    with opened(options.parts) as graph:
        train(graph, options)


def train(graph, options) -> None:
    nodes = graph.manifest.nodes
    target = options.target or next(of for of, spec in nodes.items() if spec.splits.get("train"))
    fanouts, facts = numbers(options.fanouts), gf.nn.facts_of(graph.manifest, target)
    needs = gf.nn.layer_needs(facts.node_types, facts.edge_types, target, len(fanouts))  # types per layer
    bare = {of: nodes[of].num_nodes for of in needs[0].sources if "x" not in nodes[of].attrs}
    embedding = gf.nn.ShardedEmbedding(bare, options.hidden)
    model = DistributedDataParallel(Model(facts, needs, options.hidden, options.dropout))
    optimizers = [torch.optim.Adam(model.parameters(), lr=options.lr)]
    optimizers += [torch.optim.SparseAdam([embedding.weight], lr=options.embedding_lr)] if bare else []
    loaders = {
        split: gf.DistNeighborLoader(
            graph, fanouts, (target, split), batch_size=options.batch_size, shuffle=split == "train"
        )
        for split in ("train", "val", "test")
    }

    def logits(batch):
        rows = embedding.lookup({of: batch[of].n_id for of in bare})
        own = batch[target].batch_size
        return model(batch, rows)[:own], batch[target].y[:own]

    @torch.no_grad()
    def accuracy(split):
        model.eval()
        results = [(out.argmax(1) == y).float() for out, y in map(logits, loaders[split])]
        right, count = total(sum(hit.sum() for hit in results), sum(map(len, results)))
        return right / count

    for epoch in range(options.epochs):
        model.train()
        begin, loss_sum, seeds = time.monotonic(), 0.0, 0
        for batch in loaders["train"]:
            out, y = logits(batch)
            loss = cross_entropy(out, y, reduction="sum")
            for optimizer in optimizers:
                optimizer.zero_grad()
            (loss / divisor(len(y))).backward()
            embedding.sync_gradients()
            for optimizer in optimizers:
                optimizer.step()
            loss_sum, seeds = loss_sum + loss.item(), seeds + len(y)
        seconds = time.monotonic() - begin
        loss_sum, seeds = total(loss_sum, seeds)
        say(f"epoch {epoch + 1}: loss {loss_sum / seeds:.4f}, val accuracy {accuracy('val'):.4f}, {seconds:.1f} s")
    say(f"test accuracy {accuracy('test'):.4f}")


if __name__ == "__main__":
    main()
