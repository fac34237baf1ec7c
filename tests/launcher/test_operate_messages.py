"""Golden test of the messages that commands print about a run, for each state in which a node can be."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from golden_kit import check_messages
from launcher.cli.main import run
from launcher.config.loader import to_yaml
from launcher.errors import UnreachableError, node_label
from launcher.manage import node_views
from launcher.manage.select import Choice, chosen
from launcher.node.procs import look
from launcher.plan.model import Login
from launcher.report.launch_file import user_at_host
from launcher.report.run_history import default_runs, resumable_run
from operate_kit import LocalRun

NOT_YET = time.time() + 3600  #: a heartbeat in the future: its age is always shown as 0
STEP = {"epoch": 4, "step": 12, "steps": 40, "loss": 0.5, "seeds_per_s": 1234.0, "remote_share": 0.25, "at": None}


def state(local_run: LocalRun, k: int, word: str = "training", *, alive: bool = True, **more: Any) -> None:
    """Write state.json of node k.

    alive: whether state.json names a running process as the supervisor.
    """
    node = local_run.nodes[k]
    node.write_spec()
    me = look(os.getpid())
    assert me is not None
    ticks = me.start_ticks if alive else 1
    record = {
        "state": word,
        "time": NOT_YET if alive else time.time(),
        "pid": me.pid,
        "start_ticks": ticks,
        "ranks": {str(k): STEP},
    }
    (node.path / "state.json").write_text(json.dumps({**record, **more}))


def result(local_run: LocalRun, k: int, word: str, reason: str = "", **more: Any) -> None:
    state(local_run, k, word)
    record = {"node_rank": k, "state": word, "reason": reason, "outcomes": [], "cause": None, **more}
    (local_run.nodes[k].path / "result.json").write_text(json.dumps(record))


def trains(local_run: LocalRun, **more: Any) -> None:
    for k in range(2):
        state(local_run, k, **more)


NAN = {"t": 1.0, "kind": "nan", "text": "the loss of rank 3 on node1 (local) is NaN in epoch 2", "stop": False}


def collected(local_run: LocalRun, word: str, **more: Any) -> None:
    local_run.launched("end")
    record = {"run_id": "r1", "state": word, "seconds": 754.0, "notes": [], "metrics": {}, "nodes": [{}], **more}
    (local_run.folder / "result.json").write_text(json.dumps(record))


def asked_to_stop(local_run: LocalRun) -> None:
    local_run.launched("train", detached=True)
    for k in range(2):
        cause = {"node_rank": 0, "name": "node", "kind": "stop", "reason": "stop requested by bob@desk (gnnfleet stop)"}
        result(local_run, k, "stopped", "stop requested by bob@desk (gnnfleet stop)", cause=cause)


def failed(local_run: LocalRun) -> None:
    local_run.launched("train")
    result(local_run, 0, "stopped", "rank 1 on node1 (gnn) ran out of memory", cause={**CAUSE, "node_rank": 1})
    killed = {"name": "rank1", "node_rank": 1, "rank": 1, "returncode": 137, "signal": "SIGKILL", "oom": True}
    killed |= {"failed": True, "ended": 1.0}
    result(local_run, 1, "failed", "rank 1 ran out of memory (killed by the kernel)", outcomes=[killed])


CAUSE = {"name": "rank1", "rank": 1, "kind": "failure", "reason": "ran out of memory (killed by the kernel)"}


def half_started(local_run: LocalRun) -> None:
    local_run.launched("start")
    state(local_run, 0, "starting")


def lost_supervisor(local_run: LocalRun) -> None:
    local_run.launched("train")
    state(local_run, 0)
    state(local_run, 1, alive=False)


def done_while_collecting(local_run: LocalRun) -> None:
    local_run.launched("collect")
    for k in range(2):
        result(local_run, k, "done")


def host_lost(local_run: LocalRun) -> None:
    hosts = [Login(None, f"gnn{k + 1}", None) for k in range(len(local_run.plan.nodes))]
    nodes = tuple(
        replace(node, login=host, label=node_label(k, str(host)))
        for k, (node, host) in enumerate(zip(local_run.plan.nodes, hosts, strict=True))
    )
    local_run.plan = replace(local_run.plan, nodes=nodes)
    first = {"sentence": "node1 (gnn2): no sign of life for 6 s"}
    unread = "its files could not be fetched (no answer within 10 s)"
    note = f"node1 (gnn2): {unread}; they are still on the node, in /w/runs/r1/node1"
    collected(local_run, "failed", first_failure=first, notes=[note])
    result(local_run, 0, "failed", "told by the others: node1", cause={**CAUSE, "node_rank": 1})
    state_file = local_run.nodes[0].path / "state.json"
    at = {"ranks": {"0": {**STEP, "step": 39, "at": [4, 40, 0]}}}  # evaluating
    state_file.write_text(json.dumps(json.loads(state_file.read_text()) | at))
    (local_run.folder / "checkpoints").mkdir()
    (local_run.folder / "checkpoints/last.pt").write_bytes(b"weights")
    local_run.unreachable = (1,)


def out_of_reach(*ranks: int) -> Callable[[LocalRun], None]:
    def set_up(local_run: LocalRun) -> None:
        local_run.launched("train")
        trains(local_run, peers={"1": {"state": "training", "age": 0.4}})
        local_run.unreachable = ranks

    return set_up


SCENES: dict[str, tuple[Callable[[LocalRun], Any], list[list[str]]]] = {
    "launcher killed while connecting": (
        lambda local_run: local_run.launched("connect"),
        [["status"], ["stop"], ["logs"]],
    ),
    "launcher killed during preflight": (lambda local_run: local_run.launched("preflight"), [["status"], ["attach"]]),
    "launcher killed while partitioning": (
        lambda local_run: local_run.launched("partition"),
        [["status"], ["collect"]],
    ),
    "launcher killed during sync": (lambda local_run: local_run.launched("sync"), [["status"], ["runs"]]),
    "launcher alive during sync": (
        lambda local_run: local_run.launched("sync", alive=True),
        [["status"], ["resume", "r1"]],
    ),
    "launcher killed while starting, before any node": (lambda local_run: local_run.launched("start"), [["status"]]),
    "launcher killed while starting": (half_started, [["status"]]),
    "launcher killed while training": (
        lambda local_run: trains(local_run.launched("train")),
        [["status"], ["collect"], ["resume", "r1"], ["runs"]],
    ),
    "detached": (lambda local_run: trains(local_run.launched("train", detached=True)), [["status"]]),
    "launched elsewhere, home shared": (
        lambda local_run: trains(local_run.launched("train", host="laptop", boot_id="its own")),
        [["status"]],
    ),
    "launcher killed while collecting": (done_while_collecting, [["status"]]),
    "failed, nobody collected": (failed, [["status"]]),
    "stopped by somebody": (asked_to_stop, [["status"]]),
    "supervisor killed": (lost_supervisor, [["status"]]),
    "node 1 out of reach": (out_of_reach(1), [["status"], ["logs", "--all"]]),
    "no node in reach": (out_of_reach(0, 1), [["status"], ["collect"]]),
    "done and collected": (
        lambda local_run: collected(local_run, "done", metrics={"test_accuracy": 0.8123}),
        [["status"], ["stop"], ["resume", "r1"], ["runs"]],
    ),
    "done with a NaN loss, and collected": (
        lambda local_run: collected(
            local_run,
            "done",
            metrics={"test_accuracy": 0.1},
            findings=[{**NAN, "node_rank": 1, "rank": 3}],
        ),
        [["status"], ["runs"]],
    ),
    "failed with a host lost, and collected": (host_lost, [["status"]]),
    "refused by preflight": (
        lambda local_run: collected(
            local_run, "failed", nodes=[], notes=["preflight refused the run because of node1"]
        ),
        [["status"], ["runs"]],
    ),
    "mistyped": (
        lambda local_run: [LocalRun(local_run.top, name).launched("connect") for name in ("r12", "toy-aa12", "r1")],
        [
            ["status", "nonsense"],
            ["status", "r"],
            ["status", "2"],
            ["status", "a1"],
            ["status", "aa12"],
            ["status", "../here"],
            ["status", "./nowhere"],
        ],
    ),
    "no run at all": (lambda local_run: None, [["status"], ["status", "r1"], ["runs"]]),
    "a damaged launch.json": (
        lambda local_run: (local_run.launched("train").folder / "launch.json").write_text("{"),
        [["status"]],
    ),
}


def words_of(text: str, top: Path) -> str:
    """Replace values that differ between executions, e.g. times and pids."""
    me = user_at_host()
    for old, new in {str(top): "…", me.partition("@")[2]: "laptop", "(local)": "(gnn)"}.items():
        text = text.replace(old, new)
    text = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d(:\d\d)?|\d\d:\d\d:\d\d", "12:03:11", text)
    text = re.sub(r"pid \d+", "pid 4711", text)
    text = re.sub(r"\d+\.\d s ago", "0.4 s ago", text)
    text = re.sub(r"life was \d+ s ago", "life was 0 s ago", text)
    return re.sub(r" +$", "", text, flags=re.MULTILINE)


def test_messages_about_a_run_in_each_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    record = []
    for number, (scene, (set_up, commands)) in enumerate(SCENES.items()):
        top = tmp_path / str(number)
        (top / "here").mkdir(parents=True)
        monkeypatch.chdir(top / "here")
        monkeypatch.setenv("XDG_STATE_HOME", str(top / "state"))
        local_run = LocalRun(top)
        set_up(local_run)
        with monkeypatch.context() as patch:
            lose(patch, local_run.unreachable)
            for command in commands:
                status = run(command)
                captured = capsys.readouterr()
                output = words_of(captured.out + captured.err, top)
                record.append((f"{scene}: gnnfleet {' '.join(command)} [exit {status}]", output))
    check_messages("operate", record)


def lose(patch: pytest.MonkeyPatch, unreachable: tuple[int, ...]) -> None:
    connect_all = node_views.connect_all
    errors = {k: UnreachableError("no answer within 10 s", host=f"gnn{k}", node_rank=k) for k in unreachable}
    patch.setattr(node_views, "connect_all", lambda config: {**connect_all(config), **errors})


def test_the_default_run_is_the_newest_that_is_alive(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    trains(LocalRun(tmp_path / "a", "running").launched("train", started=1.0))
    over = LocalRun(tmp_path / "b", "over").launched("train", started=2.0)  # its end was never collected
    for k in range(2):
        result(over, k, "failed")
    LocalRun(tmp_path / "c", "refused").launched("preflight", started=3.0)
    with chosen(Choice(None)) as opened:
        assert opened.found.run_id == "running"
    assert [found.run_id for found in default_runs([])] == ["over", "running", "over"]
    assert run(["status"]) == 0 and capsys.readouterr().out.startswith("run running ")
    assert resumable_run([], changed=False).run_id == "over"


def test_a_damaged_newest_run_does_not_hide_one_that_is_alive(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    trains(LocalRun(tmp_path / "a", "running").launched("train", started=1.0))
    damaged = LocalRun(tmp_path / "b", "damaged").launched("train", started=2.0)
    (damaged.folder / "run.json").write_text("{")
    assert run(["status"]) == 0 and capsys.readouterr().out.startswith("run running ")
    assert run(["status", "damaged"]) != 0


def test_on_the_hosts_of_a_config_the_default_run_is_the_newest_that_is_alive(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    alive = LocalRun(tmp_path, "running").launched("train", started=1.0)
    trains(alive)
    over = LocalRun(tmp_path, "over").launched("train", started=2.0)
    for k in range(2):
        result(over, k, "failed")
    for when, made in enumerate((alive, over)):
        for node in made.nodes:
            os.utime(node.path / "run.json", (when, when))
    config = tmp_path / "cluster.yml"
    config.write_text(to_yaml(alive.config))
    with chosen(Choice(None, config)) as opened:
        assert opened.found.run_id == "running"


def test_without_a_live_run_the_default_is_the_newest_that_started(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    LocalRun(tmp_path / "c", "refused").launched("preflight", started=3.0)
    assert default_runs([])[0].run_id == resumable_run([], changed=True).run_id == "refused", "there is no other"
    over = LocalRun(tmp_path / "b", "over").launched("train", started=2.0)
    for k in range(2):
        result(over, k, "failed")
    assert run(["status"]) == 1 and capsys.readouterr().out.startswith("run over ")
    assert resumable_run([], changed=False).run_id == "over"
