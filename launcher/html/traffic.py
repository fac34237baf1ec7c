"""What crossed the network: bytes and cache hits between each pair of nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.filesize import decimal

from launcher.html.charts import pair_chart
from launcher.html.page import Block, Table, Words
from launcher.html.record import RunRecord
from launcher.html.series import number
from launcher.profile import rank_name

NAMES = ("remote_bytes", "remote_rows", "cached_rows", "held_rows")


@dataclass
class Pair:
    """What one node got from another, over all epochs."""

    totals: dict[str, float] = field(default_factory=lambda: dict.fromkeys(NAMES, 0.0))


def traffic_blocks(record: RunRecord) -> Iterator[Block]:
    """Heat maps where the ranks told whom they asked, and a table by rank."""
    epochs = record.series.epochs
    if not any(number(_traffic(line).get("remote_bytes")) for line in epochs):
        return
    pairs = read_pairs(record)
    plan = record.found.plan
    if pairs and plan:
        yield from _maps(pairs, plan.serving)
    yield _by_rank(record)
    profile = record.series.profile
    if profile is not None and profile.predicted("remote_bytes") is not None:
        told, bare = profile.predicted("remote_bytes"), profile.predicted("remote_bytes_without_cache")
        without = f", {decimal(round(bare))} without the cache" if bare is not None else ""
        text = f"Predicted before the first epoch: {decimal(round(told or 0))} an epoch{without}"
        yield Words((f"{text}{f', {why}' if (why := profile.less_than_predicted) else ''}.",))


def read_pairs(record: RunRecord) -> dict[tuple[int, int], Pair]:
    """(node that asked, node that was asked) → what came, over all epochs."""
    found: dict[tuple[int, int], Pair] = {}
    for line in record.series.epochs:
        by_host = line.get("by_host")
        k = record.node_of.get(line["rank"])
        if k is None or not isinstance(by_host, Mapping):
            continue
        for other, values in by_host.items():
            if not str(other).isdigit() or not isinstance(values, Mapping):
                continue
            pair = found.setdefault((k, int(other)), Pair())
            for name in NAMES:
                pair.totals[name] += number(values.get(name)) or 0.0
    return found


def _maps(pairs: Mapping[tuple[int, int], Pair], serving: str) -> Iterator[Block]:
    """``serving``: the cluster that was asked, where it is not the run's own nodes."""
    asking, asked = sorted({i for i, _ in pairs}), sorted({j for _, j in pairs})
    to, of = [f"node{i}" for i in asking], [f"{serving}/node{j}" if serving else f"node{j}" for j in asked]
    sent = [[pairs[i, j].totals["remote_bytes"] if (i, j) in pairs else None for j in asked] for i in asking]
    yield pair_chart("bytes", "Bytes from other nodes, all epochs", to, of, sent, "bytes")
    hits = [[_hits(pairs.get((i, j))) for j in asked] for i in asking]
    if any(value is not None for row in hits for value in row):
        yield pair_chart(
            "hits", "Of the rows that other nodes own, those cached or held here, all epochs", to, of, hits, "share"
        )


def _hits(pair: Pair | None) -> float | None:
    if pair is None or not pair.totals["remote_rows"]:
        return None
    return (pair.totals["cached_rows"] + pair.totals["held_rows"]) / pair.totals["remote_rows"]


def _by_rank(record: RunRecord) -> Table:
    totals: dict[int, dict[str, float]] = {}
    for line in record.series.epochs:
        mine = totals.setdefault(int(line["rank"]), dict.fromkeys(("rows", *NAMES), 0.0))
        for name in mine:
            mine[name] += number(_traffic(line).get(name)) or 0.0
    rows = tuple(
        (
            rank_name(rank, record.node_of),
            decimal(round(sums["remote_bytes"])),
            _share(sums["remote_rows"], sums["rows"]),
            _share(sums["cached_rows"], sums["remote_rows"]),
            _share(sums["held_rows"], sums["remote_rows"]),
            _share(sums["remote_rows"] - sums["cached_rows"] - sums["held_rows"], sums["remote_rows"]),
        )
        for rank, sums in sorted(totals.items())
    )
    columns = ("rank", "#bytes received", "#rows that others own", "#of those cached", "#of those held", "#asked for")
    return Table(columns, rows, "All epochs")


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "–"


def _traffic(line: Mapping[str, Any]) -> Mapping[str, Any]:
    traffic = line.get("traffic")
    return traffic if isinstance(traffic, Mapping) else {}
