"""Tests of damaged and hostile messages and files: no command crashes and no run is stopped."""

from __future__ import annotations

import copy
import io
import json
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from fake_transport import FakeTransport, printed
from follow_kit import FakeNode, Scene, ended, event, line, state, step
from launcher.command import Command
from launcher.errors import FleetError, TransportError
from launcher.manage import select
from launcher.manage.node_views import OpenRun, node_view
from launcher.manage.show_logs import LogFilter, print_logs
from launcher.manage.status import Status, rendered
from launcher.node import control, json_records, watch
from launcher.node.control import NodeFolder
from launcher.node.json_reader import MAX_DEPTH, loads
from launcher.node.record import append_json
from launcher.node.supervisor.journal import Journal
from launcher.node.supervisor.outcomes import OutcomeBook
from launcher.node.watch import Watcher
from launcher.report import metrics
from launcher.report.compare import compare, figures_of, print_comparison
from launcher.report.ending import conclude
from launcher.report.events import EventLog
from launcher.report.html import record
from launcher.report.html.render import render
from launcher.report.html.sections import report_page
from launcher.report.metrics import read_metrics
from launcher.report.profile import Analysis
from launcher.report.report import Lost, RunReport, print_report
from launcher.report.run_folder import FoundRun, never_ran, read_folder
from launcher.report.run_history import entry_of
from launcher.report.verdict import NodeView, from_here, judge, known_without_nodes
from launcher.run import node_stream
from launcher.run.live_log import LinePrinter
from launcher.run.tmux_session import stop_session
from launcher.serving.cluster_state import ClusterDescription, ServerState
from launcher.serving.serve_status import ServeStatus
from launcher.sync import collect
from launcher.text import console_for
from launcher.transport import process
from launcher.transport.base import Completed
from launcher.transport.local import LocalTransport
from operate_kit import LocalRun
from run_kit import make_launch, make_node
from test_html import made_run

EXAMPLES = int(os.environ.get("GNNFLEET_FUZZ", "25"))  #: number of examples per fuzz test

TITLE = "\x1b]0;me@gnn1\x07"  #: a window title that a .bashrc prints without a line end


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_stream, "RETRY_EVERY", 0.02)


def log(text: str, offset: int) -> str:
    return line(file="logs/rank0.log", offset=offset, lines=[text])


# Messages of a node that is followed


@pytest.mark.parametrize(
    "damage",
    [
        '{"file": "logs/rank0.log", "offset": 90, "lines": ["cut in the midd',
        '{"state": 5}',
        '{"state": {"state": "training", "time": "now", "pid": 7, "start_ticks": 1}}',
        '{"result": {"state": "done", "outcomes": [1]}, "result": []}',
        '{"result": {"state": "gone"}}',
        '{"lost": true}',
        '{"file": "logs/rank0.log", "offset": "90", "lines": ["x"]}',
        '{"file": 1, "offset": 90, "lines": ["x"]}',
        '{"file": "logs/\\u0000.log", "offset": 90, "lines": ["x"]}',
        '{"file": "logs/rank0.log", "lines": ["x"]}',
    ],
)
def test_after_a_damaged_message_the_launcher_reconnects(tmp_path: Path, damage: str) -> None:
    node = FakeNode(0, [state(), log("first", 40), damage, log("told twice", 50)], [log("second", 50), ended(0)])
    scene = Scene(tmp_path, node)
    followed = scene.follow()
    assert followed.results[0]["state"] == "done" and not followed.lost
    assert node.offsets == [{}, {"logs/rank0.log": 40}], "reading resumes after the last complete line"
    assert node.stops == 1 and "told twice" not in scene.output and "second" in scene.output
    assert "disconnected (received a damaged JSON line" in scene.output or "with a field missing" in scene.output


def test_a_message_on_the_same_line_as_profile_output_is_read(tmp_path: Path) -> None:
    node = FakeNode(0, [TITLE + log("hello", 40), "welcome " + state(), ended(0)])
    scene = Scene(tmp_path, node)
    assert scene.follow().results[0]["state"] == "done"
    assert "| hello" in scene.output


def test_joined_and_malformed_events_do_not_end_the_run(tmp_path: Path) -> None:
    joined = '{"t": 1.0, "kind": "proc{"t": 2.0, "kind": "process-start", "node_rank": 0, "name": "rank0", "rank": 0}'
    odd = ['{"kind": 5}', "[]", '{"t": 1, "kind": "process-exit", "failed": true, "rank": []}', '{"t": 1}', "{", joined]
    scene = Scene(tmp_path, FakeNode(0, [line(file="events.jsonl", offset=9, lines=odd), ended(0)]))
    assert scene.follow().results[0]["state"] == "done"
    assert "all ranks have started: 1" in scene.output, "the second of two joined lines is complete"


def test_findings_and_causes_of_unknown_nodes_are_only_shown(tmp_path: Path) -> None:
    finding = {"t": 1.0, "kind": "server-lost", "node_rank": 99, "rank": 7, "text": "node99 is gone", "stop": True}
    cause = {"node_rank": 99, "name": "rank3", "rank": 3, "kind": "failure", "reason": "raised", "t": 1.0, "asked": 5}
    more = {"cause": cause, "lost": {"98": {"since": 1.0, "why": "silent"}}, "findings": [finding]}
    scene = Scene(tmp_path, FakeNode(0, [state(findings=[finding], spare=["x"]), ended(0, "failed", more)]))
    followed = scene.follow()
    assert followed.results[0]["state"] == "failed" and "node99 is gone" in scene.output


def test_terminal_escapes_and_lone_surrogates_are_not_shown(tmp_path: Path) -> None:
    evil = "\x1b[2J\x1b]52;c;aGk=\x07\x9b31mred\ud800"
    reason = {"reason": f"{evil} reason"}
    node = FakeNode(0, [state(), log(f"{evil} text", 40), ended(0, "failed", reason)])
    scene = Scene(tmp_path, node)
    scene.follow()
    assert "| red? text" in scene.output and "reason" in scene.output
    assert not set(scene.output) & {"\x1b", "\x07", "\x9b"}


def test_the_console_removes_escape_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    console_for(stderr=False).print("\x1b[2J\x1bc[bold]\x9b2Jtext[/] end")
    assert capsys.readouterr().out == "text end\n"


def test_the_length_of_a_line_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "MAX_LINE", 1 << 20)
    with pytest.raises(TransportError, match="printed a line of more than 1 MiB"):
        LocalTransport().stream(Command(("cat", "/dev/zero")), print, threading.Event())


def test_json_is_limited_in_length_and_depth() -> None:
    deep = {depth: "[" * depth + "]" * depth for depth in (MAX_DEPTH, MAX_DEPTH + 1, 900, 200_000)}
    assert loads(deep[MAX_DEPTH]) and loads(json.dumps(["[" * 1000, {"a": "{" * 1000}]))
    for text in (deep[MAX_DEPTH + 1], deep[900], deep[200_000], '{"a":' * 200_000, "[" * 200_000, "9" * 5000, "[1, 2]"):
        for data in (text, text.encode()):
            with pytest.raises(ValueError):
                loads(data, 5 if text == "[1, 2]" else 1 << 21)
    with pytest.raises(ValueError):
        loads(json.dumps([1, *[{"a": [0]}] * 100, json.loads("[" * 60 + "]" * 60)]))


def test_the_output_of_a_command_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    # A command that prints too much on standard output is an error; of too much standard error, only the end is kept.
    monkeypatch.setattr(process, "MAX_LINE", 1 << 20)
    with pytest.raises(TransportError, match="a command printed more than 1 MiB"):
        LocalTransport().run(Command(("yes",)), timeout=60)
    monkeypatch.setattr(process, "_MOST_STDERR", 1 << 16)
    done = LocalTransport().run(Command(("sh", "-c", "yes | head -c 10000000 >&2; echo last >&2")), timeout=60)
    assert len(done.stderr) <= 1 << 16 and done.stderr.endswith(b"y\nlast\n")


def test_a_log_line_that_is_too_long_is_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_LONGEST", 1 << 20)
    path = tmp_path / "logs/rank0.log"
    path.parent.mkdir()
    path.write_bytes(b"a" * (3 << 20) + b"\nend\n")
    watcher, messages = Watcher(str(tmp_path), {}), []
    monkeypatch.setattr(watcher, "emit", messages.append)
    while watcher.emit_lines():
        pass
    lines = [text for message in messages for text in message["lines"]]
    assert "".join(lines) == "a" * (3 << 20) + "end" and lines[-1] == "end" and max(map(len, lines)) < 2 << 20


# Answers of nodes to commands


def answering(text: str) -> FakeTransport:
    return FakeTransport(target="gnn1", node_rank=0).on("", printed(text))


def test_profile_output_does_not_hide_the_state_of_a_node(tmp_path: Path) -> None:
    answer = TITLE + state() + "\n" + line(now=5.0) + "\n"
    view = node_view(make_node(tmp_path, 0, []), answering(answer), ())
    assert view.word == "training" and view.alive


@pytest.mark.parametrize(
    "answer", ["", TITLE, "{}\n", '{"state": {"sta\n{"now": 5.0}\n', '{"state": 5}\n{"now": 5.0}\n']
)
def test_an_incomplete_answer_is_an_error(tmp_path: Path, answer: str) -> None:
    with pytest.raises(FleetError):
        node_view(make_node(tmp_path, 0, []), answering(answer), ())


def test_profile_output_does_not_make_stop_fail(tmp_path: Path) -> None:
    answer = TITLE + '{"stopped": true, "killed": [{"pid": 3, "command": "x"}], "leftovers": [], "notes": []}\nbye'
    assert stop_session(answering(answer), make_node(tmp_path, 0, []), timeout=1.0).killed == ("3 x",)
    with pytest.raises(FleetError, match="could not stop the run on this node"):
        stop_session(answering('{"stopped": true'), make_node(tmp_path, 0, []), timeout=1.0)


def test_profile_output_does_not_hide_a_run_from_discovery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = LocalRun(tmp_path)
    host = LocalTransport()
    run = host.run

    def with_title(command: Command, *, stdin: bytes = b"", timeout: float) -> Completed:
        done = run(command, stdin=stdin, timeout=timeout)
        return replace(done, stdout=TITLE.encode() + done.stdout)

    monkeypatch.setattr(host, "run", with_title)
    monkeypatch.setattr(select, "connect_all", lambda config: {0: host, 1: host})
    with select.discovered(made.config, tmp_path / "cluster.yml", None) as found:
        assert found.found.run_id == "r1" and found.found.needed_plan == made.plan


# Files of runs


def test_epoch_lines_of_an_own_script_need_no_seconds_or_seeds(tmp_path: Path) -> None:
    lines = [{"kind": "epoch", "rank": 0, "epoch": 1, "loss": 0.5}, {"kind": "epoch", "rank": 0, "epoch": 2}]
    lines += [{"kind": "epoch", "epoch": "last"}, {"kind": "eval"}, {"kind": "result", "test_accuracy": "good"}]
    file = tmp_path / "metrics-rank0.jsonl"
    file.write_text("".join(f"{json.dumps(each)}\n" for each in lines) + "[]\n5\n")
    console = Console(file=io.StringIO(), width=100)
    report = RunReport("r1", tmp_path, state="done", seconds=12.5, metrics=read_metrics([file]))
    print_report(report, console)
    report.write()
    assert isinstance(console.file, io.StringIO) and "0.5000" in console.file.getvalue()


def test_an_event_cut_by_a_full_disk_leaves_no_partial_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, write = tmp_path / "events.jsonl", os.write
    append_json(str(path), {"t": 1.0, "kind": "one"})
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda to, data: write(to, data[: len(data) // 2]))
        with pytest.raises(OSError, match="No space"):
            append_json(str(path), {"t": 2.0, "kind": "cut"})
        log = EventLog(path)
        log.add("cut")
        log.close()
    append_json(str(path), {"t": 3.0, "kind": "two"})
    assert [json.loads(text)["kind"] for text in path.read_text().splitlines()] == ["one", "two"]


# Fuzz tests: damaged copies of messages and of the files of a run


def damaged_value(draw: Callable[[Any], Any], value: Any) -> Any:
    odd = draw(
        st.sampled_from([None, True, -1, 1 << 70, 1e400, float("nan"), "", "\0\x1b\ud800", [], {}, [None], "9" * 20])
    )
    spots = [()]
    todo: list[tuple[tuple[Any, ...], Any]] = [((), value)]
    while todo:
        path, at = todo.pop()
        below = at.items() if isinstance(at, dict) else enumerate(at) if isinstance(at, list) else ()
        todo += [((*path, key), one) for key, one in below]
        spots += [(*path, key) for key, _ in below]
    *above, last = draw(st.sampled_from(spots)) or (None,)
    if last is None:
        return odd
    changed = copy.deepcopy(value)
    holder = changed
    for key in above:
        holder = holder[key]
    if draw(st.booleans()):
        holder[last] = odd
    else:
        del holder[last]
    return changed


@st.composite
def damaged_text(draw: Any, text: str) -> str:
    """Draw a damaged version of ``text``, a JSON file or JSON lines."""
    lines = text.splitlines()
    how = draw(st.sampled_from(["value", "value", "cut", "join", "noise"]))
    i = draw(st.integers(0, len(lines) - 1))
    if how == "value":
        try:
            lines[i] = json.dumps(damaged_value(draw, json.loads(lines[i])))
        except ValueError:  # the file is indented, or was cut before
            return json.dumps(damaged_value(draw, json.loads(text))) if text.startswith("{\n") else text
    elif how == "cut":
        return text[: draw(st.integers(0, len(text)))]
    elif how == "join":
        return "".join([*lines[:i], *(f"{each}\n" for each in lines[i:])])
    else:
        lines[i] = draw(st.text(max_size=20).map(lambda noise: noise.encode("utf-8", "replace").decode()))
    return "".join(f"{each}\n" for each in lines)


FINDING = {"t": 1.0, "kind": "nan", "node_rank": 0, "rank": 0, "text": "the loss is NaN", "stop": False}
CAUSE = {"node_rank": 0, "name": "rank0", "rank": 0, "kind": "failure", "reason": "raised", "t": 1.0, "asked": None}
GONE = {"1": {"since": 1.0, "why": "silent", "t": 1.0, "how": "lost", "kind": "server-lost", "text": "node1 was lost"}}
RANKS = {"0": {"epoch": 1, "step": 2, "steps": 9, "loss": 0.5, "at": [1, 2, "load"], "most": ["load", 0.4]}}
MESSAGES = [
    state(findings=[FINDING], spare=[1], gone=GONE, ranks=RANKS, peers={"1": {"state": "x", "age": 0.1}}),
    event("process-start", 0, name="rank0", rank=0, pid=7, pgid=7),
    event("process-exit", 0, name="rank0", rank=0, failed=True, returncode=1, signal=None),
    event("finding", 0, finding=FINDING),
    step(0, 3, spent={"load": 0.1, "forward": 0.2}),
    log("2026-11-20T21:00:00.123Z hello", 50),
    line(lost={"reason": "gone", "state": json.loads(state())["state"]}),
    ended(0, "failed", {"cause": CAUSE, "reason": "raised", "gone": GONE, "lost": GONE, "findings": [FINDING]}),
]

FUZZ = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@pytest.fixture(scope="module")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@FUZZ
@given(data=st.data())
def test_damaged_messages_of_a_node_crash_nothing(shared_folder: Path, data: st.DataObject) -> None:
    damaged = [data.draw(damaged_text(text)) for text in data.draw(st.lists(st.sampled_from(MESSAGES), max_size=3))]
    (shared_folder / "events.jsonl").unlink(missing_ok=True)
    scene = Scene(shared_folder, FakeNode(0))
    for text in [*damaged, *MESSAGES]:
        if message := message_or_none(text):
            scene.follower._handle(0, message)
            scene.live.tick(all_of_them=True)
    report = scene.report
    conclude(report, scene.plan, 1.0)
    print_report(report, scene.console)
    json.dumps(report.to_json())
    view = NodeView(scene.plan.nodes[0], result=report.results[0], now=1.0)
    found = FoundRun("r1", None, None, scene.plan, None, None)
    console_for(stderr=False).print(rendered(Status(found, judge(found, {0: view}), {0: view})))


@FUZZ
@given(data=st.data())
def test_damaged_answers_do_not_crash_status(shared_folder: Path, data: st.DataObject) -> None:
    texts = [data.draw(damaged_text(text)) for text in data.draw(st.lists(st.sampled_from(MESSAGES), max_size=3))]
    node = make_node(shared_folder, 0, [])
    try:
        view = node_view(node, answering("\n".join([*texts, line(now=5.0), ""])), ())
    except FleetError:
        return
    found = FoundRun("r1", None, None, make_launch([node]), None, None)
    status = Status(found, judge(found, {0: view}), {0: view})
    json.dumps(status.to_json())
    console_for(stderr=False).print(rendered(status))
    server = ServerState(view, {"server_stats.json": data.draw(damaged_text(STATS))})
    console_for(stderr=False).print(ServeStatus(ClusterDescription("r1", 1, 1, ()), (server,)).rendered())


def message_or_none(text: str) -> dict[str, Any] | None:
    try:
        return json_records.message_in(text)
    except json_records.Damaged:
        return None


STATS = json.dumps(
    {"time": 5.0, "busy": 0.5, "queue": 3, "memory": 7, "buffer_bytes": 1, "buffer_limit": 9}
    | {"clients": [{"name": "a", "batches": 3, "bytes": 9, "seconds_since": 0.1}], "malformed": 1, "refused": 0}
)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("files")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(top / "state"))
        folder = made_run(top, "r1", range(1, 4), state="failed")
    (folder / "outcomes/node0").mkdir(parents=True)
    for name in ("state", "result"):
        message = json.loads(next(text for text in MESSAGES if text.startswith(f'{{"{name}"')))
        (folder / f"logs/node0/{name}.json").write_text(json.dumps(message[name]))
    (folder / "outcomes/node0/rank0.json").write_text(json.dumps(message["result"]["outcomes"][0]))
    return folder


@pytest.mark.parametrize(
    ("name", "sound", "damaged"),
    [("events.jsonl", '"nodes": [0, 1]', '"nodes": null'), ("result.json", '"signal": null', '"signal": "SIGNED"')],
)
def test_damage_that_earlier_fuzzing_found(run_folder: Path, name: str, sound: str, damaged: str) -> None:
    file = run_folder / name
    whole = file.read_text()
    file.write_text(whole.replace(sound, damaged))
    try:
        assert file.read_text() != whole
        read_all(run_folder)
    finally:
        file.write_text(whole)


FILES = ("events.jsonl", "result.json", "launch.json", "logs/node0/metrics-rank0.jsonl", "outcomes/node0/rank0.json")


@FUZZ
@given(data=st.data())
def test_damaged_files_of_a_run_crash_no_reader(run_folder: Path, data: st.DataObject) -> None:
    file = run_folder / data.draw(st.sampled_from((*FILES, "logs/node0/result.json")))
    whole = file.read_text()
    file.write_text(data.draw(damaged_text(whole)))
    try:
        read_all(run_folder)
    finally:
        file.write_text(whole)


def read_all(folder: Path) -> None:
    console = Console(file=io.StringIO(), width=200)
    entry_of(folder)
    never_ran(folder)
    try:
        found = read_folder(folder)
        if known_without_nodes(found):
            from_here(found)
    except FleetError:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "analyse", lambda *_, **__: Analysis())
        render(report_page(record.read_record(folder)))
        print_comparison(compare([figures_of(found)] * 2), console)
    plan = make_launch([make_node(folder, 0, [])])
    print_logs(OpenRun(replace(found, plan=plan), {}), LogFilter(), LinePrinter(console, plan, times=True, every=True))
    merged = read_metrics(sorted(folder.glob("logs/node*/metrics-rank*.jsonl")))
    records = {0: collect._outcomes(folder / "outcomes/node0")}
    for lost in ({}, {0: Lost("gone", 1.0)}):
        report = RunReport("r1", folder, lost=lost, records=records, metrics=merged)
        conclude(report, plan, 1.0)
        print_report(replace(report, state="done"), console)
        print_report(report, console)
        json.dumps(report.to_json())


@FUZZ
@given(data=st.data())
def test_damaged_files_on_a_node_crash_no_reader(shared_folder: Path, data: st.DataObject) -> None:
    for name in ("state", "result"):
        message = json.loads(next(text for text in MESSAGES if text.startswith(f'{{"{name}"')))
        text = data.draw(damaged_text(json.dumps(message[name])))
        (shared_folder / f"{name}.json").write_text(text)
    (shared_folder / "node.json").write_text(data.draw(damaged_text(NODE)))
    messages: list[dict[str, Any]] = []
    watcher = Watcher(str(shared_folder), {}, [""])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watcher, "emit", messages.append)
        watcher.emit_once()
    assert all(json_records.message_in(json.dumps(one)) for one in messages), "every message sent is valid"
    folder = NodeFolder(str(shared_folder))
    json.dumps(control.status(folder))
    folder.recorded()


NODE = json.dumps({"run_id": "r1", "token": "t", "node_rank": 0, "grace": 1.0})


def test_malformed_outcome_and_process_files_are_ignored(tmp_path: Path) -> None:
    book = OutcomeBook(Journal(str(tmp_path), 0), 0, (0,))
    for folder in ("procs", "outcomes"):
        for text in ("5", '{"pid": "x"}', '{"name": "rank0", "node_rank": "0"}'):
            (tmp_path / folder / "rank0.json").write_text(text)
            book.look()
    assert not book.outcomes and not book.runners
