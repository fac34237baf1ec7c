#!/usr/bin/env python3
"""``python launch.py --config cluster.yml``: the ``gnnfleet`` command from a checkout."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main() -> None:
    sys.path.insert(0, str(HERE))
    try:
        from launcher.cli.main import main as gnnfleet

        gnnfleet(prog_name="launch.py")  # imports more as it goes
    except ModuleNotFoundError as error:
        if error.name and error.name.split(".")[0] in ("launcher", "trainer"):
            raise
        remedy = f"{sys.executable} -m pip install -e {HERE}"
        print(f"launch.py: {error.name} is not installed for this Python; run: {remedy}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:  # during the imports; once they are done the command answers for itself
        print("interrupted", file=sys.stderr)
        sys.exit(130)
