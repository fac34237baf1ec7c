"""Who imports whom: the directions drawn in docs/ARCHITECTURE.md, read from the source."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]

#: What a module or package must not import (prefixes). Deferred imports count as well.
FORBIDDEN = {
    "launcher": ["trainer", "torch", "torch_geometric", "numba", "numpy", "pymetis", "ogb"],
    "trainer": ["launcher", "paramiko", "fabric", "libtmux"],
    "launcher.errors": ["launcher"],
    "launcher.script": ["launcher"],
    "launcher.config": ["launcher.plan", "launcher.transport", "launcher.run", "launcher.cli"],
    "launcher.transport": [f"launcher.{name}" for name in ("plan", "session", "sync", "preflight", "run", "cli")],
    "launcher.plan": [f"launcher.{name}" for name in ("transport", "session", "sync", "preflight", "run", "cli")],
    "launcher.session": ["launcher.sync", "launcher.preflight", "launcher.run", "launcher.cli"],
    "launcher.sync": ["launcher.session", "launcher.preflight", "launcher.run", "launcher.cli"],
    "launcher.preflight": ["launcher.session", "launcher.sync", "launcher.run", "launcher.cli"],
    "launcher.live": [f"launcher.{name}" for name in ("transport", "session", "follow", "conduct", "run", "cli")],
    "launcher.follow": [f"launcher.{name}" for name in ("conduct", "run", "operate", "cli")],
    "launcher.conduct": [f"launcher.{name}" for name in ("run", "operate", "cli")],
    "launcher.run": ["launcher.cli"],
    "trainer.errors": ["trainer", "torch"],
    "trainer.rng": ["trainer", "torch"],
    "trainer.arrays": ["trainer", "torch"],
    "trainer.partition": [f"trainer.{name}" for name in ("sample", "service", "load", "nn", "train", "cli")],
    "trainer.partition.book": ["trainer.store"],
    "trainer.partition.format": ["trainer.store"],
    "trainer.store": [f"trainer.{name}" for name in ("sample", "service", "load", "nn", "train", "cli")],
    "trainer.sample": [f"trainer.{name}" for name in ("load", "nn", "train", "cli")],
    "trainer.service": [f"trainer.{name}" for name in ("load", "nn", "train", "cli")],
    "trainer.nn": [f"trainer.{name}" for name in ("store", "service", "load", "train", "cli")],
    "trainer.load": ["trainer.nn", "trainer.train", "trainer.cli"],
    "trainer.train": ["trainer.cli"],
}


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


@cache
def modules() -> dict[str, Path]:
    """Every module of both packages by dotted name."""
    found = {}
    for path in sorted(path for package in ("launcher", "trainer") for path in (REPOSITORY / package).rglob("*.py")):
        words = path.relative_to(REPOSITORY).with_suffix("").parts
        found[".".join(words[:-1] if words[-1] == "__init__" else words)] = path
    return found


def imported(module: str, nodes: list[ast.stmt]) -> Iterator[str]:
    """Dotted names in import statements among ``nodes`` and all below them."""
    for node in (inner for outer in nodes for inner in ast.walk(outer)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{module}:{node.lineno}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from [name if name in modules() else node.module for name in names]


def source(module: str) -> list[ast.stmt]:
    return ast.parse(modules()[module].read_text()).body


@pytest.mark.parametrize("package", FORBIDDEN)
def test_forbidden_directions(package: str) -> None:
    assert any(within(module, package) for module in modules()), f"{package} is gone; correct FORBIDDEN"
    wrong = [
        f"{module} imports {name}"
        for module in modules()
        if within(module, package)
        for name in imported(module, source(module))
        if any(within(name, other) for other in FORBIDDEN[package])
    ]
    assert wrong == []


def test_node_programs_use_the_standard_library_only() -> None:
    allowed = {*sys.stdlib_module_names, "__future__"}
    for module in (name for name in modules() if within(name, "launcher.node")):
        for name in imported(module, source(module)):
            assert name.split(".")[0] in allowed or within(name, "launcher.node"), f"{module} imports {name}"


def runs_at_import(node: ast.stmt) -> bool:
    checking_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    return not checking_only and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def test_no_import_cycles() -> None:
    """Over what runs when a module is imported."""
    waiting = {
        module: {name for name in imported(module, list(filter(runs_at_import, source(module)))) if name in modules()}
        for module in modules()
    }
    while free := [module for module, needs in waiting.items() if not needs & waiting.keys() - {module}]:
        for module in free:
            del waiting[module]
    assert waiting == {}, f"in cycles, or above one: {', '.join(waiting)}"
