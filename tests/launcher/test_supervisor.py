"""Tests of the supervisor of a node with real processes: how a run ends, and that no process is left."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from launcher.node.supervisor.server_keeper import COMPILING
from node_kit import GRACE, MakeFolder, RunFolder, python
from waiting import runs, wait_until

SLEEP = "import time; print('up', flush=True); time.sleep(60)"
SERVE = "import pathlib, time; pathlib.Path('server.ready').touch(); print('serving', flush=True); time.sleep(60)"
ON_SIGNAL = "import signal\nfor n in (2, 15): signal.signal(n, lambda n, _: exit(signal.Signals(n).name))\n"
IGNORE_TERM = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEP
ESCAPE = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        open("escaped", "w").write(str(os.getpid()))
        time.sleep(60)
    os._exit(0)
while not os.path.exists("escaped") or not open("escaped").read():
    time.sleep(0.01)
"""


def stop(run: RunFolder) -> None:
    (run.path / "control" / "stop").touch()


def test_success_ends_the_server_and_reports_done(folder: MakeFolder) -> None:
    result = folder(server=python(SERVE)).rank(python("print('trained')")).run()
    assert result["state"] == "done"
    assert {record["name"]: record["failed"] for record in result["outcomes"]} == {"rank0": False, "server": False}


def test_success_leaves_logs_events_and_state(folder: MakeFolder) -> None:
    run = folder(server=python(ON_SIGNAL + SERVE)).rank(python("print('trained')"))
    run.run()
    assert run.log("rank0") == ["trained"] and run.log("server") == ["serving", "SIGINT"]
    stamped = (run.path / "logs" / "rank0.log").read_text()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z trained\n", stamped)
    assert run.json("state.json")["state"] == "done"
    kinds = [(event["kind"], event.get("name")) for event in run.events()]
    assert kinds[:4] == [
        ("supervisor-start", None),
        ("process-start", "server"),
        ("process-start", "runner0"),
        ("server-ready", None),
    ]
    assert ("process-exit", "rank0") in kinds and kinds[-1] == ("node-end", None)


def test_a_failure_ends_the_server_by_sigterm(folder: MakeFolder) -> None:
    # ranks of other nodes may need it until they have saved a checkpoint
    run = folder(server=python(ON_SIGNAL + SERVE)).rank(python("exit(1)"))
    run.run()
    assert run.log("server") == ["serving", "SIGTERM"]


def test_trainer_waits_for_the_server(folder: MakeFolder) -> None:
    slow = "import pathlib, time; time.sleep(0.5); pathlib.Path('server.ready').touch(); time.sleep(60)"
    run = folder(server=python(slow)).rank(python("import os; print(os.path.exists('server.ready'))"))
    assert run.run()["state"] == "done"
    assert run.log("rank0") == ["True"]


def test_exit_status_of_a_rank(folder: MakeFolder) -> None:
    run = folder().rank(python("import sys; print('bye'); sys.exit(3)"))
    assert run.run()["state"] == "failed"
    outcome = run.outcome("rank0")
    assert (outcome["returncode"], outcome["signal"], outcome["failed"]) == (3, None, True)
    assert outcome["tail"] == ["bye"] and outcome["started"] < outcome["ended"]


def test_command_that_does_not_exist(folder: MakeFolder) -> None:
    run = folder().rank(["/no/such/program"])
    assert run.run()["reason"].startswith("rank 0 ended with exit status 127: cannot start /no/such/program")
    assert run.outcome("rank0")["note"] == "cannot start /no/such/program: No such file or directory"


def test_server_program_that_does_not_exist(folder: MakeFolder) -> None:
    run = folder(server=["/no/such/server"]).rank(python("print('never')"))
    assert "server could not start (/no/such/server in " in run.run()["reason"]
    assert run.log("rank0") == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_signal_that_ends_a_rank(folder: MakeFolder, number: signal.Signals) -> None:
    run = folder().rank(python(SLEEP)).start()
    os.kill(run.pid("rank0"), number)
    assert run.end()["state"] == "failed"
    outcome = run.outcome("rank0")
    assert (outcome["returncode"], outcome["signal"]) == (128 + number, number.name)
    assert outcome["failed"] and not outcome["stopped"]


def test_rank_killed_together_with_its_runner(folder: MakeFolder) -> None:
    run = folder().rank(python(SLEEP)).start()
    child = run.pid("rank0")
    os.kill(run.json("procs/rank0.json")["runner"]["pid"], signal.SIGKILL)
    assert run.end()["state"] == "failed"
    assert run.outcome("rank0")["signal"] == "SIGKILL" and run.outcome("rank0")["failed"]
    assert not runs(child)


def test_raising_rank_is_the_failure_and_the_others_are_stopped(folder: MakeFolder) -> None:
    code = (
        "import os, time\nprint(os.environ['NODE_RANK'], os.environ['WORLD_SIZE'], flush=True)\n"
        "if os.environ['RANK'] == '1':\n    time.sleep(0.5)\n    raise ValueError('no such column')\ntime.sleep(60)"
    )
    run = folder().ranks(python(code), nproc=2)
    result = run.run(timeout=60)
    assert result["state"] == "failed" and result["reason"] == "rank 1 raised ValueError: no such column"
    failed, stopped = run.outcome("rank1"), run.outcome("rank0")
    assert failed["failed"] and failed["traceback"][-1] == "ValueError: no such column"
    assert stopped["stopped"] and not stopped["failed"] and stopped["signal"] == "SIGTERM"
    assert run.log("rank0") == ["0 2"] and not (run.path / "outcomes" / "runner1.json").exists()


def test_a_runner_that_ends_before_its_rank_started_is_the_failure(folder: MakeFolder) -> None:
    slow = "import pathlib, time; time.sleep(60)"
    run = folder(server=python(slow)).ranks(python(SLEEP), nproc=2).start()
    os.kill(run.pid("runner1"), signal.SIGKILL)
    result = run.end()
    assert result["state"] == "failed"
    ended = "runner1 ended though its rank had not failed; it was killed by signal 9 (SIGKILL)"
    assert result["reason"] == ended
    assert [record["name"] for record in result["outcomes"] if record["failed"]] == ["runner1"]


def test_the_outcome_of_a_rank_that_cannot_be_written_reaches_the_supervisor(folder: MakeFolder) -> None:
    run = folder().ranks(python("import os; assert 'GNNFLEET_MAILBOX' not in os.environ; exit(3)"), nproc=1)
    for name in ("outcomes", "procs"):
        (run.path / name / "rank0.json").mkdir(parents=True)
    result = run.start().end()
    assert {record["name"]: record["returncode"] for record in result["outcomes"]}["rank0"] == 3
    assert "ended with exit status 3" in result["reason"] and "cannot be written" in result["reason"]


def test_a_runner_stopped_from_outside_is_the_failure(folder: MakeFolder) -> None:
    run = folder().ranks(python(SLEEP), nproc=2).start()
    for rank in range(2):
        wait_until(run.says(f"rank{rank}", "up"))
    os.kill(run.pid("runner0"), signal.SIGTERM)
    result = run.end()
    assert result["state"] == "failed" and result["reason"].startswith("runner0 ended though its rank had not failed")
    assert run.outcome("rank0")["stopped"] and run.outcome("rank1")["stopped"]


def test_environment_of_the_ranks(folder: MakeFolder) -> None:
    names = ["RANK", "LOCAL_RANK", "ROLE_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "NODE_RANK", "OMP_NUM_THREADS"]
    code = f"import os; print(*[os.environ.get(name) for name in {names}])"
    run = folder(node_rank=1).ranks(python(code), nproc=2)
    run.own["ranks"], run.spec["nodes"][0]["ranks"] = [2, 3], [0, 1]
    assert run.run()["state"] == "done"
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    assert run.log("rank2") == [f"2 0 2 2 4 1 {threads}"] and run.log("rank3") == [f"3 1 3 2 4 1 {threads}"]


def test_server_that_never_gets_ready(folder: MakeFolder) -> None:
    run = folder(server=python(SLEEP), start_timeout=0.5).rank(python("print('never')"))
    assert "server was not ready within 0.5 s (run.start_timeout)" in run.run()["reason"]
    assert run.outcome("server")["failed"] and run.outcome("server")["tail"] == ["up"]


def test_a_server_that_compiles_its_kernels_has_minutes_more(folder: MakeFolder) -> None:
    serve = "import pathlib, time; time.sleep(2); pathlib.Path('server.ready').touch(); time.sleep(60)"
    run = folder(server=python(serve), start_timeout=0.5)
    (run.path / "kernels/compiled.nbc").unlink()
    show = "import os; print(os.environ['GNNFLEET_START_TIMEOUT'])"
    assert run.rank(python(show)).run()["state"] == "done"
    assert run.log("rank0") == [str(0.5 + COMPILING)]


def test_server_that_raises_at_start(folder: MakeFolder) -> None:
    run = folder(server=python("raise OSError('port 29600 is taken')")).rank(python("print('never')"))
    assert run.run()["reason"] == "server ended before it was ready; it raised OSError: port 29600 is taken"
    assert run.outcome("server")["traceback"][-1] == "OSError: port 29600 is taken"


def test_server_dying_in_training_is_the_failure(folder: MakeFolder) -> None:
    run = folder(server=python(SERVE)).rank(python(SLEEP)).start()
    run.pid("rank0")
    os.kill(run.pid("server"), signal.SIGKILL)
    assert run.end()["reason"] == "server ended while it was needed; it was killed by signal 9 (SIGKILL)"
    assert run.outcome("server")["failed"] and run.outcome("rank0")["stopped"]


def test_stop_request(folder: MakeFolder) -> None:
    run = folder(server=python(SERVE)).rank(python(SLEEP)).start()
    wait_until(run.says("rank0", "up"))
    stop(run)
    result = run.end()
    assert (result["state"], result["reason"]) == ("stopped", "stop requested by the file control/stop")
    assert result["asked"] == {"by": "", "why": "", "now": False}
    assert all(record["stopped"] and not record["failed"] for record in result["outcomes"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_ask_to_stop(folder: MakeFolder, number: signal.Signals) -> None:
    run = folder().rank(python(SLEEP)).start()
    wait_until(run.says("rank0", "up"))
    os.kill(run.supervisor.pid, number)  # type: ignore[union-attr]
    assert run.end()["reason"].startswith(f"its supervisor got {number.name}: ")


def test_serving_only_node_is_done_when_stopped(folder: MakeFolder) -> None:
    run = folder(server=python(SERVE)).start()
    wait_until(lambda: (run.path / "state.json").exists() and run.json("state.json")["state"] == "serving")
    stop(run)
    assert run.end()["state"] == "done"


def test_stop_asked_before_the_start(folder: MakeFolder) -> None:
    run = folder().rank(python("print('never')"))
    (run.path / "control").mkdir()
    stop(run)
    assert run.run()["state"] == "stopped"


def test_rank_that_ignores_sigterm_is_killed_after_the_grace(folder: MakeFolder) -> None:
    run = folder().rank(python(IGNORE_TERM)).start()
    wait_until(run.says("rank0", "up"))
    asked = time.monotonic()
    stop(run)
    assert run.end()["state"] == "stopped"
    assert GRACE <= time.monotonic() - asked < GRACE + 3
    outcome = run.outcome("rank0")
    assert (outcome["signal"], outcome["stopped"], outcome["failed"]) == ("SIGKILL", True, False)


def test_server_that_ignores_signals_is_killed(folder: MakeFolder) -> None:
    stubborn = IGNORE_TERM.replace("print(", "signal.signal(2, signal.SIG_IGN); open('server.ready', 'w'); print(")
    run = folder(server=python(stubborn)).rank(python("print('trained')"))
    assert run.run()["state"] == "done"
    assert run.outcome("server")["signal"] == "SIGKILL"


@pytest.mark.parametrize(
    "environment", ["", "os.environ.clear(); os.execv(sys.executable, [sys.executable, '-c', REST])"]
)
def test_process_that_left_group_and_session_is_found(folder: MakeFolder, environment: str) -> None:
    # The supervisor finds a process that has left its process group and session by the token of the run in its
    # environment; if the process has cleared its environment, the supervisor finds it as an orphan that has become its
    # child.
    rest = "import time; open('escaped', 'w').write(str(__import__('os').getpid())); time.sleep(60)"
    code = ESCAPE.replace("        open(", f"        import sys; REST = {rest!r}; {environment}\n        open(")
    run = folder().rank(python(code))
    assert run.run()["state"] == "done"
    assert not runs(int((run.path / "escaped").read_text()))


def test_killing_the_supervisor_ends_all_processes(folder: MakeFolder) -> None:
    run = folder(server=python(SERVE)).ranks(python(SLEEP), nproc=2).start()
    pids = [run.pid(name) for name in ("server", "runner0", "runner1", "rank0", "rank1")]
    run.supervisor.kill()  # type: ignore[union-attr]
    wait_until(lambda: not run.processes() and not any(map(runs, pids)), timeout=2.0)


def test_two_nodes_on_one_machine_do_not_touch_each_other(folder: MakeFolder) -> None:
    first, second = folder(), folder(node_rank=1)
    second.token = second.spec["token"] = first.token
    second.rank(python(SLEEP)).start()
    wait_until(second.says("rank0", "up"))
    first.rank(python("print('trained')"))
    assert first.run()["state"] == "done"
    assert runs(second.pid("rank0"))
    stop(second)
    assert second.end()["state"] == "stopped"


def test_heartbeat_continues(folder: MakeFolder) -> None:
    run = folder().rank(python(SLEEP)).start()
    run.pid("rank0")
    before = run.json("state.json")["time"]
    wait_until(lambda: run.json("state.json")["time"] > before, timeout=3)
    stop(run)
    run.end()


def test_a_server_with_an_unwritable_kernel_folder_reports_it_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    serve = "import pathlib, time; pathlib.Path('server.ready').touch(); time.sleep(60)"
    run = RunFolder(tmp_path / "run", server=python(serve)).rank(python("print('up')"))
    run.spec["server"]["env"] = {"GNNFLEET_KERNELS": str(tmp_path / "file/kernels"), "TMPDIR": str(tmp_path)}
    assert run.run()["state"] == "done"
    (reason,) = (event["reason"] for event in run.events() if event["kind"] == "server-compiles")
    kept = f"{tmp_path}/gnnfleet-kernels-{os.geteuid()}"
    assert reason == f"{tmp_path}/file/kernels cannot be written, so compiled kernels are kept in {kept}"


def test_a_long_error_of_a_graph_server_is_cut_in_the_finding(folder: MakeFolder) -> None:
    # Findings are part of each report to the lead node, which drops a connection with lines of more than 256 KiB.
    serve = "import pathlib; pathlib.Path('server.ready').touch(); raise ValueError('x' * 60_000)"
    finding = folder(server=python(serve), server_restarts=1).run()["findings"][0]
    assert finding["kind"] == "server-restart" and "raised ValueError: xxx" in finding["text"]
    assert len(finding["text"]) < 2200
