"""Records which ranks have started and how each process of the node ended (outcomes)."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from typing import Any

from launcher.node import procs
from launcher.node.child_process import Child, Loop, outcome
from launcher.node.exit_description import Failure, first_failure
from launcher.node.json_reader import loads, natural, record_in, text
from launcher.node.json_records import OUTCOME, STARTED
from launcher.node.peers.model import Cause
from launcher.node.record import why_unwritten, write_json
from launcher.node.supervisor.journal import Journal

_MAX_MAIL = 1 << 17  # bytes of a record that a rank runner sends to the mailbox

_MAIL_TIME = 5.0  # seconds that sending a record may take


class OutcomeBook:
    """Collects which ranks of a node have started and, by process name, the outcomes of the node's processes."""

    def __init__(self, journal: Journal, node_rank: int, ranks: tuple[int, ...]) -> None:
        self.journal, self.node_rank, self.ranks = journal, node_rank, ranks
        self.outcomes: dict[str, dict[str, Any]] = {}
        self.runners: dict[int, dict[str, Any]] = {}  #: content of procs/rank<r>.json, by rank
        self.stopping = False  #: whether ranks that end from now on count as stopped

    def first_failure(self) -> dict[str, Any] | None:
        """Return the outcome of the process that failed first, or None. Stopped processes do not count."""
        failed = [record for record in self.outcomes.values() if record["failed"]]
        return first_failure(
            failed, lambda one: Failure(one["ended"], self.node_rank, one["rank"], follow_up=one["follow_up"])
        )

    def look(self) -> None:
        """Read the files that the rank runners have written since the last call."""
        for rank in self.ranks:
            name = f"rank{rank}"
            if rank not in self.runners:
                started = record_in(STARTED, self.journal.path(f"procs/{name}.json"))
                if started is not None:
                    self._started(rank, started)
            if name in self.outcomes:
                continue
            runner = self.runners.get(rank, {}).get("runner")
            gone = runner is not None and not procs.alive(runner["pid"], runner["start_ticks"])
            # Read only after checking the runner: it writes the outcome before it ends.
            ended = record_in(OUTCOME, self.journal.path(f"outcomes/{name}.json"))
            if ended is not None:
                self.take(ended)
            elif gone:  # the runner was killed before writing an outcome
                lost = outcome(
                    name,
                    self.node_rank,
                    rank,
                    pid=self.runners[rank]["pid"],
                    returncode=128 + signal.SIGKILL,
                    signal="SIGKILL",
                    ended=time.time(),
                    failed=not self.stopping,
                    stopped=self.stopping,
                    note="killed together with its rank runner",
                )
                self.record(lost)

    def _started(self, rank: int, started: dict[str, Any]) -> None:
        self.runners[rank] = started
        pids = {"pid": started["pid"], "pgid": started["pgid"]}
        self.journal.event("process-start", name=f"rank{rank}", **pids, rank=rank)

    def record(self, record: dict[str, Any]) -> None:
        """Store an outcome that this supervisor has made, and write it to the run folder."""
        self.journal.put(f"outcomes/{record['name']}.json", record)
        self.take(record)

    def take(self, record: dict[str, Any]) -> None:
        """Store an outcome under the name of its process, and log it as event ``process-exit``."""
        failed = bool(record.get("failed", record["returncode"] not in (0, None)))
        record = {**record, "failed": failed, "ended": record["ended"] or time.time()}
        self.outcomes[record["name"]] = record
        shown = {key: record[key] for key in ("name", "rank", "pid", "returncode", "signal", "stopped", "failed")}
        self.journal.event("process-exit", **shown)

    def take_mail(self, mail: dict[str, Any]) -> None:
        """Store a record from the mailbox: the start or the outcome of a rank. Raises ValueError or KeyError."""
        rank = natural(mail["rank"])
        name = f"rank{rank}"
        if rank not in self.ranks:
            raise ValueError(f"this node has no rank {rank}")
        if "runner" in mail:
            if rank not in self.runners:
                self._started(rank, STARTED(mail))
        elif name not in self.outcomes:
            trouble = text(mail.pop("trouble"))
            self.journal.trouble = self.journal.trouble or trouble
            self.take(OUTCOME({**mail, "name": name, "node_rank": self.node_rank}))

    def running(self, children: list[Child]) -> list[dict[str, Any]]:
        """Return the entries (name, pid, pgid, start_ticks, rank) of ``state.json`` for the running ``children`` and
        ranks.
        """
        found = [{**child.record(), "rank": None} for child in children if child.running()]
        ranks = [runner for rank, runner in self.runners.items() if f"rank{rank}" not in self.outcomes]
        return [*found, *ranks]

    def runner_pids(self) -> set[int]:
        return {started["runner"]["pid"] for started in self.runners.values()}

    def ended_ranks(self) -> set[int]:
        return {rank for rank in self.ranks if f"rank{rank}" in self.outcomes}

    def rank_pids(self) -> dict[int, int]:
        return {rank: one["pid"] for rank, one in self.runners.items() if rank not in self.ended_ranks()}


MAILBOX = "GNNFLEET_MAILBOX"  #: environment variable of a rank runner: its file descriptor of the mailbox


class Mailbox:
    """Receives records from rank runners that cannot write them to a file because the disk is full.

    The mailbox is a pair of connected Unix datagram sockets without a name. Rank runners inherit the other end,
    ``sender``; no other process can send to the mailbox.
    """

    def __init__(self, loop: Loop, book: OutcomeBook) -> None:
        self._loop, self._book = loop, book
        self._warned = False  # malformed records are logged once
        self._socket, self._sender = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self.sender = self._sender.fileno()  #: file descriptor to send records to
        loop.watch(self._socket, 1, lambda _: self._read())

    def _read(self) -> None:
        try:
            self._book.take_mail(loads(self._socket.recv(_MAX_MAIL)))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            if not self._warned:
                self._warned = True
                self._book.journal.log(f"ignored a malformed record from a rank runner: {error!r}")

    def close(self) -> None:
        self._loop.unwatch(self._socket)
        self._socket.close()
        self._sender.close()


def write_or_mail(path: str, record: dict[str, Any], mailbox: int | None) -> None:
    """Write a rank runner's record to ``path``; when that fails, send the record to the supervisor's mailbox.

    mailbox: file descriptor of the mailbox; None if there is no supervisor.
    """
    try:
        write_json(path, record)
    except OSError as error:
        mail = {**record, "trouble": why_unwritten(path, error)}
        for name in ("traceback", "tail"):  # it must fit into one datagram
            if name in record:
                mail[name] = [line[:500] for line in record[name][-60:]]
        try:
            with socket.socket(fileno=os.dup(-1 if mailbox is None else mailbox)) as sock:
                sock.settimeout(_MAIL_TIME)
                sock.send(json.dumps(mail).encode())
        except OSError as unsent:  # the supervisor has ended
            print(f"rank runner: cannot send the record to the supervisor: {unsent}", flush=True)


class Ended(Exception):
    """This node is done, has failed, or was stopped.

    state: done, failed or stopped. reason: one sentence, '' when done. cause: set when this node ends the run.
    """

    def __init__(self, state: str, reason: str, cause: Cause | None = None) -> None:
        super().__init__(reason)
        self.state, self.reason, self.cause = state, reason, cause

    def without_restart(self, why: str) -> Ended:
        """Return a copy whose reason also says why there is no restart.

        Its reason is unchanged if ``why`` is '' or the node is done.
        """
        if not why or self.state == "done":
            return self
        return Ended(self.state, f"{self.reason.rstrip('.')}; no restart: {why}", self.cause)

    def result(self, node_rank: int, cause: Cause | None) -> dict[str, Any]:
        """Return the fields of ``result.json`` that say how and why this node ended.

        cause: why the run ended. The returned field "cause" is the same, but None if the cause is on this node.
        """
        elsewhere = cause if cause is not None and cause["node_rank"] != node_rank else None
        asked = cause["asked"] if cause is not None else None
        return {
            "node_rank": node_rank,
            "state": self.state,
            "reason": self.reason,
            "cause": elsewhere,
            "asked": asked,
        }
