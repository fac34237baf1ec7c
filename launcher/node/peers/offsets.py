"""How far this machine's clock is ahead of another's, from messages that carry both clocks' times.

As in NTP (RFC 5905, section 8): of a round trip with times t0 (sent here), t1 (arrived there), t2 (sent there) and
t3 (arrived here) the clocks differ by ((t0 - t1) + (t3 - t2)) / 2, wrong by at most half the time on the way.
"""

from __future__ import annotations

from collections import deque

_KEPT = 32  # round trips; older ones tell of a clock that may have drifted since

_SLACK = 0.005  # seconds by which two round trips may disagree beyond what their times on the way allow


class ClockOffset:
    """This clock minus the other one, in seconds, by the quickest of the last round trips."""

    def __init__(self) -> None:
        self._trips: deque[tuple[float, float]] = deque(maxlen=_KEPT)  # (time on the way, offset)

    @property
    def value(self) -> float | None:
        """None before the first round trip."""
        return min(self._trips)[1] if self._trips else None

    @property
    def quickest(self) -> float | None:
        """Seconds the quickest round trip took."""
        return min(self._trips)[0] if self._trips else None

    def add(self, t0: float, t1: float, t2: float, t3: float) -> None:
        """Take in a round trip; one that contradicts those before means that a clock was set."""
        on_the_way = (t3 - t0) - (t2 - t1)
        if on_the_way < 0:  # a clock was set in the midst of it
            return
        offset = ((t0 - t1) + (t3 - t2)) / 2
        if self._trips:
            best, known = min(self._trips)
            if abs(offset - known) > (on_the_way + best) / 2 + _SLACK:
                self._trips.clear()
        self._trips.append((on_the_way, offset))
