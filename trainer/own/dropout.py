"""Dropout of any model with masks that do not depend on the number of ranks.

``KeyedDropout`` takes the place of ``torch.nn.functional.dropout``, which ``torch.nn.Dropout`` and torch_geometric's
layers call, while a model runs. Which nodes or edges the rows of a call belong to is found once, on a test batch in
which all numbers of nodes and edges differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from trainer.core.schema import EdgeType, NodeType
from trainer.nn.kernels.dropout import hash_dropout

#: What the rows of a tensor belong to: nodes of a type up to a hop, or edges of a type in a layer.
RowsOf: TypeAlias = tuple[str, NodeType | EdgeType, int]


class KeyedDropout(TorchFunctionMode):
    """Draws dropout masks from the batch's key and the ids of the rows.

    Args:
        rows: What rows can belong to, with their number, and a function that returns their ids, int64 [rows].
        key: Random key of the batch.
        known: What the rows of each call belong to, as ``found`` of the test batch; None: this is the test batch.
    """

    def __init__(
        self, rows: Mapping[RowsOf, tuple[int, Callable[[], Tensor]]], key: int, known: list[RowsOf | None] | None
    ):  # fmt: skip
        super().__init__()
        self.rows, self.key, self.known = rows, key, known
        self.found: list[RowsOf | None] = []  #: what the rows of each call belong to; None: nothing known

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.dropout:
            return self._dropout(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _dropout(self, rows: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0:
            return rows
        number = len(self.found)
        of = self._of(number, len(rows) if rows.dim() else 0)
        self.found.append(of)
        if of is None or p >= 1 or not rows.is_floating_point():
            return functional.dropout(rows, p, True)
        flat = rows.flatten(1).contiguous() if rows.dim() > 1 else rows[:, None]
        return hash_dropout(flat, self.rows[of][1](), p, self.key, number, True).reshape(rows.shape)

    def _of(self, number: int, count: int) -> RowsOf | None:
        if self.known is None or number >= len(self.known):
            return next((of for of, (rows, _) in self.rows.items() if rows == count), None)
        of = self.known[number]
        return of if of is not None and of in self.rows and self.rows[of][0] == count else None
