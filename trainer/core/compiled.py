"""Compiles Numba kernels once per host and caches the compiled code in one folder per user.

A file with compiled code is named by a hash of everything it was compiled from: the sources, the signature, the
processor and the versions of Python and Numba.
"""

from __future__ import annotations

import contextlib
import grp
import hashlib
import os
import pickle
import pwd
import re
import stat
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba
from numba.core.caching import FunctionCache
from numba.core.runtime.nrt import rtsys
from numba.core.serialize import dumps

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

_IMPORTED = re.compile(r"^(?:from (trainer[\w.]*) import (\([^)]*\)|[^\n]*)|import (trainer[\w.]*))", re.MULTILINE)

_UNUSED_DAYS = 60


def njit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Decorate a kernel as ``numba.njit(nogil=True, cache=True, **options)``, cached in ``kernels_folder()``.

    If this folder cannot be written, uses a temporary folder or else Numba's own cache.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        kernel = numba.njit(nogil=True, cache=True, **options)(function)
        folder = usable_folder()
        if folder is not None:
            name = f"{function.__module__}.{function.__qualname__}-{function.__code__.co_firstlineno}"
            kernel._cache = KernelCache(function)
            kernel._cache._cache_file = KernelFiles(folder, name, function.__code__.co_filename)
        return kernel

    return decorate


def kernels_folder() -> Path:
    """Return ``$GNNFLEET_KERNELS``, or by default ``${XDG_CACHE_HOME:-~/.cache}/gnnfleet/kernels``."""
    given = os.environ.get("GNNFLEET_KERNELS")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "gnnfleet" / "kernels"


class KernelCache(FunctionCache):
    """Numba's cache of one function, changed so that loading compiled code does not initialise the compiler."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the compiled code for a signature, or None when it is not cached."""
        rtsys.initialize(target_context)  # kernels allocate memory through Numba's runtime
        return self._load_overload(sig, target_context)


class KernelFiles:
    """Stores the compiled code of one kernel, one file per signature, in place of Numba's index and data files.

    Needs no lock: processes that write the same file name write the same code.
    """

    def __init__(self, folder: Path, name: str, source: str):
        self._folder, self._name, self._source = folder, name.replace("<locals>.", ""), source

    def load(self, key: tuple[Any, ...]) -> Any:
        """Return the saved compiled code, or None if the file is missing, damaged, or writable by other users."""
        try:
            path = self._path(key)
            with path.open("rb") as file:
                loaded = None if _others_may_write(os.fstat(file.fileno())) else pickle.loads(file.read())
        except (OSError, pickle.UnpicklingError, EOFError):
            loaded = None
        if loaded is None:
            _say_compiling()
            return None
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > 86400:
                os.utime(path)  # marks the file as in use for ``_remove_unused``
        return loaded

    def save(self, key: tuple[Any, ...], data: Any) -> None:
        """Save compiled code atomically. An ``OSError`` is ignored."""
        with contextlib.suppress(OSError):
            path = self._path(key)
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=path.parent, prefix=".new-")
            try:
                with open(handle, "wb") as out:
                    out.write(dumps(data))
                os.replace(name, path)
            except BaseException:
                os.unlink(name)
                raise

    def flush(self) -> None:
        for path in self._folder.glob(f"{self._name}-*.nbc"):
            path.unlink(missing_ok=True)

    def _path(self, key: tuple[Any, ...]) -> Path:
        signature, machine, code = key
        identity = repr(  # types as text, as their pickles differ between processes
            (str(signature), machine, code, _source_digest(self._source), numba.__version__, sys.version_info[:2])
        )
        return self._folder / f"{self._name}-{hashlib.sha256(identity.encode()).hexdigest()[:24]}.nbc"


@cache
def _say_compiling() -> None:
    """Say once that kernels are compiled, which takes longer than the first batches. Only the first process of a node.

    The variables are those of torchrun, Slurm and Open MPI.
    """
    names = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")
    if next((os.environ[name] for name in names if name in os.environ), "0") == "0":
        text = "compiling kernels for this machine: up to a minute, once; later runs load them from"
        print(f"{text} {kernels_folder()}", file=sys.stderr, flush=True)


@cache
def _source_digest(source: str) -> str:
    """Return the sha256 of a source file and of all trainer modules that it imports, directly or indirectly.

    Imports inside functions are ignored.
    """
    found: dict[str, str] = {}
    waiting = [(os.path.relpath(source, ROOT), source)]  # relative, so that copies of the code share compiled kernels
    while waiting:
        name, path = waiting.pop()
        if name not in found:
            content, imported = _read(path)
            found[name] = content
            waiting += imported
    return hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()


@cache
def _read(path: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Return the sha256 of a file, and (name, path) of every trainer module that the file imports."""
    with open(path, "rb") as file:
        content = file.read()
    modules: list[str] = []
    for match in _IMPORTED.finditer(content.decode()):
        modules.append(match[1] or match[3])
        modules += (f"{match[1]}.{name}" for name in re.findall(r"\w+", match[2] or ""))
    found = ((module, _file_of(module)) for module in modules)
    return hashlib.sha256(content).hexdigest(), tuple((module, path) for module, path in found if path)


@cache
def _file_of(module: str) -> str:
    """Return the source file of a module, or '' if ``module`` names a function or constant inside a module."""
    base = os.path.join(ROOT, *module.split(".")[1:])
    return next((path for path in (f"{base}.py", os.path.join(base, "__init__.py")) if os.path.isfile(path)), "")


@cache
def usable_folder() -> Path | None:
    """Create the folder for compiled kernels, delete kernels that were not used for long, and return the folder.

    If the folder cannot be written, or other users may write to it, warns and returns a temporary folder instead.
    Returns None if the temporary folder cannot be written either.
    """
    folder = kernels_folder()
    try:
        if why := _why_unusable(folder):
            private = _private_folder()
            warnings.warn(
                f"{folder} {why}: compiled kernels are kept in {private} instead; fix its permissions, or set "
                "GNNFLEET_KERNELS to another folder",
                stacklevel=2,
            )
            folder = private
    except OSError:
        return None
    with contextlib.suppress(OSError):
        _remove_unused(folder)
    return folder


def _why_unusable(folder: Path) -> str:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _others_may_write(folder.stat()):
            return "belongs to another user, or other users may write to it"
    except OSError as error:
        return f"cannot be created ({error.strerror})"
    return "" if os.access(folder, os.W_OK) else "cannot be written"


def _private_folder() -> Path:
    """Create and return a folder below the system's temporary folder that only this user may write to.

    All processes of the user get the same folder, even if another user created one of the usual name.
    """
    top, name = Path(tempfile.gettempdir()), f"gnnfleet-kernels-{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        (top / name).mkdir(mode=0o700)
    for folder in (top / name, *sorted(top.glob(f"{name}-*"))):
        found = folder.lstat()
        if stat.S_ISDIR(found.st_mode) and not _others_may_write(found) and os.access(folder, os.W_OK):
            return folder
    return Path(tempfile.mkdtemp(prefix=f"{name}-"))


def _others_may_write(found: os.stat_result) -> bool:
    """Return whether another user owns a file or folder, or may write to it.

    ``found``: the result of ``os.stat``. Root and the members of this user's private group do not count as other users.
    """
    if found.st_uid not in (0, os.geteuid()) or found.st_mode & 0o002:
        return True
    if not found.st_mode & 0o020:
        return False
    try:
        group, user = grp.getgrgid(found.st_gid), pwd.getpwuid(os.geteuid())
    except KeyError:
        return True
    return group.gr_name != user.pw_name or not {user.pw_name}.issuperset(group.gr_mem)


def _remove_unused(folder: Path) -> None:
    stamp = folder / "looked"
    if stamp.exists() and time.time() - stamp.stat().st_mtime < 86400:
        return
    stamp.touch()
    for path in (*folder.glob("*.nbc"), *folder.glob(".new-*")):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _UNUSED_DAYS * 86400:
                path.unlink()
