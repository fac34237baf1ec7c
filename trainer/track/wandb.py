"""Sends a run to Weights & Biases, or writes it for ``wandb sync``."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import wandb

from trainer.track.tracker import Job, Place, Point, flat

_NOT_IN_IDS = re.compile(r"[^\w.-]")

_AXES = {"epoch": ("epoch/*", "eval/*"), "step": ("step/*",), "seconds": ("system/*",)}


class Wandb:
    """A ``Tracker`` that opens one run. Its id is that of the gnnfleet run, so that it is found again when it resumes.

    The key comes from where W&B looks for it: WANDB_API_KEY, or ~/.netrc as ``wandb login`` writes it.
    """

    def __init__(self, job: Job, options: Mapping[str, Any], known: str) -> None:
        self._run = wandb.init(
            id=known or _NOT_IN_IDS.sub("-", job.run_id),
            name=None if known else job.run_id,
            project=options.get("project") or os.environ.get("WANDB_PROJECT") or "gnnfleet",
            entity=options.get("entity"),
            mode=options.get("mode"),  # None: WANDB_MODE, else online
            dir=str(job.folder),
            resume="allow",
            reinit="return_previous",
            settings=wandb.Settings(silent=True, console="off", disable_git=True, disable_code=True, save_code=False),
        )
        runs = [*job.before, job.run_id]
        config = {**job.config, "gnnfleet": {"run_id": job.run_id, "runs": runs}}
        self._run.config.update(config, allow_val_change=True)
        for axis, names in _AXES.items():
            self._run.define_metric(axis, hidden=True)
            for name in names:
                self._run.define_metric(name, step_metric=axis)
        folder = str(self._run.settings.sync_dir).removeprefix(f"{job.folder}/")
        self.place = Place(self._run.id, self._run.url or "", folder)

    def log(self, points: Sequence[Point]) -> None:
        for point in points:
            self._run.log({point.axis: point.at, **point.values})

    def end(self, state: str, summary: Mapping[str, Any]) -> None:
        known = {f"report/{name}": value for name, value in flat(summary).items() if value is not None}
        self._run.summary.update({"report/state": state, **known})
        self._run.finish(exit_code=0 if state == "done" else 1)
