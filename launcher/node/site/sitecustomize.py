"""Makes Python processes of a rank or graph server write their stacks on a signal. Imported by Python at startup.

On SIGRTMAX-4, faulthandler writes the stacks of all threads to ``procs/stacks-rank<r>`` or ``procs/stacks-server`` of
the run folder, even while the process blocks in C code.

Python imports only the first ``sitecustomize`` on ``sys.path``, which is this module. If there is another one, this
module runs it.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress


def _register() -> None:
    run_dir, rank = os.environ.get("GNNFLEET_RUN_DIR"), os.environ.get("RANK", "")
    name = "server" if os.environ.get("GNNFLEET_PROCESS") == "server" else f"rank{rank}" if rank.isdigit() else ""
    if run_dir and name:
        with suppress(Exception):  # a script must neither fail nor print because of this module
            import faulthandler
            import signal

            file = os.open(
                os.path.join(run_dir, "procs", f"stacks-{name}"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600
            )
            # A real-time signal, since scripts may handle SIGUSR1 themselves.
            faulthandler.register(signal.SIGRTMAX - 4, file=file, all_threads=True)


def _run_hidden() -> None:
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    here = os.path.dirname(os.path.abspath(__file__))
    path = [folder for folder in sys.path if os.path.abspath(folder) != here]
    spec = PathFinder.find_spec("sitecustomize", path)
    if spec is None or spec.loader is None:
        return
    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)  # Python reports its exceptions


if __name__ == "sitecustomize":
    _register()
    _run_hidden()
