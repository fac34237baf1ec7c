"""sweep.html: parallel coordinates, history and importance of the values that a sweep tried, in one file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from launcher.report.html.charts import bars
from launcher.report.html.page import Chart, Fact, PageSection, ReportPage, Table, Words
from launcher.report.metrics import score_text
from launcher.sweep.metric import Metric
from launcher.sweep.records import Definition, Trial
from launcher.sweep.show import best_trial, values_words
from launcher.sweep.space import Choices, Dimension
from launcher.text import seconds_words

_BINS = 4  # into which a range is divided for the importance of its key

_WORST, _BEST = (0xC9, 0xD6, 0xE2), (0x00, 0x4C, 0x8C)  # colours of lines, by score

_BEST_OF_ALL, _PRUNED = "#d55e00", "#9aa0a6"


def sweep_page(definition: Definition, trials: Sequence[Trial], metric: Metric, why: str) -> ReportPage:
    """Build the page. ``why``: why the sweep has ended early; '' if it is complete."""
    best = best_trial(trials, metric.better)
    counts = {state: sum(trial.state == state for trial in trials) for state in ("done", "pruned", "failed")}
    facts = [
        Fact("trials", f"{len(trials)} of {definition.trials}"),
        *(Fact(state, str(number), "bad" if state == "failed" else "") for state, number in counts.items() if number),
        Fact("search", definition.search + (f", {definition.pruner} pruner" if definition.pruner != "none" else "")),
        Fact("nodes per run", str(definition.nodes_per_run)),
    ]
    headline = why
    if best is not None and best.score is not None:
        facts.insert(0, Fact(f"best {metric.title}", score_text(best.score), "good"))
        headline = f"{best.name} was best: {values_words(best, definition.space)}" + (f" · {why}" if why else "")

    charts: list[Chart] = []
    if scored := [trial for trial in trials if trial.score is not None]:
        data: list[Mapping[str, Any]] = []
        for state, colour in (("done", "#0072b2"), ("pruned", _PRUNED)):
            shown = [trial for trial in scored if trial.state == state]
            data.append(
                {
                    "type": "scatter", "mode": "markers", "name": state, "marker": {"color": colour, "size": 8},
                    "x": [trial.number for trial in shown], "y": [trial.score for trial in shown],
                    "text": [f"{trial.name} {values_words(trial, definition.space)}" for trial in shown],
                }
            )  # fmt: skip
        done = [trial for trial in scored if trial.state == "done"]
        steps = [metric.best([trial.score or 0.0 for trial in done[: i + 1]]) for i in range(len(done))]
        line = {"color": _BEST_OF_ALL, "shape": "hv"}
        numbers = [trial.number for trial in done]
        data.append({"type": "scatter", "mode": "lines", "name": "best so far", "line": line, "x": numbers, "y": steps})
        layout = {"xaxis": {"title": {"text": "trial"}}, "yaxis": {"title": {"text": _plain(metric.title)}}}
        history = Chart("history", "history", [trace for trace in data if trace["x"]], layout)
        charts += [_parallel(definition, scored, metric), history]
    if shares := importance(definition, scored):
        names = sorted(shares, key=lambda key: -shares[key])
        note = (
            "Share of the scores' variance that the values of a key alone explain; ranges are divided into "
            f"{_BINS}. With few trials, chance explains a part of it."
        )
        chart = bars("importance", "importance of the keys", names, [round(shares[key], 4) for key in names], "share")
        charts.append(Chart(chart.key, chart.title, chart.data, {**chart.layout, "bargap": 0.6}, chart.height, note))

    failed = tuple(f"{trial.name}: {trial.cause}" for trial in trials if trial.state == "failed")
    keys = [dimension.key for dimension in definition.space]
    columns = ("trial", *(f"#{key}" for key in keys), "state", "#epochs", f"#{metric.title}", "#took", "hosts", "run")
    rows = [
        (
            trial.name, *(trial.values.get(key, "") for key in keys), trial.state, str(max(trial.scores, default="")),
            "" if trial.score is None else score_text(trial.score),
            seconds_words(trial.seconds) if trial.seconds else "", ", ".join(trial.hosts),
            trial.run_id(definition.name),
        )
        for trial in sorted(trials, key=lambda one: _order(one, metric))
    ]  # fmt: skip
    sections = [
        *([PageSection("plots", "Values and scores", tuple(charts))] if charts else []),
        *([PageSection("failed", "Failed trials", (Words(failed, "bad"),))] if failed else []),
        PageSection("trials", "Trials", (Table(columns, tuple(rows)),)),
    ]
    state = "running" if any(not trial.ended for trial in trials) else "done" if best else "failed"
    return ReportPage(definition.name, state, headline, tuple(facts), tuple(sections), "report of a sweep")


def _order(trial: Trial, metric: Metric) -> tuple[bool, float]:
    sign = 1 if metric.better == "less" else -1
    return (trial.state != "done" or trial.score is None, sign * (trial.score or 0.0))


def _parallel(definition: Definition, scored: Sequence[Trial], metric: Metric) -> Chart:
    """Each trial is a line through its values and its score; all axes have the same height."""
    best = best_trial(scored, metric.better)
    axes = [*definition.space, None]
    names = [dimension.key if dimension else metric.title for dimension in axes]
    scores = [trial.score or 0.0 for trial in scored]
    low, high = min(scores), max(scores)
    data = []
    for trial in sorted(scored, key=lambda one: (one is best, not _order(one, metric)[0], -_order(one, metric)[1])):
        score = trial.score or 0.0
        height = 0.5 if low == high else (score - low) / (high - low)
        good = 1 - height if metric.better == "less" else height
        colour = "#" + "".join(f"{round(a + (b - a) * good):02x}" for a, b in zip(_WORST, _BEST, strict=True))
        places = [_height(dimension, trial.values[dimension.key]) if dimension else height for dimension in axes]
        data.append(
            {
                "type": "scatter", "mode": "lines+markers", "x": [*range(len(axes))], "y": places, "name": trial.name,
                "text": [f"{values_words(trial, definition.space)} → {score_text(score)}"] * len(axes),
                "hoverinfo": "name+text", "showlegend": False, "marker": {"size": 5},
                "line": {
                    "color": _BEST_OF_ALL if trial is best else _PRUNED if trial.state == "pruned" else colour,
                    "width": 3 if trial is best else 1.5, "dash": "dot" if trial.state == "pruned" else "solid",
                },
            }
        )  # fmt: skip

    # The values beside each axis.
    marks = []
    texts: Mapping[float, str]
    for place, dimension in enumerate(axes):
        if isinstance(dimension, Choices):
            texts = {_height(dimension, text): text for text in dimension.texts}
        elif dimension is not None:
            texts = {0.0: f"{dimension.low:g}", 1.0: f"{dimension.high:g}"}
        else:
            texts = {0.0: score_text(low), 1.0: score_text(high)} if low != high else {0.5: score_text(low)}
        for height, text in texts.items():
            marks.append(
                {
                    "x": place, "y": height, "text": text, "showarrow": False, "xanchor": "left", "xshift": 6,
                    "yshift": 7, "font": {"size": 11},
                }
            )  # fmt: skip
    layout = {
        "xaxis": {
            "tickvals": [*range(len(axes))], "ticktext": [*map(_plain, names)], "range": [-0.25, len(axes) - 0.6],
            "zeroline": False, "fixedrange": True,
        },
        "yaxis": {"visible": False, "range": [-0.08, 1.08], "fixedrange": True},
        "annotations": marks, "hovermode": "closest",
    }  # fmt: skip
    note = "Orange: the best trial; the darker a line, the better; dotted: pruned."
    return Chart("parallel", "values and score of each trial", data, layout, 380, note)


def _height(dimension: Dimension, text: str) -> float:
    """Return where a value is on the axis of its key, between 0 and 1."""
    if isinstance(dimension, Choices):
        return (dimension.texts.index(text) if text in dimension.texts else 0) / (len(dimension.texts) - 1)
    low, high, value = dimension.low, dimension.high, float(text)
    if dimension.log:
        low, high, value = math.log(low), math.log(high), math.log(value)
    return min(1.0, max(0.0, (value - low) / (high - low)))


def importance(definition: Definition, scored: Sequence[Trial]) -> dict[str, float]:
    """Return, for each key, the share of the variance of the scores that its values alone explain (eta squared).

    Only trials that were not pruned count; {} if there are fewer than three, or if all scores are equal.
    """
    done = [trial for trial in scored if trial.state == "done" and trial.score is not None]
    scores = [trial.score or 0.0 for trial in done]
    mean = sum(scores) / len(scores) if scores else 0.0
    total = sum((score - mean) ** 2 for score in scores)
    if len(done) < 3 or max(scores) == min(scores):
        return {}
    shares = {}
    for dimension in definition.space:
        groups: dict[Any, list[float]] = {}
        for trial, score in zip(done, scores, strict=True):
            text = trial.values[dimension.key]
            place = _height(dimension, text)
            group = text if isinstance(dimension, Choices) else min(_BINS - 1, int(place * _BINS))
            groups.setdefault(group, []).append(score)
        between = sum(len(group) * (sum(group) / len(group) - mean) ** 2 for group in groups.values())
        shares[dimension.key] = between / total
    return shares


def _plain(text: str) -> str:
    # plotly interprets some HTML tags
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
