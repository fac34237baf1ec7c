"""``gnnfleet follow``: the launcher's own view and ending for a run that goes on already."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from rich.console import Console

from launcher.conduct import View, rejoin
from launcher.errors import TransportError
from launcher.events import EventLog
from launcher.interrupts import OnInterrupt
from launcher.operate.again import own_command_of
from launcher.operate.bring import settle
from launcher.operate.views import OpenRun
from launcher.report import RunReport
from launcher.transport import make_transport
from launcher.transport.base import Transport


def follow(
    run: OpenRun, folder: Path, console: Console, *, on_interrupt: OnInterrupt | None, plain: bool, as_json: bool
) -> RunReport:
    """Watch the run to its end, then collect and report as its launcher would have."""
    found = run.found
    settle(run, folder)
    config = found.needed_config
    with closing(EventLog(folder / "events.jsonl", sys.stdout if as_json else None)) as events:
        return rejoin(
            found.needed_plan,
            _lines(run),
            run=config.run,
            folder=folder,
            started=found.launch.started if found.launch else time.time(),
            view=View(console, on_interrupt or config.run.on_interrupt, plain),
            events=events,
            epochs=None if found.launch is None or own_command_of(found) else config.train.epochs,
        )


def _lines(run: OpenRun) -> Mapping[int, Transport | TransportError]:
    """A node out of reach gets a line that is tried again; its error when it asked for a password."""
    config = run.found.needed_config
    again = {k for k in run.errors if k < len(config.nodes) and not config.nodes[k].password}
    return {k: make_transport(config, k) if k in again else line for k, line in run.attempts.items()}
