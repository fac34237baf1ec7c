"""Compiled kernels are found again wherever the code lies, and made anew when anything they are made from changes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CALLER = """
from trainer.compiled import njit
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
CALL = "from trainer.outer import outer; print(outer(20), len(outer.stats.cache_hits))"


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A package ``trainer`` with nothing but two kernels."""
    folder = tmp_path / "code" / "trainer"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    shutil.copy(ROOT / "trainer" / "compiled.py", folder)
    (folder / "outer.py").write_text(CALLER)
    (folder / "inner.py").write_text(INNER)
    return folder.parent


def start(code: Path, kernels: Path, **env: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "GNNFLEET_KERNELS": str(kernels), "PYTHONPATH": str(code), **env}
    return subprocess.Popen([sys.executable, "-c", CALL], env=environment, stdout=subprocess.PIPE, text=True, cwd=code)


def call(code: Path, kernels: Path) -> list[int]:
    """The kernel's answer for 20, and how much of it came compiled."""
    out, _ = start(code, kernels).communicate()
    return [int(word) for word in out.split()]


def test_another_copy_of_the_code_finds_what_one_has_compiled(code, tmp_path):
    kernels = tmp_path / "kernels"
    assert call(code, kernels) == [41, 0]
    assert call(code, kernels) == [41, 1]
    shutil.copytree(code, tmp_path / "elsewhere", ignore=shutil.ignore_patterns("__pycache__"))
    assert call(tmp_path / "elsewhere", kernels) == [41, 1]


@pytest.mark.parametrize(
    ("file", "old", "new", "answer"),
    [
        ("outer.py", "+ PLUS", "- PLUS", 39),
        ("inner.py", "x * 2", "x * 3", 61),
        ("inner.py", "PLUS = 1", "PLUS = 5", 45),
    ],
)
def test_what_a_kernel_calls_and_its_constants_count(code, tmp_path, file, old, new, answer):
    kernels = tmp_path / "kernels"
    call(code, kernels)
    source = code / "trainer" / file
    source.write_text(source.read_text().replace(old, new))
    assert call(code, kernels) == [answer, 0]


def test_several_may_compile_at_once(code, tmp_path):
    kernels = tmp_path / "kernels"
    started = [start(code, kernels) for _ in range(3)]
    assert [process.communicate()[0].split()[0] for process in started] == ["41"] * 3
    assert call(code, kernels) == [41, 1]
    assert not list(kernels.glob(".new-*"))


def test_damage_is_compiled_over(code, tmp_path):
    kernels = tmp_path / "kernels"
    call(code, kernels)
    (compiled,) = kernels.glob("trainer.outer.outer-*.nbc")
    compiled.write_bytes(b"cut")
    assert call(code, kernels) == [41, 0]
    assert call(code, kernels) == [41, 1]


def test_without_a_folder_of_its_own_it_lies_beside_the_code(code, tmp_path):
    (tmp_path / "file").touch()
    assert call(code, tmp_path / "file" / "kernels") == [41, 0]
    assert call(code, tmp_path / "file" / "kernels") == [41, 1]
    assert list((code / "trainer" / "__pycache__").glob("*.nbc"))


def test_kernels_of_the_trainer_lie_there():
    found = "from trainer.compiled import kernels_folder; import trainer.sample.kernels as k; print(kernels_folder()); "
    found += "print(type(k.draw_edges._cache._cache_file).__name__)"
    out = subprocess.run([sys.executable, "-c", found], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert out.split() == [os.environ["GNNFLEET_KERNELS"], "KernelFiles"]


MIXED = """
import sys
import numpy as np
from trainer.compiled import njit

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


def test_what_is_loaded_does_not_make_the_compiler_ready_and_what_is_compiled_after_it_does(code, tmp_path):
    """A kernel that allocates; and one, compiled anew, that calls the loaded one."""
    (code / "trainer" / "mixed.py").write_text(MIXED)
    environment = {**os.environ, "GNNFLEET_KERNELS": str(tmp_path / "kernels"), "PYTHONPATH": str(code)}

    def run(*words: str) -> list[str]:
        argv = [sys.executable, "-c", "import trainer.mixed", *words]
        return subprocess.run(
            argv, env=environment, stdout=subprocess.PIPE, text=True, check=True, cwd=code
        ).stdout.split()

    assert run() == ["14", "True"]
    assert run() == ["14", "False"]
    assert run("total") == ["14", "False", "14"]
    assert run("total") == ["14", "False", "14"]
