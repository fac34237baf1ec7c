"""Shows a sweep: a live table in a terminal, lines elsewhere, and what came out at the end."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from launcher.hostlist import fold
from launcher.report.metrics import score_text
from launcher.run.live_table import clock
from launcher.sweep.hosts import HostPool
from launcher.sweep.metric import Metric
from launcher.sweep.records import Definition, Trial
from launcher.sweep.space import Range, Space
from launcher.sweep.trial_run import TrialRun
from launcher.text import Column, FittedTable, count, seconds_words

_STYLES = {"done": "green", "pruned": "yellow", "failed": "red", "waiting": "dim"}

_FRAME = 0.5  # seconds between two frames of the table


class SweepView:
    """Prints what happens to the trials. Context manager: within it, a terminal also has a table of them below."""

    def __init__(
        self, definition: Definition, metric: Metric, pool: HostPool, trials: Sequence[Trial],
        runs: Mapping[int, TrialRun], console: Console, *, plain: bool,
    ):  # fmt: skip
        self.definition, self.metric, self.pool, self.trials, self.runs = definition, metric, pool, trials, runs
        self.console = console
        self.question = ""  #: what a Ctrl-C has done
        self._asked = ""
        self._began, self._drawn = time.monotonic(), 0.0
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._is_live = console.is_terminal and not plain

    def __enter__(self) -> SweepView:
        if self._is_live:
            self._live.start()
        return self

    def __exit__(self, *raised: object) -> None:
        if self._is_live:
            self._live.stop()

    def begin(self) -> None:
        wanted, groups = self.definition, len(self.pool.names) // self.pool.size
        how = wanted.search + (f", {wanted.pruner} pruner" if wanted.pruner != "none" else "")
        beside = f", {groups} side by side" if groups > 1 else ""
        nodes = count(wanted.nodes_per_run, "node")
        self.say(f"sweep {wanted.name}: {count(wanted.trials, 'trial')} of {nodes} each{beside} ({how})")
        for dimension in wanted.space:
            self.say(f"  {dimension}")
        if ended := sum(trial.ended for trial in self.trials):
            self.say(f"  goes on: {ended} of {wanted.trials} trials have ended")

    def say(self, text: str, style: str = "") -> None:
        self.console.print(Text(text, style), soft_wrap=True)

    def started(self, trial: Trial) -> None:
        again = f" (run {trial.attempt})" if trial.attempt > 1 else ""
        self.say(f"{trial.name}{again} {values_words(trial, self.definition.space)}: on {fold(trial.hosts)}", "dim")

    def ended(self, trial: Trial) -> None:
        if trial.state == "failed":
            self.say(f"{trial.name} failed: {trial.cause}", "red")
            return
        best, score = best_trial(self.trials, self.metric.better), "no metric on val was reported (see --metric)"
        if trial.score is not None:
            score = f"{self.metric.title} {score_text(trial.score)}"
        took = f" in {seconds_words(trial.seconds)}" if trial.seconds else ""
        how = f"pruned {trial.cause}, {score}" if trial.state == "pruned" else f"{score}{took}"
        so_far = f"; best so far: {best.name}" if best is not None and best is not trial else "; the best so far"
        self.say(f"{trial.name}: {how}{so_far if trial.state == 'done' and trial.score is not None else ''}")

    def again(self, trial: Trial) -> None:
        self.say(f"{trial.name} will run again: {trial.cause}", "yellow")

    def hosts_changed(self, gone: Sequence[str], back: Sequence[str]) -> None:
        if gone and not self.pool.left:
            self.say(f"none of {fold(gone)} can be reached; runs go on without, and it tries again", "yellow")
        elif gone:
            self.say(f"{fold(gone)} cannot be reached; the sweep goes on without, and tries again later", "yellow")
        if back:
            self.say(f"{fold(back)} can be reached again")

    def update(self) -> None:
        if self.question != self._asked:
            self._asked = self.question
            if not self._is_live:
                self.say(self.question, "bold")
        if self._is_live and time.monotonic() > self._drawn + _FRAME:
            self._drawn = time.monotonic()
            self._live.update(Group(*self._frame(self.console.height)), refresh=True)

    def _frame(self, height: int) -> Iterator[Any]:
        trials = self.trials
        ended = sum(trial.ended for trial in trials)
        words = [
            self.definition.name, clock(time.monotonic() - self._began), f"{ended} of {self.definition.trials} ended",
            f"{len(self.runs)} running",
        ]  # fmt: skip
        if (best := best_trial(trials, self.metric.better)) and best.score is not None:
            words.append(f"best: {best.name} {self.metric.title} {score_text(best.score)}")
        yield Text(" · ".join(words), "bold", no_wrap=True, overflow="ellipsis")
        room = max(2, height - 5)
        urgent = sorted(trials, key=lambda trial: (trial.ended, -trial.number if trial.ended else 0))[:room]
        yield trial_table(sorted(urgent, key=lambda trial: trial.number), self.definition, self.metric, self.runs)
        if len(urgent) < len(trials):
            yield Text(f"and {count(len(trials) - len(urgent), 'earlier trial')}", "dim")
        if self.pool.lost:
            yield Text(f"! cannot be reached: {fold(sorted(self.pool.lost))}", "yellow")
        if self.question:
            yield Text(self.question, "bold")


def trial_table(
    trials: Sequence[Trial], definition: Definition, metric: Metric, runs: Mapping[int, TrialRun]
) -> FittedTable:
    """Return a table with a row for each trial."""
    keys = [dimension.key for dimension in definition.space]
    columns = [
        Column("trial", 9),
        *(Column(key.rpartition(".")[2], 8, right=True) for key in keys),
        Column("state", 9),
        Column("epoch", 5, right=True),
        Column(metric.title or "score", 9, right=True),
        Column("took", 2, right=True),
        Column("hosts", 4),
        Column("why", 3, cut_to=10),
    ]
    best = best_trial(trials, metric.better)
    rows: list[list[Text | str]] = []
    for trial in trials:
        run = runs.get(trial.number)
        state = trial.state if run is None else "pruning" if trial.pruned_at else run.stage or "starting"
        epoch = run.epoch if run is not None and run.epoch else max(trial.scores, default=None)
        score = trial.score if trial.ended else metric.best(trial.scores.values())
        shown = "" if score is None else f"{score_text(score)}{' *' if trial is best else '  '}"
        rows.append(
            [
                trial.name,
                *_shown_values(trial, definition.space).values(),
                Text(state, _STYLES.get(state, "cyan")),
                "" if epoch is None else str(epoch),
                Text(shown, "bold green" if trial is best else ""),
                seconds_words(trial.seconds) if trial.ended and trial.seconds else "",
                fold(trial.hosts) if trial.hosts else "",
                " ".join(trial.cause.split()),
            ]
        )
    return FittedTable(columns, rows)


def best_trial(trials: Iterable[Trial], better: str) -> Trial | None:
    """Return the trial with the best score among those that are done; of equal ones the first."""
    scored = [trial for trial in trials if trial.state == "done" and trial.score is not None]
    sign = -1 if better == "less" else 1
    return max(scored, key=lambda trial: sign * (trial.score or 0.0), default=None)


def _shown_values(trial: Trial, space: Space) -> dict[str, str]:
    """Return the values of a trial by key; numbers that were drawn from a range have four digits."""
    drawn = {dimension.key for dimension in space if isinstance(dimension, Range) and not dimension.whole}
    return {key: f"{float(text):.4g}" if key in drawn else text for key, text in trial.values.items()}


def values_words(trial: Trial, space: Space) -> str:
    return " ".join(f"{key}={text}" for key, text in _shown_values(trial, space).items())
