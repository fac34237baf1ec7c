"""How the ranks of a run use their GPUs, from field ``device`` of metrics lines (docs/ARCHITECTURE.md)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.report.profile import milliseconds

_SHOWN = 8  # most ranks that are listed

_GB = 10**9


@dataclass(frozen=True)
class DeviceUse:
    """Use of one GPU by one rank; a field is None if unknown."""

    step_s: float | None = None  #: seconds that the device takes for a step
    utilization: float | None = None  #: share of time in which a kernel ran, 0 to 1
    peak_bytes: float | None = None  #: the most memory that torch allocated in this process
    used_bytes: float | None = None  #: memory that all processes use on the device
    total_bytes: float | None = None  #: memory of the device

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> DeviceUse | None:
        """Read ``device`` of a metrics line or of a rank's state; None for a rank on the CPU."""
        values = line.get("device")
        if not isinstance(values, Mapping) or not values:
            return None
        return cls(*(known_number(values.get(name)) for name in cls.__dataclass_fields__))

    @property
    def memory(self) -> str:
        """The used memory of the device, as ``12.3/80 GB``; '' if unknown."""
        if self.used_bytes is None or not self.total_bytes:
            return ""
        return f"{self.used_bytes / _GB:.1f}/{self.total_bytes / _GB:.0f} GB"

    @property
    def peak(self) -> str:
        """The most memory that the process used, as ``10.1 of 80 GB``; '' if unknown."""
        if self.peak_bytes is None or not self.total_bytes:
            return ""
        return f"{self.peak_bytes / _GB:.1f} of {self.total_bytes / _GB:.0f} GB"

    @property
    def step(self) -> str:
        """The device time of a step, as ``103 ms``; '' if unknown."""
        return "" if self.step_s is None else milliseconds(self.step_s)

    @property
    def share(self) -> str:
        """The utilisation, as ``87%``; '' if unknown."""
        return "" if self.utilization is None else f"{self.utilization:.0%}"


def together(uses: Sequence[DeviceUse]) -> DeviceUse | None:
    """Summarise several ranks or epochs: mean times and utilisation, and the fullest device. None without any."""
    if not uses:
        return None
    fullest = max(uses, key=lambda use: use.used_bytes or 0.0)
    return DeviceUse(
        mean([use.step_s for use in uses]), mean([use.utilization for use in uses]),
        max((use.peak_bytes for use in uses if use.peak_bytes is not None), default=None),
        fullest.used_bytes, fullest.total_bytes,
    )  # fmt: skip


def device_uses(epochs: Iterable[Mapping[str, Any]]) -> dict[int, DeviceUse]:
    """Return the use of each rank's GPU over its epochs; {} for a run on CPUs.

    ``epochs``: epoch lines. If a rank has several, its first is left out, since it includes compilation.
    """
    by_rank: dict[int, list[DeviceUse]] = {}
    for line in epochs:
        use, rank = DeviceUse.of(line), line.get("rank")
        if use is not None and isinstance(rank, int):
            by_rank.setdefault(rank, []).append(use)
    return {rank: use for rank, uses in sorted(by_rank.items()) if (use := together(uses[1:] or uses))}


def device_line(uses: Mapping[int, DeviceUse], node_of: Mapping[int, int]) -> str:
    """Return ``GPUs: node0/rank0 103 ms a step, 87% used, peak 10.1 of 80 GB; …``; '' without GPUs.

    More than 8 ranks are summarised.
    """
    if not uses:
        return ""
    if len(uses) <= _SHOWN:
        named = [(f"node{node_of.get(rank, '?')}/rank{rank}", use) for rank, use in uses.items()]
    else:
        all_ranks = together([*uses.values()])
        named = [] if all_ranks is None else [(f"{len(uses)} ranks, mean times, highest peak:", all_ranks)]
    shown = []
    for name, use in named:
        words = [use.step and f"{use.step} a step", use.share and f"{use.share} used", use.peak and f"peak {use.peak}"]
        shown.append(f"{name} {', '.join(filter(None, words))}")
    return "GPUs: " + "; ".join(shown)


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the known values; None if none is known."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def known_number(value: Any) -> float | None:
    """Return a number; None for any other value."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
