"""Two processes share the work of GraphSAINT's normalisation."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
import torch.distributed as dist

import trainer
from load_kit import homo_data, parts_of
from partitions import write_store
from train_kit import run_forked
from trainer import DistGraphSAINTRandomWalkSampler
from trainer.loader import graph_saint
from trainer.sampler.subgraph_sampler import SubgraphSampler


def rank_of_two(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    graph, drawn, anew = trainer.open(folder / "parts"), [], []
    sample, estimate = SubgraphSampler.sample, graph_saint._estimated
    SubgraphSampler.sample = lambda self, seeds, key: drawn.append(key) or sample(self, seeds, key)
    graph_saint._estimated = lambda *given: anew.append(given) or estimate(*given)
    kept_in = folder / f"norm{rank}"

    def made():
        return DistGraphSAINTRandomWalkSampler(graph, 5, 2, 3, 10, save_dir=kept_in, log=False)

    norm, shared = made()._norm, len(drawn)
    if rank == 1:
        shutil.rmtree(kept_in)  # as on a host that never made it: all make it again, or one would wait for ever
    torch.save((norm.node, norm.edge), folder / f"made{rank}.pt")
    again, after = made()._norm, len(anew)
    kept = made()._norm
    same = torch.equal(norm.node, again.node) and torch.equal(kept.edge, norm.edge)
    dist.barrier()  # both ranks part from each other together
    assert (shared > 0, after, len(anew), same) == (True, 2, 2, True)
    dist.destroy_process_group()


def test_normalisation_of_two_ranks_is_that_of_one(tmp_path):
    write_store(tmp_path / "parts", parts_of(homo_data(), 2).store)
    for ended in run_forked(rank_of_two, (tmp_path,), 2):
        assert ended.returncode == 0, ended.output
    alone = DistGraphSAINTRandomWalkSampler(homo_data(), 5, 2, 6, 10, log=False)._norm
    for rank in (0, 1):
        node, edge = torch.load(tmp_path / f"made{rank}.pt")
        assert torch.equal(node, alone.node) and torch.equal(edge, alone.edge)
