"""Keeps compiled CUDA kernels in the folder of the CPU's kernels (``core.compiled``): later processes load them.

Compiling the kernels of a run takes a process some seconds. A file has the cubin of one kernel for one signature and
one compute capability.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from typing import Any

from trainer.core.compiled import KernelFiles, usable_folder

_VERSIONS = tuple(version(package) for package in ("numba-cuda", "cuda-core"))  # they define what a file contains


def keep_compiled(dispatcher: Any, function: Callable[..., None]) -> Any:
    """Let a dispatcher of numba-cuda load and save its kernels. Returns it.

    Does nothing if the folder cannot be written. ``function``: the kernel's Python function.
    """
    folder = usable_folder()
    if folder is not None:
        name = f"cuda.{function.__module__}.{function.__qualname__}-{function.__code__.co_firstlineno}"
        dispatcher._cache = KernelCache(KernelFiles(folder, name, function.__code__.co_filename), variant(function))
    return dispatcher


class KernelCache:
    """The cache of one dispatcher, in place of numba-cuda's, whose files depend on the path and time of the source."""

    cache_path = ""  #: numba-cuda shows it in statistics

    def __init__(self, files: KernelFiles, variant: tuple[str, ...]):
        self._files, self._variant = files, variant

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        """Return the kernel for a signature and the current device, or None if it is not saved or of no use."""
        target_context.refresh()
        key = self._key(signature, target_context.codegen())
        try:
            payload = self._files.load(key)
            return None if payload is None else import_module("numba.cuda.dispatcher")._Kernel._rebuild(**payload)
        except Exception:  # many types: written with another version of a package that numba-cuda uses
            return None

    def save_overload(self, signature: Any, kernel: Any) -> None:
        self._files.save(self._key(signature, kernel.codegen), kernel._reduce_states())

    def flush(self) -> None:
        self._files.flush()

    def _key(self, signature: Any, codegen: Any) -> tuple[Any, ...]:
        machine = codegen.magic_tuple()  # CUDA's version and compute capability
        return signature, (machine, _VERSIONS), self._variant


def variant(function: Callable[..., None]) -> tuple[str, ...]:
    """Return texts that tell kernels apart that are made of one function with different values in its closure."""
    values = [cell.cell_contents for cell in function.__closure__ or ()]
    known = [getattr(value, "py_func", value) for value in values]  # of a device function
    return tuple(f"{one.__module__}.{one.__qualname__}" if callable(one) else repr(one) for one in known)
