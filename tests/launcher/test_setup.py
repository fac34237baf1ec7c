"""Tests of ``gnnfleet setup`` on this machine, with tiny wheels, and of its decisions for hosts of all kinds."""

from __future__ import annotations

import ast
import configparser
import io
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from launcher.cli.main import run
from launcher.command import Command, shell_line
from launcher.config.resolve import resolve
from launcher.config.roles import kernel_requirement
from launcher.config.schema import DataConfig, NodeConfig
from launcher.errors import UsageError
from launcher.node.programs import downloads, host_survey, install
from launcher.node.programs.packages import PACKAGES
from launcher.plan.placement import ANY_PYTHON, MORE_PYTHONS
from launcher.setup import lock, own_wheel, wheels
from launcher.setup import setup as program
from launcher.setup.lock import conflict, cuda_version, kernel_roots, lock_of
from launcher.setup.plan import Action, HostPlan, SetupPlan, make_plan, with_sources
from launcher.setup.render import print_plan, shown_changes
from launcher.setup.requirements import Requirements, Target, closure, required
from launcher.setup.survey import HostState, Interpreter
from launcher.setup.wheels import NoWheels, SetupError, WheelLock, download, run_pip
from plan_kit import cluster
from setup_kit import (
    CUDA_REQUIRES,
    OTHER,
    REQUIREMENTS,
    CutServer,
    add_cuda_wheels,
    host_state,
    installed,
    lock_for,
    make_index,
    served,
)

CPU = Target("3.11", "x86_64", "2.36", "cpu")


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_index(tmp_path_factory.mktemp("index"))


@pytest.fixture(autouse=True)
def only_the_index(index: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pip see only the tiny wheels. All tests of this file share one cache of locks and wheels."""
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(index), "CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(index.parent / "cache"))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/usr/bin:/bin")  # without pyenv's slow shims
    monkeypatch.setattr(program, "required", lambda more: REQUIREMENTS)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Return a cluster file with two local nodes that use the same environment, which does not exist yet."""
    file = tmp_path / "cluster.yml"
    node = f"{{host: localhost, venv: {tmp_path}/env}}"
    file.write_text(f"transport: local\nnodes: [{node}, {node}]\ndata: {{dataset: synthetic}}\n")
    return file


def setup(config: Path, *words: str) -> int:
    return run(["setup", "--config", str(config), *words])


def site_packages(environment: Path) -> Path:
    return next(environment.glob("lib/python*/site-packages"))


def versions_in(environment: Path) -> dict[str, str]:
    names = (path.name.removesuffix(".dist-info") for path in site_packages(environment).glob("*.dist-info"))
    return dict(name.split("-") for name in names)  # type: ignore[misc]


@pytest.mark.slow
def test_environments_are_made_kept_and_repaired(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = tmp_path / "env"
    (tmp_path / "env.setup/env/bin").mkdir(parents=True)  # as an interrupted setup leaves it
    assert setup(config, "--yes") == 0
    shown = capsys.readouterr().out
    assert "make it: 3 packages, torch 9.1.0+cpu; sent from this machine" in shown
    assert "the folder of node0 (localhost)" in shown and "Set up 1 host. Next: gnnfleet check" in shown
    assert versions_in(environment) == REQUIREMENTS.pins
    script = subprocess.run([environment / "bin/torchrun"], capture_output=True, text=True, check=True)
    assert script.stdout == "9.1.0+cpu\n"  # its first line names the final folder
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cluster.yml", "env"]

    assert setup(config) == 0
    assert "Nothing to do: 2 nodes complete." in capsys.readouterr().out

    packages = site_packages(environment)
    (packages / "graphdep-1.2.0.dist-info").rename(packages / "graphdep-1.3.0.dist-info")
    (packages / "mine-1.0.dist-info").mkdir()
    (environment / install.UNFINISHED).write_text('["torch"]')  # as an interrupted repair leaves it
    (packages / "torch.py").unlink()
    assert setup(config, "--yes") == 0
    changes = "install graphdep 1.3.0 → 1.2.0, torch 9.1.0+cpu → 9.1.0+cpu; sent from this machine"
    assert changes in capsys.readouterr().out
    assert versions_in(environment) == {**REQUIREMENTS.pins, "mine": "1.0"}
    assert (packages / "torch.py").exists() and not (environment / install.UNFINISHED).exists()


@pytest.mark.slow
def test_a_dry_run_and_a_refused_question_change_nothing(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert setup(config, "--dry-run", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert [(host["action"], host["python"]) for host in answer["hosts"]] == [
        ("make", ".".join(map(str, sys.version_info[:2]))), ("shared", "–")
    ]  # fmt: skip
    assert answer["hosts"][0]["packages"] == REQUIREMENTS.pins
    assert setup(config) == 2
    assert "cannot ask whether to install this without a terminal; give --yes" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["cluster.yml"]


@pytest.mark.slow
def test_a_failed_installation_leaves_no_environment(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = make_index(tmp_path / "broken", torch="raise ImportError('libcuda.so.1: cannot open shared object file')")
    with served(broken) as url, monkeypatch.context() as patched:
        patched.setenv("PIP_FIND_LINKS", f"{url}/")
        patched.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        assert setup(config, "--yes") == 1
    shown = capsys.readouterr().out
    assert "make it: 3 packages, torch 9.1.0+cpu; the host downloads them" in shown
    assert "node0 (localhost): " in shown and "ImportError: libcuda.so.1: cannot open shared object file" in shown
    assert not (tmp_path / "env").exists()


def test_a_cut_download_is_resumed_and_a_wrong_file_refused(tmp_path: Path, index: Path) -> None:
    wheel = next(index.glob("pip-*.whl"))
    with served(index, CutServer) as url:
        asked = {"file": wheel.name, "url": f"{url}/{wheel.name}", "sha256": downloads.sha256_of(str(wheel))}

        def fetch(**changes: str) -> str:
            started = downloads.Downloads()
            started.start(str(tmp_path), [{**asked, **changes}])
            state = started.state(30)
            assert state["done"]
            return str(state["error"])

        assert "the connection was closed" in fetch()
        half = (tmp_path / f"{wheel.name}.part").stat().st_size
        assert 0 < half < wheel.stat().st_size
        assert fetch() == "" and CutServer.ranges[-1] == f"bytes={half}-"
        assert (tmp_path / wheel.name).read_bytes() == wheel.read_bytes()
        assert "does not have the expected SHA-256" in fetch(sha256="0" * 64, file="other.whl")
        assert not (tmp_path / "other.whl").exists()


# -- decisions -----------------------------------------------------------


def planned(
    *states: HostState, node: NodeConfig | None = None, build: str | None = None, own: str = "3.11.7"
) -> list[HostPlan]:
    config = resolve(cluster(*(node or NodeConfig(f"gnn{k}") for k in range(len(states)))))
    by_rank = {k: replace(state, node_rank=k, builder=k) for k, state in enumerate(states)}
    return list(make_plan(config, by_rank, REQUIREMENTS, lock_for, own, build).hosts)


def pythons(*versions: str) -> tuple[Interpreter, ...]:
    return tuple(Interpreter(f"/usr/bin/python{version}", f"{version}.1") for version in versions)


@pytest.mark.parametrize(
    ("states", "own", "chosen"),
    [
        pytest.param([host_state()], "3.11.7", ["3.11"], id="that of this machine"),
        pytest.param([host_state(), host_state(pythons=pythons("3.12"))], "3.11.7", ["3.12"] * 2, id="on all hosts"),
        pytest.param([host_state(), host_state(pythons=pythons("3.10", "3.12"))], "3.13.1", ["3.12"] * 2, id="newest"),
        pytest.param([host_state(), host_state(installed=installed(python="3.12.0"))], "3.11.7", ["3.12"] * 2, id="is"),
    ],
)  # fmt: skip
def test_all_hosts_get_the_same_python(states: list[HostState], own: str, chosen: list[str]) -> None:
    assert [host.lock.target.python for host in planned(*states, own=own) if host.lock] == chosen


def test_a_python_without_wheels_is_not_chosen() -> None:
    def lock(target: Target) -> WheelLock:
        if target.python not in wheels:
            raise NoWheels(f"no wheels for {target}")
        return lock_for(target)

    config, states = resolve(cluster(NodeConfig("gnn0"))), {0: host_state(pythons=pythons("3.10", "3.12", "3.13"))}
    wheels = {"3.10", "3.12"}
    (host,) = make_plan(config, states, REQUIREMENTS, lock, "3.11.2").hosts
    assert (host.base, host.lock and host.lock.target.python) == ("/usr/bin/python3.12", "3.12")
    wheels.clear()
    with pytest.raises(NoWheels, match="Python 3.13"):
        make_plan(config, states, REQUIREMENTS, lock, "3.11.2")


GPU = {"gpus": 2, "driver": "580.1"}
CU126 = {"torch": "9.1.0+cu126", "graphdep": OTHER, "nvidia-cudnn-cu12": "9.0"}


@pytest.mark.parametrize(
    ("state", "node", "action", "words"),
    [
        (host_state(), {}, "make", "graphdep 1.2.0, pip 23.0, torch 9.1.0+cpu"),
        (host_state(**GPU), {}, "make", "graphdep 1.2.0, pip 23.0, torch 9.1.0, nvidia-cudnn-cu13 9.0"),
        (host_state(installed=installed()), {}, "none", ""),
        (host_state(installed=installed(versions={"torch": "9.1.0"}, cuda="13.0")), {}, "repair", "graphdep 1.2.0"),
        (host_state(installed=installed(), **GPU), {"devices": (0,)}, "repair",
         "torch 9.1.0+cpu → 9.1.0, nvidia-cudnn-cu13 9.0, numba-cuda 0.30.4"),
        (host_state(installed=installed(versions=CU126, cuda="12.6"), **GPU), {"devices": (0,)}, "repair",
         "numba-cuda 0.30.4"),
        (host_state(installed=installed(versions={**CU126, "numba-cuda": "0.30.4"}, cuda="12.6"), **GPU),
         {"devices": (0,)}, "none", ""),
        (host_state(installed=installed(versions=CU126, cuda="12.6"), **GPU), {}, "none", ""),
        (host_state(installed=installed(versions=CU126, cuda="12.6"), **GPU), {"devices": (0,), "role": "server"},
         "none", ""),
        (host_state(), {"devices": (0,)}, "make", "graphdep 1.2.0, pip 23.0, torch 9.1.0+cpu"),
        (host_state(installed=installed(unfinished=("?",))), {}, "repair",
         "graphdep 1.2.0 → 1.2.0, torch 9.1.0+cpu → 9.1.0+cpu"),
    ],
)  # fmt: skip
def test_what_is_installed(state: HostState, node: dict[str, object], action: Action, words: str) -> None:
    [host] = planned(state, node=NodeConfig("gnn0", **node))  # type: ignore[arg-type]
    assert (host.action, shown_changes(host.changes)) == (action, words)


@pytest.mark.parametrize(
    ("state", "why"),
    [
        (host_state(error="/data is not writable"), "/data is not writable; correct `venv` of this node"),
        (host_state(exists=True),
         "~/env exists but has no working bin/python; remove it, or name another folder in `venv`"),
        (host_state(environment=""), "no Python at `python` or `conda`; set `venv: ~/gnnfleet-venv`"),
        (host_state(environment="", installed=installed(kind="python", prefix="/usr", versions={})),
         "/usr belongs to the system; set `venv: ~/gnnfleet-venv` (in `defaults`, for all nodes)"),
        (host_state(pythons=pythons("3.8")),
         "no Python version of 3.10 or newer is on all hosts (here: 3.8.1); install one on all of them"),
        (host_state(installed=installed(python="3.9.2")),
         "its Python is 3.9.2, but 3.11 is needed; remove /home/me/env, then run again"),
        (host_state(installed=installed(versions={}), in_use=("pid 7: ~/env/bin/python train.py", "pid 8")),
         "~/env is in use by pid 7: ~/env/bin/python train.py and 1 more; end that first, or name another `venv`"),
        (host_state(gpus=1, driver="535.2"),
         "driver 535.2 is too old for CUDA 13 of this torch, which needs 580 or newer; update it, or choose a build "
         "with --torch, such as --torch cu126"),
    ],
)  # fmt: skip
def test_refused_hosts(state: HostState, why: str) -> None:
    [host] = planned(state)
    assert (host.action, host.why) == ("refused", why)


def test_a_build_given_by_hand_replaces_another() -> None:
    state = host_state(installed=installed(versions=CU126, cuda="12.6"), **GPU)
    [host] = planned(state, node=NodeConfig("gnn0", devices=(0,)), build="cu128")
    assert shown_changes(host.changes) == "torch 9.1.0+cu126 → 9.1.0+cu128, numba-cuda 0.30.4"


def test_an_environment_that_hosts_share_serves_the_gpus_of_all() -> None:
    def change(driver: str, *, devices: tuple[int, ...] = (0,)) -> HostPlan:
        config = resolve(cluster(NodeConfig("login"), NodeConfig("gpu", devices=devices)))
        states = {0: host_state(0), 1: host_state(1, builder=0, gpus=2, driver=driver)}
        plan = make_plan(config, states, REQUIREMENTS, lock_for, "3.11.7")
        assert plan.hosts[1].action == "shared"
        return plan.hosts[0]

    assert shown_changes(change("580.1").changes).endswith("torch 9.1.0, nvidia-cudnn-cu13 9.0, numba-cuda 0.30.4")
    assert change("535.2").why.startswith("driver 535.2 is too old for CUDA 13")
    assert shown_changes(change("580.1", devices=()).changes).endswith("torch 9.1.0+cpu")


def test_an_environment_is_in_use_if_a_process_of_any_host_that_sees_it_runs() -> None:
    mine, other = host_state(0, installed=installed(versions={})), host_state(1, installed=installed(), builder=0)
    states = {0: mine, 1: replace(other, in_use=("pid 5: ~/env/bin/python",))}
    plan = make_plan(resolve(cluster()), states, REQUIREMENTS, lock_for, "3.11.7")
    assert [host.action for host in plan.hosts] == ["refused", "shared"] and "pid 5" in plan.hosts[0].why


def test_wheels_come_from_servers_that_a_host_reaches() -> None:
    config = resolve(cluster())
    states = {0: host_state(0), 1: host_state(1)}
    plan = make_plan(config, states, REQUIREMENTS, lock_for, "3.11.7")
    near, far = with_sources(plan, {0: {"https://files": True}, 1: {"https://files": False}}).hosts
    assert (len(near.fetched), len(near.sent)) == (3, 0) and (len(far.fetched), len(far.sent)) == (0, 3)


# -- packages ------------------------------------------------------------


@pytest.fixture
def cuda_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a package index with wheels for GPUs, and put a stub of nvidia-smi on PATH: the host has one GPU."""
    folder = make_index(tmp_path / "wheels")
    add_cuda_wheels(folder)
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    smi = tmp_path / "bin/nvidia-smi"
    smi.parent.mkdir()
    smi.write_text("#!/bin/sh\necho 560.35.03\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{smi.parent}:{os.environ['PATH']}")
    known = replace(REQUIREMENTS, requires=lambda name: CUDA_REQUIRES.get(name, ()))  # spares rounds of pip
    monkeypatch.setattr(program, "required", lambda more: known)
    return folder


GPU_WHEELS = {
    "torch": "9.1.0", "nvidia-cuda-runtime-cu12": "12.6.77", "cuda-toolkit": "12.6.3",
    "nvidia-cuda-nvcc-cu12": "12.6.85", "numba-cuda": "0.30.4",
}  # fmt: skip


@pytest.mark.slow
def test_a_host_whose_gpus_are_used_gets_numba_cuda_for_the_cuda_of_its_torch(
    config: Path, cuda_index: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert setup(config, "--dry-run", "--json", "--set", "nodes.1.devices=[0]") == 0
    first, second = json.loads(capsys.readouterr().out)["hosts"]
    assert (first["action"], first["packages"]) == ("make", {**REQUIREMENTS.pins, **GPU_WHEELS})
    assert second["action"] == "shared" and len(first["sent"]) == 7
    wheel = next(one for one in lock_of(REQUIREMENTS, replace(CPU, build="")).wheels if one.name == "torch")
    assert download([wheel], CPU)[wheel].name == "torch-9.1.0-py3-none-any.whl"  # not 9.1.0+cpu, which also matches


@pytest.mark.slow
def test_numba_cuda_is_installed_and_imported(
    config: Path,
    cuda_index: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(program, "required", lambda more: REQUIREMENTS)  # this machine has no packages for GPUs
    assert setup(config, "--yes") == 0  # its GPUs are not used
    assert "make it: 4 packages, torch 9.1.0; sent from this machine" in capsys.readouterr().out
    assert setup(config, "--yes", "--set", "nodes.1.devices=[0]") == 0
    changes = "install cuda-toolkit 12.6.3, numba-cuda 0.30.4, nvidia-cuda-nvcc-cu12 12.6.85; sent from this machine"
    shown = capsys.readouterr().out
    assert changes in shown, shown
    wanted = {**REQUIREMENTS.pins, **GPU_WHEELS}
    assert versions_in(tmp_path / "env") == {name.replace("-", "_"): version for name, version in wanted.items()}
    assert setup(config, "--set", "nodes.1.devices=[0]") == 0 and "Nothing to do" in capsys.readouterr().out

    (site_packages(tmp_path / "env") / "numba/cuda.py").write_text("raise ImportError('no libnvvm')")
    next(site_packages(tmp_path / "env").glob("graphdep-*")).rename(tmp_path / "graphdep")
    assert setup(config, "--yes", "--set", "nodes.1.devices=[0]") == 1
    assert "ImportError: no libnvvm" in capsys.readouterr().out


@pytest.mark.slow
def test_numba_cuda_that_cannot_be_had_is_left_out(
    config: Path, cuda_index: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for wheel in cuda_index.glob("cuda_toolkit-12.6*"):
        wheel.unlink()
    assert setup(config, "--dry-run", "--set", "nodes.0.devices=[0]") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "make it: 4 packages, torch 9.1.0; sent from this machine" in shown
    left_out = "node0 (localhost): numba-cuda, which compiles kernels for GPUs, is left out: CPUs sample, and layers"
    assert left_out in shown and "No matching distribution found for cuda-toolkit" in shown
    state = host_state(installed=installed(versions={"numba-cuda": "0.30.4"}), **GPU)
    lock = replace(lock_for(CPU), no_kernels="why")
    assert HostPlan(state, "repair", lock=lock).note == "" != HostPlan(host_state(), "make", lock=lock).note


@pytest.mark.parametrize(
    ("build", "runtime", "cuda", "root"),
    [
        ("cu126", {}, "12.6", "numba-cuda[cu12]>=0.30"),
        ("", {"nvidia-cuda-runtime": "13.0.96"}, "13.0", "numba-cuda[cu13]>=0.30"),
        ("", {"nvidia-cuda-runtime-cu12": "12.8.90"}, "12.8", "numba-cuda[cu12]>=0.30"),
        ("cu118", {}, "11.8", ""),
        ("", {}, "", ""),
    ],
)
def test_kernels_are_compiled_for_the_cuda_of_torch(build: str, runtime: dict[str, str], cuda: str, root: str) -> None:
    assert cuda_version({"torch": "2.13.0", **runtime}, replace(CPU, build=build)) == cuda
    assert kernel_roots(cuda) == ((root, f"cuda-toolkit=={cuda}.*") if root else ())


def test_the_extras_of_gnnfleet_have_the_same_requirements() -> None:
    extras = configparser.ConfigParser()
    extras.read(Path(__file__).resolve().parents[2] / "setup.cfg")
    for major in ("12", "13"):
        assert extras["options.extras_require"][f"cuda{major}"].strip() == kernel_requirement(f"{major}.1")


def test_numba_cuda_must_fit_the_numba_of_this_machine() -> None:
    about = {"version": "0.31.0", "requires_dist": ["numba>=0.70", "cuda-core>=9; extra == 'cu12'"]}
    found = {"numba-cuda": about, "numba": {"version": "0.68.1"}}
    assert conflict(found, CPU) == "numba-cuda 0.31.0 needs numba>=0.70, but this machine has 0.68.1"
    assert conflict({**found, "numba": {"version": "0.70.0"}}, CPU) == ""


def test_packages_of_cuda_follow_the_target_not_this_machine() -> None:
    here = Requirements((), {"cuda-bindings": "13.5.0", "numba": "0.68.1"})
    assert here.line("cuda-bindings", CPU, "cuda-bindings<13,>=12.9") == "cuda-bindings<13,>=12.9"
    assert here.line("cuda-bindings", CPU, "cuda-bindings<14") == "cuda-bindings==13.5.0"
    assert here.line("numba", CPU, "numba>=0.70") == "numba==0.68.1"


def test_requirements_are_those_of_the_target() -> None:
    about = {
        "torch": ['toolkit[blas]==13.0; platform_system == "Linux"', "jinja2", 'colorama; sys_platform == "win32"'],
        "toolkit": ['blas==13.0.*; extra == "blas"', 'fft; extra == "fft"', 'old; python_version < "3.11"'],
        "jinja2": ["Blas>=13", "not a requirement"],
    }
    found = closure(["torch"], lambda name: about.get(name, ()), CPU)
    assert found == {"torch": "torch", "toolkit": "toolkit==13.0", "jinja2": "jinja2", "blas": "blas==13.0.*,>=13"}
    older = closure(["torch"], lambda name: about.get(name, ()), replace(CPU, python="3.10"))
    assert set(older) - set(found) == {"old"}


def test_pip_is_asked_for_wheels_of_the_target() -> None:
    words = CPU.pip_words
    platforms = [words[i + 1] for i, word in enumerate(words) if word == "--platform"]
    assert platforms[0] == "manylinux_2_36_x86_64" and platforms[-1] == "linux_x86_64"
    assert {"manylinux2014_x86_64", "manylinux_2_17_x86_64", "manylinux_2_5_x86_64"} <= set(platforms)
    assert words[-2:] == ("--extra-index-url", "https://download.pytorch.org/whl/cpu")
    assert "manylinux_2_12_aarch64" not in replace(CPU, arch="aarch64").pip_words
    assert REQUIREMENTS.line("torch", replace(CPU, build="cu126")) == "torch===9.1.0+cu126"
    assert REQUIREMENTS.line("torch", replace(CPU, build="")) == "torch===9.1.0"


def test_a_package_without_wheel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = Requirements(("graphdep",), {"graphdep": "7.7"})
    with pytest.raises(SetupError, match=r"no wheels for Python 3.11 on x86_64 .* found for graphdep==7\.7\. Check"):
        lock_of(wanted, CPU)


def test_digests_of_wheels_in_reports_of_older_pips() -> None:
    """pip 23.0, that of Debian 12, reports a wheel in a folder without `hashes`."""
    about = {"name": "graphdep", "version": "1.2.0"}
    for archive in ({"hash": f"sha256={'a' * 64}"}, {"hashes": {"sha256": "a" * 64}}):
        found = {"metadata": about, "download_info": {"url": "file:///w/graphdep.whl", "archive_info": archive}}
        assert lock._wheel(found).sha256 == "a" * 64
    found["download_info"] = {"url": "http://index/graphdep.whl", "archive_info": {}}
    with pytest.raises(SetupError, match="http://index/graphdep.whl: the package index gives no SHA-256"):
        lock._wheel(found)


@pytest.mark.slow
def test_a_pip_that_is_too_old_is_replaced_or_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip 22.0, that of Ubuntu 22.04, cannot report what it would install."""
    monkeypatch.setattr(wheels.metadata, "version", lambda name: "22.0.2+dfsg")
    monkeypatch.setitem(sys.modules, "ensurepip", None)
    monkeypatch.setattr(wheels, "which", lambda name: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    choose = wheels._pip_command.__wrapped__
    (tmp_path / "empty").mkdir()
    with monkeypatch.context() as patch:
        patch.setenv("PIP_FIND_LINKS", str(tmp_path / "empty"))
        with pytest.raises(SetupError, match=r"pip 22\.0\.2.* is too old .*pip>=22\.2.*-m pip install -U pip"):
            choose()
    command = choose()
    assert command[1].startswith(f"{tmp_path}/gnnfleet/setup/pip/pip-")
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("pip ") and choose() == command


def test_a_pip_in_the_current_folder_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pip.py").write_text("raise SystemExit('the pip.py of the current folder')")
    monkeypatch.chdir(tmp_path)
    command = wheels._pip_command.__wrapped__()
    assert subprocess.run([*command, "--version"], capture_output=True, text=True, check=True).stdout.startswith("pip ")


@pytest.mark.slow
def test_settings_of_pip_do_not_change_what_setup_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("USER", "REQUIRE_VIRTUALENV", "REQUIRE_HASHES"):
        monkeypatch.setenv(f"PIP_{name}", "1")
    assert [wheel.pin for wheel in lock_of(Requirements(("graphdep",), {"graphdep": OTHER}), CPU).wheels] == [
        f"graphdep=={OTHER}"
    ]


@pytest.mark.slow
def test_gnnfleet_itself_is_sent_as_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = own_wheel.own_wheel(own_wheel.cache_folder() / "wheels")
    small = {**found, "metadata": {**found["metadata"], "requires_dist": ["graphdep>=1"]}}
    monkeypatch.setattr(lock, "own_wheel", lambda folder: small)
    version = required(("gnnfleet",)).pins["gnnfleet"]
    assert version.startswith("0.1.0+g")
    made = lock_of(Requirements(("gnnfleet",), {"gnnfleet": version, "graphdep": OTHER}), CPU)
    (wheel,) = [one for one in made.wheels if one.name == "gnnfleet"]
    assert (wheel.pin, wheel.server) == (f"gnnfleet=={version}", "") and len(made.wheels) == 2
    (path,) = download([wheel], CPU).values()
    words = ["--no-deps", "--target", str(tmp_path / "site"), str(path)]
    assert run_pip("install", *words) == ""
    code = f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); import gnnfleet; print(gnnfleet.__file__)"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(tmp_path / "site/gnnfleet/__init__.py")
    assert (tmp_path / "site/launcher/export/node.sh.j2").exists()
    assert (tmp_path / "site/bin/gnnfleet").exists()


#: Packages of the trainer that the launching machine runs: reading and partitioning of graphs.
ELSEWHERE = ("data", "partition", "sources")


def test_hosts_get_what_reads_the_store() -> None:
    stored = cluster(data=DataConfig(dataset="synthetic", store="s3://bucket/parts"))
    assert program.config_packages(resolve(stored), ("scipy",)) == ("fsspec", "s3fs", "scipy")
    assert program.config_packages(resolve(cluster()), ()) == ()


def test_hosts_get_what_the_trainer_imports() -> None:
    trainer = Path(__file__).resolve().parents[2] / "trainer"
    files = [
        path
        for path in trainer.rglob("*.py")
        if path.parts[len(trainer.parts)] not in ("partition", "sources", "data", "track")
    ]
    imported = {
        name.partition(".")[0]
        for path in files
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Import | ast.ImportFrom) and not getattr(node, "level", 0)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names])
    }
    assert len(files) > 50 and "torch" in imported
    assert imported - set(sys.stdlib_module_names) - {"trainer", "gnnfleet"} <= {
        *PACKAGES,
        "llvmlite",
    }  # a part of numba
    assert set(required(["Some_Thing"]).roots) >= {"torch-geometric", "some-thing", "pip"}
    with pytest.raises(UsageError, match="--with scipy==1.15: give the name of a package only"):
        required(["scipy==1.15"])


# -- hosts ---------------------------------------------------------------


def test_the_survey_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{Path(sys.executable).parent}")
    for name in ("dnf", "uv"):
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text("#!/bin/sh\n")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "file").touch()
    facts = host_survey.main({"op": "survey", "environment": str(tmp_path / "new/env")})
    assert facts["tmux_line"].endswith("dnf install -y tmux") and not facts["tmux"] and facts["uv"].endswith("bin/uv")
    assert facts["pythons"][0]["version"] == platform.python_version()
    assert (facts["exists"], facts["usable"], facts["error"], facts["in_use"]) == (False, False, "", [])
    assert host_survey.survey(str(tmp_path / "file"))["error"] == f"{tmp_path}/file is no folder"
    used = host_survey.survey(sys.prefix)["in_use"]
    assert all(line.startswith("pid ") for line in used)


def fake_python(path: Path, version: str, *, venv: bool = True) -> str:
    """Write a program that acts as a Python of ``version``; else it prints version and arguments. Returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    too_old = int(tuple(map(int, version.split("."))) < (3, 8))
    fits = f'case "$*" in *"sys.version_info <"*) exit {too_old};; esac'
    about = f'case "$*" in *venv*) echo {version}; exit {0 if venv else 1};; esac'
    path.write_text(f"#!/bin/sh\n{fits}\n{about}\necho {version} $*\n")
    path.chmod(0o755)
    return str(path)


def test_pythons_of_conda_pyenv_and_uv_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}/bin")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("PYENV_ROOT", "UV_PYTHON_INSTALL_DIR"):
        monkeypatch.delenv(name, raising=False)
    fake_python(tmp_path / "bin/python3", "3.6.8")
    fake_python(tmp_path / "bin/python3.11", "3.11.2", venv=False)
    wanted = {
        "3.6.8": str(tmp_path / "bin/python3"),
        "3.12.4": fake_python(tmp_path / "bin/python3.12", "3.12.4"),
        "3.10.9": fake_python(tmp_path / ".pyenv/versions/3.10.9/bin/python3", "3.10.9"),
        "3.13.1": fake_python(tmp_path / ".local/share/uv/python/cpython-3.13/bin/python3", "3.13.1"),
        "3.11.8": fake_python(tmp_path / "miniconda3/bin/python3", "3.11.8"),
    }
    fake_python(tmp_path / ".pyenv/versions/3.12.4/bin/python3", "3.12.4")  # that on PATH comes first
    found = {one["version"]: one["program"] for one in host_survey.pythons()}
    assert {version: found[version] for version in wanted} == wanted
    state = host_state(home=str(tmp_path), pythons=tuple(Interpreter(path, version) for version, path in found.items()))
    [host] = planned(state, own="3.13.7")
    console = Console(width=200, record=True, file=io.StringIO())
    print_plan(SetupPlan((host,)), (), console)
    assert "3.13 of ~/.local/share/uv/python/cpython-3.13/bin/python3" in console.export_text()


@pytest.mark.parametrize(
    ("path", "version"),
    [
        ("bin/python3", "3.9.1"),
        ("bin/python3.12", "3.12.4"),
        (".pyenv/versions/3.10.9/bin/python3", "3.10.9"),
        (".local/share/uv/python/cpython-3.13/bin/python3", "3.13.1"),
        ("miniconda3/bin/python3", "3.11.8"),
    ],
)
def test_a_host_whose_python3_is_too_old_is_asked_by_another_python(path: str, version: str, tmp_path: Path) -> None:
    fake_python(tmp_path / "bin/python3", "3.6.8")
    fake_python(tmp_path / path, version)
    setup = (MORE_PYTHONS,) if "conda" in path else ()  # it also adds folders of this machine
    argv = shlex.split(shell_line(Command((*ANY_PYTHON, "-c", "a b"), setup=setup)).removeprefix("exec "))
    env = {"PATH": f"{tmp_path}/bin", "HOME": str(tmp_path)}
    (tmp_path / "bin/bash").symlink_to("/bin/bash")
    done = subprocess.run(["/bin/bash", *argv[1:]], env=env, capture_output=True, text=True)
    assert done.stdout == f"{version} -c a b\n", done.stderr


@pytest.fixture
def marks(tmp_path: Path) -> Iterator[str]:
    yield str(tmp_path / "not/yet/env")
    host_survey.leave()


def test_hosts_that_share_a_folder_see_each_others_marks(marks: str, tmp_path: Path) -> None:
    for name in (".m-0", ".m-2"):
        assert host_survey.main({"op": "mark", "environment": marks, "name": name}) == {"marked": True}
    assert host_survey.main({"op": "marks", "environment": marks, "prefix": ".m-"}) == {"names": [".m-0", ".m-2"]}
    host_survey.main({"op": "unmark"})
    assert list(tmp_path.iterdir()) == []
