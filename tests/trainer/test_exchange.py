"""Tests of ``exchange_rows``, by which ranks fetch rows from each other."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from forked import Forked
from train_kit import environment
from trainer.core.row_exchange import exchange_rows

IDS = torch.arange(7)
DTYPES = (torch.bool, torch.int8, torch.bfloat16, torch.float64, torch.complex64)
SHAPES = ((), (0,), (2, 3))


def table(dtype, shape):
    torch.manual_seed(0)
    return torch.randint(0, 2, (len(IDS), *shape)).to(dtype)


def rank_of_two(rank, folder, then):
    """Run one of two ranks that exchange rows. Rank 0 requests no rows.

    then: what rank 1 does afterwards: exit ("gone") or hang.
    """
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=5)
    )
    own = IDS if rank else IDS[:0]
    for dtype in DTYPES:
        for shape in SHAPES:
            rows = table(dtype, shape)
            found = exchange_rows(own, own % 2, lambda ids, rows=rows: rows[ids])
            assert found.dtype == dtype and torch.equal(found, rows[own])
    (folder / f"rank{rank}").touch()
    if rank == 1:
        time.sleep(0 if then == "gone" else 100)
        os._exit(0)
    with pytest.raises(RuntimeError):
        exchange_rows(IDS, IDS % 2, lambda ids: ids)
    (folder / "noticed").touch()
    os._exit(0)


@pytest.mark.parametrize("then", ["gone", "silent"])
def test_rows_of_any_dtype_and_shape_and_a_lost_peer(tmp_path, then):
    asker, other = (Forked(rank_of_two, (rank, tmp_path, then), environment()) for rank in range(2))
    assert asker.wait(60) == 0, asker.output
    other.kill()
    assert {path.name for path in tmp_path.iterdir()} >= {"rank0", "rank1", "noticed"}


def test_a_single_rank_reads_its_own_rows():
    rows = table(torch.bfloat16, (3,))
    assert torch.equal(exchange_rows(IDS[:0], IDS[:0], lambda ids: rows[ids]), rows[:0])
    assert torch.equal(exchange_rows(IDS.flip(0), IDS * 0, lambda ids: rows[ids]), rows.flip(0))
