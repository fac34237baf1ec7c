"""Handles Ctrl-C, SIGTERM and SIGHUP, and the keys pressed while a run is followed."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, Literal

from launcher.files import remove_unfinished
from launcher.run.live_log import LiveLog

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_ECHO = 0.5  # seconds in which a wrapper script passes on what the terminal has sent already

_TAP = 0.1  # the same where a person may press twice: nobody is quicker

_TWICE = 2.0  # seconds between two Ctrl-C that mean stop

_SHOW_CURSOR = b"\x1b[?25h"

OnInterrupt = Literal["ask", "stop", "detach"]


class Interrupts:
    """While entered, the first signal raises KeyboardInterrupt in the main thread; the second prints
    ``last_words`` and ends the program with status 130. A signal that was ignored before (``nohup``) stays ignored.

    Within ``handed_to`` signals are told to a function instead, which may be in the midst of anything.
    """

    def __init__(self) -> None:
        self.meaning = "interrupted; nothing had been started on the nodes"  #: of the first signal, now
        self.last_words = ""
        self.last_chance = False  #: the run is being stopped: one more signal leaves at once
        self.quick = False  #: a person may press twice
        self.keeps_on = False  #: a closed terminal changes nothing: what is left to do needs none
        self._raised = False
        self._last = 0.0
        self._receiver: Callable[[int], None] | None = None
        self._before: dict[int, Any] = {}
        self._terminals = [stream for stream in (0, 1, 2) if os.isatty(stream)]
        self._settings = _terminal_settings()

    def __enter__(self) -> Interrupts:
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def handed_to(self, receiver: Callable[[int], None]) -> Iterator[None]:
        """Signals go to ``receiver``, which is called between any two steps of the main thread."""
        self._receiver = receiver
        try:
            yield
        finally:
            self._receiver, self.last_chance = None, False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            _silence(self._terminals)
            if self.keeps_on or self.last_chance:
                return
        now = time.monotonic()
        if now - self._last < (_TAP if self.quick else _ECHO):
            return
        self._last = now
        if self._receiver is not None and not self.last_chance:
            self._receiver(number)
        elif self._raised or self.last_chance:
            self.leave()
        else:
            self._raised = True
            raise KeyboardInterrupt

    def leave(self) -> None:
        """End the program now, the terminal as it was."""
        if self._settings is not None:
            with suppress(termios.error):  # the terminal may be gone
                termios.tcsetattr(0, termios.TCSANOW, self._settings)
        for stream in filter(os.isatty, (1, 2)):
            os.write(stream, _SHOW_CURSOR)  # the live view has hidden it
        remove_unfinished()
        os.write(sys.stderr.fileno(), f"\n{self.last_words or 'interrupted again: leaving at once'}\n".encode())
        os._exit(130)


@dataclass
class Policy:
    """What a signal means for a run that goes on."""

    on_interrupt: OnInterrupt
    can_ask: bool  #: there is a terminal to ask on
    viewer: bool = False  #: the run is not ours to end unless a person says so
    _asked: float = -_TWICE

    def meaning(self, number: int, now: float) -> OnInterrupt:
        """``ask`` is for Ctrl-C alone, and its second within two seconds is ``stop``; a closed terminal detaches.
        A viewer that cannot ask, or is ended by another program, leaves the run alone."""
        if number == signal.SIGHUP or (self.viewer and number == signal.SIGTERM):
            return "detach"
        if self.on_interrupt == "detach" or (number == signal.SIGINT and self.on_interrupt == "ask" and self.can_ask):
            twice = now - self._asked < _TWICE
            self._asked = now
            return "stop" if twice else self.on_interrupt
        return "detach" if self.viewer and self.on_interrupt == "ask" else "stop"


def _terminal_settings() -> Any:
    try:
        return termios.tcgetattr(0)
    except termios.error:
        return None


def _silence(streams: Sequence[int]) -> None:
    """The terminal is gone: what is still printed goes nowhere, so that printing cannot fail."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in streams:
        os.dup2(nowhere, stream)


class Keys:
    """While entered, keys are read as they are pressed and not echoed; Ctrl-C stays a signal."""

    def __init__(self, stream: int | None = None):
        self.stream = sys.stdin.fileno() if stream is None else stream
        self._before: list[Any] | None = None

    def __enter__(self) -> Keys:
        self._before = termios.tcgetattr(self.stream)
        tty.setcbreak(self.stream, termios.TCSADRAIN)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        if self._before is not None:
            termios.tcsetattr(self.stream, termios.TCSADRAIN, self._before)
            self._before = None

    def pressed(self) -> str:
        """What has been typed by now; '' for nothing. End of file counts as Enter."""
        poll = select.poll()  # select() refuses descriptors from 1024 on
        poll.register(self.stream, select.POLLIN)
        if not poll.poll(0):
            return ""
        return os.read(self.stream, 64).decode(errors="replace") or "\n"


_WORDS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "the terminal was closed"}

_ANSWERS: dict[str, OnInterrupt | None] = {"s": "stop", "d": "detach", "\n": None, "\r": None}


class Talking:
    """Maps signals and key presses to stop, detach or continue. A context manager that restores the terminal."""

    def __init__(
        self, live: LiveLog, on_interrupt: OnInterrupt = "stop", *, can_ask: bool | None = None, viewer: bool = False
    ):
        self.live = live
        self.what = "Ctrl-C"  #: of the last signal
        self.policy = Policy(on_interrupt, at_terminal(live) if can_ask is None else can_ask, viewer)
        self._keys: Keys | None = None
        self._stack = ExitStack()

    def signal(self, number: int, now: float) -> OnInterrupt | None:
        """What a signal asks for; None: a person has been asked."""
        self.what = _WORDS[signal.Signals(number)]
        wish = self.policy.meaning(number, now)
        if wish == "ask":
            self._ask()
            return None
        self._close()
        return wish

    def answer(self) -> OnInterrupt | None:
        """What the person answered to the open question; None: nothing yet, or that the run should go on."""
        if self._keys is None:
            return None
        for key in self._keys.pressed().lower():
            if key in _ANSWERS:
                wish = _ANSWERS[key]
                self._close()
                if wish is None:
                    self.live.say("the run goes on", "bold")
                return wish
        return None

    def _ask(self) -> None:
        board = self.live.board
        self.live.ask(
            [
                f"{self.what}. Run {board.run_id}: {board.what_runs()}.",
                "s stop every node, d detach (the run goes on), Enter go on; Ctrl-C again stops",
            ]
        )
        if self._keys is None:
            self._keys = self._stack.enter_context(self._keys_of())

    def _keys_of(self) -> Keys:
        return Keys()

    def _close(self) -> None:
        if self._keys is not None:
            self._keys = None
            self._stack.close()
            self.live.ask(())

    def __enter__(self) -> Talking:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()


def at_terminal(live: LiveLog) -> bool:
    """Whether somebody sees a question and can answer it."""
    return live.console.is_terminal and sys.stdin is not None and sys.stdin.isatty()
