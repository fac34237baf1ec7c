"""A user's training loop on gnnfleet's partitions: plain PyTorch with torch_geometric batches.

python launch.py --config templates/local.yml -- python examples/train_mine.py --lr 0.01
"""

import argparse

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.nn import GraphSAGE

import gnnfleet as gf


def main() -> None:
    args = argparse.ArgumentParser()
    args.add_argument("--parts", help="partition folder; default under launch.py: the folder of the run")
    args.add_argument("--lr", type=float, default=0.01)
    args.add_argument("--epochs", type=int, default=3)
    args.add_argument("--batch-size", type=int, default=512, help="seeds per step and process")
    options = args.parse_args()
    alone = {} if dist.is_torchelastic_launched() else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)
    graph = gf.open(options.parts)
    torch.manual_seed(0)
    model = DistributedDataParallel(GraphSAGE(graph.num_features, 64, 2, graph.num_classes))
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    train, test = (
        gf.DistNeighborLoader(graph, [10, 5], split, batch_size=options.batch_size, shuffle=split == "train")
        for split in ("train", "test")
    )
    log = gf.StepLog(model, optimizer, train)  # reports loss and progress to the launcher, which detects NaN and stalls
    start = log.restore()  # after `gnnfleet resume`, the position of the last checkpoint; else the first step
    for epoch in range(start.epoch, options.epochs + 1):
        model.train()
        train.set_epoch(epoch - 1, start.first_step(epoch))
        test.set_epoch(epoch - 1)  # the same neighbours after a resume
        sums = torch.zeros(4)  # losses and seeds of training, correct and all seeds of the test
        # the same number of steps on every rank, as DDP requires
        for step, batch in enumerate(train, start.first_step(epoch)):
            out = model(batch.x.float(), batch.edge_index)[: batch.batch_size]
            loss = cross_entropy(out, batch.y[: batch.batch_size])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            log.step(epoch, step, len(train), loss, batch.batch_size)
            sums[:2] += torch.tensor([float(loss.detach()) * batch.batch_size, batch.batch_size])
        model.eval()
        with torch.no_grad():
            for batch in test:
                out = model.module(batch.x.float(), batch.edge_index)[: batch.batch_size]
                sums[2:] += torch.tensor([(out.argmax(1) == batch.y[: batch.batch_size]).sum(), batch.batch_size])
        dist.all_reduce(sums)
        log.epoch(epoch, sums[0] / sums[1].clamp(min=1))  # also saves a checkpoint
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: test accuracy {sums[2] / sums[3]:.4f}")
    dist.barrier()  # keeps the graph server of this node running until the slowest rank is done
    graph.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
