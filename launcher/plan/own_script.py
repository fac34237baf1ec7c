"""Finds the user's files that a run sends: a script, the modules beside it, other files, ``run.files`` …"""

from __future__ import annotations

import ast
import itertools
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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

_PYTHON = re.compile(r"python[0-9.]*")

# Options of Python: those that say what runs, and those whose value is the next word.
_MODULE_OR_CODE = re.compile(r"-[bBdEiIOPqRsSuvx]*([mc])(.*)", re.DOTALL)
_WITH_VALUE = re.compile(r"-[bBdEiIOPqRsSuvx]*[WX]|--check-hash-based-pycs")

_SHELLS = ("sh", "bash", "dash", "zsh", "ksh")

_MOST_SCRIPT = 1 << 20  # characters of a shell script that are examined

_OUR_CODE = tuple(CODE_ROOT / name for name in ("gnnfleet", "launcher", "trainer"))  # sent, or not for scripts

_MOST_MODULES, _MOST_BYTES = 2000, 64 << 20  # of modules that are sent because a script imports them


def own_command_files(
    argv: Sequence[str], extra: Sequence[str], cwd: Path, as_module: bool = False
) -> OwnCommand:  # fmt: skip
    """Collect the files that the user's command ``argv`` names, modules that its script imports, and ``extra``.

    ``SCRIPT.py ARGS`` becomes ``python SCRIPT.py ARGS``. Of a shell script, its commands are examined, too.
    ``as_module``: as for ``imported_modules``.

    Files below ``cwd`` keep their relative paths on the nodes; other files and folders are stored under their names.
    Raises UsageError for a missing file, for two files that would have the same path on the nodes, and for imported
    modules of more than ``_MOST_MODULES`` files or ``_MOST_BYTES`` bytes.
    """
    first = cwd / argv[0]
    if first.suffix == ".py" and os.path.isfile(first) and ("/" not in argv[0] or not os.access(first, os.X_OK)):
        argv = ("python", *argv)
    what, run = _run_by_python(argv)
    words: list[str] = []
    notes: list[str] = []
    files: dict[str, Path] = {}
    for k, word in enumerate(argv):
        named = _named_file(word, cwd)
        path = cwd / (named or word)
        program = k == 0 and os.path.isfile(path)
        if program and "/" not in word:
            words.append(word)  # a first word without / is looked up in the node's PATH, as in a shell
        elif program and (_PYTHON.fullmatch(path.name) or path.parent.name == "bin" and _dest(path, cwd) == path.name):
            words.append("python" if _PYTHON.fullmatch(path.name) else path.name)
            notes.append(f"`{word}` is a program of this machine; the nodes run their own {words[0]}")
        elif named:
            dest = _inside(path, extra, cwd) or _dest(path, cwd)
            _add(files, dest, path)
            there = f"./{dest}" if program and "/" not in dest else dest
            words.append(word if dest == os.path.normpath(named) else word.removesuffix(named) + there)
        else:
            words.append(word)
            if os.path.isdir(path) and (what, run) != ("module", word):
                notes.append(f"folder `{word}` in your command is not sent; add it to run.files if the nodes need it")
    in_scripts = _commands_of_scripts(argv, cwd)
    for word in itertools.chain.from_iterable(in_scripts):
        named = _named_file(word, cwd)
        if named and _dest(cwd / named, cwd) == os.path.normpath(named):
            _add(files, os.path.normpath(named), cwd / named)
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
    launcher = run if what == "module" else Path(argv[0]).name
    if launcher in _LAUNCHERS:
        notes.append(
            f"`{launcher}` is started in each process of the run and starts further ones there, which know only one "
            "another; gnnfleet sets the variables of torchrun itself: write -- python SCRIPT, and `procs`"
        )
    # The nodes would not have a script with a relative path.
    script = run if what == "script" and _PYTHON.fullmatch(Path(argv[0]).name) else argv[0]
    script = argv[1] if script in _SHELLS and argv[1:] else script
    if (
        (script.endswith((".py", ".sh")) or "/" in script and script == argv[0])
        and not script.startswith(("/", "~"))
        and not {script, _dest(cwd / script, cwd)} & set(files)
    ):
        raise UsageError(
            f"your own command: there is no file `{script}` in {cwd.absolute()}, the folder from which files are "
            "sent. Change to the folder of the script, or give an absolute path if the script is already on the nodes"
        )
    for command in (argv, *in_scripts):
        _add_modules(files, command, extra, cwd, as_module)
    planned = []
    for dest, path in sorted(files.items()):
        private = 0o700 if not path.stat().st_mode & 0o077 else 0o777  # such as one with credentials
        planned.append(copied(dest, path, mode=private & (0o755 if os.access(path, os.X_OK) else 0o644)))
    return OwnCommand(tuple(words), tuple(planned), tuple(notes))


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
    for path in modules:
        _add(files, _inside(path, extra, cwd) or _dest(path, cwd, folder), path)


def _named_file(word: str, cwd: Path) -> str:
    """Return the path of a file in a word, as it stands there: in ``conf.yml`` and ``--config=conf.yml``; else ''."""
    return next((name for name in (word, word.partition("=")[2]) if name and os.path.isfile(cwd / name)), "")


def _run_by_python(argv: Sequence[str]) -> tuple[str, str]:
    """Return what the first Python in ``argv`` runs: ("script", path), ("module", name), ("code", text)."""
    rest = [*itertools.dropwhile(lambda word: not _PYTHON.fullmatch(Path(word).name), argv)][1:]
    while rest and rest[0].startswith("-"):
        if given := _MODULE_OR_CODE.fullmatch(rest[0]):
            return "module" if given[1] == "m" else "code", given[2] or "".join(rest[1:2])
        rest = rest[2 if _WITH_VALUE.fullmatch(rest[0]) else 1 :]
    return ("script", rest[0]) if rest else ("", "")


def _commands_of_scripts(argv: Sequence[str], cwd: Path) -> list[list[str]]:
    """Return the commands in the shell script, or behind the ``-c``, of ``argv``, and in scripts that they run."""
    found: list[list[str]] = []
    for command in itertools.chain([list(argv)], found):  # ``found`` grows
        _, *words = [*itertools.dropwhile(lambda word: Path(word).name not in _SHELLS, command)] or [""]
        code = next((k for k, word in enumerate(words) if re.fullmatch("-[a-z]*c", word)), None)
        text = "".join(words[code + 1 : code + 2]) if code is not None else ""
        for path in (cwd / word for word in (*words, *command[:1]) if not text and os.path.isfile(cwd / word)):
            with path.open(encoding="utf-8", errors="replace") as file:
                start = file.read(_MOST_SCRIPT)
            text = start if words or re.match(r"#!.*sh\b", start) else ""
        for line in text.replace("\\\n", " ").splitlines():
            lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
            lexer.whitespace_split = True
            try:
                line_words = [*lexer]
            except ValueError:  # a quote that a later line closes
                line_words = line.split()
            parts = itertools.groupby(line_words, lambda word: re.fullmatch("[;&|()<>]+", word) is None)
            found += [one for is_command, part in parts if is_command and (one := [*part]) not in found]
    return found


def _dest(path: Path, cwd: Path, folder: Path | None = None) -> str:
    """Return the path on the nodes: that from ``cwd``; of what is elsewhere that from ``folder``, or the name."""
    there = os.path.relpath(os.path.abspath(folder or path), os.path.abspath(cwd))
    if there.startswith("..") and (folder is None or path.is_relative_to(folder)):
        return path.relative_to(folder or path.parent).as_posix()
    return Path(os.path.relpath(os.path.abspath(path), os.path.abspath(cwd))).as_posix()


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

    Examines ``python SCRIPT``, ``SCRIPT.py``, ``python -m MODULE`` and ``python -c CODE``, also behind other programs;
    the files of MODULE are among those returned. Modules in folders that a file adds to ``sys.path`` are found if these
    folders are below ``cwd``. Of a package with ``__init__.py`` all modules are returned, as it may import some of them
    by name. ``as_module``: whether the script is imported, as a module of the package in whose folder it is.
    """
    folder, waiting = _script(argv, cwd)
    if as_module and waiting:
        folder = _package_top(waiting[0].path)
        name = ".".join(waiting[0].path.relative_to(folder).with_suffix("").parts)
        waiting = _files_of(name, [folder])
    roots = [folder]
    seen, modules = set[Path](), dict[Path, None]()
    while waiting:
        module = waiting.pop(0)
        path = module.path
        if path in seen or any(path.is_relative_to(ours) for ours in _OUR_CODE):
            continue
        seen.add(path)
        if module.name:
            modules[path] = None
            if path.name == "__init__.py" and "." not in module.name:
                for file in sorted(path.parent.rglob("*.py")):
                    rest = file.relative_to(module.root)
                    if not any(part.startswith(".") or part == "site-packages" for part in rest.parts):
                        waiting.append(_Module(".".join(rest.with_suffix("").parts), file, module.root))
        try:
            text = module.code.encode() if module.code else path.read_bytes()
            tree = ast.parse(text)
        except (OSError, SyntaxError, ValueError, RecursionError):  # Python reports it when the script runs
            continue
        if b"sys.path" in text:
            roots += _added_folders(tree, path, cwd)
        for name in _imported(tree, module):
            waiting += _files_of(name, [module.root, *roots])
    return folder, [*modules]


@dataclass(frozen=True)
class _Module:
    name: str  #: '' for a script
    path: Path
    root: Path  #: folder in which Python finds it
    code: str = ""  #: the text, if it is not in the file


def _package_top(path: Path) -> Path:
    """Return the folder of a file, or the folder that contains the package of a file."""
    folder = path.parent
    while (folder / "__init__.py").is_file():
        folder = folder.parent
    return folder


def _script(argv: Sequence[str], cwd: Path) -> tuple[Path, list[_Module]]:
    """Return what ``argv`` runs: the folder of its modules, and its files.

    There are none if ``argv`` has neither a Python script nor code, nor ``-m`` with a module below ``cwd``.
    """
    what, run = _run_by_python(argv)
    if what == "code":
        return cwd, [_Module("", cwd / "-c", cwd, run)]
    if what == "module" and (found := _files_of(f"{run}.__main__", [cwd])):
        return cwd, found
    for k, word in enumerate(((run,) if what == "script" else ()) + tuple(argv)):
        path = cwd / word
        if not os.path.isfile(path) or _PYTHON.fullmatch(path.name):
            continue
        with path.open("rb") as file:
            by_itself = re.match(rb"#!.*python", file.readline(1000))
        if path.suffix == ".py" or by_itself or k == 0 and what == "script":
            return path.parent, [_Module("", path, path.parent)]
    return cwd, []


def _imported(tree: ast.Module, module: _Module) -> Iterator[str]:
    """Yield the names of the modules that a module imports."""
    for node in _statements(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = [*module.path.parents][node.level - 1]
                if not package.is_relative_to(module.root) or package == module.root:
                    continue
                base = ".".join([*package.relative_to(module.root).parts, *filter(None, [base])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in _IMPORTS and node.args:
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield name.value


def _added_folders(tree: ast.Module, file: Path, cwd: Path) -> Iterator[Path]:
    """Yield the folders below ``cwd`` that a file may add to ``sys.path``.

    Where its code computes them, as by ``os.path.dirname(__file__)``, these are all that the texts in it may mean.
    """
    top = Path(os.path.abspath(cwd))
    around = [one for one in Path(os.path.abspath(file)).parents if one.is_relative_to(top)]
    for node in _statements(tree):
        if isinstance(node, ast.Expr | ast.Assign | ast.AugAssign) and "sys.path" in ast.unparse(node):
            texts = [
                one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, str)
            ]
            for base in (*around, top):
                folder = Path(os.path.normpath(base.joinpath(*texts)))
                if folder.is_relative_to(top) and os.path.isdir(folder):
                    yield cwd / folder.relative_to(top)


def _statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes of a syntax tree except those in ``if TYPE_CHECKING:``."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            yield from (statement for each in node.orelse for statement in (each, *_statements(each)))
            continue
        yield node
        yield from _statements(node)


def _files_of(module: str, roots: Sequence[Path]) -> list[_Module]:
    """Return the files of ``module`` and of the packages that contain it, below the first of ``roots`` with any."""
    parts = module.split(".")
    for root in roots:
        found = []
        for n in range(1, len(parts) + 1):
            path, name = root.joinpath(*parts[:n]), ".".join(parts[:n])
            if os.path.isfile(path / "__init__.py"):
                found.append(_Module(name, path / "__init__.py", root))
            elif os.path.isfile(path.with_name(f"{path.name}.py")):
                found.append(_Module(name, path.with_name(f"{path.name}.py"), root))
                break
            elif not os.path.isdir(path):
                break
        if found:
            return found
    return []
