"""Finds the modules beside a user's script that it imports, directly or indirectly, without running it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

from launcher.files import CODE_ROOT

#: Functions that import the module of a name, which is examined if it is written out.
_IMPORTS = ("importlib.import_module", "import_module", "__import__")

_OUR_CODE = tuple(CODE_ROOT / name for name in ("gnnfleet", "launcher", "trainer"))  # sent, or not for scripts


def imported_modules(argv: Sequence[str], cwd: Path, as_module: bool = False) -> tuple[Path, list[Path]]:
    """Return the folder where the script in ``argv`` finds its modules, and the files of those that it imports there.

    Examines ``python SCRIPT``, ``SCRIPT.py`` and ``python -m MODULE``, whose own files are among those returned. Of a
    package with ``__init__.py`` all modules are returned, as it may import some of them by name. ``as_module``: whether
    the script is imported, as a module of the package in whose folder it is.
    """
    found = _script(argv, cwd)
    if found is not None and as_module:
        folder = package_top(found[1][0][1])
        module = ".".join(found[1][0][1].relative_to(folder).with_suffix("").parts)
        found = folder, [*_files_of(module, folder)]
    if found is None:
        return cwd, []
    folder, waiting = found
    seen, modules = set[Path](), dict[Path, None]()
    while waiting:
        module, path = waiting.pop(0)
        if path in seen or any(path.is_relative_to(ours) for ours in _OUR_CODE):
            continue
        seen.add(path)
        if module:
            modules[path] = None
            if path.name == "__init__.py" and "." not in module:
                for file in sorted(path.parent.rglob("*.py")):
                    rest = file.relative_to(folder)
                    if not any(part.startswith(".") or part == "site-packages" for part in rest.parts):
                        waiting.append((".".join(rest.with_suffix("").parts), file))
        waiting += _imported(path, folder)
    return folder, [*modules]


def package_top(path: Path) -> Path:
    """Return the folder of a file, or the folder that contains the package of a file."""
    folder = path.parent
    while (folder / "__init__.py").is_file():
        folder = folder.parent
    return folder


def _script(argv: Sequence[str], cwd: Path) -> tuple[Path, list[tuple[str, Path]]] | None:
    """Return what ``argv`` runs: the folder of its modules, and its files as (module name, path).

    The module name of a script is ''. Returns None if ``argv`` has neither a ``.py`` file nor ``-m``.
    """
    words = list(argv)
    if words and Path(words[0]).name.startswith("python"):
        words = words[1:]
        while words and words[0].startswith("-") and words[0] not in ("-m", "-c"):
            words = words[1:]
    if words[:1] == ["-m"] and len(words) > 1:
        return cwd, [*_files_of(words[1], cwd)]
    path = cwd / words[0] if words else cwd
    return (path.parent, [("", path)]) if path.suffix == ".py" and path.is_file() else None


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
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in _IMPORTS and node.args:
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield from _files_of(name.value, folder)


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
