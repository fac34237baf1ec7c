"""Names of node and edge types, in memory as torch_geometric writes them and on disk.

A homogeneous graph is one node type ``HOMO_NODE`` and one edge type ``HOMO_EDGE``; whether a graph
is meant to be heterogeneous is written in its manifest, not guessed from the number of types.
"""

from __future__ import annotations

import functools
import hashlib
import re

from trainer.core.errors import DataError

NodeType = str

EdgeType = tuple[str, str, str]  #: (source type, relation, target type)

AnyType = NodeType | EdgeType

HOMO_NODE: NodeType = "node"

HOMO_EDGE: EdgeType = (HOMO_NODE, "to", HOMO_NODE)

_WORD = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.+-]|_(?!_))*")  #: type names become folder names, joined by ``__``


def type_name(of: AnyType) -> str:
    """The folder and JSON name: ``paper``, ``author__writes__paper``."""
    return of if isinstance(of, str) else "__".join(of)


def type_of(name: str) -> AnyType:
    """The type with this folder name. Raises ``DataError`` for a name that is none."""
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


@functools.cache
def edge_salt(edge_type: EdgeType) -> int:
    """uint64 that sets the draws of one edge type apart; 0 for a homogeneous graph's."""
    if edge_type == HOMO_EDGE:
        return 0
    return int.from_bytes(hashlib.sha256(type_name(edge_type).encode()).digest()[:8], "little")
