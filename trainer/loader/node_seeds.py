"""Converts the argument ``input_nodes`` of a loader to the global ids of the seeds."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trainer.core.arrays import Array, Ids
from trainer.core.errors import SettingsError
from trainer.core.schema import HOMO_NODE, NodeType
from trainer.graph.open import Graph


@dataclass(frozen=True)
class _TypeInputs:
    nodes: Ids  #: int64 [n] global ids
    input_id: Ids | None  #: int64 [n] ids that batches report; None: the seeds' positions
    times: Ids | None = None  #: int64 [n], if given by the caller


@dataclass(frozen=True)
class _NodeInputs:
    """The seeds of a loader, by node type.

    The *position* of a seed is its index when the seeds of all types are concatenated.
    """

    of: Mapping[NodeType, _TypeInputs]

    def __len__(self) -> int:
        return sum(len(inputs.nodes) for inputs in self.of.values())

    def split(self, positions: Ids) -> dict[NodeType, tuple[Ids, Ids]]:
        """Split seed positions by node type.

        Returns two arrays for each node type. The first has the indices of those elements of ``positions`` that are
        seeds of the type. The second has the indices of these seeds among all seeds of the type.
        """
        begin, found = 0, {}
        for of, inputs in self.of.items():
            rows = np.flatnonzero((positions >= begin) & (positions < begin + len(inputs.nodes)))
            found[of] = (rows, positions[rows] - begin)
            begin += len(inputs.nodes)
        return found

    def digest(self) -> str:
        total = hashlib.sha256()
        for of, inputs in self.of.items():
            total.update(f"{of} {len(inputs.nodes)}".encode())
            for array in (inputs.nodes, inputs.times):
                total.update(b"" if array is None else np.ascontiguousarray(array).data)
        return total.hexdigest()


def node_inputs(graph: Graph, input_nodes: Any, input_time: Any = None, input_id: Any = None) -> _NodeInputs:
    """Return the seeds that ``input_nodes`` describes.

    Homogeneous graph: None (all nodes), ids, a boolean mask, or the name of a split. Heterogeneous graph: a node type,
    (type, None | ids | mask | split), or a mapping of types to these. ``input_time``, ``input_id``: times of the seeds
    and ids that batches report, as in ``DistNeighborLoader``. Raises ``SettingsError``.
    """
    forms = _forms(graph, input_nodes)
    is_mapping = isinstance(input_nodes, Mapping)
    found = {}
    for of, form in forms.items():
        inputs = _inputs(graph, of, form)
        times, ids = (
            given.get(of) if is_mapping and isinstance(given, Mapping) else given for given in (input_time, input_id)
        )
        found[of] = _TypeInputs(
            inputs.nodes,
            inputs.input_id if ids is None else _per_seed("input_id", of, ids, len(inputs.nodes)),
            None if times is None else _per_seed("input_time", of, times, len(inputs.nodes)),
        )
    return _NodeInputs(found)


def split_name(input_nodes: Any) -> str | None:
    """Return the name of the split if ``input_nodes`` is a string or a pair ``(type, string)``, else None.

    A single string is returned even if it is a node type.
    """
    if isinstance(input_nodes, tuple) and len(input_nodes) == 2:
        input_nodes = input_nodes[1]
    return input_nodes if isinstance(input_nodes, str) else None


def _forms(graph: Graph, given: Any) -> dict[NodeType, Any]:
    types = list(graph.manifest.nodes)
    if not graph.manifest.hetero:
        if isinstance(given, Mapping) or _is_typed(given):
            raise SettingsError("input_nodes names a node type, but the graph is homogeneous; pass the seeds alone")
        return {HOMO_NODE: given}
    if isinstance(given, Mapping):
        forms = dict(given)
    elif isinstance(given, str):
        forms = {given: None}
    elif _is_typed(given):
        forms = {given[0]: given[1]}
    else:
        raise SettingsError(f"the graph is heterogeneous: pass input_nodes as (node type, seeds); types are {types}")
    for of in forms:
        if of not in types:
            split = of.removesuffix("_mask") if isinstance(given, str) else None
            meant = sorted(key for key in graph.store.splits if key[1] == split)
            hint = f"; did you mean {' or '.join(map(str, meant))}?" if meant else ""
            raise SettingsError(f"input_nodes: the graph has no node type {of!r}; types are {types}{hint}")
    return forms


def _is_typed(given: Any) -> bool:
    return isinstance(given, (tuple, list)) and len(given) == 2 and isinstance(given[0], str)


def _inputs(graph: Graph, of: NodeType, form: Any) -> _TypeInputs:
    if isinstance(form, str):
        if (of, form) not in graph.store.splits:
            known = sorted(name for node_type, name in graph.store.splits if node_type == of)
            # The mask ``train_mask`` of a dataset is the split ``train`` of a partition.
            nearest = difflib.get_close_matches(form.removesuffix("_mask"), known, 1)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
            raise SettingsError(f"input_nodes: {of!r} nodes have no split {form!r}; they have {known}{hint}")
        return _TypeInputs(graph.store.splits[of, form], None)
    num_nodes = graph.manifest.nodes[of].num_nodes
    if form is None:
        return _TypeInputs(graph.store.to_global(of, np.arange(num_nodes)), None)
    values = as_array(form)
    if values.dtype.kind == "b":
        if values.shape != (num_nodes,):
            raise SettingsError(f"input_nodes: mask has shape {list(values.shape)}, there are {num_nodes} {of!r} nodes")
        ids = np.flatnonzero(values)
        return _TypeInputs(graph.store.to_global(of, ids), ids)
    return _TypeInputs(graph.store.to_global(of, checked_ids(values, num_nodes, of, "input_nodes")), None)


def as_array(values: Any) -> Array:
    """Convert a tensor, array or list to a numpy array. Raises ``SettingsError`` for rows of different lengths."""
    if isinstance(values, torch.Tensor):
        plain = values.detach().cpu().as_subclass(torch.Tensor)
        return np.asarray((plain.float() if plain.dtype == torch.bfloat16 else plain).numpy())
    try:
        array = np.asarray(values)
    except ValueError as error:  # rows of different lengths
        raise SettingsError(f"expected numbers in a regular shape, not {type(values).__name__}: {error}") from None
    return array.astype(np.int64) if array.size == 0 and not isinstance(values, np.ndarray) else array


def checked_ids(values: Array, num_nodes: int, of: NodeType, where: str) -> Ids:
    """Return original node ids as int64.

    Raises ``SettingsError`` if they are not integers from 0 to ``num_nodes`` - 1. ``where``: name of the argument.
    """
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise SettingsError(
            f"{where}: {values.dtype} {list(values.shape)}; expected integer node ids [n]"
            f"{', or a boolean mask' if where == 'input_nodes' else ''}"
        )
    ids = values.astype(np.int64)
    bad = np.flatnonzero((ids < 0) | (ids >= num_nodes))
    if len(bad):
        raise SettingsError(
            f"{where}: {ids[bad[0]]} at position {bad[0]}, but ids of {of!r} nodes go from 0 to {num_nodes - 1}"
        )
    return ids


def _per_seed(name: str, of: NodeType, given: Any, count: int) -> Ids:
    if isinstance(given, Mapping):
        raise SettingsError(f"{name} is a mapping, but input_nodes is not; pass one array")
    values = as_array(given)
    if values.shape != (count,) or values.dtype.kind not in "iu":
        raise SettingsError(
            f"{name}: {values.dtype} {list(values.shape)} for {count} {of!r} seeds; expected whole numbers [{count}]"
        )
    return values.astype(np.int64)
