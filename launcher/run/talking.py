"""The first Ctrl-C of a run: what runs is said, and what to do is asked; the run goes on meanwhile."""

from __future__ import annotations

import signal
import sys
from contextlib import ExitStack
from types import TracebackType

from launcher.run.interrupts import OnInterrupt, Policy
from launcher.run.keys import Keys
from launcher.run.live_log import LiveLog

_WORDS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "the terminal was closed"}

_ANSWERS: dict[str, OnInterrupt | None] = {"s": "stop", "d": "detach", "\n": None, "\r": None}


class Talking:
    """Turns signals and keys into wishes; within its context the terminal is as it was before, at the end."""

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
