"""Measures the CPU work of 1, 2 and 4 simulated hosts that share a core, and predicts times on real hosts.

python benchmarks/run.py scaling                 keep the global batch size; save results, then predict
python benchmarks/bench_scaling.py --per-host    keep the batch size per host
python benchmarks/bench_scaling.py --predict     predict from saved results; --cores and --gbit describe the hosts
GNNFLEET_DEBIAN: folder of the Debian dependency graph, as for ``data.dataset: file``. If unset, this graph is left out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "cluster"))

import click

from graphs import CACHE, FANOUTS, LARGE, SMALL
from scaling.job import Case, environment, pinned, train_on
from scaling.model import Hardware, Measured, table
from table import Row, show
from trainer.partition.make import PartitionSpec, make_partition

HERE = Path(__file__).resolve().parent
COUNTS = (1, 2, 4)
FIGURES = CACHE / "scaling.json"


def cases(small: bool) -> list[Case]:
    sizes = {name: str(value) for name, value in (SMALL if small else LARGE).items()} | {"val": "64", "test": "64"}
    batch, hidden, epochs = (1024, 64, 2) if small else (4096, 256, 3)
    found = [Case("small" if small else "planted", "synthetic", sizes, batch, FANOUTS, hidden, epochs)]
    if source := os.environ.get("GNNFLEET_DEBIAN"):
        found.append(Case("debian", "file", {}, batch, FANOUTS, hidden, epochs, source))
    else:
        print("Debian graph left out: GNNFLEET_DEBIAN does not name its folder")
    return found


def run(small: bool, per_host: bool = False) -> list[Row]:
    """Measure all cases on a single core, and predict times.

    per_host: keep the batch size per host instead of the global batch size.
    """
    # on one core: contention between processes on two cores would count as CPU time
    cores = sorted(os.sched_getaffinity(0))[:1]
    measured = {
        case.name: [measure(sized(case, count) if per_host else case, count, cores) for count in COUNTS]
        for case in cases(small)
    }
    FIGURES.write_text(json.dumps({name: list(map(asdict, runs)) for name, runs in measured.items()}))
    forecast(measured, [Hardware(gbit=10), Hardware(gbit=1)])
    return [row for name, runs in measured.items() for row in rows(name, runs)]


def sized(case: Case, count: int) -> Case:
    """Return the case with its global batch size multiplied by ``count``."""
    return replace(case, batch=case.batch // COUNTS[-1] * count)


def measure(case: Case, count: int, cores: Sequence[int]) -> Measured:
    folder = CACHE / f"scaling-{case.name}-{count}"
    spec = PartitionSpec(case.dataset, str(folder), case.source, case.options, count, "metis", force=True)
    make_partition(spec, lambda _: None)
    hosts = train_on(case, folder, count, CACHE / "scaling-run", cores)
    settings = {"batch_size": case.batch, "fanouts": case.fanouts, "hidden": case.hidden, "epochs": case.epochs}
    argv = [sys.executable, "-m", "scaling.alone", str(folder), str(count), json.dumps(settings)]
    with pinned(cores):
        done = subprocess.run(argv, cwd=HERE, env=_path(), stdout=subprocess.PIPE, check=True)
    alone = json.loads(done.stdout.splitlines()[-1])
    return Measured(tuple(hosts), alone["cpu"], alone["edges"], alone["rows"], alone["weight_bytes"])


def _path() -> dict[str, str]:
    return environment(PYTHONPATH=os.pathsep.join([str(HERE), str(HERE.parent), str(HERE.parent / "tests/cluster")]))


def rows(name: str, runs: Sequence[Measured]) -> Iterator[Row]:
    one = runs[0]
    for each in runs:
        at = f"{name}, {len(each.hosts)} hosts: "
        yield Row(at + "CPU of an epoch", each.cpu, "s", "1 host", one.cpu, "equal")
        yield Row("… of all hosts' batches", each.cpu, "s", "in one process", each.alone_cpu, "equal")
        yield Row("… growth by distribution", each.cpu / each.alone_cpu - 1, "")
        yield Row("… growth by smaller batches", each.alone_cpu / one.alone_cpu - 1, "")
        yield Row("… of graph servers", each.sum("server_cpu"), "s")
        yield Row("… edges sampled", each.edges / 1e6, "M", "1 host", one.edges / 1e6, "equal")
        yield Row("… rows gathered", each.rows / 1e6, "M", "1 host", one.rows / 1e6, "equal")
        for kind in ("remote_rows", "cached_rows", "held_rows") if len(each.hosts) > 1 else ():
            yield Row(f"… … {kind.replace('_', ' ')}", each.sum(kind) / 1e6, "M")
        yield Row("… rows' bytes received", each.sum("remote_bytes") / 1e6, "MB")
        yield Row("… gradients received", each.reduced_bytes / 1e6, "MB")
        yield Row("… over all connections", each.sum("network_bytes") / 1e6, "MB")


def forecast(measured: dict[str, list[Measured]], hardware: Sequence[Hardware]) -> None:
    for name, runs in measured.items():
        for on in hardware:
            print(f"\n{name}\n\n" + "\n".join(table(runs, on)))


@click.command(help=__doc__)
@click.option("--small", is_flag=True, help="Small sizes, to check that it runs.")
@click.option("--per-host", is_flag=True, help="A fixed batch size per host.")
@click.option("--predict", is_flag=True, help="Predict from the results of the last run.")
@click.option("--cores", default=Hardware.cores, show_default=True)
@click.option("--efficiency", default=Hardware.efficiency, show_default=True)
@click.option("--gbit", default=Hardware.gbit, show_default=True)
@click.option("--latency-us", default=1e6 * Hardware.latency, show_default=True)
@click.option("--threads", default=Hardware.threads, show_default=True, help="Sampler threads.")
def main(
    small: bool,
    per_host: bool,
    predict: bool,
    cores: int,
    efficiency: float,
    gbit: float,
    latency_us: float,
    threads: int,
) -> None:
    if not predict:
        show("scaling", run(small, per_host))
        return
    if not FIGURES.exists():
        raise click.ClickException("nothing was measured yet; run python benchmarks/run.py scaling first")
    kept = json.loads(FIGURES.read_text())
    measured = {name: [Measured.load(fields) for fields in runs] for name, runs in kept.items()}
    on = replace(Hardware(), cores=cores, efficiency=efficiency, gbit=gbit, latency=latency_us / 1e6, threads=threads)
    forecast(measured, [on])


if __name__ == "__main__":
    main()
