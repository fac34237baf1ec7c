"""Helpers of the examples: opening the graph on all ranks, sums over ranks, the command line.

List it in run.files when launching: --set run.files=[examples], or as in templates/heterogeneous.yml.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

import gnnfleet as gf


def arguments(description: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """Parse ``--parts`` and the options that most examples have; ``defaults``: the example's default values."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--parts", help="partition folder; default under launch.py: the folder of the run")
    known = {"epochs": 3, "batch_size": 512, "lr": 0.005, "hidden": 64, "fanouts": "10,5", "dropout": 0.2} | defaults
    for name, default in known.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default, help=f"{default}")
    return parser


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


@contextmanager
def opened(parts: str | None) -> Iterator[Any]:
    """Open the graph and torch.distributed over all ranks; without a launcher the process group has one rank."""
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)
    torch.manual_seed(0)
    with gf.open(parts) as graph:
        yield graph
        dist.barrier()  # the graph server of this node must run until the slowest rank is done
    dist.destroy_process_group()


def total(*values: Any) -> list[float]:
    """Return the sum of each value over all ranks."""
    sums = torch.tensor([float(value) for value in values], dtype=torch.float64)
    dist.all_reduce(sums)
    return sums.tolist()  # type: ignore[no-any-return]


def divisor(seeds: int) -> float:
    """Return the divisor of this rank's summed loss with which DDP's mean over ranks is the global batch's mean."""
    return total(seeds)[0] / dist.get_world_size()


def say(text: str) -> None:
    """Print on rank 0 only."""
    if dist.get_rank() == 0:
        print(text, flush=True)
