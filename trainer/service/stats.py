"""Counters of a graph server, and the content of its stats file."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trainer.service.batch_scheduler import SchedulerStatus
from trainer.service.messages import HelloInfo, ServerStats
from trainer.wire.frames import Kind

_PAGE = os.sysconf("SC_PAGE_SIZE")

PeerStates = Callable[[], Sequence[Mapping[str, str]]]  #: {"name", "state": "up" | "down"} of each peer


class Counters:
    """Counts the requests, errors and bytes of a graph server for ``ServerStats``. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(("requests", "errors", "malformed", "refused", "bytes_in", "bytes_out"), 0)
        self._seconds = {kind.name.lower(): 0.0 for kind in Kind}

    def add(self, name: str, count: int = 1) -> None:
        with self._lock:
            self._counts[name] += count

    def answered(self, kind: Kind, seconds: float) -> None:
        with self._lock:
            self._counts["requests"] += 1
            self._seconds[kind.name.lower()] += seconds

    def read(self) -> ServerStats:
        with self._lock:
            return ServerStats(**self._counts, seconds=dict(self._seconds))


class BusyTime:
    """Counts the seconds that threads work, including work in progress. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._total = 0.0
        self._since: dict[int, float] = {}

    @contextmanager
    def working(self) -> Iterator[None]:
        me = threading.get_ident()
        with self._lock:
            self._since[me] = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                self._total += time.monotonic() - self._since.pop(me)

    def read(self) -> float:
        with self._lock:
            now = time.monotonic()
            return self._total + sum(now - since for since in self._since.values())


class StatsReport:
    """Makes the content of the stats file. Rates are averages since the previous call of ``make``."""

    def __init__(
        self, info: HelloInfo, endpoint: str, batch_threads: int, counters: Counters, busy: BusyTime,
        scheduler: Callable[[], SchedulerStatus], peers: PeerStates,
    ):  # fmt: skip
        self._info, self._endpoint, self._threads = info, endpoint, batch_threads
        self._counters, self._busy, self._scheduler, self._peers = counters, busy, scheduler, peers
        self._started = self._then = time.monotonic()
        self._last: dict[str, float] = dict.fromkeys(("busy", "bytes_in", "bytes_out", "batches"), 0.0)

    def make(self) -> dict[str, Any]:
        stats, scheduler, now = asdict(self._counters.read()), self._scheduler(), time.monotonic()
        del stats["seconds"]
        totals = {"busy": self._busy.read(), "batches": scheduler.batches, **stats}
        span = max(now - self._then, 1e-3)
        rates = {name: (totals[name] - then) / span for name, then in self._last.items()}
        self._last, self._then = {name: totals[name] for name in self._last}, now
        return {
            "time": time.time(),
            "endpoint": self._endpoint,
            "node_rank": self._info.node_rank,
            "parts": list(self._info.part_ids),
            "uptime_s": now - self._started,
            "busy": min(1.0, rates.pop("busy") / max(1, self._threads)),
            **stats,
            **{f"{name}_s": rate for name, rate in rates.items()},
            "batches": scheduler.batches,
            "queue": scheduler.queue,
            "buffer_bytes": scheduler.buffer_bytes,
            "buffer_limit": scheduler.buffer_limit,
            "memory": resident_bytes(),
            "clients": [asdict(client) for client in scheduler.clients],
            "peers": [dict(peer) for peer in self._peers()],
        }


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE
