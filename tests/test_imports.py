"""Who imports whom: the directions drawn in docs/ARCHITECTURE.md, read from the source."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from import_graph import circles, imported, module_graph, read_modules

MODULES = read_modules(Path(__file__).resolve().parents[1])
IMPORTS = {name: set(imported(module, MODULES)) for name, module in MODULES.items()}

#: What a module or package must not import (prefixes). Deferred imports count as well.
FORBIDDEN = {
    "launcher": ["trainer", "torch", "torch_geometric", "numba", "numpy", "pymetis", "ogb"],
    "trainer": ["launcher", "paramiko", "fabric", "libtmux"],
    "launcher.errors": ["launcher"],
    "launcher.command": ["launcher"],
    "launcher.config.schema": ["launcher.plan.build", "launcher.transport", "launcher.run.launch", "launcher.cli.main"],
    "launcher.transport": [f"launcher.{name}" for name in ("plan", "session", "sync", "preflight", "run", "cli")],
    "launcher.plan.build": [f"launcher.{name}" for name in ("transport", "session", "sync", "preflight", "run", "cli")],
    "launcher.run.tmux_session": [
        "launcher.sync.push",
        "launcher.preflight.preflight",
        "launcher.run.launch",
        "launcher.cli.main",
    ],
    "launcher.sync.push": [
        "launcher.run.tmux_session",
        "launcher.preflight.preflight",
        "launcher.run.launch",
        "launcher.cli.main",
    ],
    "launcher.preflight.preflight": [
        "launcher.run.tmux_session",
        "launcher.sync.push",
        "launcher.run.launch",
        "launcher.cli.main",
    ],
    "launcher.live": [f"launcher.{name}" for name in ("transport", "session", "follow", "conduct", "run", "cli")],
    "launcher.run.monitor": [f"launcher.{name}" for name in ("conduct", "run", "operate", "cli")],
    "launcher.run.lifecycle": [f"launcher.{name}" for name in ("run", "operate", "cli")],
    "launcher.run.launch": ["launcher.cli.main"],
    "trainer.core.errors": ["trainer", "torch"],
    "trainer.core.rng": ["trainer", "torch"],
    "trainer.core.arrays": ["trainer", "torch"],
    "trainer.partition": [f"trainer.{name}" for name in ("sample", "service", "load", "nn", "train", "cli")],
    "trainer.store.partition_book": ["trainer.store"],
    "trainer.store.manifest": ["trainer.store"],
    "trainer.store": [f"trainer.{name}" for name in ("sample", "service", "load", "nn", "train", "cli")],
    "trainer.sample": [f"trainer.{name}" for name in ("load", "nn", "train", "cli")],
    "trainer.service": [f"trainer.{name}" for name in ("load", "nn", "train", "cli")],
    "trainer.nn": [f"trainer.{name}" for name in ("store", "service", "load", "train", "cli")],
    "trainer.load": ["trainer.nn", "trainer.train", "trainer.cli"],
    "trainer.train": ["trainer.cli"],
}


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


@pytest.mark.parametrize("package", FORBIDDEN)
def test_forbidden_directions(package: str) -> None:
    assert any(within(module, package) for module in MODULES), f"{package} is gone; correct FORBIDDEN"
    wrong = [
        f"{module} imports {name}"
        for module in MODULES
        if within(module, package)
        for name in IMPORTS[module]
        if any(within(name, other) for other in FORBIDDEN[package])
    ]
    assert wrong == []


def test_node_programs_use_the_standard_library_only() -> None:
    allowed = {*sys.stdlib_module_names, "__future__"}
    for module in (name for name in MODULES if within(name, "launcher.node")):
        for name in IMPORTS[module]:
            assert name.split(".")[0] in allowed or within(name, "launcher.node"), f"{module} imports {name}"


def test_no_import_circles_among_files() -> None:
    """Over what runs when a module is imported."""
    assert circles(module_graph(MODULES)) == []


def test_circles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a", "e"}, "e": {"d"}, "f": {"f", "a"}}
    assert circles(graph) == [["a", "b", "c"], ["d", "e"]]
