"""Finds the user's files that a run sends: a script, the modules beside it, other files, ``run.files`` …"""

from __future__ import annotations

import ast
import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from launcher.config.schema import ClusterConfig
from launcher.errors import UsageError
from launcher.files import CODE_ROOT
from launcher.plan.model import OwnCommand, copied

#: Programs that start processes; gnnfleet would start each of them several times.
_LAUNCHERS = (
    *("torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate", "accelerate.commands.launch"),
    *("deepspeed", "horovodrun", "mpirun", "mpiexec", "srun"),
)

#: Functions that import the module of a name, which is examined if it is written out.
_IMPORTS = ("importlib.import_module", "import_module", "__import__")

_OUR_CODE = tuple(CODE_ROOT / name for name in ("gnnfleet", "launcher", "trainer"))  # sent, or not for scripts

_MOST_MODULES, _MOST_BYTES = 2000, 64 << 20  # of modules that are sent because a script imports them


def own_command_files(
    argv: Sequence[str], extra: Sequence[str], cwd: Path, as_module: bool = False
) -> OwnCommand:  # fmt: skip
    """Collect the files that the user's command ``argv`` names, modules that its script imports, and ``extra``.

    ``SCRIPT.py ARGS`` becomes ``python SCRIPT.py ARGS``. ``as_module``: as for ``imported_modules``.

    Files below ``cwd`` keep their relative paths on the nodes; other files and folders are stored under their names.
    Raises UsageError for a missing file, for two files that would have the same path on the nodes, and for imported
    modules of more than ``_MOST_MODULES`` files or ``_MOST_BYTES`` bytes.
    """
    first = cwd / argv[0]
    if first.suffix == ".py" and first.is_file() and ("/" not in argv[0] or not os.access(first, os.X_OK)):
        argv = ("python", *argv)
    words: list[str] = []
    notes: list[str] = []
    files: dict[str, Path] = {}
    for word in argv:
        path = cwd / word
        if path.is_file() and "/" not in word and word == argv[0]:
            words.append(word)  # a first word without / is looked up in the node's PATH, as in a shell
        elif path.is_file():
            dest = _inside(path, extra, cwd) or _dest(path, cwd)
            _add(files, dest, path)
            words.append(word if dest == os.path.normpath(word) else dest)
        else:
            words.append(word)
            if path.is_dir():
                notes.append(f"folder `{word}` in your command is not sent; add it to run.files if the nodes need it")
    for name in extra:
        path = Path(name)
        if path.is_dir():
            top = Path(_dest(path, cwd))
            for file in path.rglob("*"):
                inside = file.relative_to(path)
                if file.is_file() and "__pycache__" not in inside.parts:
                    _add(files, (top / inside).as_posix(), file)
        elif path.is_file():
            _add(files, _dest(path, cwd), path)
        else:
            raise UsageError(f"run.files: no file or folder `{name}` on this machine")
    program, *rest = Path(argv[0]).name, *argv[1:]
    if program.startswith("python"):
        rest = [*itertools.dropwhile(lambda word: word.startswith("-") and word != "-m", rest)]
        program = rest[1] if rest[:1] == ["-m"] and len(rest) > 1 else program
    if program in _LAUNCHERS:
        notes.append(
            f"`{program}` is started in each process of the run and starts further ones there, which know only one "
            "another; gnnfleet sets the variables of torchrun itself: write -- python SCRIPT, and `procs`"
        )
    # The nodes would not have a script with a relative path.
    script = argv[1] if len(argv) > 1 and Path(argv[0]).name.startswith("python") else argv[0]
    if (
        script.endswith(".py")
        and not script.startswith(("/", "~"))
        and not {script, _dest(cwd / script, cwd)} & set(files)
    ):
        raise UsageError(
            f"your own command: there is no file `{script}` in {cwd.absolute()}, the folder from which files are "
            "sent. Change to the folder of the script, or give an absolute path if the script is already on the nodes"
        )
    _add_modules(files, argv, extra, cwd, as_module)
    planned = tuple(
        copied(dest, path, mode=0o755 if os.access(path, os.X_OK) else 0o644) for dest, path in sorted(files.items())
    )
    return OwnCommand(tuple(words), planned, tuple(notes))


def own_model_files(config: ClusterConfig, cwd: Path) -> OwnCommand:
    """Collect the file of the class that ``train.model`` names, the modules that it imports, and ``run.files``.

    Returns them as those of the command ``python FILE``. Raises UsageError as ``own_command_files``.
    """
    name = config.train.model.rpartition(":")[0]
    if not (cwd / name).is_file():
        raise UsageError(
            f"train.model: there is no file `{name}` in {cwd.absolute()}, the folder from which files are sent"
        )
    top = _package_top(cwd / name)
    if top != (cwd / name).parent and not top.resolve().is_relative_to(cwd.resolve()):
        raise UsageError(
            f"train.model: the package of `{name}` is not in {cwd.absolute()}, the folder from which files are sent; "
            "start from the folder that contains the package"
        )
    return own_command_files(("python", name), config.run.files, cwd, as_module=True)


def _add_modules(
    files: dict[str, Path], argv: Sequence[str], extra: Sequence[str], cwd: Path, as_module: bool
) -> None:  # fmt: skip
    """Add the modules that the script imports to ``files``, each at its place beside the script."""
    folder, modules = imported_modules(argv, cwd, as_module)
    sent = {path.resolve() for path in files.values()}
    modules = [path for path in modules if path.resolve() not in sent]
    size = sum(path.stat().st_size for path in modules)
    if len(modules) > _MOST_MODULES or size > _MOST_BYTES:
        raise UsageError(
            f"your own command imports {len(modules):,} modules of {size / 1e6:.0f} MB from {folder}, too many to send "
            "with each run. Install them on the hosts, or start from a folder that has only what the script needs"
        )
    script = next((path for word in argv if (path := cwd / word).suffix == ".py" and path.is_file()), None)
    top = Path()
    if script is not None:
        dest = Path(_inside(script, extra, cwd) or _dest(script, cwd))
        top = dest.parents[len(script.relative_to(folder).parts) - 1 if as_module else 0]
    for path in modules:
        _add(files, (top / path.relative_to(folder)).as_posix(), path)


def _dest(path: Path, cwd: Path) -> str:
    relative = os.path.relpath(os.path.abspath(path), os.path.abspath(cwd))
    return path.name if relative.startswith("..") else Path(relative).as_posix()


def _inside(path: Path, extra: Sequence[str], cwd: Path) -> str:
    # The file keeps its path in the folder, so that a script finds the files next to it.
    real = path.resolve()
    for folder in (Path(name) for name in extra):
        if folder.is_dir() and real.is_relative_to(folder.resolve()):
            return (Path(_dest(folder, cwd)) / real.relative_to(folder.resolve())).as_posix()
    return ""


def _add(files: dict[str, Path], dest: str, path: Path) -> None:
    other = files.setdefault(dest, path)
    if not other.samefile(path):
        raise UsageError(
            f"{other} and {path} would both be `{dest}` on the nodes; rename one of them, or launch from a parent "
            "folder of both"
        )


# -- modules of a script, found without running it ------------------------------


def imported_modules(argv: Sequence[str], cwd: Path, as_module: bool = False) -> tuple[Path, list[Path]]:
    """Return the folder where the script in ``argv`` finds its modules, and the files of those that it imports there.

    Examines ``python SCRIPT``, ``SCRIPT.py`` and ``python -m MODULE``, whose own files are among those returned. Of a
    package with ``__init__.py`` all modules are returned, as it may import some of them by name. ``as_module``: whether
    the script is imported, as a module of the package in whose folder it is.
    """
    found = _script(argv, cwd)
    if found is not None and as_module:
        folder = _package_top(found[1][0][1])
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


def _package_top(path: Path) -> Path:
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
