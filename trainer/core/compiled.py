"""Kernels that are compiled once per host, wherever their code lies.

Numba keeps compiled code beside the source, so that each copy of the code compiles anew, and two processes that
compile at the same moment may mix up their files. Here it lies in one folder of the user's, under names made of what
it was compiled from: the sources, the signature, the processor, the versions of Python and Numba.
"""

from __future__ import annotations

import contextlib
import grp
import hashlib
import os
import pickle
import pwd
import re
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
    """``numba.njit`` without the GIL, its compiled code in ``kernels_folder()``; where nothing can be written, where
    Numba has it. ``options`` are Numba's."""

    def decorate(function: Callable[..., Any]) -> Any:
        kernel = numba.njit(nogil=True, cache=True, **options)(function)
        folder = _usable_folder()
        if folder is not None:
            name = f"{function.__module__}.{function.__qualname__}-{function.__code__.co_firstlineno}"
            kernel._cache = KernelCache(function)
            kernel._cache._cache_file = KernelFiles(folder, name, function.__code__.co_filename)
        return kernel

    return decorate


def kernels_folder() -> Path:
    """``$GNNFLEET_KERNELS``, else ``${XDG_CACHE_HOME:-~/.cache}/gnnfleet/kernels``."""
    given = os.environ.get("GNNFLEET_KERNELS")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "gnnfleet" / "kernels"


class KernelCache(FunctionCache):
    """Numba's, but what is compiled is loaded without making the compiler ready, which is still done to compile.

    That imports all that Numba can compile, SciPy's linear algebra included: 0.7 s and 30 MB a process.
    """

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The compiled code for a signature; None where there is none."""
        rtsys.initialize(target_context)  # kernels allocate by it
        return self._load_overload(sig, target_context)


class KernelFiles:
    """The compiled code of one kernel, a file for each signature; in place of Numba's index and data files.

    No index: two that write the same name write the same code, so that processes need not know of each other.
    """

    def __init__(self, folder: Path, name: str, source: str):
        self._folder, self._name, self._source = folder, name.replace("<locals>.", ""), source

    def load(self, key: tuple[Any, ...]) -> Any:
        """What was saved; None where nothing was, or it is damaged, or others may have written it."""
        try:
            path = self._path(key)
            with path.open("rb") as file:
                if others_may_write(os.fstat(file.fileno())):
                    return None
                loaded = pickle.loads(file.read())
        except (OSError, pickle.UnpicklingError, EOFError):
            return None
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > 86400:
                os.utime(path)  # still in use
        return loaded

    def save(self, key: tuple[Any, ...], data: Any) -> None:
        """Keep it, whole; nothing where the disk does not take it, as it can be compiled again."""
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
        """Called by Numba to forget what was compiled."""
        for path in self._folder.glob(f"{self._name}-*.nbc"):
            path.unlink(missing_ok=True)

    def _path(self, key: tuple[Any, ...]) -> Path:
        signature, machine, code = key  # types as text: their pickles differ between processes
        said = repr(
            (str(signature), machine, code, source_digest(self._source), numba.__version__, sys.version_info[:2])
        )
        return self._folder / f"{self._name}-{hashlib.sha256(said.encode()).hexdigest()[:24]}.nbc"


@cache
def source_digest(source: str) -> str:
    """Of a file and of all of the trainer's that it imports at its top: what a kernel calls, and its constants, are
    compiled into it."""
    found: dict[str, str] = {}
    waiting = [(os.path.relpath(source, ROOT), source)]  # by name within the code, which may lie anywhere
    while waiting:
        name, path = waiting.pop()
        if name not in found:
            content, imported = _read(path)
            found[name] = content
            waiting += imported
    return hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()


@cache
def _read(path: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    """A file's digest, and which of the trainer's it imports, each as name and path."""
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
    """The module's file; '' where it is none, but a name within one."""
    base = os.path.join(ROOT, *module.split(".")[1:])
    return next((path for path in (f"{base}.py", os.path.join(base, "__init__.py")) if os.path.isfile(path)), "")


@cache
def _usable_folder() -> Path | None:
    """The folder, made; what nobody has used for long is removed.

    Where it cannot be written it is one below the temporary folder, and where others may write to it, as compiled
    kernels are code. None where that cannot be written either.
    """
    folder = kernels_folder()
    try:
        if why := _unusable(folder):
            private = _private_folder()
            warnings.warn(
                f"{folder} {why}: compiled kernels are kept in {private} instead; `chmod` it where it is yours, or set "
                "GNNFLEET_KERNELS to another folder",
                stacklevel=2,
            )
            folder = private
        _remove_unused(folder)
    except OSError:
        return None
    return folder


def _unusable(folder: Path) -> str:
    """Why ``folder``, which is made, is of no use; '' where it is."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if others_may_write(folder.stat()):
            return "belongs to another user, or others may write to it"
    except OSError as error:
        return f"cannot be made ({error.strerror})"
    return "" if os.access(folder, os.W_OK) else "cannot be written"


def _private_folder() -> Path:
    """A folder of this user's alone below the temporary folder, the same for all processes where it is not taken."""
    folder = Path(tempfile.gettempdir(), f"gnnfleet-kernels-{os.geteuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    taken = folder.is_symlink() or others_may_write(folder.stat())
    return Path(tempfile.mkdtemp(prefix="gnnfleet-kernels-")) if taken else folder


def others_may_write(found: os.stat_result) -> bool:
    """Whether another user than this one and root owns it, or may write to it.

    A group that is the user's own, of the same name and with nobody else in it, counts as the user.
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
