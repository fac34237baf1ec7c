"""The terminal of a session, for whoever attaches to it; one who stops it (Ctrl-S) must not stop the run."""

from __future__ import annotations

import os

_STDOUT = 1


class Screen:
    """Standard output that never blocks where it is a terminal; what it does not take is not shown."""

    def __init__(self) -> None:
        self._file = _terminal() if os.isatty(_STDOUT) else _STDOUT

    def show(self, line: bytes) -> None:
        """Show a line. The terminal may be stopped, or gone with its tmux session."""
        try:
            os.write(self._file, line)
        except OSError:  # the log has it
            return


def _terminal() -> int:
    """The terminal, opened once more: the shell that it is shared with would be surprised by O_NONBLOCK."""
    try:
        return os.open(os.ttyname(_STDOUT), os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:  # not to be found from here, as in some containers
        return _STDOUT
