"""PyG's ``Data``: from a .pt file, and from ``torch_geometric.datasets``."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trainer.arrays import Array
from trainer.data.build import RawGraph
from trainer.errors import DataError

DOWNLOADS = "datasets"  #: default download folder


def read_pt(path: Path) -> RawGraph:
    """A ``Data`` object, its ``to_dict()``, or a one-graph ``InMemoryDataset`` file.

    Only tensors and PyG's own classes are unpickled (``weights_only``): anything else is a ``DataError``.
    """
    import torch

    try:
        with torch.serialization.safe_globals(_safe_globals()):
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, AttributeError) as error:
        raise DataError(
            f"{path} cannot be loaded safely ({first_line(error)}); where you trust the file, load it "
            "yourself and re-save plain tensors: torch.save({key: data[key] for key in data.keys()}, path)"
        ) from error
    return raw_graph(path.stem, _mapping(loaded, path), str(path))


def first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if "Unsupported" in line] or str(error).splitlines()
    return lines[0].strip()[:200] if lines else type(error).__name__


def _safe_globals() -> list[Any]:
    from torch_geometric.data.data import Data, DataEdgeAttr, DataTensorAttr
    from torch_geometric.data.storage import BaseStorage, EdgeStorage, GlobalStorage, NodeStorage

    return [Data, DataEdgeAttr, DataTensorAttr, BaseStorage, EdgeStorage, GlobalStorage, NodeStorage]


def _mapping(loaded: Any, path: Path) -> Mapping[str, Any]:
    """The one graph in what was loaded; ``InMemoryDataset`` saves (data, slices[, class])."""
    if isinstance(loaded, tuple):
        if len(loaded) < 2 or loaded[1] is not None:
            raise DataError(f"{path} holds a collection of graphs; one graph is expected")
        loaded = loaded[0]
    if isinstance(loaded, Mapping):
        return loaded
    if not hasattr(loaded, "to_dict") or hasattr(loaded, "node_types"):
        raise DataError(f"{path} holds a {type(loaded).__name__}; expected a torch_geometric Data with edge_index")
    return dict(loaded.to_dict())


def raw_graph(name: str, values: Mapping[str, Any], place: str) -> RawGraph:
    if "adj_t" in values and values.get("edge_index") is None:
        raise DataError(f"{place}: the graph is stored as adj_t; re-save it with edge_index (before T.ToSparseTensor)")
    arrays = {key: array for key, value in values.items() if (array := _array(value)) is not None}
    places = {key: f"{place} [{key}]" for key in arrays}
    num_nodes = values.get("num_nodes")
    return RawGraph(name, arrays, places, None if num_nodes is None else int(num_nodes))


def _array(value: Any) -> Array | None:
    """A tensor or array as numpy, sharing memory; None for anything else (num_nodes, names, …)."""
    if isinstance(value, np.ndarray):
        return value
    if hasattr(value, "detach") and hasattr(value, "numpy"):
        tensor = value.detach()
        return np.asarray(tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor)
    return None


def read_pyg(name: str, source: str | None) -> RawGraph:
    """``Planetoid:Cora``, ``KarateClub``, …: class of ``torch_geometric.datasets`` and its ``name``.

    ``source`` is the download folder. Raises ``DataError`` when it cannot be had, or is not one graph.
    """
    with reported(name, source):
        dataset = _pyg_dataset(name, source)
        data, size = dataset[0], len(dataset)
    if size != 1:
        raise DataError(f"dataset {name} holds {size} graphs; one graph is expected")
    if hasattr(data, "node_types"):
        raise DataError(f"dataset {name} is heterogeneous; one node type is expected")
    return raw_graph(name, data.to_dict() | {"num_nodes": data.num_nodes}, f"dataset {name}")


def _pyg_dataset(name: str, source: str | None) -> Any:
    import torch_geometric.datasets as catalogue

    class_name, _, variant = name.partition(":")
    kind = getattr(catalogue, class_name, None)
    if kind is None:
        nearest = difflib.get_close_matches(class_name, catalogue.__all__, 1)
        hint = f"did you mean {nearest[0]!r}?" if nearest else "see torch_geometric.datasets"
        raise DataError(f"unknown dataset {name!r}; {hint} (also there: synthetic, file, ogbn-…)")
    takes = inspect.signature(kind.__init__).parameters
    if "name" in takes and not variant:
        raise DataError(f"dataset {name}: {class_name} has several graphs; write {class_name}:<name>")
    given = {"root": str(Path(source or DOWNLOADS) / class_name), "name": variant}
    return kind(**{key: value for key, value in given.items() if key in takes})


@contextlib.contextmanager
def reported(name: str, source: str | None) -> Iterator[None]:
    """Whatever a download or third-party reader raises (ogb also exits, and asks on stdin), as ``DataError``."""
    try:
        yield
    except DataError:
        raise
    except (Exception, SystemExit) as error:
        raise DataError(
            f"dataset {name} cannot be downloaded or read ({type(error).__name__}: {first_line(error)}); check the "
            f"network, or put the files under {source or DOWNLOADS} yourself (source: names that folder)"
        ) from error
