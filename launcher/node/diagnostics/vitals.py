"""Tracks the progress of a node's ranks and finds losses that are not finite.

Reads ``metrics-rank<r>.jsonl`` and ``progress-rank<r>`` (docs/ARCHITECTURE.md, "Metrics lines") as they grow.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Container, Iterable, Iterator
from contextlib import suppress
from typing import Any

from launcher.node.json_reader import moment, parsed
from launcher.node.json_records import PHASES
from launcher.node.regular_file import open_at_once, open_regular

_DONE = "done"  # the phase of a rank that has ended its work, and whose process is about to end

IDLE = 20.0  #: seconds without progress of a rank that has trained a step, from which on users are told

_TRAINING = ("step", "epoch")  # kinds of lines with the loss and speed of training

_AT_ONCE = 1 << 20  # bytes read of one file per call of ``look``

_LONGEST = 64 << 20  # bytes of a line; an epoch line holds the loss of every step

_LONGEST_KIND = 40  # characters; each report to the hub repeats the kind

_TOO_LARGE = 1 << 63  # larger integers may not fit into a float

_NUMBERS = ("epoch", "step", "steps", "loss", "seeds_per_s", "remote_share", "own_s", "step_s", "batch_s")

#: Numbers of field ``device``, which says how a rank uses its GPU.
_DEVICE_NUMBERS = ("allocated_bytes", "peak_bytes", "used_bytes", "total_bytes", "step_s", "utilization")


class Vitals:
    """The last metrics of each rank of a node, read once a second; damaged and incomplete lines are skipped.

    ``ranks[r]`` exists once the metrics file of rank r has a line. It has

    - the last values of ``epoch``, ``step``, ``steps``, ``loss``, ``seeds_per_s``, ``remote_share``, ``own_s``,
      ``step_s`` and ``batch_s`` (None: not written yet)
    - ``most``: [kind, share] of the work that takes most time of a step (``largest``)
    - ``device``: the numbers in field ``device`` of the last line that has it; missing if the rank uses no GPU
    - ``kind`` and ``t`` of the last line
    - ``at``: [epoch, step, phase] from the progress file, or None
    - ``ended``: whether the rank has ended
    - ``done``: whether the phase in its progress file is "done"
    - ``idle_s``: seconds since its last line or change of the progress file; 0 once it has ended or is done
    """

    def __init__(
        self,
        run_dir: str,
        ranks: Iterable[int],
        node_rank: int = 0,
        label: str = "",
        stop_on_nan: bool = False,
        at_end: bool = False,
    ) -> None:
        """at_end: skip lines that an earlier attempt has written."""
        self.run_dir, self.node_rank, self.stop_on_nan = run_dir, node_rank, stop_on_nan
        self.label = label or f"node{node_rank}"
        self.ranks: dict[int, dict[str, Any]] = {}
        self.findings: list[dict[str, Any]] = []
        self._tails = {rank: LineTail(os.path.join(run_dir, f"metrics-rank{rank}.jsonl"), at_end) for rank in ranks}
        self._moved: dict[int, tuple[object, float]] = {}  # rank -> its last line and position, and when they changed
        self._finite: dict[int, tuple[float, int]] = {}  # rank -> last loss that was a number, and its step

    def look(self, now: float, ended: Container[int] = ()) -> list[dict[str, Any]]:
        """Read the new lines of all ranks; return a ``nan`` finding at the first loss that is not finite, else [].

        now: seconds since the epoch, for lines without ``t``. ended: ranks that have ended.
        """
        bad = [
            finding
            for rank, tail in self._tails.items()
            for line in tail.lines()
            if (finding := self._take(rank, line, now)) is not None
        ]
        for rank, known in self.ranks.items():
            at = read_progress(os.path.join(self.run_dir, f"progress-rank{rank}"))
            known["done"] = at is not None and at[2] == _DONE
            known["at"] = known["at"] if known["done"] else at
            known["ended"] = rank in ended
            moved, seen = time.monotonic(), (known["t"], known["kind"], at)
            if seen == self._moved.get(rank, (None,))[0] and not (known["ended"] or known["done"]):
                moved = self._moved[rank][1]
            self._moved[rank] = seen, moved
            known["idle_s"] = round(time.monotonic() - moved)
        if self.findings or not bad:  # gradients spread a NaN to all ranks: one finding is enough
            return []
        self.findings.append(min(bad, key=lambda finding: float(finding["t"])))
        return self.findings[-1:]

    def _take(self, rank: int, line: dict[str, Any], now: float) -> dict[str, Any] | None:
        unknown = {**dict.fromkeys((*_NUMBERS, "most")), "at": None, "ended": False, "done": False}
        known = self.ranks.setdefault(rank, unknown)
        training = line["kind"] in _TRAINING
        known |= {name: line[name] for name in (_NUMBERS if training else ("epoch",)) if _is_number(line.get(name))}
        if training and line.get("remote_share", 0) is None:
            known["remote_share"] = None
        if training:
            known["most"] = largest(line.get("spent")) or known["most"]
            device = line.get("device")
            values = device if isinstance(device, dict) else {}
            if numbers := {name: values[name] for name in _DEVICE_NUMBERS if _is_number(values.get(name))}:
                known["device"] = numbers
        known["kind"] = line["kind"]
        try:
            known["t"] = moment(line.get("t"))
        except ValueError:  # a script's own, such as milliseconds
            known["t"] = now
        loss: Any = line.get("loss")
        if not (training and _is_number(loss) and _is_number(line.get("epoch"))):
            return None
        if math.isfinite(loss):
            self._finite[rank] = (loss, known["step"])
            return None
        where = f"in epoch {known['epoch']}" + (f" at step {known['step']}" if known["kind"] == "step" else "")
        text = f"the loss of rank {rank} on {self.label} is {'NaN' if math.isnan(loss) else loss} {where}"
        if rank in self._finite:
            last, step = self._finite[rank]
            text += f"; the last finite loss was {last:.4g}" + (f", at step {step}" if step is not None else "")
        text += ". Lower the learning rate, or look for NaN and huge values in the features"
        place = {"epoch": known["epoch"], "step": known["step"] if known["kind"] == "step" else None}
        finding = {"t": known["t"], "kind": "nan", "node_rank": self.node_rank, "rank": rank}
        finding |= {name: value for name, value in place.items() if type(value) is int and value >= 0}
        return {**finding, "text": text, "stop": self.stop_on_nan}


def largest(spent: Any) -> list[Any] | None:
    """Return the kind of work that takes most time of a step, and its share of the time (0 to 1): ``[kind, share]``.

    spent: seconds by kind of work, from a metrics line. Returns None if it contains no numbers.
    """
    if not isinstance(spent, dict):
        return None
    kinds = {kind: value for kind, value in spent.items() if _is_number(value) and 0 <= value < math.inf}
    whole = sum(kinds.values())
    if not whole:
        return None
    most = max(kinds, key=lambda kind: kinds[kind])
    return [most[:_LONGEST_KIND], round(kinds[most] / whole, 3)]


class LineTail:
    """Reads the lines of JSON that are appended to a file; it skips lines without ``kind``."""

    def __init__(self, path: str, at_end: bool = False) -> None:
        self.path = path
        self._offset = os.path.getsize(path) if at_end and os.path.exists(path) else 0
        self._rest = b""

    def lines(self) -> Iterator[dict[str, Any]]:
        data = b""
        with suppress(OSError):  # not created yet, in a run folder that has been deleted, or a pipe or folder
            file = open_at_once(self.path, os.O_RDONLY)
            try:
                if os.fstat(file).st_size < self._offset:  # truncated: read from the start
                    self._offset, self._rest = 0, b""
                data = os.pread(file, _AT_ONCE, self._offset)
            finally:
                os.close(file)
        self._offset += len(data)
        *whole, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LONGEST:
            self._rest = b""
        for text in whole:
            line = parsed(text)  # None if it was cut off by a full disk, or is not a metrics line
            kind = line.get("kind") if isinstance(line, dict) else None
            if isinstance(kind, str) and len(kind) <= _LONGEST_KIND:
                yield line


def read_progress(path: str) -> list[Any] | None:
    """Read ``[epoch, step, phase]`` from a rank's progress file; None when it does not exist or is incomplete."""
    try:
        with open_regular(path) as file:
            words = file.read(64).split()
    except OSError:
        return None
    if len(words) != 3 or not (words[0].isdigit() and words[1].isdigit()):
        return None
    phase = words[2].decode("ascii", "replace")
    return [int(words[0]), int(words[1]), phase] if phase in (*PHASES, _DONE) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (type(value) is int and abs(value) < _TOO_LARGE)
