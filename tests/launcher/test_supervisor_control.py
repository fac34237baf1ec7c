"""Tests of ``control.py``, which stops a node or reports its state, even without a working supervisor."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fast_cases import fast_cases
from launcher.node import leases, procs
from node_kit import NODE, PYTHON, MakeFolder, RunFolder, python
from peers_kit import SERVE, SLEEP, Run
from waiting import DEADLINE, stretched, wait_until


def test_control_status_and_stop(folder: MakeFolder) -> None:
    run = folder(server=python(SERVE)).rank(python(SLEEP)).start()
    run.pid("rank0")
    status = control("status", run)
    assert status["alive"] and status["state"] == "training" and status["result"] is None
    assert sorted((p["name"], p["alive"]) for p in status["processes"]) == [
        ("rank0", True),
        ("runner0", True),
        ("server", True),
    ]
    assert {"clock_offset", "peers", "ranks", "findings"} <= set(status) and status["damage"] == ""
    stopped = {"stopped": True, "killed": [], "leftovers": [], "notes": []}
    assert control("stop", run) == {**stopped, "was": "training"}
    assert run.end()["state"] == "stopped"
    assert control("stop", run) == {**stopped, "was": "stopped"}
    after = control("status", run)
    assert not after["alive"] and after["result"]["state"] == "stopped"
    (run.path / "result.json").unlink()
    assert control("stop", run)["was"] == "lost"
    (run.path / "state.json").unlink()
    assert control("stop", run)["was"] == "not started"


def test_control_stops_a_node_with_a_stopped_supervisor(folder: MakeFolder) -> None:
    run = folder(server=python(SERVE)).rank(python(SLEEP)).start()
    run.pid("rank0")
    os.kill(run.supervisor.pid, signal.SIGSTOP)  # type: ignore[union-attr]
    report = control("stop", run, "--timeout", "0.5")
    assert report["stopped"] and report["leftovers"] == [] and len(report["killed"]) == 4
    assert run.supervisor is not None and run.supervisor.wait(5) == -signal.SIGKILL and run.processes() == []


def test_control_on_a_folder_without_a_run(tmp_path: Path) -> None:
    argv = [PYTHON, str(NODE / "control.py"), "stop", str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=20)
    assert done.returncode == 1 and done.stderr == f"control: no run in {tmp_path} (it has no node.json)\n"


def control(action: str, run: RunFolder, *options: str) -> dict[str, Any]:
    argv = [PYTHON, str(NODE / "control.py"), action, str(run.path), *options]
    answer: dict[str, Any] = json.loads(subprocess.run(argv, capture_output=True, check=True, timeout=20).stdout)
    return answer


def test_requester_and_reason_of_a_stop_are_in_the_result(folder: MakeFolder) -> None:
    run = folder().rank(python(SLEEP)).start()
    run.pid("rank0")
    control("stop", run, "--by", "alice@laptop", "--why", "gnnfleet stop")
    result = run.end()
    assert result["asked"] == {"by": "alice@laptop", "why": "gnnfleet stop", "now": False}
    assert result["reason"] == "stop requested by alice@laptop (gnnfleet stop)"


def test_a_supervisor_that_waits_for_its_trackers_writes_its_result(folder: MakeFolder) -> None:
    run = folder()
    track = "import os, time\nwhile not os.path.exists('track/end.json'): time.sleep(0.05)\ntime.sleep(5)"
    command = {"argv": python(track), "env": {}, "cwd": str(run.path), "job": {"trackers": ["wandb"]}}
    run.spec["tracker"] = command
    run.rank(python(SLEEP)).start()
    wait_until(run.says("rank0", "up"))
    assert control("stop", run, "--timeout", "3")["killed"] == []
    assert run.end()["state"] == "stopped"


def test_control_stop_now_skips_the_grace_period(folder: MakeFolder) -> None:
    run = folder(grace=30.0).rank(python("import signal; signal.signal(15, signal.SIG_IGN); " + SLEEP)).start()
    wait_until(run.says("rank0", "up"))
    began = time.monotonic()
    assert control("stop", run, "--now")["stopped"]
    assert time.monotonic() - began < stretched(5) and run.end()["state"] == "stopped"


def test_a_run_whose_cpus_another_run_took_at_the_same_time_says_so(
    folder: MakeFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GNNFLEET_LEASES", str(tmp_path / "leases"))
    for run_id, resources in (("other", ["cpu:other-node0"]), ("gpus", ["cpu:gpus-node0", "cuda:0"])):
        assert leases.take(resources, leases.this_process(run_id, 0, "bob@desk")) == []
    for own, seen in ((["cpu:test-node0"], ["other"]), (["cuda:1"], [])):
        run = folder(leases=own).rank(python("pass"))
        assert run.run()["state"] == "done"
        events = [event for event in run.events() if event["kind"] == "shares-cpus"]
        assert [event["run"] for event in events] == seen
        assert all("its CPUs are held by run other of " in event["text"] for event in events)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to(path.name)])
def test_pipes_and_folders_in_the_place_of_files_of_a_run_stop_nobody(
    folder: MakeFolder, make: Callable[[Path], None]
) -> None:
    run = folder(server=python(SERVE)).rank(python(SLEEP)).start()
    run.pid("rank0")
    for name in ("events.jsonl", "node.json", "metrics-rank0.jsonl", "outcomes/rank0.json", "logs/rank0.log"):
        (run.path / name).unlink(missing_ok=True)
        make(run.path / name)
    watch = [PYTHON, str(NODE / "watch.py"), str(run.path), "--once"]
    seen = subprocess.run(watch, capture_output=True, text=True, timeout=DEADLINE)
    assert seen.returncode == 0 and '"state": "training"' in seen.stdout, seen.stderr
    began = time.monotonic()
    assert control("stop", run)["stopped"]
    assert time.monotonic() - began < stretched(15) and run.end()["state"] == "stopped"


def test_stop_with_a_dead_supervisor_releases_its_leases(
    folder: MakeFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GNNFLEET_LEASES", str(tmp_path / "leases"))
    run = folder(leases=["cuda:0", "port:29500"], operator="al@laptop").rank(python(SLEEP)).start()
    run.pid("rank0")
    assert [one.resource for one in leases.held()] == ["cuda:0", "port:29500"] and leases.held()[0].host == "al@laptop"
    run.supervisor.kill()  # type: ignore[union-attr]
    run.supervisor.wait()  # type: ignore[union-attr]
    assert control("stop", run)["stopped"]
    assert list((tmp_path / "leases").iterdir()) == [] and run.processes() == []


@pytest.mark.parametrize(
    ("text", "alive"),
    fast_cases(
        [("{", True), ("[]", True), ('{"run_id": 1}', True), ("{", False)], ("{", True), ('{"run_id": 1}', True)
    ),
)
def test_a_damaged_node_json_is_reported_and_the_run_is_stopped_nevertheless(
    folder: MakeFolder, text: str, alive: bool
) -> None:
    run = folder(server=python(SERVE)).rank(python(SLEEP)).start()
    pids = [run.pid("rank0"), run.pid("server")]
    if not alive:
        os.kill(run.supervisor.pid, signal.SIGSTOP)  # type: ignore[union-attr]
    (run.path / "node.json").write_text(text)
    status = control("status", run)
    assert status["alive"] and "node.json is damaged" in status["damage"]
    report = control("stop", run, "--timeout", "1.5")
    assert report["stopped"] and "are found by the run folder" in report["notes"][0]
    assert run.processes() == [] and not any(one.pid in pids for one in procs.table())


def test_full_disk(tmp_path: Path) -> None:
    # A node can be stopped although its disk is full: the stop request is a signal if its file cannot be written, and
    # the supervisor has reserved disk space for its result.
    if os.getuid() != 0:
        pytest.skip("only root can mount a small disk")
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(disk)], check=True, timeout=10)
    run = RunFolder(disk / "node0").rank(python(SLEEP)).start()
    try:
        run.pid("rank0")
        fill(disk)
        report = control("stop", run, "--by", "al@laptop")
        assert report["stopped"] and report["killed"] == []
        result = run.end()
        assert result["state"] == "stopped" and result["outcomes"][0]["stopped"]
    finally:
        run.kill()
        subprocess.run(["umount", "-l", str(disk)], check=True, timeout=10)


def test_rank_that_fills_the_disk_is_the_cause(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can mount a small disk")
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(disk)], check=True, timeout=10)
    fills = "file = open('big', 'wb')\nwhile True: file.write(b'x' * 4096); file.flush()"
    run = RunFolder(disk / "node0").rank(python(fills))
    try:
        result = run.run()
        assert result["state"] == "failed" and f"the disk of {run.path}" in result["reason"], result["reason"]
        outcome = next(outcome for outcome in result["outcomes"] if outcome["name"] == "rank0")
        assert outcome["failed"] and outcome["traceback"][-1] == "OSError: [Errno 28] No space left on device"
    finally:
        run.kill()
        subprocess.run(["umount", "-l", str(disk)], check=True, timeout=10)


def fill(disk: Path) -> None:
    with open(disk / "ballast", "wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(b"x" * 4096)


def test_a_deleted_folder_is_no_run(tmp_path: Path) -> None:
    run = Run(tmp_path, 1).nodes[0]
    shutil.rmtree(run.path)
    done = subprocess.run([PYTHON, str(NODE / "control.py"), "status", str(run.path)], capture_output=True, timeout=20)
    assert done.returncode == 1 and b"no run in" in done.stderr
