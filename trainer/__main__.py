"""Entry point of ``python -m trainer``, and of ``python …/trainer/__main__.py``.

No file of the current folder, such as a numpy.py, is imported in place of a package. The launcher starts this file by
its path, as ``-m`` would run a trainer.py of the current folder.
"""

from __future__ import annotations

import atexit
import os
import sys

if not __package__ or sys.path[0] in ("", os.getcwd()):  # nor of the trainer's folder, when it is run as a file
    sys.path[0] = os.path.abspath(os.path.join(os.path.dirname(__file__), os.pardir))

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
