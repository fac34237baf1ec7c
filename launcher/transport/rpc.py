"""Runs the programs of ``launcher/node/programs`` on a node, by sending their source to a Python there.

Nothing has to be installed on the node; the programs use the standard library only.
"""

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

from launcher.command import Command
from launcher.errors import NodeCallError, TransportError
from launcher.node.programs.agent import MARKER
from launcher.transport.base import Transport

_OLDEST = (3, 8)  # oldest Python that can run the programs; training needs a newer one

_OTHER = "set `python`, `venv` or `conda` of this node to Python 3.10 or newer"

_CLOCK_ROUNDS = 2

_SHOWN = 100  # characters of an invalid reply in a message

_PARSING = threading.Lock()

# stdin: one line with the source of node/programs/agent.py as a string literal, then the agent's requests
_BOOT = f"""
import sys
sys.path[:] = filter(None, sys.path)
if sys.version_info < {_OLDEST}: sys.exit("python %d.%d is too old; {_OTHER}" % sys.version_info[:2])
data = sys.stdin.buffer
agent = {{"__name__": "gnnfleet_agent"}}
exec(compile(eval(data.readline()), "<agent>", "exec"), agent)
agent["serve"](data, sys.stdout.buffer)
""".strip()

_NODE = Path(__file__).parents[1] / "node"

_IMPORTS = re.compile(r"^ *from launcher\.node((?:\.\w+)*) import (\w+(?:, \w+)*)", re.MULTILINE)


@cache
def program_source(name: str) -> str:
    """Return the source of ``launcher/node/programs/<name>.py``."""
    return (_NODE / "programs" / f"{name}.py").read_text()


@cache
def bundle(name: str) -> dict[str, str]:
    """Return the sources of a program and of all ``launcher.node`` modules that it imports.

    Keys are dotted names below ``launcher.node``.
    """
    sources: dict[str, str] = {}
    waiting = [f"programs.{name}"]
    while waiting:
        module = waiting.pop()
        if module not in sources:
            sources[module] = _module_file(module).read_text()
            for package, names in _IMPORTS.findall(sources[module]):
                inside = [f"{package}.{one}".lstrip(".") for one in names.split(", ")]
                waiting += [one if _module_file(one).exists() else package.lstrip(".") for one in inside]
    return sources


def _module_file(module: str) -> Path:
    return _NODE.joinpath(*module.split(".")).with_suffix(".py")


class NodeAgent:
    """A Python process on a node that runs programs one after another (``node/programs/agent.py``).

    ``python``: command that starts the node's Python, without arguments; messages name its last word. For use by one
    thread at a time. Leaving the context ends the process.
    """

    def __init__(self, transport: Transport, python: Command):
        self._transport, self._python = transport, python.argv[-1]
        # -S: reading .pth files takes longer than starting Python; packages.py finds site-packages by itself
        self._talk = transport.talk(replace(python, argv=(*python.argv, "-S", "-c", _BOOT)))
        self._sent: set[str] = set()
        self._owed = 0  # requests without an answer; answers come in the order of the requests
        with suppress(TransportError):  # ``call`` raises the error
            self._talk.send(repr(program_source("agent")))

    def __enter__(self) -> NodeAgent:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def call(self, program: str, request: dict[str, Any], timeout: float) -> Any:
        """Run ``launcher/node/programs/<program>.py`` and return its reply. Raises TransportError, NodeCallError."""
        sources = {name: source for name, source in bundle(program).items() if name not in self._sent}
        self._sent |= sources.keys()
        answer = self._exchange({"program": program, "sources": sources, "request": request}, timeout)
        if "reply" not in answer:
            last = "\n    ".join(answer.get("error", "").strip().splitlines()[-5:])
            message = f"gnnfleet's program {program} failed in {self._python}:\n    {last}"
            raise NodeCallError(message, **_where(self._transport))
        return answer["reply"]

    def clock_offset(self, timeout: float) -> float:
        """Return the node's clock minus the launching machine's, in seconds, from the faster of two round trips."""
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
        self._owed += 1
        with suppress(TransportError):  # receive tells an ended process from a lost connection
            self._talk.send(repr(asked))
        while (line := self._talk.receive(max(0.0, deadline - time.monotonic()))) is not None:
            if line.startswith(MARKER):
                self._owed -= 1
                if self._owed:  # to an earlier request, whose time was over
                    continue
                text = line[len(MARKER) :]
                with suppress(
                    ValueError, TypeError, LookupError, SyntaxError, MemoryError, RecursionError, OverflowError
                ):
                    answer = parsed(text)
                    received, sent = answer["times"]
                    if isinstance(answer.get("error", ""), str) and math.isfinite(received) and math.isfinite(sent):
                        return dict(answer)
                raise NodeCallError(f"invalid reply from {self._python}: {text[:_SHOWN]!r}", **_where(self._transport))

        # The process has ended.
        done, where = self._talk.ended(), _where(self._transport)
        stderr = done.stderr.decode("utf-8", "replace").strip().splitlines()
        if done.returncode in (126, 127):
            why = stderr[-1] if stderr else "not found"
            remedy = "set `python`, `venv` or `conda` of this node to an existing Python"
            raise NodeCallError(f"cannot run {self._python} ({why})", remedy=remedy, **where)
        last = "\n    ".join(stderr[-5:]) or "it printed nothing"
        raise NodeCallError(f"{self._python} ended with status {done.returncode}:\n    {last}", **where)

    def close(self) -> None:
        """End the process. Safe to call twice."""
        self._talk.close()


def parsed(text: str) -> Any:
    """Parse a Python literal by ``literal_eval``, under a lock.

    Without the lock, parallel calls can fail in CPython 3.11: it adds up the parser depth of all threads (gh-106905).
    """
    with _PARSING:
        return literal_eval(text)


def call(transport: Transport, python: Command, program: str, request: dict[str, Any], timeout: float) -> Any:
    """Run ``launcher/node/programs/<program>.py`` in a new Python process and return its reply.

    ``request`` must be serialisable as JSON; tuples arrive as lists. Raises TransportError, NodeCallError.
    """
    with NodeAgent(transport, python) as agent:
        return agent.call(program, json.loads(json.dumps(request)), timeout)


def _where(transport: Transport) -> dict[str, Any]:
    return {"host": transport.target, "node_rank": transport.node_rank}
