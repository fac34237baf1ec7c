"""A user's training loop on gnnfleet's partitions: plain PyTorch with torch_geometric batches.

python launch.py --config templates/local.yml -- python examples/train_mine.py --lr 0.01
"""

import argparse

import torch
from torch.nn.functional import cross_entropy
from torch_geometric.nn import GraphSAGE

import gnnfleet as gf


def main() -> None:
    args = argparse.ArgumentParser()
    args.add_argument("--parts", help="partition folder; default under launch.py: the folder of the run")
    args.add_argument("--lr", type=float, default=0.01)
    args.add_argument("--epochs", type=int, default=3)
    args.add_argument("--batch-size", type=int, default=512, help="seeds per step and process")
    options = args.parse_args()
    with gf.run(options.parts) as run:  # all processes, their devices and the graph
        model = run.model(GraphSAGE(run.graph.num_features, 64, 2, run.graph.num_classes))
        optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
        train, val, test = (
            gf.DistNeighborLoader(run.graph, [10, 5], split, batch_size=options.batch_size, shuffle=split == "train")
            for split in ("train", "val", "test")
        )
        for _ in run.epochs(options.epochs, optimizer=optimizer):  # continues after `gnnfleet resume`
            for batch in run.train(train):
                out = model(batch.x.float(), batch.edge_index)[: batch.batch_size]
                loss = cross_entropy(out, batch.y[: batch.batch_size])
                optimizer.zero_grad()
                run.backward(loss)  # averages gradients over all processes
                optimizer.step()
            for batch in run.evaluate(val):
                out = model(batch.x.float(), batch.edge_index)[: batch.batch_size]
                run.score(val=out.argmax(1) == batch.y[: batch.batch_size])
        for batch in run.evaluate(test):  # with the best weights
            out = model(batch.x.float(), batch.edge_index)[: batch.batch_size]
            run.score(test=out.argmax(1) == batch.y[: batch.batch_size])


if __name__ == "__main__":
    main()
