"""Measures sampling, gathering, training steps and epochs on a CUDA device; compares with CPU and torch_geometric.

\b
python benchmarks/gpu.py                      tests on the device, then all measurements
python benchmarks/gpu.py --small              a smaller graph
python benchmarks/gpu.py --small --simulated  tiny sizes in numba's simulator on the CPU, to check that everything runs

Needs this repository with its packages and a torch for CUDA (`pip install -e '.[cuda13,test]'`, or cuda12), and one
free GPU. The comparison with torch_geometric's NeighborLoader is made only where pyg-lib is installed. Writes gpu.json,
gpu.md and, if matplotlib is installed, gpu.svg into the folder --out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from table import Row

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

#: Tests that run on a CUDA device if there is one.
TESTS = tuple(
    f"tests/trainer/test_{name}.py"
    for name in (
        "gpu",
        "device",
        "device_monitor",
        "device_step",
        "device_sampling",
        "shared_memory",
        "cuda_step",
        "cuda_compile",
    )  # fmt: skip
)

UNITS = ("M edges/s", "GB/s", "ms", "s")  #: of the bars in the plot, one chart each


@click.command(help=__doc__)
@click.option("--small", is_flag=True, help="A graph of 20,000 nodes instead of 300,000.")
@click.option("--simulated", is_flag=True, help="Tiny sizes, in numba's simulator on the CPU; the times mean nothing.")
@click.option("--tests/--no-tests", "with_tests", default=True, help="First run the tests on the device.")
@click.option(
    "--out", type=click.Path(path_type=Path), default=HERE.parent / ".gnnfleet/bench", help="Folder of the results.",
    show_default=".gnnfleet/bench",
)  # fmt: skip
def main(small: bool, simulated: bool, with_tests: bool, out: Path) -> None:
    if simulated:
        os.environ["NUMBA_ENABLE_CUDASIM"] = "1"  # read when numba is imported, below
    import torch

    from trainer.cuda.availability import why_no_kernels

    device = torch.device("cpu") if simulated else torch.device("cuda", 0)
    if not simulated and not torch.cuda.is_available():
        raise click.ClickException(
            f"torch {torch.__version__} finds no CUDA device; --simulated checks on the CPU that the benchmark runs"
        )
    if why := why_no_kernels(device):
        raise click.ClickException(why)
    if with_tests and not simulated:
        run_tests()
    from gpu_measures import Setup, machine, measurements

    with Setup.of(device, small, simulated) as setup:
        found = {title: list(rows) for title, rows in measurements(setup)}
    report(machine(setup), found, out)


def run_tests() -> None:
    """Run the tests on the device. Raises ClickException if one fails."""
    words = [sys.executable, "-m", "pytest", "-q", *TESTS]
    status = subprocess.run(words, cwd=HERE.parent, check=False).returncode
    if status:
        raise click.ClickException(f"tests failed on this device (pytest exit status {status}); nothing was measured")


def report(machine: str, found: dict[str, list[Row]], out: Path) -> None:
    """Print the tables, and write them as JSON, markdown and a plot."""
    from table import show

    print(machine)
    for title, rows in found.items():
        show(title, rows)
    out.mkdir(parents=True, exist_ok=True)
    values = {title: [asdict(row) for row in rows] for title, rows in found.items()}
    (out / "gpu.json").write_text(json.dumps({"machine": machine, "measurements": values}, indent=1) + "\n")
    (out / "gpu.md").write_text("\n".join(_markdown(machine, found)) + "\n")
    plot(found, out / "gpu.svg")
    print(f"written: {out}/gpu.json, gpu.md")


def _markdown(machine: str, found: dict[str, list[Row]]) -> list[str]:
    lines = [machine]
    for title, rows in found.items():
        lines += [
            "",
            f"### {title}",
            "",
            "| what | value | against | its value | times better |",
            "|---|---|---|---|---|",
        ]
        for row in rows:
            other = "" if row.other is None else f"{row.other:.4g} {row.unit}"
            ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
            lines.append(f"| {row.what} | {row.value:.4g} {row.unit} | {row.against} | {other} | {ratio} |")
    return lines


def plot(found: dict[str, list[Row]], path: Path) -> None:
    """Write one file with a bar chart per unit. Without matplotlib, only print that there is no plot."""
    try:
        from matplotlib import pyplot
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    rows = [row for rows in found.values() for row in rows]
    units = [unit for unit in UNITS if any(row.unit == unit for row in rows)]
    figure, axes = pyplot.subplots(len(units), 1, figsize=(9, 3 * len(units)), squeeze=False)
    for axis, unit in zip(axes[:, 0], units, strict=True):
        bars = [bar for row in rows if row.unit == unit for bar in _bars(row)]
        drawn = axis.barh([name for name, _, _ in bars], [value for _, value, _ in bars])
        for one, (_, _, ours) in zip(drawn, bars, strict=True):
            one.set_color("tab:blue" if ours else "tab:gray")
        axis.set(xlabel=unit)
        axis.invert_yaxis()
    figure.tight_layout()
    figure.savefig(path)


def _bars(row: Row) -> list[tuple[str, float, bool]]:
    """Return the bars of a table row: (label, value, True), and (label, value, False) for what it is compared with."""
    other = [] if row.other is None else [(f"{row.what}: {row.against}", row.other, False)]
    return [(row.what, row.value, True), *other]


if __name__ == "__main__":
    main()
