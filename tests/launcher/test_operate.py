"""Tests of the commands logs, stop, collect, runs and resume for runs whose launcher has ended."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.cli.main import run
from launcher.config.loader import load_config
from launcher.config.schema import ClusterConfig, NodeConfig
from launcher.errors import FleetError, UsageError
from launcher.manage import node_views
from launcher.manage.resume import prepare
from launcher.manage.select import Choice, chosen
from launcher.manage.show_logs import since_when
from launcher.run.options import LaunchOptions
from operate_kit import LocalRun
from waiting import stretched, wait_until

IGNORES_TERM = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(300)"
)
TALKS = """
import os, time
rank = int(os.environ["RANK"])
for i in range(4):
    time.sleep(max(0.0, float(os.environ.get("BEGIN", "0"))))
    print(f"rank {rank} says {i}", flush=True)
    time.sleep(0.1)
os.makedirs(os.environ["GNNFLEET_RUN_DIR"] + "/output", exist_ok=True)
open(os.environ["GNNFLEET_RUN_DIR"] + f"/output/{rank}.txt", "w").write("mine")
"""


@pytest.fixture(autouse=True)
def other_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("TMUX_TMPDIR", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")


@pytest.fixture
def local_run(tmp_path: Path) -> Iterator[LocalRun]:
    yield (local_run := LocalRun(tmp_path))
    local_run.kill()


def run_cli(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    status = run(list(words))
    captured = capsys.readouterr()
    return status, captured.out + captured.err


def ended(local_run: LocalRun) -> LocalRun:
    for node in local_run.nodes:
        node.supervisor.wait(20)
    return local_run


# --- logs --------------------------------------------------------------------------


def test_logs_of_an_ended_run(local_run, capsys) -> None:
    # `logs` merges lines of all ranks by time, and filters them by rank, node, number and time, even on a machine that
    # has no run folder of the run.
    ended(local_run.launched("train").start(TALKS))
    status, output = run_cli(capsys, "logs")
    assert status == 0
    lines = output.splitlines()
    assert sorted(lines) == sorted(f"node{k}/rank{k} | rank {k} says {i}" for k in range(2) for i in range(4))
    for k in range(2):
        own = [line for line in lines if line.startswith(f"node{k}/")]
        assert own == [f"node{k}/rank{k} | rank {k} says {i}" for i in range(4)]
    assert run_cli(capsys, "logs", "--rank", "1", "-n", "2")[1].splitlines() == [
        f"node1/rank1 | rank 1 says {i}" for i in (2, 3)
    ]
    assert len(run_cli(capsys, "logs", "-n", "3")[1].splitlines()) == 3
    assert len(run_cli(capsys, "logs", "--node", "0")[1].splitlines()) == 4
    assert "supervisor | " in run_cli(capsys, "logs", "--all")[1]
    assert len(run_cli(capsys, "logs", "--since", "1h")[1].splitlines()) == 8
    later = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 60))
    assert run_cli(capsys, "logs", "--since", later) == (0, "")
    status, output = run_cli(capsys, "logs", "--since", "yesterday")
    assert status == 2 and "--since yesterday: give how long ago (10m, 90s, 2h, 1d) or when" in output
    assert run_cli(capsys, "logs", "--rank", "7") == (2, "error: --rank 7: the run has ranks 0 to 1\n")
    assert run_cli(capsys, "logs", "--node", "2") == (2, "error: --node 2: the run has nodes 0 to 1\n")
    assert run_cli(capsys, "logs", "--node", "0", "--rank", "1") == (2, "error: rank 1 is on node1, not on node0\n")


def test_logs_of_nodes_with_different_clocks_are_in_order(local_run, capsys) -> None:
    # The clock of node 1 is five minutes ahead; the supervisors have measured and recorded this.
    begin = 1_795_000_000
    for k, (node, ahead) in enumerate(zip(local_run.nodes, (0.0, 300.0), strict=True)):
        (node.path / "logs").mkdir()
        stamps = [time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(begin + 2 * i + k + ahead)) for i in range(3)]
        (node.path / "logs" / f"rank{k}.log").write_text("".join(f"{t} line {i}\n" for i, t in enumerate(stamps)))
        node.write_spec()
        result = {"node_rank": k, "state": "done", "reason": "", "outcomes": [], "clock_offset": ahead}
        (node.path / "result.json").write_text(json.dumps(result))
    local_run.launched("train")
    expected = [f"node{k}/rank{k} | line {i}" for i in range(3) for k in range(2)]
    assert run_cli(capsys, "logs")[1].splitlines() == expected
    run_cli(capsys, "collect")
    for node in local_run.nodes:
        (node.path / "logs").rename(node.path / "moved away")
    assert run_cli(capsys, "logs")[1].splitlines() == expected, "from the collected files"


def test_logs_follow_ends_with_the_run(local_run, capsys) -> None:
    local_run.launched("train").start(TALKS)
    status, output = run_cli(capsys, "logs", "-f")
    assert status == 0
    assert sorted(output.splitlines()) == sorted(
        f"node{k}/rank{k} | rank {k} says {i}" for k in range(2) for i in range(4)
    )


def test_since_accepts_durations_and_times() -> None:
    now = time.mktime((2026, 11, 20, 15, 0, 0, 0, 0, -1))
    assert since_when("90s", now) == now - 90 and since_when("2h", now) == now - 7200
    assert since_when("14:30", now) == now - 1800
    assert since_when("15:30", now) == now - 86400 + 1800, "15:30 of yesterday, since 15:30 of today is in the future"
    assert since_when("2026-11-20T14:00", now) == now - 3600
    assert since_when("2026-11-20T14:00:00Z") == since_when("2026-11-20T14:00:00+00:00")


# --- stop --------------------------------------------------------------------------


def test_status_collect_and_stop_of_a_run_without_a_launcher(local_run, capsys, tmp_path) -> None:
    # The commands do not affect another run on the same machine.
    other = LocalRun(tmp_path, "r2", num_nodes=1)
    try:
        for one in (local_run, other):
            one.launched("train").start()
        local_run.await_training()
        other.await_training()
        status, output = run_cli(capsys, "status", "r1")
        first, header, *rows = output.splitlines()
        assert status == 0
        assert first.startswith("run r1 trains: 2 nodes, 2 ranks, epoch 4 of 10, step 13 of 40; its launcher (alice@")
        assert rows[0].split()[:9] == ["node0", "(local)", "0", "training", "4", "13/40", "1,234", "0.5000", "25%"]
        status, output = run_cli(capsys, "resume", "r1")
        assert status == 2 and output.startswith("error: run r1 still runs (epoch 4 of 10, step 13 of 40)")
        status, output = run_cli(capsys, "collect", "r1")
        assert status == 0 and output.startswith(
            "run r1 still runs (epoch 4 of 10, step 13 of 40); its files so far are in"
        )
        assert (local_run.folder / "logs/node1/rank1.log").read_text().endswith("here is rank 1\n")
        assert not (local_run.folder / "result.json").exists()
        status, output = run_cli(capsys, "stop", "r1")
        assert (status, output.splitlines()[:3]) == (
            0,
            ["node0 (local): stopped", "node1 (local): stopped", "run r1: no process of it is left on its 2 nodes"],
        )
        assert [node.processes() for node in local_run.nodes] == [[], []]
        assert other.nodes[0].processes() and other.nodes[0].json("state.json")["state"] == "training"
    finally:
        other.kill()
    result = json.loads((local_run.folder / "result.json").read_text())
    assert result["state"] == "stopped", (result, local_run.nodes[0].json("result.json"))
    assert "gnnfleet stop" in result["stopped_by"]
    status, output = run_cli(capsys, "status", "r1")
    assert status == 130 and "was stopped by" in output
    assert run_cli(capsys, "stop", "r1")[0] == 0


@pytest.mark.slow
def test_stop_now_skips_the_grace_period(local_run, capsys, monkeypatch) -> None:
    local_run.launched("train")
    for node in local_run.nodes:
        node.spec["grace"] = 30.0
    local_run.start(IGNORES_TERM)
    for k, node in enumerate(local_run.nodes):
        wait_until(node.says(f"rank{k}", "deaf"))
    began = time.monotonic()
    asked, query = [], node_views.node_view

    def counted(node, *rest):
        asked.append(node.node_rank)
        return query(node, *rest)

    monkeypatch.setattr(node_views, "node_view", counted)
    status, output = run_cli(capsys, "stop", "--now", "--json")
    assert status == 0, output
    assert sorted(asked) == [0, 1], "each node is asked for its state once, after it has stopped"
    answer, _ = json.JSONDecoder().raw_decode(output)
    assert [node["was"] for node in answer["nodes"]] == ["training", "training"]
    assert time.monotonic() - began < stretched(10)
    assert [node.processes() for node in local_run.nodes] == [[], []]
    result = json.loads((local_run.folder / "result.json").read_text())
    assert result["state"] == "stopped" and "(gnnfleet stop)" in result["stopped_by"], "no failure of the rank"


@pytest.mark.slow
def test_stop_reports_an_unreachable_node(local_run, capsys, monkeypatch) -> None:
    # `stop` fails if it cannot reach a node. test_operate_messages tests `status` in this case.
    local_run.launched("train").start()
    local_run.await_training()
    lose_node(monkeypatch, 1)
    status, output = run_cli(capsys, "stop")
    assert status == 1
    assert "node1 (local): not stopped: no answer from gnn2; the run may go on there" in output
    assert "run r1: 1 node of 2 may still run processes of it: node1 (local)" in output
    assert local_run.nodes[0].processes() == []


def lose_node(monkeypatch: pytest.MonkeyPatch, k: int) -> None:
    from launcher.errors import UnreachableError
    from launcher.manage import node_views as views

    connect_all = views.connect_all
    lost = UnreachableError("no answer from gnn2", host="gnn2", node_rank=k)
    monkeypatch.setattr(views, "connect_all", lambda config: {**connect_all(config), k: lost})


def test_stop_ends_a_launcher_that_is_still_preparing(local_run, capsys) -> None:
    sleeper = subprocess.Popen(["sleep", "60"])
    ticks = int(Path(f"/proc/{sleeper.pid}/stat").read_text().rpartition(")")[2].split()[19])
    local_run.launched("sync", pid=sleeper.pid, start_ticks=ticks)
    status, output = run_cli(capsys, "stop")
    assert status == 0 and f"its launcher (pid {sleeper.pid}) was stopped; nothing had been started" in output
    assert sleeper.wait(5) == -15


# --- collect, runs ------------------------------------------------------------------


def test_collect_on_a_machine_without_the_run_folder(local_run, capsys, monkeypatch, tmp_path) -> None:
    ended(local_run.start(TALKS))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another home"))
    nodes = "".join(f"  - {{host: localhost, workdir: {node.workdir}}}\n" for node in local_run.plan.nodes)
    Path("cluster.yml").write_text(f"transport: local\nnodes:\n{nodes}data: {{dataset: synthetic}}\n")
    status, output = run_cli(capsys, "collect", "--config", "cluster.yml")
    assert status == 0 and "Done in" in output, output
    assert Path("runs/r1/output/node1/1.txt").read_text() == "mine"
    assert json.loads(Path("runs/r1/result.json").read_text())["state"] == "done"
    monkeypatch.chdir(tmp_path)
    assert run_cli(capsys, "status")[1].startswith("run r1 is done after"), "registered by collect"


def test_an_ended_run_is_listed_and_resumed_from_its_checkpoint(local_run, capsys, tmp_path) -> None:
    checkpoint = local_run.nodes[0].path / "checkpoints/last.pt"
    checkpoint.parent.mkdir()
    checkpoint.write_bytes(b"weights")
    ended(local_run.launched("train").start("raise SystemExit(3)"))
    again = prepared(overrides=("train.lr=0.5",))
    here = local_run.folder / "checkpoints/last.pt"
    assert here.read_bytes() == b"weights", "fetched by resume, since the run had not been collected"
    assert again.message == f"resuming from {here}"
    assert again.options.overrides == (
        ("run.runs_dir", str(local_run.folder.parent)),
        ("train.resume", str(here)),
        "train.lr=0.5",
    )
    assert again.options.config == local_run.folder / "config.yml" and again.options.resumed_from == "r1"
    run_cli(capsys, "collect")
    LocalRun(tmp_path, "r2").launched("preflight")
    LocalRun(tmp_path, "r3").launched("train", detached=True)
    entries = {entry["run_id"]: entry for entry in json.loads(run_cli(capsys, "runs", "--json")[1])}
    assert list(entries) == ["r3", "r2", "r1"]
    assert (entries["r1"]["state"], entries["r1"]["size"]) == ("failed", "2 nodes × 2 ranks")
    assert "ended with exit status 3" in entries["r1"]["why"]
    assert (entries["r2"]["state"], entries["r2"]["why"]) == ("never started", "its launcher ended during preflight")
    assert (entries["r3"]["state"], entries["r3"]["why"]) == ("open", "detached; see gnnfleet status r3")
    _, table = run_cli(capsys, "runs", "-n", "1")
    assert "r3" in table and "r1" not in table


# --- resume ------------------------------------------------------------------------


def prepared(run: str = "r1", *, offline: bool = False, **more: object) -> object:
    """Return the launch that ``gnnfleet resume`` would start.

    offline: do not connect to nodes.
    """
    options = LaunchOptions(Path(), **more)
    with chosen(Choice(run), offline=lambda found: offline) as opened:
        return prepare(opened, Path("runs"), options)


def test_resume_without_a_checkpoint_starts_from_the_beginning(local_run) -> None:
    local_run.launched("preflight")
    with chosen(Choice("r1"), offline=lambda found: True) as opened:
        again = prepare(opened, Path("runs"), LaunchOptions(Path()))
    assert again.message == "run r1 left no checkpoint; the new run starts from the beginning"
    assert "train.resume" not in dict(again.options.overrides)


def test_resume_without_a_lost_host_is_kept_in_the_new_runs_config(local_run, capsys, monkeypatch) -> None:
    # `resume --exclude` records a config without the lost host for the new run, so that resuming the new run needs no
    # `--exclude`.
    from launcher.run import launch as launching

    def no_line(config: ClusterConfig) -> dict:
        raise FleetError(f"would connect to {', '.join(node.host for node in config.nodes)}")

    monkeypatch.setattr(launching, "connect_all", no_line)
    hosts = ("gnn1", "gnn2", "gnn3")
    local_run.config = replace(local_run.config, nodes=tuple(map(NodeConfig, hosts)), transport="ssh")
    local_run.launched("preflight")
    for words in (("r1", "--exclude", "gnn3", "--run-id", "r2"), ("r2", "--run-id", "r3")):
        assert run_cli(capsys, "resume", *words) == (
            1,
            f"run {words[0]} left no checkpoint; the new run starts from the beginning\n"
            f"run {words[-1]}: connecting to 2 nodes\nerror: would connect to gnn1, gnn2\n",
        )
    left = load_config(local_run.folder.parent / "r3/config.yml")
    assert [node.host for node in left.nodes] == ["gnn1", "gnn2"] and left.num_parts == 2
    assert run_cli(capsys, "--include", "gnn2", "resume", "r2")[1].endswith("would connect to gnn2\n")
    assert "no host is called `gnn3`; the hosts are gnn[1-2]" in run_cli(capsys, "resume", "r2", "--exclude", "gnn3")[1]


def test_resume_of_an_own_command_uses_the_folder_it_was_launched_in(local_run) -> None:
    local_run.launched("preflight", own_command=["python", "mine.py"], cwd=str(local_run.top))
    with chosen(Choice("r1"), offline=lambda found: True) as opened:
        again = prepare(opened, Path("runs"), LaunchOptions(Path()))
    assert again.options.own_command == ("python", "mine.py") and again.cwd == local_run.top
    assert "StepLog.restore saves checkpoints" in again.message
    checkpoint = local_run.folder / "checkpoints" / "last.pt"
    checkpoint.parent.mkdir()
    checkpoint.write_bytes(b"weights")
    with chosen(Choice("r1"), offline=lambda found: True) as opened:
        again = prepare(opened, Path("runs"), LaunchOptions(Path()))
    assert (
        "train.resume",
        str(checkpoint),
    ) in again.options.overrides and again.message == f"resuming from {checkpoint}"


def test_resume_of_an_own_command_refuses_settings_of_the_bundled_trainer(local_run) -> None:
    local_run.launched("preflight", own_command=["python", "mine.py"], cwd=str(local_run.top))
    with chosen(Choice("r1"), offline=lambda found: True) as opened:
        with pytest.raises(
            UsageError, match="train.epochs: the run's own command does not read .* resume r1 -- python"
        ):
            prepare(opened, Path("runs"), LaunchOptions(Path(), overrides=("train.epochs=8",)))
        given = LaunchOptions(Path(), overrides=("train.epochs=8",), own_command=("python", "other.py"))
        assert prepare(opened, Path("runs"), given).options.own_command == ("python", "other.py")


def test_resume_of_a_done_run_requires_more_epochs(local_run, capsys) -> None:
    ended(local_run.launched("train").start("print(1)"))
    run_cli(capsys, "collect")
    with pytest.raises(
        UsageError, match="r1 is done at epoch 10; to train on, give a larger number: gnnfleet resume r1 --epochs 20"
    ):
        prepared()
    with pytest.raises(UsageError, match="done at epoch 10, so 8 epochs leave nothing to train; .* --epochs 20"):
        prepared(overrides=("train.epochs=8",))
    status, text = run_cli(capsys, "resume", "r1", "--epochs", "10")
    assert status == 2 and "connecting" not in text
    assert prepared(overrides=("train.epochs=20",)).options.overrides[-1] == "train.epochs=20"
    # A run that ended early is done, too.
    path = local_run.folder / "result.json"
    result = json.loads(path.read_text())
    path.write_text(json.dumps({**result, "metrics": {**result["metrics"], "epochs": 7, "ended_early": "val … 3"}}))
    message = "r1 ended early at epoch 7, as val … 3; .* gnnfleet resume r1 --set train.early_stop.patience="
    with pytest.raises(UsageError, match=message):
        prepared(overrides=("train.epochs=20",))
    assert prepared(overrides=("train.early_stop.patience=9",)).options.overrides[-1] == "train.early_stop.patience=9"


def test_resume_with_fewer_epochs_than_the_checkpoint_has_is_refused(local_run) -> None:
    local_run.launched("preflight")
    lines = [{"t": 1.0, "kind": kind, "rank": 0, "epoch": epoch} for epoch in (1, 2, 3) for kind in ("step", "epoch")]
    lines.append({"t": 2.0, "kind": "checkpoint", "rank": 0, "epoch": 3})
    (local_run.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(UsageError, match="r1 has trained epoch 3, so 2 epochs leave nothing to train; .*--epochs 6"):
        prepared(offline=True, overrides=("train.epochs=2",))
    for epochs in (3, 4):  # a run that has not ended well may still have to score its last epoch
        again = prepared(offline=True, overrides=(f"train.epochs={epochs}",))
        assert again.options.overrides[-1] == f"train.epochs={epochs}"


@pytest.mark.slow
def test_resume_of_a_done_own_command_requires_a_change(local_run, capsys) -> None:
    script = local_run.top / "mine.py"
    script.write_text("print(1)")
    os.utime(script, (1.0, 1.0))
    own = ["python", "mine.py", "--epochs", "3"]
    ended(local_run.launched("train", own_command=own, cwd=str(local_run.top)).start("print(1)"))
    run_cli(capsys, "collect")
    (local_run.folder / "metrics.jsonl").write_text('{"t": 1.0, "kind": "epoch", "rank": 0, "epoch": 3}\n')
    with pytest.raises(UsageError, match="r1 is done at epoch 3, .* gnnfleet resume r1 -- python mine.py --epochs 3 …"):
        prepared()
    assert prepared(own_command=("python", "mine.py", "--epochs", "6")).options.own_command[-1] == "6"
    assert prepared(overrides=("nodes.*.env={EPOCHS: 6}",)).options.own_command == tuple(own)
    script.write_text("print(2)")
    assert prepared().options.own_command == tuple(own), "the script has changed since"
