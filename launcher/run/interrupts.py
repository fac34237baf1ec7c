"""Handles Ctrl-C, SIGTERM and SIGHUP, and the keys pressed while a run is followed."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, Literal

from launcher.files import remove_unfinished
from launcher.run.live_log import LiveLog

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_ECHO = 0.5  # seconds in which a repeated signal is ignored: a wrapper script may forward the terminal's signal

_TAP = 0.1  # used instead of _ECHO while pressing Ctrl-C twice has a meaning; key presses are further apart

_TWICE = 2.0  # maximum seconds between two presses of Ctrl-C that mean stop

_SHOW_CURSOR = b"\x1b[?25h"

OnInterrupt = Literal["ask", "stop", "detach"]


class Interrupts:
    """Context manager that handles SIGINT, SIGTERM and SIGHUP.

    The first signal raises KeyboardInterrupt in the main thread. The second prints ``exit_message`` and ends the
    program with status 130. A signal ignored before (``nohup``) stays ignored. See also ``handed_to``.
    """

    def __init__(self) -> None:
        self.message = "interrupted; nothing had been started on the nodes"  #: printed if a signal comes now
        self.exit_message = ""  #: printed when a second signal ends the program; '': a default text
        self.exit_on_next = False  #: the run is being stopped: the next signal ends the program
        self.double_press = False  #: pressing Ctrl-C twice has a meaning
        self.cause = ""  #: what has sent SIGTERM, for the report; '': unknown
        self.patient = False  #: SIGTERM comes from a batch system, several times, and does not end what is left to do
        self.ignore_hangup = False  #: SIGHUP does not interrupt: the remaining work needs no terminal
        self._raised = False
        self._last = 0.0  # monotonic seconds of the last signal
        self._receiver: Callable[[int], None] | None = None
        self._before: dict[int, Any] = {}
        self._terminals = [stream for stream in (0, 1, 2) if os.isatty(stream)]
        self._settings: Any = None
        with suppress(termios.error):
            self._settings = termios.tcgetattr(0)

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
        """Within the block, call ``receiver(number)`` from the signal handler. ``receiver`` must be reentrant."""
        self._receiver = receiver
        try:
            yield
        finally:
            self._receiver, self.exit_on_next = None, False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            # Printing to a closed terminal would fail.
            nowhere = os.open(os.devnull, os.O_RDWR)
            for stream in self._terminals:
                os.dup2(nowhere, stream)
            if self.ignore_hangup or self.exit_on_next:
                return
        if number == signal.SIGTERM and self.patient and (self._raised or self.exit_on_next):
            return
        now = time.monotonic()
        if now - self._last < (_TAP if self.double_press else _ECHO):
            return
        self._last = now
        if self._receiver is not None and not self.exit_on_next:
            self._receiver(number)
        elif self._raised or self.exit_on_next:
            self.exit_now()
        else:
            self._raised = True
            raise KeyboardInterrupt

    def exit_now(self) -> None:
        """Restore the terminal, print ``exit_message``, and end the program with status 130."""
        if self._settings is not None:
            with suppress(termios.error):  # the terminal may be gone
                termios.tcsetattr(0, termios.TCSANOW, self._settings)
        for stream in filter(os.isatty, (1, 2)):
            os.write(stream, _SHOW_CURSOR)  # the live view has hidden it
        remove_unfinished()
        os.write(sys.stderr.fileno(), f"\n{self.exit_message or 'interrupted again: exiting immediately'}\n".encode())
        os._exit(130)


@dataclass
class Policy:
    """Decides whether a signal stops the run, detaches this process from the run, or asks the user."""

    on_interrupt: OnInterrupt
    can_ask: bool  #: stdin and stdout are a terminal
    viewer: bool = False  #: ``gnnfleet follow``: stops the run only if the user answers or repeats Ctrl-C
    _asked: float = -_TWICE  # monotonic seconds of the last signal that asked or detached

    def action(self, number: int, now: float) -> OnInterrupt:
        """Return ``stop``, ``detach`` or ``ask`` for signal ``number``, received at ``now`` (monotonic seconds).

        SIGHUP always detaches. In a viewer (``gnnfleet follow``), SIGTERM does as well. Any other signal causes the
        action ``on_interrupt``, with two exceptions:

        - A second signal within two seconds stops the run.
        - ``ask`` applies only to Ctrl-C at a terminal. Otherwise, a viewer detaches, and other processes
          stop the run.
        """
        if number == signal.SIGHUP or (self.viewer and number == signal.SIGTERM):
            return "detach"
        if self.on_interrupt == "detach" or (number == signal.SIGINT and self.on_interrupt == "ask" and self.can_ask):
            twice = now - self._asked < _TWICE
            self._asked = now
            return "stop" if twice else self.on_interrupt
        return "detach" if self.viewer and self.on_interrupt == "ask" else "stop"


class Keys:
    """Context manager that reads single key presses without echo; Ctrl-C stays a signal."""

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
        """Return the keys typed since the last call; '' if none. End of file counts as Enter."""
        poll = select.poll()  # select() refuses descriptors from 1024 on
        poll.register(self.stream, select.POLLIN)
        if not poll.poll(0):
            return ""
        return os.read(self.stream, 64).decode(errors="replace") or "\n"


_WORDS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "the terminal was closed"}

_ANSWERS: dict[str, OnInterrupt | None] = {"s": "stop", "d": "detach", "\n": None, "\r": None}


class InterruptPrompt:
    """Maps signals and key presses to actions: stop the run, detach from it, or continue.

    Context manager: restores the terminal settings on exit.
    """

    def __init__(
        self, live: LiveLog, on_interrupt: OnInterrupt = "stop", *, can_ask: bool | None = None, viewer: bool = False
    ):
        self.live = live
        self.cause = "Ctrl-C"  #: name of the last signal, for messages
        if can_ask is None:  # the user can answer if stdin and the output are a terminal
            can_ask = live.console.is_terminal and sys.stdin is not None and sys.stdin.isatty()
        self.policy = Policy(on_interrupt, can_ask, viewer)
        self._keys: Keys | None = None
        self._stack = ExitStack()

    def signal(self, number: int, now: float) -> OnInterrupt | None:
        """Return ``stop`` or ``detach`` for a signal, or ask the user and return None; see ``answer``."""
        self.cause = _WORDS[signal.Signals(number)]
        action = self.policy.action(number, now)
        if action == "ask":
            board = self.live.board
            self.live.ask(
                [
                    f"{self.cause}. Run {board.run_id}: {board.summary()}.",
                    "s: stop every node, d: detach (the run goes on), Enter: keep following; Ctrl-C again: stop",
                ]
            )
            if self._keys is None:
                self._keys = self._stack.enter_context(Keys())
            return None
        self._close()
        return action

    def answer(self) -> OnInterrupt | None:
        """Return the user's choice, ``stop`` or ``detach``; None if there is none yet or the user continues."""
        if self._keys is None:
            return None
        for key in self._keys.pressed().lower():
            if key in _ANSWERS:
                action = _ANSWERS[key]
                self._close()
                if action is None:
                    self.live.say("the run goes on", "bold")
                return action
        return None

    def _close(self) -> None:
        if self._keys is not None:
            self._keys = None
            self._stack.close()
            self.live.ask(())

    def __enter__(self) -> InterruptPrompt:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()
