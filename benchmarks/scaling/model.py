"""Predicts seconds per epoch on real hosts from measurements on one machine; docs/scaling.md explains the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class HostFigures:
    """Measurements of one simulated host, per epoch: means over all epochs except the first."""

    rank_cpu: float  #: CPU seconds of the training process
    server_cpu: float
    network_bytes: float  #: bytes that the host received from the network; 0 on loopback
    remote_bytes: float  #: bytes received in replies to requests for rows
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
    cores: int = 16
    efficiency: float = 0.5  #: speed of all cores / (number of cores * speed of one core)
    gbit: float = 10.0  #: Gbit/s of a host's network connection, in each direction
    usable: float = 0.9  #: share of ``gbit`` that is left for payload
    latency: float = 100e-6  #: seconds of a round trip, including the wake-up of the server
    threads: int = 1  #: sampler threads, each waits for one batch's rows

    @property
    def bytes_per_s(self) -> float:
        return self.gbit * 1e9 / 8 * self.usable

    @property
    def name(self) -> str:
        return f"{self.cores} cores, {self.gbit:g} Gbit/s"


@dataclass(frozen=True)
class Measured:
    """Measurements of a run on simulated hosts, and of the same batches in one process."""

    hosts: tuple[HostFigures, ...]
    alone_cpu: float  #: CPU seconds of an epoch in one process
    edges: float  #: edges sampled in an epoch, over all hosts and layers
    rows: float  #: rows gathered in an epoch, over all hosts
    weight_bytes: float

    @property
    def cpu(self) -> float:
        return sum(host.cpu for host in self.hosts)

    def sum(self, name: str) -> float:
        return float(sum(getattr(host, name) for host in self.hosts))

    @property
    def reduced_bytes(self) -> float:
        """Bytes of gradients that all hosts together receive per epoch, with a ring all-reduce."""
        return 2 * (len(self.hosts) - 1) * self.weight_bytes * self.hosts[0].steps

    @classmethod
    def load(cls, fields: dict[str, Any]) -> Measured:
        return cls(**{**fields, "hosts": tuple(HostFigures(**host) for host in fields["hosts"])})


@dataclass(frozen=True)
class Prediction:
    """Predicted seconds of a step by cause, and the number of steps."""

    compute: float
    exposed: float  #: seconds of waiting for remote rows that do not overlap with computing
    reduce: float
    steps: float

    @property
    def epoch(self) -> float:
        return self.steps * (self.compute + self.exposed + self.reduce)


def predict(measured: Measured, on: Hardware) -> Prediction:
    """Predict the times on the hosts ``on``. In each step, all hosts wait for the slowest one."""
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
    """Return the seconds to fetch a batch's remote rows by simultaneous requests, one to each owner."""
    # one round of requests is enough, because the topology is replicated
    return host.remote_bytes / host.steps / on.bytes_per_s + (on.latency if host.remote_bytes else 0.0)


def _reduce(weight_bytes: float, count: int, on: Hardware) -> float:
    """Return the seconds of a ring all-reduce over ``count`` hosts."""
    # each host sends 2 (count - 1) pieces, each one of ``count`` pieces of the gradients
    pieces = 2 * (count - 1)
    return pieces * (weight_bytes / count / on.bytes_per_s + on.latency / 2)


def table(runs: Sequence[Measured], on: Hardware) -> list[str]:
    """Return the lines of a Markdown table of predictions for ``on``, one row per run."""
    first = predict(runs[0], on).epoch
    lines = [f"| hosts of {on.name} | compute ms | exposed ms | all-reduce ms | s per epoch | times faster |"]
    lines += ["|---|---|---|---|---|---|"]
    for run in runs:
        predicted = predict(run, on)
        parts = " | ".join(f"{1000 * part:.2f}" for part in (predicted.compute, predicted.exposed, predicted.reduce))
        lines.append(f"| {len(run.hosts)} | {parts} | {predicted.epoch:.3f} | {first / predicted.epoch:.2f} |")
    return lines
