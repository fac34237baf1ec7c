"""Node classification on a homogeneous graph: torch_geometric's GraphSAGE, wrapped in ``gnnfleet.nn.Trimmed``.

    python -m trainer partition make --dataset synthetic --out parts/synthetic
    python examples/node_classification.py --parts parts/synthetic
    python launch.py --config templates/local.yml --set run.files=[examples] -- python examples/node_classification.py

``Trimmed`` computes in each layer only the rows that later layers use. The test accuracy is that of the weights with
the best validation accuracy.
"""

from __future__ import annotations

import copy
import time

import torch
from common import arguments, divisor, numbers, opened, say, total
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.nn import GraphSAGE

import gnnfleet as gf


def main() -> None:
    options = arguments(__doc__).parse_args()
    with opened(options.parts) as graph:
        train(graph, options)


def train(graph, options, **sampling):
    """Train, and return the model with its best validation weights and its test accuracy.

    ``sampling``: more arguments of ``DistNeighborLoader``.
    """
    fanouts = numbers(options.fanouts)
    gnn = GraphSAGE(graph.num_features, options.hidden, len(fanouts), graph.num_classes, options.dropout)
    model = DistributedDataParallel(gf.nn.Trimmed(gnn))  # each layer computes only rows that later layers use
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    loaders = {
        split: gf.DistNeighborLoader(
            graph, fanouts, split, batch_size=options.batch_size, shuffle=split == "train", **sampling
        )
        for split in ("train", "val", "test")
    }

    def logits(batch):
        batch.x = batch.x.float()
        return model(batch)[: batch.batch_size], batch.y[: batch.batch_size]

    @torch.no_grad()
    def accuracy(split):
        model.eval()
        results = [(out.argmax(1) == y).float() for out, y in map(logits, loaders[split])]
        right, count = total(sum(hit.sum() for hit in results), sum(map(len, results)))
        return right / count

    best, weights = -1.0, None
    for epoch in range(options.epochs):
        model.train()
        begin, loss_sum, seeds = time.monotonic(), 0.0, 0
        for batch in loaders["train"]:
            out, y = logits(batch)
            loss = cross_entropy(out, y, reduction="sum")
            optimizer.zero_grad()
            (loss / divisor(len(y))).backward()
            optimizer.step()
            loss_sum, seeds = loss_sum + loss.item(), seeds + len(y)
        seconds, (loss_sum, seeds) = time.monotonic() - begin, total(loss_sum, seeds)
        val = accuracy("val")
        if val > best:
            best, weights = val, copy.deepcopy(model.state_dict())
        say(f"epoch {epoch + 1}: loss {loss_sum / seeds:.4f}, val accuracy {val:.4f}, {seconds:.1f} s")
    model.load_state_dict(weights)
    test = accuracy("test")
    say(f"test accuracy {test:.4f}")
    return model.module, test


if __name__ == "__main__":
    main()
