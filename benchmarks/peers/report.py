"""The tables, JSON and plot of `make bench-peers`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from graphs import PEER_SIZES
from peers.contest import SECTIONS, Contender, Run
from peers.floors import Machine

Found = Mapping[Contender, Sequence[Run]]

TITLES = {
    "loader": "Loading an epoch, one machine",
    "parts": "Loading an epoch, two parts on two processes",
    "train": "Training an epoch, two parts on two processes",
    "partition": "Partitioning into two, from memory to files",
}
#: Seconds of torch_geometric's distributed package and METIS, never measured by this program: both need pyg-lib, which
#: the package index lacks. The values are from another run on 2 cores, published in this project's issue on speed.
PUBLISHED = {
    "parts": ("torch_geometric.distributed, repaired", "4.7 to 5.9"),
    "train": ("torch_geometric.distributed, repaired, documented loop", "85 to 93"),
    "partition": ("torch_geometric + pyg-lib, METIS", "7.7 (2.5 GB)"),
}
HEAD = "| system | s | times ours | CPU s | peak memory/host | times ours | edges | loss | test accuracy | note |"


def table(section: str, found: Found, took: float, floor: float | None) -> str:
    """Return the Markdown table of a section: gnnfleet's rows first, then the other systems, fastest first."""
    ran = {one: runs for one, runs in found.items() if runs}
    order = sorted(ran, key=lambda one: (not one.ours, median(ran[one])))
    lines = [f"**{TITLES[section]}** ({took:.0f} s)", "", HEAD, "|---|" + "---:|" * 8 + "---|"]
    lines += [_line(one, ran[one], _against(one, ran)) for one in order]
    lines += [f"| {one.system} | failed |" + " |" * 8 for one, runs in found.items() if not runs]
    if section in PUBLISHED:
        name, seconds = PUBLISHED[section]
        lines.append(f"| {name} | ({seconds}) |" + " |" * 7 + " published, not measured: no pyg-lib here |")
    return "\n".join([*lines, *([f"\nFloor by bytes and operations: {floor:.3g} s."] if floor else [])])


def floor_of(section: str, found: Found, layers: list[list[int]] | None, machine: Machine, size: str) -> float | None:
    """Return a lower bound of a section's seconds; None if a size needed for it was not measured.

    layers: [targets, sources, edges] of each layer in an epoch of gnnfleet's ``BatchLoader``.
    """
    if section == "partition":
        return machine.writing(size)
    if section == "train":
        return machine.training(layers, 256, int(PEER_SIZES[size]["num_classes"])) if layers else None
    run = next((runs[-1] for one, runs in found.items() if one.ours and runs), None)
    return machine.loading(run.edges or 0, run.nodes or 0) if run else None


def _against(one: Contender, ran: Found) -> Sequence[Run] | None:
    """Return the runs of the fastest gnnfleet contender; None if no gnnfleet contender ran.

    Contenders with the same partition method as ``one`` are preferred.
    """
    ours = [other for other in ran if other.ours]
    same = [other for other in ours if other.cut == one.cut] or ours
    return ran[min(same, key=lambda other: median(ran[other]))] if same else None


def median(runs: Sequence[Run]) -> float:
    """Return the median seconds over all epochs of all runs."""
    return statistics.median(second for run in runs for second in run.seconds)


def _line(one: Contender, runs: Sequence[Run], best: Sequence[Run] | None) -> str:
    memory, last = max(run.memory for run in runs), runs[-1]
    ratio = f"{median(runs) / median(best):.2f}" if best else ""
    more = f"{memory / max(run.memory for run in best):.2f}" if best else ""
    cpu = "" if last.cpu is None else f"{last.cpu:.2f}"
    cells = [one.system, f"{median(runs):.3g}", ratio, cpu, f"{memory / 1e6:,.0f} MB", more]
    cells += [
        "" if last.edges is None else f"{last.edges / 1e6:.2f} M",
        "" if last.loss is None else f"{last.loss:.3f}",
    ]
    cells += ["" if last.accuracy is None else f"{last.accuracy:.4f}", one.note if last.complete else "seeds missing"]
    return "| " + " | ".join(cells) + " |"


def as_json(found: Found, took: Mapping[str, float], machine: Machine) -> dict[str, Any]:
    systems = [
        {"section": one.section, "system": one.system, "note": one.note, "runs": [asdict(run) for run in runs]}
        for one, runs in found.items()
    ]
    return {"machine": asdict(machine), "took_s": dict(took), "systems": systems}


def plot(found: Found, path: Path) -> None:
    """Write a bar chart of the seconds in each section. Prints a line instead if matplotlib is not installed."""
    try:
        from matplotlib import pyplot
    except ImportError:
        print("peers: no plot: matplotlib is not installed")
        return
    figure, axes = pyplot.subplots(len(SECTIONS), 1, figsize=(9, 3 * len(SECTIONS)))
    for axis, section in zip(axes, SECTIONS, strict=True):
        ran = {one: runs for one, runs in found.items() if runs and one.section == section}
        order = sorted(ran, key=lambda one: -median(ran[one]))
        bars = axis.barh([one.system for one in order], [median(ran[one]) for one in order])
        for bar, one in zip(bars, order, strict=True):
            bar.set_color("tab:blue" if one.ours else "tab:gray")
        axis.set(title=TITLES[section], xlabel="s", xscale="log")
    figure.tight_layout()
    figure.savefig(path)
