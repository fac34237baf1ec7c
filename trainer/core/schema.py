"""Node and edge types, written as in torch_geometric, and their names on disk.

A homogeneous graph has one node type, ``HOMO_NODE``, and one edge type, ``HOMO_EDGE``.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Collection
from typing import TYPE_CHECKING

from trainer.core.errors import DataError

if TYPE_CHECKING:
    from typing_extensions import TypeIs

NodeType = str

EdgeType = tuple[str, str, str]  #: (source type, relation, target type)

AnyType = NodeType | EdgeType

LinkTypes = tuple[EdgeType, ...]  #: edge types whose links are predicted together

HOMO_NODE: NodeType = "node"  #: the node type of a homogeneous graph

HOMO_EDGE: EdgeType = (HOMO_NODE, "to", HOMO_NODE)  #: the edge type of a homogeneous graph

_WORD = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.+-]|_(?!_))*")  #: without ``__``, which joins the words of a type name

#: characters of a type's or attribute's name: file names have at most 255 with what stands before and behind it
LONGEST_NAME = 180


def type_name(of: AnyType) -> str:
    """Return the name of a node or edge type in folders and JSON, such as ``paper``, ``author__writes__paper``."""
    return of if isinstance(of, str) else "__".join(of)


def type_of(name: str) -> AnyType:
    """Parse the name of a node or edge type as folders and JSON files have it.

    Args:
        name: ``paper`` or ``author__writes__paper``.

    Returns:
        The node type (str) or the edge type (source type, relation, target type).

    Raises:
        DataError: The name is not of this form, or has other characters than letters, digits, ``.``, ``+``, ``-`` and
            single ``_``.

    Example:
        ```python
        import gnnfleet as gf

        source, relation, target = gf.type_of("author__writes__paper")
        ```
    """
    words = name.split("__")
    for word in words:
        check_word(word, name)
    if len(words) == 1:
        return name
    if len(words) != 3:
        raise DataError(f"{name!r} is neither a node type nor source__relation__target")
    return words[0], words[1], words[2]


def check_word(word: str, where: str) -> None:
    """Raise ``DataError`` unless ``word`` can name a node type or relation."""
    if not _WORD.fullmatch(word) or word.endswith("_"):
        raise DataError(
            f"{where}: {word!r} cannot name a node type or relation; use letters, digits, '.', '+', '-' and single '_'"
        )
    if len(word) > LONGEST_NAME:
        raise DataError(f"{where}: {word[:20]}… has {len(word)} characters; types can have at most {LONGEST_NAME}")


def target_name(of: AnyType | LinkTypes) -> str:
    """Return the name of what is predicted: that of a type, or those of several edge types, joined by commas."""
    return ",".join(map(type_name, of)) if is_link_types(of) else type_name(of)  # type: ignore[arg-type]


def is_link_types(of: AnyType | LinkTypes) -> TypeIs[LinkTypes]:
    return not isinstance(of, str) and isinstance(of[0], tuple)


def link_types(of: EdgeType | LinkTypes) -> LinkTypes:
    """Return the edge types of links: several, or one as a tuple of its own."""
    return of if is_link_types(of) else (of,)


def seed_types(of: AnyType | LinkTypes) -> tuple[NodeType, ...]:
    """Return the node types of the seeds for what is predicted: a node type, or the ends of links, targets first."""
    return (of,) if isinstance(of, str) else tuple(dict.fromkeys(end for each in link_types(of) for end in each[::-2]))


def reverse_type(edge_type: EdgeType, known: Collection[EdgeType]) -> EdgeType | None:
    """Return the type of the reverse edges of ``edge_type``, or None if it is not among ``known``, all edge types.

    For a relation ``r`` this is ``rev_r``, and for ``rev_r`` it is ``r``, if the graph has that type. Otherwise it is
    ``edge_type`` itself if sources and targets have the same node type.
    """
    source, relation, target = edge_type
    named = relation.removeprefix("rev_") if relation.startswith("rev_") else f"rev_{relation}"
    if (target, named, source) in known:
        return target, named, source
    return edge_type if source == target else None


def types_with_messages(known: Collection[EdgeType], silent: Collection[EdgeType]) -> list[EdgeType]:
    """Return the edge types of ``known``, all edge types, except ``silent`` ones and their reverses."""
    left_out = {each for of in silent for each in (of, reverse_type(of, known))}
    return [of for of in known if of not in left_out]


@functools.cache
def edge_salt(edge_type: EdgeType) -> int:
    """Return a uint64 that depends only on the edge type; 0 for ``HOMO_EDGE``.

    Combined with a random key, it makes the draws of different edge types independent.
    """
    if edge_type == HOMO_EDGE:
        return 0
    return int.from_bytes(hashlib.sha256(type_name(edge_type).encode()).digest()[:8], "little")


@functools.cache
def node_salt(node_type: NodeType) -> int:
    """Return a uint64 hash of the node type; 0 for the type of a homogeneous graph.

    Callers combine it with a batch's key by xor, so that node types have different draws and dropout masks.
    """
    if node_type == HOMO_NODE:
        return 0
    return int.from_bytes(hashlib.sha256(node_type.encode()).digest()[:8], "little")
