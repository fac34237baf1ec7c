"""Streams messages from one node: starts the node, follows its run folder, reconnects after a lost connection."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.command import Command
from launcher.errors import FleetError, SessionExists, TransportError
from launcher.node.json_records import Damaged, message_in
from launcher.plan.model import NodePlan
from launcher.transport.base import Transport

SILENCE = 10.0  #: seconds without a message after which a connection is reopened; a node sends one about every 3 s

_FIRST_MESSAGE = 30.0  # the same before the first message: Python starts slowly on a busy node

START_PATIENCE = 20.0  #: seconds to reconnect to a node whose connection is lost while it starts

RETRY_EVERY = 2.0  #: seconds between attempts to reconnect, at first

_RETRY_SLOWEST = 10.0

_Start = Callable[[], None]  #: starts the node's supervisor; raises FleetError


@dataclass(frozen=True)
class NodeMessage:
    """One message about a node: a line that ``watch.py`` printed on the node, or a message made by ``NodeStream``.

    The messages of ``NodeStream`` are ``{"started": true}``, ``{"not-started": error}``, ``{"broken": why}``
    (connection lost), ``{"back": seconds}`` (connection restored) and ``{"bug": text}``. Those of ``RunFollower``'s
    threads are ``{"stopped": true}`` and ``{"returned": error}``.
    """

    node_rank: int
    values: Mapping[str, Any]


class NodeStream(threading.Thread):
    """Thread that passes the messages of one node to ``put`` until the node has ended or ``enough`` is set.

    Reconnects after a lost connection, and continues each file at the byte in ``offsets``.

    ``start``: function that starts the node, called first; it may take ``start_timeout`` seconds. ``only``: patterns of
    the files to follow. ``skip``: options of ``watch.py`` by which the first connection skips lines, ``--tail`` or
    ``--since``; a later one continues where the last one ended.
    """

    def __init__(
        self,
        node: NodePlan,
        transport: Transport,
        put: Callable[[NodeMessage], None],
        enough: threading.Event,
        *,
        connect_timeout: float,
        start: _Start | None = None,
        start_timeout: float = 0.0,
        only: str = "*.jsonl,logs/rank*.log",
        skip: Sequence[str] = (),
    ):
        super().__init__(daemon=True, name=f"follow-node{node.node_rank}")
        self.node, self.transport, self.enough = node, transport, enough
        self.broken_since: float | None = None  #: monotonic seconds; None while connected
        self.over = False  #: the node has ended
        self.offsets: dict[str, int] = {}
        self._put, self._start_node, self._connect_timeout = put, start, connect_timeout
        self._start_timeout, self._only, self._skip = start_timeout, only, skip
        self._streaming = self._has_messages = self._putting = False
        self._last_message = time.monotonic()
        self._starting, self._last_probe = False, 0.0  # monotonic seconds of the start, or of the last probe
        self._pause = RETRY_EVERY

    def run(self) -> None:
        try:
            if self._begun():
                while not self._ended():
                    self._broken(self._stream())
                    self._reconnect()
        except Exception as error:  # without a message the follower would wait for the node for ever
            self._put_message({"bug": f"following the node failed: {error!r}"})

    def close_if_silent(self, now: float) -> None:
        # Without traffic, TCP does not notice that the other machine is gone. A starting node sends nothing: its
        # connection is tested.
        if self._starting and now - self._last_probe > SILENCE:
            self._last_probe = now
            threading.Thread(target=self._probe, daemon=True).start()
        if (
            self._streaming
            and not self._putting
            and now - self._last_message > (SILENCE if self._has_messages else _FIRST_MESSAGE)
        ):
            self._last_message = now
            threading.Thread(target=self.transport.close, daemon=True).start()

    def _probe(self) -> None:
        try:
            self.transport.run(Command(("true",)), timeout=SILENCE)
        except TransportError:
            self.transport.close()

    def _ended(self) -> bool:
        return self.over or self.enough.is_set()

    def _begun(self) -> bool:
        # A tmux session that exists after a reconnection shows that the node was started.
        deadline, unsure = time.monotonic() + self._start_timeout, False
        while self._start_node is not None and not self.enough.is_set():
            self._starting, self._last_probe = True, time.monotonic()
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
                self._reconnect(deadline)
                unsure = True
            except SessionExists as error:
                if unsure:
                    break
                return self._not_started(error)
            except FleetError as error:
                return self._not_started(error)
            finally:
                self._starting = False
        self._put_message({"started": True})
        return not self.enough.is_set()

    def _not_started(self, error: FleetError) -> bool:
        self.over = True
        self._put_message({"not-started": error})
        return False

    def _stream(self) -> str:
        """Run ``watch.py`` on the node and pass on its messages until it ends; return why it ended."""
        self._last_message, self._has_messages, self._streaming = time.monotonic(), False, True
        try:
            words = ("--only", self._only, "--offsets", json.dumps(self.offsets))
            skip = () if self.offsets else self._skip  # after a reconnect, send all lines that were missed
            command = self.node.program("watch", self.node.run_dir, *words, *skip)
            status = self.transport.stream(command, self._handle_line, self.enough)
        except TransportError as error:
            return error.message
        except Damaged as error:
            return str(error)
        finally:
            self._streaming = False
        return f"watch.py on the node ended with exit status {status}"

    def _handle_line(self, line: str) -> None:
        message = message_in(line)
        if message is None:
            return  # output of a shell profile or of run.setup
        self._last_message, self._has_messages = time.monotonic(), True
        if self.broken_since is not None:
            self._put_message({"back": time.monotonic() - self.broken_since})
            self.broken_since, self._pause = None, RETRY_EVERY
        if "file" in message:
            self.offsets[message["file"]] = message["offset"]
        self.over = "result" in message or "lost" in message
        self._putting = True  # blocks while the queue is full
        self._put_message(message)
        self._last_message, self._putting = time.monotonic(), False

    def _broken(self, why: str) -> None:
        if self.broken_since is None and not self._ended():
            self.broken_since = time.monotonic()
            self._put_message({"broken": why})

    def _reconnect(self, deadline: float = math.inf) -> None:
        """Try to reconnect until that succeeds, ``enough`` is set, or ``deadline`` (monotonic seconds) has passed."""
        while not self._ended() and time.monotonic() < deadline and not self.enough.wait(self._pause):
            self._pause = min(_RETRY_SLOWEST, self._pause * 1.2)
            try:
                self.transport.connect(self._connect_timeout)
                return
            except TransportError:
                continue

    def _put_message(self, values: Mapping[str, Any]) -> None:
        self._put(NodeMessage(self.node.node_rank, values))
