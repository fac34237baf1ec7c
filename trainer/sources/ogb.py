"""Reads the homogeneous ``ogbn-*`` graphs and ogbn-mag through the package ogb."""

from __future__ import annotations

import builtins
import contextlib
import functools
import io
import sys
from collections.abc import Mapping
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


def read_ogb(name: str, source: str | None) -> RawGraph:
    """Download an ``ogbn-*`` graph to the folder ``source``, unless it is there, and read it.

    Raises ``DataError`` when ogb is not installed or the download fails.
    """
    try:
        from ogb.nodeproppred import NodePropPredDataset
    except ImportError:
        raise DataError(f"dataset {name} needs the package ogb; install it: pip install ogb") from None
    import torch

    # ogb pickles with protocol 4, which ``torch.load`` cannot read by default; ``errors_as_data_error`` refuses code
    load = mock.patch.object(torch, "load", functools.partial(torch.load, weights_only=False))

    def ask(question: str = "") -> str:
        """Show a question of ogb, such as before downloads of more than 1 GB: its lines on stdout are hidden."""
        print(f"ogb: {question}", end="", file=sys.stderr, flush=True)
        answer = sys.stdin.readline()
        if not answer:
            raise DataError(
                f"dataset {name}: ogb asks: {question.strip()!r}; download it once in a terminal, where you can answer"
            )
        return answer.strip()

    asking = mock.patch.object(builtins, "input", ask)
    with errors_as_data_error(name, source), load, asking, contextlib.redirect_stdout(io.StringIO()):
        dataset = NodePropPredDataset(name, root=source or DOWNLOADS)
        graph, labels = dataset[0]
        splits = dataset.get_idx_split()
    values = {**graph, "labels": labels, **{f"{split}_idx": ids for split, ids in splits.items()}}
    if graph.get("edge_index") is not None:
        return raw_graph(name, _renamed(values), f"dataset {name}")
    typed: dict[Any, dict[str, Any]] = {}
    for key, by_type in values.items():
        for of, array in (by_type or {}).items():
            typed.setdefault(of, {})[key.removesuffix("_dict")] = array
    return raw_graph(name, {of: _renamed(arrays) for of, arrays in typed.items()}, f"dataset {name}")


def _renamed(values: Mapping[str, Any]) -> dict[str, Any]:
    return {_NAMES.get(key, key): value for key, value in values.items()}
