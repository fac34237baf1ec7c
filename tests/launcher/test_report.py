"""Tests of reports: the first failure, the printed text, and the files in the run folder."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from launcher.node import exit_description
from launcher.node.exit_description import first_failure
from launcher.report.events import lasting_findings
from launcher.report.metrics import Metrics, read_metrics
from launcher.report.outcome import Outcome
from launcher.report.report import RunReport, RunState, print_report
from launcher.report.verdict import result_words

TRACEBACK = [
    "Traceback (most recent call last):",
    '  File "train_mine.py", line 7, in <module>',
    "    step(batch)",
    "ValueError: 3 columns, expected 4",
]
CLOSED_BY_PEER = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:15026"


def outcome(rank: int, ended: float, *, offset: float = 0.0, **more: Any) -> Outcome:
    record = {
        "name": f"rank{rank}",
        "node_rank": rank // 2,
        "rank": rank,
        "pid": 1,
        "returncode": 1,
        "signal": None,
        "started": 100.0 + offset,
        "ended": ended + offset,
        "failed": True,
        "traceback": [],
        "tail": ["some line"],
        "oom": False,
        **more,
    }
    record.setdefault("follow_up", exit_description.looks_like_follow_up(record))
    return Outcome.from_record(record, f"host{rank // 2}", offset)


def first_of(*outcomes: Outcome) -> Outcome | None:
    return first_failure([one for one in outcomes if one.failed], lambda one: one.failure)


def raised(last: str) -> list[str]:
    return [*TRACEBACK[:3], last]


def report(
    state: RunState, outcomes: list[Outcome], folder: Path, lines: list[dict[str, Any]] | None = None
) -> RunReport:
    first = first_of(*outcomes) if state == "failed" else None
    return RunReport(
        "r1",
        folder,
        state=state,
        outcomes=tuple(outcomes),
        first_failure=first,
        metrics=Metrics(tuple(lines or ())),
        seconds=12.5,
    )


def printed(of: RunReport) -> str:
    console = Console(file=io.StringIO(), width=100)
    print_report(of, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_earliest_failure_is_the_first_failure() -> None:
    early, late = outcome(3, 110.0), outcome(0, 111.0)
    assert first_of(late, early) is early


def test_a_rank_that_repeats_the_error_of_another_rank_is_not_the_first_failure() -> None:
    early, late = outcome(1, 110.0, follow_up=True), outcome(0, 110.1)
    assert first_of(early, late) is late


def test_the_throughput_is_that_of_the_ranks_of_the_last_attempt(tmp_path: Path) -> None:
    lines = [
        {"t": 100.0 + epoch, "kind": "epoch", "rank": rank, "epoch": epoch, "loss": 1.0, "seconds": 1.0, "seeds": 10}
        for epoch in (1, 2)
        for rank in (0, 1, 2)
    ]
    once = {"generation": 1, "ranks": {"1": [0], "2": [1]}}
    ended = [replace(outcome(rank, 110.0), returncode=0, failed=False) for rank in (0, 1)]
    of = replace(report("done", ended, tmp_path, lines), restarts=(once,))
    assert "rank2" not in printed(of) and "total 20" in printed(of)
    assert "rank2" in printed(replace(of, restarts=()))


def test_the_report_names_the_code_of_the_first_failure(tmp_path: Path) -> None:
    failed = replace(outcome(0, 110.0), oom=True)
    assert "gnnfleet explain out-of-memory" in printed(report("failed", [failed], tmp_path))


def test_failure_times_are_corrected_by_the_clock_offset() -> None:
    early = outcome(2, 110.0, offset=+3600.0)  # its own clock is an hour ahead
    late = outcome(0, 111.0)
    assert first_of(late, early) is early


@pytest.mark.parametrize(
    "echo",
    [
        CLOSED_BY_PEER,
        "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:2251, remote process exited",
        "ConnectionResetError: [Errno 104] Connection reset by peer",
    ],
)
def test_an_error_caused_by_a_lost_peer_ranks_behind_its_cause_even_if_earlier(echo: str) -> None:
    follower = outcome(0, 109.9, traceback=raised(echo))
    cause = outcome(3, 110.0, returncode=137, signal="SIGKILL")
    assert first_of(follower, cause) is cause


def test_a_stopped_rank_is_never_the_cause() -> None:
    stopped = outcome(0, 105.0, failed=False, stopped=True, returncode=143, signal="SIGTERM")
    cause = outcome(1, 110.0)
    assert first_of(stopped, cause) is cause
    assert first_of(stopped) is None


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"traceback": TRACEBACK}, "raised ValueError: 3 columns, expected 4"),
        ({"returncode": 137, "signal": "SIGKILL"}, "was killed by signal 9 (SIGKILL)"),
        ({"returncode": 139, "signal": "SIGSEGV"}, "crashed: segmentation fault (SIGSEGV)"),
        ({"returncode": 137, "signal": "SIGKILL", "oom": True}, "ran out of memory (killed by the kernel)"),
        ({"returncode": 3, "traceback": TRACEBACK}, "ended with exit status 3"),
        ({"returncode": 127, "note": "cannot start x: gone"}, "ended with exit status 127: cannot start x: gone"),
    ],
)
def test_reasons_of_failures(more: dict[str, Any], reason: str) -> None:
    assert outcome(0, 110.0, **more).reason == reason


def test_the_last_exception_of_chained_tracebacks_is_the_reason() -> None:
    chained = [*raised("KeyError: 'x'"), "", "During handling of the above exception, another exception occurred:", ""]
    assert (
        exit_description.last_exception_line([*chained, *raised("RuntimeError: no x in batch")])
        == "RuntimeError: no x in batch"
    )


def test_a_failed_run_leads_with_rank_node_host_reason_lines_and_log(tmp_path: Path) -> None:
    cause = outcome(3, 110.0, traceback=TRACEBACK)
    echoes = [outcome(rank, 110.1, traceback=raised(CLOSED_BY_PEER)) for rank in (0, 1, 2)]
    (tmp_path / "logs/node1").mkdir(parents=True)
    (tmp_path / "logs/node1/rank3.log").write_text("")
    text = printed(report("failed", [*echoes, cause], tmp_path))
    head, *rest = text.strip().splitlines()
    assert head == "The run failed: rank 3 on node1 (host1) raised ValueError: 3 columns, expected 4" + (
        ", 0.1 s before 3 follow-up errors"
    )
    assert [line.strip() for line in rest[:4]] == [line.strip() for line in TRACEBACK]
    assert rest[4] == f"log: {tmp_path}/logs/node1/rank3.log"
    assert rest[5:] and rest[5] == f"then ranks 0–2 raised {CLOSED_BY_PEER}"


def test_the_report_has_the_time_to_follow_up_errors_with_clocks_minutes_apart(tmp_path: Path) -> None:
    # The clock of the node on which the first rank failed is five minutes ahead.
    killed = {"returncode": 137, "signal": "SIGKILL", "oom": True}
    cause = outcome(5, 110.0, offset=300.0, **killed)
    echoes = [outcome(rank, 113.2 + rank / 100, traceback=raised(CLOSED_BY_PEER)) for rank in (0, 1, 2, 3, 4, 6, 7)]
    run = report("failed", [*echoes, cause], tmp_path)
    head = printed(run).strip().splitlines()[0]
    expected = "rank 5 on node2 (host2) ran out of memory (killed by the kernel), 3.2 s before 7 follow-up errors"
    assert head == f"The run failed: {expected}"
    assert run.exit_status == 137


def test_equal_follow_up_errors_are_folded_and_stopped_ranks_are_counted(tmp_path: Path) -> None:
    cause = outcome(0, 110.0, returncode=3)
    echoes = [outcome(rank, 111.0, traceback=raised(f"OSError: port {rank} of 10.0.0.{rank}: gone")) for rank in (1, 2)]
    other = outcome(3, 112.0, returncode=7)
    expected = {"failed": False, "stopped": True, "returncode": 143, "signal": "SIGTERM"}
    stopped = [outcome(rank, 112.5, **expected) for rank in (4, 5)]
    run = report("failed", [cause, *echoes, other, *stopped], tmp_path)
    lines = printed(run).strip().splitlines()
    assert (
        lines[0] == "The run failed: rank 0 on node0 (host0) ended with exit status 3, 1.0 s before 3 follow-up errors"
    )
    assert "then ranks 1–2 raised OSError: port 1 of 10.0.0.1: gone" in lines
    assert "then rank 3 ended with exit status 7" in lines
    assert "stopped after it: 2 ranks" in lines
    assert run.exit_status == 7, "the highest status of ranks that failed by themselves; 143 is from our own stop"


def test_a_stall_leads_the_report_though_no_process_failed(tmp_path: Path) -> None:
    text = "no process has trained a step for 131 s (the longest step before took 4.1 s)"
    finding = {"t": 110.0, "kind": "stall", "node_rank": 1, "rank": 3, "text": text, "stop": True}
    finding["stacks"] = ["ranks 0-2: backward at trainer/train/optimize.py:43", "rank 3: sleep at mine.py:7"]
    straggler = {"t": 100.0, "kind": "straggler", "node_rank": 0, "rank": 0, "text": "rank 0 is slow", "stop": False}
    first = Outcome.of_finding(finding, "hostb", 110.0)
    findings = [finding, straggler]
    run = RunReport("r1", tmp_path, state="failed", outcomes=(first,), first_failure=first, findings=findings)
    assert f"The run failed: rank 3 on node1 (hostb): {text}" in printed(run)
    assert "  rank 3: sleep at mine.py:7" in printed(run)
    nan = {**finding, "kind": "nan", "text": "the loss of rank 3 on node1 (hostb) is NaN in epoch 2"}
    assert Outcome.of_finding(nan, "hostb", 110.0).sentence == nan["text"], "the location is stated once"
    assert "straggler: rank 0 is slow" in printed(run) and printed(run).count(text) == 1
    assert run.exit_status == 1


def test_a_run_stopped_by_request_names_who_stopped_it(tmp_path: Path) -> None:
    run = RunReport("r1", tmp_path, state="stopped", seconds=60.0, stopped_by="alice@laptop (gnnfleet stop)")
    assert "Stopped by alice@laptop (gnnfleet stop) after 60 s." in printed(run)
    assert run.exit_status == 130


def test_a_lost_node_is_named_with_its_host(tmp_path: Path) -> None:
    lost = Outcome.of_node(1, "hostb", "no contact for 61 s (connection lost)", 170.0)
    text = printed(report("failed", [outcome(0, 160.0, traceback=raised(CLOSED_BY_PEER)), lost], tmp_path))
    assert "The run failed: node1 (hostb): no contact for 61 s" in text


def metrics() -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    for epoch in range(1, 4):
        for rank in (0, 1):
            seconds = 10.0 if epoch == 1 else 2.0 + rank  # rank 1 waits while rank 0 saves
            lines.append(
                {
                    "t": epoch,
                    "kind": "epoch",
                    "rank": rank,
                    "epoch": epoch,
                    "loss": 2.0 / epoch,
                    "seconds": seconds,
                    "seeds": 500,
                }
            )
        lines.append({"t": epoch, "kind": "eval", "rank": 0, "epoch": epoch, "split": "val", "accuracy": 0.2 * epoch})
    result = {
        "kind": "result",
        "rank": 0,
        "epochs": 3,
        "test_accuracy": 0.6543,
        "val_accuracy": 0.61,
        "checkpoint": "x",
    }
    return [*lines, {"t": 9.0, **result}]


def test_after_a_lost_host_the_advice_is_one_complete_command(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/last.pt").write_bytes(b"weights")
    lost = Outcome.of_node(2, "gnn3", "no contact for 61 s", 170.0)
    expected = printed(replace(report("failed", [lost], tmp_path), out_of_reach=("gnn3",)))
    assert expected.count("; to continue from it: gnnfleet resume r1 --exclude gnn3\n") == 1


def test_a_done_run_reports_accuracy_epoch_times_and_throughput_of_each_rank(tmp_path: Path) -> None:
    ranks = [outcome(rank, 110.0, failed=False, returncode=0, node_rank=rank) for rank in (0, 1)]
    text = printed(report("done", ranks, tmp_path, metrics()))
    assert "test accuracy: 0.6543" in text and "val accuracy: 0.6100" in text
    assert any(line.split() == ["3", "2.00", "0.6667", "0.6000"] for line in text.splitlines())
    assert "node0/rank0 250, node1/rank1 250 seeds/s; total 500 (mean of epochs 2–3)" in text
    assert f"run folder: {tmp_path}" in text and "ended early" not in text
    *lines, result = metrics()
    early = printed(report("done", ranks, tmp_path, [*lines, {**result, "ended_early": "val loss has not improved"}]))
    assert "ended early after epoch 3: val loss has not improved" in early


def test_a_done_run_on_gpus_reports_their_use(tmp_path: Path) -> None:
    device = {"total_bytes": 80e9, "peak_bytes": 10.1e9, "step_s": 0.103, "utilization": 0.87}
    lines = [{"kind": "epoch", "rank": rank, "epoch": 1, "device": device} for rank in range(3)]
    del lines[1]["device"]
    text = printed(report("done", [outcome(rank, 110.0) for rank in range(3)], tmp_path, lines[:2]))
    assert "GPUs: node0/rank0 103 ms a step, 87% used, peak 10.1 of 80 GB\n" in text
    many = [{**lines[0], "rank": rank, "device": {**device, "peak_bytes": rank * 1e9}} for rank in range(20)]
    text = printed(report("done", [], tmp_path, many))
    assert "GPUs: 20 ranks, mean times, highest peak: 103 ms a step, 87% used, peak 19.0 of 80 GB\n" in text
    assert "GPUs" not in printed(report("done", [], tmp_path, lines[1:2]))


def test_result_json_and_metrics_are_written(tmp_path: Path) -> None:
    cause = outcome(1, 110.0, traceback=TRACEBACK)
    step = {"t": 1.5, "kind": "step", "rank": 0, "epoch": 1, "step": 3, "loss": float("nan")}
    file = tmp_path / "logs" / "metrics-rank0.jsonl"
    file.parent.mkdir()
    file.write_text("".join(json.dumps(line) + "\n" for line in [step, *metrics()]) + '{"t": 99, "ra')
    with (tmp_path / "metrics.jsonl").open("wb") as merged:
        found = read_metrics([file], merged)
    assert list(found.lines) == metrics(), "steps are not kept in memory: a long run has too many"
    replace(report("failed", [outcome(0, 111.0), cause], tmp_path), metrics=found).write()
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["state"], result["exit_status"]) == ("failed", 1)
    assert result["first_failure"]["rank"] == 1
    assert result["first_failure"]["reason"] == "raised ValueError: 3 columns, expected 4"
    assert result["metrics"]["test_accuracy"] == 0.6543
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == len([step, *metrics()])
    assert {path.name for path in tmp_path.iterdir()} == {"result.json", "metrics.jsonl", "logs"}


@pytest.mark.parametrize(("state", "status"), [("done", 0), ("failed", 1), ("stopped", 130)])
def test_exit_status(state: RunState, status: int, tmp_path: Path) -> None:
    assert report(state, [], tmp_path).exit_status == status


def test_metrics_of_ranks_are_merged_by_time_without_an_unfinished_line(tmp_path: Path) -> None:
    (tmp_path / "a").write_text('{"t": 1, "rank": 0}\n{"t": 3, "rank": 0}\n{"t": 4, "ra')
    (tmp_path / "b").write_text('{"t": 2, "rank": 1}\n')
    assert [line["t"] for line in read_metrics([tmp_path / "a", tmp_path / "b"]).lines] == [1, 2, 3]


ABORTED = {"returncode": 134, "signal": "SIGABRT"}
AFTERWARDS = ["terminate called without an active exception", "Fatal Python error: Aborted", ""]


def test_an_exception_is_the_reason_even_if_torch_then_aborts() -> None:
    # Threads of gloo may call abort() while Python exits after an exception; the exception is still the reason.
    raised = outcome(
        1, 110.0, **ABORTED, traceback=TRACEBACK, tail=[*(f"[rank1]: {line}" for line in TRACEBACK), *AFTERWARDS]
    )
    assert raised.reason == "raised ValueError: 3 columns, expected 4"
    old = outcome(1, 110.0, **ABORTED, traceback=TRACEBACK, tail=["a caught one was long ago", *AFTERWARDS])
    assert old.reason == "was killed by signal 6 (SIGABRT)"


def test_a_rank_that_aborts_because_its_peer_is_gone_is_not_the_first_cause() -> None:
    echo = ["Traceback (most recent call last):", "  File", CLOSED_BY_PEER]
    follower = outcome(0, 109.0, **ABORTED, traceback=echo, tail=[*echo, *AFTERWARDS])
    cause = outcome(3, 110.0, traceback=TRACEBACK)
    assert first_of(follower, cause) is cause


def test_a_closed_session_comes_before_the_errors_of_its_peers() -> None:
    closed = Outcome.of_node(1, "hostb", "its supervisor got SIGHUP: its tmux session was closed", 111.0)
    follower = outcome(0, 110.5, traceback=["Traceback (most recent call last):", "  File", CLOSED_BY_PEER])
    assert first_of(follower, closed) is closed


def test_a_done_run_reports_the_servers_and_ranks_that_it_lost(tmp_path: Path) -> None:
    text = "server node1 (g2) was lost at 12:00:00 UTC (no sign of life): parts 2, 3 are served by node0 (g1)"
    finding = {"t": 1.0, "kind": "server-lost", "node_rank": 1, "rank": None, "text": text, "stop": False}
    gone = replace(outcome(2, 110.0, returncode=137, signal="SIGKILL"), done_without=True)
    made = replace(report("done", [outcome(0, 120.0, returncode=0, failed=False), gone], tmp_path), findings=[finding])
    assert made.exit_status == 0 and made.first_failure is None
    assert f"server-lost: {text}" in printed(made).replace("\n", " ") and "failed" not in printed(made)


def test_an_own_scripts_report_has_its_last_loss_and_output_files(tmp_path: Path) -> None:
    files = []
    for rank in (0, 1):
        files.append(tmp_path / f"metrics-rank{rank}.jsonl")
        step = {"kind": "step", "t": 1.0, "rank": rank, "epoch": 2, "step": 3, "steps": 9, "loss": 0.25 + rank / 2}
        files[-1].write_text(f'{json.dumps({**step, "step": 2})}\n{json.dumps(step)}\n{{"kind": "st')
    (tmp_path / "output/node0").mkdir(parents=True)
    (tmp_path / "output/node0/model.pt").write_bytes(b"x" * 1500)
    shown = printed(replace(report("done", [], tmp_path), metrics=read_metrics(files)))
    assert "last loss: 0.5000, mean of 2 ranks (epoch 2, step 4 of 9)" in shown
    assert "output: 1 file in" in shown and "node0/model.pt  1.5 kB" in shown


def steps_file(folder: Path, rank: int, *lines: dict[str, Any]) -> Path:
    path = folder / f"metrics-rank{rank}.jsonl"
    path.write_text("".join(json.dumps({"t": 1.0, "rank": rank, **line}) + "\n" for line in lines))
    return path


@pytest.mark.parametrize(
    ("state", "saved", "epoch_line", "position"),
    [
        ("done", [1, 3], 0, " (epoch 2, step 3 of 9; log.epoch, called after each epoch, saves its end)"),
        ("failed", [1, 3], 0, " (epoch 2, step 3 of 9); to continue from it: gnnfleet resume r1"),
        ("failed", [0, 7], 0, " (epoch 1, step 7); to continue from it: gnnfleet resume r1"),
        ("done", [1, 9], 0, ""),  # after the epoch's last step
        ("done", [1, 3], 2, ""),  # then log.epoch has saved
        ("done", None, 0, ""),
    ],
)
def test_the_report_says_at_which_step_the_checkpoint_was_saved(
    tmp_path: Path, state: RunState, saved: list[int] | None, epoch_line: int, position: str
) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/last.pt").write_bytes(b"weights")
    step = {"kind": "step", "epoch": 2, "step": 8, "steps": 9, "loss": 0.5} | ({"saved": saved} if saved else {})
    more = [{"kind": "epoch", "epoch": epoch_line, "loss": 0.25}] if epoch_line else []
    made = replace(report(state, [], tmp_path), metrics=read_metrics([steps_file(tmp_path, 0, step, *more)]))
    assert f"checkpoint: {tmp_path}/checkpoints/last.pt{position}\n" in printed(made)


def test_result_json_has_the_last_loss_of_a_script(tmp_path: Path) -> None:
    steps = [{"kind": "step", "epoch": 2, "step": 8, "steps": 9, "loss": loss} for loss in (0.25, 0.75)]
    files = [steps_file(tmp_path, rank, step) for rank, step in enumerate(steps)]
    own = replace(report("done", [], tmp_path), metrics=read_metrics(files)).to_json()
    assert own["metrics"]["last_loss"] == 0.5 and result_words(own) == "last loss 0.5000"
    files.append(steps_file(tmp_path, 0, steps[0], {"kind": "epoch", "epoch": 2, "loss": 0.125}))
    own = replace(report("done", [], tmp_path), metrics=read_metrics(files[1:])).to_json()
    assert result_words(own) == "last loss 0.1250"
    broken = steps_file(tmp_path, 0, {**steps[0], "loss": float("nan")})
    nan = replace(report("done", [], tmp_path), metrics=read_metrics([broken]))
    assert "last_loss" not in nan.to_json()["metrics"]


def test_stragglers_that_kept_up_again_are_left_out_at_the_end(tmp_path: Path) -> None:
    def straggler(t: float, rank: int, text: str) -> dict[str, Any]:
        about = {"t": t, "kind": "straggler", "node_rank": 0, "rank": rank, "text": f"rank {rank} {text}"}
        return about | {"stop": False, "over": text == again}

    slow, again = "needs 2 s of own work per step", "is fast enough: 0.2 s of own work per step"
    nan = {"t": 1.5, "kind": "nan", "node_rank": 0, "rank": 0, "text": "the loss is NaN", "stop": False}
    findings = [straggler(3.0, 1, again), straggler(1.0, 1, slow), straggler(2.0, 2, slow), nan]
    assert [finding["t"] for finding in lasting_findings(findings)] == [1.5, 2.0]
    shown = printed(replace(report("done", [], tmp_path), findings=findings))
    assert "rank 2 needs 2 s" in shown and "rank 1" not in shown
    assert " s, with a NaN loss of rank 0." in shown
