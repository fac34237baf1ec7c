"""Tests of ``gnnfleet sweep``: its space, its hosts, its search, and its turns with runs that only pretend."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from plotly import graph_objects
from rich.console import Console

import launcher.sweep.sweep as sweeping
from fast_cases import fast_cases
from launcher.cli.main import run as gnnfleet
from launcher.config.loader import load_config
from launcher.errors import ConfigError, FleetError, UsageError
from launcher.report.launch_file import LaunchFile
from launcher.run.options import LaunchOptions
from launcher.sweep.finish import exit_status, finish
from launcher.sweep.hosts import HostPool
from launcher.sweep.metric import Metric
from launcher.sweep.page import importance
from launcher.sweep.records import Definition, SweepFolder, Trial
from launcher.sweep.search import OptunaSearch
from launcher.sweep.space import Choices, Range, split_sets
from launcher.sweep.sweep import Sweep, SweepOptions, define
from launcher.sweep.trial_run import Ending, TrialRun
from launching import REPOSITORY, local_config
from waiting import DEADLINE, wait_until

CONFIG = """
name: toy
nodes: [gnn1, gnn2, gnn3, gnn4]
data: {dataset: synthetic}
train: {epochs: 8}
"""
GRID = ("train.lr=1e-3,1e-2", "train.hidden=16,32,64")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "cluster.yml"
    path.write_text(CONFIG)
    return path


def wanted(config: Path, *sets: str, own: tuple[str, ...] = (), **more: Any) -> tuple[Definition, SweepFolder]:
    return define(SweepOptions(LaunchOptions(config, own_command=own), sets, **more))


# --- the space


def test_values_are_split_at_commas_outside_of_brackets_and_quotes() -> None:
    fixed, space = split_sets(
        ["train.lr=1e-3, 1e-2", "train.fanouts=[15,10],[5]", "train.epochs=3", "run.notify=['a,b']", "a.b=../x..y",
         "train.dropout=0.1..0.5", "train.hidden=16..256,log", "data.options.k={a: 1},{a: 2}"]
    )  # fmt: skip
    assert fixed == ("train.epochs=3", "run.notify=['a,b']", "a.b=../x..y")
    assert space == (
        Choices("train.lr", ("1e-3", "1e-2")),
        Choices("train.fanouts", ("[15,10]", "[5]")),
        Range("train.dropout", 0.1, 0.5),
        Range("train.hidden", 16, 256, log=True),
        Choices("data.options.k", ("{a: 1}", "{a: 2}")),
    )


@pytest.mark.parametrize(
    "sets, message",
    [
        (["train.lr=1e-1..1e-3"], "the range begins at 1e-1 and ends at 1e-3"),
        (["train.dropout=0..0.5,log"], "begins above 0"),
        (["train.lr=1,,2"], "one of the values is empty"),
        (["train.lr=1,2,1"], "1 is there twice"),
        (["train.lr=1,2", "train.lr=3,4"], "train.lr=…: given twice"),
    ],
)
def test_mistakes_in_values_are_named(sets: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        split_sets(sets)


@pytest.mark.parametrize(
    "sets, more, message",
    [
        ((), {}, "give the values to try"),
        (("train.lr=1e-3..1e-1",), {}, "a grid needs single values"),
        (GRID, {"search": "tpe"}, "give the number of trials"),
        (GRID, {"search": "grid", "trials": 3}, "a grid tries all its combinations"),
        (GRID, {"nodes_per_run": 5}, "the config has 4 nodes that can train"),
        (("train.fanouts=15,10,5",), {}, r"write \[15,10,5\] for one value"),
        (("data.num_parts=2,4",), {}, "needs parts of its own"),
        (("nodes.0.host=a,b",), {}, "that of the whole sweep"),
        (("train.model=a..b",), {"trials": 2}, "give the values to try"),
        (GRID, {"metric": "accuracy"}, "write SPLIT_NAME"),
        (("defaults.password=true", *GRID), {}, "gnn1 asks for a password"),
        (("train.hidden=8..64",), {"own": ("true",), "trials": 2}, "your own command does not read it"),
    ],
)
def test_what_a_sweep_cannot_do_is_refused(config: Path, sets: Any, more: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        wanted(config, *sets, **more)
    assert [path.name for path in config.parent.iterdir()] == ["cluster.yml"]


def test_problems_of_all_values_are_named_at_once(config: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        wanted(config, "train.lr=0.1,-1", "train.hiden=1,2", "train.dropout=0.5..2", trials=3)
    text = str(caught.value)
    assert "train.lr=-1" in text and "did you mean `hidden`" in text and "train.dropout=2" in text, text


def test_types_of_ranges_come_from_the_schema(config: Path) -> None:
    sets = ("train.hidden=16..64", "train.dropout=0..0.5", "nodes.*.env.N=1..9", "train.weight_decay=1e-6..1,log")
    definition, _ = wanted(config, *sets, trials=3)
    assert [(one.key, one.whole) for one in definition.space if isinstance(one, Range)] == [
        ("train.hidden", True), ("train.dropout", False), ("nodes.*.env.N", True), ("train.weight_decay", False),
    ]  # fmt: skip


# --- hosts


def test_blocks_of_the_file_come_first_then_what_is_left_of_them() -> None:
    pool = HostPool("abcdefg", 2)
    assert pool.free_group(()) == ("a", "b") and pool.free_group("ab") == ("c", "d")
    assert pool.free_group("abcdef") == ()  # one node is left over
    pool.update("bd", "bd")
    assert pool.free_group(()) == ("e", "f")  # keeps its parts
    assert pool.free_group("ef") == ("a", "c") and pool.free_group("efac") == ()
    assert pool.update("bd", "d") == ([], ["b"]) and pool.free_group("ef") == ("a", "b")


# --- the metric


def line(epoch: int, value: float, **more: Any) -> dict[str, Any]:
    values = {"kind": "eval", "rank": 0, "split": "val", "epoch": epoch, "metric": "accuracy", "accuracy": value}
    return {**values, "metric_title": "accuracy", "better": "higher", **more}


def test_the_default_metric_is_that_of_the_task() -> None:
    metric = Metric("", "")
    assert metric.score(line(3, 0.5)) == (3, 0.5) and metric.score(line(3, 0.5, split="test")) is None
    assert (metric.title, metric.better, metric.best([0.1, 0.3])) == ("val accuracy", "more", 0.3)
    mae = Metric("", "")
    assert mae.score(line(1, 0, metric="mae", mae=2.5, metric_title="MAE", better="lower")) == (1, 2.5)
    assert (mae.title, mae.best([2.0, 1.0])) == ("val MAE", 1.0)
    own = Metric("", "")  # of a script with gf.StepLog
    assert own.score({"kind": "eval", "rank": 0, "epoch": 1, "split": "val", "accuracy": 0.5}) == (1, 0.5)


def test_another_metric_and_its_goal() -> None:
    assert Metric("val_f1", "").score(line(2, 0.5, f1=0.25)) == (2, 0.25)
    assert Metric("loss", "").score({"kind": "epoch", "rank": 0, "epoch": 2, "loss": 1.5}) == (2, 1.5)
    assert Metric("loss", "").better == "less" and Metric("val_cost", "min").better == "less"
    assert Metric("loss", "").score({"kind": "epoch", "rank": 0, "epoch": 2, "loss": float("nan")}) is None


# --- the search


def test_optuna_goes_on_with_what_its_file_has(config: Path, tmp_path: Path) -> None:
    definition, _ = wanted(config, "train.lr=1e-4..1e-1,log", "train.hidden=16,32", trials=4)
    first = OptunaSearch(definition, tmp_path / "study.log", 8)
    values = [first.ask(number) for number in range(2)]
    assert 1e-4 <= float(values[0]["train.lr"]) <= 1e-1 and values[0] != values[1]
    first._study.ask()  # as if it were killed before it had drawn the values of trial 2
    again = OptunaSearch(definition, tmp_path / "study.log", 8)
    assert [again.ask(number) for number in range(2)] == values
    other = OptunaSearch(definition, tmp_path / "other.log", 8)
    assert again.ask(2) == [other.ask(number) for number in range(3)][2]
    again.tell(Trial(0, values[0], "done", score=0.5), "more")
    again.tell(Trial(0, values[0], "done", score=0.5), "more")  # told again by a sweep that goes on
    assert again._study.best_value == 0.5


def test_less_is_better_is_stored_as_its_negative(config: Path, tmp_path: Path) -> None:
    definition, _ = wanted(config, "train.lr=1e-4..1e-1,log", trials=4)
    search = OptunaSearch(definition, tmp_path / "study.log", 8)
    for number, score in enumerate((3.0, 2.0)):
        search.tell(Trial(number, search.ask(number), "done", score=score), "less")
    assert search._study.best_trial.number == 1


# --- the turns of a sweep, with runs that only pretend


class Pretended:
    """What a run does: its scores, one each turn, and its end."""

    def __init__(self, *scores: float, ending: Ending | None = None):
        self.scores, self.ending = scores, ending or Ending("done")


class World:
    """The hosts, and the runs on them, which outlive a sweep."""

    def __init__(self) -> None:
        self.plays: dict[str, Pretended] = {}  #: by run id
        self.runs: dict[str, dict[str, Any]] = {}
        self.away: set[str] = set()
        self.most = 0  #: nodes in use at once
        self.offline = False  #: this machine reaches no host; runs go on
        self.followed = 0

    def launch(self, run_id: str, hosts: tuple[str, ...]) -> None:
        assert run_id not in self.runs, f"{run_id} is launched twice"
        used = [host for run in self.runs.values() if run["alive"] for host in run["hosts"]]
        assert not {*hosts} & {*used}, "a host has two runs"
        self.most = max(self.most, len(used) + len(hosts))
        play = self.plays.get(run_id, Pretended(0.5))
        self.runs[run_id] = {"hosts": hosts, "alive": True, "step": 0, "stopped": False, "play": play}


def pretending(world: World) -> type:
    class FakeRun:
        stage, epoch, followed, seconds = "train", None, 0, 1.0

        def __init__(self, folder: SweepFolder, definition: Definition, trial: Trial):
            self.trial, self.run_id, self._read = trial, trial.run_id(definition.name), 0

        def launch(self) -> None:
            world.launch(self.run_id, self.trial.hosts)

        @property
        def alive(self) -> bool:
            run = world.runs.get(self.run_id)
            if run is None or not run["alive"] or world.offline:
                return False
            run["step"] += 1
            lost = {*run["hosts"]} & world.away
            run["alive"] = not (run["stopped"] or lost or run["step"] > len(run["play"].scores))
            return bool(run["alive"])

        def new_lines(self) -> Iterator[Mapping[str, Any]]:
            run = world.runs.get(self.run_id, {"play": Pretended(), "step": 0})
            scores = run["play"].scores[: run["step"]]
            yield from (line(k + 1, scores[k]) for k in range(self._read, len(scores)))
            self._read = len(scores)

        def all_lines(self) -> Iterator[Mapping[str, Any]]:
            self._read = 0
            yield from self.new_lines()

        def follow(self) -> None:
            world.followed += 1

        def stop(self) -> None:
            world.runs[self.run_id]["stopped"] = True

        def ending(self) -> Ending:
            run = world.runs.get(self.run_id)
            if run is None:
                return Ending("cut")
            if world.offline:
                return Ending("unfollowed", "no node has been reachable for 60 s")
            if {*run["hosts"]} & world.away:
                return Ending("lost", "its supervisor is silent")
            return Ending("stopped", "stopped by me") if run["stopped"] else run["play"].ending

        def clear(self) -> None:
            pass

    return FakeRun


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    monkeypatch.setattr(sweeping, "TrialRun", pretending(made))
    monkeypatch.setattr(
        sweeping, "unreachable", lambda config, names: {*names} & ({*names} if made.offline else made.away)
    )
    monkeypatch.setattr(sweeping, "_POLL", 0.001)
    return made


def a_sweep(config: Path, *sets: str, **more: Any) -> Sweep:
    definition, folder = wanted(config, *(sets or GRID), **{"nodes_per_run": 2, **more})
    folder.define(definition)
    return Sweep(folder, definition, Console(file=(config.parent / "shown.txt").open("a"), width=200))


def states(sweep: Sweep) -> list[str]:
    return [trial.state for trial in sweep.folder.trials()]


def test_all_trials_run_side_by_side_and_none_ends_another(config: Path, world: World) -> None:
    world.plays["toy-t001"] = Pretended(0.2, ending=Ending("failed", "rank 1 raised ValueError: NaN"))
    world.plays["toy-t004"] = Pretended(0.1, 0.9, 0.8)
    sweep = a_sweep(config)
    assert sweep.run() == "" and world.most == 4
    assert states(sweep) == ["done", "failed", "done", "done", "done", "done"]
    assert sweep.trials[4].score == 0.9 and sweep.trials[1].cause == "rank 1 raised ValueError: NaN"
    assert {trial.hosts for trial in sweep.trials} == {("gnn1", "gnn2"), ("gnn3", "gnn4")}
    assert exit_status(sweep, "") == 1
    again = a_sweep(config)  # the same command once more
    assert again.run() == "" and states(again) == states(sweep)


def test_a_lost_host_is_left_out_and_its_trial_runs_elsewhere(config: Path, world: World) -> None:
    world.plays |= {f"toy-t{n:03}": Pretended(*[0.5] * 60) for n in range(2)}
    sweep = a_sweep(config)
    seen: list[Trial] = []

    def update() -> None:
        if len(sweep.runs) == 2 and not seen:
            world.away = {"gnn4"}
            seen.append(sweep.trials[1])

    sweep.view.update = update  # type: ignore[method-assign]
    assert sweep.run() == "" and states(sweep) == ["done"] * 6
    lost = sweep.trials[1]
    assert lost.attempt == 2 and lost.hosts == ("gnn1", "gnn2") and "gnn4" not in sweep.pool.left
    assert "lost gnn4" in (config.parent / "shown.txt").read_text()
    assert exit_status(sweep, "") == 0


def test_a_host_that_comes_back_is_used_again(config: Path, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeping, "_RETRY_LOST", 0.0)
    world.plays["toy-t000"] = Pretended(*[0.5] * 400)
    sweep = a_sweep(config)
    world.away = {"gnn3"}
    shown: list[str] = []

    def hosts_changed(gone: list[str], back: list[str]) -> None:
        shown.extend(back)
        world.away = set()

    sweep.view.hosts_changed = hosts_changed  # type: ignore[method-assign]
    assert sweep.run() == "" and shown == ["gnn3"] and world.most == 4


def test_a_trial_that_loses_its_hosts_again_and_again_has_failed(config: Path, world: World) -> None:
    lost = Ending("lost", "node1 is silent")  # but can be reached
    world.plays |= {run_id: Pretended(0.1, ending=lost) for run_id in ("toy-t002", "toy-t002-2", "toy-t002-3")}
    sweep = a_sweep(config)
    assert sweep.run() == "" and states(sweep)[2] == "failed"
    assert sweep.trials[2].cause == "lost a host in each of 3 runs; the last: node1 is silent"


def test_runs_go_on_while_this_machine_is_offline(config: Path, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeping, "_RETRY_LOST", 0.0)
    world.plays |= {f"toy-t{n:03}": Pretended(*[0.5] * 20) for n in range(6)}
    sweep = a_sweep(config)

    def update() -> None:
        if not world.followed:
            world.offline = len(sweep._now.unreached) < 2 and (world.offline or len(sweep.runs) == 2)

    sweep.view.update = update  # type: ignore[method-assign]
    assert sweep.run() == "" and states(sweep) == ["done"] * 6
    assert world.followed == 2 and len(world.runs) == 6  # none was launched again


def test_too_few_hosts_end_a_sweep_that_goes_on_later(config: Path, world: World) -> None:
    world.away = {"gnn1", "gnn2", "gnn3"}
    sweep = a_sweep(config)
    why = sweep.run()
    assert why == "too few hosts are left: gnn1, gnn2, gnn3 cannot be reached, and a trial needs 2 nodes"
    assert exit_status(sweep, why) == 3 and "done" not in states(sweep)
    world.away = set()
    again = a_sweep(config)
    assert again.run() == "" and states(again) == ["done"] * 6


def test_a_sweep_of_which_nothing_starts_ends(config: Path, world: World) -> None:
    refused = Pretended(ending=Ending("refused", "cannot run /no/bin/python"))
    world.plays |= {f"toy-t{n:03}": refused for n in range(6)}
    sweep = a_sweep(config)
    assert sweep.run() == "no trial could be started; the first: cannot run /no/bin/python"
    assert states(sweep).count("failed") in (3, 4)


@pytest.mark.parametrize("killed", fast_cases(range(1, 40, 4), 1, 9, 17, 25, 33))
def test_a_killed_sweep_goes_on_and_runs_no_trial_twice(config: Path, world: World, killed: int) -> None:
    """The process is killed after any write of a record: before a launch, after it, when a trial has ended."""

    class Killed(BaseException):
        pass

    writes = 0

    def write(self: SweepFolder, trial: Trial) -> None:
        nonlocal writes
        original(self, trial)
        writes += 1
        if writes == killed:
            raise Killed

    original = SweepFolder.write
    world.plays |= {f"toy-t{n:03}": Pretended(0.1, 0.2) for n in range(6)}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(SweepFolder, "write", write)
        try:
            a_sweep(config).run()
        except Killed:
            pass
    again = a_sweep(config)
    assert again.run() == "" and states(again) == ["done"] * 6
    assert [trial.score for trial in again.trials] == [0.2] * 6 and len(world.runs) == 6


def test_a_trial_that_is_worse_is_stopped_at_once(config: Path, world: World) -> None:
    good = Pretended(*(0.1 * k for k in range(1, 9)))
    world.plays |= {f"toy-t{n:03}": good for n in range(4)}
    world.plays["toy-t004"] = Pretended(*[0.01] * 1000)
    sweep = a_sweep(config, "train.lr=1e-4..1e-1,log", trials=6, search="random", pruner="median")
    assert sweep.run() == "" and states(sweep) == ["done"] * 4 + ["pruned", "done"]
    pruned = sweep.trials[4]
    assert pruned.pruned_at == 2 and max(pruned.scores) <= pruned.pruned_at + 1 and exit_status(sweep, "") == 0


def test_a_sweep_killed_while_it_prunes_prunes(config: Path, world: World) -> None:
    sweep = a_sweep(config)
    trial = Trial(0, {"train.lr": "1e-3", "train.hidden": "16"}, "running", hosts=("gnn1", "gnn2"), pruned_at=2)
    sweep.folder.write(trial)
    world.plays["toy-t000"] = Pretended(*[0.1] * 1000)
    world.launch("toy-t000", trial.hosts)
    again = a_sweep(config)
    assert again.run() == "" and states(again) == ["pruned"] + ["done"] * 5


@pytest.mark.parametrize("again", [False, True])
def test_ctrl_c_leaves_the_trials_alone_and_a_second_one_stops_them(
    config: Path, world: World, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    monkeypatch.setattr(sweeping, "_AGAIN", 30.0 if again else 0.0)
    world.plays |= {f"toy-t{n:03}": Pretended(*[0.5] * 10_000) for n in range(2)}
    sweep = a_sweep(config)

    def update() -> None:
        if len(sweep.runs) == 2:
            sweep._interrupt(signal.SIGINT)

    sweep.view.update = update  # type: ignore[method-assign]
    assert sweep.run() == "interrupted" and exit_status(sweep, "interrupted") == 130
    assert [run["stopped"] for run in world.runs.values()] == [again] * 2
    assert states(sweep) == (["waiting"] * 2 if again else ["running"] * 2)
    world.plays |= {f"toy-t{n:03}{suffix}": Pretended(0.5) for n in range(2) for suffix in ("", "-2")}
    for run in world.runs.values():
        run["play"] = Pretended(0.5)
    resumed = a_sweep(config)
    assert resumed.run() == "" and states(resumed) == ["done"] * 6


def test_a_trial_whose_record_was_deleted_is_taken_from_its_run(config: Path, world: World) -> None:
    a_sweep(config).run()
    (config.parent / "sweeps/toy/trials/t001.json").write_text("{")
    with pytest.raises(FleetError, match=r"t001.json is damaged .*delete it, the run of the trial"):
        a_sweep(config)
    (config.parent / "sweeps/toy/trials/t001.json").unlink()
    again = a_sweep(config)
    assert again.run() == "" and states(again) == ["done"] * 6 and again.trials[1].score == 0.5


def test_another_sweep_in_the_folder_is_refused(config: Path, world: World) -> None:
    a_sweep(config).run()
    with pytest.raises(UsageError, match="has another sweep, with other space, trials; .*--resume toy"):
        a_sweep(config, "train.lr=1e-3,1e-2")
    with SweepFolder(config.parent / "sweeps" / "toy").held():
        code = "from launcher.sweep.records import SweepFolder as F, Path\nwith F(Path('sweeps/toy')).held(): pass"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=config.parent,
                              env={"PYTHONPATH": str(Path(__file__).parents[2])})  # fmt: skip
        assert "this sweep is running (pid " in done.stderr


# --- the run of a trial, by its folder


def run_folder(tmp_path: Path, stage: str, result: dict[str, Any] | None) -> Path:
    folder = tmp_path / "runs" / "toy-t000"
    launch = LaunchFile.mine("toy-t000", "toy", config="c.yml").at(stage)  # type: ignore[arg-type]
    dataclasses.replace(launch, start_ticks=1).write(folder)  # its process does not live
    if result is not None:
        values = {"run_id": "toy-t000", "exit_status": 0, "seconds": 1.0, "nodes": [], "findings": [], "notes": []}
        (folder / "result.json").write_text(json.dumps({**values, "metrics": {}, "first_failure": None, **result}))
    return folder


def failure(name: str, **more: Any) -> dict[str, Any]:
    first = {"name": name, "node_rank": 1, "host": "gnn2", "rank": None, "sentence": f"{name} is gone", "found": "",
             "tail": ["epoch 1"]}  # fmt: skip
    return {"state": "failed", "exit_status": 1, "first_failure": {**first, **more}}


@pytest.mark.parametrize(
    "stage, result, message, kind",
    [
        ("end", {"state": "done"}, "", "done"),
        ("end", {"state": "stopped", "stopped_by": "alice@laptop"}, "", "stopped"),
        ("end", failure("rank1"), "", "failed"),
        ("end", failure("node"), "", "lost"),
        ("end", failure("node", found="stall"), "", "failed"),
        ("preflight", {"state": "failed", "exit_status": 3, "notes": ["cannot run python"]}, "refused", "refused"),
        ("preflight", None, "", "cut"),
        ("train", None, "", "unfollowed"),
        ("train", None, "no node has been reachable for 60 s", "unfollowed"),
        (None, None, "", "cut"),
        (None, None, "--run-id toy-t000: exists already", "refused"),
    ],
)
def test_how_a_trial_ended_is_read_from_its_run_folder(
    config: Path, tmp_path: Path, stage: str | None, result: dict[str, Any] | None, message: str, kind: str
) -> None:
    definition, folder = wanted(config, *GRID)
    if stage is not None:
        run_folder(tmp_path, stage, result)
    made = TrialRun(folder, definition, Trial(0, {}))
    made._messages.parent.mkdir(parents=True)
    made._messages.write_text(json.dumps({"kind": "error", "message": message}) + "\n" if message else "")
    assert list(made.new_lines()) == [] and not made.alive
    assert made.ending().kind == kind
    if kind == "failed":
        assert made.ending().cause.endswith(" is gone")


def test_a_trial_is_alive_as_long_as_its_process_whoever_started_it(config: Path, monkeypatch: Any) -> None:
    definition, folder = wanted(config, *GRID)
    waits = [sys.executable, "-c", "import sys; print('on', flush=True); sys.stdin = open('go'); sys.stdin.read()"]
    monkeypatch.setattr("launcher.sweep.trial_run.own_process", lambda words: (waits, {}))
    os.mkfifo(config.parent / "go")
    TrialRun(folder, definition, Trial(0, {})).launch()
    other = TrialRun(folder, definition, Trial(0, {}))  # of a sweep process that goes on
    assert other.alive
    (config.parent / "go").write_text("")  # the process ends
    wait_until(lambda: not other.alive)


def test_a_launch_that_crashes_is_refused_and_one_that_was_killed_is_not(config: Path, monkeypatch: Any) -> None:
    definition, folder = wanted(config, *GRID)
    for end, kind in (("1 / 0", "refused"), ("os.kill(os.getpid(), 9)", "cut"), ("sys.exit(143)", "cut")):
        crash = [sys.executable, "-c", f"import os, sys; {end}"]
        monkeypatch.setattr("launcher.sweep.trial_run.own_process", lambda words, crash=crash: (crash, {}))
        made = TrialRun(folder, definition, Trial(0, {}))
        made.launch()
        wait_until(lambda made=made: not made.alive)
        ending = made.ending()
        assert ending.kind == kind
        assert kind == "cut" or "exit status 1: ZeroDivisionError: division by zero" in ending.cause


def test_a_trial_is_launched_with_its_values_hosts_and_wait(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (config.parent / "own.py").write_text("")
    definition, folder = wanted(config, "nodes.*.env.LR=1,2", own=("python", "own.py", "--x"), wait=True)
    launched: list[list[str]] = []
    monkeypatch.setattr(TrialRun, "_start", lambda self, words: launched.append([*words]))
    TrialRun(folder, definition, Trial(3, {"nodes.*.env.LR": "2"}, hosts=("gnn1", "gnn2"), attempt=2)).launch()
    run = ["launch", "--config", str(folder.config.absolute()), "--run-id", "toy-t003-2", "--json"]
    words = ["--include", "gnn1", "--include", "gnn2", "--set", "nodes.*.env.LR=2", "--wait"]
    assert launched == [[*run, *words, "--", "python", "own.py", "--x"]]


@pytest.mark.slow
def test_a_sweep_on_this_machine_goes_on_after_it_and_a_launch_were_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    config = local_config(tmp_path, [1, 1], run={"master_port": "auto", "control_port": "auto", "service_port": "auto"},
                          name="toy", train={"epochs": 60})  # fmt: skip
    argv = [sys.executable, str(REPOSITORY / "launch.py"), "sweep", "--plain"]
    words = ["--config", str(config), "--set", "train.lr=0.001,0.01,0.1", "--nodes-per-run", "1"]
    sweep = subprocess.Popen([*argv, *words])
    first = tmp_path / "sweeps/toy/trials/t000.json"
    wait_until(lambda: first.exists() and json.loads(first.read_text())["scores"])
    sweep.kill()
    sweep.wait()
    os.kill(json.loads((tmp_path / "runs/toy-t000/launch.json").read_text())["pid"], signal.SIGKILL)
    done = subprocess.run([*argv, "--resume", "toy", "--json"], capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [trial["state"] for trial in result["trials"]] == ["done"] * 3
    assert all(len(trial["scores"]) == 60 for trial in result["trials"])
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["toy-t000", "toy-t001", "toy-t002"]
    assert gnnfleet(["plan", "--config", "sweeps/toy/best.yml"]) == 0


# --- what a sweep leaves


def test_importance_is_the_share_of_variance_that_a_key_explains(config: Path) -> None:
    definition, _ = wanted(config, *GRID)
    trials = [
        Trial(k, {"train.lr": lr, "train.hidden": hidden}, "done", score=0.1 if lr == "1e-3" else 0.9)
        for k, (lr, hidden) in enumerate((lr, hidden) for lr in ("1e-3", "1e-2") for hidden in ("16", "32", "64"))
    ]
    shares = importance(definition, trials)
    assert shares["train.lr"] == pytest.approx(1.0) and shares["train.hidden"] == pytest.approx(0.0)
    assert importance(definition, trials[:3]) == {}


def test_the_page_the_table_and_the_best_config(config: Path, world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.plays["toy-t003"] = Pretended(0.9)
    world.plays["toy-t005"] = Pretended(0.9, ending=Ending("failed", "out of memory <b>"))
    sweep = a_sweep(config)
    assert sweep.run() == ""
    for trial in sweep.trials:
        folder = config.parent / "runs" / trial.run_id("toy")
        folder.mkdir(parents=True)
        (folder / "config.yml").write_text(sweep.folder.config.read_text())
        LaunchFile.mine(trial.run_id("toy"), "toy", config="c.yml").at("end").write(folder)
    result = finish(sweep, "", Console(width=200))
    out = capsys.readouterr().out
    assert result["best"] == "t003" and result["exit_status"] == 1
    assert "best: t003, val accuracy 0.9000: train.lr=1e-2 train.hidden=16" in out
    best = sweep.folder.path / "best.yml"
    assert best.read_text().startswith("# The best of 6 trials of sweep toy: t003, val accuracy 0.9000 (run toy-t003).")
    assert load_config(best).nodes[0].host == "gnn1"
    page = (sweep.folder.path / "sweep.html").read_text()
    for figure in json.loads(page.partition('id="figures">')[2].partition("</script>")[0]):
        graph_objects.Figure({"data": figure["data"], "layout": figure["layout"]})  # plotly knows every name
    assert "report of a sweep" in page and "chart-parallel" in page and "chart-importance" in page
    assert "t005: out of memory &lt;b&gt;" in page and "http" not in page.partition('id="library"')[0].replace(
        'http-equiv="Content', ""
    )


def test_messages_of_the_command(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gnnfleet(["sweep", "--set", "train.lr=1,2"]) == 2 and "give the cluster file" in capsys.readouterr().err
    assert gnnfleet(["sweep", "--resume", "old"]) == 2 and "no sweep old in " in capsys.readouterr().err
    assert gnnfleet(["sweep", "--resume", "old", "--trials", "3"]) == 2
    assert "as it was begun" in capsys.readouterr().err
