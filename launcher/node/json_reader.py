"""Validates JSON that may be damaged or untrusted: from other nodes, user scripts, other versions, full disks.

Lines that are not JSON objects are ignored, fields of the wrong type count as missing, and undeclared fields are kept
unchecked. Python 3.8, standard library only.
"""

from __future__ import annotations

import json
import math
import re
import signal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Validator = Callable[[Any], Any]  #: validates a value: returns it, normalised, or raises ValueError

MAX_LINE = 1 << 26  #: characters of a line of JSON; a longer one counts as damaged

_LARGEST = 1 << 63  # integers are in -_LARGEST .. _LARGEST - 1

_LATEST = 1e11  # seconds since the epoch, year 5138; far larger values overflow in ``time``

# How a message of watch.py or control.py begins.
_TOP = re.compile(r'\{"(?:file|state|quiet|result|lost|now|stopped)": ')


class Damaged(ValueError):
    """Raised for a node's message that is truncated, is not JSON, or has fields missing or of the wrong type."""


# -- validators ------------------------------------------------------------


def text(value: Any) -> str:
    """Return a string, with NUL and characters that UTF-8 cannot encode replaced. Raises ValueError for other types."""
    if not isinstance(value, str):
        raise ValueError
    if not value.isascii():
        value = value.encode("utf-8", "replace").decode()
    return value.replace("\0", "\ufffd")


def real(value: Any) -> float:
    """Return a number, which may be NaN or infinite. Raises ValueError for other values."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or (isinstance(value, int) and not _fits(value)):
        raise ValueError
    return value


def number(value: Any) -> float:
    """Return a finite number. Raises ValueError for other values."""
    if not math.isfinite(real(value)):
        raise ValueError
    return value  # type: ignore[no-any-return]


def moment(value: Any) -> float:
    """Return a time in seconds since the epoch. Raises ValueError for other values."""
    if not 0 <= number(value) < _LATEST:
        raise ValueError
    return value  # type: ignore[no-any-return]


def whole(value: Any) -> int:
    """Return a signed 64-bit integer. Raises ValueError for other values."""
    if type(value) is not int or not _fits(value):
        raise ValueError
    return value


def natural(value: Any) -> int:
    """Return an integer >= 0, such as a rank. Raises ValueError for other values."""
    if whole(value) < 0:
        raise ValueError
    return int(value)


def flag(value: Any) -> bool:
    """Return True for the JSON value ``true``, and False for every other value."""
    return value is True


def one_of(*words: str) -> Validator:
    """Return a validator that accepts only the strings ``words``."""

    def kind(value: Any) -> str:
        if not isinstance(value, str) or value not in words:
            raise ValueError
        return value

    return kind


def matching(pattern: str) -> Validator:
    """Return a validator for strings that match the regular expression ``pattern`` completely."""
    compiled = re.compile(pattern)

    def kind(value: Any) -> str:
        if not isinstance(value, str) or not compiled.fullmatch(value):
            raise ValueError
        return value

    return kind


def none_or(kind: Validator) -> Validator:
    """Return a validator that accepts None and the values that ``kind`` accepts."""
    return lambda value: None if value is None else kind(value)


def items(kind: Validator) -> Validator:
    """Return a validator for lists that removes the items that ``kind`` rejects."""

    def listed(value: Any) -> list[Any]:
        if not isinstance(value, (list, tuple)):
            raise ValueError
        return [one for ok, one in (_tried(kind, each) for each in value) if ok]

    return listed


def table(kind: Validator, key: str = r"\d{1,9}") -> Validator:
    """Return a validator for JSON objects that removes invalid entries.

    The key of an entry must match the regular expression ``key`` completely, and its value must pass ``kind``.
    """
    known = re.compile(key)

    def kept(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise ValueError
        tried = {name: _tried(kind, one) for name, one in value.items() if known.fullmatch(str(name))}
        return {name: one for name, (ok, one) in tried.items() if ok}

    return kept


class Record:
    """A validator for JSON objects with declared fields.

    need: validator of each required field. may: validator of each optional field; an invalid field is removed.
    default: (validator, default) of each further field. A missing or invalid field gets the default; a default that is
    a function is called for the value.
    """

    def __init__(
        self, need: dict[str, Validator], default: dict[str, tuple[Validator, Any]], may: dict[str, Validator]
    ) -> None:
        self._need, self._default, self._may = need, default, may

    def __call__(self, value: Any) -> dict[str, Any]:
        """Return a validated copy of ``value``; raises ValueError if a required field is missing or wrong."""
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


def _tried(kind: Validator, value: Any) -> tuple[bool, Any]:
    try:
        return True, kind(value)
    except (ValueError, RecursionError):
        return False, None


def _fits(value: int) -> bool:
    return -_LARGEST <= value < _LARGEST


# -- texts -----------------------------------------------------------------


def json_object(line: str | bytes) -> dict[str, Any] | None:
    """Parse the last JSON object in a line of text; None if there is none.

    If a full disk has truncated an object, the next object follows in the same line.
    """
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
    """Return the valid records of ``kind`` in lines of JSON; skip all other lines."""
    tried = (_tried(kind, json_object(line)) for line in lines)
    return [one for ok, one in tried if ok]


def record_in(kind: Record, file: str) -> dict[str, Any] | None:
    """Return the record in a file; None if the file does not exist or contains no record of ``kind``."""
    try:
        with open(file, "rb") as opened:
            data = opened.read(MAX_LINE + 1)
    except (OSError, ValueError):  # ValueError: the name contains a NUL
        return None
    return checked(kind, json_object(data))


def checked(kind: Record, value: Any) -> dict[str, Any] | None:
    """Return a validated copy of ``value`` as a record of ``kind``; None if it is invalid."""
    ok, one = _tried(kind, value)
    return one if ok else None


def message_in(line: str) -> dict[str, Any] | None:
    """Return the message of watch.py or control.py in a line of its output; None if there is none.

    Skips text before the message, which a login profile may have printed. Raises Damaged for a damaged message.
    """
    found = _TOP.search(line)
    if found is None:
        return None
    value = _parsed(line[found.start() :]) if len(line) <= MAX_LINE else None
    if not isinstance(value, dict):
        raise Damaged(f"received a damaged JSON line of {len(line):,} characters")
    try:
        return _message(value)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"received `{found[0]}…` with a field missing or of the wrong type ({error})") from None


# -- records ---------------------------------------------------------------

_NAME = matching(r"rank\d{1,9}|server|node|launcher")

_SIGNAL = matching("|".join([*signal.Signals.__members__, r"SIG\d{1,3}"]))

_TEXTS = items(text)

_RANK_OR_NONE = none_or(natural)

_ASKED = Record({}, {"by": (text, ""), "why": (text, ""), "now": (flag, False)}, {})

#: A finding of a supervisor.
FINDING = Record(
    {"kind": text, "text": text, "node_rank": natural},
    {"t": (moment, 0.0), "rank": (_RANK_OR_NONE, None), "stop": (flag, False)},
    {"stacks": _TEXTS},
)

#: The cause of a run's end.
CAUSE = Record(
    {"node_rank": natural, "name": _NAME, "kind": text, "reason": text},
    {"t": (moment, 0.0), "rank": (_RANK_OR_NONE, None), "asked": (none_or(_ASKED), None)},
    {},
)

#: A lost node, or a node that the run continues without.
LOST_NODE = Record(
    {},
    {"since": (moment, 0.0), "why": (text, ""), "how": (text, "lost")},
    {"t": moment, "kind": text, "text": text},
)

#: The outcome of a process.
OUTCOME = Record(
    {"name": _NAME, "node_rank": natural},
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
    return [natural(epoch), natural(step), phase if isinstance(phase, str) else ""]


def _most(value: Any) -> list[Any]:
    name, share = value if isinstance(value, list) and len(value) == 2 else (None, None)
    return [text(name), number(share)]


#: How a rank uses its GPU, as the trainer's DeviceMonitor reports it.
_DEVICE = table(number, r"\w{1,40}")

#: The last metrics of a rank, in a node's state.
_RANK_STATE = Record(
    {},
    {"at": (none_or(_at), None), **{name: (none_or(natural), None) for name in _PROGRESS}},
    {
        **{name: none_or(real) for name in ("loss", "seeds_per_s", "remote_share", "own_s", "step_s", "batch_s")},
        "most": none_or(_most),
        "device": _DEVICE,
        "kind": text,
        "t": moment,
        "ended": flag,
    },
)

_PROCESS = Record(
    {"pid": natural, "start_ticks": natural, "pgid": natural}, {"name": (text, ""), "rank": (_RANK_OR_NONE, None)}, {}
)

#: ``procs/rank<r>.json``: a rank that has started.
STARTED = Record(
    {
        "pid": natural,
        "pgid": natural,
        "start_ticks": natural,
        "runner": Record({"pid": natural, "start_ticks": natural}, {}, {}),
    },
    {},
    {},
)

#: A rank's wait that has passed its deadline, as in ``procs/wait-rank<r>.json``.
WAIT = Record(
    {"t": moment, "rank": natural, "of": text, "seconds": number},
    {"request": (text, ""), "node_rank": (none_or(natural), None), "stack": (items(text), list), "at": (text, "")},
    {},
)

_PEER = Record({}, {"state": (text, "absent"), "age": (none_or(number), None)}, {})

#: A restart of a run, as all supervisors report it.
RESTART = Record(
    {"generation": natural, "text": text},
    {
        **dict.fromkeys(("of", "cause_node"), (natural, 0)),
        **dict.fromkeys(("t", "seconds"), (number, 0.0)),
        **dict.fromkeys(("nodes", "without"), (items(natural), list)),
        "reason": (text, ""),
        "ranks": (table(items(natural)), dict),
        **dict.fromkeys(("hub", "epoch", "step"), (_RANK_OR_NONE, None)),
    },
    {},
)

#: Fields of state.json and result.json with ``run.restarts``.
_RESTARTS: dict[str, Validator] = {
    "generation": natural,
    "hub": natural,
    "restarts": items(RESTART),
    "left": flag,
    "no_restart": text,
}

_ABOUT_OTHERS = {
    "clock_offset": (none_or(number), None),
    "gone": (table(LOST_NODE), dict),
    "findings": (items(FINDING), list),
}

#: ``state.json`` of a node.
STATE = Record(
    {"state": text, "time": moment, "pid": natural, "start_ticks": natural},
    {
        **_ABOUT_OTHERS,
        "processes": (items(_PROCESS), list),
        "peers": (table(_PEER), dict),
        "spare": (items(natural), list),
        "ranks": (table(_RANK_STATE), dict),
    },
    _RESTARTS,
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
    _RESTARTS,
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
        "metrics": (Record({}, {}, dict.fromkeys(("test_accuracy", "val_accuracy", "last_loss"), none_or(real))), dict),
        "stopped_by": (text, ""),
        "exit_status": (natural, 1),
    },
    {"restarts": items(RESTART)},
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
        "nodes": items(natural),
        "generation": natural,
    },
)

#: A metrics line, the trainer's or an own script's.
METRIC = Record(
    {},
    {},
    {
        **dict.fromkeys(("kind", "split", "metric", "better"), text),
        **dict.fromkeys(("rank", *_PROGRESS), natural),
        **{name: none_or(real) for name in ("loss", "accuracy", "val_accuracy", "test_accuracy", "seeds_per_s")},
        **dict.fromkeys(("t", "seconds", "seeds"), number),
        "remote_share": none_or(real),
        "saved": items(natural),
        "device": _DEVICE,
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

_ENDED_PROCESS = Record({"pid": natural}, {"command": (text, "")}, {})

_LOST = Record({"reason": text}, {"state": (none_or(Record({"time": moment}, {}, {})), None)}, {})

#: Fields of the messages of watch.py, and of control.py's answer to ``stop``; each must be of its kind.
_MESSAGE_FIELDS: dict[str, Validator] = {
    "file": matching(r"[^/\0][^\0]*"),
    "offset": natural,
    "lines": items(text),
    "state": STATE,
    "quiet": number,
    "result": RESULT,
    "lost": _LOST,
    "now": moment,
    "was": text,
    "killed": items(_ENDED_PROCESS),
    "leftovers": items(_ENDED_PROCESS),
}


def _message(value: dict[str, Any]) -> dict[str, Any]:
    found = {**value, **{name: kind(value[name]) for name, kind in _MESSAGE_FIELDS.items() if name in value}}
    if "file" in found and not {"offset", "lines"} <= found.keys():
        raise ValueError("a message with `file` must have `offset` and `lines` too")
    if "stopped" in found and not {"killed", "leftovers"} <= found.keys():
        raise ValueError("a message with `stopped` must have `killed` and `leftovers` too")
    return found
