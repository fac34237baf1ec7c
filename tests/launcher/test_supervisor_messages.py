"""Golden test of the reasons that supervisors record for the end of a node or of a run."""

from __future__ import annotations

import getpass
import os
import re
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from golden_kit import GOLDEN, check_text
from launcher.files import write_whole
from launcher.node import leases
from node_kit import PYTHON, SUPERVISOR, python
from peers_kit import SERVE, SLEEP, Run
from waiting import wait_until

STEPS = """
import json, os, select, time
path = os.environ["GNNFLEET_RUN_DIR"] + "/metrics-rank" + os.environ["RANK"] + ".jsonl"
def step(n, loss):
    line = {"t": 0, "kind": "step", "rank": int(os.environ["RANK"]), "epoch": 1, "step": n, "steps": 9, "loss": loss}
    open(path, "a").write(json.dumps(line) + "\\n")
def hang(): time.sleep(60)
"""

Act = Callable[[Run], Any]


def nothing(run: Run) -> None:
    return


def kill(name: str, number: int, node: int = 0) -> Act:
    return lambda run: os.kill(run.nodes[node].pid(name), number)


def supervisor(number: int, node: int) -> Act:
    return lambda run: os.kill(run.nodes[node].supervisor.pid, number)  # type: ignore[union-attr]


def when_up(act: Act) -> Act:
    def acts(run: Run) -> None:
        run.wait_up()
        act(run)

    return acts


def stop(text: str, node: int = 0) -> Act:
    return lambda run: write_whole(run.nodes[node].path / "control" / "stop", text)


#: Name of the case -> (number of nodes, settings of each node, code or command of the ranks, action on the run).
CASES: dict[str, tuple[int, dict[str, Any], str | list[str], Act]] = {
    "exit status": (2, {}, "import os; os.environ['RANK'] == '1' and exit(3); import time; time.sleep(60)", nothing),
    "exception": (1, {}, "raise ValueError('no such column')", nothing),
    "kill -9": (2, {}, SLEEP, when_up(kill("rank1", signal.SIGKILL, 1))),
    "segmentation fault": (1, {}, "import ctypes; ctypes.string_at(0)", nothing),
    "no such program": (1, {}, ["/no/such/program"], nothing),
    "server never ready": (1, {"server": python(SLEEP), "start_timeout": 0.5}, SLEEP, nothing),
    "server raises": (1, {"server": python("raise OSError('port 29600 is taken')")}, SLEEP, nothing),
    "no such server": (1, {"server": ["/no/such/server"]}, SLEEP, nothing),
    "server killed": (2, {"server": python(SERVE)}, SLEEP, when_up(kill("server", signal.SIGKILL, 1))),
    "stopped by a person's touch": (2, {}, SLEEP, when_up(stop(""))),
    "stopped by command": (2, {}, SLEEP, when_up(stop('{"by": "alice@laptop", "why": "gnnfleet stop"}', 1))),
    "supervisor gets SIGTERM": (2, {}, SLEEP, when_up(supervisor(signal.SIGTERM, 1))),
    "tmux session closed": (2, {}, SLEEP, when_up(supervisor(signal.SIGHUP, 1))),
    "supervisor killed": (2, {}, SLEEP, when_up(supervisor(signal.SIGKILL, 1))),
    "supervisor of node0 killed": (2, {}, SLEEP, when_up(supervisor(signal.SIGKILL, 0))),
    "loss is no number": (
        2,
        {"on_nan": "stop"},
        STEPS + "step(1, .5)\nif os.environ['RANK'] == '0': step(2, float('nan'))\nhang()",
        nothing,
    ),
    "no step for too long": (2, {"stall_after": 2.0}, STEPS + "step(1, .5); step(2, .4); hang()", nothing),
    "device held": (1, {"leases": ["cuda:0"]}, SLEEP, nothing),
}


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("GNNFLEET_LEASES", str(tmp_path / "leases"))
    holder = leases.this_process("r0", 0, "bob@desk")._replace(since=1795233840.0)
    assert leases.take(["cuda:0"], holder) == []
    yield tmp_path


@pytest.mark.slow
def test_messages(runs: Path) -> None:
    made: dict[str, Run] = {}
    try:
        for name, (count, settings, code, act) in CASES.items():
            argv = python(code) if isinstance(code, str) else code
            made[name] = Run(runs / str(len(made)), count, argv=argv, **settings).start(up=False)
            act(made[name])
        made["port taken"] = run_with_busy_port(runs)
        made["node1 never starts"] = run_with_one_node(runs, 0)
        made["node0 never starts"] = run_with_one_node(runs, 1)
        text = "\n".join(results_text(name, run) for name, run in made.items())
    finally:
        for run in made.values():
            run.kill()
    text += f"\nnode.json damaged\n  {damaged(runs)}\n"
    check_text(GOLDEN / "messages_supervisor.txt", normalised(text, runs))


def run_with_busy_port(folder: Path) -> Run:
    run = Run(folder / "port", 2, start_timeout=1.0)
    run.nodes.pop()
    with socket.create_server(("127.0.0.1", run.port)):
        wait_until(lambda: run.nodes[0].start().supervisor.wait())  # type: ignore[union-attr]
    return run


def run_with_one_node(folder: Path, started: int) -> Run:
    run = Run(folder / f"only{started}", 2, start_timeout=1.0)
    run.nodes = [run.nodes[started].start()]
    return run


def results_text(name: str, run: Run) -> str:
    """Wait for all supervisors; return state, reason and cause of each result as text."""
    lines = [name]
    for node in run.nodes:
        assert node.supervisor is not None
        node.supervisor.wait(30)
        path = node.path / "result.json"
        if not path.exists():
            continue
        result = node.json("result.json")
        lines.append(f"  node{node.spec['node_rank']} {result['state']}: {result['reason']}")
        cause = result["cause"]
        if cause:
            lines.append(f"    cause: node{cause['node_rank']} {cause['name']} {cause['kind']}: {cause['reason']}")
        lines += [f"    stacks: {line}" for finding in result["findings"] for line in finding.get("stacks", [])]
    return "\n".join(lines)


def damaged(folder: Path) -> str:
    (folder / "node.json").write_text("{")
    argv = [PYTHON, str(SUPERVISOR), str(folder / "node.json")]
    return subprocess.run(argv, capture_output=True, text=True, timeout=20, check=False).stderr.strip()


def normalised(text: str, folder: Path) -> str:
    text = re.sub(rf"{re.escape(str(folder))}/[\w/]*?(node\d)", r"RUNS/\1", text).replace(str(folder), "RUNS")
    text = re.sub(r"port \d{4,5} \(run", "port 29400 (run", text)
    text = re.sub(r"127.0.0.1 port \d{4,5} within", "127.0.0.1 port 29400 within", text)
    text = re.sub(r"\(pid \d+\)", "(pid 123)", text).replace(f"of {getpass.getuser()} (", "of alice (")
    text = re.sub(r"/\S*/ctypes/__init__\.py:\d+", "ctypes/__init__.py:519", text)
    return re.sub(r"for \d+ s( \(the longest.*?\))?", "for N s", text)
