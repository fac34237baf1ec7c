"""Lower bounds of times on this machine, from its rates of copying and of matrix products."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from graphs import PEER_SIZES

WIDTH = 100  #: features per node; the small graph has fewer, so its lower bounds are wrong


@dataclass(frozen=True)
class Machine:
    """Rates of this machine, measured with all cores."""

    bytes_per_s: float  #: bytes read and written per second while copying 256 MB
    flops: float  #: operations per second of a float32 matrix product [65536, 256] × [256, 256]
    cores: int

    def describe(self) -> str:
        memory, product = self.bytes_per_s / 1e9, self.flops / 1e9
        return f"{self.cores} cores; memory {memory:.1f} GB/s (copy), {product:.0f} GFLOP/s (GEMM)"

    def loading(self, edges: int, nodes: int) -> float:
        """Return a lower bound of the seconds to load an epoch, from the bytes that must be read and written."""
        return (8 * edges + 2 * 4 * WIDTH * nodes) / self.bytes_per_s

    def training(self, layers: list[list[int]], hidden: int, classes: int) -> float:
        """Return a lower bound of the seconds to train an epoch.

        layers: [targets, sources, edges] of each layer in an epoch, input layer first.
        """
        flops = moved = 0.0
        widths = [WIDTH, *[hidden] * (len(layers) - 1), classes]
        for layer, (targets, _, edges) in enumerate(layers):
            times = 2 if layer == 0 else 3  # the features need no gradient
            flops += times * 2 * 2 * targets * widths[layer] * widths[layer + 1]
            moved += (2 if layer else 1) * edges * 4 * min(widths[layer], widths[layer + 1])
        return flops / self.flops + moved / self.bytes_per_s

    def writing(self, size: str) -> float:
        """Return a lower bound of the seconds to partition, from the bytes that must be read and written."""
        nodes, edges = PEER_SIZES[size]["num_nodes"], PEER_SIZES[size]["num_nodes"] * PEER_SIZES[size]["avg_degree"]
        return (2 * 8 * edges + 2 * 4 * WIDTH * nodes) / self.bytes_per_s


def measured() -> Machine:
    source, target = np.ones(64 << 20, np.float32), np.empty(64 << 20, np.float32)
    a, b = torch.ones(1 << 16, 256), torch.ones(256, 256)
    copy = min(_seconds(lambda: np.copyto(target, source)) for _ in range(5))
    product = min(_seconds(lambda: a @ b) for _ in range(5))
    return Machine(2 * source.nbytes / copy, 2 * len(a) * 256 * 256 / product, os.cpu_count() or 1)


def _seconds(work: Any) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun
