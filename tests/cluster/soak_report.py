"""Runs soak scenarios for a given time, and prints a line for each and tables at the end."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from contracts import Verdict
from netns import NetCluster, unavailable
from scenario import HOSTS, draw
from soak_kit import Soak, kinds_here
from soak_resources import growth, resource_table, sample

SAMPLE_EVERY = 10  # number of runs between two samples of resources
WARM_UP = 10  # number of runs after which code, parts and libraries are on all hosts


def soak(minutes: float, seeds: Iterable[int], folder: Path, *, keep: bool = False) -> int:
    """Run the scenarios of ``seeds`` for ``minutes``, or until Ctrl-C or SIGTERM. Return the number of problems.

    keep: leave the files of all runs in ``folder``, not only those of runs with a problem.
    """
    if reason := unavailable():
        print(f"no namespaced hosts: {reason}")
        return 1
    folder.mkdir(parents=True, exist_ok=True)
    end, verdicts = time.monotonic() + 60 * minutes, list[Verdict]()
    with NetCluster(HOSTS, machines=Soak.machines()) as cluster:
        running, kinds = Soak(cluster, folder, keep=keep), kinds_here()
        samples = {0: sample(cluster)}
        with contextlib.suppress(KeyboardInterrupt):
            for seed in seeds:
                began = time.monotonic()
                verdict = running.run(draw(seed, kinds))
                verdicts.append(verdict)
                moment, seconds = time.strftime("%H:%M:%S"), time.monotonic() - began
                print(f"{moment}  {seconds:5.1f} s  {seed}  {verdict}", flush=True)
                if len(verdicts) % SAMPLE_EVERY == 0:
                    samples[len(verdicts)] = sample(cluster)
                if time.monotonic() > end:
                    break
        samples[len(verdicts)] = sample(cluster)
    grown = growth(samples, WARM_UP)
    print(f"\n{fault_table(verdicts)}\n\n{resource_table(samples)}\n")
    wrong = [verdict for verdict in verdicts if verdict.wrong]
    print(f"{len(verdicts) - len(wrong)} of {len(verdicts)} runs kept all contracts")
    print("".join(f"  wrong: seed {verdict.scenario.seed}: {', '.join(verdict.wrong)}\n" for verdict in wrong), end="")
    print(f"grown: {', '.join(grown)}" if grown else "no resource has grown")
    return len(wrong) + bool(grown)


def fault_table(verdicts: Sequence[Verdict]) -> str:
    """Return a Markdown table with a row per injected fault: runs, wrong results, median seconds to clean up."""
    cells: dict[tuple[str, str], list[Verdict]] = defaultdict(list)
    for verdict in verdicts:
        cells[verdict.scenario.fault.kind, verdict.scenario.mode].append(verdict)
    lines = ["| fault | workers: runs | wrong | clean after | servers: runs | wrong | clean after |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for kind in dict.fromkeys(kind for kind, _ in sorted(cells)):
        row = [cell for mode in ("workers", "servers") for cell in _cells(cells.get((kind, mode), []))]
        lines.append(f"| {kind} | {' | '.join(row)} |")
    return "\n".join(lines)


def _cells(verdicts: Sequence[Verdict]) -> list[str]:
    if not verdicts:
        return ["0", "", ""]
    seconds = statistics.median(verdict.ended_after for verdict in verdicts)
    return [str(len(verdicts)), str(sum(bool(verdict.wrong) for verdict in verdicts)), f"{seconds:.1f} s"]
