"""Command line of the soak, the random test of runs with faults.

``make soak MINUTES=10 SEED=1`` runs many scenarios, ``make soak SCENARIO=17`` a single one.
"""

from __future__ import annotations

import argparse
import itertools
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
    parser.add_argument("--seed", type=int, default=1, help="the first scenario is that of a thousand times the seed")
    parser.add_argument("--scenario", help="run only these scenarios: 17 or 17,4003")
    parser.add_argument("--folder", type=Path, help="keep the files of all runs in this folder")
    options = parser.parse_args()
    seeds = map(int, options.scenario.split(",")) if options.scenario else itertools.count(1000 * options.seed)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="gnnfleet-soak-") as folder:
        kept = options.folder.absolute() if options.folder else None
        sys.exit(min(1, soak(options.minutes, seeds, kept or Path(folder), keep=kept is not None)))
