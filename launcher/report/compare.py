"""Compares runs side by side, by their folders on this machine, for ``gnnfleet compare``."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from launcher.command import is_secret
from launcher.config.loader import to_yaml
from launcher.hostlist import fold
from launcher.node.json_reader import records
from launcher.node.json_records import EVENT
from launcher.report.device_use import known_number, mean
from launcher.report.metrics import Metrics, TaskMetric, metric_of, metrics_files, read_metrics
from launcher.report.profile import milliseconds
from launcher.report.run_folder import FoundRun, resumed_runs
from launcher.report.run_history import Entry, entry_of
from launcher.text import seconds_words

_Form = Literal["text", "score", "seconds", "rate", "bytes", "share", "spent"]

_Better = Literal["more", "less", ""]

_Section = Literal["run", "config", "results", "speed", "step", "loss", "metric", "versions"]

_GRAPH = ("data.dataset", "data.source", "data.options", "data.serving")  #: config keys that select the graph

_NOT_ENDED = ("open", "running", "preparing")  #: states of a run whose result was not collected

_CUT = ("data.num_parts", "data.partition", "nodes.*.role", "nodes.*.host")  #: config keys that affect the partition


@dataclass(frozen=True)
class RunFigures:
    """Settings, results and metrics of one run, read from its folder. The mappings omit unknown values."""

    entry: Entry
    config: Mapping[str, Any]  #: by dotted key; keys of nodes as ``nodes.*.procs``, one value if all nodes agree
    own_command: str  #: '' for the bundled trainer
    parts: str  #: fingerprint of the parts it trained on; '' if unknown
    versions: Mapping[str, str]  #: by package, and the digest of gnnfleet's code as ``code``
    metrics: Metrics
    earlier: tuple[Metrics, ...] = ()  #: of the runs that this one resumed, oldest first; only those on this machine

    @property
    def run_id(self) -> str:
        return self.entry.run_id

    def seconds_by_epoch(self) -> dict[int, float]:
        """Return the duration of each epoch of this run, from the epoch lines of rank 0."""
        return _values_by_epoch(self.metrics, "seconds")

    def loss_by_epoch(self) -> dict[int, float]:
        """Return the mean loss over all ranks of each epoch, with those of the runs that this one resumed."""
        return _continued(_values_by_epoch(one, "loss") for one in (*self.earlier, self.metrics))

    @property
    def metric(self) -> TaskMetric:
        return metric_of([*self.metrics.of_kind("eval"), self.metrics.result])

    def metric_by_epoch(self) -> dict[int, float]:
        """Return the task's metric on the val split after each epoch, with those of the runs that this one resumed."""
        metric = self.metric

        def values(metrics: Metrics) -> dict[int, float]:
            lines = [line for line in metrics.of_kind("eval") if line.get("split") == "val" and "epoch" in line]
            return {line["epoch"]: value for line in lines if (value := metric.of(line)) is not None}

        return _continued(map(values, (*self.earlier, self.metrics)))


@dataclass(frozen=True)
class Row:
    """One row of a comparison: a title and the value of every run; None if the value is unknown."""

    section: _Section
    title: str
    values: tuple[Any, ...]
    form: _Form = "text"
    better: _Better = ""

    @property
    def best(self) -> tuple[int, ...]:
        """Indices of the runs with the best value, after rounding as for display.

        Empty if neither higher nor lower values are better in this row, or if all known values are equal.
        """
        digits = {"score": 4, "share": 2}.get(self.form)
        known = {}
        for i, value in enumerate(map(known_number, self.values)):
            if value is not None and math.isfinite(value):
                text = f"{value:.{2 if self.form == 'bytes' else 3}g}"
                known[i] = float(text) if digits is None else round(value, digits)
        if not self.better or len(set(known.values())) < 2:
            return ()
        best = (max if self.better == "more" else min)(known.values())
        return tuple(i for i, value in known.items() if value == best)

    @property
    def differs(self) -> bool:
        """Whether two runs have different values; unknown values do not count."""
        return _unlike(value for value in self.values if value is not None)


@dataclass(frozen=True)
class Comparison:
    runs: tuple[RunFigures, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]  #: why figures may not be comparable, or are missing

    def of(self, section: _Section) -> list[Row]:
        return [row for row in self.rows if row.section == section]

    def to_json(self) -> dict[str, Any]:
        """Return what ``gnnfleet compare --json`` prints.

        In each row, ``values`` are in the order of ``runs``, and ``best`` has indices into ``runs``.
        """
        names = ("section", "title", "values", "best")
        return {
            "runs": [{"run_id": run.run_id, "folder": run.entry.folder} for run in self.runs],
            "notes": list(self.notes),
            "rows": [{name: getattr(row, name) for name in names} for row in self.rows],
        }


def figures_of(found: FoundRun, runs_dirs: Sequence[Path] = ()) -> RunFigures:
    """Read the folder of a run; raises FleetError if a file in the folder is damaged.

    ``runs_dirs``: further folders in which to look for the runs that it resumed.
    """
    assert found.folder is not None, "only runs known here are compared"
    entry = entry_of(found.folder)

    # The settings by dotted key. A user's own command ignores those of ``train``.
    config: dict[str, Any] = {}
    if found.config:
        tree = yaml.safe_load(to_yaml(found.config))
        of_nodes = tree.pop("nodes")
        if found.own:
            tree.pop("train", None)
        for key in dict.fromkeys(key for node in of_nodes for key in node):
            values = [node.get(key) for node in of_nodes]
            if not _unlike(values):
                config[f"nodes.*.{key}"] = values[0]
            else:  # different strings as a text with ranges, such as gpu[1-2]
                texts = all(isinstance(value, str) for value in values)
                config[f"nodes.*.{key}"] = fold(values) if texts else values
        config |= dict(_leaves(tree))

    # The name of the folder that has the parts on a node is their fingerprint.
    nodes = found.plan.nodes if found.plan else ()
    parts = next((node.data_dir for node in nodes if node.data_dir.startswith(f"{node.workdir}/data/")), "")

    # Versions of packages, from the events of preflight: all that nodes have; and the digest of gnnfleet's code.
    events = found.folder / "events.jsonl"
    found_versions: dict[str, list[str]] = {}
    for event in records(EVENT, events.read_bytes().split(b"\n") if events.is_file() else ()):
        for name, version in event.get("versions", {}).items() if event.get("kind") == "versions" else ():
            found_versions.setdefault(name, []).append(str(version))
    versions = {}
    for name, of_package in sorted(found_versions.items()):
        if text := ", ".join(dict.fromkeys(filter(None, of_package))):
            versions[name] = text
    if found.plan:
        versions["code"] = found.plan.code_digest[:12]
    metrics = _metrics(found.folder).analysed()
    earlier = [_metrics(run.folder) for run in resumed_runs(found, runs_dirs) if run.folder]
    return RunFigures(
        entry,
        config,
        " ".join(found.launch.own_command) if found.launch else "",
        Path(parts).name,
        versions,
        metrics,
        tuple(reversed(earlier)),
    )


def _metrics(folder: Path) -> Metrics:
    return read_metrics(metrics_files(folder) or sorted(folder.glob("metrics.jsonl")))


def _continued(curves: Iterable[Mapping[int, float]]) -> dict[int, float]:
    """Join values by epoch of runs that resumed each other: epochs that were made again count once."""
    joined: dict[int, float] = {}
    for curve in curves:
        first = min(curve, default=math.inf)
        joined = {**{epoch: value for epoch, value in joined.items() if epoch < first}, **curve}
    return joined


def compare(runs: Sequence[RunFigures]) -> Comparison:
    """Compare runs. The best loss and metric are marked only if all runs use the same graph."""
    rows: list[Row] = []

    def add(section: _Section, title: str, values: Iterable[Any], form: _Form = "text", better: _Better = "") -> None:
        row = Row(section, title, tuple(values), form, better)
        if any(value is not None for value in row.values):
            rows.append(row)

    # How each run went.
    entries = [run.entry for run in runs]
    add("run", "state", (entry.state for entry in entries))
    add("run", "why", (" ".join(entry.why.split()) or None if entry.state != "done" else None for entry in entries))
    rows.append(Row("run", "took", tuple(entry.seconds for entry in entries), "seconds"))
    add("run", "size", (entry.size or None for entry in entries))
    add("run", "from", (entry.resumed_from for entry in entries))
    if any(run.own_command for run in runs):
        add("run", "command", (run.own_command or "the bundled trainer" for run in runs))

    # Settings that differ. Those of ``train`` do not concern runs of a user's own command, which have none.
    configs = [run.config for run in runs]
    differing = {}
    for key in dict.fromkeys(key for config in configs for key in config):
        trains = key.startswith("train.")
        reading = [one for one in configs if one and (not trains or any(name.startswith("train.") for name in one))]
        if _unlike(config.get(key) for config in reading):
            differing[key] = Row("config", key, tuple(_masked(key, config.get(key)) for config in configs))
    rows += differing.values()

    # Results; a better score on another graph says nothing.
    same_graph = not any(_is_of(key, _GRAPH) for key in differing)
    for metric in dict.fromkeys(run.metric for run in runs):
        for split in ("test", "val"):
            scores = (metric.of(run.metrics.result, split) for run in runs)
            add("results", f"{split} {metric.title}", scores, "score", metric.better if same_graph else "")
    losses = [run.loss_by_epoch() for run in runs]
    last = (curve[max(curve)] if curve else None for curve in losses)
    add("results", "last loss", last, "score", "less" if same_graph else "")

    # Speed; without the first of several epochs, which includes compilation.
    epochs = [[seconds for _, seconds in sorted(run.seconds_by_epoch().items())] for run in runs]
    add("speed", "an epoch", (mean(seconds[1:] or seconds) for seconds in epochs), "seconds", "less")
    add("speed", "seeds/s", (sum(run.metrics.throughput().values()) or None for run in runs), "rate", "more")
    profiles = [run.metrics.profile for run in runs]
    add("speed", "from other hosts, an epoch", (one and one.remote_bytes for one in profiles), "bytes", "less")
    add("speed", "remote rows cached", (one.hit_rate if one else None for one in profiles), "share", "more")
    add("speed", "remote rows held", (one.held_rate if one else None for one in profiles), "share")
    add("step", "a step", (one and one.step_s for one in profiles), "spent", "less")
    for kind in dict.fromkeys(kind for one in profiles if one for kind in one.spent):
        if any(one and one.share[kind] >= 0.005 for one in profiles):
            add("step", kind, (one and one.spent[kind] for one in profiles), "spent")

    # Curves, if all runs have the same metric.
    curves: list[tuple[_Section, list[dict[int, float]], _Better]] = [("loss", losses, "less")]
    if len({run.metric for run in runs}) == 1:
        curves.append(("metric", [run.metric_by_epoch() for run in runs], runs[0].metric.better))
    for section, of_runs, better in curves:
        for epoch in sorted({epoch for curve in of_runs for epoch in curve}):
            add(section, str(epoch), (curve.get(epoch) for curve in of_runs), "score", better if same_graph else "")

    for package in dict.fromkeys(name for run in runs for name in run.versions):
        add("versions", package, (run.versions.get(package) or None for run in runs))
    return Comparison(tuple(runs), tuple(rows), tuple(_notes(runs, differing)))


def _notes(runs: Sequence[RunFigures], differing: Mapping[str, Row]) -> Iterator[str]:
    graph = [key for name in _GRAPH for key in differing if _is_of(key, [name])]
    if graph:
        yield f"different graphs ({', '.join(graph)}): metrics and losses are not comparable"
    elif len({run.parts for run in runs if run.parts}) > 1 and not any(_is_of(key, _CUT) for key in differing):
        yield "the same settings but different parts: the graph's files or the partitioner changed between the runs"
    if "train.seed" in differing:
        seeds = ", ".join(str(value) for value in differing["train.seed"].values if value is not None)
        yield f"different seeds (train.seed {seeds}): small differences may be chance"
    lengths = {run.run_id: len(run.seconds_by_epoch()) for run in runs}
    short = [run_id for run_id, epochs in lengths.items() if epochs == 1]
    if short and max(lengths.values()) > 1:
        yield f"{', '.join(short)}: only one epoch, so its times include compilation; those of longer runs do not"
    for run in runs:
        if run.entry.state != "done":
            yield f"{run.run_id} is not done ({run.entry.state}): its figures cover only what was collected"
        if not run.metrics.lines and run.entry.state in _NOT_ENDED:
            yield f"{run.run_id}: its metrics were not collected; `gnnfleet collect {run.run_id}` fetches them"


def _masked(key: str, value: Any) -> Any:
    """Return the value of a setting as it is shown: without credentials in ``env`` and addresses in ``run.notify``."""
    if isinstance(value, list):
        return ["***" if key == "run.notify" else _masked(key, one) for one in value]
    if key != "nodes.*.env" or not isinstance(value, Mapping):
        return value
    return {name: "***" if is_secret(name, text) else text for name, text in value.items()}


def _unlike(values: Iterable[Any]) -> bool:
    return len({json.dumps(value, sort_keys=True, default=str) for value in values}) > 1


def _leaves(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _values_by_epoch(metrics: Metrics, what: str) -> dict[int, float]:
    lines = (line for line in metrics.of_kind("epoch") if line.get("rank") == 0)
    return {line["epoch"]: line[what] for line in lines if line.get(what) is not None and "epoch" in line}


def _is_of(key: str, sections: Iterable[str]) -> bool:
    return any(key == section or key.startswith(f"{section}.") for section in sections)


_TITLES: dict[_Section, str] = {
    "config": "config, where it differs",
    "results": "results",
    "speed": "speed",
    "step": "where a step's time goes",
    "loss": "loss by epoch",
    "metric": "val {metric} by epoch",
    "versions": "versions, where they differ",
}

_STATES = {"done": "green", "failed": "red", "never started": "red", "damaged": "red"}

_EPOCHS_SHOWN = 12


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print notes that say what cannot be compared, then a table with a column for each run."""
    for note in comparison.notes:
        console.print(Text(f"note: {note}", "yellow"), soft_wrap=True)
    console.print(rendered(comparison))
    if all(run.config for run in comparison.runs) and not comparison.of("config"):
        console.print(Text("config: the same"), soft_wrap=True)
    versions = [row for row in comparison.of("versions") if not row.differs]
    if same := ", ".join(f"{row.title} {next(filter(None, row.values))}" for row in versions):
        console.print(Text(f"the same versions of: {same}"), soft_wrap=True)
    if any(row.best for row in comparison.rows):
        console.print(Text("* best"), soft_wrap=True)


def rendered(comparison: Comparison) -> Table:
    """Return the table. Of many epochs it has the first and the last, of package versions those that differ."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("", no_wrap=True)
    for run in comparison.runs:
        table.add_column(escape(run.run_id), overflow="fold")
    for row in comparison.of("run"):
        table.add_row(row.title, *_cells(row))
    named = comparison.runs[0].metric.title if comparison.runs else ""
    for section, title in _TITLES.items():
        shown: list[Row | None] = [row for row in comparison.of(section) if section != "versions" or row.differs]
        if section in ("loss", "metric") and len(shown) > _EPOCHS_SHOWN + 1:
            shown = [shown[0], None, *shown[-_EPOCHS_SHOWN:]]
        if shown:
            table.add_row()
            table.add_row(Text(title.format(metric=named), "bold"))
        for each in shown:
            table.add_row("  …") if each is None else table.add_row(f"  {escape(each.title)}", *_cells(each))
    return table


_FORMS: Mapping[_Form, Callable[[Any], str]] = {
    "score": "{:.4f}".format,
    "seconds": lambda value: f"{value:.2f} s" if value < 60 else seconds_words(value),
    "rate": "{:,.0f}".format,
    "bytes": lambda value: str(decimal(round(value))),
    "share": "{:.0%}".format,
    "spent": milliseconds,
    "text": lambda value: _text(value),
}


def _cells(row: Row) -> Iterator[Text]:
    for i, value in enumerate(row.values):
        words = "–" if value is None else _FORMS[row.form](value)
        text = Text(words, _STATES.get(str(value), "") if row.title == "state" else "")
        yield Text(f"{words} *", "bold green") if i in row.best else text


def _text(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    return str(value).lower() if isinstance(value, bool) else "–" if value is None else str(value)
