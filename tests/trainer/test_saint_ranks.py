"""Two processes share the work of GraphSAINT's normalisation."""

from __future__ import annotations

import textwrap

import torch

from load_kit import homo_data, parts_of
from partitions import write_store
from train_kit import run_script
from trainer import DistGraphSAINTRandomWalkSampler

SCRIPT = """
    import shutil
    import torch
    import torch.distributed as dist
    import trainer
    from trainer.load import saint_norm
    from trainer.sample.sampler import SubgraphSampler

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    graph, drawn, anew = trainer.open("parts"), [], []
    sample, estimate = SubgraphSampler.sample, saint_norm._estimated
    SubgraphSampler.sample = lambda self, seeds, key: drawn.append(key) or sample(self, seeds, key)
    saint_norm._estimated = lambda *given: anew.append(given) or estimate(*given)

    def made():
        return trainer.DistGraphSAINTRandomWalkSampler(graph, 5, 2, 3, 10, save_dir=f"norm{rank}", log=False)

    norm, shared = made()._norm, len(drawn)
    if rank == 1:
        shutil.rmtree("norm1")  # as on a host that never made it: all make it again, or one would wait for ever
    torch.save((norm.node, norm.edge), f"made{rank}.pt")
    again, after = made()._norm, len(anew)
    kept = made()._norm
    same = torch.equal(norm.node, again.node) and torch.equal(kept.edge, norm.edge)
    dist.barrier()  # both ranks part from each other together
    print(f"rank {rank}: {shared > 0} {after} {len(anew)} {same}\\n", end="", flush=True)
    dist.destroy_process_group()
"""


def test_normalisation_of_two_ranks_is_that_of_one(tmp_path):
    write_store(tmp_path / "parts", parts_of(homo_data(), 2).store)
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    ended = run_script(["script.py"], 2, tmp_path)
    for rank, one in enumerate(ended):
        assert one.returncode == 0 and f"rank {rank}: True 2 2 True" in one.output, one.output
    alone = DistGraphSAINTRandomWalkSampler(homo_data(), 5, 2, 6, 10, log=False)._norm
    for rank in (0, 1):
        node, edge = torch.load(tmp_path / f"made{rank}.pt")
        assert torch.equal(node, alone.node) and torch.equal(edge, alone.edge)
