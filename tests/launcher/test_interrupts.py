"""Tests of Ctrl-C, SIGTERM and SIGHUP during a run, and of the question whether to stop or detach."""

from __future__ import annotations

import io
import os
import pty
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from follow_kit import FakeNode, Scene, ended, state, step
from launcher.run import interrupts as interrupts_module
from launcher.run import monitor as follow_module
from launcher.run.interrupts import InterruptPrompt, Interrupts, Keys, OnInterrupt, Policy
from launcher.run.live_log import LiveLog

INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"_LAST_RESULT": 0.3, "_CHECK_EVERY": 0.05, "_POLL": 0.02}.items():
        monkeypatch.setattr(follow_module, name, value)


@pytest.mark.parametrize(
    ("on_interrupt", "can_ask", "number", "meaning"),
    [
        ("ask", True, INT, "ask"),
        ("ask", False, INT, "stop"),
        ("ask", True, TERM, "stop"),
        ("stop", True, INT, "stop"),
        ("detach", True, INT, "detach"),
        ("detach", False, TERM, "detach"),
        ("ask", True, HUP, "detach"),
        ("stop", False, HUP, "detach"),
    ],
)
def test_the_action_of_a_signal(on_interrupt: OnInterrupt, can_ask: bool, number: int, meaning: str) -> None:
    assert Policy(on_interrupt, can_ask).action(number, 100.0) == meaning


@pytest.mark.parametrize(
    ("on_interrupt", "can_ask", "number", "meaning"),
    [
        ("ask", True, INT, "ask"),
        ("ask", False, INT, "detach"),
        ("ask", True, TERM, "detach"),
        ("stop", False, INT, "stop"),
        ("stop", True, TERM, "detach"),
        ("detach", False, INT, "detach"),
        ("stop", True, HUP, "detach"),
    ],
)
def test_the_action_of_a_signal_in_a_viewer(
    on_interrupt: OnInterrupt, can_ask: bool, number: int, meaning: str
) -> None:
    assert Policy(on_interrupt, can_ask, viewer=True).action(number, 100.0) == meaning


def test_a_second_ctrl_c_within_two_seconds_stops_and_a_later_one_asks_again() -> None:
    policy = Policy("ask", True)
    assert [policy.action(INT, at) for at in (100.0, 101.9)] == ["ask", "stop"]
    policy = Policy("ask", True)
    assert [policy.action(INT, at) for at in (100.0, 103.0, 104.0)] == ["ask", "ask", "stop"]
    policy = Policy("detach", True)
    assert [policy.action(INT, at) for at in (100.0, 101.0)] == ["detach", "stop"]


class Terminal:
    """A pseudo terminal. The launcher reads from ``far`` what a test writes to ``near``."""

    def __init__(self) -> None:
        self.near, self.far = pty.openpty()

    def type(self, text: str) -> None:
        os.write(self.near, text.encode())

    def close(self) -> None:
        os.close(self.near)
        os.close(self.far)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    made = Terminal()
    monkeypatch.setattr(interrupts_module, "Keys", lambda: Keys(made.far))
    yield made
    made.close()


class InterruptedRun:
    def __init__(
        self, tmp_path: Path, on_interrupt: OnInterrupt = "ask", *, can_ask: bool = True, nodes_up: int = 2, **more: Any
    ):
        nodes = [FakeNode(k) for k in range(2)]
        for k, node in enumerate(nodes):
            node.scripts = [[state(), step(k, 16), node.stopped, ended(k, "stopped", stopped=True)]]
        self.scene = Scene(tmp_path, *nodes, **more)
        self.interrupts = Interrupts()
        self.prompt = InterruptPrompt(self.scene.live, on_interrupt, can_ask=can_ask)
        self.prompt.live.board.epochs = 10
        self.followed: Any = None
        self.thread = threading.Thread(target=self._follow, daemon=True)
        self.thread.start()
        self.until(lambda: len(self.scene.live.board.stepping()) == nodes_up)

    def _follow(self) -> None:
        self.followed = self.scene.follow(self.interrupts, self.prompt)

    def signal(self, number: int) -> InterruptedRun:
        assert self.interrupts._receiver is not None
        self.interrupts._receiver(number)
        return self

    def until(self, true: Any) -> None:
        deadline = time.monotonic() + 5
        while not true():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def end(self) -> Any:
        self.thread.join(5)
        assert not self.thread.is_alive()
        return self.followed

    @property
    def stops(self) -> list[int]:
        return [node.stops for node in self.scene.nodes]


def test_ctrl_c_shows_the_state_of_the_run_and_asks(tmp_path: Path, terminal: Terminal) -> None:
    run = InterruptedRun(tmp_path).signal(INT)
    run.until(lambda: "Enter: keep following" in run.scene.output)
    assert "Ctrl-C. Run r1: 2 nodes, 2 ranks; epoch 1 of 10, step 17 of 50.\n" in run.scene.output
    assert (
        "s: stop every node, d: detach (the run goes on), Enter: keep following; Ctrl-C again: stop" in run.scene.output
    )
    assert run.stops == [0, 0], "no node is stopped before the answer"
    terminal.type("x\n")
    run.until(lambda: "the run goes on\n" in run.scene.output)
    run.signal(INT)
    terminal.type("s")
    followed = run.end()
    assert followed.interrupted == "Ctrl-C" and set(followed.results) == {0, 1}
    assert "Ctrl-C: stopping every node" in run.scene.output


def test_the_answer_d_detaches(tmp_path: Path, terminal: Terminal) -> None:
    run = InterruptedRun(tmp_path).signal(INT)
    terminal.type("d")
    assert run.end().detached == "asked"
    assert run.stops == [0, 0]


def test_two_ctrl_c_stop_the_run_without_an_answer(tmp_path: Path, terminal: Terminal) -> None:
    run = InterruptedRun(tmp_path).signal(INT)
    run.until(lambda: "Enter: keep following" in run.scene.output)
    assert run.signal(INT).end().interrupted == "Ctrl-C"
    assert run.stops == [1, 1]


@pytest.mark.parametrize(("number", "stops"), [(INT, [1, 1]), (TERM, [1, 1]), (HUP, [0, 0])])
def test_without_a_terminal_nothing_is_asked(tmp_path: Path, number: int, stops: list[int]) -> None:
    run = InterruptedRun(tmp_path, can_ask=False).signal(number)
    followed = run.end()
    assert run.stops == stops and bool(followed.detached) == (number == HUP)
    assert "Enter go on" not in run.scene.output


def test_detaching_waits_until_every_node_has_started(tmp_path: Path) -> None:
    # The launcher must not end earlier, because nobody else would report that a node never started.
    may_start = threading.Event()
    starts = {0: lambda: None, 1: lambda: may_start.wait(5)}
    run = InterruptedRun(tmp_path, "detach", can_ask=False, nodes_up=1, starts=starts).signal(INT)
    run.until(lambda: "detaching as soon as every node has started" in run.scene.output)
    time.sleep(0.1)
    assert run.thread.is_alive()
    may_start.set()
    assert run.end().detached == "asked"


def test_keys_are_read_without_enter_and_the_terminal_is_restored(terminal: Terminal) -> None:
    import termios

    before = termios.tcgetattr(terminal.far)
    with Keys(terminal.far) as keys:
        assert keys.pressed() == ""
        terminal.type("s")
        time.sleep(0.05)
        assert keys.pressed() == "s"
    assert termios.tcgetattr(terminal.far) == before


def test_a_question_is_shown_below_the_live_view(terminal: Terminal, tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=100, height=24, force_terminal=True, color_system=None)
    scene = Scene(tmp_path, FakeNode(0))
    live = LiveLog(console, scene.plan)
    with live, InterruptPrompt(live, "ask", can_ask=True) as prompt:
        assert prompt.signal(INT, 100.0) is None
        assert [line.plain for line in live.picture()][-1].startswith("s: stop every node")
        terminal.type("\n")
        time.sleep(0.05)
        assert prompt.answer() is None
        assert not any("stop every node" in line.plain for line in live.picture())


PROGRAM = """
import signal, sys, time
from launcher.run.interrupts import Interrupts
interrupts = Interrupts()
interrupts.exit_message = "what may still run"
with interrupts:
    try:
        print("ready", flush=True)
        {body}
    except KeyboardInterrupt:
        print(interrupts.message, flush=True)
        time.sleep({after})
"""


def program(body: str, after: float = 0.0) -> subprocess.Popen[str]:
    code = PROGRAM.format(body=textwrap.indent(textwrap.dedent(body), "        ").strip(), after=after)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def test_before_the_start_the_first_signal_ends_and_the_next_exits_at_once() -> None:
    process = program("time.sleep(20)", after=20)
    process.send_signal(INT)
    assert process.stdout is not None
    assert process.stdout.readline() == "interrupted; nothing had been started on the nodes\n"
    process.send_signal(INT)
    time.sleep(0.6)  # a second signal within this time is ignored as a duplicate, e.g. from a wrapper script
    assert process.poll() is None
    process.send_signal(INT)
    assert process.wait(5) == 130
    assert process.stderr is not None and "what may still run" in process.stderr.read()


def test_while_stopping_one_more_signal_exits_at_once_with_a_message() -> None:
    process = program(
        """
        def receive(number):
            interrupts.exit_on_next = True
            print("stopping", flush=True)
        with interrupts.handed_to(receive):
            print("handed", flush=True)
            time.sleep(20)
        """
    )
    assert process.stdout is not None and process.stdout.readline() == "handed\n"
    process.send_signal(INT)
    assert process.stdout.readline() == "stopping\n"
    time.sleep(0.6)
    process.send_signal(INT)
    assert process.wait(5) == 130
    assert process.stderr is not None and "what may still run" in process.stderr.read()


def test_a_hangup_while_collecting_is_ignored() -> None:
    process = program(
        "interrupts.ignore_hangup = True; signal.raise_signal(signal.SIGHUP); time.sleep(0.1); sys.exit(7)"
    )
    assert process.wait(5) == 7


def test_keys_are_read_from_a_file_descriptor_above_1024(terminal: Terminal) -> None:
    import fcntl
    import resource

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= limits[1] <= 1100:
        pytest.skip(f"only {limits[1]} files may be open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 1200), limits[1]))
    high = fcntl.fcntl(terminal.far, fcntl.F_DUPFD, 1100)
    try:
        with Keys(high) as keys:
            assert keys.pressed() == ""
            terminal.type("s")
            time.sleep(0.05)
            assert keys.pressed() == "s"
    finally:
        os.close(high)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
