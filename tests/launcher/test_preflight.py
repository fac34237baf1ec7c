"""Preflight: every finding from scripted facts, and the real programs on this machine."""

from __future__ import annotations

import io
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fake_transport import FakeTransport, printed
from launcher.config import ClusterConfig, DataConfig, NodeConfig, RunConfig
from launcher.errors import AuthError, ConnectionLost, NodeCallError, PreflightRefused, TransportError
from launcher.findings import Finding, size
from launcher.nodecall import call, program_source
from launcher.preflight import PreflightReport, run_preflight
from launcher.preflight_table import node_ranges, print_findings
from launcher.script import Command
from launcher.transport import connect_all
from launcher.transport.base import Transport
from launcher.transport.local import LocalTransport

HEALTHY: dict[str, Any] = {
    "home": "/home/ann",
    "python": "/usr/bin/python3",
    "versions": {
        "python": "3.11.2", "torch": "2.13.0+cpu", "torch_geometric": "2.8.1",
        "numba": "0.68", "numpy": "2.4", "pyzmq": "27",
    },
    "tmux": "3.3a",
    "devices": [],
    "memory": 1 << 34,
    "cpus": 8,
    "boot_id": "b",
    "busy_ports": {},
    "manifest": False,
    "taken": "",
    "workdir_base": "/home/ann",
    "workdir_writable": True,
    "workdir_id": "1:2",
    "disk_free": 10**10,
}  # fmt: skip


def cluster(count: int, **changes: Any) -> ClusterConfig:
    config = ClusterConfig(
        nodes=tuple(NodeConfig(host=f"host{k}") for k in range(count)), data=DataConfig(dataset="synthetic")
    )
    return replace(config, **changes)


def machine(k: int, wire: dict[str, Any] | None = None, **facts: Any) -> FakeTransport:
    """A fake node that answers the probe with HEALTHY, changed by ``facts``, and the wire test."""

    def probe(request: dict[str, Any]) -> dict[str, Any]:
        own = {"hostname": f"box{k}", "address": f"10.0.0.{k}", "interface": "eth0", "workdir": f"/w/{k}"}
        return {**HEALTHY, **own, "times": [time.time(), time.time()], **facts}

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        if request["role"] == "listen":
            return wire or {"bound": True, "error": "", "seen": []}
        return wire or {"ok": True, "error": ""}

    fake = FakeTransport(target=f"host{k}", node_rank=k)
    return fake.on_program("what this machine is and has", probe).on_program("can reach a port", answer)


def problems(report: PreflightReport) -> list[tuple[int, str, str]]:
    return [(f.node_rank, f.severity, f.check) for f in report.findings if f.severity != "ok"]


def the_one(report: PreflightReport) -> Finding:
    (finding,) = (finding for finding in report.findings if finding.severity != "ok")
    return finding


def check(config: ClusterConfig, *machines: Transport | TransportError, **more: Any) -> PreflightReport:
    return run_preflight(config, dict(enumerate(machines)), **more)


def with_versions(**changes: str) -> dict[str, Any]:
    return {"versions": {**HEALTHY["versions"], **changes}}


# -- findings ------------------------------------------------------------


def test_healthy_nodes_give_facts_and_nothing_to_do() -> None:
    report = check(cluster(3), machine(0), machine(1), machine(2))
    assert problems(report) == []
    report.refuse_if_blocked()
    facts = report.facts[1]
    assert (facts.address, facts.interface, facts.python, facts.cpus) == ("10.0.0.1", "eth0", "/usr/bin/python3", 8)
    assert abs(facts.clock_offset) < 1
    assert 29500 in report.facts[0].free_ports and 29500 not in facts.free_ports
    for name in ("connect", "tmux", "packages", "versions", "workdir", "disk", "clock", "service port"):
        assert [f.node_rank for f in report.findings if f.check == name] == [0, 1, 2], name
    assert [f.node_rank for f in report.findings if f.check == "reach master"] == [1, 2]


def test_nodes_that_cannot_be_reached_are_all_reported() -> None:
    refused = AuthError("no key was accepted", host="ann@host0", node_rank=0, remedy="ssh-copy-id")
    lost = machine(2)
    lost.lose_connection()
    report = check(cluster(3), refused, machine(1), lost)
    assert problems(report) == [(0, "block", "connect"), (2, "block", "connect")]
    with pytest.raises(PreflightRefused, match=r"(?s)node0 \(host0\): no key was accepted – ssh-copy-id.*node2"):
        report.refuse_if_blocked()
    assert list(report.facts) == [1]


def test_no_python() -> None:
    missing = FakeTransport(node_rank=0).on("python3 -c", printed(returncode=127, stderr="bash: python3: not found"))
    finding = the_one(check(cluster(1), missing))
    assert (finding.severity, finding.check) == ("block", "python")
    assert "cannot run python3" in finding.message and "`venv`" in finding.remedy


def test_no_tmux() -> None:
    finding = the_one(check(cluster(2), machine(0), machine(1, tmux="")))
    assert (finding.node_rank, finding.check) == (1, "tmux")
    assert "apt-get install" in finding.remedy


@pytest.mark.parametrize(
    ("package", "version", "usual"),
    [
        ("torch", "2.11.0+cpu", "2.13.0"),
        ("torch_geometric", "2.7.0", "2.8.1"),
        ("numba", "0.60", "0.68"),
        ("numpy", "1.26", "2.4"),
        ("python", "3.12.1", "3.11"),
    ],
)
def test_the_odd_version_is_named_with_the_others(package: str, version: str, usual: str) -> None:
    report = check(cluster(3), machine(0, **with_versions(**{package: version})), machine(1), machine(2))
    finding = the_one(report)
    assert (finding.node_rank, finding.severity, finding.check) == (0, "block", "versions")
    assert f"{usual} on node1 (host1), node2 (host2)" in finding.message
    assert finding.message.startswith(f"{package} {version[:4]}")
    assert usual in finding.remedy


def test_patch_releases_of_python_and_builds_of_torch_may_differ() -> None:
    other = with_versions(python="3.11.9", torch="2.13.0+cu126")
    assert problems(check(cluster(2), machine(0), machine(1, **other))) == []


def test_missing_packages_come_with_the_pip_line() -> None:
    finding = the_one(check(cluster(2), machine(0), machine(1, **with_versions(torch="", numba=""))))
    assert (finding.severity, finding.check) == ("block", "packages")
    assert finding.remedy == "`/usr/bin/python3 -m pip install torch==2.13.0 numba==0.68`"


def test_an_own_command_needs_torch_alone() -> None:
    bare = with_versions(torch_geometric="", numba="")
    old = with_versions(numba="0.50")
    report = check(cluster(3), machine(0), machine(1, **bare), machine(2, **old), own_command=True)
    assert problems(report) == [(1, "warn", "packages"), (2, "warn", "versions")]
    report = check(cluster(2), machine(0), machine(1, **with_versions(torch="")), own_command=True)
    assert problems(report) == [(1, "block", "packages")]


@pytest.mark.parametrize(
    ("devices", "torch", "says"),
    [
        ([], "2.13.0", "nvidia-smi shows none"),
        (["H200"], "2.13.0", "no CUDA device 1; there are 1"),
        (["H200", "H200"], "2.13.0+cpu", "cannot use CUDA"),
        (["H200", "H200"], "2.13.0+cu126", None),
    ],
)
def test_devices(devices: list[str], torch: str, says: str | None) -> None:
    config = cluster(1, nodes=(NodeConfig(host="host0", devices=(0, 1)),))
    report = check(config, machine(0, devices=devices, **with_versions(torch=torch)))
    if says is None:
        assert problems(report) == []
        assert "2 × H200" in [f.message for f in report.findings]
    else:
        assert problems(report) == [(0, "block", "devices")]
        assert says in the_one(report).message


def test_disk_and_work_folder() -> None:
    nodes = machine(0), machine(1, disk_free=10**9), machine(2, workdir_writable=False)
    report = check(cluster(3), *nodes, bytes_needed={0: 2 * 10**9, 1: 2 * 10**9})
    assert problems(report) == [(1, "block", "disk"), (2, "block", "workdir")]
    assert "2.0 GB needed at /home/ann, 1.0 GB free" in [f.message for f in report.findings]


def test_data_must_be_there_in_mode_verify() -> None:
    data = DataConfig(dataset="synthetic", folder="/shared/parts", mode="verify")
    finding = the_one(check(cluster(2, data=data), machine(0, manifest=True), machine(1)))
    assert (finding.node_rank, finding.check, finding.message) == (1, "data", "no manifest.json in /shared/parts")


def test_a_clock_far_off_is_a_warning() -> None:
    finding = the_one(check(cluster(1), machine(0, times=[time.time() + 300, time.time() + 300])))
    assert (finding.severity, finding.message) == ("warn", "clock is 300 s ahead of this machine's")


def test_a_busy_master_port_names_who_holds_it() -> None:
    config = cluster(2, run=RunConfig(master_port=29500))
    finding = the_one(check(config, machine(0, busy_ports={"29500": "pid 7: python old.py"}), machine(1)))
    assert (finding.node_rank, finding.severity, finding.check) == (0, "block", "master port")
    assert finding.message == "port 29500 in use (pid 7: python old.py)"
    assert "run.master_port" in finding.remedy


def test_auto_passes_over_busy_ports() -> None:
    busy = {str(port): "" for port in range(29500, 29563)}
    report = check(cluster(2), machine(0, busy_ports=busy), machine(1))
    assert problems(report) == []
    assert "reaches 10.0.0.0:29563 of node0" in [f.message for f in report.findings]


def test_two_launches_in_the_same_moment_hardly_take_the_same_port() -> None:
    firsts = {check(cluster(2), machine(0), machine(1)).facts[0].free_ports[0] for _ in range(12)}
    assert len(firsts) > 4


def test_a_master_that_others_cannot_reach() -> None:
    firewalled = machine(1, wire={"ok": False, "error": "timed out (a firewall?)"})
    finding = the_one(check(cluster(2), machine(0), firewalled))
    assert (finding.node_rank, finding.severity, finding.check) == (1, "block", "reach master")
    assert re.fullmatch(
        r"cannot reach 10\.0\.0\.0:295\d\d of node0 \(host0\): timed out \(a firewall\?\)", finding.message
    )


def test_a_line_lost_during_the_wire_test_is_a_finding() -> None:
    broken = machine(1).on_program("can reach a port", ConnectionLost("connection lost", node_rank=1))
    assert problems(check(cluster(2), machine(0), broken)) == [(1, "block", "connect")]


def test_one_machine_under_two_names() -> None:
    same = {"hostname": "box", "workdir": "/w"}
    finding = the_one(check(cluster(2), machine(0, **same), machine(1, **same)))
    assert (finding.node_rank, finding.severity, finding.check) == (1, "block", "same machine")
    assert "node0 (host0)" in finding.message


def test_an_address_behind_nat_is_a_warning() -> None:
    assert problems(check(cluster(2), machine(0), machine(1, interface=""))) == [(1, "warn", "interface")]


def test_a_node_reached_over_loopback_is_asked_for_its_outward_address() -> None:
    asked: list[str] = []

    def probe(request: dict[str, Any]) -> dict[str, Any]:
        asked.append(request["peer"])
        address = "10.0.0.9" if request["peer"] else "127.0.0.1"
        own = {"hostname": "me", "address": address, "interface": "eth0", "workdir": "/w"}
        return {**HEALTHY, **own, "times": [time.time()] * 2}

    here = machine(0).on_program("what this machine is and has", probe)
    report = check(cluster(2), here, machine(1))
    assert asked == ["", "10.0.0.1"]
    assert report.facts[0].address == "10.0.0.9"


# -- the table -----------------------------------------------------------


def test_equal_rows_are_folded_and_blocking_ones_say_what_to_do() -> None:
    machines = [machine(k, tmux="" if k == 9 else "3.3a") for k in range(12)]
    output = io.StringIO()
    print_findings(check(cluster(12), *machines), Console(file=output, width=140))
    lines = output.getvalue().splitlines()
    assert any("node0–node8, node10–node11" in line and "tmux 3.3a" in line for line in lines)
    assert "  node9 (host9), tmux: `sudo apt-get install -y tmux` (or dnf, conda)" in lines
    assert len(lines) < 30


def test_small_words() -> None:
    assert node_ranges([0, 1, 2, 5, 7, 8]) == "node0–node2, node5, node7–node8"
    assert [size(n) for n in (5, 1500, 82_440_372_224, 10**15)] == ["5 B", "1.5 kB", "82 GB", "1000 TB"]


# -- the real thing, on this machine -------------------------------------


def local_cluster(tmp_path: Path, count: int, **run: Any) -> ClusterConfig:
    node = NodeConfig(host="localhost", workdir=f"{tmp_path}/node{{node_rank}}")
    return cluster(count, nodes=(node,) * count, transport="local", run=RunConfig(**run))


def test_this_machine_for_real(tmp_path: Path) -> None:
    config = local_cluster(tmp_path, 3)
    report = run_preflight(config, connect_all(config))
    blocking = [finding for finding in report.findings if finding.severity == "block" and finding.check != "tmux"]
    assert blocking == []
    facts = report.facts[2]
    assert (facts.address, facts.interface) == ("127.0.0.1", "lo")
    assert facts.python == sys.executable
    assert facts.versions["python"].startswith(f"{sys.version_info[0]}.{sys.version_info[1]}.")
    assert facts.versions["torch"] and facts.memory > 10**8 and facts.disk_free > 0
    assert abs(facts.clock_offset) < 5
    reached = [finding for finding in report.findings if finding.check == "reach master"]
    assert [(f.node_rank, f.severity) for f in reached] == [(1, "ok"), (2, "ok")]


def test_a_busy_master_port_for_real(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = local_cluster(tmp_path, 2, master_port=taken.getsockname()[1])
        report = run_preflight(config, connect_all(config))
    finding = next(finding for finding in report.findings if finding.check == "master port")
    assert finding.severity == "block"
    assert "python" in finding.message  # this very process holds it


def probe_ports(*ports: int, python: Command | None = None) -> dict[str, Any]:
    empty = dict.fromkeys(("address", "peer", "manifest", "run_dir", "session"), "")
    request = {**empty, "workdir": "/", "ports": list(ports)}
    return call(LocalTransport(0), python or Command((sys.executable,)), program_source("probe"), request, 30)


def test_a_port_with_lingering_connections_is_free_and_a_listening_one_is_not() -> None:
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    assert list(probe_ports(port)["busy_ports"]) == [str(port)]
    client = socket.create_connection(("127.0.0.1", port))
    accepted, _ = server.accept()
    server.close()
    accepted.close()  # the server's side lingers in TIME_WAIT
    client.close()
    assert probe_ports(port)["busy_ports"] == {}


def wire(request: dict[str, Any]) -> dict[str, Any]:
    reply: dict[str, Any] = call(LocalTransport(0), Command((sys.executable,)), program_source("wire"), request, 30)
    return reply


def test_wire_says_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    request = {"role": "connect", "address": "127.0.0.1", "port": port, "token": "t", "name": "n", "seconds": 0.5}
    assert wire(request)["error"].startswith("refused")


def test_wire_does_not_take_another_server_for_ours() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        request = {"role": "connect", "address": "127.0.0.1", "port": other.getsockname()[1]}
        assert wire({**request, "token": "t", "name": "n", "seconds": 0.5})["ok"] is False
        listened = wire({"role": "listen", "port": request["port"], "token": "t", "clients": 1, "seconds": 0.5})
        assert (listened["bound"], listened["error"]) == (False, "Address already in use")


# -- node calls ----------------------------------------------------------

ECHO = "def main(request):\n    print('noise')\n    return {'got': request}"


def echo(python: str, program: str = ECHO, setup: tuple[str, ...] = ()) -> Any:
    return call(LocalTransport(4), Command((python,), setup=setup), program, {"x": "ä"}, 30)


def test_a_call_survives_noise_on_stdout() -> None:
    assert echo(sys.executable, setup=("echo welcome to $HOSTNAME",)) == {"got": {"x": "ä"}}


def test_a_program_that_raises_is_named_with_node_and_python() -> None:
    with pytest.raises(NodeCallError, match=r"(?s)node4 \(local\): .*python.* ended with status 1:.*ZeroDivisionError"):
        echo(sys.executable, "def main(request):\n    1 / 0")


def test_a_missing_python_says_which_key_sets_it() -> None:
    with pytest.raises(NodeCallError, match=r"node4 \(local\): cannot run /no/python .* – set `python`, `venv` or"):
        echo("/no/python")


def find_python(usable: Callable[[tuple[int, int]], bool]) -> str | None:
    """A python3 of some minor version on this machine that really starts."""
    for minor in range(6, 14):
        path = shutil.which(f"python3.{minor}")
        if usable((3, minor)) and path and subprocess.run([path, "-c", ""], capture_output=True).returncode == 0:
            return path
    return None


def test_the_programs_run_on_the_oldest_python_supported() -> None:
    python = find_python(lambda version: (3, 8) <= version < (3, 10))
    if python is None:
        pytest.skip("no python3.8 or 3.9 here")
    assert probe_ports(python=Command((python,)))["versions"]["python"].startswith("3.")
