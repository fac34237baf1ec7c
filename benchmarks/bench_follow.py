"""Measures the launcher while it follows a run of many nodes that exist in memory only.

Each node sends its state and the metrics of a rank once a second, and log lines. SSH is not part of it.
"""

from __future__ import annotations

import io
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click

HERE = Path(__file__).resolve().parent
if __name__ == "__main__":
    sys.path[:0] = [str(HERE), str(HERE.parent)]
sys.path.append(str(HERE.parent / "tests" / "launcher"))

from fake_transport import FakeTransport  # noqa: E402
from follow_kit import state, step  # noqa: E402
from launcher.command import Command  # noqa: E402
from launcher.config.schema import RunConfig  # noqa: E402
from launcher.report.events import EventLog  # noqa: E402
from launcher.report.report import RunReport  # noqa: E402
from launcher.run.live_log import LiveLog  # noqa: E402
from launcher.run.monitor import RunFollower  # noqa: E402
from launcher.text import PlainConsole  # noqa: E402
from launcher.transport.base import OnLine  # noqa: E402
from run_kit import make_launch, make_node  # noqa: E402
from table import Row, show  # noqa: E402

MEASURED = 8.0  # seconds


class Load(NamedTuple):
    cpu: float  #: share of a core
    threads: int
    megabytes: float  #: resident memory
    messages: float  #: messages handled per second
    behind: int  #: messages that wait in the queue at the end


class Node(FakeTransport):
    """A node that sends state, metrics and ``lines`` log lines per second until the follower has had enough."""

    def __init__(self, k: int, lines: float):
        super().__init__(target=f"gpu{k:04}", node_rank=k)
        self.lines = lines

    def stream(self, command: Command, on_line: OnLine, stop: threading.Event) -> int:
        k, place, sent = self.node_rank or 0, 0, time.monotonic() + (self.node_rank or 0) % 100 / 100
        text = ["2026-11-23 12:00:00 a line of a log with some words in it"]
        while not stop.wait(max(0.0, sent - time.monotonic())):
            on_line(state())
            on_line(step(k, place))
            each = max(1, int(self.lines))
            on_line(json.dumps({"file": f"logs/rank{k}.log", "offset": place, "lines": text * each}))
            place, sent = place + 1, sent + each / self.lines
        return -1


def run(small: bool) -> list[Row]:
    return [row for nodes in ((8,) if small else (64, 200, 1000)) for row in rows(nodes, 1.0)]


def rows(nodes: int, lines: float) -> Iterator[Row]:
    load = measure(nodes, lines)
    name = f"{nodes} nodes, {nodes * lines:,.0f} log lines/s"
    yield Row(f"{name}: CPU of the launcher", 100 * load.cpu, "% of a core")
    yield Row(f"{name}: messages handled", load.messages, "/s")
    yield Row(f"{name}: messages waiting", load.behind, "")
    yield Row(f"{name}: threads", load.threads, "")
    yield Row(f"{name}: memory", load.megabytes, "MB")


def measure(nodes: int, lines: float) -> Load:
    with tempfile.TemporaryDirectory() as folder:
        top = Path(folder)
        plan = make_launch([make_node(top, k, []) for k in range(nodes)])
        transports = {k: Node(k, lines) for k in range(nodes)}
        live = LiveLog(PlainConsole(file=io.StringIO(), width=200), plan)
        follower = RunFollower(
            plan, transports, RunConfig(), live, EventLog(top / "events.jsonl"), RunReport(plan.run_id, top)
        )
        handled = 0
        handle = follower._handle

        def counted(k: int, message: object) -> None:
            nonlocal handled
            handled += 1
            handle(k, message)  # type: ignore[arg-type]

        follower._handle = counted  # type: ignore[method-assign, assignment]
        for node in follower._nodes.values():
            node.stream.start()
        with live:
            settled = time.monotonic() + 2
            while time.monotonic() < settled:
                follower._turn()
            handled, cpu, since = 0, time.process_time(), time.monotonic()
            while (seconds := time.monotonic() - since) < MEASURED:
                follower._turn()
                if time.monotonic() >= follower._next_check:
                    follower._check_timeouts(time.monotonic())
        load = Load(
            (time.process_time() - cpu) / seconds,
            threading.active_count(),
            resident(),
            handled / seconds,
            follower._messages.qsize(),
        )
        follower._enough.set()
        for node in follower._nodes.values():
            node.stream.join()
        return load


def resident() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


@click.command(help=__doc__)
@click.option("--nodes", multiple=True, type=int, help="Number of nodes, repeatable; default: 64, 200 and 1000.")
@click.option("--lines", default=1.0, show_default=True, help="Log lines per second and node.")
def main(nodes: tuple[int, ...], lines: float) -> None:
    found = [row for number in nodes or (64, 200, 1000) for row in rows(number, lines)]
    show(f"following, load {os.getloadavg()[0]:.1f}", found)


if __name__ == "__main__":
    main()
