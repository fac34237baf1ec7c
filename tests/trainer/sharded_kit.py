"""Test kit: trains a toy model on a sharded embedding table, and on one dense table."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from train_kit import run_forked
from trainer.nn.sharded_embedding import ShardedEmbedding, embedding_state, initial_rows, load_embedding_state

NODES = {"author": 23, "field.of-study": 4, "venue": 1}
DIM, STEPS, GLOBAL_BATCH = 5, 6, 12
OPTIMIZERS = {
    "sgd": lambda weights: torch.optim.SGD(weights, lr=0.5),
    "adagrad": lambda weights: torch.optim.Adagrad(weights, lr=0.3),
    "sparse_adam": lambda weights: torch.optim.SparseAdam(weights, lr=0.1),
}


def global_batch(step: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return 12 ids by node type, and one target value per id."""
    # some ids occur twice; only odd steps have an id of type venue
    generator = torch.Generator().manual_seed(step)
    counts = {"author": 8, "field.of-study": 4 - step % 2, "venue": step % 2}
    ids = {of: torch.randint(0, NODES[of], (count,), generator=generator) for of, count in counts.items()}
    return ids, torch.randn(GLOBAL_BATCH, generator=generator)


def own_share(ids: dict[str, torch.Tensor], rank: int, size: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the ids of a rank by node type, and their positions in the global batch. ``size``: number of ranks."""
    # at most two ranks share the batch; a third rank gets no ids
    places = dict(zip(ids, torch.arange(GLOBAL_BATCH).split([len(of) for of in ids.values()]), strict=True))
    sharing = min(size, 2)
    mine = {of: torch.arange(len(place)) % sharing == rank for of, place in places.items()}
    return {of: ids[of][mine[of]] for of in ids}, torch.cat([places[of][mine[of]] for of in ids])


def toy_head() -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(DIM, 1)


def train_dense(optimizer: str, steps: range = range(STEPS)) -> tuple[dict[str, torch.Tensor], list[float]]:
    whole = torch.cat([initial_rows(torch.arange(n).numpy(), DIM, 7, of) for of, n in NODES.items()])
    table, head = nn.Embedding.from_pretrained(whole, freeze=False, sparse=True), toy_head()
    sparse, dense = OPTIMIZERS[optimizer](table.parameters()), torch.optim.SGD(head.parameters(), lr=0.1)
    first = dict(zip(NODES, (0, 23, 27), strict=True))
    losses = []
    for step in steps:
        ids, wanted = global_batch(step)
        out = head(table(torch.cat([of_type + first[of] for of, of_type in ids.items()]))).flatten()
        loss = (out - wanted).square().sum() / GLOBAL_BATCH
        for one in (sparse, dense):
            one.zero_grad()
        loss.backward()
        for one in (sparse, dense):
            one.step()
        losses.append(loss.item())
    return dict(zip(NODES, table.weight.detach().split(list(NODES.values())), strict=True)), losses


def train_sharded(optimizer: str, steps: range, saved: Path | None) -> dict[str, object] | None:
    """Train one rank of a run. Rank 0 returns the content of a checkpoint."""
    embedding = ShardedEmbedding(NODES, DIM, seed=7)
    size, head = embedding.size, toy_head()
    model = DistributedDataParallel(head) if size > 1 else head
    sparse, dense = OPTIMIZERS[optimizer]([embedding.weight]), torch.optim.SGD(head.parameters(), lr=0.1)
    if saved:
        state = torch.load(saved, weights_only=True)
        load_embedding_state(embedding, state["embedding"] if embedding.rank == 0 else None, sparse)
        head.load_state_dict(state["head"])
    losses = []
    for step in steps:
        ids, wanted = global_batch(step)
        mine, places = own_share(ids, embedding.rank, size)
        rows = embedding.lookup(mine)
        out = model(torch.cat([rows[of] for of in mine])).flatten()
        loss = (out - wanted[places]).square().sum() / GLOBAL_BATCH
        for one in (sparse, dense):
            one.zero_grad()
        (loss * size).backward()
        embedding.sync_gradients()
        for one in (sparse, dense):
            one.step()
        total = loss.detach()
        if size > 1:
            dist.all_reduce(total)
        losses.append(total.item())
    state = embedding_state(embedding, sparse)
    return state and {"embedding": state, "head": head.state_dict(), "losses": losses}


def run_sharded(folder: Path, size: int, *runs: tuple[str, range, Path | None]) -> list[dict[str, object]]:
    """Train several runs in turn with ``size`` processes. Return the checkpoint of each.

    runs: (optimizer, steps, checkpoint to resume from or None).
    """
    for ended in run_forked(_rank, (folder, runs), size):
        assert ended.returncode == 0, ended.output
    return [torch.load(folder / f"run{number}.pt", weights_only=True) for number in range(len(runs))]


def _rank(folder: Path, runs: tuple[tuple[str, range, Path | None], ...]) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    for number, run in enumerate(runs):
        result = train_sharded(*run)
        if result is not None:
            torch.save(result, folder / f"run{number}.pt")
    dist.barrier()
    dist.destroy_process_group()
