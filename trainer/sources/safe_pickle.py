"""Lets other packages read pickled arrays and graphs, but nothing that could run code."""

from __future__ import annotations

import contextlib
import pickle
import re
import sys
from collections.abc import Iterator
from typing import Any

#: Classes and functions, as module.name, that may occur in a pickle of arrays, tensors and graphs; also by their names
#: in Python 2 and numpy 1.
_HARMLESS = re.compile(
    r"(builtins|__builtin__)\.(set|frozenset|list|dict|tuple|int|long|float|bool|complex|str|unicode|bytes|bytearray|slice"
    r"|object)"
    r"|collections\.(OrderedDict|defaultdict|Counter)"
    r"|_codecs\.encode|(copyreg|copy_reg)\._reconstructor"
    r"|numpy\.(ndarray|dtype)|numpy\.(core|_core)\.multiarray\.(_reconstruct|scalar)"
    r"|numpy\.(core|_core)\.numeric\._frombuffer"
    r"|scipy\.sparse\.(_?(csr|csc|coo|bsr|dia|lil|dok)\.)?(csr|csc|coo|bsr|dia|lil|dok)_(matrix|array)"
    r"|torch\.(Size|device|\w+Storage)|torch\.storage\.(TypedStorage|UntypedStorage|_load_from_bytes)"
    r"|torch\._utils\._rebuild_(tensor|tensor_v2|parameter|sparse_tensor)|torch\.serialization\._get_layout"
    r"|torch_geometric\.data\.data\.(Data|DataEdgeAttr|DataTensorAttr)|torch_geometric\.data\.hetero_data\.HeteroData"
    r"|torch_geometric\.data\.storage\.(AttrType|BaseStorage|EdgeStorage|GlobalStorage|NodeStorage)"
)

_blocks = 0  #: number of ``with`` blocks of ``only_harmless_pickles`` that are open
_hooked = False


class UnsafePickle(pickle.UnpicklingError):
    """A pickle has an object of another class than arrays and graphs."""


@contextlib.contextmanager
def only_harmless_pickles() -> Iterator[None]:
    """In the ``with`` block, let this process unpickle only numbers, texts, arrays, tensors and graphs.

    Applies to pickle, and so to numpy's ``allow_pickle``, ``torch.load`` and pandas, whoever calls them in any thread.
    Other content raises ``UnsafePickle`` before anything in it is executed.
    """
    global _blocks, _hooked
    if not _hooked:
        sys.addaudithook(_refuse)  # cannot be removed
        _hooked = True
    _blocks += 1
    try:
        yield
    finally:
        _blocks -= 1


def _refuse(event: str, args: tuple[Any, ...]) -> None:
    if event == "pickle.find_class" and _blocks:
        module, name = args
        if not _HARMLESS.fullmatch(f"{module}.{name}"):
            raise UnsafePickle(f"Unsupported: {module}.{name}")
