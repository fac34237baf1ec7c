"""`make bench`: runs all benchmarks in turn. Each prints a table of gnnfleet's results and those of alternatives.

python benchmarks/run.py                 all of them
python benchmarks/run.py sampling ssh    some of them
python benchmarks/run.py --small         small sizes, to check that they run
"""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path

import click

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "tests" / "cluster")]

NAMES = (
    "sampling",
    "rules",
    "service",
    "serving",
    "links",
    "ranking",
    "training",
    "partition",
    "plan",
    "heartbeats",
    "follow",
    "hosts",
    "ssh",
    "cache",
    "scaling",
    "startup",
)


@click.command(help=__doc__)
@click.argument("names", nargs=-1, type=click.Choice(NAMES))
@click.option("--small", is_flag=True, help="Small sizes, to check that everything runs.")
def main(names: tuple[str, ...], small: bool) -> None:
    from table import show

    for name in names or NAMES:
        begun = time.perf_counter()
        rows = importlib.import_module(f"bench_{name}").run(small)
        show(f"{name} ({time.perf_counter() - begun:.0f} s)", rows)


if __name__ == "__main__":
    main()
