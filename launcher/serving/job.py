"""The folder of a serving cluster on the machine that serves it."""

from __future__ import annotations

import sys
from dataclasses import replace

from rich.console import Console

from launcher.config.loader import to_yaml
from launcher.config.schema import ClusterConfig
from launcher.plan.build import LaunchPlan
from launcher.plan.serialize import run_json
from launcher.report.events import EventLog
from launcher.report.report import RunState
from launcher.report.run_folder import Stage, register
from launcher.run.launch import Job
from launcher.run.options import LaunchOptions


class ServeJob(Job):
    """A ``gnnfleet serve`` at work. Where the cluster ``stands`` already, its folder goes on telling of that until all
    is done: what goes wrong with a new server says nothing of the others."""

    def __init__(self, config: ClusterConfig, options: LaunchOptions, name: str, console: Console, *, stands: bool):
        self.stands = stands
        super().__init__(config, options, name, console)

    def _open_folder(self) -> EventLog:
        if not self.stands:
            return super()._open_folder()
        return EventLog(self.folder / "events.jsonl", sys.stdout if self.options.as_json else None)

    def at(self, stage: Stage, *, detached: bool = False) -> None:
        """Write down that ``stage`` begins."""
        if self.stands and not detached:
            self.events.add("stage", stage=stage)
        else:
            super().at(stage, detached=detached)

    def give_up(self, state: RunState, why: str, exit_status: int) -> None:
        """It ends without the servers that were to be started."""
        if self.stands:
            self.events.add("given-up", stage=self.file.stage, reason=why)
        else:
            super().give_up(state, why, exit_status)

    def keep_plan(self, plan: LaunchPlan) -> None:
        """Before anything is started, so that it can be found again."""
        parts = replace(self.config.data, num_parts=None)  # the plan tells; more nodes than parts is no mistake here
        self.keep("config.yml", to_yaml(replace(self.config, data=parts)))
        self.keep("run.json", run_json(plan))
        register(self.run_id, self.folder)

    def done(self) -> None:
        """All that was to be started serves."""
        (self.folder / "result.json").unlink(missing_ok=True)
        self.at("train", detached=True)
