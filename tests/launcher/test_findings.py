"""Tests of the findings of preflight about packages, devices and limits of machines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from findings_kit import GB, VERSIONS, cluster, found, gpu, survey_of, versions, with_gpus
from launcher.config.schema import ClusterConfig, DataConfig, NodeConfig, RunConfig
from launcher.node.exit_description import size
from launcher.node.programs.packages import PACKAGES
from launcher.preflight.check_health import slow_hosts
from launcher.preflight.finding import Finding
from launcher.preflight.preflight import all_findings
from launcher.preflight.preflight_report import PreflightReport
from launcher.preflight.survey import GraphSize, Survey
from trainer.core.train_config import TrainConfig


def the_one(*arguments: Any, **more: Any) -> Finding:
    """Return the only finding of ``found(*arguments, **more)``."""
    (finding,) = found(*arguments, **more)
    return finding


def on_devices(count: int, *devices: int | str, **more: Any) -> ClusterConfig:
    nodes = tuple(NodeConfig(host=f"host{k}", user="ann", devices=devices, **more) for k in range(count))
    return cluster(count, nodes=nodes)


# -- packages ------------------------------------------------------------


@pytest.mark.parametrize(
    ("package", "version", "usual"),
    [
        ("torch", "2.11.0+cpu", "2.13.0"),
        ("torch_geometric", "2.7.0", "2.8.1"),
        ("numba", "0.60.1", "0.68.1"),
        ("numpy", "1.26.4", "2.4.6"),
    ],
)
def test_a_differing_version_is_reported_with_the_usual_one(package: str, version: str, usual: str) -> None:
    finding = the_one(3, {0: versions(**{package: version})})
    assert (finding.node_rank, finding.severity, finding.check) == (0, "block", "packages")
    assert f"{usual} on node1 (host1), node2 (host2)" in finding.message
    assert finding.message.startswith(f"{package} {version[:3]}")
    assert f"{package}=={usual}" in finding.paste() and finding.paste().startswith("ssh host0 ")


def test_another_python_needs_another_interpreter() -> None:
    finding = the_one(3, {2: versions(python="3.12.1")})
    assert (finding.severity, finding.check, finding.command) == ("block", "python", "")
    assert finding.message == "python 3.12.1, but 3.11.2 on node0 (host0), node1 (host1)" and "`venv`" in finding.remedy
    assert "too old" in the_one(1, {0: versions(python="3.9.2")}).message


def test_harmless_differences_are_listed_but_do_not_block() -> None:
    other = versions(python="3.11.9", torch="2.13.0+cu126", cuda="12.6", numpy="2.4.5", msgspec="0.18", glibc="2.31")
    assert found(3, {1: other}) == []
    message = next(
        f.message for f in all_findings(survey_of(cluster(3), {1: other})) if f.check == "versions" and f.node_rank
    )
    for words in (
        "python 3.11.9, 3.11.2 on",
        "numpy 2.4.5, 2.4.6 on",
        "torch build cu12.6, cpu on",
        "glibc 2.31, 2.36",
    ):
        assert words in message
    assert "CUDA" not in message and "NCCL" not in message  # no node uses devices


def test_one_command_repairs_all_packages_of_a_host() -> None:
    # The command installs the same builds of packages as on nodes of the same kind; it does not change packages whose
    # other version does no harm.
    odd = {"python": "/e/bin/python", **versions(torch="", numba="0.60", numpy="2.4.5", msgspec="")}
    finding = the_one(3, {2: odd})
    assert finding.message.startswith("torch, msgspec not installed for /e/bin/python; numba 0.60, but 0.68.1 on")
    words = "torch==2.13.0+cpu msgspec==0.22.0 numba==0.68.1 --extra-index-url https://download.pytorch.org/whl/cpu"
    assert finding.paste() == f"ssh host2 '/e/bin/python -m pip install {words}'"


def test_no_packages_are_installed_into_a_system_python(monkeypatch: pytest.MonkeyPatch) -> None:
    # A system Python may refuse pip (PEP 668), so the remedy is a venv with the versions of the other nodes. If no node
    # has torch, the versions are those of the launching machine.
    monkeypatch.setattr(
        "launcher.preflight.check_packages._own", lambda: {**VERSIONS, "torch": "2.12.1", "cuda": "12.6"}
    )
    bare = versions(**dict.fromkeys(PACKAGES, ""))
    new, rest = "python3 -m venv ~/gnnfleet-venv && ~/gnnfleet-venv/bin/pip install torch==", "rich==15.0.0"
    cpu = "--extra-index-url https://download.pytorch.org/whl/cpu"
    finding = the_one(3, {2: bare})
    assert finding.command.startswith(f"{new}2.13.0+cpu ") and finding.command.endswith(f" {rest} {cpu}")
    assert "`venv: ~/gnnfleet-venv` of this node" in finding.remedy
    everywhere = found(2, {0: bare, 1: {**bare, "gpus": [gpu()]}})
    assert [one.command.partition(" torch_geometric")[0] for one in everywhere] == [f"{new}2.12.1+cpu", f"{new}2.12.1"]
    assert "--set defaults.venv=~/gnnfleet-venv" in everywhere[0].remedy
    older = the_one(1, {0: versions(**{**dict.fromkeys(PACKAGES, ""), "python": "3.10.4"})})
    # without versions, as new releases may not support Python 3.10
    assert older.command.endswith(f"pip install {' '.join(PACKAGES)} {cpu}")


def test_a_node_whose_key_replaces_the_default_environment_is_told_so_first() -> None:
    note = "`python: /usr/bin/python3` of this node (c.yml:4) replaces `venv: /srv/venv` of `defaults`"
    nodes = (NodeConfig(host="a"), NodeConfig(host="b", python="/usr/bin/python3", replaces=note))
    bare = versions(**dict.fromkeys(PACKAGES, ""))
    finding = the_one(2, {1: bare}, config=cluster(2, nodes=nodes))
    assert finding.message.startswith(f"{note}; torch, ")
    given = "delete that key of the node if the environment of `defaults` is on the host"
    assert finding.remedy.startswith(f"{given}, else create a virtual environment")
    assert the_one(2, {1: versions(numba="")}, config=cluster(2, nodes=nodes)).remedy == given
    assert "defaults" not in the_one(2, {1: versions(torch="2.9.0+cpu")}, config=cluster(2, nodes=nodes)).message


def test_the_command_uses_the_login_of_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.preflight.check_packages._own", lambda: VERSIONS)
    node = NodeConfig(host="gpu1", user="bob", port=2222, key="/k/id", setup=("module load cuda",))
    finding = the_one(1, {0: versions(numba="")}, config=cluster(1, nodes=(node,)))
    command = "/usr/bin/python3 -m pip install numba==0.68.1"
    assert finding.paste() == f"ssh -p 2222 -i /k/id bob@gpu1 'module load cuda; {command}'"
    here = the_one(1, {0: versions(numba="")}, config=cluster(1, transport="local"))
    assert here.paste() == command


def test_an_own_command_requires_torch_only() -> None:
    odd = {1: versions(torch_geometric="", numba=""), 2: versions(numba="0.50")}
    findings = [(f.node_rank, f.severity, f.check) for f in found(3, odd, own_command=True)]
    assert findings == [(1, "warn", "packages"), (2, "warn", "packages")]
    assert the_one(2, {1: versions(torch="")}, own_command=True).severity == "block"


def test_a_cpu_build_of_torch_is_replaced_by_the_build_of_the_other_device_nodes() -> None:
    config = on_devices(3, 0)
    healthy = with_gpus(gpu())
    odd = {0: healthy, 1: healthy, 2: {**healthy, **versions()}}
    finding = the_one(3, odd, config=config)
    assert finding.severity == "block" and "built without CUDA" in finding.message
    assert "torch==2.13.0+cu126 --extra-index-url https://download.pytorch.org/whl/cu126" in finding.command
    assert the_one(3, odd, config=config, own_command=True).severity == "warn"
    alone = the_one(1, {0: odd[2]}, config=on_devices(1, 0)).command
    # pip treats an installed 2.13.0+cpu as 2.13.0
    assert alone.startswith("/usr/bin/python3 -m pip uninstall -y torch && ")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"nccl": "2.26.2"}, "NCCL 2.26.2, but 2.27.5 on node0 (host0), node1 (host1)"),
        ({"cuda": "13.0"}, "torch's CUDA 13.0, but 12.6 on node0 (host0), node1 (host1)"),
        ({"cuda": "12.8"}, None),
    ],
)
def test_nccl_must_be_the_same_and_cuda_of_one_major_version(change: dict[str, str], says: str | None) -> None:
    odd = with_gpus(gpu(), driver="580.65")
    odd["versions"] = {**odd["versions"], **change}
    messages = [
        f.message for f in found(3, {0: with_gpus(gpu()), 1: with_gpus(gpu()), 2: odd}, config=on_devices(3, 0))
    ]
    assert messages == ([says] if says else [])


@pytest.mark.parametrize(
    ("sampling", "severity", "effect"),
    [
        ("auto", "warn", "CPUs sample, and layers use slower torch operations"),
        ("cpu", "warn", "layers use slower torch operations"),
        ("cuda", "block", "train.sampling: cuda needs it"),
    ],
)
def test_numba_cuda_is_needed_on_nodes_with_devices(sampling: Any, severity: str, effect: str) -> None:
    config = on_devices(1, 0, setup=("module load cuda",))
    config = replace(config, train=replace(config.train, sampling=sampling))
    finding = the_one(1, {0: with_gpus(gpu(), numba_cuda="")}, config=config)
    assert (finding.severity, finding.check) == (severity, "packages")
    assert finding.message == f"numba-cuda is not installed for /usr/bin/python3: {effect}"
    assert finding.command == "module load cuda; /usr/bin/python3 -m pip install 'numba-cuda[cu12]>=0.30'"
    older = the_one(1, {0: with_gpus(gpu(), numba_cuda="", cuda="11.8")}, config=config)
    assert older.command == "" and older.remedy.startswith("install torch for CUDA 12 or 13")
    assert found(1, {0: with_gpus(gpu(), numba_cuda="0.30.4")}, config=config) == []
    assert found(1, {0: with_gpus(gpu(), numba_cuda="")}, config=config, own_command=True) == []


# -- devices -------------------------------------------------------------

HELD = "held by run r7 of bob since 2026-11-21 12:03:11 UTC (pid 9)"
LEASE = {"run_id": "r7", "words": HELD, "needs": ["cuda:0"]}
HOLDER = {"pid": 77, "memory": 40_000, "command": "python big.py", "user": "bob", "since": 1_800_000_000.0}


@pytest.mark.parametrize(
    ("devices", "severity", "says"),
    [
        ([], "block", "nvidia-smi lists no device"),
        ([gpu(0)], "block", "no CUDA device 1; the host has 1, numbered from 0"),
        ([gpu(0, used=40_000, holders=[HOLDER]), gpu(1)], "block", "device 0 is not free: 42 GB of 84 GB used, 42 GB "
         "by pid 77 of bob since 2027-01-15 08:00 UTC: python big.py"),
        ([gpu(0, used=40_000), gpu(1)], "block", "by processes that are not visible to your login"),
        ([gpu(0), gpu(1, used=300, holders=[{**HOLDER, "memory": 280}])], "warn", "device 1 is shared: 315 MB of"),
        ([gpu(0, mode="Prohibited"), gpu(1)], "block", "CUDA device 0 is in compute mode Prohibited"),
        ([gpu(0, mig=True), gpu(1)], "warn", "divided into MIG instances"),
        ([gpu(0), gpu(1, ecc=3)], "warn", "CUDA device 1 has had 3 uncorrectable memory errors"),
        ([gpu(0), gpu(1), gpu(2, used=70_000)], None, "2 × H200"),
    ],
)  # fmt: skip
def test_devices(devices: list[dict[str, Any]], severity: str | None, says: str) -> None:
    config, facts = on_devices(1, 0, 1), {0: with_gpus(*devices)}
    if severity is None:
        assert found(1, facts, config=config) == []
        assert says in [f.message for f in all_findings(survey_of(config, facts))]
    else:
        finding = the_one(1, facts, config=config)
        assert (finding.severity, finding.check) == (severity, "devices")
        assert says in finding.message


def test_a_leased_device_is_reported_once_with_its_run() -> None:
    facts = {**with_gpus(gpu(0, used=40_000, holders=[HOLDER])), "leases": [LEASE]}
    finding = the_one(1, {0: facts}, config=on_devices(1, 0))
    assert finding.severity == "block" and finding.message == f"CUDA device 0 is {LEASE['words']}"
    assert "`gnnfleet stop r7`" in finding.remedy
    assert found(1, {0: {**with_gpus(gpu(0), gpu(1)), "leases": [LEASE]}}, config=on_devices(1, 1)) == []


def test_a_launch_that_waits_is_not_refused_because_of_other_runs() -> None:
    ticket = {"run_id": "r8", "words": "waited for by run r8 of al", "needs": ["cuda:0"]}
    used = {"run_id": "r9", "words": "held by run r9 of al", "needs": ["cpu"]}
    config = on_devices(2, 0)
    config = replace(config, nodes=(config.nodes[0], replace(config.nodes[1], devices=())))
    facts = {0: {**with_gpus(gpu(0)), "leases": [LEASE, ticket]}, 1: {"leases": [used, LEASE], "disk_free": 0}}
    report = PreflightReport(findings=tuple(found(2, facts, config=config)))
    others = [one for one in report.findings if one.held_by]
    assert [(one.node_rank, one.severity, one.held_by) for one in others] == [
        (0, "block", "r7"),
        (0, "block", "r8"),
        (1, "warn", "r9"),
    ]
    assert "is waited for by run r8 of al" in others[1].message and "by --wait" in others[1].remedy
    waits = report.to_wait().findings
    assert {one.remedy for one in waits if one.held_by} == {"this run waits for it (--wait)"}
    assert {one.severity for one in waits if one.held_by} == {"warn"}
    assert [one for one in waits if not one.held_by] == [one for one in report.findings if not one.held_by]


INSTANCES = {"mig": True, "instances": ["MIG-aa-1", "MIG-bb-2"]}


@pytest.mark.parametrize(
    ("wanted", "severity", "says"),
    [
        (("GPU-1",), None, "1 × H200"),
        (("MIG-aa", "MIG-bb-2"), None, "2 × H200 (MIG)"),
        (("MIG-cc", 0), "block", "no CUDA device MIG-cc; the host has 2, numbered from 0"),
        ((1,), "warn", "CUDA device 1 is divided into MIG instances"),
    ],
)
def test_devices_by_uuid(wanted: tuple[int | str, ...], severity: str | None, says: str) -> None:
    config, facts = on_devices(1, *wanted), {0: with_gpus(gpu(0), gpu(1, **INSTANCES))}
    if severity is None and "GPU-1" not in wanted:
        assert found(1, facts, config=config) == []
    messages = [f.message for f in all_findings(survey_of(config, facts)) if f.check == "devices"]
    assert any(says in message for message in messages), messages


def test_a_device_is_the_same_by_id_and_by_uuid() -> None:
    facts = {**with_gpus(gpu(0), gpu(1, **INSTANCES)), "hostname": "box"}
    config = on_devices(2, "GPU-0")
    nodes = (config.nodes[0], replace(config.nodes[1], devices=(0,)))
    finding = the_one(2, {0: facts, 1: facts}, config=replace(config, nodes=nodes))
    assert finding.message == "CUDA device 0 is also used by node0 (host0) on the same machine"
    leased = {**facts, "leases": [LEASE]}
    assert the_one(1, {0: leased}, config=on_devices(1, "GPU-0")).message == f"CUDA device GPU-0 is {LEASE['words']}"
    instance = {**facts, "leases": [{**LEASE, "needs": ["cuda:MIG-aa-1"]}]}
    assert found(1, {0: instance}, config=on_devices(1, "MIG-bb-2")) == []
    assert the_one(1, {0: instance}, config=on_devices(1, "MIG-aa-1")).severity == "block"


def test_a_node_without_devices_beside_nodes_with_devices() -> None:
    config = on_devices(2, 0)
    facts = {0: with_gpus(gpu()), 1: versions(torch="2.13.0", cuda="12.6", nccl="2.27.5")}
    for share, waits in ((1.0, True), (0.2, False)):
        nodes = (config.nodes[0], replace(config.nodes[1], devices=(), batch_share=share))
        messages = [f.message for f in found(2, facts, config=replace(config, nodes=nodes)) if f.check == "devices"]
        assert (
            messages
            == ["trains on its CPU as many seeds per step as the nodes with devices, which wait for it"] * waits
        )


def test_a_driver_too_old_for_torch() -> None:
    finding = the_one(1, {0: with_gpus(gpu(), cuda="13.0", driver="550.54.15")}, config=on_devices(1, 0))
    assert finding.message == "driver 550.54.15 is too old for torch's CUDA 13.0, which needs 580 or newer"


def test_two_nodes_of_a_machine_may_not_share_a_device() -> None:
    same = {**with_gpus(gpu(0), gpu(1)), "hostname": "box"}
    finding = the_one(2, {0: same, 1: same}, config=on_devices(2, 0))
    assert (finding.node_rank, finding.severity) == (1, "block")
    assert finding.message == "CUDA device 0 is also used by node0 (host0) on the same machine"


# -- disk and memory -----------------------------------------------------


def disk(free: int, files: int = -1) -> dict[str, Any]:
    return {"disk": {"free": free, "size": 100 * GB, "files": files, "device": 1}}


def test_disk() -> None:
    needed = {0: 2 * GB, 1: 2 * GB}
    assert the_one(2, {1: disk(GB)}, bytes_needed=needed).message == "2.0 GB needed at /home/ann, 1.0 GB free"
    assert the_one(2, {1: disk(2 * GB + 1)}, bytes_needed=needed).severity == "warn"
    assert found(2, {1: {**disk(GB), "stored": 1.5 * GB}}, bytes_needed=needed) == []  # 1.5 of 2 GB were sent before
    assert "no inodes left" in the_one(1, {0: disk(9 * GB, files=0)}).message


def test_needs_of_nodes_on_one_machine_are_added_up() -> None:
    same = {"hostname": "box", **disk(3 * GB)}
    findings = found(2, {0: same, 1: same}, bytes_needed={0: 2 * GB, 1: 2 * GB})
    assert [f.message for f in findings] == ["4.0 GB needed at /home/ann by 2 nodes on this host, 3.0 GB free"] * 2
    small = {"hostname": "box", "memory_limit": GB // 2}
    assert "at least 700 MB of memory needed by 2 nodes" in found(2, {0: small, 1: small})[0].message


@pytest.mark.parametrize(
    ("error", "remedy"),
    [("disk quota exceeded", "quota"), ("read-only file system", "disk"), ("permission denied", "owner or mode")],
)
def test_a_work_folder_that_cannot_be_written(error: str, remedy: str) -> None:
    finding = the_one(1, {0: {"workdir_error": error}})
    assert finding.message == f"workdir /w/0: cannot write in /home/ann: {error}" and remedy in finding.remedy


def test_noexec_is_reported_for_own_commands_only() -> None:
    assert found(1, {0: {"noexec": True}}) == []
    assert the_one(1, {0: {"noexec": True}}, own_command=True).severity == "warn"


def test_memory_against_the_needs_of_the_processes() -> None:
    procs = cluster(1, nodes=(NodeConfig(host="host0", procs=8),))
    block = the_one(1, {0: {"memory_limit": 2 * GB}}, config=procs)
    assert block.severity == "block" and block.message == "at least 2.2 GB of memory needed, the limit is 2.0 GB"
    warn = the_one(1, {0: {"memory_free": 2 * GB}}, config=procs)
    assert warn.severity == "warn" and warn.message == "up to 2.2 GB of memory needed, 2.0 GB free"
    assert found(1, {0: {"memory_limit": 2 * GB, "memory_free": GB}}, config=procs, own_command=True) == []


def test_memory_against_batches_and_parts() -> None:
    config = replace(cluster(1), train=TrainConfig(batch_size=1024, fanouts=(15, 10, 5), prefetch=3))
    graph = GraphSize(nodes=100_000_000, row_bytes=4096)
    assert "up to 16 GB of memory needed" in the_one(1, config=config, graph=graph).message
    assert found(1, config=config, graph=GraphSize(nodes=100_000, row_bytes=400)) == []
    many = the_one(1, {0: disk(99 * GB)}, bytes_needed={0: 80 * GB})
    assert many.severity == "warn" and "parts of 80 GB and the processes do not fit into 16 GB" in many.message


def test_shared_memory_and_tmp() -> None:
    shm = {"shm": {"free": 64 << 20, "size": 64 << 20, "files": -1, "device": 3}}
    facts = {**with_gpus(gpu(0), gpu(1)), **shm}
    assert "67 MB free at /dev/shm" in the_one(1, {0: facts}, config=on_devices(1, 0, 1)).message
    assert found(1, {0: facts}, config=on_devices(1, 0)) == []
    full = {"tmp": {"free": 0, "size": GB, "files": -1, "device": 2, "error": "no space left on device"}}
    assert the_one(1, {0: full}).message.endswith("no space left on device")


def test_data_must_exist_in_mode_verify() -> None:
    config = cluster(2, data=DataConfig(dataset="synthetic", folder="/shared/parts", mode="verify"))
    finding = the_one(2, {0: {"manifest": True}}, config=config)
    assert (finding.node_rank, finding.check) == (1, "data")
    assert finding.message == "no partitioned graph: no manifest.json in /shared/parts"


# -- the rest ------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "severity", "check", "says"),
    [
        ({"tmux": ""}, "block", "tmux", "not installed"),
        ({"tmux": "1.8"}, "block", "tmux", "tmux 1.8 is too old; 2.1 or newer"),
        ({"tmux_error": "/tmp/tmux-7 belongs to another user (uid 8)"}, "block", "tmux", "belongs to another user"),
        ({"taken": "/w/1/runs/r/node1"}, "block", "run id", "/w/1/runs/r/node1 exists"),
        ({"open_files": 64}, "block", "open files", "64 open files allowed (ulimit -n), 264 needed for 2 processes"),
        ({"lease_error": "/tmp/x: no"}, "warn", "leases", "/tmp/x: no"),
        ({"leases": [{**LEASE, "needs": ["port:29600"]}]}, "warn", "other runs", "its CPUs are held by run r7 of bob"),
        ({"names": {"head": ""}}, "block", "names", "cannot resolve head, the address of node0 (host0)"),
        ({"names": {"head": "127.0.1.1"}}, "block", "names", "resolves to 127.0.1.1, which is this node itself"),
    ],
)
def test_findings_about_a_machine(facts: Mapping[str, Any], severity: str, check: str, says: str) -> None:
    config = cluster(2, run=RunConfig(master_addr="head"))
    finding = the_one(2, {1: facts}, config=config)
    assert (finding.node_rank, finding.severity, finding.check) == (1, severity, check)
    assert says in finding.message and finding.remedy


def test_unusual_versions_of_tmux_are_accepted() -> None:
    assert found(3, {0: {"tmux": "next-3.5"}, 1: {"tmux": "master"}, 2: {"tmux": "3.3a"}}) == []


def test_the_remedy_for_open_files_depends_on_the_hard_limit() -> None:
    assert "`ulimit -n 260`" in the_one(1, {0: {"open_files": 64}}).remedy
    assert "limits.conf" in the_one(1, {0: {"open_files": 64, "open_files_most": 64}}).remedy


def test_a_wrong_clock_is_only_a_warning() -> None:
    finding = the_one(1, clock_offsets={0: 300.0})
    assert (finding.severity, finding.message) == ("warn", "clock is 300 s ahead of the launching machine's")
    assert "no action needed" in finding.remedy and found(1, clock_offsets={0: -4.0}) == []


def test_a_busy_master_port_is_reported_with_the_process_that_uses_it() -> None:
    config = cluster(2, run=RunConfig(master_port=29500))
    finding = the_one(2, {0: {"busy_ports": {"29500": "in use (pid 7: python old.py)"}}}, config=config)
    assert (finding.node_rank, finding.severity, finding.check) == (0, "block", "master port")
    assert finding.message == "port 29500 is in use (pid 7: python old.py)" and "run.master_port" in finding.remedy


def test_leftovers_are_reported_with_the_command_that_ends_them() -> None:
    left = {"leftovers": [{"run_id": "r1", "pids": [5, 6], "commands": ["python train.py"]}]}
    finding = the_one(1, {0: left})
    assert finding.severity == "warn" and "2 processes of run r1 still running" in finding.message
    assert finding.paste() == "ssh host0 'kill -KILL 5 6'"


def test_one_machine_under_two_names() -> None:
    same = {"hostname": "box", "workdir": "/w"}
    finding = the_one(2, {0: same, 1: same})
    assert (finding.node_rank, finding.severity, finding.check) == (1, "block", "same machine")
    assert "node0 (host0)" in finding.message


def test_code_on_one_node_only_is_not_a_difference() -> None:
    survey: Survey = survey_of(cluster(2), {0: {"code": True}}, code_digest="0123456789abcdef")
    messages = [f.message for f in all_findings(survey) if f.check == "code"]
    assert messages == ["gnnfleet's code 01234567 is on the host", "gnnfleet's code 01234567 will be sent at launch"]


def test_formatted_sizes() -> None:
    assert [size(n) for n in (5, 1500, 82_440_372_224, 10**15)] == ["5 B", "1.5 kB", "82 GB", "1000 TB"]


# -- health of hosts -----------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"ecc": 2}, "2 uncorrectable memory errors"),
        ({"rows": "failure"}, "no spare row left"),
        ({"rows": "pending"}, "at its next reset"),
        ({"temperature": 91, "slowed": "heat"}, "lowered its clocks because of heat (it has 91 °C)"),
        ({"slowed": "heat or power"}, "because of heat or power"),
        ({"temperature": 88}, "has 88 °C"),
        ({"width": 8, "width_max": 16}, "8 of 16 PCIe lanes"),
    ],
)
def test_a_faulty_gpu_is_a_warning(facts: dict[str, Any], words: str) -> None:
    well = {"temperature": 60, "slowed": "", "rows": "", "width": 16, "width_max": 16}
    gpus = [gpu(0, **well), gpu(1, **{**well, **facts})]
    finding = the_one(1, {0: with_gpus(*gpus)}, config=on_devices(1, 0, 1))
    assert (finding.severity, finding.check, finding.code) == ("warn", "devices", "gpu-fault")
    assert words in finding.message and "CUDA device 1" in finding.message and finding.remedy
    assert found(1, {0: with_gpus(*gpus)}, config=on_devices(1, 0)) == []  # of a device that the run does not use


def test_faults_in_the_kernel_log_are_warnings() -> None:
    lost = {"pci": "3b:00", "index": 0, "code": 79, "count": 2}
    faults = [lost, {"pci": "5e:00", "index": None, "code": 999, "count": 1}]
    first, second = found(1, {0: {**with_gpus(gpu()), "faults": faults}}, config=on_devices(1, 0))
    assert first.message.startswith("CUDA device 0 has reported Xid 79 (the GPU has fallen off the bus) since")
    assert first.message.endswith(", 2 times")
    assert second.message.startswith("the GPU at PCI 5e:00, which nvidia-smi does not list, has reported Xid 999 since")


def test_hosts_are_compared_with_those_that_have_as_many_processors() -> None:
    def figures(product: float, copy: float = 10.0, by: str = "torch") -> dict[str, Any]:
        return {"product": product, "copy": copy, "disk": 500.0, "by": by}

    probes = {k: {"cpus": 16 if k < 4 else 4} for k in range(6)}
    products = {0: 400, 1: 410, 3: 390, 4: 90, 5: 70}
    measured = {**{k: figures(product) for k, product in products.items()}, 2: figures(200, copy=3.5)}
    slow = slow_hosts(measured, probes)
    assert [k for k in slow if slow[k]] == [2]
    assert slow[2] == [
        "multiplies matrices at 51 % of the median of the 4 hosts with 16 processors (200 of 395 GFLOP/s)",
        "copies memory at 35 % of the median of the 4 hosts with 16 processors (3.5 of 10 GB/s)",
    ]
    measured[2] = figures(200, by="numpy")  # computes by another library
    assert slow_hosts(measured, probes)[2] == []
