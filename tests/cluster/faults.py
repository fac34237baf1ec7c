"""Command line of the fault tests: ``python tests/cluster/faults.py --count 50 --seed 1``.

Prints one line per fault; exits with status 1 if a run behaved wrongly after any fault.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]

from fault_kit import main  # noqa: E402  found by the paths above

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Injects random faults into runs on four namespaced hosts.")
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gnnfleet-faults-") as folder:
        sys.exit(min(1, main(options.count, options.seed, Path(folder))))
