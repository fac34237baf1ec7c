"""Loss curves of runs of the soak, a random test with faults, and of the same runs in one process without a fault."""

from __future__ import annotations

import json
from pathlib import Path

from launching import json_lines, launch, local_config
from scenario import Scenario
from soak_config import data_section, job_words, train_section
from soak_job import JOB

Curve = dict[tuple[int, int], float]  #: (epoch, step) -> mean loss over the global batch

TOLERANCE = 1e-4  # relative difference of losses, as float32 values are summed in another order


def curve_of(run_dir: Path) -> Curve:
    curve: Curve = {}
    for path in sorted(run_dir.glob("output/**/curve.jsonl")):
        for line in json_lines(path):
            curve[line["epoch"], line["step"]] = line["loss"]
    for line in json_lines(run_dir / "metrics.jsonl"):
        for step, loss in enumerate(line.get("step_loss", ()) if line["kind"] == "epoch" else ()):
            curve[line["epoch"], step] = loss
    return curve


def epochs_begun(run_dir: Path) -> int:
    """Return the last epoch that the run has recorded, or 0."""
    kinds = ("step", "epoch", "checkpoint")
    return max((line["epoch"] for line in json_lines(run_dir / "metrics.jsonl") if line["kind"] in kinds), default=0)


class Undisturbed:
    """Loss curves of runs in one process, without a fault.

    Each combination of graph, script and sampler is trained only once.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._curves: dict[str, Curve] = {}
        self._serial = 0

    def differences(self, scenario: Scenario, curve: Curve) -> list[str]:
        """Return messages about losses of ``curve`` that differ from those without a fault."""
        if not curve:
            return ["the run recorded no losses"]
        right = self._curve(scenario, max(epoch for epoch, _ in curve))
        missing = sorted(set(curve) - set(right))
        if missing:
            return [f"steps {missing[:3]} do not exist in the undisturbed run"]
        wrong = [at for at, loss in sorted(curve.items()) if not abs(loss - right[at]) <= TOLERANCE * abs(right[at])]
        if not wrong:
            return []
        at = wrong[0]
        return [
            f"{len(wrong)} of {len(curve)} losses differ, first in epoch {at[0]}, step {at[1]}: "
            f"{curve[at]:.7f} instead of {right[at]:.7f}"
        ]

    def _curve(self, scenario: Scenario, epochs: int) -> Curve:
        key = json.dumps([scenario.graph, scenario.own, scenario.sampler])
        known = self._curves.get(key, {})
        if not known or max(epoch for epoch, _ in known) < epochs:
            self._curves[key] = self._train(scenario, max(4, epochs + epochs // 4))
        return self._curves[key]

    def _train(self, scenario: Scenario, epochs: int) -> Curve:
        self._serial += 1
        folder = self.folder / f"undisturbed{self._serial}"
        folder.mkdir(parents=True)
        (folder / "job.py").write_text(JOB)
        config = local_config(
            folder, [1], self.folder / "alone",
            data=data_section(scenario, self.folder / "parts", alone=True), train=train_section(scenario, epochs),
        )  # fmt: skip
        done = launch(config, *job_words(scenario, epochs, pause=0), timeout=300)
        assert done.status == 0, done.output
        return curve_of(done.run_dir)
