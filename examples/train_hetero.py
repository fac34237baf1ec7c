"""Your own training loop for a heterogeneous graph, in one file: trainable rows, progress, resume within an epoch.

    python -m trainer partition make --dataset synthetic-hetero --out parts/papers
    python examples/train_hetero.py --parts parts/papers
    python launch.py --config templates/heterogeneous.yml -- python examples/train_hetero.py

Node types without features get trainable rows, which are sharded over the processes and have their own optimizer.
"""

import argparse
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
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
    alone = {} if dist.is_torchelastic_launched() else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)
    graph = gf.open(options.parts)
    nodes = graph.manifest.nodes
    target = next(of for of, spec in nodes.items() if spec.splits.get("train"))
    facts = gf.nn.facts_of(graph.manifest, target)
    bare = {of: spec.num_nodes for of, spec in nodes.items() if "x" not in spec.attrs}
    torch.manual_seed(0)  # the same initial weights on all ranks
    # the last layer also has weights for types that the target does not read
    model = DistributedDataParallel(Model(facts, options.hidden), find_unused_parameters=True)
    embedding = gf.nn.ShardedEmbedding(bare, options.hidden)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    row_optimizer = torch.optim.SparseAdam([embedding.weight], lr=0.02)
    loaders = {
        split: gf.DistNeighborLoader(
            graph, [8, 4], (target, split), batch_size=options.batch_size, shuffle=split == "train"
        )
        for split in ("train", "val", "test")
    }

    def scores(network, batch):
        rows = embedding.lookup({of: batch[of].n_id for of in bare})  # collective, as every rank has a batch
        own = batch[target].batch_size
        return network(batch, rows)[:own], batch[target].y[:own]

    @torch.no_grad()
    def accuracy(split) -> float:
        model.eval()
        sums = torch.zeros(2)  # correct seeds, all seeds
        for batch in loaders[split]:
            out, y = scores(model.module, batch)
            sums += torch.tensor([(out.argmax(1) == y).sum(), len(y)])
        dist.all_reduce(sums)
        return float(sums[0] / sums[1])

    train = loaders["train"]
    log = gf.StepLog(model, optimizer, train)
    start = log.restore(embedding=embedding, row_optimizer=row_optimizer)  # continues after `gnnfleet resume`
    for epoch in range(start.epoch, options.epochs + 1):
        model.train()
        sums = torch.zeros(2)  # losses and seeds
        train.set_epoch(epoch - 1, start.first_step(epoch))
        loaders["val"].set_epoch(epoch - 1)  # the same neighbours after a resume
        for step, batch in enumerate(train, start.first_step(epoch)):
            out, y = scores(model, batch)
            loss = cross_entropy(out, y)
            optimizer.zero_grad()
            row_optimizer.zero_grad()
            loss.backward()
            embedding.sync_gradients()
            optimizer.step()
            row_optimizer.step()
            log.step(epoch, step, len(train), loss, len(y))
            sums += torch.tensor([float(loss.detach()) * len(y), len(y)])
        dist.all_reduce(sums)
        val = accuracy("val")
        log.epoch(epoch, sums[0] / sums[1].clamp(min=1), val=val)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: val accuracy {val:.4f}", flush=True)
    test = accuracy("test")
    log.result(test=test)
    if dist.get_rank() == 0:
        print(f"test accuracy {test:.4f}", flush=True)
    log.close()
    dist.barrier()  # the graph server of this node must run until the slowest rank is done
    graph.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
