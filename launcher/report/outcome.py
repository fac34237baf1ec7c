"""How each process of a run ended: exit status, signal, OOM kill, traceback, in words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from launcher.errors import node_label
from launcher.node import exit_description

#: Last lines of a process that only fell because another one had fallen before it.
_FOLLOW_UP = re.compile(
    r"connection closed by peer|connection reset by peer|broken pipe|socket closed|recvfrom failed|"
    r"(read|write) error .*peer|DistBackendError|DistNetworkError|DistStoreError|NCCL error|"
    r"Timed out waiting|wait timeout|gloo/transport/|ServiceError|not all ranks|store->get",
    re.IGNORECASE,
)

_LAST_LINES = 12


@dataclass(frozen=True)
class Outcome:
    """The end of one process, or of a whole node that was lost (``name`` is then ``node``)."""

    name: str  #: rank3, server, node
    node_rank: int
    host: str
    rank: int | None
    returncode: int | None  #: as a shell says it: 128 + n for signal n; None when not known
    signal: str | None
    started: float | None  #: seconds since the epoch, by this machine's clock
    ended: float | None
    failed: bool
    stopped: bool  #: told to stop before it ended by itself
    oom: bool
    note: str
    traceback: tuple[str, ...]
    tail: tuple[str, ...]
    done_without: bool = False  #: the run went on without its node

    @classmethod
    def from_record(cls, record: Mapping[str, Any], host: str, clock_offset: float = 0.0) -> Outcome:
        """From a node's outcome record; ``clock_offset`` is the node's clock minus ours, in seconds."""
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
        """A node as a whole failed: its line was lost, or its supervisor never came up."""
        return cls("node", node_rank, host, None, None, None, None, when, True, False, False, note, (), tuple(tail))

    @classmethod
    def of_finding(cls, finding: Mapping[str, Any], host: str, when: float) -> Outcome:
        """What ended the run although no process had failed: a stall, or a loss that is no number."""
        note = str(finding["text"])
        name = "node" if finding.get("rank") is None else f"rank{finding['rank']}"
        rank = finding.get("rank")
        tail = tuple(finding.get("stacks") or ())
        return cls(name, finding["node_rank"], host, rank, None, None, None, when, True, False, False, note, (), tail)

    @classmethod
    def of_cause(cls, cause: Mapping[str, Any], host: str, when: float) -> Outcome:
        """A process as other nodes heard that it failed; its own node left no word."""
        name, k, rank = cause["name"], cause["node_rank"], cause["rank"]
        return cls(name, k, host, rank, None, None, None, when, True, False, False, str(cause["reason"]), (), ())

    @classmethod
    def of_stopped_node(cls, node_rank: int, host: str, signaled: str, when: float) -> Outcome:
        """A node whose supervisor was told to stop by a signal, so not by us."""
        why = "its tmux session was closed" if signaled == "SIGHUP" else "somebody on the node stopped it"
        return cls.of_node(node_rank, host, f"its supervisor got {signaled}: {why}", when)

    @property
    def log_name(self) -> str:
        """The log file that tells more, relative to the run folder."""
        return f"logs/node{self.node_rank}/{'supervisor' if self.name == 'node' else self.name}.log"

    @property
    def place(self) -> str:
        """``rank 3 on node1 (hostb)``."""
        who = f"rank {self.rank} on " if self.rank is not None else "" if self.name == "node" else f"{self.name} of "
        return f"{who}{node_label(self.node_rank, self.host)}"

    @property
    def reason(self) -> str:
        """What became of it, in words: ``was killed by signal 9 (SIGKILL)``; of a node or server the note."""
        if not (self.oom or self.signal or self.returncode):
            return self.note or "ended"
        return exit_description.describe(vars(self))

    @property
    def sentence(self) -> str:
        """``rank 3 on node1 (hostb) raised ValueError: …``; a note that says where stands alone."""
        if self.reason == self.note and node_label(self.node_rank, self.host) in self.note:
            return self.note
        return f"{self.place}{':' if self.reason == self.note else ''} {self.reason}"

    @property
    def own_status(self) -> int:
        """The exit status it gives the run: 0 unless it failed by itself, at least 1 if it did."""
        return max(1, self.returncode or 0) if self.failed and not self.stopped and not self.done_without else 0

    @property
    def last_lines(self) -> tuple[str, ...]:
        """The traceback, or else the last lines it wrote."""
        if exit_description.ended_by(vars(self)):
            return self.traceback
        return self.tail[-_LAST_LINES:]

    @property
    def is_follow_up(self) -> bool:
        """Whether it looks like the echo of another process's end."""
        if self.oom or self.signal not in (None, "SIGABRT"):
            return False
        last = exit_description.raised(self.traceback) or "\n".join(self.tail if self.signal else self.tail[-3:])
        return bool(_FOLLOW_UP.search(last))

    def to_json(self) -> dict[str, Any]:
        """For result.json."""
        return {**asdict(self), "reason": self.reason, "sentence": self.sentence, "log": self.log_name}
