"""Tests of cached Numba kernels: used again after a move of the code, compiled again after a change."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from fast_cases import fast_cases
from forked import Forked
from trainer.core.compiled import KernelFiles, kernels_folder
from trainer.sampler.neighbor_kernels import draw_edges

ROOT = Path(__file__).resolve().parents[2]
CALLER = """
from trainer.core.compiled import njit
from trainer.inner import PLUS, inner

@njit()
def outer(x):
    return inner(x) + PLUS
"""
INNER = """
import numba
PLUS = 1

@numba.njit(inline="always")
def inner(x):
    return x * 2
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    folder = tmp_path / "code" / "trainer"
    (folder / "core").mkdir(parents=True)
    for package in (folder, folder / "core"):
        (package / "__init__.py").touch()
    shutil.copy(ROOT / "trainer" / "core" / "compiled.py", folder / "core")
    (folder / "outer.py").write_text(CALLER)
    (folder / "inner.py").write_text(INNER)
    return folder.parent


def start(code: Path, kernels: Path) -> Forked:
    """Start a process that calls the kernel with argument 20. It prints the result and the number of cache hits."""
    return Forked(call_outer, (), {**os.environ, "GNNFLEET_KERNELS": str(kernels), "CODE": str(code)})


def call_outer() -> None:
    tempfile.tempdir = None  # read TMPDIR again; the parent has cached its own
    for name in [name for name in sys.modules if name.partition(".")[0] == "trainer"]:
        del sys.modules[name]
    sys.path.insert(0, os.environ["CODE"])
    from trainer.outer import outer  # type: ignore[import-not-found]

    print(outer(20), len(outer.stats.cache_hits))


def call(code: Path, kernels: Path) -> list[int]:
    process = start(code, kernels)
    assert process.wait() == 0, process.output
    return [int(word) for word in process.output.splitlines()[-1].split()]


@pytest.mark.slow
def test_compiled_kernels_are_reused_until_damaged(code: Path, tmp_path: Path) -> None:
    # Three processes compile at once; later processes, also with a copy of the code, reuse their kernels.
    kernels = tmp_path / "kernels"
    started = [start(code, kernels) for _ in range(3)]
    assert [process.communicate()[0].splitlines()[-1].split()[0] for process in started] == ["41"] * 3
    assert not list(kernels.glob(".new-*"))
    shutil.copytree(code, tmp_path / "elsewhere", ignore=shutil.ignore_patterns("__pycache__"))
    for copy in (code, tmp_path / "elsewhere"):
        assert call(copy, kernels) == [41, 1]
    (compiled,) = kernels.glob("trainer.outer.outer-*.nbc")
    compiled.write_bytes(b"cut")
    assert call(code, kernels) == [41, 0]
    assert call(code, kernels) == [41, 1]


@pytest.mark.slow
def test_a_kernel_is_recompiled_when_its_callees_or_constants_change(code: Path, tmp_path: Path) -> None:
    kernels = tmp_path / "kernels"
    call(code, kernels)
    changes = [("outer.py", "+ PLUS", "- PLUS", 39), ("inner.py", "x * 2", "x * 3", 59), ("inner.py", "= 1", "= 5", 55)]
    for later, (file, old, new, answer) in enumerate(changes, 10):
        source = code / "trainer" / file
        source.write_text(source.read_text().replace(old, new))
        now = time.time() + later
        os.utime(source, (now, now))  # else Python reuses its bytecode of a file with the same size and second
        assert call(code, kernels) == [answer, 0]


def test_kernels_go_to_a_temporary_folder_when_theirs_cannot_be_created(
    code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    process = start(code, tmp_path / "file" / "kernels")
    assert process.wait() == 0 and process.output.splitlines()[-1] == "41 0"
    assert "kernels cannot be created (Not a directory): compiled kernels are kept in" in process.output
    assert call(code, tmp_path / "file" / "kernels") == [41, 1]
    assert list((tmp_path / "tmp" / f"gnnfleet-kernels-{os.geteuid()}").glob("*.nbc"))


@pytest.mark.parametrize("squatted", fast_cases(["link", "open", "file"]))
def test_a_squatted_temporary_folder_costs_one_folder_not_one_per_process(
    code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, squatted: str
) -> None:
    (tmp_path / "file").touch()
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    usual = temporary / f"gnnfleet-kernels-{os.geteuid()}"
    if squatted == "link":
        usual.symlink_to(tmp_path)
    elif squatted == "open":
        usual.mkdir()
        usual.chmod(0o777)
    else:
        usual.touch()
    monkeypatch.setenv("TMPDIR", str(temporary))
    assert [call(code, tmp_path / "file" / "kernels") for _ in range(3)] == [[41, 0], [41, 1], [41, 1]]
    (own,) = (path for path in temporary.iterdir() if path.name.startswith(f"{usual.name}-"))
    assert list(own.glob("*.nbc")) and not any(tmp_path.glob("*.nbc"))


class Planted:
    """Creates a file when unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize(
    "writable", ["folder", *(pytest.param(of, marks=pytest.mark.slow) for of in ("file", "file of another"))]
)
def test_kernels_that_other_users_could_write_are_not_loaded(
    code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writable: str
) -> None:
    # If the folder is writable by others, a private folder replaces it, with a warning.
    kernels, temporary = tmp_path / "kernels", tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    assert call(code, kernels) == [41, 0]
    assert kernels.stat().st_mode & 0o077 == 0
    (compiled,) = kernels.glob("trainer.outer.outer-*.nbc")
    compiled.write_bytes(pickle.dumps(Planted(tmp_path / "ran")))
    if writable == "folder":
        kernels.chmod(0o777)
    elif writable == "file":
        compiled.chmod(0o666)
    elif os.geteuid():
        pytest.skip("only root gives files away")
    else:
        os.chown(compiled, 12345, 12345)
    process = start(code, kernels)
    assert process.wait() == 0 and process.output.splitlines()[-1] == "41 0"
    assert process.output.count("other users may write to it") == (writable == "folder"), process.output
    assert not (tmp_path / "ran").exists()
    assert call(code, kernels) == [41, 1]


def test_the_trainers_kernels_are_in_the_configured_folder() -> None:
    assert str(kernels_folder()) == os.environ["GNNFLEET_KERNELS"]
    assert isinstance(draw_edges._cache._cache_file, KernelFiles)


MIXED = """
import sys
import numpy as np
from trainer.core.compiled import njit

@njit()
def squares(n):
    out = np.empty(n, np.int64)
    for i in range(n):
        out[i] = i * i
    return out

@njit()
def total(n):
    return squares(n).sum()

got = squares(4)
ready = "numba.np.linalg" in sys.modules
print(got.sum(), ready, total(4) if len(sys.argv) > 1 else "")
"""


@pytest.mark.slow
def test_loaded_kernels_do_not_initialise_the_compiler(code, tmp_path):
    # `squares` allocates an array; `total` calls `squares` and is compiled after `squares` was loaded.
    (code / "trainer" / "mixed.py").write_text(MIXED)
    environment = {**os.environ, "GNNFLEET_KERNELS": str(tmp_path / "kernels"), "PYTHONPATH": str(code)}

    def run(*words: str) -> list[str]:
        argv = [sys.executable, "-c", "import trainer.mixed", *words]
        return subprocess.run(
            argv, env=environment, stdout=subprocess.PIPE, text=True, check=True, cwd=code
        ).stdout.split()

    assert run() == ["14", "True"]
    assert run("total") == ["14", "False", "14"]
    assert run("total") == ["14", "False", "14"]
