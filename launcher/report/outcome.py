"""Describes how the processes of a run ended: exit status, signal, OOM kill, traceback; and what followed a failure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from launcher.errors import node_label
from launcher.node import exit_description
from launcher.node.exit_description import Failure
from launcher.report.explain import explanations
from launcher.text import count, spans

_LAST_LINES = 12

_KINDS_SHOWN = 4

_LONGEST = 120  # characters of a folded reason

#: Parts in which the same error differs between processes: numbers and addresses.
_PARTICULAR = re.compile(r"\[?\b\d{1,3}(\.\d{1,3}){3}\b\]?(:\d+)?|0x[0-9a-f]+|\b\d+\b")

_NAMED = 8  # nodes and servers that are named in one line


@dataclass(frozen=True)
class Outcome:
    """How one process ended, or how a whole node was lost (``name`` is then ``node``)."""

    name: str  #: rank3, runner3, server, node
    node_rank: int
    host: str
    rank: int | None
    returncode: int | None  #: exit status as in a shell, 128 + n for signal n; None if unknown
    signal: str | None  #: name of the signal that ended the process
    started: float | None  #: seconds since the epoch, by this machine's clock
    ended: float | None
    failed: bool
    stopped: bool  #: stopped by its supervisor before it ended by itself
    oom: bool  #: killed by the kernel for lack of memory
    note: str  #: further description
    traceback: tuple[str, ...]
    tail: tuple[str, ...]  #: last lines of its output
    done_without: bool = False  #: the run continued without the node
    found: str = ""  #: kind of the finding that ended the run: stall, nan
    follow_up: bool = False  #: it seems to have failed because another process had ended

    @classmethod
    def from_record(cls, record: Mapping[str, Any], host: str, clock_offset: float = 0.0) -> Outcome:
        """Create an Outcome from a node's record of a process.

        ``clock_offset``: the node's clock minus this machine's, in seconds.
        """
        here = {name: record[name] - clock_offset if record[name] else None for name in ("started", "ended")}
        code = record["returncode"]
        return cls(
            name=record["name"],
            node_rank=record["node_rank"],
            host=host,
            rank=record["rank"],
            returncode=code,
            signal=record["signal"],
            started=here["started"],
            ended=here["ended"],
            failed=bool(record.get("failed", code not in (0, None))),
            stopped=bool(record.get("stopped", False)),
            oom=bool(record.get("oom", False)),
            note=record.get("note", ""),
            traceback=tuple(record["traceback"]),
            tail=tuple(record["tail"]),
            done_without=record.get("done_without") is True,
            follow_up=record.get("follow_up") is True,
        )

    @classmethod
    def of_node(cls, node_rank: int, host: str, note: str, when: float) -> Outcome:
        """Create the Outcome of a node that failed: its connection was lost, or its supervisor did not start.

        note: why it counts as failed.
        """
        return cls("node", node_rank, host, None, None, None, None, when, True, False, False, note, (), ())

    @classmethod
    def of_finding(cls, finding: Mapping[str, Any], host: str, when: float) -> Outcome:
        """Create the Outcome for a finding, a stall or a non-finite loss, that ended the run although no process
        failed.
        """
        note = str(finding["text"])
        name = "node" if finding.get("rank") is None else f"rank{finding['rank']}"
        rank = finding.get("rank")
        tail = tuple(finding.get("stacks") or ())
        return cls(name, finding["node_rank"], host, rank, None, None, None, when, True, False, False, note, (), tail,
                   found=str(finding["kind"]))  # fmt: skip

    @classmethod
    def of_cause(cls, cause: Mapping[str, Any], host: str, when: float) -> Outcome:
        """Create the Outcome of a failed process from another node's report, if its own node left no record of it."""
        name, k, rank = cause["name"], cause["node_rank"], cause["rank"]
        return cls(name, k, host, rank, None, None, None, when, True, False, False, str(cause["reason"]), (), (),
                   follow_up=cause.get("follow_up") is True)  # fmt: skip

    @property
    def log_name(self) -> str:
        """Path of the process's log file, relative to the run folder."""
        name = "supervisor" if self.name == "node" else re.sub(r"runner\d+", "runners", self.name)
        return f"logs/node{self.node_rank}/{name}.log"

    @property
    def place(self) -> str:
        who = f"rank {self.rank} on " if self.rank is not None else "" if self.name == "node" else f"{self.name} of "
        return f"{who}{node_label(self.node_rank, self.host)}"

    @property
    def reason(self) -> str:
        """How the process ended: ``was killed by signal 9 (SIGKILL)``; the note if no exit status is known."""
        if not (self.oom or self.signal or self.returncode):
            return self.note or "ended"
        return exit_description.describe(vars(self))

    @property
    def sentence(self) -> str:
        """Which process ended, and how: ``rank 3 on node1 (hostb) raised …``.

        If the reason is a note that names the node, the note alone.
        """
        if self.reason == self.note and node_label(self.node_rank, self.host) in self.note:
            return self.note
        return f"{self.place}{':' if self.reason == self.note else ''} {self.reason}"

    @property
    def own_status(self) -> int:
        """The return code, at least 1, of a process that failed by itself; 0 for any other process.

        It is also 0 if the run continued without the process.
        """
        return max(1, self.returncode or 0) if self.failed and not self.stopped and not self.done_without else 0

    @property
    def last_lines(self) -> tuple[str, ...]:
        """The traceback if an exception ended the process, else the last lines of its output."""
        if exit_description.exception_of(vars(self)):
            return tuple(map(exit_description.line_of_message, self.traceback))
        return tuple(map(exit_description.line_of_message, self.tail[-_LAST_LINES:]))

    @property
    def code(self) -> str:
        """The code of the explanation of this end, as ``out-of-memory``; '' if there is none."""
        if self.found:
            return {"stall": "stalled", "nan": "loss-diverged"}.get(self.found, "")
        if self.oom:
            return "out-of-memory"
        if exception := exit_description.exception_of(vars(self)):
            kind = exception.partition(":")[0]  # of the last line of a traceback, as ``ModuleNotFoundError: …``
            return next((entry.code for entry in explanations().values() if kind in entry.exceptions), "")
        if self.signal:
            return "crashed" if self.signal in exit_description.CRASHES else "killed"
        return "node-lost" if self.name == "node" else ""

    @property
    def failure(self) -> Failure:
        when = self.ended if self.ended is not None else float("inf")
        return Failure(
            when, self.node_rank, self.rank, "failure", self.follow_up, stopped=self.stopped,
            done_without=self.done_without,
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "reason": self.reason, "sentence": self.sentence, "log": self.log_name}


@dataclass(frozen=True)
class Aftermath:
    lead: str  #: ``, 3.2 s before 7 follow-up errors``; '' if nothing else failed
    lines: tuple[str, ...]  #: the errors that followed, equal ones in one line, then counts of stopped processes


def aftermath_of(first: Outcome, outcomes: Iterable[Outcome]) -> Aftermath:
    """Summarise the outcomes of all processes and nodes except ``first``, the first failure."""
    others = [outcome for outcome in outcomes if outcome is not first and not outcome.done_without]
    failed = [outcome for outcome in others if outcome.failed and not outcome.stopped]
    stopped = [outcome for outcome in others if outcome.stopped]

    # Equal errors are one line, those of most processes first.
    by_reason: dict[str, list[Outcome]] = {}
    for outcome in failed:
        by_reason.setdefault(_PARTICULAR.sub("…", outcome.reason), []).append(outcome)
    largest = sorted(by_reason.values(), key=len, reverse=True)
    lines = []
    for each in largest[:_KINDS_SHOWN]:
        reason = each[0].reason
        lines.append(f"then {_who(each)} {reason if len(reason) <= _LONGEST else f'{reason[: _LONGEST - 1]}…'}")
    if left := sum(map(len, largest[_KINDS_SHOWN:])):
        lines.append(f"then {count(left, 'more error')}, see the logs")
    kinds = Counter("rank" if outcome.rank is not None else outcome.name for outcome in stopped)
    if counts := [count(kinds[kind], kind) for kind in ("rank", "server", "node") if kinds[kind]]:
        lines.append(f"stopped after it: {' and '.join(counts)}")

    lead = ""
    if failed:
        errors = count(len(failed), "follow-up error")
        later = [outcome.ended - first.ended for outcome in failed if outcome.ended and first.ended]
        lead = f"; {errors}"
        if later and min(later) >= 0:  # else a consequence was recorded before its cause
            lead = f", {min(later):.1f} s before {errors}"
    return Aftermath(lead, tuple(lines))


def _who(outcomes: Sequence[Outcome]) -> str:
    """Return the names of processes: ``rank 4`` or ``ranks 0–2, 4``; servers and nodes by name."""
    ranks = sorted(outcome.rank for outcome in outcomes if outcome.rank is not None)
    others = [outcome.place for outcome in outcomes if outcome.rank is None]
    if len(others) > _NAMED:
        others = [*others[: _NAMED - 1], f"{len(others) - _NAMED + 1} more"]
    named = [f"{'ranks' if len(ranks) > 1 else 'rank'} {spans(ranks)}"] if ranks else []
    return ", ".join([*named, *others]) + (":" if others else "")
