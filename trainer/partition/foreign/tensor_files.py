"""Reads tensors that other programs saved with ``torch.save`` or ``pickle``, without running code from the files."""

from __future__ import annotations

import io
import pickle
import pickletools
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainer.core.errors import DataError
from trainer.core.files import read_regular
from trainer.core.memory import check_unpacked
from trainer.data.memory import shared_array
from trainer.data.raw_arrays import RawArray
from trainer.sources.pyg import first_line, safe_unpickling

_MOST_PLAIN = 1 << 20  #: bytes of a pickle of plain values


def load_tensors(path: Path) -> Any:
    """Return the content of a .pt file: a tensor, or dicts and lists of tensors. Large tensors are memory-mapped.

    Raises ``DataError`` if the file is missing, or contains objects of other classes.
    """
    import torch

    with _errors(path), safe_unpickling():
        if _is_compressed(path):  # torch would map the compressed bytes as values
            check_unpacked(path, "unpack it, and pack it again without compression (zip -0)")
            return torch.load(path, map_location="cpu", weights_only=True)
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
            return torch.load(path, map_location="cpu", weights_only=True)  # of torch before 1.6


def _is_compressed(path: Path) -> bool:
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist())


def load_array(path: Path) -> RawArray:
    """Return the tensor in a .pt file as an array. Raises ``DataError`` for any other content."""
    return tensor_array(load_tensors(path), str(path))


def tensor_array(value: Any, place: str) -> RawArray:
    """Convert a tensor to an array, without a copy. Raises ``DataError`` for other values and unknown dtypes.

    ``place``: where the tensor comes from, for messages.
    """
    import torch

    if not isinstance(value, torch.Tensor):
        raise DataError(f"{place}: holds a {type(value).__name__}, expected a tensor")
    try:
        return RawArray(shared_array(value), place, value.dtype == torch.bfloat16)
    except TypeError:
        raise DataError(f"{place}: numpy has no dtype {value.dtype}; convert the tensor to another dtype") from None


def load_pickled_tensors(path: Path) -> Iterator[RawArray]:
    """Yield the tensors that were pickled to a file one after the other.

    Raises ``DataError`` if the file cannot be read or contains another object.
    """
    with _errors(path), open(path, "rb") as file:
        while file.peek(1):
            yield tensor_array(_TensorUnpickler(file).load(), str(path))


def load_pickled_values(path: Path) -> Any:
    """Unpickle dicts, lists, tuples, strings and numbers. Raises ``DataError`` for other classes."""
    with _errors(path):
        content = read_regular(path, _MOST_PLAIN)
        for operation, argument, _ in pickletools.genops(content):
            if operation.name in ("PUT", "BINPUT", "LONG_BINPUT") and int(argument) > len(content):  # type: ignore[arg-type]
                raise pickle.UnpicklingError("it would take too much memory")  # for a list of all smaller places
        return _PlainUnpickler(io.BytesIO(content)).load()


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it holds {module}.{name}, which is not a plain value")


class _TensorUnpickler(pickle.Unpickler):
    """Unpickles tensors, by ``torch.load`` with ``weights_only``. Raises for other objects."""

    def find_class(self, module: str, name: str) -> Any:
        import torch

        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return torch._utils._rebuild_tensor_v2
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return _storage
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        raise pickle.UnpicklingError(f"it holds {module}.{name}, which is not a tensor")


def _storage(content: bytes) -> Any:
    import torch

    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


@contextmanager
def _errors(path: Path) -> Iterator[None]:
    try:
        yield
    except DataError:
        raise
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(f"{path} is missing: the partition is incomplete; copy the folders of all parts") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # pickle and torch raise many types of exceptions, MemoryError among them
        raise DataError(
            f"{path} is not a file of tensors, or is damaged ({first_line(error)}); make the partition again"
        ) from error
