"""Tests of launches on this machine that fail: one clear message, the right exit status, and no process left behind."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launching import REPOSITORY, Launched, Running, launch, local_config, make_parts, start
from waiting import DEADLINE, stretched, wait_until

WAITS = """
import os, sys, time
print("here is rank", os.environ["RANK"], flush=True)
for second in range(300):
    time.sleep(1)
    if "talks" in sys.argv:
        print("still here", flush=True)
"""


@pytest.fixture(autouse=True)
def private_tmux(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use a tmux server for this test alone. Afterwards, assert that no session and no process is left."""
    monkeypatch.setenv("TMUX_TMPDIR", str(tmp_path))
    yield
    listed = subprocess.run(["tmux", "list-sessions"], capture_output=True, text=True)
    assert listed.returncode != 0, f"sessions left behind: {listed.stdout}"
    deadline = time.monotonic() + DEADLINE  # the log watcher on a node notices within a second that its reader is gone
    while (left := processes_about(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []


def processes_about(folder: Path) -> list[str]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if str(folder) in command:
            found.append(command)
    return found


def assert_refused(done: Launched, status: int, *words: str) -> None:
    assert done.status == status, done.output
    assert "Traceback" not in done.output
    assert done.output.count("error:") == 1, done.output
    for word in words:
        assert word in done.output


def test_mistakes_in_the_config_are_shown_with_their_lines_before_anything_starts(tmp_path: Path) -> None:
    text = "nodes: [alice@gnn1, alice@gnn2]\ndata: {dataset: synthetic}\ntrain:\n  epoch: 3\n  fanout: [3]\n"
    (tmp_path / "cluster.yml").write_text(text)
    done = launch(tmp_path / "cluster.yml")
    found = ["cluster.yml:4: unknown key `epoch`", "did you mean `epochs`?", "cluster.yml:5: unknown key `fanout`"]
    assert_refused(done, 2, *found)
    assert [path.name for path in tmp_path.iterdir()] == ["cluster.yml"]


def test_a_busy_master_port_is_reported_with_its_process(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        done = launch(local_config(tmp_path, [1]), "--master_port", str(port))
    assert_refused(done, 3, f"port {port} is in use", f"pid {os.getpid()}", "`run.master_port`", "node0")
    assert not (tmp_path / "node0").exists(), "a refused launch changes nothing on the node"
    assert done.result["exit_status"] == 3 and f"port {port}" in done.result["notes"][0]


@pytest.fixture
def made(tmp_path: Path, parts: Path) -> Path:
    config = local_config(tmp_path, [1, 1], data={"folder": str(parts)})
    (tmp_path / "waits.py").write_text(WAITS)
    return config


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    make_parts(local_config(folder, [1, 1]))
    return folder / "parts"


def assert_failed_before_start(done: Launched) -> None:
    assert done.result["state"] == "failed" and done.result["exit_status"] == 1
    assert "starting" not in done.output


@pytest.mark.slow
def test_a_missing_part_is_reported(made: Path, parts: Path) -> None:
    (parts / "part1").rename(parts / "away")
    try:
        done = launch(made, "--", "python", "waits.py")
    finally:
        (parts / "away").rename(parts / "part1")
    assert_refused(done, 1, f"{parts}/part1/", "is missing on this machine", "node1", "delete the partition folder")
    assert_failed_before_start(done)


def test_a_flipped_byte_in_a_part_is_found_before_it_is_used(made: Path, parts: Path) -> None:
    file = parts / "part1/nodes/node/attrs/x.npy"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    try:
        done = launch(made, "--", "python", "waits.py")
    finally:
        file.write_bytes(whole)
    assert_refused(done, 1, str(file), "differs from its manifest", "node1", "Delete the partition folder")
    assert_failed_before_start(done)
    assert not list(made.parent.glob("node1/**/x.npy")), "a damaged part is never put in place"


def test_ctrl_c_in_a_terminal_ends_everything_at_once(tmp_path: Path, parts: Path) -> None:
    # Ctrl-C in a terminal sends SIGINT to the whole process group of launch.py, not to launch.py alone.
    config = local_config(tmp_path, [2], data={"folder": str(parts), "num_parts": 2})
    (tmp_path / "waits.py").write_text(WAITS)
    running = Running(config, "--", "python", "waits.py", own_group=True).await_line("here is rank 0")
    before = time.monotonic()
    os.killpg(running.process.pid, signal.SIGINT)
    done = running.end()
    assert time.monotonic() - before < stretched(12)
    assert done.status == 130 and "Traceback" not in done.output, done.output
    assert done.result["state"] == "stopped"
    assert "Stopped by Ctrl-C after" in done.output


@pytest.mark.slow
def test_a_closed_terminal_detaches_the_run(tmp_path: Path, parts: Path) -> None:
    # Closing the terminal sends SIGHUP to launch.py and closes its output; the run continues on the node.
    made = local_config(tmp_path, [2], data={"folder": str(parts), "num_parts": 2})
    (tmp_path / "waits.py").write_text(WAITS)
    terminal, side = pty.openpty()
    command = [sys.executable, str(REPOSITORY / "launch.py"), "--config", str(made), "--", "python", "waits.py"]
    process = subprocess.Popen(
        command, cwd=made.parent, stdin=side, stdout=side, stderr=side, start_new_session=True,
        preexec_fn=_take_terminal,
    )  # fmt: skip
    os.close(side)
    shown = b""
    while b"here is rank 0" not in shown:
        shown += os.read(terminal, 4096)
    os.close(terminal)
    assert process.wait(DEADLINE) == 0
    (run_dir,) = (made.parent / "runs").iterdir()
    assert json.loads((run_dir / "launch.json").read_text())["detached"] is True
    assert not (run_dir / "result.json").exists(), "the run continues"
    files = list(made.parent.glob("node*/runs/*/node*/state.json"))
    wait_until(lambda: [json.loads(file.read_text())["state"] for file in files] == ["training"])
    stop_by_hand(made.parent)


def stop_by_hand(folder: Path) -> None:
    for run_dir in folder.glob("node*/runs/*/node*"):
        control = REPOSITORY / "launcher/node/control.py"
        subprocess.run([sys.executable, str(control), "stop", str(run_dir)], capture_output=True, timeout=DEADLINE)


def _take_terminal() -> None:
    # nohup sets SIGHUP to ignored
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.mark.slow
def test_a_closed_output_pipe_stops_the_run(made: Path) -> None:
    # The reader of the output ends before launch.py does, as in `launch.py … | head`.
    process = start(made, "--", "python", "waits.py", "talks")
    assert process.stdout is not None
    while "here is rank 0" not in process.stdout.readline():
        pass
    process.stdout.close()
    assert process.wait(DEADLINE) != 0
    states = [json.loads(path.read_text())["state"] for path in made.parent.glob("node*/runs/*/node*/result.json")]
    assert states == ["stopped", "stopped"]


@pytest.mark.slow
def test_ctrl_c_while_the_graph_is_cut_leaves_no_parts(tmp_path: Path) -> None:
    config = local_config(tmp_path, [1, 1], data={"options": {"num_nodes": 300_000, "avg_degree": 10}})
    running = Running(config).await_line("partition |")
    done = running.send(signal.SIGINT).end()
    assert done.status == 130 and "Traceback" not in done.output, done.output
    assert "nothing had been started" in done.output
    left = {path.name for path in tmp_path.iterdir()}
    # tmux creates a folder when it is called; the empty lock file stays, as another launch may wait for it
    assert left <= {"cluster.yml", "runs", "tmux-0", ".parts.lock"}
    assert done.result["state"] == "stopped" and "nothing had been started" in done.result["notes"][0]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--", "python", "nope.py"], "there is no file `nope.py` in"),
        (["--epochs", "7", "--", "python", "waits.py"], "--epochs is for the bundled trainer"),
    ],
)
def test_an_invalid_own_command_is_refused_before_anything_starts(made: Path, words: list[str], expected: str) -> None:
    done = launch(made, *words)
    assert done.status == 2 and expected in done.output, done.output
    assert not (made.parent / "runs").exists()


def test_a_missing_source_is_reported_before_any_connection(tmp_path: Path) -> None:
    config = local_config(tmp_path, [1], data={"dataset": "file", "source": "gone.pt", "options": {}})
    assert_refused(launch(config, "--dry-run"), 2, f"data.source: {tmp_path}/gone.pt does not exist")


def test_with_json_an_error_is_json_on_stdout(tmp_path: Path) -> None:
    command = [sys.executable, str(REPOSITORY / "launch.py"), "--config", "gone.yml", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 2
    printed = json.loads(done.stdout)
    assert (printed["kind"], printed["exit_status"]) == ("error", 2) and "gone.yml" in printed["message"]


def test_with_json_a_refusal_contains_the_findings(tmp_path: Path) -> None:
    config = local_config(tmp_path, [1, 1], data={"mode": "verify", "folder": "/nowhere/parts"})
    command = [sys.executable, str(REPOSITORY / "launch.py"), "--config", str(config), "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 3
    printed = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["stage"] for line in printed if line["kind"] == "stage"] == ["connect", "preflight", "end"]
    error = printed[-1]["message"]
    assert "node1: no partitioned graph: no manifest.json in /nowhere/parts" in error
    assert "gnnfleet partition make" in error


@pytest.mark.slow  # test_supervisor_messages tests this without launch.py
def test_an_own_command_that_does_not_exist_is_reported(made: Path) -> None:
    done = launch(made, "--", "no-such-program", "--lr", "1")
    assert done.status == 127 and "Traceback" not in done.output, done.output
    assert "cannot start no-such-program" in done.output
    first = json.loads((done.run_dir / "result.json").read_text())["first_failure"]
    assert first["returncode"] == 127
