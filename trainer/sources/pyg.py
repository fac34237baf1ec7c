"""Reads PyG's ``Data`` and ``HeteroData`` from a .pt file or from ``torch_geometric.datasets``.

In the readers of other packages, nothing is unpickled that could run code (``errors_as_data_error``).
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import pickle
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from trainer.core.errors import DataError
from trainer.core.memory import check_unpacked
from trainer.core.schema import HOMO_NODE, EdgeType, NodeType
from trainer.data.memory import shared_array
from trainer.data.options import OWN_DATASETS
from trainer.data.raw_arrays import RawArray, RawGraph

DOWNLOADS = "datasets"  #: default download folder


def read_pt(path: Path) -> RawGraph:
    """Read a graph from a .pt file: ``Data``, ``HeteroData``, their ``to_dict()``, or a saved ``InMemoryDataset``.

    Only tensors and PyG's own classes are unpickled (``weights_only``). Raises ``DataError`` for other content and for
    several graphs.
    """
    import torch

    try:
        check_unpacked(path, "save its tensors as .npy files, which need no memory")
        with safe_unpickling():
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except DataError:
        raise
    except Exception as error:  # torch raises many types of exceptions for damaged files
        refused = re.search(r"GLOBAL (\S+) was not an allowed", str(error))
        why = f"it holds {refused[1]}, which is neither a tensor nor a graph" if refused else first_line(error)
        raise DataError(
            f"{path} cannot be loaded safely; if you trust the file, load it yourself and re-save plain tensors: "
            f"torch.save(data.to_dict(), path) ({why})"
        ) from error
    if isinstance(loaded, tuple):  # (data, slices[, class]), as ``InMemoryDataset`` saves it
        if len(loaded) < 2 or loaded[1] is not None:
            raise DataError(f"{path} holds a collection of graphs; one graph is expected")
        loaded = loaded[0]
    if not isinstance(loaded, Mapping):
        if not hasattr(loaded, "to_dict"):
            raise DataError(f"{path} holds a {type(loaded).__name__}; expected a torch_geometric Data or HeteroData")
        loaded = dict(loaded.to_dict())
    return raw_graph(path.stem, loaded, str(path))


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message that contains ``Unsupported``, or else the first line.

    The line is cut to 200 characters. If the message is empty, returns the type of the error.
    """
    lines = [line for line in str(error).splitlines() if "Unsupported" in line] or str(error).splitlines()
    return lines[0].strip()[:200] if lines else type(error).__name__


@contextlib.contextmanager
def safe_unpickling() -> Iterator[None]:
    """In the ``with`` block, allow ``torch.load(weights_only=True)`` to unpickle ``Data`` and ``HeteroData``.

    A ``defaultdict`` in them is loaded as a plain dict.
    """
    from torch import serialization
    from torch_geometric.data.data import Data, DataEdgeAttr, DataTensorAttr
    from torch_geometric.data.hetero_data import HeteroData
    from torch_geometric.data.storage import AttrType, BaseStorage, EdgeStorage, GlobalStorage, NodeStorage

    storages = [BaseStorage, EdgeStorage, GlobalStorage, NodeStorage]
    own = [Data, HeteroData, DataEdgeAttr, DataTensorAttr, *storages, AttrType, _plain_dict]
    before = serialization.get_safe_globals()  # includes torch_geometric's; restored afterwards
    try:
        serialization.clear_safe_globals()
        serialization.add_safe_globals([*(known for known in before if known is not defaultdict), *own])
        yield
    finally:
        serialization.clear_safe_globals()
        serialization.add_safe_globals(before)


def _plain_dict(factory: object = None) -> dict[Any, Any]:
    return {}


# torch looks up safe globals by these names; passing the pair (function, name) instead needs torch 2.6.
_plain_dict.__module__, _plain_dict.__name__, _plain_dict.__qualname__ = "collections", *["defaultdict"] * 2


def raw_graph(name: str, values: Mapping[Any, Any], place: str) -> RawGraph:
    """Make a ``RawGraph`` from ``Data.to_dict()`` or ``HeteroData.to_dict()``.

    ``place``: the file or dataset, for messages.
    """
    counts: dict[NodeType, int] = {}
    if "_global_store" not in values and not any(isinstance(key, tuple) for key in values):
        if values.get("num_nodes") is not None:
            counts = {HOMO_NODE: _count(values["num_nodes"], place)}
        arrays, notes = _raw_arrays(values, place)
        return RawGraph(name, arrays, num_nodes=counts, notes=tuple(notes))

    plain: dict[str, RawArray] = {}
    nodes: dict[NodeType, dict[str, RawArray]] = {}
    edges: dict[EdgeType, dict[str, RawArray]] = {}
    all_notes = []
    for key, content in values.items():
        if not isinstance(content, Mapping):
            continue
        if not isinstance(key, str) and not (isinstance(key, tuple) and [*map(type, key)] == [str] * 3):
            raise DataError(
                f"{place}: {key!r:.80} is neither a node type, a text, nor an edge type (source, relation, target)"
            )
        label = "__".join(key) if isinstance(key, tuple) else key
        arrays, notes = _raw_arrays(content, place if key == "_global_store" else f"{place} [{label}]")
        all_notes += notes
        if key == "_global_store":
            plain = arrays
        elif isinstance(key, tuple):
            edges[key] = arrays
        else:
            nodes[key] = arrays
            if content.get("num_nodes") is not None:
                counts[key] = _count(content["num_nodes"], f"{place} [{label}]")
    return RawGraph(name, plain, nodes, edges, counts, hetero=True, notes=tuple(all_notes))


def _count(value: Any, place: str) -> int:
    """Return a number of nodes that a file states. Raises ``DataError`` if it is none."""
    with contextlib.suppress(TypeError, ValueError, OverflowError, RuntimeError):  # such as a tensor of two numbers
        if int(value) == value and 0 <= int(value) < 1 << 63:
            return int(value)
    raise DataError(f"{place}: num_nodes is {str(value)[:80]!r}, expected the number of nodes")


def _raw_arrays(values: Mapping[Any, Any], place: str) -> tuple[dict[str, RawArray], list[str]]:
    """Return the tensors and arrays by name, and a note on each omitted tensor.

    A tensor is omitted if numpy lacks its dtype or layout, or if it has no values.
    """
    if "adj_t" in values and values.get("edge_index") is None:
        raise DataError(f"{place}: the graph is stored as adj_t; re-save it with edge_index (before T.ToSparseTensor)")
    import torch

    arrays, notes = {}, []
    for key, value in values.items():
        where = f"{place} [{key}]"
        if not isinstance(key, str) and isinstance(value, np.ndarray | torch.Tensor):
            raise DataError(f"{where}: the name of an array must be a text")
        if isinstance(value, np.ndarray):
            arrays[key] = RawArray(value, where)
        elif isinstance(value, torch.Tensor):
            try:
                arrays[key] = RawArray(shared_array(value), where, value.dtype == torch.bfloat16)
            except (TypeError, RuntimeError) as error:  # such as a sparse one, or one of device meta
                notes.append(f"{where}: left out, {first_line(error)}")
    return arrays, notes


def read_pyg(name: str, source: str | None) -> RawGraph:
    """Read a dataset of ``torch_geometric.datasets``.

    ``name``: its class, such as ``KarateClub``, or class and name, such as ``Planetoid:Cora``. ``source``: the download
    folder. Raises ``DataError`` when the dataset cannot be downloaded, or is not one graph.
    """
    from torch_geometric.data import HeteroData

    with errors_as_data_error(name, source):
        import torch_geometric.datasets as catalogue

        class_name, _, variant = name.partition(":")
        kind = getattr(catalogue, class_name, None)
        if kind is None:
            nearest = difflib.get_close_matches(class_name, [*catalogue.__all__, *OWN_DATASETS], 1)
            hint = f"did you mean {nearest[0]!r}?" if nearest else "see torch_geometric.datasets"
            raise DataError(f"unknown dataset {name!r}; {hint} (or synthetic, synthetic-hetero, file, ogbn-…)")
        parameters = inspect.signature(kind.__init__).parameters
        if "name" in parameters and not variant:
            raise DataError(f"dataset {name}: {class_name} has several graphs; choose one as {class_name}:<name>")
        given = {"root": str(Path(source or DOWNLOADS) / class_name), "name": variant}
        dataset = kind(**{key: value for key, value in given.items() if key in parameters})
        data, size = dataset[0], len(dataset)
    if size != 1:
        raise DataError(f"dataset {name} holds {size} graphs; one graph is expected")
    values = data.to_dict()
    if not isinstance(data, HeteroData):
        values["num_nodes"] = data.num_nodes
    return raw_graph(name, values, f"dataset {name}")


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

_blocks = 0  #: number of ``with`` blocks of ``_only_harmless_pickles`` that are open
_hooked = False


class _UnsafePickle(pickle.UnpicklingError):
    """A pickle has an object of another class than arrays and graphs."""


@contextlib.contextmanager
def _only_harmless_pickles() -> Iterator[None]:
    """In the ``with`` block, let this process unpickle only numbers, texts, arrays, tensors and graphs.

    Applies to pickle, and so to numpy's ``allow_pickle``, ``torch.load`` and pandas, whoever calls them in any thread.
    Other content raises ``_UnsafePickle`` before anything in it is executed.
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
            raise _UnsafePickle(f"Unsupported: {module}.{name}")


@contextlib.contextmanager
def errors_as_data_error(name: str, source: str | None) -> Iterator[None]:
    """In the ``with`` block, run the reader of another package: let it unpickle nothing that could run code.

    All exceptions become a ``DataError``, also ``SystemExit``, which ogb raises.
    """
    import torch

    refused = _UnsafePickle("Unsupported: a TorchScript archive")
    try:
        with _only_harmless_pickles(), mock.patch.object(torch.jit, "load", side_effect=refused):
            yield
    except DataError:
        raise
    except _UnsafePickle as error:
        raise DataError(
            f"dataset {name}: a file in {source or DOWNLOADS} is refused, as reading it could run code ({error}). "
            "Delete the folder, so that the files are downloaded again. If you trust them, save the graph yourself by "
            "torch.save(data.to_dict(), FILE), and use dataset file"
        ) from error
    except (Exception, SystemExit) as error:
        raise DataError(
            f"dataset {name} cannot be downloaded or read ({type(error).__name__}: {first_line(error)}); check the "
            f"network, or put the files into {source or DOWNLOADS} (or set `source` to the folder that holds them)"
        ) from error
