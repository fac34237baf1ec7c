"""Reads JSON that somebody else wrote: a node, a peer, a script, another version, a disk that was full.

A line that is no JSON object counts for nothing; a field of another kind than it should be counts as one that is not
there. What comes out has the kinds that the ``Record``s below state, so that nobody behind this module has to check.
Fields that a record does not name stay as they are. Python 3.8, standard library only.
"""

from __future__ import annotations

import json
import math
import re
import signal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Kind = Callable[[Any], Any]  #: gives a value back as it should be; raises ValueError for one of another kind

MAX_LINE = 1 << 26  #: characters of a line of JSON; a longer one is damaged

_LARGEST = 1 << 63  # of an integer

_LATEST = 1e11  # seconds since the epoch; what is later, no calendar can show

_TOP = re.compile(
    r'\{"(?:file|state|quiet|result|lost|now|stopped)": '
)  # how an answer of watch.py or control.py begins


class Damaged(ValueError):
    """What came is not what it should be."""


# -- kinds -----------------------------------------------------------------


def text(value: Any) -> str:
    """Characters that can be written as UTF-8, none of them NUL."""
    if not isinstance(value, str):
        raise ValueError
    if not value.isascii():
        value = value.encode("utf-8", "replace").decode()
    return value.replace("\0", "\ufffd")


def real(value: Any) -> float:
    """A number, NaN and infinities too."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or (isinstance(value, int) and not _fits(value)):
        raise ValueError
    return value


def number(value: Any) -> float:
    """A finite number."""
    if not math.isfinite(real(value)):
        raise ValueError
    return value  # type: ignore[no-any-return]


def moment(value: Any) -> float:
    """Seconds since the epoch."""
    if not 0 <= number(value) < _LATEST:
        raise ValueError
    return value  # type: ignore[no-any-return]


def whole(value: Any) -> int:
    """An integer of 64 bits."""
    if type(value) is not int or not _fits(value):
        raise ValueError
    return value


def place(value: Any) -> int:
    """A rank, a node_rank, a pid: an integer from 0 on."""
    if whole(value) < 0:
        raise ValueError
    return int(value)


def flag(value: Any) -> bool:
    """True or false."""
    return value is True


def one_of(*words: str) -> Kind:
    """One of ``words``."""

    def kind(value: Any) -> str:
        if not isinstance(value, str) or value not in words:
            raise ValueError
        return value

    return kind


def matching(pattern: str) -> Kind:
    """A text that ``pattern`` describes whole."""
    compiled = re.compile(pattern)

    def kind(value: Any) -> str:
        if not isinstance(value, str) or not compiled.fullmatch(value):
            raise ValueError
        return value

    return kind


def none_or(kind: Kind) -> Kind:
    """None, too."""
    return lambda value: None if value is None else kind(value)


def items(kind: Kind) -> Kind:
    """A list; what is not of ``kind`` in it is left out."""

    def listed(value: Any) -> list[Any]:
        if not isinstance(value, (list, tuple)):
            raise ValueError
        return [one for ok, one in (_tried(kind, each) for each in value) if ok]

    return listed


def table(kind: Kind, key: str = r"\d{1,9}") -> Kind:
    """An object whose keys ``key`` describes; what is not of ``kind`` in it is left out."""
    known = re.compile(key)

    def kept(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise ValueError
        tried = {name: _tried(kind, one) for name, one in value.items() if known.fullmatch(str(name))}
        return {name: one for name, (ok, one) in tried.items() if ok}

    return kept


class Record:
    """An object: fields it must have, fields with a default, fields that are left out where their kind is another."""

    def __init__(self, need: dict[str, Kind], default: dict[str, tuple[Kind, Any]], may: dict[str, Kind]) -> None:
        self._need, self._default, self._may = need, default, may

    def __call__(self, value: Any) -> dict[str, Any]:
        """A copy of ``value`` with the right kinds; raises ValueError when it lacks what it must have."""
        if not isinstance(value, dict):
            raise ValueError
        found = dict(value)
        for name, kind in self._need.items():
            if name not in value:
                raise ValueError(name)
            found[name] = kind(value[name])
        for name, (kind, other) in self._default.items():
            ok, one = _tried(kind, value[name]) if name in value else (False, None)
            found[name] = one if ok else other() if callable(other) else other
        for name, kind in self._may.items():
            if name in value:
                ok, found[name] = _tried(kind, value[name])
                if not ok:
                    del found[name]
        return found


def _tried(kind: Kind, value: Any) -> tuple[bool, Any]:
    try:
        return True, kind(value)
    except (ValueError, RecursionError):
        return False, None


def _fits(value: int) -> bool:
    return -_LARGEST <= value < _LARGEST


# -- texts -----------------------------------------------------------------


def json_object(line: str | bytes) -> dict[str, Any] | None:
    """The object that a line of JSON holds; of a line that a full disk has cut and the next writer went on, the last
    that is whole. None where there is none."""
    if len(line) > MAX_LINE:
        return None
    value = _parsed(line)
    if value is None and isinstance(line, bytes):
        line = line.decode("utf-8", "replace")
    if value is None and isinstance(line, str):
        at = line.rfind('{"t": ')
        value = _parsed(line[at:]) if at > 0 else None
    return value if isinstance(value, dict) else None


def _parsed(line: str | bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def records(kind: Record, lines: Iterable[str | bytes]) -> list[dict[str, Any]]:
    """Those of ``lines`` that are of ``kind``."""
    tried = (_tried(kind, json_object(line)) for line in lines)
    return [one for ok, one in tried if ok]


def record_in(kind: Record, file: str) -> dict[str, Any] | None:
    """What a file holds; None where it is not there, or does not hold a record of ``kind``."""
    try:
        with open(file, "rb") as opened:
            data = opened.read(MAX_LINE + 1)
    except (OSError, ValueError):  # a NUL in the name
        return None
    return checked(kind, json_object(data))


def checked(kind: Record, value: Any) -> dict[str, Any] | None:
    """``value`` as a record of ``kind``; None where it is none."""
    ok, one = _tried(kind, value)
    return one if ok else None


def message_in(line: str) -> dict[str, Any] | None:
    """The message of watch.py or the answer of control.py in a line of a node's output, wherever it begins: a profile
    may have printed before it. None where the line is somebody else's; raises Damaged when the message is."""
    found = _TOP.search(line)
    if found is None:
        return None
    value = _parsed(line[found.start() :]) if len(line) <= MAX_LINE else None
    if not isinstance(value, dict):
        raise Damaged(f"a damaged line of {len(line):,} characters came")
    try:
        return _message(value)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"`{found[0]}…` came with something else than it should hold ({error})") from None


# -- records ---------------------------------------------------------------

_NAME = matching(r"rank\d{1,9}|server|node|launcher")

_SIGNAL = matching("|".join([*signal.Signals.__members__, r"SIG\d{1,3}"]))

_TEXTS = items(text)

_RANK_OR_NONE = none_or(place)

_ASKED = Record({}, {"by": (text, ""), "why": (text, ""), "now": (flag, False)}, {})

#: What a supervisor noticed.
FINDING = Record(
    {"kind": text, "text": text, "node_rank": place},
    {"t": (moment, 0.0), "rank": (_RANK_OR_NONE, None), "stop": (flag, False)},
    {"stacks": _TEXTS},
)

#: What ended a run.
CAUSE = Record(
    {"node_rank": place, "name": _NAME, "kind": text, "reason": text},
    {"t": (moment, 0.0), "rank": (_RANK_OR_NONE, None), "asked": (none_or(_ASKED), None)},
    {},
)

#: A node that others do without, or have lost.
LOST_NODE = Record(
    {},
    {"since": (moment, 0.0), "why": (text, ""), "how": (text, "lost")},
    {"t": moment, "kind": text, "text": text},
)

#: How a process ended.
OUTCOME = Record(
    {"name": _NAME, "node_rank": place},
    {
        **dict.fromkeys(("rank", "pid"), (_RANK_OR_NONE, None)),
        **{name: (none_or(moment), None) for name in ("started", "ended")},
        **dict.fromkeys(("stopped", "oom"), (flag, False)),
        **dict.fromkeys(("traceback", "tail"), (_TEXTS, list)),
        "returncode": (none_or(whole), None),
        "signal": (none_or(_SIGNAL), None),
        "note": (text, ""),
    },
    {"failed": flag},
)

_PROGRESS = ("epoch", "step", "steps")


def _at(value: Any) -> list[Any]:
    epoch, step, phase = value if isinstance(value, list) and len(value) == 3 else (None, None, None)
    return [place(epoch), place(step), phase if isinstance(phase, str) else ""]


def _most(value: Any) -> list[Any]:
    name, share = value if isinstance(value, list) and len(value) == 2 else (None, None)
    return [text(name), number(share)]


#: The last metrics of a rank, in a node's state.
_RANK_STATE = Record(
    {},
    {"at": (none_or(_at), None), **{name: (none_or(place), None) for name in _PROGRESS}},
    {
        **{name: none_or(real) for name in ("loss", "seeds_per_s", "remote_share", "own_s", "step_s", "batch_s")},
        "most": none_or(_most),
        "kind": text,
        "t": moment,
        "ended": flag,
    },
)

_PROCESS = Record(
    {"pid": place, "start_ticks": place, "pgid": place}, {"name": (text, ""), "rank": (_RANK_OR_NONE, None)}, {}
)

#: ``procs/rank<r>.json``: a rank that has started.
STARTED = Record(
    {"pid": place, "pgid": place, "start_ticks": place, "runner": Record({"pid": place, "start_ticks": place}, {}, {})},
    {},
    {},
)

_PEER = Record({}, {"state": (text, "absent"), "age": (none_or(number), None)}, {})

_ABOUT_OTHERS = {
    "clock_offset": (none_or(number), None),
    "gone": (table(LOST_NODE), dict),
    "findings": (items(FINDING), list),
}

#: ``state.json`` of a node.
STATE = Record(
    {"state": text, "time": moment, "pid": place, "start_ticks": place},
    {
        **_ABOUT_OTHERS,
        "processes": (items(_PROCESS), list),
        "peers": (table(_PEER), dict),
        "spare": (items(place), list),
        "ranks": (table(_RANK_STATE), dict),
    },
    {},
)

#: ``result.json`` of a node.
RESULT = Record(
    {"state": one_of("done", "failed", "stopped")},
    {
        **_ABOUT_OTHERS,
        "reason": (text, ""),
        "cause": (none_or(CAUSE), None),
        "asked": (none_or(_ASKED), None),
        "outcomes": (items(OUTCOME), list),
        "lost": (table(LOST_NODE), dict),
    },
    {},
)

#: ``result.json`` of a run, on the operator's machine.
REPORT = Record(
    {"state": text},
    {
        "seconds": (number, 0.0),
        "nodes": (items(Record({}, {"outcomes": (items(OUTCOME), list)}, {})), list),
        "notes": (_TEXTS, list),
        "findings": (items(FINDING), list),
        "first_failure": (none_or(Record({}, {}, {"sentence": text, "reason": text})), None),
        "metrics": (Record({}, {}, dict.fromkeys(("test_accuracy", "val_accuracy"), none_or(real))), dict),
        "stopped_by": (text, ""),
        "exit_status": (place, 1),
    },
    {},
)

#: A line of ``events.jsonl``, a node's or the launcher's.
EVENT = Record(
    {"t": moment, "kind": text},
    {},
    {
        **dict.fromkeys(("name", "reason", "why", "text", "stage", "state", "signal"), text),
        **dict.fromkeys(("node_rank", "rank", "pid", "lost"), _RANK_OR_NONE),
        **dict.fromkeys(("failed", "stopped"), flag),
        "returncode": none_or(whole),
        "finding": FINDING,
        "versions": table(text, ".*"),
        "nodes": items(place),
    },
)

#: A metrics line, the trainer's or an own script's.
METRIC = Record(
    {},
    {},
    {
        **dict.fromkeys(("kind", "split"), text),
        **dict.fromkeys(("rank", *_PROGRESS), place),
        **{name: none_or(real) for name in ("loss", "accuracy", "val_accuracy", "test_accuracy", "seeds_per_s")},
        **dict.fromkeys(("t", "seconds", "seeds"), number),
        "remote_share": none_or(real),
    },
)

_CLIENT = Record(
    {"name": text},
    {},
    dict.fromkeys(("batches", "bytes", "queue", "buffer_bytes", "seconds_since"), number),
)

#: ``server_stats.json`` of a graph server.
STATS = Record(
    {},
    {"time": (moment, 0.0), "clients": (items(_CLIENT), list)},
    dict.fromkeys(
        "busy queue batches_s bytes_out_s buffer_bytes buffer_limit memory malformed refused".split(), number
    ),
)

_ENDED_PROCESS = Record({"pid": place}, {"command": (text, "")}, {})

_LOST = Record({"reason": text}, {"state": (none_or(Record({"time": moment}, {}, {})), None)}, {})

#: What watch.py tells in a line, and what control.py answers to ``stop``; every field must be of its kind.
_MESSAGE_FIELDS: dict[str, Kind] = {
    "file": matching(r"[^/\0][^\0]*"),
    "offset": place,
    "lines": items(text),
    "state": STATE,
    "quiet": number,
    "result": RESULT,
    "lost": _LOST,
    "now": moment,
    "killed": items(_ENDED_PROCESS),
    "leftovers": items(_ENDED_PROCESS),
}


def _message(value: dict[str, Any]) -> dict[str, Any]:
    found = {**value, **{name: kind(value[name]) for name, kind in _MESSAGE_FIELDS.items() if name in value}}
    if "file" in found and not {"offset", "lines"} <= found.keys():
        raise ValueError("lines without their place")
    if "stopped" in found and not {"killed", "leftovers"} <= found.keys():
        raise ValueError("an answer without what was killed")
    return found
