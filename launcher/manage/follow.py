"""``gnnfleet follow``: shows a running run as the launcher does; at its end, collects its files and prints a report."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from launcher.command import Command
from launcher.config.schema import ClusterConfig
from launcher.errors import Interrupted, TransportError
from launcher.manage.collect_run import prepare_folder
from launcher.manage.node_views import OpenRun
from launcher.report.events import EventLog
from launcher.report.report import RunReport
from launcher.run.interrupts import Interrupts, OnInterrupt
from launcher.run.lifecycle import RunContext, conduct
from launcher.text import count
from launcher.transport import open_transport
from launcher.transport.base import Completed, OnBytes, OnLine, Session, Talk, Transport


def follow(
    run: OpenRun, folder: Path, console: Console, *, on_interrupt: OnInterrupt | None, plain: bool, as_json: bool
) -> RunReport:
    """Follow a run to its end, then collect its files and print its report.

    ``on_interrupt``: action of the first Ctrl-C. None: ``detach`` if ``run.on_interrupt`` in the config is ``detach``,
    else ``ask``. Raises Interrupted and OutOfReach.
    """
    found = run.found
    prepare_folder(run, folder)
    config, plan = found.needed_config, found.needed_plan
    transports: dict[int, Transport] = {}
    for k, connection in run.connections.items():
        if isinstance(connection, Transport):
            transports[k] = connection
        elif k < len(config.nodes):
            transports[k] = _LateTransport(config, k, connection)
        else:
            raise connection
    # ``stop`` is meant for the launcher of the run only.
    on_interrupt = on_interrupt or ("detach" if config.run.on_interrupt == "detach" else "ask")
    started = found.launch.started if found.launch else time.time()
    with (
        closing(EventLog(folder / "events.jsonl", sys.stdout if as_json else None)) as events,
        Interrupts() as interrupts,
    ):
        console.print(Text(f"run {plan.run_id}: following it on {count(len(plan.nodes), 'node')}"), soft_wrap=True)
        limits = replace(config.run, on_interrupt=on_interrupt)
        try:
            context = RunContext(limits, folder, started, events, console, plain)
            return conduct(context, plan, transports, interrupts)
        except KeyboardInterrupt:
            raise Interrupted(interrupts.message) from None


class _LateTransport(Transport):
    """A transport to a node that was unreachable. ``connect`` tries again; other methods fail until it succeeds."""

    def __init__(self, config: ClusterConfig, node_rank: int, error: TransportError):
        self.config, self.node_rank, self.target = config, node_rank, error.host
        self._transport: Transport | None = None
        self._error = error
        self._lock = threading.Lock()

    def connect(self, timeout: float) -> None:
        assert self.node_rank is not None
        with self._lock:
            if self._transport is not None:
                self._transport.connect(timeout)
                return
            try:
                self._transport = open_transport(self.config, self.node_rank)
            except TransportError as error:
                self._error = error
                raise

    def run(self, command: Command, *, stdin: bytes = b"", timeout: float) -> Completed:
        return self._opened.run(command, stdin=stdin, timeout=timeout)

    def stream(self, command: Command, on_line: OnLine, stop: threading.Event) -> int:
        return self._opened.stream(command, on_line, stop)

    def talk(self, command: Command) -> Talk:
        return self._opened.talk(command)

    def start_session(self, name: str, command: Command) -> Session | None:
        return self._opened.start_session(name, command)

    def upload(self, source: Path, dest: str, *, offset: int = 0, on_bytes: OnBytes | None = None) -> None:
        self._opened.upload(source, dest, offset=offset, on_bytes=on_bytes)

    def write(self, data: bytes, dest: str, *, mode: int = 0o644) -> None:
        self._opened.write(data, dest, mode=mode)

    def download(self, source: str, dest: Path, *, most: int | None = None, on_bytes: OnBytes | None = None) -> None:
        self._opened.download(source, dest, most=most, on_bytes=on_bytes)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    @property
    def _opened(self) -> Transport:
        if self._transport is None:
            raise self._error
        return self._transport
