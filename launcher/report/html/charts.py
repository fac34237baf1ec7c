"""Builds the charts of a report as plotly figures: loss, accuracy, speed, time by kind of work, bytes between nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.filesize import decimal

from launcher.report.html.page import Chart
from launcher.report.html.record import RunRecord
from launcher.report.metrics import Point, number
from launcher.report.profile import Profile, rank_name

_SINGLE = 12  # up to this number of ranks each gets a line; more are drawn as a heat map

_BAR = 22  # height of a row in pixels

_EARLIER = "#9aa0a6"

#: Colours of Okabe and Ito, safe for colour-blind readers; warm for waiting, cool for computing.
_KIND_COLOURS = {
    "sample": "#f0e442",
    "remote": "#d55e00",
    "gather": "#e69f00",
    "copy": "#cc79a7",
    "forward": "#0072b2",
    "backward": "#56b4e9",
    "reduce": "#b2182b",
    "optimizer": "#009e73",
    "other": "#9aa0a6",
}

_KIND_WORDS = {
    "sample": "wait: sampling",
    "remote": "wait: other hosts",
    "gather": "wait: rows",
    "copy": "copy to the device",
    "reduce": "reduce gradients",
}

_SPLIT_COLOURS = {"train": "#009e73", "val": "#0072b2", "test": "#d55e00"}

_BYTES_SCALE = [[0.0, "#dbe9f6"], [1.0, "#0072b2"]]  # opaque, so that numbers are readable on light and dark pages

_Trace = Mapping[str, Any]


def loss_chart(record: RunRecord) -> Chart | None:
    """Return a chart of the loss by step and by epoch; None if there is no loss.

    It also shows the loss of the run that this run resumed.
    """
    own, begin = record.metrics.series, resumed_at(record)
    data = []
    if record.before is not None:
        points = record.before.series.step_loss or record.before.series.epoch_loss  # already thinned
        before = [point for point in points if begin is None or point[0] <= begin]
        data.append(_line("earlier run", before, colour=_EARLIER))
    data += [
        _line("each step", own.step_loss, colour="#56b4e9", width=1),
        _line("mean of the epoch", own.epoch_loss, colour="#0072b2", marks=True),
    ]
    layout = {"xaxis": {"title": {"text": "epochs"}}, "yaxis": {"title": {"text": "loss"}}, **_resume_mark(record)}
    return _chart("loss", "Loss", data, layout)


def metric_chart(record: RunRecord) -> Chart | None:
    """Return a chart of the task's metric on each split by epoch; None if no value is known."""
    begin, data, metric = resumed_at(record), [], record.metrics.series.metric
    for split, points in record.before.series.scores.items() if record.before else ():
        before = [point for point in points if begin is None or point[0] <= begin]
        data.append(_line(f"{split}, earlier run", before, colour=_EARLIER, marks=True))
    for split, points in record.metrics.series.scores.items():
        data.append(_line(split, points, colour=_SPLIT_COLOURS.get(split, "#cc79a7"), marks=True))
    percent = {"tickformat": ".1%"} if metric.name == "accuracy" else {}
    axis = {"title": {"text": metric.title}, **percent}
    title = metric.title[:1].upper() + metric.title[1:]
    return _chart(
        "metric", title, data, {"xaxis": {"title": {"text": "epochs"}}, "yaxis": axis, **_resume_mark(record)}
    )


def speed_chart(record: RunRecord) -> Chart | None:
    """Return a chart of each rank's seeds per second by epoch: lines or, for many ranks, a heat map."""
    found: dict[int, list[Point]] = {}
    for line in record.metrics.series.epochs:
        epoch, speed = number(line.get("epoch")), number(line.get("seeds_per_s"))
        if epoch is not None and speed is not None:
            found.setdefault(int(line["rank"]), []).append((epoch, speed))
    by_rank = {rank: found[rank] for rank in sorted(found)}
    most = max(map(len, by_rank.values()), default=0)
    title, axis = "Throughput of each rank", {"title": {"text": "epochs"}, "dtick": 1 if most <= 10 else None}
    if len(by_rank) <= _SINGLE:
        data = [
            _line(rank_name(rank, record.node_of.get(rank)), points, marks=True) for rank, points in by_rank.items()
        ]
        seeds_axis = {"title": {"text": "seeds/s"}, "rangemode": "tozero"}
        if not any(len(points) > 1 for points in by_rank.values()):
            # A run with one epoch: by time since the launch.
            by_time = [
                _line(rank_name(rank, record.node_of.get(rank)), [(t - record.started, value) for t, value in points])
                for rank, points in list(record.metrics.series.speed.items())[:_SINGLE]
            ]
            time_axis = {"title": {"text": "seconds since the launch"}}
            if chart := _chart("speed", title, by_time, {"xaxis": time_axis, "yaxis": seeds_axis}):
                return chart
        return _chart("speed", title, data, {"xaxis": axis, "yaxis": seeds_axis})
    epochs = sorted({x for points in by_rank.values() for x, _ in points})
    z = [[dict(points).get(epoch) for epoch in epochs] for points in by_rank.values()]
    names = [rank_name(rank, record.node_of.get(rank)) for rank in by_rank]
    bar = {"title": {"text": "seeds/s"}}
    return Chart("speed", title, [_heat(epochs, names, z, bar)], {"xaxis": axis}, _height(len(names)))


def spent_chart(profile: Profile) -> Chart:
    """Return a chart with a bar for each rank: mean milliseconds per step, divided by kind of work."""
    names = [rank.name for rank in profile.ranks]
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": _KIND_WORDS.get(kind, kind),
            "y": names,
            "x": [1000 * rank.spent[kind] for rank in profile.ranks],
            "marker": {"color": _KIND_COLOURS.get(kind)},
            "hovertemplate": "%{y}<br>%{x:.2f} ms",
        }
        for kind, share in profile.share.items()
        if share >= 0.001
    ]
    layout = {
        "barmode": "stack",
        "xaxis": {"title": {"text": "milliseconds per step"}},
        "yaxis": {"autorange": "reversed", "type": "category"},
        "legend": {"traceorder": "normal"},
    }
    return Chart("spent", "Mean step of each rank", data, layout, _height(len(names)) + 60)


def pair_chart(
    key: str, title: str, to: Sequence[str], of: Sequence[str], z: Sequence[Sequence[float | None]], unit: str
) -> Chart:
    """Return a heat map of pairs of nodes: rows are receiving nodes (``to``), columns are sending nodes (``of``).

    z: rows of values. unit: unit of the values; with ``share``, fractions are shown as percentages.
    """
    percent = unit == "share"
    texts = [
        ["" if value is None else f"{value:.0%}" if percent else decimal(round(value)) for value in row] for row in z
    ]
    heat = {
        **_heat(of, to, z, {"title": {"text": unit}, "tickformat": ".0%" if unit == "share" else ".2s"}),
        "text": texts,
    }
    if len(to) <= _SINGLE:
        heat["texttemplate"] = "%{text}"
    heat["hovertemplate"] = "%{y} from %{x}: %{text}<extra></extra>"
    layout = {
        "xaxis": {"title": {"text": "from"}, "type": "category"},
        "yaxis": {"title": {"text": "to"}, "type": "category", "autorange": "reversed"},
    }
    return Chart(key, title, [heat], layout, max(260, 120 + 34 * len(to)))


def bars(key: str, title: str, names: Sequence[str], values: Sequence[float], axis: str) -> Chart:
    data = [{"type": "bar", "x": list(names), "y": list(values), "marker": {"color": "#0072b2"}, "showlegend": False}]
    layout = {"xaxis": {"type": "category"}, "yaxis": {"title": {"text": axis}, "rangemode": "tozero"}}
    return Chart(key, title, data, layout, 260)


def resumed_at(record: RunRecord) -> float | None:
    """Return how many epochs were done at the moment when this run resumed an earlier one.

    None if this run resumed no other, or has completed no epoch.
    """
    if record.found.launch is None or not record.found.launch.resumed_from:
        return None
    own = [number(line.get("epoch")) for line in record.metrics.series.epochs]
    firsts = [epoch for epoch in own if epoch is not None]
    return min(firsts) - 1 if firsts else None


def _resume_mark(record: RunRecord) -> dict[str, Any]:
    """Return plotly's layout of a vertical line where this run resumed an earlier one; {} if it did not."""
    at = resumed_at(record)
    if at is None:
        return {}
    line = {
        "type": "line",
        "x0": at,
        "x1": at,
        "yref": "paper",
        "y0": 0,
        "y1": 1,
        "line": {"dash": "dot", "color": _EARLIER},
    }
    note = {
        "x": at,
        "yref": "paper",
        "y": 1,
        "text": "resumed here",
        "showarrow": False,
        "xanchor": "left",
        "yanchor": "bottom",
    }
    return {"shapes": [line], "annotations": [note]}


def _chart(key: str, title: str, data: Sequence[_Trace], layout: Mapping[str, Any]) -> Chart | None:
    drawn = [trace for trace in data if len(trace["x"])]
    return Chart(key, title, drawn, layout) if drawn else None


def _line(name: str, points: Sequence[Point], *, colour: str = "", width: float = 2, marks: bool = False) -> _Trace:
    trace: dict[str, Any] = {
        "type": "scatter",
        "name": name,
        "mode": "lines+markers" if marks and len(points) <= 100 else "lines",
        "x": [round(x, 4) for x, _ in points],
        "y": [float(f"{y:.6g}") for _, y in points],
        "line": {"width": width} | ({"color": colour} if colour else {}),
    }
    if len(points) == 1:
        trace["mode"] = "markers"
    return trace


def _heat(
    x: Sequence[Any], y: Sequence[str], z: Sequence[Sequence[float | None]], bar: Mapping[str, Any]
) -> dict[str, Any]:
    most = max((value for row in z for value in row if value is not None), default=0)
    scale = {"colorscale": _BYTES_SCALE, "zmin": 0, "zmax": most or 1, "xgap": 2, "ygap": 2}
    return {
        "type": "heatmap",
        "x": list(x),
        "y": list(y),
        "z": [list(row) for row in z],
        "colorbar": {"thickness": 10, **bar},
        **scale,
    }


def _height(rows: int) -> int:
    return max(200, 130 + _BAR * rows)


def all_of(charts: Sequence[Chart | None]) -> Iterator[Chart]:
    return (chart for chart in charts if chart is not None)
