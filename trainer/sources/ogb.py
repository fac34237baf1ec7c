"""Reads the homogeneous ``ogbn-*`` graphs and ogbn-mag through the package ogb."""

from __future__ import annotations

import contextlib
import functools
import io
import pickle
import types
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

from trainer.core.errors import DataError
from trainer.data.raw_arrays import RawGraph
from trainer.sources.pyg import DOWNLOADS, errors_as_data_error, raw_graph

_NAMES = {
    "node_feat": "x",
    "labels": "y",
    "node_year": "year",
    "edge_feat": "edge_attr",
}  #: names in ogb's graphs -> names in ``Dataset``

_NUMPY_ONLY = {
    "_reconstruct",
    "ndarray",
    "dtype",
    "scalar",
    "encode",
}  #: functions and classes in a pickled numpy array

_NUMPY_MODULES = ("numpy", "numpy.core.multiarray", "numpy._core.multiarray", "_codecs")


def read_ogb(name: str, source: str | None) -> RawGraph:
    """Download an ``ogbn-*`` graph to the folder ``source``, unless it is there, and read it.

    Raises ``DataError`` when ogb is not installed or the download fails.
    """
    try:
        from ogb.nodeproppred import NodePropPredDataset
    except ImportError:
        raise DataError(f"dataset {name} needs the package ogb; install it: pip install ogb") from None
    with errors_as_data_error(name, source), _arrays_loadable(), contextlib.redirect_stdout(io.StringIO()):
        dataset = NodePropPredDataset(name, root=source or DOWNLOADS)
        graph, labels = dataset[0]
        splits = dataset.get_idx_split()
    values = {**graph, "labels": labels, **{f"{split}_idx": ids for split, ids in splits.items()}}
    typed = graph.get("edge_index") is None
    return raw_graph(name, _by_type(values) if typed else _renamed(values), f"dataset {name}")


def _renamed(values: Mapping[str, Any]) -> dict[str, Any]:
    return {_NAMES.get(key, key): value for key, value in values.items()}


def _by_type(values: Mapping[str, Any]) -> dict[Any, dict[str, Any]]:
    typed: dict[Any, dict[str, Any]] = {}
    for name, by_type in values.items():
        for of, array in (by_type or {}).items():
            typed.setdefault(of, {})[name.removesuffix("_dict")] = array
    return {of: _renamed(arrays) for of, arrays in typed.items()}


@contextlib.contextmanager
def _arrays_loadable() -> Iterator[None]:
    """In the ``with`` block, let ``torch.load`` unpickle numpy arrays, but no other objects."""
    import torch

    # ogb pickles with protocol 4, which ``torch.load(weights_only=True)`` cannot read.
    module: Any = types.ModuleType("arrays_only")
    module.Unpickler = _ArrayUnpickler
    module.load = lambda file, **options: _ArrayUnpickler(file, **options).load()
    load = functools.partial(torch.load, weights_only=False, pickle_module=module)
    with mock.patch.object(torch, "load", load):
        yield


class _ArrayUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module in _NUMPY_MODULES and name in _NUMPY_ONLY:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"Unsupported: {module}.{name}; a file of ogb may contain only numpy arrays")
