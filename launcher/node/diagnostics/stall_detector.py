"""Finds stalled and slow ranks (stragglers) from the metrics of all nodes, on the lead node."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from launcher.node.json_records import PHASES

Entry = Mapping[str, Any]  # one rank's values, as in Vitals.ranks

Nodes = Mapping[int, Mapping[Any, Entry]]  # node_rank -> rank (an int, or a str when it came as JSON) -> entry

_FIRST_STEP = 900.0  # seconds until the first step: loading, compiling kernels, joining the process group

_AT_LEAST = 120.0  # with stall_after "auto": seconds without progress that are never called a stall

_TIMES_LONGEST = 5.0  # with "auto": a stall lasts this many times the longest pause so far

_UNSEEN = 900.0  # replaces _AT_LEAST where progress may go unseen: between epochs of a script, or without progress file

_SLOWER = 1.5  # a straggler's own work per step is at least this multiple of the median over ranks

_SHARE = 0.2  # a straggler's own work exceeds that median by at least this share of the step

_WINDOW = 30.0  # seconds of step lines that are compared

_ENOUGH = 10.0  # seconds of step lines that are needed

QUIET = 600.0  #: seconds after a straggler has caught up in which it is not reported again

_ASLEEP = 5.0  # seconds between two calls of ``look`` that mean that the supervisor itself was suspended

_MOST_LINES = 64  # maximum number of step lines kept per rank, should the times in its lines not advance

_PACE_EVERY = 5.0  # seconds between two comparisons of step times

_KINDS = ("start", "step", "epoch", "eval", "checkpoint", "result")  # order of lines within an epoch


class StallDetector:
    """Finds stalls and stragglers; ``look`` is called once a second.

    A rank without metrics lines never counts as stalled.
    """

    def __init__(
        self, stall_after: float | str = "auto", labels: Sequence[str] = (), stop_on_stall: bool = True
    ) -> None:
        self.labels = labels
        self._stall = _StallRule(None if stall_after == "auto" else float(stall_after), stop_on_stall)
        self._pace = _StragglerRule()

    def look(self, now: float, nodes: Nodes) -> list[dict[str, Any]]:
        """Return new findings. now: ``time.monotonic()``. nodes: by node_rank, the last metrics of each rank."""
        ranks = {}
        for node, entries in nodes.items():
            label = self.labels[node] if node < len(self.labels) else f"node{node}"
            for rank, entry in entries.items():
                ranks[int(rank)] = {**entry, "where": f"rank {rank} on {label}", "node_rank": node}
        return [*self._stall.look(now, ranks), *self._pace.look(now, ranks)]

    def without(self, exiting: Collection[int]) -> dict[str, Any] | None:
        """Return "node_rank", "rank" and "text" of the last stall, computed without the ranks ``exiting``.

        None if no rank of ``exiting`` was stalled, or if all stalled ranks are in ``exiting``.
        """
        return self._stall.without(exiting)


class _StallRule:
    """Finds a stall: no rank progresses for longer than a limit, which is fixed or learned from earlier pauses."""

    def __init__(self, after: float | None, stop: bool) -> None:
        self.after, self.stop = after, stop
        self.longest = 0.0  #: longest pause in seconds between two changes, since the first batch was begun
        self._seen: object = {}
        self._looked: float | None = None
        self._changed = 0.0
        self._begun = self._stepped = self._reported = False
        self._last: tuple[float, Mapping[int, Entry]] = (0.0, {})  # silence and ranks of the last stall

    def look(self, now: float, ranks: Mapping[int, Entry]) -> Iterator[dict[str, Any]]:
        if self._looked is None:
            self._changed = now
        elif now - self._looked > _ASLEEP:
            self._changed += now - self._looked
        self._looked = now
        seen = {rank: (entry["t"], entry["kind"], str(entry["at"])) for rank, entry in ranks.items()}
        if seen != self._seen:
            if self._begun:
                self.longest = max(self.longest, now - self._changed)
            self._stepped = self._stepped or any(entry["kind"] != "start" for entry in ranks.values())
            self._begun = self._stepped or any(entry["at"] is not None for entry in ranks.values())
            self._seen, self._changed, self._reported = seen, now, False
            return
        running = {rank: entry for rank, entry in ranks.items() if not entry["ended"]}
        if not running or self._reported:
            return
        if self.after is None:
            unseen = any(entry["at"] is None or entry["at"][2] == "between" for entry in running.values())
            limit = max(_UNSEEN if unseen else _AT_LEAST, _TIMES_LONGEST * self.longest)
        else:
            limit = self.after
        if now - self._changed > (limit if self._stepped else max(limit, _FIRST_STEP)):
            self._reported, self._last = True, (now - self._changed, running)
            yield self._finding(*self._last)

    def without(self, exiting: Collection[int]) -> dict[str, Any] | None:
        silence, ranks = self._last
        left = {rank: entry for rank, entry in ranks.items() if rank not in exiting}
        if not left or len(left) == len(ranks):
            return None
        finding = self._finding(silence, left)
        return {name: finding[name] for name in ("node_rank", "rank", "text")}

    def _finding(self, silence: float, ranks: Mapping[int, Entry]) -> dict[str, Any]:
        if self._stepped:
            before = f" (the longest pause before was {_seconds(self.longest)})" if self.longest else ""
            text = f"no process has trained a step for {silence:.0f} s{before}; "
        else:
            text = f"no process has trained its first step within {silence:.0f} s; "
        working = {rank: entry for rank, entry in ranks.items() if not entry.get("done")}
        ranks = working or ranks  # a rank that has ended its work keeps no other waiting
        least = min(map(_position, ranks.values()))
        behind = sorted(rank for rank, entry in ranks.items() if _position(entry) == least)
        others = [entry for rank, entry in ranks.items() if rank not in behind]
        first = behind[0] if others else None
        if not working:
            have = "have" if len(behind) > 1 else "has"
            text += f"{_names(behind, ranks)} {have} ended the work, but not the process"
            return _finding("stall", ranks[behind[0]]["node_rank"], behind[0], text, self.stop)
        text += f"{_names(behind, ranks)} {_place(ranks[behind[0]], many=len(behind) > 1)}"
        if others:
            text += f", the others {_place(max(others, key=_position), many=True)}"
        lead = min(entry["node_rank"] for entry in ranks.values())
        return _finding("stall", lead if first is None else ranks[first]["node_rank"], first, text, self.stop)


def _position(entry: Entry) -> tuple[float, ...]:
    """Return a sort key for the progress of a rank, from its progress file or, without one, its last metrics line."""
    if entry["at"] is not None:
        epoch, step, phase = entry["at"]
        return (epoch, phase in ("evaluate", "between"), step, PHASES.index(phase))
    kind = _KINDS.index(entry["kind"]) if entry["kind"] in _KINDS else len(_KINDS)
    return (entry["epoch"] or 0, kind > 1, entry["step"] or 0, kind)


def _names(some: Sequence[int], ranks: Mapping[int, Entry]) -> str:
    if len(some) == 1:
        return str(ranks[some[0]]["where"])
    if len(some) == len(ranks):
        return f"all {len(some)} ranks"
    return "ranks " + ", ".join(map(str, some[:8])) + (f" and {len(some) - 8} more" if len(some) > 8 else "")


def _place(entry: Entry, many: bool = False) -> str:
    """Say where a rank is: ``is at step 5 of epoch 2 (computing)``. many: plural, "are at …"."""
    verb, own = ("are", "their") if many else ("is", "its")
    if entry["at"] is None:
        epoch = f"epoch {entry['epoch'] or 0}"
        place = f"step {entry['step']} of {epoch}" if entry["kind"] == "step" else f"the end of {epoch}"
        return f"{verb} at {place if entry['kind'] != 'start' else 'the start'} (from {own} last metrics line)"
    epoch, step, phase = entry["at"]
    if phase == "between":
        return f"{verb} at the end of epoch {epoch}"
    place = f"{verb} at {'batch' if phase == 'evaluate' else 'step'} {step} of epoch {epoch}"
    words = {
        "load": f"waiting for {own} batch",
        "compute": "computing",
        "reduce": f"{own} own work done, waiting for other ranks",
        "evaluate": "evaluating",
    }
    return f"{place} ({words[phase]})"


class _StragglerRule:
    """Finds stragglers: compares the time of each rank's own work per step with the median over all ranks."""

    def __init__(self) -> None:
        self._lines: dict[int, deque[Entry]] = {}
        self._slow: set[int] = set()
        self._ended: dict[int, float] = {}  # rank -> when it last caught up, seconds as ``now``
        self._next = 0.0

    def look(self, now: float, ranks: Mapping[int, Entry]) -> Iterator[dict[str, Any]]:
        for rank, entry in ranks.items():
            if entry["kind"] != "step" or entry["own_s"] is None or entry["step_s"] is None:
                continue
            lines = self._lines.setdefault(rank, deque(maxlen=_MOST_LINES))
            if lines and lines[-1]["t"] == entry["t"]:
                continue
            lines.append(entry)
            while lines[-1]["t"] - lines[0]["t"] > _WINDOW or lines[-1]["t"] < lines[0]["t"]:
                lines.popleft()
        if now < self._next:
            return
        self._next = now + _PACE_EVERY
        typical = {}  # medians of the ranks that have enough lines, in seconds
        for rank in ranks:
            lines = self._lines.get(rank, deque())
            if len(lines) >= 3 and lines[-1]["t"] - lines[0]["t"] >= _ENOUGH:
                names = ("own_s", "step_s", "batch_s")
                typical[rank] = {name: statistics.median(line[name] or 0.0 for line in lines) for name in names}
        if len(typical) < 2:
            return
        usual = statistics.median_low(own["own_s"] for own in typical.values())  # of two ranks, that of the faster one
        for rank, own in typical.items():
            # hysteresis: a reported straggler must fall well below the limits
            ease = 0.5 if rank in self._slow else 1.0
            excess = own["own_s"] - usual
            slow = excess > (_SLOWER - 1) * ease * usual and excess > _SHARE * ease * own["step_s"]
            if slow and rank not in self._slow and now - self._ended.get(rank, -QUIET) >= QUIET:
                self._slow.add(rank)
                yield _finding("straggler", ranks[rank]["node_rank"], rank, _slow(ranks[rank], own, usual), False)
            elif not slow and rank in self._slow:
                self._slow.remove(rank)
                self._ended[rank] = now
                text = f"{ranks[rank]['where']} keeps up again: {_seconds(own['own_s'])} of own work per step"
                yield {**_finding("straggler", ranks[rank]["node_rank"], rank, text, False), "over": True}


def _slow(entry: Entry, own: Mapping[str, float], usual: float) -> str:
    needs = f"{entry['where']} needs {_seconds(own['own_s'])} of own work per step, the others {_seconds(usual)}"
    if own["batch_s"] < 0.5 * (own["own_s"] - usual):
        return f"{needs}; the run waits for it (it computes more slowly: is its device weaker, or used by others?)"
    share = entry["remote_share"]
    remote = "" if share in (None, 1.0) else f", with {share:.0%} of the rows from other hosts"  # 1.0: a client
    return f"{needs}; the run waits for it (waiting for batches takes {_seconds(own['batch_s'])} of that{remote})"


def _finding(kind: str, node_rank: int, rank: int | None, text: str, stop: bool) -> dict[str, Any]:
    return {"t": time.time(), "kind": kind, "node_rank": node_rank, "rank": rank, "text": text, "stop": stop}


def _seconds(value: float) -> str:
    return f"{value * 1000:.0f} ms" if value < 0.1 else f"{value:.2f} s" if value < 10 else f"{value:.0f} s"
