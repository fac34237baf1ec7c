"""Metrics lines of an invented run, for tests of code that reads metrics files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SPENT = {
    "sample": 0.004, "remote": 0.012, "gather": 0.002, "copy": 0.0, "forward": 0.04, "backward": 0.06, "reduce": 0.001,
    "optimizer": 0.0005, "other": 0.0005,
}  # fmt: skip
OLD = {"step_s": 0.12, "own_s": 0.1, "batch_s": 0.01, "seconds": 1.2, "seeds": 10, "loss": 0.5, "remote_share": 0.3}


def lines_of(rank: int, epochs: int = 3, **spent: float) -> list[dict[str, Any]]:
    """Return a line with the predicted traffic, then a step line and an epoch line for each epoch.

    spent: seconds of a step by kind of work; they replace those in ``SPENT``.
    """
    spent = {**SPENT, **spent}
    traffic = {"batches": 10, "remote_bytes": 1_000_000, "rows": 5000, "remote_rows": 2000, "cached_rows": 1000}
    common = {**OLD, "rank": rank, "spent": spent, "step_s": round(sum(spent.values()), 6), "traffic": traffic}
    common["behind"] = {"sample": 0.02, "remote": 0.01, "gather": 0.03}
    predict = {"kind": "predict", "rank": rank, "t": 0.0, "steps": 10, "hit_rate": 0.5, "cache_rows": 3}
    lines = [{**predict, "remote_bytes": 980_000.0, "remote_bytes_without_cache": 2_000_000.0}]
    for epoch in range(1, epochs + 1):
        slow = {"spent": {**spent, "forward": 9.0}, "step_s": 9.0} if epoch == 1 else {}  # the first epoch compiles
        lines.append({**common, **slow, "kind": "step", "t": epoch, "epoch": epoch, "step": 4, "steps": 10})
        lines.append({**common, **slow, "kind": "epoch", "t": epoch + 0.5, "epoch": epoch})
    return lines


def metrics_file(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
