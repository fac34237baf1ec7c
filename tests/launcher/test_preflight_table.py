"""Tests of the table of findings that preflight prints, and golden test of all findings."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from findings_kit import GB, cluster, found, gpu, report_of, survey_of, versions, with_gpus
from golden_kit import GOLDEN, check_text
from launcher.config.schema import ClusterConfig, DataConfig, NodeConfig, RunConfig
from launcher.preflight.preflight_report import finding_lines, print_findings
from launcher.preflight.survey import Survey
from launcher.text import UNBOUNDED, spans

HOLDER = {"pid": 77, "memory": 40_000, "command": "python big.py", "user": "bob", "since": 1_800_000_000.0}
UNSEEN = {"pid": 78, "memory": 300, "command": "[Not Found]", "user": "", "since": 0}
HELD = "held by run r7 of bob since 2026-11-21 12:03:11 UTC (pid 9)"
LEASE = {"resource": "cuda:0", "run_id": "r7", "words": HELD, "needs": ["cuda:0"]}


def table_of(survey: Survey, width: int) -> str:
    output = io.StringIO()
    print_findings(report_of(survey), Console(file=output, width=width))
    return "".join(f"{line.rstrip()}\n" for line in output.getvalue().splitlines())


def big_cluster(**more: Any) -> Survey:
    nodes = tuple(NodeConfig(host=f"gnn{k:02}.lab", user="alice") for k in range(1, 65))
    old = versions(numpy="1.26.4", torch="2.11.0+cpu", python="3.11.9")
    left = [{"run_id": "run-20261121-101500-ab12", "pids": [811, 812], "commands": ["python -m trainer train"]}]
    tight = {"disk": {"free": GB, "size": 100 * GB, "files": -1, "device": 1}}
    odd = {9: {"tmux": ""}, 17: old, 18: old, 30: tight, 41: {"leftovers": left}}
    clocks = {**dict.fromkeys(range(64), 0.0), 41: 300.0}
    stored = dict.fromkeys(range(64), 2 * GB)
    return survey_of(cluster(64, nodes=nodes), odd, clock_offsets=clocks, bytes_needed=stored, **more)


def test_sixty_four_nodes_with_five_different_ones_at_80_columns() -> None:
    table = table_of(big_cluster(code_digest="3fa9c1d2"), 80)
    check_text(GOLDEN / "preflight_table.txt", table)
    rows, _, advice = table.partition("Worth a look:")
    assert max(map(len, rows.splitlines())) <= 80 and len(rows.splitlines()) < 45
    assert rows.rstrip().splitlines()[-1].lstrip().startswith(("block", "1.0 GB"))  # blocking rows last
    assert "for host in" not in advice  # two hosts: two lines
    assert "    ssh alice@gnn18.lab '/usr/bin/python3 -m pip install torch==2.13.0+cpu numpy==2.4.6" in advice


def test_the_same_remedy_for_many_hosts_is_one_line() -> None:
    old = versions(numpy="1.26.4")
    nodes = tuple(NodeConfig(host=f"g{k}", port=2222) for k in range(8))
    table = table_of(survey_of(cluster(8, nodes=nodes), dict.fromkeys((1, 2, 3), old)), 80)
    loop = """for host in g1 g2 g3; do ssh -p 2222 "$host" '/usr/bin/python3 -m pip install numpy==2.4.6'; done"""
    assert table.rstrip().splitlines()[-2:] == ["  node1–node3, packages:", f"    {loop}"]


def test_into_a_pipe_each_row_is_one_line() -> None:
    table = table_of(big_cluster(code_digest="3fa9c1d2"), UNBOUNDED)
    rows = table.partition("Worth a look:")[0].rpartition("──\n")[2].strip().splitlines()
    assert len(rows) > 10 and {row.split()[0] for row in rows} == {"ok", "warn", "block"}


def test_remedies_that_differ_between_hosts_are_separate_lines() -> None:
    nodes = tuple(NodeConfig(host="box", port=2200 + k) for k in range(6))
    table = table_of(survey_of(cluster(6, nodes=nodes), {k: versions(numpy="1.2") for k in (1, 2)}), 80)
    assert "    ssh -p 2201 box '" in table and "    ssh -p 2202 box '" in table


def test_nodes_are_shown_as_ranges() -> None:
    assert spans([0, 1, 2, 5, 7, 8], "node") == "node0–node2, node5, node7–node8"
    rows = table_of(survey_of(cluster(6), {k: {"tmux": "3.4"} for k in (1, 3)}), 100)
    assert "node1, node3" in rows and "all but node1, node3" in rows and "all 6 nodes" in rows


def test_lines_of_a_refusal_are_folded() -> None:
    lines = finding_lines(found(4, {k: {"tmux": ""} for k in (0, 1, 3)}))
    assert lines == ["node0–node1, node3: tmux is not installed – `sudo apt-get install -y tmux` (or dnf, conda)"]


# -- every message -------------------------------------------------------


def devices(count: int, *gpus: dict[str, Any], **more: Any) -> tuple[ClusterConfig, dict[int, Any]]:
    """Return a config whose node asks for ``count`` devices, and probe facts of a host that has ``gpus``."""
    node = NodeConfig(host="gpu1", user="ann", devices=tuple(range(count)))
    return cluster(1, nodes=(node,)), {0: {**with_gpus(*gpus), **more}}


def disk(free: int, files: int = -1) -> dict[str, Any]:
    return {"disk": {"free": free, "size": 100 * GB, "files": files, "device": 1}}


def messages() -> list[str]:
    pair, verify = cluster(2), DataConfig(dataset="synthetic", folder="/shared/parts", mode="verify")
    eight = cluster(1, nodes=(NodeConfig(host="host0", procs=8),))
    named = cluster(2, run=RunConfig(master_addr="head", master_port=29500))
    two = {"hostname": "box"}
    tiny = {"shm": {"free": 64 << 20, "size": 64 << 20, "files": -1, "device": 3}}
    exclusive = replaced_procs(devices(1, gpu(mode="Exclusive_Process")))
    cases: list[tuple[ClusterConfig, dict[int, Any], dict[str, Any]]] = [
        (pair, {1: {"tmux": ""}}, {}),
        (pair, {1: {"tmux": "1.8"}}, {}),
        (pair, {1: {"taken": "/w/1/runs/r1/node1"}}, {}),
        (pair, {1: {"open_files": 64}}, {}),
        (pair, {1: {"open_files": 64, "open_files_most": 128}}, {}),
        (pair, {}, {"clock_offsets": {0: 0.0, 1: -300.0}}),
        (named, {1: {"names": {"head": ""}}}, {}),
        (named, {1: {"names": {"head": "127.0.1.1"}}}, {}),
        (named, {0: {"busy_ports": {"29500": "in use (pid 7: python old.py)"}}}, {}),
        (named, {0: {"busy_ports": {"29500": HELD}}}, {}),
        (pair, {1: {"lease_error": "/tmp/gnnfleet-leases is not a folder; remove it"}}, {}),
        (pair, {1: {"leftovers": [{"run_id": "r1", "pids": [5, 6], "commands": ["python train.py"]}]}}, {}),
        (pair, {0: {**two, "workdir": "/w"}, 1: {**two, "workdir": "/w"}}, {}),
        (pair, {1: {"workdir_error": "permission denied"}}, {}),
        (pair, {1: {"workdir_error": "disk quota exceeded"}}, {}),
        (pair, {1: {"workdir_error": "read-only file system"}}, {}),
        (pair, {1: {"noexec": True}}, {"own_command": True}),
        (pair, {1: disk(GB)}, {"bytes_needed": {1: 2 * GB}}),
        (pair, {1: disk(2 * GB + 1)}, {"bytes_needed": {1: 2 * GB}}),
        (pair, {0: {**two, **disk(3 * GB)}, 1: {**two, **disk(3 * GB)}}, {"bytes_needed": {0: 2 * GB, 1: 2 * GB}}),
        (pair, {1: disk(9 * GB, files=0)}, {}),
        (eight, {0: {"memory_limit": 2 * GB}}, {}),
        (eight, {0: {"memory_free": 2 * GB}}, {}),
        (pair, {1: disk(99 * GB)}, {"bytes_needed": {1: 80 * GB}}),
        (pair, {1: {"tmp": {"free": 0, "size": 1, "files": -1, "device": 2, "error": "no space left on device"}}}, {}),
        (cluster(2, data=verify), {0: {"manifest": True}}, {}),
        (pair, {1: versions(python="3.9.2")}, {}),
        (cluster(3), {1: versions(python="3.12.1")}, {}),
        (cluster(3), {1: versions(torch="2.11.0+cpu", numba="", numpy="1.26.4")}, {}),
        (*devices(1, gpu(), **versions()), {}),
        (*devices(1), {}),
        (*devices(2, gpu()), {}),
        (*devices(1, gpu(), **with_gpus(gpu(), cuda="13.0", driver="550.54.15")), {}),
        (*devices(1, gpu(), leases=[LEASE]), {}),
        (*devices(1, gpu(used=40_000, holders=[HOLDER])), {}),
        (*devices(1, gpu(used=40_000)), {}),
        (*devices(1, gpu(used=340, holders=[UNSEEN])), {}),
        (*devices(1, gpu(mode="Prohibited")), {}),
        (*exclusive, {}),
        (*devices(1, gpu(mig=True)), {}),
        (*devices(1, gpu(ecc=3)), {}),
        (*devices(2, gpu(0), gpu(1), **tiny), {}),
    ]
    lines = []
    for config, odd, more in cases:
        told = found(len(config.nodes), odd, config=config, **more)
        assert told, odd
        lines += [f"{finding.severity}: {line}" for finding in told for line in finding_lines([finding])]
    return lines


def replaced_procs(case: tuple[ClusterConfig, dict[int, Any]]) -> tuple[ClusterConfig, dict[int, Any]]:
    config, facts = case
    node = NodeConfig(host="gpu1", user="ann", devices=config.nodes[0].devices, procs=2)
    return cluster(1, nodes=(node,)), facts


def test_messages_of_all_findings() -> None:
    check_text(GOLDEN / "messages_preflight.txt", "\n".join(messages()) + "\n")
