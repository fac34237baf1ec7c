"""``gnnfleet sweep``: launches the trials of a sweep on free hosts, and follows them to their ends."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from rich.console import Console

from launcher.command import Command
from launcher.config.host_filter import filtered
from launcher.config.loader import load_config, to_yaml
from launcher.config.resolve import resolve_run
from launcher.config.schema import ClusterConfig
from launcher.errors import TransportError, UsageError
from launcher.manage.submit import in_queue
from launcher.plan.build import offline_plan
from launcher.run.config_of_options import read_config
from launcher.run.interrupts import Interrupts
from launcher.run.options import LaunchOptions, check_run_id
from launcher.sweep.hosts import HostPool
from launcher.sweep.metric import Metric
from launcher.sweep.records import Definition, SweepFolder, Trial
from launcher.sweep.search import Grid, OptunaSearch, require_optuna
from launcher.sweep.show import SweepView
from launcher.sweep.space import Choices, Range, checked_space, combinations, split_sets
from launcher.sweep.trial_run import Ending, TrialRun
from launcher.text import count
from launcher.transport import close_all, connect_all
from launcher.transport.base import Transport

_POLL = 0.2  # seconds between two looks at the running trials

_RETRY_LOST = 30.0  # seconds after which lost hosts are tried again

_MOST_LOSSES = 2  # a trial that lost its hosts this often is launched once more, and then no more

_MOST_FOLLOWED = 3  # a run whose process ends without a result is followed again this often

_MOST_REFUSED = 3  # a sweep of which so many launches, the first ones, start nothing ends

_AGAIN = 5.0  # seconds in which a second Ctrl-C stops the running trials

_Search = Literal["grid", "random", "tpe"]
_Pruner = Literal["none", "median", "hyperband"]


@dataclass(frozen=True)
class SweepOptions:
    launch: LaunchOptions  #: without the values that are varied
    sets: Sequence[str]  #: all values of --set
    name: str | None = None  #: None: ``name`` of the config
    nodes_per_run: int | None = None  #: None: all
    trials: int | None = None
    search: _Search | None = None  #: None: grid without ``trials``, else tpe
    pruner: _Pruner | None = None  #: None: none for a grid, else median
    seed: int = 0
    wait: bool = False  #: trials wait in line for hosts and devices in use
    metric: str = ""
    goal: Literal["max", "min", ""] = ""


def define(options: SweepOptions) -> tuple[Definition, SweepFolder]:
    """Return what the options ask for, and the folder of the sweep. All values are checked; nothing is written.

    Raises ConfigError with all problems of all values, and UsageError.
    """
    fixed, space = split_sets(options.sets)
    launch = replace(options.launch, overrides=(*fixed, *options.launch.overrides))
    if not space:
        raise UsageError(
            "give the values to try: --set train.lr=1e-3,1e-2, or with --trials a range: --set train.lr=1e-4..1e-1,log"
        )
    search = options.search or ("grid" if options.trials is None else "tpe")
    pruner = options.pruner or ("none" if search == "grid" else "median")
    ranges = [dimension for dimension in space if isinstance(dimension, Range)]
    if search == "grid" and ranges:
        raise UsageError(
            f"--set {ranges[0].key}={ranges[0].low:g}..{ranges[0].high:g}: a grid needs single values; list them, or "
            "draw from the range with --trials 40 --search tpe"
        )
    if search == "grid" and options.trials is not None:
        raise UsageError("--trials: a grid tries all its combinations; leave --trials out, or give --search random")
    if search != "grid" and options.trials is None:
        raise UsageError(f"--search {search}: give the number of trials, as --trials 40")

    whole = read_config(replace(launch, include=(), exclude=()))
    config = launch.choose(whole)
    if in_queue(config):
        raise UsageError("a sweep needs hosts that are there; run it in a Slurm job, whose hosts it divides")
    if options.wait and config.in_job_steps:
        raise UsageError("--wait: Slurm queues jobs; leave it out in a job")
    if asked := [node.host for node in config.nodes if node.password]:
        raise UsageError(
            f"{asked[0]} asks for a password (`password: true`), which nobody can type when a trial is launched; let "
            "it accept a key"
        )
    names = _node_names(config)
    size = options.nodes_per_run or len(names)
    if size > len(names):
        raise UsageError(f"--nodes-per-run {size}: the config has {count(len(names), 'node')} that can train")
    space = checked_space(launch, space, lambda config: names[:size] if len(names) > size else ())
    # As a launch with --include would: parts of fewer nodes have a folder of their own, named after all nodes' one.
    config = replace(
        config, data=whole.data, run=replace(config.run, runs_dir=str(Path(config.run.runs_dir).absolute()))
    )
    name = options.name or config.name
    check_run_id(f"{name}-t000-2", "--name")
    Metric(options.metric, options.goal)
    if search != "grid" or pruner != "none":
        require_optuna()
    definition = Definition(
        name=name, config=to_yaml(config), space=space, nodes_per_run=size, search=search,
        trials=options.trials or sum(1 for _ in combinations(space)), pruner=pruner, seed=options.seed,
        metric=options.metric, goal=options.goal, own_command=launch.own_command, wait=options.wait,
        cwd=str(Path.cwd()), runs_dir=config.run.runs_dir,
    )  # fmt: skip
    first = {one.key: one.texts[0] if isinstance(one, Choices) else format(one.low, "g") for one in space}
    drafted = replace(
        launch, overrides=(*launch.overrides, *(f"{key}={text}" for key, text in first.items())),
        include=tuple(names[:size]) if len(names) > size else launch.include,
    )  # fmt: skip
    offline_plan(resolve_run(read_config(drafted)), f"{name}-t000", launch.own_command, to_train=True)
    return definition, SweepFolder(Path(config.run.runs_dir).parent / "sweeps" / name)


def _node_names(config: ClusterConfig) -> list[str]:
    """Return a name for ``--include`` of each node that can train. Raises UsageError if nodes have different roles."""
    if not config.data.serving and any(node.role != "worker" for node in config.nodes):
        raise UsageError(
            "a sweep divides nodes that are alike: give them all `role: worker`, or serve the graph with `gnnfleet "
            "serve` and name the cluster with data.serving"
        )
    hosts = [node.host for node in config.nodes]
    return [
        node.host if hosts.count(node.host) == 1 else f"node{k}" for k, node in enumerate(config.nodes) if node.trains
    ]


@dataclass
class _Live:
    """What the turns of a sweep share."""

    refused: int = 0  #: launches that started nothing, before any has
    started: bool = False  #: some trial has run
    interrupted: float | None = None  #: monotonic seconds of the first Ctrl-C
    stopping: bool = False  #: the running trials are being stopped
    leaving: bool = False  #: the sweep ends; what runs goes on
    doubted: list[tuple[TrialRun, Ending]] = field(default_factory=list)  #: ended; their hosts are to be checked
    unreached: list[tuple[TrialRun, Ending]] = field(default_factory=list)  #: may go on, while no host answers
    check: _Check | None = None  #: in progress
    checked: float = 0.0  #: monotonic seconds of the last check
    last_look: bool = False  #: the lost hosts were checked once more when nothing ran


@dataclass(frozen=True)
class _Check:
    """A check of hosts, in a thread: which of ``names`` do not answer, to decide about ``doubted``."""

    answer: Future[set[str]]
    names: set[str]
    doubted: list[tuple[TrialRun, Ending]]


class Sweep:
    """A sweep, from its folder. ``run`` may be called again in another process after this one was killed."""

    def __init__(self, folder: SweepFolder, definition: Definition, console: Console, *, plain: bool = False):
        self.folder, self.definition = folder, definition
        self.config = load_config(folder.config)
        self.pool = HostPool(_node_names(self.config), definition.nodes_per_run)
        named = [node for node in self.config.nodes if node.trains]
        self._machines = {name: node.host for name, node in zip(self.pool.names, named, strict=True)}
        self.metric = Metric(definition.metric, definition.goal)
        self.trials = folder.trials()
        self.search: Grid = (
            Grid(definition)
            if definition.search == "grid" and definition.pruner == "none"
            else OptunaSearch(definition, folder.study, self.config.train.epochs)
        )
        for number in range(len(self.trials) and self.trials[-1].number):
            if self.trials[number].number != number:  # its record was deleted; its run, if any, tells the rest
                self.trials.insert(number, Trial(number, self.search.ask(number), "running"))
        self.runs: dict[int, TrialRun] = {}  #: of running trials, by number
        self.view = SweepView(definition, self.metric, self.pool, self.trials, self.runs, console, plain=plain)
        self._now = _Live()

    def run(self) -> str:
        """Make all trials; return why the sweep ended early, '' if it is complete.

        Trials that run already are followed, and those that have ended meanwhile are taken as they ended.
        """
        now = self._now
        for trial in self.trials:
            if trial.state == "running":
                self.runs[trial.number] = TrialRun(self.folder, self.definition, trial)
                if trial.pruned_at is not None:
                    self.runs[trial.number].stop()
            elif trial.state == "done":
                # which metric the runs report, and which values of it are better
                for line in TrialRun(self.folder, self.definition, trial).all_lines():
                    if self.metric.score(line):
                        break
            if trial.ended:
                now.started = now.started or trial.seconds is not None
                self.search.tell(trial, self.metric.better)
        self.view.begin()
        with Interrupts() as interrupts, ThreadPoolExecutor(1) as checks, self.view:
            interrupts.exit_message = "exited; trials may still be running: see `gnnfleet runs`"
            interrupts.double_press = True
            with interrupts.handed_to(self._interrupt):
                while True:
                    if now.stopping and not interrupts.exit_on_next:
                        interrupts.exit_on_next = True
                        for run in self.runs.values():
                            run.stop()
                    for trial in [self.trials[number] for number in sorted(self.runs)]:
                        self._follow(trial)
                    self._check_hosts(checks)
                    why = self._cannot_start() if now.interrupted is None else "interrupted"
                    if not why:
                        self._start_trials()
                    self.view.update()
                    in_doubt = (now.doubted or now.unreached or now.check) and now.interrupted is None
                    if not (self.runs or in_doubt) and (why or self._left() == 0):
                        return why if self._left() else ""
                    given = now.interrupted is not None and time.monotonic() > now.interrupted + _AGAIN
                    if now.leaving or (given and not now.stopping):
                        return "interrupted"
                    time.sleep(_POLL)

    def _left(self) -> int:
        return self.definition.trials - sum(trial.ended for trial in self.trials)

    def _interrupt(self, number: int) -> None:
        # A signal handler: it only notes what the next turn does.
        now = self._now
        if number != signal.SIGINT:
            now.leaving, now.interrupted = True, time.monotonic()
        elif now.interrupted is None:
            now.interrupted = time.monotonic()
            self.view.question = (
                f"Ctrl-C: no new trials. Those that run go on without this program. Ctrl-C again within {_AGAIN:g} s: "
                "stop them"
            )
        elif not now.stopping:
            now.stopping = True
            self.view.question = "stopping the running trials"

    def _start_trials(self) -> None:
        """Launch the trials that wait, and then new ones, as long as a group of hosts is free."""
        while True:
            busy = {name for trial in self.trials for name in trial.hosts if not trial.ended}
            # Nodes of one machine start one after another, so that runs see each other's ports.
            preparing = {
                self._machines[name]
                for run in self.runs.values()
                for name in run.trial.hosts
                if run.stage not in ("train", "collect", "end")
            }
            group = self.pool.free_group(busy | {name for name in self.pool.names if self._machines[name] in preparing})
            waiting = next((one for one in self.trials if one.state == "waiting"), None)
            if not group or (waiting is None and len(self.trials) >= self.definition.trials):
                return
            if waiting is None:
                number = len(self.trials)
                waiting = Trial(number, self.search.ask(number))
                self.trials.append(waiting)
                self.folder.write(waiting)
            waiting.state, waiting.hosts, waiting.cause = "running", group, ""
            waiting.scores, waiting.pruned_at = {}, None
            self.folder.write(waiting)  # before the launch: a sweep that is killed now finds the run by its id
            run = self.runs[waiting.number] = TrialRun(self.folder, self.definition, waiting)
            run.launch()
            self.view.started(waiting)

    def _follow(self, trial: Trial) -> None:
        """Read what a running trial reports; prune it, or take its end."""
        run = self.runs[trial.number]
        alive, before = run.alive, len(trial.scores)
        for line in run.new_lines():
            if found := self.metric.score(line):
                trial.scores[found[0]] = found[1]
        if len(trial.scores) > before:
            self.folder.write(trial)
            if alive and trial.pruned_at is None and self.search.prunes(trial, self.metric.better):
                trial.pruned_at = max(trial.scores)
                self.folder.write(trial)
                run.stop()
        if alive:
            return

        # Its process has ended, or was killed.
        ending = run.ending()
        del self.runs[trial.number]
        for line in run.all_lines():
            if found := self.metric.score(line):
                trial.scores[found[0]] = found[1]
        trial.seconds, ran = run.seconds, ending.kind not in ("refused", "cut")
        self._now.started = self._now.started or ran
        if self._now.stopping and ending.kind not in ("done", "unfollowed"):  # by the user's second Ctrl-C
            self._wait_again(trial, "stopped with the sweep", new_run=ran)
        elif ending.kind == "cut":
            self._wait_again(trial, "", new_run=False)
        elif ending.kind == "stopped" and trial.pruned_at is not None:
            self._end(trial, "pruned", f"after epoch {trial.pruned_at}, when it was worse than others")
        elif ending.kind in ("lost", "refused", "unfollowed"):
            self._now.doubted.append((run, ending))  # until its hosts have been checked
            return
        else:
            self._end(trial, "done" if ending.kind == "done" else "failed", ending.cause)
        run.clear()

    def _wait_again(self, trial: Trial, cause: str, *, new_run: bool) -> None:
        trial.state, trial.hosts, trial.cause = "waiting", (), cause
        trial.attempt += new_run
        self.folder.write(trial)

    def _end(self, trial: Trial, state: Literal["done", "pruned", "failed"], cause: str) -> None:
        trial.state, trial.cause = state, cause
        trial.score = self.metric.best(trial.scores.values()) if state != "failed" else None
        self.folder.write(trial)
        self.search.tell(trial, self.metric.better)
        self.view.ended(trial)

    def _check_hosts(self, checks: ThreadPoolExecutor) -> None:
        """Check in the background which hosts of doubtful trials, and which lost ones, answer; take the answer."""
        now, check = self._now, self._now.check
        if check is None:
            looks = not self.runs and not now.last_look
            due = looks or time.monotonic() > now.checked + _RETRY_LOST
            if now.doubted or (due and (self.pool.lost or now.unreached)):
                doubted = [*now.doubted, *now.unreached]
                names = {name for run, _ in doubted for name in run.trial.hosts} | self.pool.lost
                if any(ending.kind == "unfollowed" for _, ending in doubted):
                    names = {*self.pool.names}
                now.check = _Check(checks.submit(unreachable, self.config, [*names]), names, doubted)
                now.checked, now.last_look, now.doubted, now.unreached = time.monotonic(), not self.runs, [], []
            return
        if not check.answer.done():
            return
        now.check, away = None, check.answer.result()
        self.view.hosts_changed(*self.pool.update(check.names, away))
        for run, ending in check.doubted:
            trial, lost = run.trial, sorted({*run.trial.hosts} & away)
            if ending.kind == "unfollowed" and len(away) == len(self.pool.names):
                now.unreached.append((run, ending))  # rather this machine is offline: its runs go on
            elif ending.kind == "unfollowed" and not lost and run.followed < _MOST_FOLLOWED:
                run.follow()
                self.runs[trial.number] = run
            elif ending.kind == "refused" and not lost:
                now.refused += not now.started
                self._end(trial, "failed", ending.cause)
                run.clear()
            elif trial.losses >= _MOST_LOSSES:
                self._end(trial, "failed", f"lost a host in each of {trial.losses + 1} runs; the last: {ending.cause}")
                run.clear()
            else:
                trial.losses += 1
                why = ending.cause or "they do not answer"
                self._wait_again(trial, f"lost {', '.join(lost) or 'a host'}: {why}", new_run=True)
                self.view.again(trial)
                run.clear()

    def _cannot_start(self) -> str:
        """Return why no trial can be started any more; '' if one can, or may be later."""
        if self._now.refused >= _MOST_REFUSED and not self._now.started:
            return "no trial could be started; the first: " + next(one.cause for one in self.trials if one.cause)
        if len(self.pool.left) < self.pool.size and not self.runs and self._now.last_look and not self._now.check:
            lost = ", ".join(name for name in self.pool.names if name in self.pool.lost)
            needed = count(self.pool.size, "node")
            return f"too few hosts are left: {lost} cannot be reached, and a trial needs {needed}"
        return ""


def unreachable(config: ClusterConfig, names: Sequence[str]) -> set[str]:
    """Return the nodes, by name, on which no command can be run now."""
    ordered = [name for name in _node_names(config) if name in names]
    chosen = resolve_run(filtered(config, ordered, ()))
    connections = connect_all(chosen)
    away = set()
    try:
        for name, connection in zip(ordered, (connections[k] for k in sorted(connections)), strict=True):
            try:
                if not isinstance(connection, Transport):
                    raise connection
                connection.run(Command(("true",)), timeout=config.run.connect_timeout)
            except TransportError:
                away.add(name)
    finally:
        close_all(connections)
    return away
