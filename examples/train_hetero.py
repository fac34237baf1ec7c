"""Your own training loop for a heterogeneous graph, in one file: trainable rows, progress, resume within an epoch.

    python -m trainer partition make --dataset synthetic-hetero --out parts/papers
    python examples/train_hetero.py --parts parts/papers
    python launch.py --config templates/heterogeneous.yml -- python examples/train_hetero.py

Node types without features get trainable rows, which are sharded over the processes and have their own optimizer.
"""

import argparse
import warnings

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch_geometric.nn import HeteroConv, SAGEConv
from torch_geometric.nn.module_dict import ModuleDict

import gnnfleet as gf


class Model(nn.Module):
    """A linear layer per node type with features, two HeteroConv layers, and a linear output layer."""

    def __init__(self, facts, hidden):
        super().__init__()
        self.target = facts.target
        self.lins = ModuleDict({of: nn.Linear(width, hidden) for of, width in facts.in_dims.items()})
        self.convs = nn.ModuleList(
            HeteroConv({of: SAGEConv(hidden, hidden) for of in facts.edge_types}) for _ in range(2)
        )
        self.head = nn.Linear(hidden, facts.num_classes)

    def forward(self, batch, rows):
        x = {of: lin(batch[of].x.float()).relu() for of, lin in self.lins.items()} | rows
        for conv in self.convs:
            new = conv(x, batch.edge_index_dict)
            x = {of: new[of].relu() + h if of in new else h for of, h in x.items()}
        return self.head(x[self.target])


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parts", help="partition folder; default under launch.py: the folder of the run")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=256, help="seeds per step and process")
    parser.add_argument("--hidden", type=int, default=64)
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    warnings.filterwarnings("ignore", "There exist node types")  # not every type is the target of an edge type
    with gf.run(options.parts) as run:
        nodes = run.graph.manifest.nodes
        target = next(of for of, spec in nodes.items() if spec.splits.get("train"))
        facts = gf.nn.facts_of(run.graph.manifest, target)
        bare = {of: spec.num_nodes for of, spec in nodes.items() if "x" not in spec.attrs}
        model = run.model(Model(facts, options.hidden))
        embedding = gf.nn.ShardedEmbedding(bare, options.hidden, device=run.device)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
        row_optimizer = torch.optim.SparseAdam([embedding.weight], lr=0.02)
        train, val, test = (
            gf.DistNeighborLoader(
                run.graph, [8, 4], (target, split), batch_size=options.batch_size, shuffle=split == "train"
            )
            for split in ("train", "val", "test")
        )

        def scores(batch):
            rows = embedding.lookup({of: batch[of].n_id for of in bare})  # collective, as every rank has a batch
            own = batch[target].batch_size
            return model(batch, rows)[:own], batch[target].y[:own]

        kept = {"optimizer": optimizer, "embedding": embedding, "row_optimizer": row_optimizer}
        for _ in run.epochs(options.epochs, **kept):  # continues after `gnnfleet resume`
            for batch in run.train(train):
                out, y = scores(batch)
                optimizer.zero_grad()
                row_optimizer.zero_grad()
                run.backward(cross_entropy(out, y))  # of the model and of the rows, over all processes
                optimizer.step()
                row_optimizer.step()
            for batch in run.evaluate(val):
                out, y = scores(batch)
                run.score(val=out.argmax(1) == y)
        for batch in run.evaluate(test):  # with the best weights and rows
            out, y = scores(batch)
            run.score(test=out.argmax(1) == y)


if __name__ == "__main__":
    main()
