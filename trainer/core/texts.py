"""Converts texts to uint8 arrays, which are stored and gathered like numeric attributes, and back."""

from __future__ import annotations

from collections.abc import Container, Sequence

import numpy as np
import numpy.typing as npt

#: Last word of graph attributes with the names of the key columns of a task table, after the name of its node type.
KEY_COLUMNS = "key_columns"

CATEGORIES = "categories"  #: last word of graph attributes with the texts of codes, uint8 [number of codes, bytes]


def encode_texts(texts: Sequence[str], width: int | None = None) -> npt.NDArray[np.uint8]:
    """Return the UTF-8 bytes of each text in a row, uint8 [n, width], padded with zeros.

    ``width``: bytes per row. Default: the length of the longest text, at least 1.
    """
    rows = np.array([text.encode() for text in texts], dtype=f"S{width}" if width else "S")
    return rows.view(np.uint8).reshape(len(rows), rows.dtype.itemsize)


def decode_texts(rows: npt.ArrayLike) -> list[str]:
    """Return the texts in rows of bytes, such as the ids and categories of a graph made from CSV or Parquet tables.

    Args:
        rows: uint8 [n, width], array or CPU tensor: UTF-8 bytes, padded with zeros.

    Returns:
        n texts.

    Example:
        ```python
        import numpy as np
        import gnnfleet as gf

        gf.decode_texts(np.array([[97, 49, 0], [98, 50, 51]], np.uint8))  # ['a1', 'b23']
        ```
    """
    whole = np.ascontiguousarray(rows, np.uint8)
    return [text.decode() for text in whole.view(f"S{whole.shape[1]}").reshape(len(whole)).tolist()]


def is_task_table(node_type: str, graph_attrs: Container[str]) -> bool:
    """Return whether the nodes of a type are rows of a task table: they only receive messages, from their entities.

    ``graph_attrs``: names of the attributes of the graph.
    """
    return f"{node_type}__{KEY_COLUMNS}" in graph_attrs
