"""Tests that small models train as with DistributedDataParallel, although they do not use it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ports import free_port
from train_kit import rank_environment, run_script
from waiting import DEADLINE

TRAIN = """
import os, sys, torch, torch.distributed as dist
from torch import nn
from trainer.core.ranks import RankGroup, Ranks
from trainer.train.optimize import Optimizers, averaged, eager

def trained(ours):
    torch.manual_seed(1 + ours * dist.get_rank())  # all ranks start from rank 0's weights
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    if ours:
        wrapped, average = averaged(model, RankGroup(Ranks.from_env(os.environ), torch.device("cpu")))
    else:
        wrapped, average = nn.parallel.DistributedDataParallel(model), None
    kind = eager(torch.optim.Adam) if ours else torch.optim.Adam
    optimizers = Optimizers(kind(model.parameters(), lr=0.01, weight_decay=1e-3), average=average)
    torch.manual_seed(10 + dist.get_rank())
    for _ in range(10):
        x = torch.randn(32, 8)
        optimizers.step(nn.functional.cross_entropy(wrapped(x), x[:, :3].argmax(1)))
    optimizers.model.state_dict()
    return nn.utils.parameters_to_vector(model.parameters())

dist.init_process_group("gloo")
ours = trained(True)
assert "alone" not in sys.argv or "torch._dynamo" not in sys.modules, "torch._dynamo was imported"
assert torch.equal(ours, trained(False))
"""


def test_small_models_train_as_with_ddp(tmp_path: Path) -> None:
    for ended in run_script(["-c", TRAIN], 2, tmp_path):
        assert ended.returncode == 0, ended.output


@pytest.mark.slow  # two processes import torch and torch._dynamo
def test_averaging_does_not_import_the_compiler() -> None:
    port = free_port()
    argv = [sys.executable, "-c", TRAIN, "alone"]
    ranks = [
        subprocess.Popen(argv, env={**os.environ, **rank_environment(rank, 2, port)}, stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    for process in ranks:
        _, errors = process.communicate(timeout=DEADLINE)
        assert process.returncode == 0, errors.decode()
