"""Where commands print."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

UNBOUNDED = 100_000  #: columns of what is no terminal: a file or a pipe has lines as long as they need to be


def console_for(*, stderr: bool) -> Console:
    """For stdout, or ``stderr``. Into a file or a pipe tables are as wide as what they hold, with nothing cut or
    folded, unless COLUMNS says how wide they may be."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    bounded = stream.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return Console(stderr=stderr, highlight=False, width=None if bounded else UNBOUNDED)
