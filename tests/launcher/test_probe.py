"""Tests of the probe program, which preflight runs on each node; here it runs on this machine."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
import venv
from ast import literal_eval
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.command import Command
from launcher.errors import FleetError
from launcher.node import leases, procs
from launcher.node.programs import folders, machine, network, packages, probe
from launcher.plan.partition import read_partition_files
from launcher.transport.local import LocalTransport
from launcher.transport.rpc import NodeAgent
from waiting import wait_until

SMI = """#!/bin/bash
echo "$1" >>"$0.asked"
case "$1" in
  *event_reasons*) [ -e "$0.health" ] && cat "$0.health" || exit 2;;
  *throttle_reasons*) [ -e "$0.throttle" ] && cat "$0.throttle" || exit 2;;
  *remapped-rows*) [ -e "$0.rows" ] && cat "$0.rows" || exit 2;;
  *mig.mode*) [ -e "$0.gpus" ] && cat "$0.gpus" || exit 2;;
  *query-gpu*) cat "$0.short";;
  *compute-apps*) cat "$0.apps";;
esac
"""


@pytest.fixture(autouse=True)
def own_leases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GNNFLEET_LEASES", str(tmp_path / "leases"))


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a stub of nvidia-smi on PATH; return its path. The stub prints a file that a test writes beside it."""
    path = tmp_path / "bin" / "nvidia-smi"
    path.parent.mkdir()
    path.write_text(SMI)
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")
    return path


def request(workdir: Path | str = "/", **more: Any) -> dict[str, Any]:
    empty = dict.fromkeys(("address", "peer", "manifest", "run_dir", "session"), "")
    return {**empty, "workdir": str(workdir), "ports": [], **more}


def probed(python: str = sys.executable, **more: Any) -> dict[str, Any]:
    with NodeAgent(LocalTransport(0), Command((python,))) as agent:
        reply: dict[str, Any] = agent.call("probe", request(**more), 30)
    return reply


# -- packages ------------------------------------------------------------


def test_versions_are_those_that_importing_would_find() -> None:
    found = probed()["versions"]
    for name in packages.PACKAGES:
        assert found[name] == importlib.metadata.version(name)
    assert found["python"] == ".".join(map(str, sys.version_info[:3])) and found["arch"] == os.uname().machine


def test_cuda_of_torch_is_found_without_importing_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/version.py").write_text("cuda: Optional[str] = '12.6'\nhip: Optional[str] = None\n")
    for name in ("torch-2.9.1+cu126.dist-info", "nvidia_nccl_cu12-2.27.5.dist-info", "nvidia_nccl_cu11-2.1.dist-info"):
        (tmp_path / name).mkdir()
    (tmp_path / "numpy-1.24.2-py3.11.egg-info").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    found = packages.versions()
    assert [found[name] for name in ("torch", "cuda", "nccl", "numpy")] == ["2.9.1+cu126", "12.6", "2.27.5", "1.24.2"]
    assert found["numba"] == ""


def versions_found_by(python: Path, *flags: str) -> dict[str, str]:
    code = "from launcher.node.programs import packages; print(packages.versions())"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([str(python), *flags, "-c", code], env=env, capture_output=True, text=True, check=True)
    found: dict[str, str] = literal_eval(done.stdout)
    return found


def test_without_the_site_module_the_same_packages_are_found(tmp_path: Path) -> None:
    # The agent runs under `python -S`, which reads no .pth file and does not activate a virtual environment; the probe
    # must find the same versions of packages as without `-S`.
    assert versions_found_by(Path(sys.executable), "-S") == versions_found_by(Path(sys.executable))
    venv.create(tmp_path / "env", symlinks=True)
    (site,) = (tmp_path / "env").glob("lib/python*/site-packages")
    (site / "numpy-1.24.2.dist-info").mkdir()
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))
    in_venv = versions_found_by(tmp_path / "env/bin/python", "-S")
    assert in_venv["numpy"] == "1.24.2" and in_venv["torch"] == versions_found_by(Path(sys.executable))["torch"]
    assert in_venv == versions_found_by(tmp_path / "env/bin/python")


def test_programs_for_all_nodes_import_few_modules() -> None:
    # Importing one of the modules in `heavy` takes about as long as starting Python, and the programs run on up to a
    # hundred nodes at once.
    heavy = {"typing", "json", "subprocess", "socket", "threading", "re", "enum", "collections"}
    programs = "agent, folders, network, probe"
    code = f"import sys; from launcher.node.programs import {programs}; print({heavy!r} & set(sys.modules))"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-S", "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_graph_size_of_parts_on_the_node(tmp_path: Path) -> None:
    file = {"path": "part0/nodes/node/attrs/x.npy", "bytes": 4000}
    (tmp_path / "manifest.json").write_text(json.dumps({"nodes": {"node": {"num_nodes": 10}}, "files": [file]}))
    assert packages.graph_size(f"{tmp_path}/manifest.json") == {"nodes": 10, "row_bytes": 400.0, "topology_bytes": 0}
    (tmp_path / "manifest.json").write_text("[]")
    assert packages.graph_size(f"{tmp_path}/manifest.json") == {}
    (tmp_path / "manifest.json").unlink()
    os.mkfifo(tmp_path / "manifest.json")  # opening it would block
    assert packages.graph_size(f"{tmp_path}/manifest.json") == {}
    with pytest.raises(FleetError, match=r"manifest.json: cannot be read: not a regular file"):
        read_partition_files(tmp_path)


# -- devices -------------------------------------------------------------

GPUS = """0, GPU-a, NVIDIA H200, 143771, 61000, Default, Disabled, 0, 570.86.15
1, GPU-b, NVIDIA H200, 143771, 0, Exclusive_Process, Enabled, 2, 570.86.15
2, GPU-c, GeForce GT 710, 2048, 3, Default, [N/A], [N/A], 570.86.15
"""


def test_devices_and_their_processes(smi: Path) -> None:
    Path(f"{smi}.gpus").write_text(GPUS)
    Path(f"{smi}.apps").write_text(f"GPU-a, {os.getpid()}, python, 60000\nGPU-a, 4194999, [Not Found], 500\n")
    found = probed(devices=True)
    assert found["devices"] == ["NVIDIA H200", "NVIDIA H200", "GeForce GT 710"] and found["driver"] == "570.86.15"
    first, second, third = found["gpus"]
    mine, unseen = first["holders"]
    assert (mine["pid"], mine["memory"], mine["user"]) == (os.getpid(), 60000, leases._user(os.getuid()))
    assert " ".join(sys.orig_argv).startswith(mine["command"]) and 0 < time.time() - mine["since"] < 3600 * 24
    assert (unseen["user"], unseen["command"]) == ("", "[Not Found]")
    assert (second["mode"], second["mig"], second["ecc"]) == ("Exclusive_Process", True, 2)
    assert (third["mig"], third["ecc"], third["used"]) == (False, 0, 3)


LISTED = """GPU 0: NVIDIA H200 (UUID: GPU-a)
GPU 1: NVIDIA H200 (UUID: GPU-b)
  MIG 1g.18gb     Device  0: (UUID: MIG-5f1a)
  MIG 1g.18gb     Device  1: (UUID: MIG-GPU-b/7/0)
"""


def test_mig_instances_are_listed(smi: Path) -> None:
    gpus = [machine.gpu(row) for row in machine.table(GPUS, 9)]
    machine.add_instances(gpus, LISTED)
    assert [gpu["instances"] for gpu in gpus] == [[], ["MIG-5f1a", "MIG-GPU-b/7/0"], []]


def test_an_old_driver_is_queried_for_fewer_fields(smi: Path) -> None:
    Path(f"{smi}.short").write_text("0, GPU-a, Tesla K80, 11441, 0, 418.87\n")
    found = probed(devices=True)
    assert (found["devices"], found["driver"]) == (["Tesla K80"], "418.87")


def test_nvidia_smi_is_started_only_if_devices_are_wanted(smi: Path) -> None:
    assert probed()["gpus"] == []
    assert not Path(f"{smi}.asked").exists()


HEALTH = """GPU-a, 00000000:3B:00.0, 91, 8, 16, 0x0000000000000044
GPU-b, 00000000:5E:00.0, 40, 16, 16, 0x0000000000000001
GPU-c, 00000000:05:00.0, [N/A], [N/A], [N/A], [N/A]
"""
KERNEL_LOG = """#!/bin/sh
echo '[ 12.1] NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.'
echo '[ 12.3] NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.'
echo '[ 13.0] NVRM: Xid (PCI:0000:5e:00): 31, pid=7, name=python, MMU fault'
echo '[ 14.0] NVRM: Xid (PCI:0001:af:00): 48, pid=1, DBE'
"""


@pytest.mark.parametrize("name", ["health", "throttle"])
def test_the_health_of_gpus(smi: Path, name: str) -> None:
    Path(f"{smi}.gpus").write_text(GPUS)
    Path(f"{smi}.{name}").write_text(HEALTH)
    Path(f"{smi}.rows").write_text("GPU-a, No, Yes\nGPU-b, 1, 0\n")
    (smi.parent / "dmesg").write_text(KERNEL_LOG)
    (smi.parent / "dmesg").chmod(0o755)
    found = probed(devices=True)
    keys = ("temperature", "width", "width_max", "slowed", "rows")
    assert [tuple(gpu[key] for key in keys) for gpu in found["gpus"]] == [
        (91, 8, 16, "heat", "failure"),
        (40, 16, 16, "", "pending"),
        (0, 0, 0, "", ""),
    ]
    assert found["faults"] == [
        {"pci": "1:af:00", "index": None, "code": 48, "count": 1},
        {"pci": "3b:00", "index": 0, "code": 79, "count": 2},
    ]


def test_a_driver_that_says_nothing_about_health_and_a_kernel_log_that_cannot_be_read(smi: Path) -> None:
    Path(f"{smi}.gpus").write_text(GPUS)
    for name in ("dmesg", "journalctl"):
        (smi.parent / name).write_text("#!/bin/sh\nexit 1\n")
        (smi.parent / name).chmod(0o755)
    found = probed(devices=True)
    assert [(gpu["temperature"], gpu["slowed"], gpu["rows"]) for gpu in found["gpus"]] == [(0, "", "")] * 3
    assert found["faults"] == []


@pytest.mark.slow
def test_the_speed_of_a_machine(tmp_path: Path) -> None:
    with NodeAgent(LocalTransport(0), Command((sys.executable,))) as agent:
        found = agent.call("speed", {"folder": f"{tmp_path}/not/yet", "seconds": 0.02}, 120)
        gone = agent.call("speed", {"folder": "/proc", "seconds": 0.02}, 120)
    assert found["by"] == "torch" and min(found[name] for name in ("product", "copy", "disk")) > 0
    assert gone["disk"] == 0.0 and list(tmp_path.iterdir()) == []


# -- folders, memory, names ----------------------------------------------


def test_folders_are_checked_by_writing(tmp_path: Path) -> None:
    found = probed(workdir=tmp_path / "not/yet/there")
    assert found["workdir_base"] == str(tmp_path) and found["workdir_error"] == ""
    assert found["disk"]["free"] == found["disk_free"] > 0 and found["tmp"]["error"] == ""
    assert list(tmp_path.glob(".gnnfleet*")) == []
    (tmp_path / "file").touch()
    assert folders.why_not_writable(str(tmp_path / "file")) == "it is not a folder"
    assert folders.why_not_writable("/proc") != ""


def test_a_full_disk_is_found_by_writing(tmp_path: Path) -> None:
    if os.getuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32k", "t", tmp_path]).returncode:
        pytest.skip("cannot mount a small disk here")
    try:
        assert folders.why_not_writable(str(tmp_path)) == "no space left on device"
        subprocess.run(["mount", "-o", "remount,ro", tmp_path], check=True)
        assert folders.why_not_writable(str(tmp_path)) == "read-only file system"
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_bytes_of_parts_sent_before(tmp_path: Path) -> None:
    (tmp_path / "data/f1/part0").mkdir(parents=True)
    (tmp_path / "data/f1/part0/x.npy").write_bytes(bytes(1000))
    assert probed(workdir=tmp_path, parts=f"{tmp_path}/data/f1")["stored"] == 1000
    assert probed(workdir=tmp_path, parts=f"{tmp_path}/data/f2")["stored"] == 0


def test_code_sent_before(tmp_path: Path) -> None:
    (tmp_path / "code" / "c0de" / "c0de").mkdir(parents=True)
    digest = "abcdef0123456789" * 4
    assert probed(workdir=tmp_path, code=digest)["code"] is False
    (tmp_path / "code" / digest[:16]).mkdir()
    assert probed(workdir=tmp_path, code=digest)["code"] is True


def test_free_memory_respects_control_groups(tmp_path: Path) -> None:
    inner = tmp_path / "user/session"
    inner.mkdir(parents=True)
    (inner / "memory.max").write_text("max\n")
    (tmp_path / "user/memory.max").write_text("3000\n")
    (tmp_path / "user/memory.current").write_text("1500\n")
    (tmp_path / "user/memory.stat").write_text("anon 900\ninactive_file 500\n")
    names = ("memory.max", "memory.current", "inactive_file")
    assert machine.group_limits(str(tmp_path), "/user/session", *names) == [(3000, 2000)]
    found = probed()
    assert 0 < found["memory_free"] <= found["memory_limit"] <= found["memory"]


def test_cpus_respect_the_quota_of_a_control_group(tmp_path: Path) -> None:
    inner = tmp_path / "user" / "session"
    inner.mkdir(parents=True)
    (inner / "cpu.max").write_text("max 100000\n")
    assert machine.group_cpus(str(tmp_path), "/user/session") == []
    (tmp_path / "user" / "cpu.max").write_text("250000 100000\n")
    assert machine.group_cpus(str(tmp_path), "/user/session") == [2.5]
    older = tmp_path / "v1" / "docker"
    older.mkdir(parents=True)
    for name, value in (("quota", -1), ("period", 100000)):
        (older / f"cpu.cfs_{name}_us").write_text(f"{value}\n")
    assert machine.group_cpus(str(tmp_path / "v1"), "/docker") == []
    (older / "cpu.cfs_quota_us").write_text("150000\n")
    assert machine.group_cpus(str(tmp_path / "v1"), "/docker") == [1.5]
    assert 1 <= machine.cpus() <= len(os.sched_getaffinity(0))


def test_names_are_resolved_within_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert probed(names=["localhost", "no-such-host.invalid"])["names"]["no-such-host.invalid"] == ""
    monkeypatch.setattr(probe, "RESOLVE_SECONDS", 0.2)
    monkeypatch.setattr(probe, "lookup", lambda name: time.sleep(5) if name == "slow" else "10.0.0.1")
    assert network.resolved({"gpu1..lan"}) == {"gpu1..lan": ""}
    monkeypatch.delenv("SSH_CONNECTION", raising=False)
    assert probed(peer="gpu1..lan")["address"] == "127.0.0.1"
    assert probe.resolved(["slow", "quick"]) == {"slow": "", "quick": "10.0.0.1"}


# -- ports, leases, leftovers --------------------------------------------


def test_a_port_in_time_wait_is_free_and_a_listening_one_is_not() -> None:
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    assert list(probed(ports=[port])["busy_ports"]) == [str(port)]
    client = socket.create_connection(("127.0.0.1", port))
    accepted, _ = server.accept()
    server.close()
    accepted.close()  # the server's side stays in TIME_WAIT
    client.close()
    assert probed(ports=[port])["busy_ports"] == {}


def test_leases_of_living_runs_are_reported_and_their_ports_are_busy() -> None:
    assert probed()["leases"] == []
    assert leases.take(["cuda:0", "port:29777"], leases.this_process("r1", 0, "ann@laptop")) == []
    found = probed(ports=[29777, 29778])
    assert [one["resource"] for one in found["leases"]] == ["cuda:0", "port:29777"]
    assert list(found["busy_ports"]) == ["29777"] and "held by run r1" in found["busy_ports"]["29777"]
    assert found["lease_error"] == ""


def test_unreadable_leases_are_reported(tmp_path: Path) -> None:
    (tmp_path / "leases").write_text("")
    assert "is not a folder" in probed()["lease_error"]


@pytest.fixture
def orphan(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Yield a process of run r1 on node0 whose supervisor has ended."""
    folder = tmp_path / "runs/r1/node0"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text('{"state": "training", "pid": 4194999, "start_ticks": 7, "processes": []}')
    process = subprocess.Popen(["sleep", "60"], env={"GNNFLEET_RUN_DIR": str(folder), "PATH": os.environ["PATH"]})
    yield process
    process.kill()
    process.wait()


def test_processes_of_a_run_without_a_supervisor_are_leftovers(tmp_path: Path, orphan: subprocess.Popen[bytes]) -> None:
    wait_until(lambda: procs.command_line(orphan.pid).startswith("sleep"))
    expected = [{"run_id": "r1", "pids": [orphan.pid], "commands": ["sleep 60"]}]
    assert probed(workdir=tmp_path)["leftovers"] == expected
    (tmp_path / "runs/r1/node0/result.json").touch()
    assert probed(workdir=tmp_path)["leftovers"] == []


def test_processes_of_a_live_run_are_no_leftovers(tmp_path: Path, orphan: subprocess.Popen[bytes]) -> None:
    me = procs.look(os.getpid())
    assert me is not None
    state = f'{{"state": "training", "pid": {me.pid}, "start_ticks": {me.start_ticks}, "processes": []}}'
    (tmp_path / "runs/r1/node0/state.json").write_text(state)
    assert probed(workdir=tmp_path)["leftovers"] == []


# -- the programs themselves ---------------------------------------------


def find_python(usable: Callable[[tuple[int, int]], bool]) -> str | None:
    """Return a python3 of this machine for which ``usable((major, minor))`` is true, or None."""
    for minor in range(6, 14):
        path = shutil.which(f"python3.{minor}")
        if usable((3, minor)) and path and subprocess.run([path, "-c", ""], capture_output=True).returncode == 0:
            return path
    return None


def test_the_probe_runs_on_the_oldest_python_supported() -> None:
    python = find_python(lambda version: (3, 8) <= version < (3, 10))
    if python is None:
        pytest.skip("no python3.8 or 3.9 here")
    assert probed(python)["versions"]["python"].startswith("3.")


def test_the_probe_imports_few_modules() -> None:
    # The probe must not import modules that take milliseconds to load, because it runs on up to a hundred hosts at
    # once.
    code = (
        "import json, sys; from launcher.node.programs import probe; "
        "probe.main(json.loads(sys.argv[1])); print(*sys.modules)"
    )
    argv = [sys.executable, "-c", code, json.dumps(request())]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert not loaded & {
        "importlib.metadata",
        "launcher.node.leases",
    }


def test_instructions_for_bfloat16_are_found() -> None:
    for flags, found in (("fpu avx512_bf16 amx_bf16", "amx_bf16"), ("avx512_bf16", "avx512_bf16"), ("avx512f", "")):
        assert machine.bfloat16(f"processor\t: 0\nflags\t\t: {flags}\n") == found
    assert machine.capacity()["bfloat16"] in ("", "amx_bf16", "avx512_bf16", "bf16")


def test_a_folder_of_tmux_sockets_that_tmux_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMUX_TMPDIR", str(tmp_path))
    folder = tmp_path / f"tmux-{os.getuid()}"
    assert machine.tmux_folder_error() == ""  # tmux creates it
    folder.mkdir(mode=0o700)
    assert machine.tmux_folder_error() == ""
    folder.chmod(0o755)
    assert machine.tmux_folder_error().endswith("is open to all users (mode 755)")
    if os.getuid() == 0:
        os.chown(folder, 12345, 12345)
        assert machine.tmux_folder_error().endswith("belongs to another user (uid 12345)")
    folder.rmdir()
    folder.symlink_to(tmp_path)
    assert machine.tmux_folder_error().endswith("is not a folder")
