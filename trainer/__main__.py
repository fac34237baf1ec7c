"""Entry point of ``python -m trainer``."""

from __future__ import annotations

import atexit
import os
import sys

_status: list[int] = []  #: the exit status, once it is known


def _exit_at_once() -> None:
    """End a process that has used torch.distributed, without calling the destructors of C++ objects."""
    if _status and "torch.distributed" in sys.modules:
        sys.stdout.flush()
        sys.stderr.flush()
        # They aborted a finished rank ("terminate called without an active exception") in one of 340 runs.
        os._exit(_status[0])


atexit.register(_exit_at_once)  # registered before all other functions, so it is called after them

from trainer.cli import main  # noqa: E402

if __name__ == "__main__":
    try:
        main()
        _status.append(0)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            _status.append(end.code or 0)
        raise
