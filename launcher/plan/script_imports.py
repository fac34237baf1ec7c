"""Finds modules that a user's script imports and that are on this machine but not among the files sent with a run."""

from __future__ import annotations

import ast
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.files import CODE_ROOT

_OUR_CODE = tuple(CODE_ROOT / name for name in ("gnnfleet", "launcher", "trainer"))  # sent, or not for scripts


@dataclass(frozen=True)
class UnsentModules:
    """Imported modules in one file or folder that is not sent to the nodes."""

    script: str  #: as the user's command names it
    modules: tuple[str, ...]
    path: str  #: the file or top folder to send, relative to the current folder; a folder ends with ``/``

    @property
    def message(self) -> str:
        return f"not sent to the nodes, but imported by {self.script}: {', '.join(self.modules)}"

    @property
    def remedy(self) -> str:
        return f"add `{self.path}` to run.files"


def unsent_modules(argv: Sequence[str], sent: Collection[Path], cwd: Path) -> list[UnsentModules]:
    """Return modules that the script in ``argv`` imports, directly or indirectly, but that are not sent.

    Only modules in the script's own folder are returned. Examines ``python SCRIPT`` and ``python -m MODULE``, without
    running them. ``sent``: the files that are sent.
    """
    found = _script(argv, cwd)
    if found is None:
        return []
    name, folder, waiting = found
    known, seen = {path.resolve() for path in sent}, set[Path]()
    missing: dict[str, list[str]] = {}
    while waiting:
        module, path = waiting.pop(0)
        if path in seen or any(path.is_relative_to(ours) for ours in _OUR_CODE):
            continue
        seen.add(path)
        if module and path.resolve() not in known:
            top = folder / module.split(".")[0]
            shown = f"{os.path.relpath(top, cwd)}/" if top.is_dir() else os.path.relpath(path, cwd)
            missing.setdefault(shown, []).append(module)
        waiting += _imported(path, folder)
    return [UnsentModules(name, _innermost(modules), path) for path, modules in missing.items()]


def _innermost(modules: Collection[str]) -> tuple[str, ...]:
    return tuple(one for one in modules if not any(other.startswith(f"{one}.") for other in modules))


def _script(argv: Sequence[str], cwd: Path) -> tuple[str, Path, list[tuple[str, Path]]] | None:
    """Return what ``argv`` runs: its name, the folder of its modules, and its files as (module name, path).

    The module name of a script is ''. Returns None if ``argv`` has neither a ``.py`` file nor ``-m``.
    """
    words = list(argv)
    if words and Path(words[0]).name.startswith("python"):
        words = words[1:]
        while words and words[0].startswith("-") and words[0] not in ("-m", "-c"):
            words = words[1:]
    if words[:1] == ["-m"] and len(words) > 1:
        return f"python -m {words[1]}", cwd, [*_files_of(words[1], cwd)]
    path = cwd / words[0] if words else cwd
    return (words[0], path.parent, [("", path)]) if path.suffix == ".py" and path.is_file() else None


def _imported(file: Path, folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield (name, file) of each module below ``folder`` that ``file`` imports."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):  # Python reports it when the script runs
        return
    for node in _statements(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _files_of(alias.name, folder)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = [*file.parents][node.level - 1]
                if not package.is_relative_to(folder) or package == folder:
                    continue
                base = ".".join([*package.relative_to(folder).parts, *filter(None, [base])])
            yield from _files_of(base, folder)
            for alias in node.names:
                yield from _files_of(f"{base}.{alias.name}", folder)


def _statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes of a syntax tree except those in ``if TYPE_CHECKING:``."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            yield from (statement for each in node.orelse for statement in (each, *_statements(each)))
            continue
        yield node
        yield from _statements(node)


def _files_of(module: str, folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield (name, file) of ``module`` and of the packages that contain it, if they are files below ``folder``."""
    parts = module.split(".")
    for n in range(1, len(parts) + 1):
        path, name = folder.joinpath(*parts[:n]), ".".join(parts[:n])
        if (path / "__init__.py").is_file():
            yield name, path / "__init__.py"
        elif path.with_name(f"{path.name}.py").is_file():
            yield name, path.with_name(f"{path.name}.py")
            return
        elif not path.is_dir():
            return
