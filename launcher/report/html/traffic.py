"""What crossed the network: bytes and cache hits between each pair of nodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from rich.filesize import decimal

from launcher.report.html.charts import pair_chart
from launcher.report.html.page import Block, Table, Words
from launcher.report.html.record import RunRecord
from launcher.report.profile import Profile, RankTraffic

Pairs = Mapping[tuple[int, int], Mapping[str, float]]  #: (node that asked, node that was asked) → what came


def traffic_blocks(record: RunRecord) -> Iterator[Block]:
    """Heat maps where the ranks told whom they asked, and a table by rank."""
    ranks, plan = record.analysis.traffic, record.found.plan
    if not any(rank.sums["remote_bytes"] for rank in ranks):
        return
    pairs = pairs_of(ranks)
    if pairs and plan:
        yield from _maps(pairs, plan.serving)
    yield _by_rank(ranks)
    yield from _predicted(record.analysis.profile)


def pairs_of(ranks: Iterable[RankTraffic]) -> Pairs:
    """Sums over the ranks of each node, all epochs."""
    found: dict[tuple[int, int], dict[str, float]] = {}
    for rank in ranks:
        for host, values in rank.by_host.items() if rank.node is not None else ():
            sums = found.setdefault((rank.node or 0, host), {})
            for name, value in values.items():
                sums[name] = sums.get(name, 0.0) + value
    return found


def _predicted(profile: Profile | None) -> Iterator[Block]:
    if profile is None or profile.predicted is None:
        return
    text = f"Predicted before the first epoch: {decimal(round(profile.predicted))} an epoch"
    bare = profile.predicted_without_cache
    text += f", {decimal(round(bare))} without the cache" if bare is not None else ""
    yield Words((f"{text}{f', {profile.why_less}' if profile.why_less else ''}.",))


def _maps(pairs: Pairs, serving: str) -> Iterator[Block]:
    """``serving``: the cluster that was asked, where it is not the run's own nodes."""
    asking, asked = sorted({i for i, _ in pairs}), sorted({j for _, j in pairs})
    to, of = [f"node{i}" for i in asking], [f"{serving}/node{j}" if serving else f"node{j}" for j in asked]
    sent = [[pairs[i, j]["remote_bytes"] if (i, j) in pairs else None for j in asked] for i in asking]
    yield pair_chart("bytes", "Bytes from other nodes, all epochs", to, of, sent, "bytes")
    hits = [[_hits(pairs.get((i, j))) for j in asked] for i in asking]
    if any(value is not None for row in hits for value in row):
        yield pair_chart(
            "hits", "Of the rows that other nodes own, those cached or held here, all epochs", to, of, hits, "share"
        )


def _hits(pair: Mapping[str, float] | None) -> float | None:
    if pair is None or not pair["remote_rows"]:
        return None
    return (pair["cached_rows"] + pair["held_rows"]) / pair["remote_rows"]


def _by_rank(ranks: Iterable[RankTraffic]) -> Table:
    rows = tuple(
        (
            rank.name,
            decimal(round(rank.sums["remote_bytes"])),
            _share(rank.sums["remote_rows"], rank.sums["rows"]),
            _share(rank.sums["cached_rows"], rank.sums["remote_rows"]),
            _share(rank.sums["held_rows"], rank.sums["remote_rows"]),
            _share(
                rank.sums["remote_rows"] - rank.sums["cached_rows"] - rank.sums["held_rows"], rank.sums["remote_rows"]
            ),
        )
        for rank in ranks
    )
    columns = ("rank", "#bytes received", "#rows that others own", "#of those cached", "#of those held", "#asked for")
    return Table(columns, rows, "All epochs")


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "–"
