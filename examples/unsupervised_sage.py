"""Unsupervised GraphSAGE: trains embeddings that are similar for neighbours, then a linear classifier on them.

    python -m trainer partition make --dataset synthetic --out parts/synthetic
    python examples/unsupervised_sage.py --parts parts/synthetic

Only the classifier uses labels. Positive pairs are the edges of the graph; each has one random negative pair.
"""

from __future__ import annotations

import time

import torch
from common import arguments, divisor, numbers, opened, say, total
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.nn import GraphSAGE

import gnnfleet as gf


def main() -> None:
    options = arguments(__doc__, batch_size=1024, epochs=2, temperature=0.2, links=1 << 20).parse_args()
    with opened(options.parts) as graph:
        model = learn(graph, options)
        classify(graph, options, model)


def learn(graph, options):
    fanouts = numbers(options.fanouts)
    gnn = GraphSAGE(graph.num_features, options.hidden, len(fanouts))
    model, loss_of = DistributedDataParallel(gf.nn.Trimmed(gnn)), gf.nn.UnsupervisedLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    links = gf.DistLinkNeighborLoader(
        graph, fanouts, neg_sampling="binary", exclude="both", attrs=["x"], batch_size=options.batch_size, shuffle=True
    )
    steps = min(len(links), -(-options.links // links.order.global_batch))
    for epoch in range(options.epochs):
        begin, loss_sum, count = time.monotonic(), 0.0, 0
        for _, batch in zip(range(steps), links, strict=False):
            batch.x = batch.x.float()
            rows = normalize(model(batch)) / options.temperature**0.5
            positives = int(batch.edge_label.sum())
            loss = loss_of.binary(rows, batch.edge_label_index, batch.edge_label) * positives
            optimizer.zero_grad()
            (loss / divisor(positives)).backward()
            optimizer.step()
            loss_sum, count = loss_sum + loss.item(), count + positives
        seconds, (loss_sum, count) = time.monotonic() - begin, total(loss_sum, count)
        say(f"epoch {epoch + 1}: loss {loss_sum / count:.4f}, {seconds:.1f} s")
    return model.module.eval()


def classify(graph, options, model) -> None:
    """Print the test accuracies of logistic regression on the input features and on the encoder's output."""
    embedded, plain = {}, {}
    for split in ("train", "test"):
        batches = gf.DistNeighborLoader(graph, numbers(options.fanouts), split, attrs=["x", "y"], batch_size=2048)
        embedded[split], plain[split] = rows_of(model, batches)
    say(f"features alone: test accuracy {linear_probe(plain, graph):.4f}")
    say(f"unsupervised rows: test accuracy {linear_probe(embedded, graph):.4f}")


@torch.no_grad()
def rows_of(model, batches):
    """Return (output of the encoder, labels) and (input features, labels) of this rank's seeds."""
    rows, x, y = [], [], []
    for batch in batches:
        batch.x, own = batch.x.float(), batch.batch_size
        rows.append(normalize(model(batch)[:own]))
        x.append(batch.x[:own])
        y.append(batch.y[:own])
    return (torch.cat(rows), torch.cat(y)), (torch.cat(x), torch.cat(y))


def linear_probe(splits, graph) -> float:
    (x, y), (test_x, test_y) = splits["train"], splits["test"]
    width = graph.num_features
    layers = nn.Sequential(nn.BatchNorm1d(width, affine=False), nn.Linear(width, graph.num_classes))
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05, weight_decay=1e-5)
    for _ in range(100):  # full batch: the rows are computed once
        optimizer.zero_grad()
        (cross_entropy(model(x), y, reduction="sum") / divisor(len(y))).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        right, count = total((model(test_x).argmax(1) == test_y).sum(), len(test_y))
    return right / count


if __name__ == "__main__":
    main()
