"""Describes how a process of a run ended: exit status, signal, OOM kill, traceback."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from launcher.errors import node_label
from launcher.node import exit_description
from launcher.report.explain import code_of_exception

#: Last lines of a process that failed only because another process had failed before.
_FOLLOW_UP = re.compile(
    r"connection closed by peer|connection reset by peer|broken pipe|socket closed|recvfrom failed|"
    r"(read|write) error .*peer|DistBackendError|DistNetworkError|DistStoreError|NCCL error|"
    r"Timed out waiting|wait timeout|gloo/transport/|ServiceError|not all ranks|store->get",
    re.IGNORECASE,
)

_OF_RANK = re.compile(r"error: rank (\d+) \(node\d+")

_LAST_LINES = 12


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
        )

    @classmethod
    def of_node(cls, node_rank: int, host: str, note: str, when: float, tail: Iterable[str] = ()) -> Outcome:
        """Create the Outcome of a node that failed: its connection was lost, or its supervisor did not start.

        note: why it counts as failed. tail: last lines of its output.
        """
        return cls("node", node_rank, host, None, None, None, None, when, True, False, False, note, (), tuple(tail))

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
        return cls(name, k, host, rank, None, None, None, when, True, False, False, str(cause["reason"]), (), ())

    @classmethod
    def of_stopped_node(cls, node_rank: int, host: str, signaled: str, when: float) -> Outcome:
        why = "its tmux session was closed" if signaled == "SIGHUP" else "somebody on the node stopped it"
        return cls.of_node(node_rank, host, f"its supervisor got {signaled}: {why}", when)

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
            return self.traceback
        return self.tail[-_LAST_LINES:]

    @property
    def code(self) -> str:
        """The code of the explanation of this end, as ``out-of-memory``; '' if there is none."""
        if self.found:
            return {"stall": "stalled", "nan": "loss-diverged"}.get(self.found, "")
        if self.oom:
            return "out-of-memory"
        if exception := exit_description.exception_of(vars(self)):
            return code_of_exception(exception)
        if self.signal:
            return "crashed" if self.signal in exit_description.CRASHES else "killed"
        return "node-lost" if self.name == "node" else ""

    @property
    def is_follow_up(self) -> bool:
        if self.oom or self.signal not in (None, "SIGABRT"):
            return False
        last = exit_description.last_exception_line(self.traceback) or "\n".join(
            self.tail if self.signal else self.tail[-3:]
        )
        # All ranks of a collective call end with the error of one.
        found = _OF_RANK.match(self.own_error)
        of_another = found is not None and self.rank is not None and int(found[1]) != self.rank
        return bool(_FOLLOW_UP.search(last)) or of_another

    @property
    def own_error(self) -> str:
        """The last ``error: …`` line in ``tail``, as gnnfleet's trainer prints for an error; '' if there is none."""
        return next((line for line in reversed(self.tail) if line.startswith("error: ")), "")

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "reason": self.reason, "sentence": self.sentence, "log": self.log_name}
