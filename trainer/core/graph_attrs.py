"""Attributes of a whole graph: their names, texts as uint8 arrays, and links that are held out of the edges."""

from __future__ import annotations

import re
from collections.abc import Collection, Container, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from trainer.core.arrays import Array
from trainer.core.schema import EdgeType, type_name

#: Last word of graph attributes with the names of the key columns of a task table, after the name of its node type.
KEY_COLUMNS = "key_columns"

CATEGORIES = "categories"  #: last word of graph attributes with the texts of codes, uint8 [number of codes, bytes]

CLASSES = "y__classes"  #: the number of classes of edges, after the name of their type; int64 [1]

VAL_LINKS, TEST_LINKS = "val_links", "test_links"  #: held-out links, int64 [2, n], original ids

VAL_TIMES, TEST_TIMES = "val_link_times", "test_link_times"  #: their times, int64 [n]

VAL_TYPES, TEST_TYPES = (
    "val_link_types",
    "test_link_types",
)  #: with several types: rows of ``HELD_OUT``, int64 [n]

HELD_OUT = "held_out_type"  #: edge types of the held-out links, uint8 [types, bytes] (``encode_texts``)

HELD_OUT_TIME = "held_out_time"  #: name of the edge attribute of the times, as ``HELD_OUT``


def attr_name(column: str) -> str:
    """Return the attribute that a column of a table becomes: other characters than ``A-Za-z0-9_.-`` become ``_``."""
    return re.sub(r"^(?![A-Za-z_])", "_", re.sub(r"[^A-Za-z0-9_.-]+", "_", column))[:100]


def key_attr(column: str) -> str:
    """Return the attribute with a column of the key of a task table's rows."""
    return re.sub("_(idx|mask)$", r"_\1_", f"key_{attr_name(column)}")  # as which it would be the nodes of a split


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


def silent_types(
    named: Sequence[EdgeType], known: Collection[EdgeType], graph_attrs: Container[str]
) -> list[EdgeType]:  # fmt: skip
    """Return the edge types that carry no messages: ``named`` ones, and those from the rows of task tables.

    ``known``: all edge types. ``graph_attrs``: names of the attributes of the graph.
    """
    return [*named, *(of for of in known if is_task_table(of[0], graph_attrs))]


def held_out_links(graph_attrs: Mapping[str, Array], of: EdgeType, split: str) -> tuple[Array | None, Array | None]:
    """Return the held-out links of an edge type, int64 [2, n], and their times, int64 [n]; None where there are none.

    ``graph_attrs``: those of the graph. ``split``: val or test.
    """
    val = split == "val"
    links, times = graph_attrs.get(VAL_LINKS if val else TEST_LINKS), graph_attrs.get(VAL_TIMES if val else TEST_TIMES)
    types = graph_attrs.get(VAL_TYPES if val else TEST_TYPES)
    names = held_out_names(graph_attrs)
    if links is None or types is None:
        return (links, times) if not names or type_name(of) in names else (None, None)
    own = np.asarray(types) == (names.index(type_name(of)) if type_name(of) in names else -1)
    return np.asarray(links)[:, own], None if times is None else np.asarray(times)[own]


def held_out_names(graph_attrs: Mapping[str, Array]) -> list[str]:
    """Return the names of the edge types of which links are held out."""
    return decode_texts(np.asarray(graph_attrs[HELD_OUT])) if HELD_OUT in graph_attrs else []
