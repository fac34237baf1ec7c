"""What a sweep leaves: the comparison of its best runs, sweep.html, and best.yml, which launches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from launcher.errors import FleetError
from launcher.files import write_whole
from launcher.hostlist import fold
from launcher.report.compare import compare, figures_of, print_comparison
from launcher.report.html.render import render
from launcher.report.metrics import score_text
from launcher.report.run_folder import read_folder
from launcher.sweep.page import sweep_page
from launcher.sweep.show import best_trial, trial_table, values_words
from launcher.sweep.sweep import Sweep
from launcher.text import count

_COMPARED = 4  # best trials whose runs are compared


def exit_status(sweep: Sweep, why: str) -> int:
    """Return 0 if all trials have ended, at least one with a result, and none failed by itself.

    1: some failed, or none has a result; 3: it ended early, for want of hosts; 130: interrupted.
    """
    if why:
        return 130 if why == "interrupted" else 3
    failed = any(trial.state == "failed" for trial in sweep.trials)
    return 1 if failed or best_trial(sweep.trials, sweep.metric.better) is None else 0


def finish(sweep: Sweep, why: str, console: Console) -> dict[str, Any]:
    """Write the files of a sweep that has ended, print what came out, and return it for ``--json``.

    ``why``: why it ended early; '' if it is complete.
    """
    definition, trials, metric = sweep.definition, sweep.trials, sweep.metric
    best = best_trial(trials, metric.better)
    folder = sweep.folder.path
    written = {"page": folder / "sweep.html"}

    # The files, from what has ended so far.
    try:
        write_whole(written["page"], render(sweep_page(definition, trials, metric, why)), private=True)
        if best is not None and best.score is not None:
            run_folder = Path(definition.runs_dir) / best.run_id(definition.name)
            head = (
                f"# The best of {count(len(trials), 'trial')} of sweep {definition.name}: {best.name}, {metric.title} "
                f"{score_text(best.score)} (run {run_folder.name}).\n"
                f"# It tried {values_words(best, definition.space)} on {fold(best.hosts)}.\n"
            )
            text = (run_folder / "config.yml").read_text(encoding="utf-8")
            written["best"] = folder / "best.yml"
            write_whole(written["best"], head + text, private=True)
    except (OSError, FleetError) as error:
        console.print(Text(f"note: the files of the sweep could not be written: {error}", "yellow"), soft_wrap=True)

    # The table of all trials, and the comparison of the best.
    if trials:
        console.print()
        console.print(trial_table(trials, definition, metric, {}))
    done = [trial for trial in trials if trial.state == "done" and trial.score is not None]
    done.sort(key=lambda trial: (trial.score or 0.0) * (1 if metric.better == "less" else -1))
    if not why and len(done) > 1:
        folders = [Path(definition.runs_dir) / trial.run_id(definition.name) for trial in done[:_COMPARED]]
        if len(done) > _COMPARED:
            console.print(Text(f"\nthe best {_COMPARED}:", "bold"))
        console.print()
        try:
            print_comparison(compare([figures_of(read_folder(one)) for one in folders]), console)
        except FleetError as error:
            console.print(Text(f"note: {error}", "yellow"), soft_wrap=True)

    # In one sentence, and what to do next.
    kinds = ("done", "pruned", "failed", "running", "waiting")
    states = {state: sum(trial.state == state for trial in trials) for state in kinds}
    parts = [f"{number} {state}" for state, number in states.items() if number]
    lines = [f"\nsweep {definition.name}: {', '.join(parts) or 'nothing'}, of {definition.trials}"]
    if best is not None and best.score is not None:
        words = values_words(best, definition.space)
        lines.append(f"best: {best.name}, {metric.title} {score_text(best.score)}: {words}")
    if why:
        ran = f"; {count(states['running'], 'trial')} still running on the hosts" if states["running"] else ""
        lines += [f"{why}{ran}", f"  gnnfleet sweep --resume {definition.name}    continue"]
    if "best" in written:
        lines.append(f"launch the best again: gnnfleet --config {_shown(written['best'])}")
    lines.append(f"report: {_shown(written['page'])}")
    for line in lines:
        console.print(Text(line), soft_wrap=True)
    return {
        "name": definition.name, "folder": str(folder), "why": why, "metric": metric.title, "better": metric.better,
        "best": best and best.name, "page": str(written["page"]), "best_config": str(written.get("best", "")) or None,
        "trials": [
            {"trial": trial.name, "run_id": trial.run_id(definition.name), "state": trial.state, "score": trial.score,
             "values": trial.values, "hosts": trial.hosts, "scores": trial.scores, "cause": trial.cause}
            for trial in trials
        ],
        "exit_status": exit_status(sweep, why),
    }  # fmt: skip


def _shown(path: Path) -> str:
    try:
        return str(path.absolute().relative_to(Path.cwd()))
    except ValueError:
        return str(path)
