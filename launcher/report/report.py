"""The report of a run: filled from its start to its end, then written as result.json and metrics.jsonl, and printed."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from launcher.files import write_whole
from launcher.plan.model import NodePlan
from launcher.report.device_use import device_line, device_uses
from launcher.report.events import finding_words, lasting_findings, nan_finding, nan_words
from launcher.report.explain import hint
from launcher.report.metrics import Metrics, metric_of, score_text
from launcher.report.outcome import Outcome, aftermath_of
from launcher.report.profile import print_profile
from launcher.report.run_folder import tracked_runs, tracked_words
from launcher.text import count, spans

_SHOWN = 8  # files of the output folder that are listed


def _mean_loss(lines: Sequence[Mapping[str, Any]]) -> float:
    return float(sum(line["loss"] for line in lines) / len(lines))


def excluded_names(nodes: Sequence[NodePlan], away: Collection[int]) -> tuple[str, ...]:
    """Return values for ``--exclude``, so that a launch leaves out the nodes ``away``; () if no node would remain.

    A value is a host name, or ``user@host:port`` if other nodes of the host remain. A node that has the same
    ``user@host:port`` as a remaining node cannot be left out, so there is no value for it.
    """
    others = [node for node in nodes if node.node_rank not in away]
    if not others:
        return ()
    staying, staying_targets = {node.host for node in others}, {node.target for node in others}
    lost = [node for node in nodes if node.node_rank in away]
    names = (node.host if node.host not in staying else node.target for node in lost)
    return tuple(name for name in dict.fromkeys(names) if name not in staying_targets)


def resume_command(run: str, exclude: Collection[str] = ()) -> str:
    """Return the command ``gnnfleet resume RUN``, with ``--exclude NAME`` for each name in ``exclude``."""
    return " ".join([f"gnnfleet resume {run}", *(f"--exclude {name}" for name in exclude)])


RunState = Literal["done", "failed", "stopped", "detached"]

_EXIT_STATUS: Mapping[RunState, int] = {"done": 0, "failed": 1, "stopped": 130, "detached": 0}

_EPOCHS_SHOWN = 12


Detached = Literal["", "asked", "trained", "queued", "unreachable"]


@dataclass(frozen=True)
class Lost:
    """Why and when a node was lost: it ended without a result, or could not be reached."""

    why: str
    when: float  #: seconds since the epoch, by this machine's clock
    out_of_reach: bool = False  #: the launcher could not reach the node, which may still run


@dataclass
class RunReport:
    """How a run went. Filled while it is followed and when its files are collected, then completed by ``conclude``.

    Keys of the mappings are node_ranks.
    """

    run_id: str
    folder: Path

    # While the run is followed.
    results: dict[int, Mapping[str, Any]] = field(default_factory=dict)  #: content of result.json
    lost: dict[int, Lost] = field(default_factory=dict)
    clocks: dict[int, float] = field(default_factory=dict)  #: node clock minus ours in seconds, estimated by heartbeats
    interrupted: str = ""  #: what interrupted the run on this machine: Ctrl-C, SIGTERM
    detached: Detached = ""
    findings: list[Mapping[str, Any]] = field(default_factory=list)  #: of the nodes: nan, stall, straggler, …
    notes: list[str] = field(default_factory=list)  #: processes that may still run, files that are missing

    # When its files are collected.
    records: Mapping[int, Sequence[Mapping[str, Any]]] = field(default_factory=dict)  #: outcome files of each node
    metrics: Metrics = field(default_factory=Metrics)

    # When it has ended.
    state: RunState = "detached"
    seconds: float = 0.0
    outcomes: tuple[Outcome, ...] = ()
    first_failure: Outcome | None = None
    stopped_by: str = ""  #: who requested the stop, as ``alice@laptop (gnnfleet stop)``, or ``Ctrl-C``
    restarts: tuple[Mapping[str, Any], ...] = ()  #: how the run started again: generation, text, nodes, seconds, …
    bundled: bool = False  #: the model is one of the bundled trainer
    out_of_reach: tuple[str, ...] = ()  #: hosts that could not be reached in the end, as ``--exclude`` names them

    @property
    def exit_status(self) -> int:
        """Exit status of the command: 0 if the run is done or detached, 130 if it was stopped.

        If the run failed, the status is at least 1: the highest exit status of the processes that failed by themselves.
        """
        own = [outcome.own_status for outcome in self.outcomes] if self.state == "failed" else []
        return max([_EXIT_STATUS[self.state], *own])

    def to_json(self) -> dict[str, Any]:
        nodes: dict[int, dict[str, Any]] = {}
        for one in self.outcomes:
            node = nodes.setdefault(one.node_rank, {"node_rank": one.node_rank, "host": one.host, "outcomes": []})
            node["outcomes"].append(one.to_json())
        metrics = self.metrics.summary()
        if self._last_loss is not None:
            metrics["last_loss"] = self._last_loss
        if self.checkpoint:
            metrics["checkpoint"] = str(self.checkpoint)  # on this machine instead of that on the node
        return {
            "run_id": self.run_id,
            "state": self.state,
            "exit_status": self.exit_status,
            "seconds": round(self.seconds, 3),
            "nodes": [node for _, node in sorted(nodes.items())],
            "first_failure": self.first_failure.to_json() if self.first_failure else None,
            "stopped_by": self.stopped_by,
            "findings": [dict(finding) for finding in self.findings],
            "metrics": metrics,
            "notes": list(self.notes),
            **({"trackers": [*found]} if (found := tracked_runs(self.folder)) else {}),
            **({"restarts": [dict(one) for one in self.restarts]} if self.restarts else {}),
        }

    @property
    def checkpoint(self) -> Path | None:
        """The last checkpoint in the run folder; None if no checkpoint was collected."""
        path = self.folder / "checkpoints" / "last.pt"
        return path if path.exists() else None

    @property
    def last_steps(self) -> list[Mapping[str, Any]]:
        """The last step line of each rank that took part in the last attempt."""
        ranks = self.restarts[-1]["ranks"].items() if self.restarts else ()
        names = {f"node{k}/metrics-rank{rank}.jsonl" for k, own in ranks for rank in own}
        steps = self.metrics.last_steps.items()
        return [line for path, line in steps if not names or f"{path.parent.name}/{path.name}" in names]

    @property
    def _last_loss(self) -> float | None:
        """Loss of the last epoch, else mean loss of the ranks' last recorded steps; None if unknown or not finite."""
        epochs = [line["loss"] for line in self.metrics.epochs() if line.get("loss") is not None]
        steps = [] if epochs else self.last_steps
        loss = epochs[-1] if epochs else _mean_loss(steps) if steps else math.nan
        return round(loss, 6) if math.isfinite(loss) else None

    def write(self) -> None:
        """Write result.json atomically."""
        write_whole(self.folder / "result.json", json.dumps(self.to_json(), indent=1) + "\n")


def print_report(report: RunReport, console: Console) -> None:
    """Print the report of a run: its results, or its first failure with the reason."""
    if report.state == "done":
        _print_done(report, console)
    elif report.state == "stopped":
        by = f" by {report.stopped_by}" if report.stopped_by else ""
        console.print(Text(f"\nStopped{by} after {report.seconds:.0f} s.", "bold yellow"), soft_wrap=True)
    elif (first := report.first_failure) is None:
        console.print()
        console.print(Text("The run failed, and no process reported a cause; see the logs.", "bold red"))
    else:
        aftermath = aftermath_of(first, report.outcomes)
        console.print()
        console.print(Text(f"The run failed: {first.sentence}{aftermath.lead}", "bold red"), soft_wrap=True)
        for line in first.last_lines:
            console.print(Text(f"  {line}"), soft_wrap=True)
        log = report.folder / first.log_name
        if log.exists():
            console.print(Text(f"log: {log}"), soft_wrap=True)
        for line in aftermath.lines:
            console.print(Text(line, "dim"), soft_wrap=True)
        if more := hint([first.code]):
            console.print(Text(more, "dim"))
    for finding in lasting_findings(report.findings):
        if not finding.get("stop"):  # a finding that ended the run is already printed as the failure
            console.print(Text(finding_words(finding), "yellow"), soft_wrap=True)
    if report.checkpoint:
        command = resume_command(report.run_id, report.out_of_reach)
        go_on = "" if report.state == "done" else f"; to continue from it: {command}"
        at = _checkpoint_position(report)
        console.print(Text(f"checkpoint: {report.checkpoint}{at and f' ({at})'}{go_on}"), soft_wrap=True)
        if report.state == "done" and report.bundled:
            console.print(Text(f"predictions of all nodes: gnnfleet infer {report.run_id}"), soft_wrap=True)
    for run in tracked_runs(report.folder):
        console.print(Text(tracked_words(run)), soft_wrap=True)
    for note in report.notes:
        console.print(Text(f"note: {note}", "yellow"), soft_wrap=True)
    if (report.folder / "report.html").exists():
        console.print(Text(f"report: {report.folder / 'report.html'}"), soft_wrap=True)
    console.print(Text(f"run folder: {report.folder}"), soft_wrap=True)


def _print_done(report: RunReport, console: Console) -> None:
    nan = nan_finding(report.findings)
    done = f"\nDone in {report.seconds:.1f} s" + (f", with a {nan_words(nan)}." if nan else ".")
    console.print(Text(done, "bold red" if nan else "bold green"), soft_wrap=True)
    epochs = [line for line in report.metrics.epochs() if line.get("rank") == 0]
    if epochs:
        on_val = [line for line in report.metrics.of_kind("eval") if line.get("split") == "val" and "epoch" in line]
        val_metric = metric_of(on_val)
        by_epoch = {line["epoch"]: val_metric.of(line) for line in on_val}
        score_column = [f"val {val_metric.title}"] if on_val else []
        table = Table("epoch", "seconds", "loss", *score_column, box=None, pad_edge=False)
        for column in table.columns:
            column.justify = "right"
        rows = []
        for line in epochs:
            values = (line.get("loss"), by_epoch.get(line["epoch"]))
            loss, score = ("–" if value is None else score_text(value) for value in values)
            seconds = "–" if line.get("seconds") is None else f"{line['seconds']:.2f}"
            rows.append((str(line["epoch"]), seconds, loss, score))
        skipped = len(rows) - _EPOCHS_SHOWN
        if skipped > 0:
            rows[1 : skipped + 1] = [("…", "", "", "")]
        for row in rows:
            table.add_row(*row[: len(table.columns)])
        console.print(table)
    elif steps := report.last_steps:
        last = max(steps, key=lambda line: (line["epoch"], line["step"]))
        at = f"epoch {last['epoch']}, step {last['step'] + 1}" + (f" of {last['steps']}" if "steps" in last else "")
        mean = f", mean of {count(len(steps), 'rank')}" if len(steps) > 1 else ""
        console.print(Text(f"last loss: {_mean_loss(steps):.4f}{mean} ({at})", "bold"))

    # How fast it was.
    node_of = {outcome.rank: outcome.node_rank for outcome in report.outcomes if outcome.rank is not None}
    known = report.metrics.throughput()
    if report.restarts:
        started = {rank for own in report.restarts[-1]["ranks"].values() for rank in own}
        known = {rank: speed for rank, speed in known.items() if rank in started}
    if known:
        parts = [f"node{node_of.get(rank, '?')}/rank{rank} {value:,.0f}" for rank, value in known.items()]
        counted = report.metrics.counted_epochs()
        which = f"{'epoch' if len(counted) == 1 else 'epochs'} {spans(counted)}"
        text = Text("throughput: ")
        text.append(", ".join(parts) if len(parts) <= 8 else f"{len(parts)} ranks")
        text.append(f" seeds/s; total {sum(known.values()):,.0f} (mean of {which})")
        console.print(text, soft_wrap=True)
    if report.metrics.profile:
        print_profile(report.metrics.profile, console, ended=True)
    if devices := device_line(device_uses(report.metrics.epochs()), node_of):
        console.print(Text(devices), soft_wrap=True)

    # What came out.
    result = report.metrics.result
    if why := result.get("ended_early"):
        console.print(Text(f"ended early after epoch {result.get('epochs')}: {why}"), soft_wrap=True)
    metric = metric_of([result])
    for split in ("test", "val"):
        if (value := metric.of(result, split)) is not None:
            text = Text(f"{split} {metric.title}: {score_text(value)}", "bold")
            beside, worse = metric.baseline(result, split)
            if beside:
                text.append(f"  baseline {beside}", "yellow" if worse else "not bold")
            console.print(text, soft_wrap=True)
    top = report.folder / "output"
    files = sorted(path for path in top.rglob("*") if path.is_file()) if top.is_dir() else []
    lines = [f"output: {count(len(files), 'file')} in {top}"] if files else []
    lines += [f"  {path.relative_to(top)}  {decimal(path.stat().st_size)}" for path in files[:_SHOWN]]
    lines += [f"  and {len(files) - _SHOWN:,} more"] if len(files) > _SHOWN else []
    for words in lines:
        console.print(Text(words), soft_wrap=True)


def _checkpoint_position(report: RunReport) -> str:
    """Return the position of the last checkpoint that a user's script saved: ``epoch 3, step 40 of 80``.

    '' if the position is unknown or is the end of an epoch.
    """
    saving = [line for line in report.last_steps if len(line.get("saved", ())) == 2]
    if not saving:
        return ""
    last = max(saving, key=lambda line: (*line["saved"],))
    epochs, step = last["saved"]
    of = last.get("steps", 0) if last["epoch"] == epochs + 1 else 0
    if step in (0, of) or any(line["epoch"] > epochs for line in report.metrics.epochs()):
        return ""  # log.epoch saves after the last step
    advice = "; log.epoch, called after each epoch, saves its end" if report.state == "done" else ""
    return f"epoch {epochs + 1}, step {step}" + (f" of {of}" if of else "") + advice
