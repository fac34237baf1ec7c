"""Tests of package gnnfleet: names, the cost of importing it, and user files with the names of our packages."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import gnnfleet as gf
import trainer

REPOSITORY = Path(__file__).resolve().parents[1]


def python(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.run([sys.executable, *argv], cwd=folder, env=env, capture_output=True, text=True, timeout=60)


def type_checked_names(source: Path) -> set[str]:
    """Return the names imported under ``if TYPE_CHECKING``."""
    blocks = [each.body for each in ast.parse(source.read_text()).body if isinstance(each, ast.If)]
    statements = [each for block in blocks for each in block if isinstance(each, ast.ImportFrom)]
    return {alias.name for statement in statements for alias in statement.names}


def test_every_name_exists_at_run_time_and_for_type_checkers() -> None:
    assert [name for name in gf.__all__ if getattr(gf, name) is None] == []
    assert type_checked_names(REPOSITORY / "gnnfleet" / "__init__.py") == set(gf.__all__) <= set(dir(gf))
    assert [name for name in gf.nn.__all__ if not hasattr(gf.nn, name)] == []
    assert gf.tasks.cluster_group.__doc__


def test_names_of_trainer_are_the_same_objects() -> None:
    assert set(trainer.__all__) <= set(gf.__all__)
    assert [name for name in trainer.__all__ if getattr(gf, name) is not getattr(trainer, name)] == []


def test_a_mistyped_name_suggests_the_nearest() -> None:
    with pytest.raises(AttributeError, match="no attribute 'DistNeighbourLoader'; did you mean 'DistNeighborLoader'"):
        _ = gf.DistNeighbourLoader  # type: ignore[attr-defined]


def test_importing_gnnfleet_imports_no_library() -> None:
    heavy = "{'torch', 'torch_geometric', 'numpy', 'numba', 'fabric', 'paramiko', 'launcher', 'trainer'}"
    done = python(REPOSITORY, "-c", f"import gnnfleet, sys; print(sorted({heavy} & set(sys.modules)))")
    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.mark.parametrize("script", ["trainer.py", "mine.py"])
def test_a_file_that_shadows_trainer_is_named_and_not_run(script: str, tmp_path: Path) -> None:
    (tmp_path / script).write_text("import gnnfleet\n")
    (tmp_path / "trainer.py").write_text("print('run')\nimport gnnfleet\n")
    done = python(tmp_path, script)
    assert done.returncode == 1 and done.stdout == ("run\n" if script == "trainer.py" else "")
    assert done.stderr.splitlines()[-1] == (
        f"ImportError: {tmp_path}/trainer.py shadows gnnfleet's own package `trainer` ({REPOSITORY}/trainer):"
        " Python finds it first. Rename that file or folder, or remove its parent folder from sys.path"
    )


@pytest.mark.parametrize("use", ["tasks", "__version__"])
def test_a_package_that_shadows_launcher_is_named_when_it_is_used(tmp_path: Path, use: str) -> None:
    (tmp_path / "launcher").mkdir()
    (tmp_path / "launcher" / "__init__.py").touch()
    done = python(tmp_path, "-c", f"import gnnfleet as gf; print(gf.open.__name__); gf.{use}")
    assert done.returncode == 1 and done.stdout == "open\n"
    assert f"{tmp_path}/launcher/__init__.py shadows gnnfleet's own package `launcher`" in done.stderr.splitlines()[-1]
