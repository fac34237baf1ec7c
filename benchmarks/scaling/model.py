"""Seconds per epoch on real hosts, from CPU seconds and bytes measured on one machine; docs/scaling.md explains it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class HostFigures:
    """One host's, per epoch: means over the epochs after the first."""

    rank_cpu: float  #: seconds
    server_cpu: float
    line_bytes: float  #: received over its line; 0 on loopback
    remote_bytes: float  #: received rows and what belongs to them
    rows: float
    remote_rows: float
    cached_rows: float
    held_rows: float
    steps: float

    @property
    def cpu(self) -> float:
        return self.rank_cpu + self.server_cpu


@dataclass(frozen=True)
class Hardware:
    """What the hosts are supposed to be."""

    cores: int = 16
    efficiency: float = 0.5  #: of all cores, against as many times one
    gbit: float = 10.0  #: of a host's line, each way
    usable: float = 0.9  #: of that, for what is sent
    latency: float = 100e-6  #: seconds of a round trip, a server's waking up included
    threads: int = 1  #: sampler threads, each waits for one batch's rows

    @property
    def bytes_per_s(self) -> float:
        return self.gbit * 1e9 / 8 * self.usable

    @property
    def name(self) -> str:
        return f"{self.cores} cores, {self.gbit:g} Gbit/s"


@dataclass(frozen=True)
class Measured:
    """A run on so many hosts of one machine, and the same batches in one process."""

    hosts: tuple[HostFigures, ...]
    alone_cpu: float  #: seconds of an epoch
    edges: float  #: sampled in an epoch, over all hosts and layers
    rows: float  #: gathered
    weight_bytes: float

    @property
    def cpu(self) -> float:
        return sum(host.cpu for host in self.hosts)

    def sum(self, name: str) -> float:
        """Of a field of all hosts."""
        return float(sum(getattr(host, name) for host in self.hosts))

    @property
    def reduced_bytes(self) -> float:
        """Received by all hosts for gradients, in a ring."""
        return 2 * (len(self.hosts) - 1) * self.weight_bytes * self.hosts[0].steps

    @classmethod
    def load(cls, fields: dict[str, Any]) -> Measured:
        """From ``asdict``."""
        return cls(**{**fields, "hosts": tuple(HostFigures(**host) for host in fields["hosts"])})


@dataclass(frozen=True)
class Prediction:
    """Seconds of a step."""

    compute: float
    exposed: float  #: waiting for rows that computing does not hide
    reduce: float
    steps: float

    @property
    def epoch(self) -> float:
        return self.steps * (self.compute + self.exposed + self.reduce)


def predict(measured: Measured, on: Hardware) -> Prediction:
    """All hosts wait for the slowest in each step."""
    hosts, count = measured.hosts, len(measured.hosts)
    return Prediction(
        compute=max(_compute(host, on) for host in hosts),
        exposed=max(0.0, max(_remote(host, on) / on.threads - _compute(host, on) for host in hosts)),
        reduce=_reduce(measured.weight_bytes, count, on),
        steps=hosts[0].steps,
    )


def _compute(host: HostFigures, on: Hardware) -> float:
    return host.cpu / host.steps / (on.cores * on.efficiency)


def _remote(host: HostFigures, on: Hardware) -> float:
    """Owners are asked side by side, once per batch, as all edges are here."""
    return host.remote_bytes / host.steps / on.bytes_per_s + (on.latency if host.remote_bytes else 0.0)


def _reduce(weight_bytes: float, count: int, on: Hardware) -> float:
    """A ring: each host passes on 2 (p - 1) pieces of a p-th of the gradients."""
    pieces = 2 * (count - 1)
    return pieces * (weight_bytes / count / on.bytes_per_s + on.latency / 2)


def table(runs: Sequence[Measured], on: Hardware) -> list[str]:
    """Markdown."""
    first = predict(runs[0], on).epoch
    lines = [f"| hosts of {on.name} | compute ms | exposed ms | all-reduce ms | s per epoch | times faster |"]
    lines += ["|---|---|---|---|---|---|"]
    for run in runs:
        told = predict(run, on)
        parts = " | ".join(f"{1000 * part:.2f}" for part in (told.compute, told.exposed, told.reduce))
        lines.append(f"| {len(run.hosts)} | {parts} | {told.epoch:.3f} | {first / told.epoch:.2f} |")
    return lines
