"""Import graph of a checkout, read from the source: modules, packages, and cycles among them."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

PACKAGES = ("launcher", "trainer", "gnnfleet")


@dataclass(frozen=True)
class Module:
    name: str  #: dotted name; for an ``__init__.py`` that of the package
    path: Path

    @cached_property
    def body(self) -> list[ast.stmt]:
        return ast.parse(self.path.read_text()).body

    @cached_property
    def import_statements(self) -> list[ast.Import | ast.ImportFrom]:
        return list(_imports_in(self.body))

    @cached_property
    def loaded_statements(self) -> list[ast.Import | ast.ImportFrom]:
        """Those that are carried out when the module is imported: not inside functions, nor for type checkers."""
        outer = [node for node in self.body if not isinstance(node, ast.FunctionDef | ast.ClassDef)]
        return list(_imports_in(node for node in outer if not _is_for_type_checkers(node)))

    @property
    def package(self) -> str:
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]


def read_modules(repository: Path, packages: Iterable[str] = PACKAGES) -> dict[str, Module]:
    """Find every module of ``packages``, keyed by dotted name."""
    found = {}
    for path in sorted(path for package in packages for path in (repository / package).rglob("*.py")):
        words = path.relative_to(repository).with_suffix("").parts
        name = ".".join(words[:-1] if words[-1] == "__init__" else words)
        found[name] = Module(name, path)
    return found


def imported(module: Module, known: Collection[str], *, loaded: bool = False) -> Iterator[str]:
    """Yield the dotted names that ``module`` imports, also inside functions; ``loaded``: only when it is imported.

    Raises ``ValueError`` for a relative import.
    """
    for node in module.loaded_statements if loaded else module.import_statements:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        else:
            if node.level or not node.module:
                raise ValueError(f"{module.path}:{node.lineno}: relative import")
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in known else node.module for name in names)


def _is_for_type_checkers(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _imports_in(statements: Iterable[ast.AST]) -> Iterator[ast.Import | ast.ImportFrom]:
    for each in statements:
        if isinstance(each, ast.Import | ast.ImportFrom):
            yield each
        for block in ("body", "orelse", "finalbody", "handlers", "cases"):
            inner = getattr(each, block, None)
            if isinstance(inner, list):
                yield from _imports_in(inner)


def module_graph(modules: Mapping[str, Module], *, loaded: bool = False) -> dict[str, set[str]]:
    return {
        name: {other for other in imported(module, modules, loaded=loaded) if other in modules and other != name}
        for name, module in modules.items()
    }


def package_graph(modules: Mapping[str, Module]) -> dict[str, set[str]]:
    """Return the packages that each package imports. A file directly in launcher/ or trainer/ counts as a package."""
    unit = {name: module.package if "." in module.package else name for name, module in modules.items()}
    graph: dict[str, set[str]] = {name: set() for name in unit.values()}
    for name, module in modules.items():
        graph[unit[name]] |= {unit[other] for other in imported(module, modules) if other in modules} - {unit[name]}
    return graph


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the import cycles: strongly connected components of two or more names, the largest first."""
    below = {name: reached(graph, name) for name in graph}
    groups = {frozenset(other for other in below[name] if name in below[other]) for name in graph}
    return sorted((sorted(group) for group in groups if len(group) > 1), key=lambda group: (-len(group), group))


def reached(graph: Mapping[str, set[str]], start: str) -> set[str]:
    """Return all names that ``start`` leads to, directly or not. ``start`` is among them only in a cycle."""
    found: set[str] = set()
    waiting = [start]
    while waiting:
        new = graph[waiting.pop()] - found
        found |= new
        waiting += new
    return found
