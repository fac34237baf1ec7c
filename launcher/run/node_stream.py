"""The stream of messages from one node: starts it, reads its run folder, reconnects when the connection is lost."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.command import Command
from launcher.errors import FleetError, TransportError
from launcher.node.json_reader import Damaged, message_in
from launcher.plan.model import NodePlan
from launcher.run.live_log import parsed, without_stamp
from launcher.run.tmux_session import watch_command
from launcher.transport.base import Transport

SILENCE = 10.0  #: seconds a line may say nothing before it is opened anew; a live node says something every 3 s or so

_FIRST_WORD = 30.0  # the same before its first word: starting Python on a busy node takes its time

START_PATIENCE = 20.0  #: seconds to wait for the line to a node that breaks while it is started

RETRY_EVERY = 2.0  #: seconds between attempts to get a line back, at first

_RETRY_SLOWEST = 10.0

Start = Callable[[], None]  #: starts the node's supervisor; raises FleetError


@dataclass(frozen=True)
class News:
    """One message about a node: ``watch.py``'s, or what became of the line to it.

    ``{"started": true}``, ``{"not-started": error}``, ``{"broken": why}``, ``{"back": seconds}``, ``{"bug": text}``.
    """

    node_rank: int
    message: Mapping[str, Any]


class NodeLine(threading.Thread):
    """Streams one node's news to ``put`` until the node has ended or ``enough`` is set.

    A broken line is opened again and again, and goes on from where it was: ``offsets`` (file -> byte). ``tail``: only
    so many last lines of each file to begin with.
    """

    def __init__(
        self,
        node: NodePlan,
        transport: Transport,
        put: Callable[[News], None],
        enough: threading.Event,
        *,
        connect_timeout: float,
        start: Start | None = None,
        start_timeout: float = 0.0,
        tail: int | None = None,
    ):
        super().__init__(daemon=True, name=f"follow-node{node.node_rank}")
        self.node, self.transport, self.enough = node, transport, enough
        self.broken_since: float | None = None  #: monotonic seconds
        self.over = False
        self.offsets: dict[str, int] = {}
        self._put, self._start_node, self._connect_timeout = put, start, connect_timeout
        self._start_timeout, self._tail = start_timeout, tail
        self._streaming = self._has_spoken = self._telling = False
        self._spoken = time.monotonic()
        self._starting, self._life_asked = False, 0.0  # monotonic: when the start began, or its node was last asked
        self._pause = RETRY_EVERY

    def run(self) -> None:
        try:
            if self._begun():
                while not self._ended():
                    self._broken(self._stream())
                    self._await_line()
        except Exception as error:  # without its thread a node would be waited for without end
            self._tell({"bug": f"following it failed: {error!r}"})

    def break_silence(self, now: float) -> None:
        """Close a line on which nothing has come for long: TCP does not tell that the other end has vanished."""
        if self._starting and now - self._life_asked > SILENCE:
            self._life_asked = now
            threading.Thread(target=self._ask_for_life, daemon=True).start()
        if (
            self._streaming
            and not self._telling
            and now - self._spoken > (SILENCE if self._has_spoken else _FIRST_WORD)
        ):
            self._spoken = now
            threading.Thread(target=self.transport.close, daemon=True).start()

    def _ask_for_life(self) -> None:
        """Close the line to a node that takes long to start when it does not answer at all."""
        try:
            self.transport.run(Command(("true",)), timeout=SILENCE)
        except TransportError:
            self.transport.close()

    def _ended(self) -> bool:
        return self.over or self.enough.is_set()

    def _begun(self) -> bool:
        """Start the node, if that is wanted. A line that breaks meanwhile may hide that it did start."""
        deadline, unsure = time.monotonic() + self._start_timeout, False
        while self._start_node is not None and not self.enough.is_set():
            self._starting, self._life_asked = True, time.monotonic()
            try:
                self._start_node()
                break
            except TransportError as error:
                if time.monotonic() > deadline:
                    return self._not_started(error)
                if not unsure:
                    deadline = min(deadline, time.monotonic() + START_PATIENCE)
                self._starting = False
                self._broken(error.message)
                self._await_line(deadline)
                unsure = True
            except FleetError as error:
                if unsure and "exists already" in str(error):
                    break
                return self._not_started(error)
            finally:
                self._starting = False
        self._tell({"started": True})
        return not self.enough.is_set()

    def _not_started(self, error: FleetError) -> bool:
        self.over = True
        self._tell({"not-started": error})
        return False

    def _stream(self) -> str:
        """Follow until the stream ends; why it did."""
        self._spoken, self._has_spoken, self._streaming = time.monotonic(), False, True
        try:
            tail = None if self.offsets else self._tail  # what was missed meanwhile is told in full
            command = watch_command(self.node, self.offsets, tail=tail)
            status = self.transport.stream(command, self._line, self.enough)
        except TransportError as error:
            return error.message
        except Damaged as error:
            return str(error)
        finally:
            self._streaming = False
        return f"following it ended with status {status}"

    def _line(self, line: str) -> None:
        message = message_in(line)
        if message is None:
            return  # a profile or a setup line of the node that prints
        self._spoken, self._has_spoken = time.monotonic(), True
        self._sound()
        if "file" in message:
            self.offsets[message["file"]] = message["offset"]
        self.over = "result" in message or "lost" in message
        self._telling = True  # which may take as long as nobody listens
        self._tell(message)
        self._spoken, self._telling = time.monotonic(), False

    def _broken(self, why: str) -> None:
        if self.broken_since is None and not self._ended():
            self.broken_since = time.monotonic()
            self._tell({"broken": why})

    def _sound(self) -> None:
        """Something has come: the line stands."""
        if self.broken_since is not None:
            self._tell({"back": time.monotonic() - self.broken_since})
            self.broken_since, self._pause = None, RETRY_EVERY

    def _await_line(self, deadline: float = math.inf) -> None:
        """Until the line stands again, is not wanted any more, or ``deadline`` (monotonic seconds) has passed."""
        while not self._ended() and time.monotonic() < deadline and not self.enough.wait(self._pause):
            self._pause = min(_RETRY_SLOWEST, self._pause * 1.2)
            try:
                self.transport.connect(self._connect_timeout)
                return
            except TransportError:
                continue

    def _tell(self, message: Mapping[str, Any]) -> None:
        self._put(News(self.node.node_rank, message))


def for_machines(node_rank: int, file: str, lines: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    """New lines of a node's metrics or of a rank's log, as ``--json`` tells them."""
    if file.startswith("metrics-"):
        yield from ({**metric, "node_rank": node_rank} for metric in parsed(lines))
    elif file.startswith("logs/rank"):
        name = file[len("logs/") : -len(".log")]
        for line in lines:
            yield {"kind": "log", "node_rank": node_rank, "name": name, "text": without_stamp(line)}
