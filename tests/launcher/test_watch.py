"""Tests of ``watch.py``, which streams the logs of a node to the launcher: each line is sent once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from launcher.node.record import stamp, write_json
from launcher.node.watch import Watcher
from node_kit import NODE, PYTHON, RunFolder, python
from waiting import wait_until

LINES = 20_000
TALK = f"import time\nfor i in range({LINES}):\n    print(i, 'x' * 100)\n    if i % 200 == 0: time.sleep(0.02)"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunFolder]:
    folder = RunFolder(tmp_path / "node0")
    yield folder
    folder.kill()


class Watch:
    def __init__(self, run: RunFolder, offsets: dict[str, int] | None = None) -> None:
        argv = [PYTHON, str(NODE / "watch.py"), str(run.path), "--offsets", json.dumps(offsets or {})]
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.messages: list[dict[str, Any]] = []
        assert self.process.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(self.process.stdout,))
        self._reader.start()

    def _read(self, stdout: IO[str]) -> None:
        for line in stdout:
            if not line.endswith("\n"):
                return  # a line cut off at the end of the connection is ignored
            self.messages.append(json.loads(line))

    def wait(self, timeout: float = 20.0) -> int:
        status = self.process.wait(timeout)
        self._reader.join()
        return status

    def offsets(self) -> dict[str, int]:
        return {message["file"]: message["offset"] for message in self.messages if "file" in message}

    def lines(self, name: str) -> list[str]:
        return [line for message in self.messages if message.get("file") == name for line in message["lines"]]


def texts(lines: list[str]) -> list[str]:
    return [line.split(" ")[1] for line in lines]


def test_reports_all_lines_and_the_result_last(run: RunFolder) -> None:
    watch = Watch(run)  # before any file exists
    run.rank(
        python("import json; print('hello'); open('metrics-rank0.jsonl', 'w').write(json.dumps({'loss': 1}) + chr(10))")
    )
    run.run()
    assert watch.wait() == 0
    assert texts(watch.lines("logs/rank0.log")) == ["hello"]
    assert watch.lines("metrics-rank0.jsonl") == ['{"loss": 1}']
    assert json.loads(watch.lines("events.jsonl")[-1])["kind"] == "node-end"
    assert watch.messages[-1]["result"]["state"] == "done"
    states = [message["state"]["state"] for message in watch.messages if "state" in message]
    assert states[-1] == "done"


def test_lines_are_reported_while_the_run_goes_on(run: RunFolder) -> None:
    run.rank(python("import time; print('up'); time.sleep(60)")).start()
    watch = Watch(run)
    wait_until(lambda: texts(watch.lines("logs/rank0.log")) == ["up"])
    heartbeats = sum("state" in message for message in watch.messages)
    wait_until(lambda: sum("state" in message for message in watch.messages) > heartbeats + 1, timeout=5)
    (run.path / "control" / "stop").touch()
    run.end()
    assert watch.wait() == 0


def test_restart_from_offsets_neither_loses_nor_repeats_lines(run: RunFolder) -> None:
    run.rank(python(TALK)).start()
    messages: list[str] = []
    offsets: dict[str, int] = {}
    for _ in range(3):
        watch = Watch(run, offsets)
        wait_until(lambda watch=watch: len(watch.lines("logs/rank0.log")) > 500)
        watch.process.kill()
        watch.wait()
        messages += watch.lines("logs/rank0.log")
        offsets.update(watch.offsets())
    last = Watch(run, offsets)
    run.end()
    assert last.wait() == 0
    assert texts(messages + last.lines("logs/rank0.log")) == [str(i) for i in range(LINES)]


def test_unfinished_line_is_reported_when_it_is_complete(run: RunFolder) -> None:
    (run.path / "logs").mkdir()
    log = (run.path / "logs" / "rank0.log").open("a")
    log.write("one\ntw")
    log.flush()
    watch = Watch(run)
    wait_until(lambda: watch.lines("logs/rank0.log") == ["one"])
    log.write("o\n" + "three" * 100_000 + "\nfour")
    log.close()
    write_json(str(run.path / "result.json"), {"state": "done"})
    assert watch.wait() == 0
    assert watch.lines("logs/rank0.log") == ["one", "two", "three" * 100_000]


def test_killed_supervisor_is_reported_as_lost(run: RunFolder) -> None:
    run.rank(python("import time; print('up'); time.sleep(60)")).start()
    watch = Watch(run)
    wait_until(lambda: texts(watch.lines("logs/rank0.log")) == ["up"])
    run.supervisor.kill()
    run.supervisor.wait()
    assert watch.wait() == 3
    lost = watch.messages[-1]["lost"]
    assert (
        f"the supervisor (pid {run.supervisor.pid}) is gone" in lost["reason"] and lost["state"]["state"] == "training"
    )


def test_last_lines_of_a_rank_are_reported_before_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    watcher = Watcher(str(tmp_path), {})
    (tmp_path / "logs").mkdir()
    (tmp_path / "events.jsonl").write_text('{"kind": "first"}\n')
    scan = watcher.files

    def a_rank_ends_meanwhile() -> Iterator[tuple[str, int]]:
        yield from scan()
        with (tmp_path / "events.jsonl").open("a") as file:
            file.write('{"kind": "process-exit"}\n')
        (tmp_path / "logs/rank0.log").write_text("last words\n")

    monkeypatch.setattr(watcher, "files", a_rank_ends_meanwhile)
    watcher.emit_lines()
    monkeypatch.setattr(watcher, "files", scan)
    watcher.emit_lines()
    messages = [line for each in capsys.readouterr().out.splitlines() for line in json.loads(each)["lines"]]
    assert messages == ['{"kind": "first"}', "last words", '{"kind": "process-exit"}']


@pytest.mark.parametrize("end", ["stdin", "stdout"])
def test_ends_when_the_connection_closes(run: RunFolder, end: str) -> None:
    write_json(
        str(run.path / "state.json"),
        {"state": "training", "time": time.time(), "pid": os.getpid(), "start_ticks": own_ticks()},
    )
    argv = [PYTHON, str(NODE / "watch.py"), str(run.path)]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.readline()
    getattr(process, end).close()
    write_json(
        str(run.path / "state.json"),
        {"state": "stopping", "time": time.time(), "pid": os.getpid(), "start_ticks": own_ticks()},
    )
    assert process.wait(5) == 1 and process.stderr.read() == b""


def own_ticks() -> int:
    return int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])


@pytest.mark.slow
def test_idle_watcher_uses_almost_no_cpu(run: RunFolder) -> None:
    run.rank(python("import time; time.sleep(60)")).start()
    run.pid("rank0")
    watch = Watch(run)
    time.sleep(0.5)
    before = cpu_seconds(watch.process.pid)
    time.sleep(3)
    assert cpu_seconds(watch.process.pid) - before < 0.15
    os.kill(run.supervisor.pid, signal.SIGTERM)
    run.end()
    watch.wait()


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def once(run: RunFolder, *words: str) -> tuple[int, list[dict[str, Any]]]:
    argv = [PYTHON, str(NODE / "watch.py"), str(run.path), "--once", *words]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=20, stdin=subprocess.DEVNULL, check=False)
    assert done.stderr == ""
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


def write_log(run: RunFolder, name: str, count: int, start: float = 1_000_000.0) -> None:
    (run.path / "logs").mkdir(exist_ok=True)
    lines = [f"{stamp(start + i)} {i} {'x' * (i * 37 % 500)}\n" for i in range(count)]
    (run.path / "logs" / f"{name}.log").write_text("".join(lines))


def texts_of(messages: list[dict[str, Any]], name: str) -> list[str]:
    return texts([line for message in messages if message.get("file") == name for line in message["lines"]])


def test_once_reports_a_nodes_state_and_ends(run: RunFolder) -> None:
    status, messages = once(run, "--only", "")
    assert status == 0 and list(messages[-1]) == ["now"], "the run has not started"
    run.rank(python("import time; print('up', flush=True); time.sleep(60)")).start()
    wait_until(run.says("rank0", "up"))
    status, messages = once(run, "--only", "")
    assert status == 0 and [next(iter(message)) for message in messages] == ["state", "now"]
    assert messages[0]["state"]["state"] == "training" and abs(messages[1]["now"] - time.time()) < 5
    run.supervisor.kill()
    run.supervisor.wait()
    status, messages = once(run, "--only", "")
    assert status == 3 and "is gone" in messages[-1]["lost"]["reason"]


def test_once_reports_the_result_of_an_ended_run(run: RunFolder) -> None:
    run.rank(python("print('hello')")).run()
    status, messages = once(run, "--only", "logs/rank*.log")
    assert status == 0 and messages[-1]["result"]["state"] == "done"
    assert {message["file"] for message in messages if "file" in message} == {"logs/rank0.log"}
    assert texts_of(messages, "logs/rank0.log") == ["hello"]


@pytest.mark.parametrize("since", [0, 1, 2, 500, 998, 999])
def test_since_starts_at_that_time(run: RunFolder, since: int) -> None:
    write_log(run, "rank0", 1000)
    (run.path / "metrics-rank0.jsonl").write_text("".join(f'{{"t": {1_000_000 + i}}}\n' for i in range(1000)))
    _, messages = once(run, "--since", str(1_000_000 + since))
    assert texts_of(messages, "logs/rank0.log") == [str(i) for i in range(since, 1000)]
    metrics = [
        line for message in messages if message.get("file") == "metrics-rank0.jsonl" for line in message["lines"]
    ]
    assert [json.loads(line)["t"] for line in metrics] == [1_000_000 + i for i in range(since, 1000)]
    _, messages = once(run, "--since", str(1_000_000 + since - 0.5), "--tail", "3")
    assert texts_of(messages, "logs/rank0.log") == [str(i) for i in range(max(since, 997), 1000)]


def test_since_after_the_last_line_reports_none(run: RunFolder) -> None:
    write_log(run, "rank0", 10)
    assert texts_of(once(run, "--since", "2000000")[1], "logs/rank0.log") == []


@pytest.mark.parametrize("tail", [0, 1, 7, 4999, 5000, 6000])
def test_tail_gives_the_last_lines_of_a_long_file(run: RunFolder, tail: int) -> None:
    write_log(run, "rank0", 5000)
    expected = [str(i) for i in range(max(0, 5000 - tail), 5000)]
    assert texts_of(once(run, "--tail", str(tail))[1], "logs/rank0.log") == expected


def test_paths_that_are_no_file_are_ignored(tmp_path: Path) -> None:
    (tmp_path / "logs" / "rank0.log").mkdir(parents=True)
    (tmp_path / "events.jsonl").symlink_to(tmp_path / "gone")
    (tmp_path / "a.jsonl").write_text('{"t": 1}\n')
    argv = [PYTHON, str(NODE / "watch.py"), str(tmp_path), "--once"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=False)
    messages = [json.loads(line) for line in done.stdout.splitlines()]
    assert (done.returncode, done.stderr) == (0, "")
    assert [message.get("file") for message in messages] == ["a.jsonl", None]
