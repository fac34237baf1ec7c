"""The records in files of run folders, and the messages of ``watch.py`` and ``control.py``: fields and their kinds.

docs/ARCHITECTURE.md describes the files. Python 3.8, standard library only.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from launcher.node.json_reader import (
    Record,
    flag,
    items,
    matching,
    moment,
    natural,
    none_or,
    number,
    one_of,
    parsed,
    real,
    table,
    text,
    whole,
)

if TYPE_CHECKING:
    from launcher.node.json_reader import Validator

# How a message of watch.py or control.py begins.
_TOP = re.compile(r'\{"(?:file|state|quiet|result|lost|now|stopped)": ')

_NAME = matching(r"(rank|runner)\d{1,9}|server|node|launcher")

_SIGNAL = matching(r"SIG[A-Z]{1,10}\d{0,3}|SIG\d{1,3}")  # the node's system may know others than this one

_TEXTS = items(text)

_RANK_OR_NONE = none_or(natural)

_ASKED = Record({}, {"by": (text, ""), "why": (text, ""), "now": (flag, False)}, {})

#: A finding of a supervisor.
FINDING = Record(
    {"kind": text, "text": text, "node_rank": natural},
    {"t": (moment, 0.0), "rank": (_RANK_OR_NONE, None), "stop": (flag, False)},
    {"stacks": _TEXTS, "over": flag, **dict.fromkeys(("epoch", "step"), natural)},
)

#: The cause of a run's end.
CAUSE = Record(
    {"node_rank": natural, "name": _NAME, "kind": text, "reason": text},
    {
        "t": (moment, 0.0),
        "rank": (_RANK_OR_NONE, None),
        "follow_up": (flag, False),
        "asked": (none_or(_ASKED), None),
    },
    {},
)

# A lost node, or a node that the run continues without.
_LOST_NODE = Record(
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
        **dict.fromkeys(("stopped", "oom", "follow_up"), (flag, False)),
        **dict.fromkeys(("traceback", "tail"), (_TEXTS, list)),
        "returncode": (none_or(whole), None),
        "signal": (none_or(_SIGNAL), None),
        "note": (text, ""),
    },
    {"failed": flag},
)

_PROGRESS = ("epoch", "step", "steps")


#: Activities of a rank in ``progress-rank<r>``, in the order of an epoch. A script is "between" two epochs.
PHASES = ("load", "compute", "reduce", "evaluate", "between")

_PHASE = one_of(*PHASES)


def _at(value: Any) -> list[Any]:
    epoch, step, phase = value if isinstance(value, list) and len(value) == 3 else (None, None, None)
    return [natural(epoch), natural(step), _PHASE(phase)]


def _most(value: Any) -> list[Any]:
    name, share = value if isinstance(value, list) and len(value) == 2 else (None, None)
    return [text(name), number(share)]


# How a rank uses its GPU, as the trainer's DeviceMonitor reports it.
_DEVICE = table(number, r"\w{1,40}")

_RANK_NUMBERS = ("loss", "seeds_per_s", "remote_share", "own_s", "step_s", "batch_s", "idle_s")

# The last metrics of a rank, in a node's state.
_RANK_STATE = Record(
    {},
    {"at": (none_or(_at), None), **{name: (none_or(natural), None) for name in _PROGRESS}},
    {
        **dict.fromkeys(_RANK_NUMBERS, none_or(real)),
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

#: ``procs/error-rank<r>.json``: the error of the trainer that ends a rank.
ERROR = Record({"type": text, "follow_up": flag}, {"message": (text, "")}, {})

#: A rank's wait that has passed its deadline, as in ``procs/wait-rank<r>.json``.
WAIT = Record(
    {"t": moment, "rank": natural, "of": text, "seconds": number},
    {
        **dict.fromkeys(("request", "server", "at"), (text, "")),
        "node_rank": (none_or(natural), None),
        "stack": (items(text), list),
    },
    {},
)

_PEER = Record({}, {"state": (text, "absent"), "age": (none_or(number), None)}, {})

# A restart of a run, as all supervisors report it.
_RESTART = Record(
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
    "restarts": items(_RESTART),
    "left": flag,
    "no_restart": text,
}

# The last metrics of a rank, in a report to the hub, which needs all fields.
_RANK_REPORT = Record(
    {"kind": text, "t": moment, "ended": flag},
    {
        "at": (none_or(_at), None),
        **dict.fromkeys(_PROGRESS, (none_or(natural), None)),
        **dict.fromkeys(_RANK_NUMBERS, (none_or(real), None)),
    },
    {"most": none_or(_most), "device": _DEVICE, "done": flag},
)

# A checkpoint that a restart may continue from, see ``newest_checkpoint``.
_CHECKPOINT = Record(
    {"file": matching(r"epoch-\d{4,9}(-step-\d{6,12})?\.pt"), "epoch": natural, "step": natural}, {}, {}
)

# What a node can contribute to a restart.
_STANDING = Record({"checkpoint": none_or(_CHECKPOINT), "parts": items(natural), "stepped": flag}, {}, {})

#: ``track/<tracker>.json``: where a tracker shows the run.
TRACKED = Record({"id": text, "url": text, "folder": matching(r"[\w.-]*(/[\w.-]+)*")}, {}, {})

_BLOCKER = Record({"run_id": text, "user": text, "what": text}, {"since": (moment, 0.0), "waits": (flag, False)}, {})

# What a node of a waiting run waits for, in state.json: the leases and the earlier tickets on its host.
_QUEUE = Record(
    {},
    {
        "earlier": (natural, 0),  # runs that are before it in the line of its host
        "since": (moment, 0.0),
        "blockers": (items(_BLOCKER), list),
    },
    {},
)

# The place of a node in line, in a report to the hub, and the turn that the hub calls.
_PLACE = Record({"ready": flag, "held": flag, "round": natural}, {}, {})
_TURN = Record({"take": flag, "go": flag, "round": natural}, {}, {})

#: A member's report to the hub (``launcher.node.peers.model.Report``).
MEMBER_REPORT = Record(
    {
        "t": moment,
        "offset": none_or(number),
        "state": text,
        "trained": none_or(flag),
        "final": none_or(text),
        "cause": none_or(CAUSE),
        "ranks": table(_RANK_REPORT),
        "findings": items(FINDING),
        "stacks": none_or(table(_TEXTS, r"\d{1,9}|server")),
        "own_ranks": items(natural),
    },
    {
        "waits": (table(WAIT), dict),
        "host": (table(number, r"\w{1,40}"), dict),
        "generation": (natural, 0),
        "standing": (none_or(_STANDING), None),
        "place": (none_or(_PLACE), None),
    },
    {},
)

# A node that the run continues without, in a decision.
_GONE = Record({"since": moment, "t": moment, **dict.fromkeys(("why", "how", "kind", "text"), text)}, {}, {})

# The hub's decision after an attempt (``launcher.node.supervisor.restart.decide``).
_DECISION = Record(
    {"generation": natural, "restart": flag, "leave": flag},
    {
        **dict.fromkeys(("why", "reason"), (text, "")),
        **dict.fromkeys(("lead", "first"), (natural, 0)),
        **dict.fromkeys(("t", "seconds"), (number, 0.0)),
        **dict.fromkeys(("nodes", "without"), (items(natural), list)),
        **dict.fromkeys(("ranks", "parts"), (table(items(natural)), dict)),
        **dict.fromkeys(("left", "given_up"), (flag, False)),
        "checkpoint": (none_or(_CHECKPOINT), None),
        "cause": (none_or(CAUSE), None),
        "records": (items(_RESTART), list),
        "gone": (table(_GONE), dict),
    },
    {},
)

#: The hub's answer to a report.
ORDERS = Record(
    {
        "t2": moment,
        "cause": none_or(CAUSE),
        **dict.fromkeys(("stop", "finish", "stacks", "known_final"), flag),
        "peers": none_or(table(_PEER)),
    },
    {
        "decision": (none_or(_DECISION), None),
        "generation": (none_or(natural), None),
        "turn": (none_or(_TURN), None),
    },
    {"t0": moment, "t1": moment},
)

_ABOUT_OTHERS = {
    "clock_offset": (none_or(number), None),
    "gone": (table(_LOST_NODE), dict),
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
        "queue": (none_or(_QUEUE), None),
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
        "lost": (table(_LOST_NODE), dict),
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
    {
        "restarts": items(_RESTART),
        "trackers": items(Record(dict.fromkeys(("tracker", "id", "url", "path"), text), {}, {})),
    },
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
        **dict.fromkeys(("kind", "split", "metric", "metric_title", "better", "baseline", "ended_early"), text),
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


class Damaged(ValueError):
    """Raised for a node's message that is truncated, is not JSON, or has fields missing or of the wrong type."""


def message_in(line: str) -> dict[str, Any] | None:
    """Return the message of watch.py or control.py in a line of its output; None if there is none.

    Skips text before the message, which a login profile may have printed. Raises Damaged for a damaged message.
    """
    found = _TOP.search(line)
    if found is None:
        return None
    value = parsed(line[found.start() :])
    if not isinstance(value, dict):
        raise Damaged(f"received a damaged JSON line of {len(line):,} characters")
    try:
        known = {name: kind(value[name]) for name, kind in _MESSAGE_FIELDS.items() if name in value}
        if "file" in value and not {"offset", "lines"} <= value.keys():
            raise ValueError("a message with `file` must have `offset` and `lines` too")
        if "stopped" in value and not {"killed", "leftovers"} <= value.keys():
            raise ValueError("a message with `stopped` must have `killed` and `leftovers` too")
        return {**value, **known}
    except ValueError as error:
        raise Damaged(f"received `{found[0]}…` with a field missing or of the wrong type ({error})") from None
