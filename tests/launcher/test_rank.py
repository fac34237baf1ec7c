"""Tests of the rank runner: the log and the outcome that it writes for a rank."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.node import log_lines
from launcher.node.diagnostics import oom
from launcher.node.diagnostics.oom import OomWatch, killed_for_memory, limit, oom_kills
from launcher.node.exit_description import describe, size
from launcher.node.log_lines import LineLog, TracebackFinder
from launcher.report.outcome import Outcome
from node_kit import PYTHON, RANK_RUNNER, python
from waiting import runs, wait_until

ENVIRONMENT = {**os.environ, "RANK": "5", "LOCAL_RANK": "1", "NODE_RANK": "2", "GNNFLEET_GRACE": "0.5"}


def rank_argv(folder: Path, argv: list[str]) -> list[str]:
    return [PYTHON, str(RANK_RUNNER), "--run-dir", str(folder), "--", *argv]


def run_rank(folder: Path, code: str) -> int:
    argv = rank_argv(folder, python(code))
    return subprocess.run(argv, env=ENVIRONMENT, capture_output=True, timeout=30, check=False).returncode


def logged(folder: Path) -> list[str]:
    text = (folder / "logs" / "rank5.log").read_text(encoding="utf-8")
    return [line.partition(" ")[2] for line in text.split("\n")[:-1]]


def outcome(folder: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((folder / "outcomes" / "rank5.json").read_text())
    return record


def test_outcome_of_a_successful_rank(tmp_path: Path) -> None:
    before = time.time()
    assert run_rank(tmp_path, "print('a'); import sys; print('b', file=sys.stderr)") == 0
    record = outcome(tmp_path)
    assert logged(tmp_path) == ["a", "b"] == record["tail"]
    names = ("name", "node_rank", "rank", "returncode", "signal", "failed", "stopped", "oom", "traceback")
    assert [record[name] for name in names] == ["rank5", 2, 5, 0, None, False, False, False, []]
    assert before <= record["started"] <= record["ended"] <= time.time()
    assert record["max_rss"] > 1e6


@pytest.mark.parametrize(("code", "status"), [("exit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 137)])
def test_passes_the_exit_status_on(tmp_path: Path, code: str, status: int) -> None:
    assert run_rank(tmp_path, code) == status == outcome(tmp_path)["returncode"]


def test_environment_of_the_rank(tmp_path: Path) -> None:
    names = ["RANK", "LOCAL_RANK", "NODE_RANK", "PYTHONUNBUFFERED", "PYTHONFAULTHANDLER"]
    run_rank(tmp_path, f"import os; print(*[os.environ[name] for name in {names}])")
    assert logged(tmp_path) == ["5 1 2 1 1"]


def test_segfault_records_the_python_stack(tmp_path: Path) -> None:
    run_rank(tmp_path, "import ctypes; ctypes.string_at(0)")
    assert outcome(tmp_path)["signal"] == "SIGSEGV"
    assert "Fatal Python error: Segmentation fault" in outcome(tmp_path)["tail"]
    assert re.fullmatch(r"in string_at\(\) at .*ctypes/__init__\.py:\d+", outcome(tmp_path)["note"])
    assert outcome(tmp_path)["traceback"][0] == "Fatal Python error: Segmentation fault"
    assert outcome(tmp_path)["traceback"][-1] == '  File "<string>", line 1 in <module>'


def test_abort_during_interpreter_shutdown_does_not_hide_the_exception(tmp_path: Path) -> None:
    # Threads of gloo may abort the process after Python has printed its traceback and has no frame left; the outcome
    # must still contain the traceback.
    printed = '[rank5]: Traceback (most recent call last):\n[rank5]:   File "a.py", line 1\n[rank5]: ValueError: age\n'
    printed += "Fatal Python error: Aborted\n\nCurrent thread 0x00 (most recent call first):\n  <no Python frame>\n"
    code = f"import faulthandler, os, sys; faulthandler.disable(); sys.stderr.write({printed!r}); os.abort()"
    assert run_rank(tmp_path, code) == 134
    assert "ValueError: age" in outcome(tmp_path)["traceback"]


@pytest.mark.parametrize(
    ("code", "follow_up"),
    [
        ("raise ValueError('3 columns')", False),
        ("raise RuntimeError('[gloo/transport/tcp/pair.cc:553] Connection closed by peer')", True),
        ("class DistBackendError(RuntimeError): pass\nraise DistBackendError('remote process exited')", True),
        # the trainer's own word counts, not the words of its message
        ("report(False); sys.exit('error: parts cannot be read: Connection reset by peer')", False),
        ("report(True); sys.exit('error: rank 0 (node0, h): 3 columns')", True),
        ("report(True); os.kill(os.getpid(), 9)", False),
    ],
)
def test_whether_a_failure_follows_from_the_end_of_another_process(tmp_path: Path, code: str, follow_up: bool) -> None:
    file = tmp_path / "procs/error-rank5.json"
    report = "import json, os, sys\ndef report(yes): "
    report += f"open({str(file)!r}, 'w').write(json.dumps(dict(type='E', follow_up=yes)))"
    assert run_rank(tmp_path, f"{report}\n{code}") != 0
    assert outcome(tmp_path)["follow_up"] == follow_up


def test_an_exception_with_a_long_text_is_shortened_in_messages(tmp_path: Path) -> None:
    assert run_rank(tmp_path, "raise ValueError('wrong rows: ' + '7 ' * 20_000)") == 1
    record = outcome(tmp_path)
    words = describe(record)
    assert words.startswith("raised ValueError: wrong rows: 7 7 ") and words.endswith("7 …") and len(words) < 1100
    assert len("".join(record["traceback"])) > 20_000
    shown = Outcome.from_record(record | {"traceback": tuple(record["traceback"])}, "host").last_lines
    assert len(shown) > 1 and max(map(len, shown)) < 1100


def test_an_error_of_the_trainer_is_the_reason_of_the_end(tmp_path: Path) -> None:
    report = json.dumps({"type": "PartitionError", "follow_up": False, "message": "part 3: edges.npy is damaged"})
    code = f"import sys; open({str(tmp_path / 'procs/error-rank5.json')!r}, 'w').write({report!r}); sys.exit(1)"
    run_rank(tmp_path, code)
    assert describe(outcome(tmp_path)) == "ended with exit status 1: part 3: edges.npy is damaged"


def test_invalid_utf8_and_unfinished_last_line(tmp_path: Path) -> None:
    run_rank(tmp_path, r"import os; os.write(1, b'caf\xe9 \xff\nZ\xc3\xbcrich')")
    assert logged(tmp_path) == ["caf\ufffd \ufffd", "Zürich"]


def test_only_the_last_state_of_a_progress_bar_is_logged(tmp_path: Path) -> None:
    bar = "for i in range(101): print(f'\\r{i}%', end='', flush=True)\nprint()\n"
    run_rank(tmp_path, bar + "print('dos', end='\\r\\n')\nprint('50%\\r99%\\r', end='')")
    assert logged(tmp_path) == ["100%", "dos", "99%"]


def test_a_long_progress_bar_is_logged_before_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_lines, "SNAPSHOT_EVERY", 0.0)
    log = LineLog(str(tmp_path / "log"))
    log.feed(b"\r10%")
    log.feed(b"\r20%\r30%")
    assert list(log.tail) == ["10%", "30%"]


@given(st.lists(st.sampled_from([b"a", b"\xc3", b"\xbc", b"\r", b"\n", b"12%"]), max_size=30), st.data())
def test_lines_do_not_depend_on_the_chunks_of_the_output(data: list[bytes], draw: st.DataObject) -> None:
    whole = b"".join(data)
    cut = draw.draw(st.integers(0, len(whole)))
    assert lines_of(whole) == lines_of(whole[:cut], whole[cut:])


def lines_of(*parts: bytes) -> list[str]:
    log = LineLog(os.devnull)
    for part in parts:
        log.feed(part)
    log.close()
    return list(log.tail)


def test_burst_of_ten_megabytes_loses_nothing(tmp_path: Path) -> None:
    run_rank(tmp_path, "for i in range(100_000): print(f'{i:06d}', 'x' * 93)")
    assert [line[:6] for line in logged(tmp_path)] == [f"{i:06d}" for i in range(100_000)]
    assert len(outcome(tmp_path)["tail"]) == 40


def test_one_very_long_line_is_cut_between_characters(tmp_path: Path) -> None:
    run_rank(tmp_path, "print('ü' * 100_001)")
    pieces = logged(tmp_path)
    assert "".join(pieces) == "ü" * 100_001
    assert max(len(piece.encode()) for piece in pieces) <= log_lines.MAX_LINE


def test_stop_is_forwarded_and_recorded(tmp_path: Path) -> None:
    code = "import time\ntry: print('up', flush=True); time.sleep(60)\nfinally: print('bye')"
    runner = subprocess.Popen(
        rank_argv(tmp_path, python("import signal; signal.signal(15, lambda *_: exit(4))\n" + code)), env=ENVIRONMENT
    )
    wait_until(lambda: (tmp_path / "logs/rank5.log").exists() and logged(tmp_path) == ["up"])
    runner.send_signal(signal.SIGTERM)
    assert runner.wait(10) == 4 and logged(tmp_path) == ["up", "bye"]
    assert outcome(tmp_path)["stopped"] and not outcome(tmp_path)["failed"]


def test_a_signal_from_elsewhere_is_a_failure_not_a_stop(tmp_path: Path) -> None:
    runner = subprocess.Popen(rank_argv(tmp_path, python("import time; time.sleep(60)")), env=ENVIRONMENT)
    record = wait_until(lambda: next(iter(tmp_path.glob("procs/rank5.json")), None))
    os.kill(json.loads(record.read_text())["pid"], signal.SIGTERM)
    assert runner.wait(10) == 128 + signal.SIGTERM
    assert outcome(tmp_path)["failed"] and not outcome(tmp_path)["stopped"]


def test_processes_left_by_the_rank_are_killed(tmp_path: Path) -> None:
    code = (
        "import subprocess; print(subprocess.Popen(['sleep', '60'], start_new_session=True).pid); raise SystemExit(1)"
    )
    assert run_rank(tmp_path, code) == 1
    assert not runs(int(logged(tmp_path)[0]))


def test_full_disk_does_not_stop_the_rank(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank5.log").symlink_to("/dev/full")
    assert run_rank(tmp_path, "print('a'); open('/dev/null').close()") == 0
    assert outcome(tmp_path)["tail"] == ["a"]


@pytest.mark.parametrize(
    ("name", "text"),
    [("memory.events", "low 0\noom 2\noom_kill 3\n"), ("memory.oom_control", "under_oom 0\noom_kill 3\n")],
)
def test_oom_kills_are_read_from_either_cgroup_version(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    assert oom_kills([str(tmp_path / "absent"), str(tmp_path / name)]) == 3


@pytest.mark.parametrize(
    ("text", "bytes_"), [("2000000000", 2_000_000_000), ("max", None), ("9223372036854771712", None)]
)
def test_memory_limit(tmp_path: Path, text: str, bytes_: int | None) -> None:
    (tmp_path / "memory.max").write_text(text + "\n")
    assert limit([str(tmp_path / "absent"), str(tmp_path / "memory.max")]) == bytes_


class Machine:
    """What the kernel says about memory, by functions that replace those of the module ``oom``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, log: Path, *, of_group: bool, available: float) -> None:
        self.clock, self.kills, self.available, self.log = 100.0, 0, available, log
        monkeypatch.setattr(time, "monotonic", lambda: self.clock)
        monkeypatch.setattr(oom, "oom_kills", lambda: self.kills)
        monkeypatch.setattr(oom, "available_share", lambda: self.available)
        monkeypatch.setattr(oom, "counts_our_group", lambda: of_group)

    def kill(self, pid: int) -> None:
        self.kills += 1
        if self.log.parent.is_dir():
            with self.log.open("a") as file:
                file.write(f"3,12,99,-;Memory cgroup out of memory: Killed process {pid} (python3) total-vm:9kB\n")


def test_processes_killed_for_memory_are_read_from_the_kernel_log() -> None:
    lines = [
        "6,1234,99,-;oom_reaper: reaped process 41 (python3)",
        "3,1235,99,-;Out of memory: Killed process 42 (python3) total-vm:9kB, anon-rss:8kB, UID:0",
        "3,1236,99,-;Memory cgroup out of memory: Killed process 43 (python3) total-vm:9kB, anon-rss:8kB",
        "3,1237,99,-;somebody said: Killed process 44 (python3)",
    ]
    assert killed_for_memory(lines) == {42, 43}


def test_an_old_kill_for_memory_does_not_explain_a_later_kill(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # If the kernel killed a process for lack of memory more than some seconds before this process was killed, it killed
    # another process, e.g. a loader worker.
    machine = Machine(monkeypatch, tmp_path / "absent/kmsg", of_group=True, available=1.0)
    watch = OomWatch(str(machine.log))
    machine.kill(77)
    assert watch.killed(5)
    for machine.clock in (101.0, 110.0, 120.0, 130.0):
        watch.look()
    assert not watch.killed(5)


@pytest.mark.parametrize("of_group", [True, False])
def test_the_kernel_log_tells_whether_another_process_was_killed_for_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, of_group: bool
) -> None:
    # The processes 5 and 6 were killed by `kill -9`. The pid 6 was once that of a process killed for lack of memory.
    monkeypatch.setattr(oom, "_FIRST_PID_NAMESPACE", os.readlink("/proc/self/ns/pid"))
    machine = Machine(monkeypatch, tmp_path / "kmsg", of_group=of_group, available=0.0)
    machine.kill(6)
    watch = OomWatch(str(machine.log))
    machine.kill(77)
    assert not watch.killed(5) and watch.killed(77) and not watch.killed(6)
    machine.kill(5)
    assert watch.killed(5) and watch.killed(77)


@pytest.mark.parametrize(("available", "killed"), [(0.01, True), (0.6, False)])
def test_the_count_of_the_machine_is_used_if_memory_was_short(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, available: float, killed: bool
) -> None:
    # In a container: the kernel log has other pids. With enough memory, the kill was due to the limit of another group.
    monkeypatch.setattr(oom, "_FIRST_PID_NAMESPACE", "pid:[1]")
    machine = Machine(monkeypatch, tmp_path / "kmsg", of_group=False, available=available)
    watch = OomWatch(str(machine.log))
    machine.kill(5)
    machine.available = 1.0
    assert watch.killed(5) == killed


def memory_cgroup(limit_bytes: int) -> Path:
    """Create a memory cgroup with a limit, and return its folder. Skips the test if this is impossible."""
    version1 = Path("/sys/fs/cgroup/memory")
    top = version1 if version1.is_dir() else Path("/sys/fs/cgroup")
    made = top / f"gnnfleet-test-{os.getpid()}"
    try:
        made.mkdir()
        (made / ("memory.limit_in_bytes" if version1.is_dir() else "memory.max")).write_text(str(limit_bytes))
    except OSError as error:
        if made.is_dir():
            made.rmdir()
        pytest.skip(f"no memory cgroup can be made here: {error}")
    return made


def test_rank_that_exceeds_its_memory_limit(tmp_path: Path) -> None:
    group = memory_cgroup(200_000_000)
    greedy = "x = []\nwhile True: x.append(bytearray(b'1' * 10_000_000))"
    line = f"echo $$ > {group}/cgroup.procs && exec {shlex.join(rank_argv(tmp_path, python(greedy)))}"
    try:
        done = subprocess.run(["bash", "-c", line], env=ENVIRONMENT, capture_output=True, timeout=30, check=False)
    finally:
        wait_until(lambda: not (group / "cgroup.procs").read_text().split())
        group.rmdir()
    record = outcome(tmp_path)
    assert done.returncode == 137 and record["oom"] and record["failed"]
    assert describe(record) == f"ran out of memory (killed by the kernel; limit {size(200_000_000 // 4096 * 4096)})"


TRACEBACK = ["Traceback (most recent call last):", '  File "a.py", line 1, in <module>', "    f()", "ValueError: no"]
CHAINS = [
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
]


def found_in(*parts: list[str]) -> list[str]:
    finder = TracebackFinder()
    for line in [line for part in parts for line in part]:
        finder.feed(line)
    return finder.lines


@pytest.mark.parametrize("chain", CHAINS)
def test_chained_exceptions_are_kept_whole(chain: str) -> None:
    second = [*TRACEBACK[:-1], "RuntimeError: so this"]
    whole = [*TRACEBACK, "", chain, "", *second]
    assert found_in(["epoch 1"], whole, ["", "ended"]) == whole


def test_the_first_traceback_is_recorded() -> None:
    assert found_in(TRACEBACK, [*TRACEBACK[:-1], "OSError: later"]) == TRACEBACK


def test_torchs_rank_prefix_is_removed() -> None:
    assert found_in([f"[rank3]: {line}" for line in TRACEBACK]) == TRACEBACK


def test_messages_of_several_lines_are_kept() -> None:
    message = ["RuntimeError: sizes differ", "\tweight: 3 and 4", "  bias: 1 and 2"]
    assert found_in(TRACEBACK[:-1], message, ["", "INFO next epoch"]) == [*TRACEBACK[:-1], *message]


def test_traceback_of_a_real_rank(tmp_path: Path) -> None:
    load = "def load():\n    return {}['x']\n"
    code = load + "try:\n    load()\nexcept KeyError as e:\n    raise RuntimeError('no x') from e"
    assert run_rank(tmp_path, code) == 1
    found = outcome(tmp_path)["traceback"]
    assert "KeyError: 'x'" in found and found[-1] == "RuntimeError: no x"
    assert sum(bool(re.match("Traceback", line)) for line in found) == 2


def test_runs_without_torch(tmp_path: Path) -> None:
    # The rank runner works in a Python that sees no installed packages (`python -S -E`).
    argv = rank_argv(tmp_path, ["true"])
    done = subprocess.run([argv[0], "-S", "-E", *argv[1:]], env=ENVIRONMENT, capture_output=True, timeout=20)
    assert (done.returncode, done.stderr) == (0, b"")
