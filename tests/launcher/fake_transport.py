"""A transport to a node that exists in memory only. Tests script its replies and read the recorded calls."""

from __future__ import annotations

import errno
import json
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.command import Command
from launcher.errors import ConnectionLost, RemoteFileError, TransportError
from launcher.node.programs.agent import MARKER
from launcher.transport.base import Completed, OnBytes, OnLine, Talk, Transport
from launcher.transport.rpc import parsed

Answer = Completed | Exception | Callable[[Command, bytes], Completed]


def printed(text: str = "", *, returncode: int = 0, stderr: str = "") -> Completed:
    return Completed(returncode, text.encode(), stderr.encode())


@dataclass
class Call:
    command: Command
    stdin: bytes

    @property
    def line(self) -> str:
        return " ".join(self.command.argv)


@dataclass
class Rule:
    """Answers to the commands for which ``matches(argv joined by blanks, stdin)`` is true.

    Each command takes the next answer; the last answer is repeated.
    """

    matches: Callable[[str, bytes], bool]
    answers: list[Answer]

    def next(self) -> Answer:
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


@dataclass
class FakeTransport(Transport):
    """A transport to a node that exists in memory only.

    ``on("tmux new-session", printed())`` answers each command whose argv, joined by blanks,
    contains that text. ``on_program("probe", lambda request: {...})`` answers the node program
    of that name. If several rules match, the last added one is used. A command without a rule raises
    ``AssertionError``. ``files`` maps paths to contents, ``modes`` maps paths to modes; ``~/`` is
    not expanded. Once ``fail`` is set to an exception, every method raises it.
    """

    target: str = "fake"
    node_rank: int | None = None
    files: dict[str, bytes] = field(default_factory=dict)
    modes: dict[str, int] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    clock: float = 0.0  #: seconds that the node's clock is ahead of this machine's
    fail: Exception | None = None
    connected: int = 0
    closed: int = 0
    _rules: list[Rule] = field(default_factory=list)
    _streams: list[tuple[str, list[str], int]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def on(self, text: str, *answers: Answer) -> FakeTransport:
        """Answer commands whose argv contains ``text``, with each of ``answers`` in turn. The last is repeated."""
        self._rules.append(Rule(lambda line, stdin: text in line, list(answers)))
        return self

    def on_program(self, name: str, *replies: Callable[[dict[str, Any]], dict[str, Any]] | Exception) -> FakeTransport:
        """Answer calls of a node program with each of ``replies`` in turn. The last is repeated.

        A reply is a function of the request, or an exception to raise.
        """
        called = f'["{name}", '.encode()
        self._rules.append(Rule(lambda line, stdin: stdin.startswith(called), [_program(reply) for reply in replies]))
        return self

    def on_stream(self, text: str, lines: list[str], returncode: int | None = 0) -> FakeTransport:
        """Let streamed commands that contain ``text`` print ``lines`` and exit.

        returncode: None if they run until they are stopped.
        """
        self._streams.append((text, lines, -1 if returncode is None else returncode))
        return self

    def lines(self) -> list[str]:
        return [call.line for call in self.calls]

    def connect(self, timeout: float) -> None:
        self._check()
        self.connected += 1

    def run(self, command: Command, *, stdin: bytes = b"", timeout: float) -> Completed:
        call = self._record(command, stdin)
        with self._lock:
            rules = [rule for rule in reversed(self._rules) if rule.matches(call.line, stdin)]
            assert rules, f"{self.target}: no answer is scripted for: {call.line[:300]}"
            answer = rules[0].next()
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, Completed) else answer(command, stdin)

    def stream(self, command: Command, on_line: OnLine, stop: threading.Event) -> int:
        call = self._record(command, b"")
        scripted = [entry for entry in reversed(self._streams) if entry[0] in call.line]
        assert scripted, f"{self.target}: no stream is scripted for: {call.line[:300]}"
        _, lines, returncode = scripted[0]
        for line in lines:
            on_line(line)
        if returncode == -1:
            stop.wait()
        return returncode

    def talk(self, command: Command) -> Talk:
        self._record(command, b"")
        return FakeTalk(self, command)

    def upload(self, source: Path, dest: str, *, offset: int = 0, on_bytes: OnBytes | None = None) -> None:
        self._check()
        data = source.read_bytes()[offset:]
        if offset and dest not in self.files:
            raise self._missing(dest)
        self.files[dest] = self.files.get(dest, b"")[:offset] + data
        if on_bytes:
            on_bytes(len(data))

    def write(self, data: bytes, dest: str, *, mode: int = 0o644) -> None:
        self._check()
        self.files[dest], self.modes[dest] = data, mode

    def download(self, source: str, dest: Path, *, most: int | None = None, on_bytes: OnBytes | None = None) -> None:
        self._check()
        if source not in self.files:
            raise self._missing(source)
        dest.parent.mkdir(parents=True, exist_ok=True)
        data = self.files[source][:most]
        dest.write_bytes(data)
        if on_bytes:
            on_bytes(len(data))

    def close(self) -> None:
        self.closed += 1

    def lose_connection(self) -> None:
        self.fail = ConnectionLost("connection lost", host=self.target, node_rank=self.node_rank)

    def _record(self, command: Command, stdin: bytes) -> Call:
        self._check()
        call = Call(command, stdin)
        with self._lock:
            self.calls.append(call)
        return call

    def _check(self) -> None:
        if self.fail is not None:
            raise self.fail

    def _missing(self, path: str) -> RemoteFileError:
        return RemoteFileError(
            f"cannot read {path}: No such file", errno=errno.ENOENT, host=self.target, node_rank=self.node_rank
        )


class FakeTalk(Talk):
    """A fake of the agent, which is the node program that runs other node programs.

    A scripted answer with a nonzero exit status ends the fake agent.
    """

    def __init__(self, node: FakeTransport, command: Command):
        self._node, self._command = node, command
        self._answers: deque[str] = deque()
        self._ended = Completed(0, b"", b"")
        self._lost: TransportError | None = None

    def send(self, line: str) -> None:
        asked = parsed(line)
        if isinstance(asked, str):
            return  # the source of the agent itself
        if not asked["program"]:
            now = time.time() + self._node.clock
            self._answers.append(MARKER + repr({"times": [now, now]}))
            return
        called = json.dumps([asked["program"], asked["request"]]).encode()
        try:
            done = self._node.run(self._command, stdin=called, timeout=1.0)
        except TransportError as error:
            self._lost = error
            raise
        if done.returncode:
            self._ended = done
        else:
            reply = json.loads(done.stdout.decode().partition(MARKER)[2])
            self._answers.append(MARKER + repr({"reply": reply, "times": [0.0, 0.0]}))

    def receive(self, timeout: float) -> str | None:
        if self._lost:
            raise self._lost
        return self._answers.popleft() if self._answers else None

    def ended(self) -> Completed:
        return self._ended

    def close(self) -> None:
        pass


def wire(closed: Callable[[int, int, str, int], str] | None = None) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return a fake of the program node/programs/network.py on a healthy node: a function from request to reply.

    closed: function of (source, target, address, port). It returns why node ``source`` cannot connect to node
    ``target``, or "" if it can.
    """

    def reply(request: dict[str, Any]) -> dict[str, Any]:
        if request["op"] == "open":
            return {"refused": {}, "free": 40000 + request["rank"]}
        routes = [(rank, address, port) for rank, address, ports in request["targets"] for port in ports]
        tested = [[*route, closed(request["rank"], *route) if closed else ""] for route in routes]
        return {"blocked": [one for one in tested if one[-1]]}

    return reply


def _program(reply: Callable[[dict[str, Any]], dict[str, Any]] | Exception) -> Answer:
    if isinstance(reply, Exception):
        return reply

    def answer(command: Command, stdin: bytes) -> Completed:
        request = json.loads(stdin)[1]
        return printed(f"\n{MARKER}{json.dumps(reply(request))}\n")

    return answer
