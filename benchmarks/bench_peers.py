"""`make bench-peers`: compares gnnfleet with DGL, graphlearn-torch and torch_geometric on one graph.

\b
python benchmarks/bench_peers.py                        all sections; runs each system once
python benchmarks/bench_peers.py --only loader,train    some of the sections loader, parts, train, partition
python benchmarks/bench_peers.py --without shipped      leave out graphlearn-torch as shipped, which is the slowest
python benchmarks/bench_peers.py --small                a small graph, to check that everything runs
python benchmarks/bench_peers.py --tenfold              only gnnfleet's loader, on a graph ten times as large

Prints tables for docs/LOG.md; writes .gnnfleet/bench/peers/<size>.json and .md, and docs/peers.svg if matplotlib is
installed. A system that fails or cannot be installed is left out, with one line that says why. See docs/benchmarks.md.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import click  # noqa: E402

from peers.contest import FOLDER, SECTIONS, Contender, Run, contenders, run_once  # noqa: E402
from peers.floors import Machine, measured  # noqa: E402
from peers.report import as_json, floor_of, plot, table  # noqa: E402


def sections(_: click.Context, __: click.Parameter, text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := set(names) - set(SECTIONS):
        raise click.BadParameter(f"{', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    return names


@click.command(help=__doc__)
@click.option("--only", default=",".join(SECTIONS), callback=sections, metavar="NAME,…", help="Sections to run.")
@click.option("--small", is_flag=True, help="A small graph.")
@click.option("--tenfold", is_flag=True, help="3M nodes, 155M edges; only gnnfleet's loader (about 15 GB).")
@click.option(
    "--without", multiple=True, metavar="TEXT", help="Leave out systems whose name contains TEXT; repeatable."
)
@click.option("--turns", default=1, type=click.IntRange(1), help="Number of runs of each system, in turn.")
@click.option("--epochs", default=3, type=click.IntRange(1), help="Epochs of runs that only load batches.")
@click.option("--train-epochs", default=8, type=click.IntRange(1), help="Epochs of training runs.")
def main(
    only: tuple[str, ...],
    small: bool,
    tenfold: bool,
    without: tuple[str, ...],
    turns: int,
    epochs: int,
    train_epochs: int,
) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that processes started here are ended, too
    size = "small" if small else "tenfold" if tenfold else "large"
    FOLDER.mkdir(parents=True, exist_ok=True)
    chosen = contenders(("loader",) if tenfold else only, size, not tenfold, without)
    found, took = compete(chosen, size, turns, {"train": train_epochs}, epochs)
    report(chosen, found, took, measured(), size)


def compete(
    chosen: Sequence[Contender], size: str, turns: int, epochs_of: Mapping[str, int], epochs: int
) -> tuple[dict[Contender, list[Run]], dict[str, float]]:
    """Run each contender once per turn. Return the runs of each contender, and the seconds spent on each section.

    epochs_of: number of epochs, by section. epochs: number of epochs in the other sections.
    """
    found: dict[Contender, list[Run]] = {one: [] for one in chosen}
    took = dict.fromkeys(SECTIONS, 0.0)
    for turn in range(turns):
        for one in chosen:
            if turn and one.once:
                continue
            begun = time.perf_counter()
            try:
                found[one].append(run_once(one, size, epochs_of.get(one.section, epochs)))
            except RuntimeError as error:
                print(f"peers: {one.section}: {one.system} failed: {str(error).strip()[-600:]}", flush=True)
            took[one.section] += time.perf_counter() - begun
            _say(one, found[one], time.perf_counter() - begun)
    return found, took


def _say(one: Contender, runs: Sequence[Run], seconds: float) -> None:
    figures = f"{runs[-1].median:.3f} s, {runs[-1].memory / 1e6:.0f} MB" if runs else "-"
    print(f"peers: {one.section}: {one.system}: {figures} ({seconds:.0f} s in all)", flush=True)
    if runs and not runs[-1].complete:
        print(f"peers: {one.section}: {one.system}: an epoch missed or repeated seeds", flush=True)


def report(
    chosen: Sequence[Contender], found: dict[Contender, list[Run]], took: dict[str, float], machine: Machine, size: str
) -> None:
    names = [name for name in SECTIONS if any(one.section == name and found[one] for one in chosen)]
    of = {name: {one: found[one] for one in chosen if one.section == name} for name in names}
    layers = next((run.more["layers"] for runs in found.values() for run in runs if "layers" in run.more), None)
    floors = {name: floor_of(name, of[name], layers, machine, size) for name in names}
    tables = [table(name, of[name], took[name], floors[name]) for name in names]
    text = "\n\n".join([machine.describe(), *tables])
    print(f"\n{text}")
    (FOLDER / f"{size}.md").write_text(text + "\n")
    (FOLDER / f"{size}.json").write_text(json.dumps(as_json(found, took, machine), indent=1) + "\n")
    if size == "large":
        plot(found, HERE.parent / "docs/peers.svg")


if __name__ == "__main__":
    main()
