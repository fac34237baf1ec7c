"""Calls our standard-library programs on a node before any of our code is there."""

from __future__ import annotations

import json
import math
import re
import threading
import time
from ast import literal_eval
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

from launcher.errors import NodeCallError, TransportError
from launcher.node.agent import MARKER
from launcher.script import Command
from launcher.transport.base import Completed, Transport

OLDEST = (3, 8)
_OTHER = "set `python`, `venv` or `conda` of this node to a newer one"
_CLOCK_ROUNDS = 2
_PARSING = threading.Lock()
_CHECK = f"""
import sys
if sys.version_info < {OLDEST}: sys.exit("python %d.%d is too old; {_OTHER}" % sys.version_info[:2])
data = sys.stdin.buffer
"""

# stdin is "<length of source>\n<source><request as JSON>"; the source defines main(request) -> reply
BOOT = f"""{_CHECK}
import json
source = data.read(int(data.readline())).decode()
program = {{"__name__": "gnnfleet_node"}}
exec(compile(source, "<gnnfleet>", "exec"), program)
reply = program["main"](json.loads(data.read().decode()))
sys.stdout.write("\\n{MARKER}" + json.dumps(reply) + "\\n")
""".strip()

# stdin is the source of node/agent.py as a literal on a line, then what it wants to read
AGENT_BOOT = f"""{_CHECK}
agent = {{"__name__": "gnnfleet_agent"}}
exec(compile(eval(data.readline()), "<agent>", "exec"), agent)
agent["serve"](data, sys.stdout.buffer)
""".strip()

_PROGRAMS = Path(__file__).parents[1] / "node"
_IMPORTS = re.compile(r"^ *from launcher\.node(?:\.(\w+) import| import (\w+(?:, \w+)*))", re.MULTILINE)


@cache
def program_source(name: str) -> str:
    """Source of ``launcher/node/<name>.py``."""
    return (_PROGRAMS / f"{name}.py").read_text()


@cache
def bundle(name: str) -> dict[str, str]:
    """Sources of a node program and of all of ours that it imports, by module name."""
    sources: dict[str, str] = {}
    waiting = [name]
    while waiting:
        module = waiting.pop()
        if module not in sources:
            sources[module] = program_source(module)
            for one, several in _IMPORTS.findall(sources[module]):
                waiting += [one] if one else several.split(", ")
    return sources


class NodeAgent:
    """A Python on one node that runs our programs one after another (``node/agent.py``).

    ``python`` is the interpreter as an argv prefix with its setup lines, as made by
    ``launcher.placement.interpreter``. For one thread at a time; leaving the context ends it.
    """

    def __init__(self, transport: Transport, python: Command):
        self._transport, self._python = transport, python.argv[0]
        # -S: reading .pth files takes longer than starting Python; packages.py finds its way without
        self._talk = transport.talk(replace(python, argv=(*python.argv, "-S", "-c", AGENT_BOOT)))
        self._sent: set[str] = set()
        with suppress(TransportError):  # the first call tells
            self._talk.send(repr(program_source("agent")))

    def __enter__(self) -> NodeAgent:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def call(self, program: str, request: dict[str, Any], timeout: float) -> Any:
        """Reply of ``launcher/node/<program>.py``. Raises ``TransportError`` and ``NodeCallError``."""
        sources = {name: source for name, source in bundle(program).items() if name not in self._sent}
        self._sent |= sources.keys()
        answer = self._exchange({"program": program, "sources": sources, "request": request}, timeout)
        if "error" in answer:
            last = "\n    ".join(answer["error"].strip().splitlines()[-5:])
            raise NodeCallError(f"{self._python} failed at {program}:\n    {last}", **_where(self._transport))
        return answer["reply"]

    def clock_offset(self, timeout: float) -> float:
        """The node's clock minus this machine's, seconds: by the quickest of a few round trips."""
        best, offset = math.inf, 0.0
        for _ in range(_CLOCK_ROUNDS):
            before = time.time()
            received, sent = self._exchange({"program": "", "sources": {}, "request": {}}, timeout)["times"]
            after = time.time()
            if after - before < best:
                best, offset = after - before, ((received - before) + (sent - after)) / 2
        return offset

    def _exchange(self, asked: dict[str, Any], timeout: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout
        with suppress(TransportError):  # it has ended, or the line is gone: receive tells which
            self._talk.send(repr(asked))
        while (line := self._talk.receive(max(0.0, deadline - time.monotonic()))) is not None:
            if line.startswith(MARKER):
                answer: dict[str, Any] = parsed(line[len(MARKER) :])
                return answer
        raise _ended(self._talk.ended(), self._python, self._transport)

    def close(self) -> None:
        """End the agent. Safe to call twice."""
        self._talk.close()


def parsed(text: str) -> Any:
    """``literal_eval``; CPython 3.11 counts the depth of all threads' parsing together, and may fail (gh-106905)."""
    with _PARSING:
        return literal_eval(text)


def call(transport: Transport, python: Command, program: str, request: dict[str, Any], timeout: float) -> Any:
    """Run one node program (its source) in a Python of its own with ``request``; returns its reply.

    Raises ``TransportError`` and ``NodeCallError``.
    """
    command = replace(python, argv=(*python.argv, "-c", BOOT))
    done = transport.run(command, stdin=join_request(program, request), timeout=timeout)
    return parse_reply(done, python.argv[0], transport)


def join_request(program: str, request: dict[str, Any]) -> bytes:
    """What ``BOOT`` reads from stdin."""
    source = program.encode()
    return b"%d\n%s%s" % (len(source), source, json.dumps(request).encode())


def split_request(stdin: bytes) -> tuple[str, dict[str, Any]]:
    """The inverse of ``join_request``: (program, request)."""
    length, _, rest = stdin.partition(b"\n")
    return rest[: int(length)].decode(), json.loads(rest[int(length) :])


def parse_reply(done: Completed, python: str, transport: Transport) -> Any:
    """The reply in what a call printed; raises ``NodeCallError``."""
    found = [line for line in done.stdout.decode("utf-8", "replace").splitlines() if line.startswith(MARKER)]
    if done.returncode == 0 and found:
        return json.loads(found[-1][len(MARKER) :])
    raise _ended(done, python, transport)


def _ended(done: Completed, python: str, transport: Transport) -> NodeCallError:
    """What to say when the interpreter ended without a reply."""
    said = done.stderr.decode("utf-8", "replace").strip().splitlines()
    where: dict[str, Any] = _where(transport)
    if done.returncode in (126, 127):
        why = said[-1] if said else "not found"
        remedy = "set `python`, `venv` or `conda` of this node"
        return NodeCallError(f"cannot run {python} ({why})", remedy=remedy, **where)
    last = "\n    ".join(said[-5:]) or "it printed nothing"
    return NodeCallError(f"{python} ended with status {done.returncode}:\n    {last}", **where)


def _where(transport: Transport) -> dict[str, Any]:
    return {"host": transport.target, "node_rank": transport.node_rank}
