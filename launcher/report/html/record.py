"""Reads the content of a report from a run's folder on this machine."""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.node.json_reader import checked, records
from launcher.node.json_records import EVENT, OUTCOME
from launcher.report.events import nan_finding
from launcher.report.metrics import Metrics, metrics_files, read_metrics
from launcher.report.outcome import Outcome
from launcher.report.run_folder import FoundRun, read_folder, resumed_runs

_LOG_LINES = 60  # number of last lines of a log that are shown

_LOG_BYTES = 1 << 16  # bytes read from the end of a log

Event = Mapping[str, Any]


@dataclass(frozen=True)
class RunRecord:
    """Data for the report of a run, read from its folder; a missing file leaves its field empty."""

    found: FoundRun
    metrics: Metrics
    events: tuple[Event, ...]  #: in order of time
    outcomes: tuple[Outcome, ...]  #: of all processes, by this machine's clock; empty while the run continues
    first: Outcome | None  #: the first failure
    log: tuple[str, ...] = ()  #: last lines of the log of ``first``
    manifest: Mapping[str, Any] | None = None  #: manifest of the parts, if this machine has the one that was sent
    before: Metrics | None = None  #: not analysed, of the run that this one resumed, if it is on this machine
    idle: float = 0.0  #: seconds for which no rank of a run that continues has made progress (``verdict.idle_of``)

    @property
    def result(self) -> Mapping[str, Any]:
        """Content of result.json; empty while the run continues."""
        return self.found.result or {}

    @property
    def state(self) -> str:
        """``done``, ``failed``, ``stopped`` or ``detached``; ``running`` without a result."""
        return str(self.result.get("state") or "running")

    @property
    def nan(self) -> Mapping[str, Any] | None:
        """The finding about the first loss that was NaN or infinite."""
        found = self.result.get("findings") or [event["finding"] for event in self.events if "finding" in event]
        return nan_finding(found)

    @property
    def folder(self) -> Path:
        assert self.found.folder is not None
        return self.found.folder

    @property
    def started(self) -> float:
        """Time of the launch or, if unknown, of the first event; seconds since the epoch."""
        times = [float(event["t"]) for event in self.events[:1]]
        return self.found.launch.started if self.found.launch else min(times, default=0.0)

    @property
    def node_of(self) -> dict[int, int]:
        """The node_rank of each rank."""
        plan = self.found.plan
        return {rank: node.node_rank for node in plan.nodes for rank in node.ranks} if plan else {}


def read_record(
    folder: Path, *, runs_dirs: Sequence[Path] = (), idle: float = 0.0, metrics: Metrics | None = None
) -> RunRecord:
    """Read a run's folder. Raises FleetError if a file in it is damaged, or its metrics cannot be analysed.

    ``runs_dirs``: further folders in which to look for the run that this run resumed. ``idle``: as in RunRecord.
    ``metrics``: those of the run, if they have been read.
    """
    found = read_folder(folder)
    metrics = metrics or read_metrics(metrics_files(folder)).analysed()
    resumed = next(resumed_runs(found, runs_dirs), None)
    before = read_metrics(metrics_files(resumed.folder)) if resumed and resumed.folder else None
    result = found.result or {}
    outcomes = (
        tuple(filter(None, (_outcome(one) for node in result["nodes"] for one in node["outcomes"]))) if result else ()
    )
    first = _outcome(result.get("first_failure"))
    events: list[Event] = []
    if (folder / "events.jsonl").is_file():
        with (folder / "events.jsonl").open("rb") as lines:
            events = sorted(records(EVENT, lines), key=lambda event: float(event["t"]))

    # The last lines of the log of the first failure.
    log: tuple[str, ...] = ()
    if first and (path := folder / first.log_name).is_file():
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _LOG_BYTES))
            text = file.read().decode("utf-8", "replace")
        log = tuple(deque(text.splitlines(), _LOG_LINES))

    # The manifest of the parts; the partition folder on this machine may no longer have the one that was sent.
    manifest = None
    if found.plan is not None and found.config is not None and found.plan.manifest:
        source = Path(found.config.data.folder).expanduser() / "manifest.json"
        data = source.read_bytes() if source.is_file() else b""
        if hashlib.sha256(data).hexdigest() == found.plan.manifest:
            manifest = dict(json.loads(data))
    return RunRecord(found, metrics, tuple(events), outcomes, first, log, manifest, before, idle)


def _outcome(values: Any) -> Outcome | None:
    """Convert an outcome from result.json; None if it is invalid or from another version."""
    known = checked(OUTCOME, values)
    return None if known is None else Outcome.from_record(known, str(known.get("host", "")))
