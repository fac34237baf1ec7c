"""What came of a run: the report as a value, its files, and the text a user reads at the end."""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from launcher.errors import FleetError
from launcher.files import appearing, write_whole
from launcher.report.first_failure import aftermath_of
from launcher.report.goingon import resume_command
from launcher.report.outcome import Outcome
from launcher.report.ownend import last_loss, output_lines
from launcher.report.profile import Profile, analyse, print_profile
from launcher.words import spans

RunState = Literal["done", "failed", "interrupted", "detached"]

_EXIT_STATUS: Mapping[RunState, int] = {"done": 0, "failed": 1, "interrupted": 130, "detached": 0}

_EPOCHS_SHOWN = 12

_BLOCK = 1 << 16  # bytes of a metrics file read at once


@dataclass(frozen=True)
class Metrics:
    """The metrics lines of all ranks but the steps, in order of time (see docs/ARCHITECTURE.md). A long run has many
    millions of steps: they stay in ``files``."""

    lines: tuple[Mapping[str, Any], ...] = ()
    files: tuple[Path, ...] = ()  #: of all ranks, whole
    profile: Profile | None = None  #: where their time went; None where they do not tell, or before ``analysed``

    def of_kind(self, kind: str) -> list[Mapping[str, Any]]:
        return [line for line in self.lines if line.get("kind") == kind]

    @property
    def result(self) -> Mapping[str, Any]:
        """The last ``result`` line; empty when the run did not get there."""
        found = self.of_kind("result")
        return found[-1] if found else {}

    def analysed(self) -> Metrics:
        """With ``profile``; raises FleetError when the analysis fails."""
        return replace(self, profile=analyse(self.files).profile)

    def summary(self) -> dict[str, Any]:
        """For result.json: accuracies, epoch times, where the time went, and each rank's mean seeds per second."""
        result = {key: value for key, value in self.result.items() if key not in ("t", "kind", "rank")}
        result |= {"profile": dict(self.profile.summary)} if self.profile else {}
        speed = {str(rank): round(value, 1) for rank, value in self.throughput().items()}
        return {**result, "seeds_per_s": speed} if speed else result

    def throughput(self) -> dict[int, float]:
        """Mean seeds per second of each rank over its epochs; the first, which compiles, left out if it can be.

        Ranks take every step together, so an epoch lasts from when the last of them begins it: the others wait for
        rank 0, which evaluates and saves in between.
        """
        by_rank: dict[int, list[Mapping[str, Any]]] = {}
        lasted: dict[int, float] = {}
        for line in self.of_kind("epoch"):
            by_rank.setdefault(line["rank"], []).append(line)
            lasted[line["epoch"]] = min(line["seconds"], lasted.get(line["epoch"], line["seconds"]))
        found = {}
        for rank, epochs in sorted(by_rank.items()):
            counted = epochs[1:] or epochs
            seconds = sum(lasted[line["epoch"]] for line in counted)
            found[rank] = sum(line["seeds"] for line in counted) / seconds if seconds else 0.0
        return found

    def counted_epochs(self) -> list[int]:
        """Those that ``throughput`` goes by, ascending."""
        epochs = sorted({line["epoch"] for line in self.of_kind("epoch")})
        return epochs[1:] or epochs


@dataclass(frozen=True)
class RunReport:
    """A finished run."""

    run_id: str
    state: RunState
    outcomes: tuple[Outcome, ...]
    first_failure: Outcome | None
    metrics: Metrics
    seconds: float
    folder: Path
    notes: tuple[str, ...] = field(default=())  #: what could not be collected, or may still run
    findings: tuple[Mapping[str, Any], ...] = field(default=())  #: of the nodes: nan, stall, straggler
    stopped_by: str = ""  #: who asked for the end, as ``alice@laptop (gnnfleet stop)``
    out_of_reach: tuple[str, ...] = ()  #: hosts that nobody could reach in the end, as ``--exclude`` names them

    @property
    def exit_status(self) -> int:
        """Of a failed run the highest of all processes that failed by themselves, as Slurm has it."""
        own = [outcome.own_status for outcome in self.outcomes] if self.state == "failed" else []
        return max([_EXIT_STATUS[self.state], *own])

    def to_json(self) -> dict[str, Any]:
        """The content of result.json."""
        return {
            "run_id": self.run_id,
            "state": self.state,
            "exit_status": self.exit_status,
            "seconds": round(self.seconds, 3),
            "nodes": _by_node(self.outcomes),
            "first_failure": self.first_failure.to_json() if self.first_failure else None,
            "stopped_by": self.stopped_by,
            "findings": [dict(finding) for finding in self.findings],
            "metrics": self._summary(),
            "notes": list(self.notes),
        }

    @property
    def checkpoint(self) -> Path | None:
        """The last checkpoint, if one has come here."""
        path = self.folder / "checkpoints" / "last.pt"
        return path if path.exists() else None

    def _summary(self) -> dict[str, Any]:
        """The metrics' own, with the checkpoint as it lies here instead of on its node."""
        summary = self.metrics.summary()
        return summary | ({"checkpoint": str(self.checkpoint)} if self.checkpoint else {})

    def write(self) -> None:
        """Write result.json and metrics.jsonl, each whole."""
        with appearing(self.folder / "metrics.jsonl") as out:
            out.writelines(line.text for line in _merged(self.metrics.files))
        write_whole(self.folder / "result.json", json.dumps(self.to_json(), indent=1) + "\n")


def written(report: RunReport) -> RunReport:
    """Analyse the metrics, write the report's files; returns it with notes on what failed, as its words still count."""
    report = _analysed(report)
    try:
        report.write()
    except OSError as error:
        note = f"the report could not be written: {error.filename or report.folder}: {error.strerror}"
        return replace(report, notes=(*report.notes, note))
    return _with_html(report)


def _analysed(report: RunReport) -> RunReport:
    try:
        return replace(report, metrics=report.metrics.analysed())
    except FleetError as error:
        return replace(report, notes=(*report.notes, str(error)))


def _with_html(report: RunReport) -> RunReport:
    """With report.html in its folder. A picture must not cost a run its words, so whatever fails here is a note."""
    from launcher.report.html.made import write_html

    try:
        write_html(report.folder)
    except Exception as error:  # noqa: BLE001
        why = error if isinstance(error, FleetError) else f"{type(error).__name__}: {error}"
        return replace(report, notes=(*report.notes, f"report.html was not made: {why}"))
    return report


def _by_node(outcomes: Iterable[Outcome]) -> list[dict[str, Any]]:
    nodes: dict[int, dict[str, Any]] = {}
    for outcome in outcomes:
        node = nodes.setdefault(
            outcome.node_rank, {"node_rank": outcome.node_rank, "host": outcome.host, "outcomes": []}
        )
        node["outcomes"].append(outcome.to_json())
    return [nodes[node_rank] for node_rank in sorted(nodes)]


class _Line(NamedTuple):
    t: float
    text: bytes
    values: Mapping[str, Any]


def read_metrics(files: Iterable[Path]) -> Metrics:
    """Merge metrics files by time; a last line cut short by a killed writer is left out."""
    files = tuple(files)
    lines = tuple(line.values for line in _merged(files) if line.values.get("kind") != "step")
    return Metrics(lines, files)


def metrics_lines(files: Iterable[Path]) -> Iterator[Mapping[str, Any]]:
    """All lines, file by file."""
    return (line.values for file in files for line in _lines_of(file))


def _merged(files: Iterable[Path]) -> Iterator[_Line]:
    return heapq.merge(*map(_lines_of, files), key=attrgetter("t"))


def _lines_of(file: Path) -> Iterator[_Line]:
    for text in _texts(file):
        try:
            values = json.loads(text)
            yield _Line(float(values.get("t", 0.0)), text.rstrip(b"\n") + b"\n", values)
        except (ValueError, TypeError, AttributeError):  # cut short, or an own script's
            continue


def _texts(file: Path) -> Iterator[bytes]:
    """Its lines; it is not kept open, as there may be more ranks than files a program may open."""
    offset = 0
    while True:
        with file.open("rb") as opened:
            opened.seek(offset)
            lines = opened.readlines(_BLOCK)
            offset = opened.tell()
        if not lines:
            return
        yield from lines


def print_report(report: RunReport, console: Console) -> None:
    """The closing text: results, or what failed first and why."""
    if report.state == "done":
        _print_done(report, console)
    elif report.state == "interrupted":
        by = f" by {report.stopped_by}" if report.stopped_by else ""
        told = "" if by else "; every node was told to stop"
        word = "Stopped" if by else "Interrupted"
        console.print(Text(f"\n{word}{by} after {report.seconds:.0f} s{told}.", "bold yellow"), soft_wrap=True)
    else:
        _print_failure(report, console)
    for finding in report.findings:
        if not finding.get("stop"):  # one that ended the run leads the report
            console.print(Text(f"{finding['kind']}: {finding['text']}", "yellow"), soft_wrap=True)
    if report.checkpoint:
        again = resume_command(report.run_id, report.out_of_reach)
        go_on = "" if report.state == "done" else f"; to go on from it: {again}"
        console.print(Text(f"checkpoint: {report.checkpoint}{go_on}"), soft_wrap=True)
    for note in report.notes:
        console.print(Text(f"note: {note}", "yellow"), soft_wrap=True)
    if (report.folder / "report.html").exists():
        console.print(Text(f"report: {report.folder / 'report.html'}"), soft_wrap=True)
    console.print(Text(f"run folder: {report.folder}"), soft_wrap=True)


def _print_done(report: RunReport, console: Console) -> None:
    console.print(Text(f"\nDone in {report.seconds:.1f} s.", "bold green"))
    epochs = [line for line in report.metrics.of_kind("epoch") if line["rank"] == 0]
    if epochs:
        console.print(_epoch_table(epochs, report.metrics.of_kind("eval")))
    elif last := last_loss(report.metrics.files):
        console.print(Text(last, "bold"))
    throughput = report.metrics.throughput()
    if throughput:
        told = _throughput_table(throughput, report.outcomes, report.metrics.counted_epochs())
        console.print(told, soft_wrap=True)
    if report.metrics.profile:
        print_profile(report.metrics.profile, console)
    result = report.metrics.result
    for split in ("test", "val"):
        if result.get(f"{split}_accuracy") is not None:
            console.print(Text(f"{split} accuracy: {result[f'{split}_accuracy']:.4f}", "bold"))
    for line in output_lines(report.folder):
        console.print(Text(line), soft_wrap=True)


def _epoch_table(epochs: Sequence[Mapping[str, Any]], evals: Iterable[Mapping[str, Any]]) -> Table:
    val = {line["epoch"]: line["accuracy"] for line in evals if line["split"] == "val"}
    table = Table("epoch", "seconds", "loss", "val accuracy", title=None, box=None, pad_edge=False)
    for column in table.columns:
        column.justify = "right"
    skipped = max(0, len(epochs) - _EPOCHS_SHOWN)
    for line in epochs[:1] if skipped else []:
        table.add_row(*_epoch_row(line, val))
        table.add_row("…", "", "", "")
    for line in epochs[skipped + 1 :] if skipped else epochs:
        table.add_row(*_epoch_row(line, val))
    return table


def _epoch_row(line: Mapping[str, Any], val: Mapping[int, float]) -> tuple[str, str, str, str]:
    accuracy = val.get(line["epoch"])
    shown = f"{accuracy:.4f}" if accuracy is not None else "–"
    return str(line["epoch"]), f"{line['seconds']:.2f}", f"{line['loss']:.4f}", shown


def _nodes_of(outcomes: Iterable[Outcome]) -> dict[int, int]:
    """node_rank by rank."""
    return {outcome.rank: outcome.node_rank for outcome in outcomes if outcome.rank is not None}


def _throughput_table(throughput: Mapping[int, float], outcomes: Iterable[Outcome], epochs: Sequence[int]) -> Text:
    node_of = _nodes_of(outcomes)
    text = Text("throughput: ")
    parts = [f"node{node_of.get(rank, '?')}/rank{rank} {value:,.0f}" for rank, value in throughput.items()]
    text.append(", ".join(parts) if len(parts) <= 8 else f"{len(parts)} ranks")
    which = f"{'epoch' if len(epochs) == 1 else 'epochs'} {spans(epochs)}"
    return text.append(f" seeds/s; all together {sum(throughput.values()):,.0f} (mean of {which})")


def _print_failure(report: RunReport, console: Console) -> None:
    first = report.first_failure
    console.print()
    if first is None:
        console.print(Text("The run failed, and no process left word of why.", "bold red"))
        return
    aftermath = aftermath_of(first, report.outcomes)
    console.print(Text(f"The run failed: {first.sentence}{aftermath.lead}", "bold red"), soft_wrap=True)
    for line in first.last_lines:
        console.print(Text(f"  {line}"), soft_wrap=True)
    log = report.folder / first.log_name
    if log.exists():
        console.print(Text(f"log: {log}"), soft_wrap=True)
    for line in aftermath.lines:
        console.print(Text(line, "dim"), soft_wrap=True)
