"""Tests that two processes share the work of GraphSAINT's normalisation, and that both raise if one of them fails."""

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
from trainer.core.errors import TrainerError
from trainer.loader import graph_saint
from trainer.sampler.subgraph_sampler import SubgraphSampler


def rank_of_two(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    graph, drawn, anew = trainer.open(folder / "parts"), [], []
    sample, estimate = SubgraphSampler.sample, graph_saint._estimate
    SubgraphSampler.sample = lambda self, seeds, key: drawn.append(key) or sample(self, seeds, key)
    graph_saint._estimate = lambda *given: anew.append(given) or estimate(*given)
    kept_in = folder / f"norm{rank}"

    def made():
        return DistGraphSAINTRandomWalkSampler(graph, 5, 2, 3, 10, save_dir=kept_in, log=False)

    norm, shared = made()._norm, len(drawn)
    if rank == 1:
        shutil.rmtree(kept_in)  # as on a new host: both ranks must compute it again, else rank 1 would wait forever
    torch.save((norm.node, norm.edge), folder / f"made{rank}.pt")
    again, after = made()._norm, len(anew)
    kept = made()._norm
    same = torch.equal(norm.node, again.node) and torch.equal(kept.edge, norm.edge)
    dist.barrier()  # end both ranks at the same time
    assert (shared > 0, after, len(anew), same) == (True, 2, 2, True)
    dist.destroy_process_group()


def test_two_ranks_compute_the_normalisation_of_one(tmp_path):
    write_store(tmp_path / "parts", parts_of(homo_data(), 2).store)
    for ended in run_forked(rank_of_two, (tmp_path,), 2):
        assert ended.returncode == 0, ended.output
    alone = DistGraphSAINTRandomWalkSampler(homo_data(), 5, 2, 6, 10, log=False)._norm
    for rank in (0, 1):
        node, edge = torch.load(tmp_path / f"made{rank}.pt")
        assert torch.equal(node, alone.node) and torch.equal(edge, alone.edge)


def rank_with_a_damaged_file(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    graph, kept_in = trainer.open(folder / "parts"), folder / f"norm{rank}"

    def made(save_dir: Path | None = kept_in) -> None:
        DistGraphSAINTRandomWalkSampler(graph, 5, 2, 3, 2, save_dir=save_dir, log=False)

    def error_of(make) -> str:
        try:
            make()
        except (TrainerError, MemoryError) as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    made()
    if rank == 1:
        next(kept_in.iterdir()).write_bytes(b"PK damaged")
    unreadable = error_of(made)
    in_the_way = folder / f"file{rank}"
    if rank == 1:
        in_the_way.write_text("no folder")
    unwritable = error_of(lambda: made(in_the_way))

    def full(self, seeds, key):
        raise MemoryError("no room")

    if rank == 1:
        SubgraphSampler.sample = full
    without_memory = error_of(lambda: made(None))
    print(f"{unreadable}\n{unwritable}\n{without_memory}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def test_an_error_on_one_rank_is_raised_on_all(tmp_path):
    write_store(tmp_path / "parts", parts_of(homo_data(), 2).store)
    first, second = run_forked(rank_with_a_damaged_file, (tmp_path,), 2)
    assert (first.returncode, second.returncode) == (0, 0), first.output + second.output
    others, own = first.output.splitlines()[-3:], second.output.splitlines()[-3:]
    for cause, kind in (("cannot be read", "SettingsError"), ("cannot be written", "SettingsError")):
        assert cause in own[0] and own[0].startswith(kind)
        assert cause in others[0] and others[0].startswith("PeerError: rank 1 (")
        del own[0], others[0]
    assert own == ["MemoryError: no room"] and others[0].startswith("PeerError: rank 1 (") and "no room" in others[0]
