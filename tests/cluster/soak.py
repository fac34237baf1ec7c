"""Command line of the soak: ``make soak MINUTES=10 SEED=1``, or ``make soak SCENARIO=17`` for a single scenario."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]
os.environ.setdefault("GNNFLEET_KERNELS", str(HERE.parents[1] / ".gnnfleet/kernels"))

from soak_report import soak  # noqa: E402  found by the paths above

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Runs random scenarios with faults on four namespaced hosts.")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--count", type=int, help="end after so many scenarios")
    parser.add_argument("--seed", type=int, default=1, help="the first scenario is that of a thousand times the seed")
    parser.add_argument("--scenario", type=int, help="run only this scenario")
    parser.add_argument("--folder", type=Path, help="keep the files of all runs in this folder")
    options = parser.parse_args()
    first, count = options.seed * 1000, options.count
    if options.scenario is not None:
        first, count = options.scenario, 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))  # also removes the hosts
    with tempfile.TemporaryDirectory(prefix="gnnfleet-soak-") as folder:
        kept = options.folder.absolute() if options.folder else None
        sys.exit(min(1, soak(options.minutes, first, count, kept or Path(folder), keep=kept is not None)))
