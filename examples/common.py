"""Functions that the examples share: command-line options, opening the graph on all ranks, sums over ranks.

A launch must copy this file to all nodes: --set run.files=[examples], or the same key in the config file, as in
templates/heterogeneous.yml.
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
    """Return a parser of ``--parts`` and the options that most examples have.

    defaults: default values of options, by name. A name that is not a common option defines a new option.
    """
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
    """Join the process group of all ranks, open the graph and yield it. Without a launcher the group has one rank."""
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)
    torch.manual_seed(0)
    with gf.open(parts) as graph:
        yield graph
        dist.barrier()  # keeps the graph server of this node running until the slowest rank is done
    dist.destroy_process_group()


def total(*values: Any) -> list[float]:
    """Return the sum of each value over all ranks."""
    sums = torch.tensor([float(value) for value in values], dtype=torch.float64)
    dist.all_reduce(sums)
    return sums.tolist()  # type: ignore[no-any-return]


def divisor(seeds: int) -> float:
    """Return the number by which a rank divides its summed loss before ``backward``.

    DistributedDataParallel averages gradients over ranks. With this divisor, the average is the gradient of the mean
    loss of the global batch.
    """
    return total(seeds)[0] / dist.get_world_size()


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)
