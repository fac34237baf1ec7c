"""Metrics lines → the points that trackers show, each once, also after a restart that trains some steps again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from trainer.track.tracker import Point, flat

#: Fields of a metrics line that are no values of a curve.
_POSITION = ("t", "kind", "rank", "epoch", "step", "steps", "by_host", "saved", "step_loss")


def _points_of(line: Mapping[str, Any]) -> Iterator[tuple[str, Point]]:
    """Yield the points of a metrics line of rank 0, each with the name of its curve; nothing for lines without values.

    Lines that an own script has written may lack any field.
    """
    kind, t, epoch = line.get("kind"), float(line.get("t") or 0), line.get("epoch")
    if not isinstance(epoch, int):
        return
    if kind == "step" and isinstance(line.get("step"), int) and isinstance(line.get("steps"), int):
        done = (epoch - 1) * line["steps"] + line["step"] + 1
        yield "step", Point("step", done, t, _scalars(line, "step"))
    elif kind == "epoch":
        yield "epoch", Point("epoch", epoch, t, _scalars(line, "epoch"))
        losses, seconds = line.get("step_loss") or (), float(line.get("seconds") or 0)
        for i, loss in enumerate(losses, start=1):  # at times spread evenly over the epoch
            at = (epoch - 1) * len(losses) + i
            yield "step_loss", Point("step", at, t - seconds * (1 - i / len(losses)), {"step/loss_of_all_ranks": loss})
    elif kind == "eval":
        split = line.get("split") or "val"
        yield f"eval/{split}", Point("epoch", epoch, t, _scalars(line, f"eval/{split}"))


def new_points(lines: Iterable[Mapping[str, Any]], done: dict[str, int]) -> Iterator[Point]:
    """Yield the points that are further than what a tracker has.

    done: the last place of each curve that the tracker has; updated.
    """
    for line in lines:
        for curve, point in _points_of(line):
            if point.at > done.get(curve, 0) and point.values:
                done[curve] = point.at
                yield point


def system_point(found: Mapping[str, Any], began: float) -> Point:
    """Return the last figures of all nodes and ranks, as the supervisors know them (``track/nodes.json``)."""
    values: dict[str, float] = {}
    for kind in ("node", "rank"):
        for number, figures in found[f"{kind}s"].items():
            values |= _scalars(figures, f"system/{kind}{number}")
    return Point("seconds", max(0, round(found["t"] - began)), found["t"], values)


def _scalars(tree: Mapping[str, Any], above: str) -> dict[str, float]:
    shown = {name: value for name, value in tree.items() if name not in _POSITION}
    return {name: float(value) for name, value in flat(shown, above, "/").items() if type(value) in (int, float)}
