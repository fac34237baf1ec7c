"""Tests of reading the Python stacks of other processes, with real processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launcher.node.diagnostics import stacks
from node_kit import NODE, PYTHON, ROOT, RunFolder, python
from waiting import stretched, wait_until

SITE = f"{NODE}/site"
STUCK = """
import multiprocessing, os, sys, threading, time
def load():
    time.sleep(60)
def work():
    load()
if sys.argv[1:] == ["fork"]:
    multiprocessing.get_context("fork").Process(target=work, daemon=True).start()
if sys.argv[1:] == ["usr1"]:
    import signal
    signal.signal(signal.SIGUSR1, lambda *_: print("mine", flush=True))
threading.Thread(target=load, daemon=True).start()
threading.Timer(0.3, print, ["up"], {"flush": True}).start()
load()
"""
AT_LOAD = "stuck.py:4 in load()"

Start = Callable[..., int]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    for folder in ("procs", "logs", "files"):
        (tmp_path / folder).mkdir()
    (tmp_path / "files" / "stuck.py").write_text(STUCK)
    return tmp_path


@pytest.fixture
def start(run_dir: Path) -> Iterator[Start]:
    """Yield a function that starts a rank, waits for its first output line, and returns its pid."""
    started: list[subprocess.Popen[str]] = []

    def one(rank: int, *argv: str, **more: str) -> int:
        env = {**os.environ, "PYTHONPATH": SITE, "GNNFLEET_RUN_DIR": str(run_dir), "RANK": str(rank), **more}
        command = argv or (PYTHON, str(run_dir / "files" / "stuck.py"))
        started.append(
            subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True)
        )  # fmt: skip
        assert started[-1].stdout is not None and started[-1].stdout.readline()
        return started[-1].pid

    yield one
    for process in started:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_stack_of_a_sleeping_rank(run_dir: Path, start: Start) -> None:
    pids = {rank: start(rank) for rank in range(3)}
    began = time.monotonic()
    found = stacks.collect(str(run_dir), pids)
    assert time.monotonic() - began < stretched(1.5)
    assert [lines[0] for lines in found.values()] == [AT_LOAD] * 3
    assert stacks.folded(found) == [f"ranks 0-2: {AT_LOAD}"]
    log = (run_dir / "logs" / "stacks-rank1.log").read_text().splitlines()
    assert sum(line.endswith("line 4 in load") for line in log) == 2, "both threads"
    assert all(line.partition(" ")[2] == expected for line, expected in zip(log, found[1], strict=True))


def test_two_requests_give_two_answers(run_dir: Path, start: Start) -> None:
    pid = start(0)
    wait_until(lambda: len(os.listdir(f"/proc/{pid}/task")) == 2)  # the thread that printed has ended
    first, second = (stacks.collect(str(run_dir), {0: pid}) for _ in range(2))
    assert first == second and (run_dir / "logs" / "stacks-rank0.log").read_text().count(AT_LOAD) == 2


def test_stacks_of_workers_forked_by_a_rank(run_dir: Path, start: Start) -> None:
    pid = start(0, PYTHON, str(run_dir / "files" / "stuck.py"), "fork")
    lines = stacks.collect(str(run_dir), {0: pid})[0]
    assert lines[0] == AT_LOAD and sum(line.startswith("process ") for line in lines) == 2
    assert sum(line.endswith("line 6 in work") for line in lines) == 1


def test_a_script_started_by_a_shell_is_found(run_dir: Path, start: Start) -> None:
    pid = start(0, "bash", "-c", f"{PYTHON} {run_dir}/files/stuck.py; true")
    assert stacks.collect(str(run_dir), {0: pid})[0][0] == AT_LOAD


def test_a_stopped_rank_gets_no_signal(run_dir: Path, start: Start) -> None:
    pids = {0: start(0), 1: start(1)}
    os.kill(pids[1], signal.SIGSTOP)
    wait_until(lambda: Path(f"/proc/{pids[1]}/stat").read_text().split()[2] == "T")
    found = stacks.collect(str(run_dir), pids)
    assert [lines[0] for lines in found.values()] == [
        AT_LOAD,
        "state T: stopped by SIGSTOP or a debugger; kill -CONT continues it",
    ]
    os.kill(pids[1], signal.SIGCONT)
    assert stacks.collect(str(run_dir), {1: pids[1]})[1][0] == AT_LOAD


@pytest.mark.parametrize("argv", [("bash", "-c", "echo up; sleep 60"), (PYTHON, "-I", "stuck.py")])
def test_processes_without_python_stacks_are_described_and_not_killed(
    argv: tuple[str, ...], run_dir: Path, start: Start
) -> None:
    words = [word.replace("stuck.py", str(run_dir / "files" / "stuck.py")) for word in argv]
    pid = start(0, *words)
    wait_until(lambda: "S (sleeping)" in Path(f"/proc/{pid}/status").read_text())
    began = time.monotonic()
    (first, *_) = stacks.collect(str(run_dir), {0: pid})[0]
    assert first.startswith("no Python stack, state S (sleeping)") and time.monotonic() - began < stretched(1)
    assert "S (sleeping)" in Path(f"/proc/{pid}/status").read_text()


def test_a_process_that_has_ended_is_reported(run_dir: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert stacks.collect(str(run_dir), {0: ended.pid})[0][0] == "no Python stack, state gone"


def test_a_rank_busy_in_c_code_answers(run_dir: Path, start: Start) -> None:
    # A rank that holds the GIL in C code for minutes, here in `pow` of huge numbers, still reports its stack.
    code = "print('up', flush=True)\ndef spin():\n    return pow(3, 10**8)\nspin()"
    pid = start(0, *python(code))
    time.sleep(0.2)
    assert stacks.collect(str(run_dir), {0: pid})[0][0] == "<string>:3 in spin()"


def test_a_dump_that_pauses_between_two_threads_is_read_to_its_end(run_dir: Path, start: Start) -> None:
    code = f"""
import signal, time
file = open({str(run_dir / "procs" / "stacks-rank0")!r}, "a", buffering=1)
def dump(*_):
    file.write('Thread 0x1 (most recent call first):\\n  File "other.py", line 1 in other\\n')
    time.sleep(0.2)
    file.write('Current thread 0x2 (most recent call first):\\n  File "stuck.py", line 4 in load\\n')
signal.signal(signal.SIGRTMAX - 4, dump)
print("up", flush=True)
while True:
    time.sleep(60)
"""
    assert stacks.collect(str(run_dir), {0: start(0, *python(code))})[0][0] == AT_LOAD


def test_a_scripts_own_signal_handlers_are_kept(run_dir: Path, start: Start) -> None:
    pid = start(0, PYTHON, str(run_dir / "files" / "stuck.py"), "usr1")
    assert stacks.collect(str(run_dir), {0: pid})[0][0] == AT_LOAD


# Our sitecustomize, which Python imports at its start.


def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    base = {name: value for name, value in os.environ.items() if name != "RANK" and not name.startswith("GNNFLEET")}
    return subprocess.run([PYTHON, "-c", code], env={**base, **env}, capture_output=True, text=True, timeout=30)


@pytest.mark.parametrize("folder", ["absent", "file/below"])
def test_an_unwritable_folder_does_not_stop_the_script(folder: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = run("print('fine')", PYTHONPATH=SITE, RANK="0", GNNFLEET_RUN_DIR=str(tmp_path / folder))
    assert (done.stdout, done.stderr, done.returncode) == ("fine\n", "", 0)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("rank", ["", "../x"])
def test_processes_that_are_no_rank_open_no_file(rank: str, run_dir: Path) -> None:
    done = run("print('fine')", PYTHONPATH=SITE, RANK=rank, GNNFLEET_RUN_DIR=str(run_dir))
    assert (done.stdout, done.stderr) == ("fine\n", "") and list((run_dir / "procs").iterdir()) == []


def test_the_users_sitecustomize_runs_too(run_dir: Path) -> None:
    (run_dir / "files" / "sitecustomize.py").write_text("import sys\nsys.own = __file__\nvalue = 7\n")
    code = "import sitecustomize, sys; print(sitecustomize.value, sys.own == sitecustomize.__file__)"
    done = run(code, PYTHONPATH=f"{SITE}:{run_dir}/files", RANK="0", GNNFLEET_RUN_DIR=str(run_dir))
    assert (done.stdout, done.stderr) == ("7 True\n", "")
    assert (run_dir / "procs" / "stacks-rank0").exists()


def test_an_error_in_the_users_sitecustomize_is_reported_by_python(run_dir: Path) -> None:
    (run_dir / "files" / "sitecustomize.py").write_text("1 / 0\n")
    with_us, without = (run("print(1)", PYTHONPATH=path) for path in (f"{SITE}:{run_dir}/files", f"{run_dir}/files"))
    assert with_us.stderr == without.stderr != "" and with_us.stdout == without.stdout


# A whole node

HANGS = """
import json, os, sys, time
rank, run_dir = int(os.environ["RANK"]), os.environ["GNNFLEET_RUN_DIR"]
def load(step):
    if rank == 1 and step == 5:
        time.sleep(60)
def wait_for_others(step):
    done = [f"{run_dir}/output/{other}-{step}" for other in range(3)]
    open(done[rank], "w").close()
    while not all(map(os.path.exists, done)):
        time.sleep(0.05)
with open(f"{run_dir}/metrics-rank{rank}.jsonl", "a", buffering=1) as file:
    for step in range(100):
        load(step)
        wait_for_others(step)
        line = {"t": time.time(), "kind": "step", "rank": rank, "epoch": 1, "step": step, "steps": 100, "loss": 0.5}
        file.write(json.dumps(line) + "\\n")
"""


def test_a_stalled_run_reports_the_line_that_blocks(tmp_path: Path) -> None:
    # One of three ranks sleeps in its fifth step; the finding about the stall contains the line where it sleeps.
    node = RunFolder(tmp_path / "node0", stall_after=3, on_stall="stop")
    script = tmp_path / "node0" / "files" / "train.py"
    script.parent.mkdir(parents=True)
    script.write_text(HANGS)
    node.ranks([PYTHON, str(script)], 3)
    node.spec["trainer"]["env"]["PYTHONPATH"] = f"{SITE}:{ROOT}"
    try:
        result = node.run(timeout=60)
    finally:
        node.kill()
    assert result["state"] == "failed"
    (finding,) = result["findings"]
    assert finding["kind"] == "stall" and finding["stop"]
    assert "no process has trained a step for " in finding["text"]
    waiting, asleep = finding["stacks"]
    assert re.fullmatch(r"ranks 0, 2: train\.py:1[12] in wait_for_others\(\)", waiting)
    assert asleep == "rank 1: train.py:6 in load()"
    assert any("train.py" in line and "line 6 in load" in line for line in node.log("stacks-rank1"))
