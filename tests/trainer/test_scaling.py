"""Tests of the model in docs/scaling.md, which predicts seconds per epoch."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(
    str(Path(__file__).resolve().parents[2] / "benchmarks")
)  # appended, because benchmarks also has a graphs.py

from scaling.model import Hardware, HostFigures, Measured, predict

HOST = HostFigures(
    rank_cpu=70.0, server_cpu=10.0, network_bytes=0, remote_bytes=0, rows=0, remote_rows=0, cached_rows=0, held_rows=0,
    steps=10,
)  # fmt: skip
#: 8 s of CPU per step on 8 usable cores, 100 MB/s, 10 ms per round trip.
PLAIN = Hardware(cores=16, efficiency=0.5, gbit=1.0, usable=0.8, latency=0.01)


def run(*cpu: float, remote: float = 0.0, weights: float = 0.0) -> Measured:
    hosts = tuple(HostFigures(**{**vars(HOST), "rank_cpu": each - 10, "remote_bytes": remote}) for each in cpu)
    return Measured(hosts, alone_cpu=sum(cpu), edges=0, rows=0, weight_bytes=weights)


@pytest.mark.parametrize(
    ("measured", "seconds"),
    [
        pytest.param(run(80), 10 * 1.0, id="one host computes"),
        pytest.param(run(40, 20), 10 * (0.5 + 0.01), id="the slowest of two is waited for"),
        pytest.param(run(80, 80, remote=900e6), 10 * (1.0 + 0.01), id="rows are hidden behind computing"),
        pytest.param(run(80, 80, remote=1500e6), 10 * (1.51 + 0.01), id="more of them are not"),
        pytest.param(run(80, 80, weights=100e6), 10 * (1.0 + 1.0 + 0.01), id="gradients cross the line once"),
        pytest.param(run(*[80] * 4, weights=100e6), 10 * (1.0 + 1.5 + 0.03), id="or nearly twice"),
    ],
)
def test_seconds_of_an_epoch(measured: Measured, seconds: float) -> None:
    assert predict(measured, PLAIN).epoch == pytest.approx(seconds)
