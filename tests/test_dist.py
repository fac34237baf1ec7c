"""Tests of the distribution: what the sdist and the wheel contain, and the demo from the installed wheel alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import launcher
from test_project import REPOSITORY, tracked

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the sdist and the wheel of the tracked files, built as `make dist` builds them."""
    top = tmp_path_factory.mktemp("dist")
    for path in tracked():
        copy = top / "src" / path.relative_to(REPOSITORY)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    subprocess.run([sys.executable, "-m", "venv", top / "tools"], check=True)
    pip = [top / "tools/bin/python", "-m", "pip", "install", "--quiet", "build", "twine"]
    if subprocess.run(pip, timeout=250).returncode:
        pytest.skip("no package index that has build and twine")
    python = top / "tools/bin/python"
    subprocess.run([python, "-m", "build", "--outdir", top / "dist", top / "src"], check=True, timeout=250)
    subprocess.run([python, "-m", "twine", "check", "--strict", *(top / "dist").iterdir()], check=True)
    return top / "dist"


def test_the_wheel_has_all_files_of_the_packages(dist: Path) -> None:
    version = launcher.__version__
    wheel = zipfile.ZipFile(dist / f"gnnfleet-{version}-py3-none-any.whl").namelist()
    with tarfile.open(dist / f"gnnfleet-{version}.tar.gz") as archive:
        source = {name.partition("/")[2] for name in archive.getnames()}
    names = [path.relative_to(REPOSITORY).as_posix() for path in tracked()]
    packaged = [name for name in names if name.startswith(("gnnfleet/", "launcher/", "trainer/"))]
    assert set(packaged) <= set(wheel) and set(packaged) <= source
    shared = [name for name in names if name.startswith(("templates/", "examples/"))]
    assert {f"gnnfleet-{version}.data/data/share/gnnfleet/{name}" for name in shared} <= set(wheel)
    assert set(shared) | {"LICENSE", "README.md", "CHANGELOG.md", "constraints.txt"} <= source
    assert not [name for name in wheel if name.startswith(("tests", "docs"))]


def test_the_demo_runs_from_the_installed_wheel_alone(dist: Path, tmp_path: Path, compiled_kernels: None) -> None:
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    (wheel,) = dist.glob("*.whl")
    subprocess.run([tmp_path / "env/bin/python", "-m", "pip", "install", "--quiet", "--no-deps", wheel], check=True)
    # The dependencies are those of these tests. A path in a .pth file brings no editable installation with it.
    site = next((tmp_path / "env").glob("lib/python*/site-packages"))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"HOME": str(tmp_path)}
    cwd = tmp_path / "elsewhere"
    cwd.mkdir()

    def call(*words: str) -> str:
        done = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    program = str(tmp_path / "env/bin/gnnfleet")
    where = call(
        str(tmp_path / "env/bin/python"), "-c", "import launcher, trainer; print(launcher.__file__, trainer.__file__)"
    )
    assert where.count(str(site)) == 2
    assert "--config" in call(program, "--help")
    call(program, "init", "--template", "local", "-o", "demo.yml")
    small = ("--set", "data.options.num_nodes=3000", "--set", "train.hidden=16")
    assert "node1" in call(program, "plan", "--config", "demo.yml", *small)
    assert "test accuracy" in call(program, "--config", "demo.yml", "--plain", *small)
    assert "#SBATCH" in call(program, "export", "--config", "demo.yml", "--to", "slurm")
